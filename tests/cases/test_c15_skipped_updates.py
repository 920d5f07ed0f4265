"""C15, C16: updates that must not happen happen on no rank, and what counts updates knows it."""

import pytest
import torch

from callbacks.checkpoint_retention import CheckpointRetention
from callbacks.grad_norm import GradNormMonitor
from tests.distributed.norm_jobs import (
    VectorToy,
    files_in,
    halving,
    nan_at,
    overflow_gpt,
    overflow_stock,
    resume,
    stop_after_nan,
)
from tests.distributed.toys import STRATEGIES, fit, precision_arguments


@pytest.mark.case("C15")
def test_c15_overflow_skips_weights_and_schedule_and_is_counted_across_a_restart(tmp_path):
    good, bad = torch.tensor([[3.0, 4.0]]), torch.tensor([[float("inf"), 1.0]])
    module, monitor = VectorToy(scheduler=halving), GradNormMonitor()
    precision = precision_arguments("16-mixed", None)
    trainer, _, record = fit(module, [bad, bad, bad, good, good], callbacks=[monitor], **precision)
    assert [m["optim/skipped_updates"] for m in record.metrics] == [1, 2, 3, 3, 3]
    assert [m["optim/nonfinite_updates"] for m in record.metrics] == [1, 2, 3, 3, 3]
    assert [m.get("optim/grad_norm") for m in record.metrics] == [None, None, None, 5.0, 5.0]
    assert [m["optim/loss_scale"] for m in record.metrics] == [1024, 512, 256, 128, 128]
    assert module.rates == [1.0, 1.0, 1.0, 1.0, 0.5]  # the rule: the rate moves on with updates that happened
    assert module.net.w.tolist() == [-4.5, -6.0]

    path = str(tmp_path / "five")
    trainer.save_checkpoint(path)
    again = VectorToy(scheduler=halving)
    _, _, record = fit(
        again,
        [good] * 7,
        callbacks=[GradNormMonitor()],
        ckpt_path=path,
        max_epochs=-1,
        max_steps=7,
        **precision_arguments("16-mixed", None),
    )
    assert record.metrics[-1]["optim/skipped_updates"] == 3
    assert again.rates[0] == 0.25


@pytest.mark.case("C15")
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_c15_overflow_on_one_rank_skips_weights_and_schedule_on_all(ranks2, strategy):
    answers = [overflow_stock(None)] if strategy is None else ranks2.run(overflow_stock, strategy)
    for got in answers:
        # 300 x 1,024, x 512 and x 256 are beyond fp16's 65,504; x 128 is not
        assert [m["optim/skipped_updates"] for m in got["metrics"]] == [1, 2, 3, 3, 3, 3]
        assert [m["optim/loss_scale"] for m in got["metrics"]] == [1024, 512, 256, 128, 128, 128]
        assert got["lr"] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.25]
        gradient = [300.0, 4.0] if strategy is None else [151.5, 4.0]
        assert got["weight"] == [-1.75 * g for g in gradient]  # rates 1, 1/2, 1/4
    assert all(got == answers[0] for got in answers)


@pytest.mark.case("C15")
@pytest.mark.parametrize("has_monitor", [True, False])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_c15_litgpt_counts_updates_that_happened_on_all_ranks(ranks2, strategy, has_monitor):
    arguments = (strategy, {1, 2, 4}, has_monitor)
    answers = [overflow_gpt(*arguments)] if strategy is None else ranks2.run(overflow_gpt, *arguments)
    for got in answers:
        assert got["update"] == [0, 0, 1, 1, 2, 3]
        tokens = 32 * len(answers)
        assert got["tokens"] == [0, 0, tokens, tokens, 2 * tokens, 3 * tokens]
        # a warmup of 4 updates, by updates that happened
        assert got["lr"] == pytest.approx([0.25e-3, 0.25e-3, 0.25e-3, 0.5e-3, 0.5e-3, 0.75e-3])
        if has_monitor:
            assert [m["optim/skipped_updates"] for m in got["metrics"]] == [1, 2, 2, 3, 3, 3]
            assert [m["optim/loss_scale"] for m in got["metrics"]] == [1024, 512, 256, 256, 128, 128]
    assert all(got == answers[0] for got in answers)


@pytest.mark.case("C16")
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_c16_nan_on_one_rank_is_skipped_by_all(ranks2, strategy):
    answers = (
        [nan_at(None, {3}, 5, bad_rank=0)]
        if strategy is None
        else ranks2.run(nan_at, strategy, {3}, 5, timeout_s=60)
    )
    for got in answers:
        assert (
            got["same"] and got["rates"]
        )  # AdamW's moments and the schedule too: as if update 3 had not been there
        assert got["norms"][2] is None and None not in got["norms"][:2] + got["norms"][3:]
        assert got["last"]["optim/skipped_updates"] == got["last"]["optim/nonfinite_updates"] == 1
        rank = 0 if strategy is None else 1
        assert "net.w" in got["fault"] and f"rank {rank}: [[{300 + rank}]]" in got["fault"]
    assert len({tuple(got["norms"]) for got in answers}) == 1


@pytest.mark.case("C16")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c16_run_stops_on_all_ranks_and_keeps_healthy_weights(ranks2, tmp_path, strategy):
    answers = ranks2.run(stop_after_nan, strategy, str(tmp_path), timeout_s=60)
    for message, update in answers:
        assert update == 6
        assert (
            "4 updates in a row" in message
            and "rank 1: [[601]]" in message
            and "healthy-step=6.ckpt" in message
        )
    assert "healthy-step=6.ckpt" in files_in(str(tmp_path)) and "step=2.ckpt" in files_in(str(tmp_path))
    at_two, healthy = (
        ranks2.run(resume, strategy, str(tmp_path / f))[0] for f in ("step=2.ckpt", "healthy-step=6.ckpt")
    )
    assert at_two == healthy == pytest.approx([-0.1 * (0.3 + 0.6), -0.1 * 0.8])


@pytest.mark.case("C16")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c16_checkpoint_retention_keeps_the_healthy_weights_as_its_latest(ranks2, tmp_path, strategy):
    for message, update in ranks2.run(stop_after_nan, strategy, str(tmp_path), retention=True, timeout_s=60):
        assert update == 6
        assert "rank 1: [[601]]" in message and "They are in the latest checkpoint." in message
    path = CheckpointRetention.resolve(str(tmp_path), "latest")
    assert "step-00000006" in str(path)
    assert ranks2.run(resume, strategy, str(path))[0] == pytest.approx([-0.1 * (0.3 + 0.6), -0.1 * 0.8])
