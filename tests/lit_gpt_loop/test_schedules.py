"""Schedules as tables: update index and the value worked out by hand; then the properties that every schedule keeps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_gpt_loop.schedules import DECAY_SHAPES, ScheduleConfig, first_difference, summarize


def wsd(total, warmup=4, decay=4, shape="linear", final=0.0):
    return ScheduleConfig("wsd", warmup, decay, shape, final).resolve(total)


@pytest.mark.parametrize(
    ("update", "ratio"),
    [
        (0, 0.25),
        (1, 0.5),
        (2, 0.75),
        (3, 1.0),
        (4, 1.0),
        (15, 1.0),
        (16, 0.75),
        (17, 0.5),
        (18, 0.25),
        (19, 0.0),
        (99, 0.0),
    ],
)
def test_wsd_linear(update, ratio):
    assert wsd(20)(update) == ratio


@pytest.mark.parametrize(
    ("shape", "ratios"),
    [
        ("linear", [0.775, 0.55, 0.325, 0.1]),
        (
            "1-sqrt",
            [0.1 + 0.9 * 0.5, 0.1 + 0.9 * (1 - math.sqrt(0.5)), 0.1 + 0.9 * (1 - math.sqrt(0.75)), 0.1],
        ),
        ("cosine", [0.1 + 0.9 * 0.8535533905932737, 0.55, 0.1 + 0.9 * 0.1464466094067262, 0.1]),
        ("exponential", [0.1 + 0.9 * 0.2816647, 0.1 + 0.9 * 0.0758582, 0.1 + 0.9 * 0.0168936, 0.1]),
    ],
)
def test_decay_shapes(shape, ratios):
    s = wsd(20, shape=shape, final=0.1)
    assert [s(n) for n in range(16, 20)] == pytest.approx(ratios, abs=2e-7)


@pytest.mark.case("W08")
def test_w08_cosine_middle_is_the_mean_and_end_is_a_tenth():
    s = ScheduleConfig("cosine", warmup_steps=100).resolve(1100)
    assert s(99) == 1.0
    assert s(100 + 499) == pytest.approx((1.0 + 0.1) / 2, abs=1e-12)
    assert s(1099) == pytest.approx(0.1, abs=1e-12)


@pytest.mark.case("W08")
def test_w08_summary_of_wsd():
    summary = summarize(ScheduleConfig("wsd", 0.02, 0.2, "linear").resolve(10_000))
    assert (summary.warmup_share, summary.stable_share, summary.decay_share) == pytest.approx(
        (0.02, 0.78, 0.2)
    )
    assert summary.updates_at_peak == 7801  # the stable phase and the last update of warmup
    assert summary.mean_ratio == pytest.approx(0.89, abs=1e-4)
    assert summary.final_ratio == 0.0


@pytest.mark.case("C30")
def test_c30_extension_moves_only_the_decay():
    short, long = wsd(20), wsd(30)
    assert [long(n) for n in range(10, 26)] == [1.0] * 16
    assert [long(n) for n in range(26, 30)] == [0.75, 0.5, 0.25, 0.0]
    assert first_difference(short, long, 16) is None
    assert first_difference(short, long, 17) == 16
    assert first_difference(short, wsd(20), 20) is None


@pytest.mark.case("C30")
def test_c30_cosine_of_another_length_differs_at_once():
    a, b = (ScheduleConfig("cosine", 4).resolve(n) for n in (20, 30))
    assert first_difference(a, b, 10) == 4


@given(
    total=st.integers(1, 400),
    warmup=st.integers(0, 100),
    decay=st.integers(0, 100),
    shape=st.sampled_from(sorted(DECAY_SHAPES)),
    kind=st.sampled_from(["wsd", "cosine", "constant"]),
)
def test_rates_stay_in_bounds_start_above_zero_and_never_rise_after_warmup(total, warmup, decay, shape, kind):
    config = ScheduleConfig(kind, warmup, decay, shape)
    if warmup + (decay if kind == "wsd" else 0) > total and kind != "constant":
        with pytest.raises(ValueError, match="overlap"):
            config.resolve(total)
        return
    if kind == "constant" and warmup > total:
        with pytest.raises(ValueError, match="overlap"):
            config.resolve(total)
        return
    if kind == "wsd" and warmup == 0 and decay == total == 1:
        with pytest.raises(ValueError, match="trains nothing"):
            config.resolve(total)
        return
    s = config.resolve(total)
    ratios = [s(n) for n in range(total)]
    assert all(0.0 <= r <= 1.0 for r in ratios)
    assert ratios[0] > 0
    assert all(a >= b for a, b in zip(ratios[warmup:], ratios[warmup + 1 :], strict=False))
    if warmup == 0 and kind == "constant":
        assert ratios[0] == 1.0


def test_warmup_zero_starts_at_peak():
    assert wsd(20, warmup=0)(0) == 1.0
    assert ScheduleConfig("constant", 0).resolve(None)(0) == 1.0


@pytest.mark.parametrize(
    ("config", "total", "message"),
    [
        (ScheduleConfig("wsd", 15, 10), 20, r"warmup \(15 updates\) and decay \(10\) overlap in a run of 20"),
        (ScheduleConfig("cosine", 30), 20, "overlap"),
        (ScheduleConfig("constant", 30), 20, "overlap"),
        (ScheduleConfig("wsd", -1, 0), 20, "must not be negative"),
        (ScheduleConfig("wsd", 2.5, 0), 20, "whole number"),
        (ScheduleConfig("wsd", 0.1, 0), None, "share of the run"),
        (ScheduleConfig("wsd", 1, 5), None, "needs the run's length"),
        (ScheduleConfig("cosine", 1), None, "needs the run's length"),
        (ScheduleConfig("wsd", 1, 5, final_ratio=1.5), 20, r"must lie in \[0, 1\]"),
        (ScheduleConfig("wds"), 20, "use 'wsd', 'cosine' or 'constant'"),  # type: ignore[arg-type]
        (ScheduleConfig("wsd", decay_shape="sqrt"), 20, "use one of"),  # type: ignore[arg-type]
        (ScheduleConfig("wsd"), 0, "at least one update"),
        (ScheduleConfig("wsd", 0, 1), 1, "trains nothing"),
    ],
)
def test_bad_input_names_value_rule_and_remedy(config, total, message):
    with pytest.raises(ValueError, match=message):
        config.resolve(total)
