"""Digests of RestartEquivalence: every change shows, layout does not."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from callbacks import restart_equivalence as re

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3)


def make(shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-1000, 1000, shape, generator=g)
    x = x / 8 if dtype.is_floating_point or dtype.is_complex else x
    return (x > 0) if dtype is torch.bool else x.to(dtype)


def raw(t):
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.reshape(-1).view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([d for d in DTYPES if d is not torch.bool]), st.integers(0, 99), st.data())
def test_any_one_bit_changes_the_digest(shape, dtype, seed, data):
    x = make(shape, dtype, seed)
    before = re.tensor_digest(x)
    i, bit = data.draw(st.integers(0, raw(x).numel() - 1)), data.draw(st.integers(0, 7))
    raw(x)[i] ^= 1 << bit
    assert re.tensor_digest(x) != before


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5000), st.sampled_from(DTYPES), st.integers(0, 99), st.data())
def test_swapping_two_elements_changes_the_digest(n, dtype, seed, data):
    x = make([n], dtype, seed)
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    y = x.clone()
    y[i], y[j] = x[j], x[i]
    assert (re.tensor_digest(y) != re.tensor_digest(x)) == (not torch.equal(raw(x), raw(y)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000), FLOATS.filter(lambda v: v != 0))
def test_swapping_a_number_with_its_negative_shows(i, j, value):
    x = torch.zeros(3001)
    x[i], x[j] = value, -value
    if i != j:
        y = x.clone()
        y[i], y[j] = x[j], x[i]
        assert re.tensor_digest(y) != re.tensor_digest(x)


def test_negation_scaling_rotation_and_reversal_show():
    x = torch.randn(2048, 700)
    others = [
        -x,
        2 * x,
        x.roll(1, 0),
        x.roll(1, 1),
        x.flip(0),
        x.flip(1),
        x.roll(1024),
        x + 0 * x.nextafter(x + 1),
    ]
    digests = [re.tensor_digest(t) for t in others]
    assert digests[-1] == re.tensor_digest(x)  # the same numbers, newly computed
    assert len({*digests, re.tensor_digest(x)}) == len(others)


def test_swapping_rows_and_blocks_of_bytes_shows():
    x = torch.randn(3 * 1024 * 1024)  # three blocks of 1,024 rows of 4,096 bytes
    rows, blocks = x.view(-1, 1024), x.view(3, -1)
    digests = {re.tensor_digest(x)}
    for i, j in ((0, 1), (5, 1000), (1023, 1024), (7, 2050)):
        order = torch.arange(len(rows))
        order[i], order[j] = j, i
        digests.add(re.tensor_digest(rows[order].flatten()))
    digests.add(re.tensor_digest(blocks[[1, 0, 2]].flatten()))
    assert len(digests) == 6


@given(shapes, st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_reshape_and_dtype_of_the_same_bits_show(shape, seed):
    x = make(shape, torch.float32, seed)
    assert re.tensor_digest(x.unsqueeze(0)) != re.tensor_digest(x)
    assert re.tensor_digest(x.view(torch.int32)) != re.tensor_digest(x)
    assert re.tensor_digest(x[None].view(torch.float16)) != re.tensor_digest(x[None])


def test_swapping_two_tensors_of_one_shape_shows_in_the_tree():
    tree = {"a": ["1" * 16, 1.0], "b": ["2" * 16, 1.0]}
    swapped = {"a": tree["b"], "b": tree["a"]}
    assert re.tree_digest(tree) != re.tree_digest(swapped)
    assert re.tree_digest(tree) == re.tree_digest(dict(reversed(tree.items())))
    difference = re.compare_trees("parameters at load", tree, swapped, None)
    assert (
        difference is not None and "what was recorded for b" in difference.detail and difference.name == "a"
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 9000),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9000), max_size=5),
    st.integers(0, 99),
)
def test_parts_add_up_to_the_whole(n, dtype, cuts, seed):
    x = make([n], dtype, seed)
    edges = [0, *sorted(min(c, n) for c in cuts), n]
    parts = sum(int(re.measure(x[a:b], a)[0]) for a, b in itertools.pairwise(edges))
    assert re.finish_digest(parts, str(dtype), [n]) == re.tensor_digest(x)


def test_parts_add_up_across_blocks_and_the_norm_with_them():
    x = torch.randn(3_000_001)  # 12 MB: 3 blocks
    edges = [0, 1, 1_048_575, 1_048_577, 2_500_000, 3_000_001]
    parts = [re.measure(x[a:b], a) for a, b in itertools.pairwise(edges)]
    assert re.finish_digest(sum(int(s) for s, _ in parts), str(x.dtype), x.shape) == re.tensor_digest(x)
    assert float(sum(n for _, n in parts)) ** 0.5 == pytest.approx(float(x.double().norm()), rel=1e-5)


def test_the_sum_is_that_of_bytes_times_weights_of_their_position():
    x = torch.randn(1_100_000)  # crosses the border of a block
    rows = np.zeros((1100, 4096), dtype=np.int64)
    rows.reshape(-1)[: x.numel() * 4] = x.view(torch.int8).numpy()
    by_byte = rows @ re._byte_weights(torch.device("cpu")).numpy().T.astype(np.int64)
    table = re._row_weights(torch.device("cpu")).numpy()
    total = 0
    for block in range(2):
        part = by_byte[block * 1024 : (block + 1) * 1024]
        total += int((part * table[: len(part)]).sum()) * re._odd64(2**41 + block)
    assert total % 2**64 == int(re.measure(x)[0]) % 2**64


@pytest.mark.parametrize("n", [3, 4096, 1_500_000])
def test_public_kernels_give_the_same(n, monkeypatch):
    x = torch.randn(n)
    digest = re.tensor_digest(x)
    monkeypatch.delattr(torch, "_int_mm")
    assert re.tensor_digest(x) == digest


def test_private_kernel_is_still_there():
    assert hasattr(torch, "_int_mm"), (
        "torch dropped _int_mm: digests still work, 4 times slower; look for another kernel"
    )


def test_weights_leave_no_change_of_one_byte_or_equal_pair_unseen():
    columns = re._byte_weights(torch.device("cpu")).t().tolist()
    assert all(w % 2 == 1 and abs(w) <= 63 for c in columns for w in c)
    seen = {tuple(c) for c in columns} | {tuple(-w for w in c) for c in columns}
    assert len(seen) == 2 * len(columns)
    assert (re._row_weights(torch.device("cpu")) % 2 != 0).all()


def test_digests_are_the_same_in_every_process_and_version():
    # Written down: a digest kept in a checkpoint has to mean the same next year.
    assert re.tensor_digest(torch.arange(10, dtype=torch.float32)) == EXPECTED["arange"]
    assert re.tensor_digest(torch.zeros(2, 3)) == EXPECTED["zeros"]


def test_strided_and_empty_tensors():
    x = torch.randn(30, 40)
    assert re.tensor_digest(x.t()) == re.tensor_digest(x.t().contiguous())
    assert re.tensor_digest(torch.zeros(0, 3)) != re.tensor_digest(torch.zeros(3, 0))


EXPECTED = {"arange": "de889497ffb3a17e", "zeros": "277ae8a0be02bfed"}
