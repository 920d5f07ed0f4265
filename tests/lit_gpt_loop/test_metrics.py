"""TokenLoss against arithmetic by hand and an independent sample of means."""

import math

import pytest
import torch

from lit_gpt_loop.metrics import TokenLoss


def loss_of(batches):
    metric = TokenLoss()
    for s, n in batches:
        metric.update(torch.tensor(float(s)), torch.tensor(n))
    return metric.compute()


@pytest.mark.case("C07")
def test_c07_mean_over_tokens_not_over_batches():
    out = loss_of([(4, 2), (6, 6)])
    assert out["loss"] == 1.25
    assert out["ppl"] == pytest.approx(3.490, abs=5e-4)
    assert out["tokens"] == 8


@pytest.mark.case("W01")
@pytest.mark.parametrize(
    ("sizes", "means", "expected"),
    [((4, 4, 2), (0.5, 0.7, 1.4), 0.76), ((32, 32, 5), (0.4, 0.6, 1.2), 0.55072)],
)
def test_w01_weighted_means(sizes, means, expected):
    assert loss_of([(n * m, n) for n, m in zip(sizes, means, strict=True)])["loss"] == pytest.approx(
        expected, abs=5e-6
    )


@pytest.mark.case("W10")
def test_w10_standard_error_is_that_of_the_mean_and_shrinks_with_the_root():
    g = torch.Generator().manual_seed(0)
    means = torch.randn(400, generator=g, dtype=torch.float64) + 3
    for m in (100, 400):
        out = loss_of([(x * 8, 8) for x in means[:m].tolist()])
        assert out["loss_stderr"] == pytest.approx(float(means[:m].std()) / math.sqrt(m), rel=1e-5)
    assert loss_of([(8.0, 8)] * 3)["loss_stderr"] == 0.0


def test_unknowns_are_left_out_and_empty_batches_do_not_count():
    assert TokenLoss().compute() == {"tokens": 0}
    out = loss_of([(4.0, 2), (0.0, 0)])
    assert "loss_stderr" not in out
