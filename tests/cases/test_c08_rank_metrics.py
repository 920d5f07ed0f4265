"""C08: every rank sees the same numbers, and a metric that only some ranks log is an error."""

import pytest

from tests.distributed.token_jobs import best_checkpoint, key_on_one_rank, synced_everywhere
from tests.distributed.toys import STRATEGIES


@pytest.mark.case("C08")
def test_c08_ranks_agree_on_loss_and_best_checkpoint(ranks2, tmp_path):
    (loss0, path0, score0), (loss1, path1, score1) = ranks2.run(best_checkpoint, str(tmp_path))
    assert loss0 == loss1 == pytest.approx(2.5, rel=1e-6)
    assert (path0, score0) == (path1, score1)
    assert path0.endswith("step=1.ckpt") and score0 == pytest.approx(2.5, rel=1e-6)


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    ("how", "when"),
    [
        ({}, "before update 1"),
        ({"on_step": False, "on_epoch": True}, "at the end of epoch 0"),
        ({"sync_dist": True}, "in the first training_step"),  # a hang without us
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c08_key_logged_on_one_rank_is_an_error(ranks2, strategy, how, when):
    for message in ranks2.run(key_on_one_rank, strategy, how, timeout_s=60.0):
        assert "{0: ['only_here']}" in message and "every rank" in message and when in message


@pytest.mark.case("C08")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c08_keys_logged_on_every_rank_are_averaged_as_ever(ranks2, strategy):
    assert ranks2.run(synced_everywhere, strategy) == [0.5, 0.5]
