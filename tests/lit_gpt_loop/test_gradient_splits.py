"""Splits of a batch, masks that depend on the sample alone, relative differences."""

import math

import pytest
import torch

from lit_gpt_loop.gradient_splits import Split, find_splits, largest_difference, mask_targets


@pytest.mark.parametrize(
    ("batch_size", "world_size", "splits"),
    [
        (8, 1, [(1, 8, 1), (1, 4, 2), (1, 1, 8)]),
        (8, 2, [(1, 8, 1), (1, 4, 2), (1, 1, 8), (2, 4, 1), (2, 2, 2), (2, 1, 4)]),
        (6, 3, [(1, 6, 1), (1, 3, 2), (1, 1, 6), (3, 2, 1), (3, 1, 2)]),
        (2, 2, [(1, 2, 1), (1, 1, 2), (2, 1, 1)]),
    ],
)
def test_splits(batch_size, world_size, splits):
    assert find_splits(batch_size, world_size) == [Split(*s) for s in splits]


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (6, 4)])
def test_splits_that_do_not_exist(batch_size, world_size):
    with pytest.raises(
        ValueError, match=f"batch of {batch_size} sequences cannot be split over {world_size}"
    ):
        find_splits(batch_size, world_size)


def test_masks_depend_on_the_sample_alone():
    ids = torch.tensor([3, 7, 11, 20])
    whole = torch.arange(4 * 50).view(4, 50)
    mask_targets(whole, ids, 0.5)
    parts = torch.arange(4 * 50).view(4, 50)
    for rows in (slice(2, 4), slice(0, 2)):
        mask_targets(parts[rows], ids[rows], 0.5)
    assert torch.equal(whole, parts)
    left_out = (whole == -100).sum(1)
    assert len(set(left_out.tolist())) > 1 and left_out.max() < 35
    untouched = torch.arange(4 * 50).view(4, 50)
    mask_targets(untouched, ids, 0.0)
    assert (untouched >= 0).all()


def test_the_largest_relative_difference_and_its_parameter():
    a = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([1.0])}
    assert largest_difference(a, a) == (0.0, "-")
    assert largest_difference(a, {"x": torch.tensor([3.0, 4.5]), "y": torch.tensor([1.01])}) == (0.1, "x")
    assert largest_difference(a, {"x": a["x"]}) == (math.inf, "y")
    zero = {"x": torch.zeros(2)}
    assert largest_difference(zero, zero) == (0.0, "-")
    assert largest_difference(zero, {"x": torch.ones(2)}) == (math.inf, "x")
    value, name = largest_difference(a, a | {"x": torch.tensor([math.nan, 0.0])})
    assert math.isnan(value) and name == "x"
