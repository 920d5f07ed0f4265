"""C01, C02, C04, C06 and the worked values about them: tokens weigh alike, one point per update."""

import pytest
import torch

from callbacks.token_weighted_loss import TokenWeightedLoss
from tests.distributed.token_jobs import values_fit
from tests.distributed.toys import STRATEGIES, Toy, fit


@pytest.mark.case("C01")
def test_c01_unequal_micro_batches():
    got = values_fit(None, [[(3, 1.0), (1, 5.0)]], accumulate=2)
    assert got["loss"] == [pytest.approx(2.0, rel=1e-6)]
    assert got["gradient"] == [pytest.approx(2.0, rel=1e-6)]
    assert (got["loss_sum"], got["tokens"]) == ([pytest.approx(8.0, rel=1e-6)], [4.0])


@pytest.mark.case("C02")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c02_unequal_ranks(ranks2, strategy):
    for got in ranks2.run(values_fit, strategy, [[(6, 1.0)], [(2, 3.0)]]):
        assert got["loss"] == [pytest.approx(1.5, rel=1e-6)] == got["gradient"]
    for got in ranks2.run(values_fit, strategy, [[(5, 1.0), (1, 1.0)], [(1, 3.0), (1, 3.0)]], 2):
        assert got["loss"] == [pytest.approx(1.5, rel=1e-6)] == got["gradient"]


@pytest.mark.case("C04")
def test_c04_short_last_window():
    got = values_fit(None, [[(8, 1.0)] * 6], accumulate=4)
    assert got["gradient"] == [pytest.approx(1.0, rel=1e-6)] * 2
    got = values_fit(None, [[(8, 1.0)] * 4 + [(3, 1.0), (1, 5.0)]], accumulate=4)
    assert got["gradient"] == got["loss"] == [pytest.approx(1.0, rel=1e-6), pytest.approx(2.0, rel=1e-6)]


@pytest.mark.case("C04")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c04_short_last_window_on_ranks(ranks2, strategy):
    of_rank = [[(8, 1.0)] * 4 + [(3, 1.0), (1, 5.0)], [(8, 1.0)] * 4 + [(2, 4.0), (2, 1.0)]]
    for got in ranks2.run(values_fit, strategy, of_rank, 4):
        assert (
            got["gradient"] == got["loss"] == [pytest.approx(1.0, rel=1e-6), pytest.approx(18 / 8, rel=1e-6)]
        )


@pytest.mark.case("C06")
def test_c06_one_point_per_update():
    got = values_fit(None, [[(8, 1.0), (8, 2.0), (8, 3.0), (8, 4.0)] * 2], accumulate=4)
    assert got["points"] == [(1, pytest.approx(2.5)), (2, pytest.approx(2.5))]


@pytest.mark.case("C06")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c06_one_point_per_update_on_ranks(ranks2, strategy):
    of_rank = [[(8, 1.0), (8, 2.0)] * 2, [(8, 3.0), (8, 4.0)] * 2]
    for got in ranks2.run(values_fit, strategy, of_rank, 2):
        assert got["loss"] == [pytest.approx(2.5)] * 2
        assert [step for step, _ in got["points"]] == [1, 2]


@pytest.mark.case("W01")
@pytest.mark.parametrize(
    ("batches", "mean"),
    [([(4, 0.5), (4, 0.7), (2, 1.4)], 0.76), ([(32, 0.4), (32, 0.6), (5, 1.2)], 0.55072)],
)
def test_w01_means_of_unequal_batches(batches, mean):
    got = values_fit(None, [batches], accumulate=3)
    for key in ("loss", "gradient"):
        assert got[key] == [pytest.approx(mean, abs=5e-6)]


@pytest.mark.case("W05")
def test_w05_least_squares_over_micro_batches():
    class LeastSquares(Toy):
        def __init__(self) -> None:
            super().__init__(net=torch.nn.Linear(1, 1), lr=0.0)
            self.net.weight.data.fill_(0.4)
            self.net.bias.data.fill_(-0.2)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self.net(x) - y).square().mean()

    x = torch.tensor([[-2.0], [-1], [0], [1], [2]])
    y = torch.tensor([[-3.0], [-1], [1], [3], [5]])
    residual = 0.4 * x - 0.2 - y
    wanted = [float((2 * residual * x).mean()), float((2 * residual).mean())]
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    for counter, is_exact in ((lambda b: len(b[0]), True), (lambda b: 1, False)):
        _, _, record = fit(
            LeastSquares(), batches, callbacks=[TokenWeightedLoss(count_tokens=counter)], accumulate=2
        )
        got = [float(record.gradients[0]["net.weight"]), float(record.gradients[0]["net.bias"])]
        assert (got == pytest.approx(wanted, rel=1e-6)) is is_exact
