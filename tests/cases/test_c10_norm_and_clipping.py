"""C10, C12, C13, W06: one norm, before clipping, without the loss scale, the same under every strategy."""

import pytest

from tests.distributed.norm_jobs import vectors_fit
from tests.distributed.toys import STRATEGIES

CLIPPED = pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.case("C10")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c10_global_norm_and_clipping_on_ranks(ranks2, strategy):
    for rows in ([[(3.0, 4.0)]] * 2, [[(6.0, 0.0)], [(0.0, 8.0)]]):
        for got in ranks2.run(vectors_fit, strategy, rows):
            assert got["norm"] == [pytest.approx(5.0, rel=1e-6)]
            assert got["applied"][0] == CLIPPED
            assert [-w for w in got["weight"]] == CLIPPED


@pytest.mark.case("C12")
@pytest.mark.parametrize("arguments", [{"clip_norm": 1.0}, {"clip_norm": None, "gradient_clip_val": 1.0}])
def test_c12_norm_before_clipping(arguments):
    got = vectors_fit(None, [[(3.0, 4.0)]], **arguments)
    assert got["points"] == [pytest.approx(5.0, rel=1e-6)]
    assert [-w for w in got["weight"]] == CLIPPED
    assert got["metrics"][0]["optim/clipped"] == got["metrics"][0]["optim/clip_fraction"] == 1.0
    assert got["metrics"][0]["optim/clip_coefficient"] == pytest.approx(0.2, rel=1e-5)


@pytest.mark.case("C12")
@pytest.mark.case("W06")
def test_c12_w06_clipping_acts_on_the_sum_of_the_window():
    got = vectors_fit(None, [[(3.0, 0.0), (0.0, 4.0)]], accumulate=2)
    assert got["points"] == [pytest.approx(2.5, rel=1e-6)]
    assert [-w for w in got["weight"]] == CLIPPED


@pytest.mark.case("C12")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c12_window_on_ranks(ranks2, strategy):
    for got in ranks2.run(vectors_fit, strategy, [[(3.0, 0.0), (0.0, 4.0)]] * 2, 2):
        assert got["norm"] == [pytest.approx(2.5, rel=1e-6)]
        assert [-w for w in got["weight"]] == CLIPPED


@pytest.mark.case("C12")
def test_c12_logged_without_clipping():
    got = vectors_fit(None, [[(3.0, 4.0)]], clip_norm=None)
    assert got["points"] == [pytest.approx(5.0, rel=1e-6)]
    assert [-w for w in got["weight"]] == pytest.approx([3.0, 4.0])
    assert got["metrics"][0]["optim/clipped"] == 0.0


@pytest.mark.case("C13")
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_c13_norm_without_the_loss_scale(ranks2, strategy):
    rows = [[(3.0, 4.0)]] * 2
    answers = (
        [vectors_fit(None, rows, precision="16-mixed")]
        if strategy is None
        else ranks2.run(vectors_fit, strategy, rows, precision="16-mixed")
    )
    for got in answers:
        assert got["norm"] == [pytest.approx(5.0, rel=1e-6)]
        assert got["metrics"][0]["optim/loss_scale"] == 1024.0
        assert [-w for w in got["weight"]] == CLIPPED
