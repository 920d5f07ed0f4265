"""The order of samples: each once per epoch, the same global batches on every layout, by index."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_gpt_loop.sample_order import SampleOrder, accumulation, micro_batch, permute


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection(size, seed, epoch):
    assert sorted(permute(i, size, seed, epoch) for i in range(size)) == list(range(size))


@given(size=st.integers(10**6, 10**18), start=st.integers(0, 10**18))
@settings(max_examples=30, deadline=None)
def test_permute_of_any_size_stays_inside_and_collides_nowhere(size, start):
    indices = [(start + i) % size for i in range(200)]
    blocks = [permute(i, size, seed=3) for i in indices]
    assert all(0 <= b < size for b in blocks)
    assert len(set(blocks)) == len(set(indices))


@pytest.mark.parametrize(("size", "seeds"), [(2, 2000), (3, 3000), (4, 3000), (5, 6000)])
def test_all_permutations_of_few_elements_are_equally_frequent(size, seeds):
    counts = Counter(tuple(permute(i, size, seed) for i in range(size)) for seed in range(seeds))
    number = {2: 2, 3: 6, 4: 24, 5: 120}[size]
    assert len(counts) == number
    expected = seeds / number
    chi2 = sum((c - expected) ** 2 / expected for c in counts.values())
    # Mean and deviation of chi-square with d degrees of freedom are d and sqrt(2 d).
    assert chi2 < (number - 1) + 5 * (2 * (number - 1)) ** 0.5


@pytest.mark.parametrize("size", [97, 1000])
def test_each_index_meets_every_block_and_neighbours_part(size):
    rounds = 40 * size
    first = Counter(permute(0, size, seed=1, epoch=e) for e in range(rounds))
    chi2 = sum((first[b] - 40) ** 2 / 40 for b in range(size))
    assert chi2 < (size - 1) + 5 * (2 * (size - 1)) ** 0.5
    order = [permute(i, size, seed=1) for i in range(size)]
    ascents = sum(b > a for a, b in itertools.pairwise(order))
    assert abs(ascents - size / 2) < 5 * (size / 12) ** 0.5  # variance of the ascents of a random permutation


def test_epochs_and_seeds_differ():
    orders = {
        (s, e): tuple(permute(i, 50, s, e) for i in range(50)) for s in (0, 1, -1, 2**65) for e in range(5)
    }
    assert len(set(orders.values())) == len(orders)


def test_the_order_is_what_earlier_versions_had():
    # Not a correctness table: a checkpoint's position means these very blocks, so a change here breaks every running job.
    assert [permute(i, 1000, seed=0) for i in range(8)] == [825, 50, 585, 2, 337, 187, 382, 395]
    large = [316732006204724830, 665999330646283978, 908012748265239726]
    assert [permute(10**15 + i, 10**18, seed=7, epoch=3) for i in range(3)] == large


def test_global_random_state_is_left_alone():
    before = random.getstate()
    SampleOrder(1000, seed=1).block(123456)
    assert random.getstate() == before


def test_index_outside_of_the_range():
    with pytest.raises(ValueError, match=r"index 10 is outside of range\(10\)"):
        permute(10, 10, seed=0)


@given(num_samples=st.integers(1, 60), seed=st.integers(0, 100), shuffle=st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_sample_once_per_epoch_and_ids_never_twice(num_samples, seed, shuffle):
    order = SampleOrder(num_samples, seed, shuffle)
    ids = [order.sample_id(p) for p in range(4 * num_samples)]
    assert sorted(ids) == list(range(4 * num_samples))
    for epoch in range(4):
        window = range(epoch * num_samples, (epoch + 1) * num_samples)
        assert sorted(order.block(p) for p in window) == list(range(num_samples))
    assert [i % num_samples for i in ids] == [order.block(p) for p in range(4 * num_samples)]
    if not shuffle:
        assert ids == list(range(4 * num_samples))


@given(
    num_samples=st.integers(1, 200),
    start=st.integers(0, 10**9),
    seed=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_global_batches_are_the_same_on_every_layout(num_samples, start, seed, data):
    order = SampleOrder(num_samples, seed)
    global_batch, updates = 48, 3
    wanted = [
        [order.sample_id(start + u * global_batch + i) for i in range(global_batch)] for u in range(updates)
    ]
    for world_size in (1, 2, 3, 4, 8):
        share = global_batch // world_size
        size = data.draw(st.sampled_from([m for m in range(1, share + 1) if share % m == 0]))
        steps = accumulation(global_batch, size, world_size)
        for u in range(updates):
            positions = [
                p
                for k in range(u * steps, (u + 1) * steps)
                for rank in range(world_size)
                for p in micro_batch(start, k, rank, world_size, size)
            ]
            assert sorted(order.sample_id(p) for p in positions) == sorted(wanted[u])


@pytest.mark.parametrize(
    ("batch", "size", "world_size", "steps"), [(8, 2, 1, 4), (8, 2, 4, 1), (480, 12, 8, 5), (1, 1, 1, 1)]
)
def test_accumulation(batch, size, world_size, steps):
    assert accumulation(batch, size, world_size) == steps


@pytest.mark.case("W02")
def test_w02_sequences_and_tokens_per_update():
    assert accumulation(512, 16, 8) == 4
    assert 16 * 512 * accumulation(64, 16, 1) == 32_768


@pytest.mark.parametrize(
    ("batch", "size", "world_size", "words"),
    [
        (
            10,
            4,
            1,
            [
                "global batch of 10",
                "multiple of 4 x 1 = 4",
                "global_batch_size=8 or 12",
                "micro_batch_size=5",
            ],
        ),
        (48, 5, 4, ["multiple of 5 x 4 = 20", "40 or 60", "micro_batch_size=4"]),
        (48, 4, 5, ["multiple of 4 x 5 = 20", "40 or 60", "or 4 ranks"]),
        (2, 4, 1, ["global_batch_size=4,", "micro_batch_size=2"]),
        (0, 4, 1, ["at least 1"]),
    ],
)
def test_accumulation_that_does_not_divide(batch, size, world_size, words):
    with pytest.raises(ValueError) as e:
        accumulation(batch, size, world_size)
    for word in words:
        assert word in str(e.value)


def test_an_empty_stream():
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, seed=0)
