"""Blocks and rows over splits of a store: nothing lost, nothing twice, shifted by one."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_gpt_loop.packing import (
    TEST,
    TRAIN,
    VAL,
    DocumentRows,
    PackedBlocks,
    document_hashes,
    segment_ids,
    split_by_document,
    split_of_documents,
    split_tail,
    target_bytes,
)
from tests.lit_gpt_loop.small_data import MIXED, store_of

E = 256  # the end token of `bytes`


class MemoryStore:
    """What packing reads of a store, without files."""

    path = "memory"

    def __init__(self, texts):
        self._tokens = np.array([t for d in documents(texts) for t in d])
        self._ends = np.cumsum([len(d) for d in documents(texts)])
        self.num_tokens, self.num_documents = len(self._tokens), len(texts)

    def tokens(self, start, stop):
        assert 0 <= start <= stop <= self.num_tokens
        return self._tokens[start:stop]

    def document_ends(self, start, stop):
        return self._ends[start:stop]


def documents(texts):
    return [[*t.encode(), E] for t in texts]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("mixed"), MIXED)


@pytest.fixture(scope="module")
def mixed_parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for part in (1, 2, 3):
        path = folder
        if part < 3:
            with pytest.raises(FileNotFoundError):
                store_of(path, MIXED, part=(part, 3))
    return store_of(folder, MIXED, part=(3, 3))


def test_hashes_are_uniform_and_depend_on_seed_and_index_alone():
    hashes = document_hashes(0, 100_000, seed=3)
    assert ((hashes >= 0) & (hashes < 1)).all()
    counts, _ = np.histogram(hashes, bins=50, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * 98**0.5
    assert np.array_equal(document_hashes(500, 600, seed=3), hashes[500:600])
    assert abs(np.corrcoef(hashes, document_hashes(0, 100_000, seed=4))[0, 1]) < 0.02


def test_documents_stay_in_their_split_when_the_corpus_grows_or_a_test_split_is_added():
    few = split_of_documents(document_hashes(0, 1000, 0), 0.1)
    many = split_of_documents(document_hashes(0, 5000, 0), 0.1)
    assert np.array_equal(many[:1000], few)
    with_test = split_of_documents(document_hashes(0, 1000, 0), 0.1, 0.2)
    assert np.array_equal(with_test == VAL, few == VAL)
    assert 100 < (with_test == TEST).sum() < 300


@given(
    seed=st.integers(0, 50),
    val=st.sampled_from([0.02, 0.3, 0.7]),
    test=st.sampled_from([0.0, 0.2]),
    in_parts=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_hold_each_document_once_in_order(mixed, mixed_parts, seed, val, test, in_parts):
    store = mixed_parts if in_parts else mixed
    split = split_of_documents(document_hashes(0, len(MIXED), seed), val, test)
    if not (split == VAL).any() or (test and not (split == TEST).any()):
        return  # the exceptions to the rule have tests of their own
    streams = split_by_document(store, seed, val, test)
    for kind, stream in zip((TRAIN, VAL, TEST), streams, strict=True):
        wanted = [t for d, s in zip(documents(MIXED), split, strict=True) if s == kind for t in d]
        assert stream.read(0, stream.num_tokens).tolist() == wanted
        assert stream.num_documents == (split == kind).sum()


def test_splitting_in_chunks_gives_the_same_runs(mixed, monkeypatch):
    whole = split_by_document(mixed, 1, 0.3, 0.1)
    monkeypatch.setattr("lit_gpt_loop.packing._CHUNK", 7)
    for a, b in zip(whole, split_by_document(mixed, 1, 0.3, 0.1), strict=True):
        assert np.array_equal(a.starts, b.starts)
        assert np.array_equal(a.offsets, b.offsets)
        assert a.num_documents == b.num_documents


def test_a_small_corpus_holds_out_the_document_with_the_smallest_hash(tmp_path):
    store = store_of(tmp_path, ["one", "two", "three"])
    hashes = document_hashes(0, 3, seed=0)
    val = split_by_document(store, 0, val_fraction=1e-9)[VAL]
    assert val.read(0, 100).tolist() == documents(["one", "two", "three"])[int(hashes.argmin())]


def test_one_document_cannot_be_split_but_its_tail_can(tmp_path):
    store = store_of(tmp_path, ["0123456789" * 10])
    with pytest.raises(ValueError, match=r"1 document, so none can be held out.*val_split tail"):
        split_by_document(store, 0, 0.1)
    train, val, test = split_tail(store, 0.1, 0.05)
    assert [s.num_tokens for s in (train, val, test)] == [86, 10, 5]
    joined = [t for s in (train, val, test) for t in s.read(0, s.num_tokens).tolist()]
    assert joined == documents(["0123456789" * 10])[0]


@given(
    texts=st.lists(st.text("aé日🙂", min_size=1, max_size=40), min_size=1, max_size=12),
    t=st.integers(1, 30),
)
@settings(max_examples=40, deadline=None)
def test_blocks_overlap_by_one_and_lose_no_target(texts, t):
    store = MemoryStore(texts)
    stream = [x for d in documents(texts) for x in d]
    whole = split_tail(store, 0.0)[TRAIN]
    train = PackedBlocks(whole, t, pad_id=E)
    n = (len(stream) - 1) // t
    assert (train.num_samples, train.num_targets, train.num_tail_tokens) == (
        n,
        n * t,
        len(stream) - 1 - n * t,
    )
    rows = train.rows(range(n))
    for i in range(n):
        assert rows.inputs[i].tolist() == stream[i * t : i * t + t]
        assert rows.targets[i].tolist() == stream[i * t + 1 : i * t + t + 1]
    kept = PackedBlocks(whole, t, pad_id=E, keep_tail=True)
    rows = kept.rows([*range(kept.num_samples), -1])
    assert rows.targets[rows.targets != -100].tolist() == stream[1:]
    assert kept.num_targets == len(stream) - 1
    assert (rows.targets[-1] == -100).all() and (rows.inputs[-1] == E).all()


def test_worked_example(tmp_path):
    store = store_of(tmp_path, ["abcde", "fg"])
    blocks = PackedBlocks(split_tail(store, 0.0)[TRAIN], 3, pad_id=E, keep_tail=True)
    a = ord("a")
    rows = blocks.rows([0, 1, 2])
    assert rows.inputs.tolist() == [[a, a + 1, a + 2], [a + 3, a + 4, E], [a + 5, a + 6, E]]
    assert rows.targets.tolist() == [[a + 1, a + 2, a + 3], [a + 4, E, a + 5], [a + 6, E, -100]]
    assert segment_ids(rows.inputs, E).tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]
    long = PackedBlocks(split_tail(store, 0.0)[TRAIN], 8, pad_id=E).rows([0]).inputs
    assert segment_ids(long, E).tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]


@given(t=st.integers(1, 60), seed=st.integers(0, 20))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_hold_one_document_each_and_drop_nothing(mixed, t, seed):
    stream = split_by_document(mixed, seed, 0.4)[TRAIN]
    split = split_of_documents(document_hashes(0, len(MIXED), seed), 0.4)
    wanted = [d for d, s in zip(documents(MIXED), split, strict=True) if s == TRAIN]
    rows = DocumentRows(stream, t, pad_id=E)
    got = rows.rows(range(rows.num_samples))
    i = 0
    for document in wanted:
        for start in range(0, len(document) - 1, t):
            piece = document[start : start + t + 1]
            assert got.targets[i].tolist() == piece[1:] + [-100] * (t + 1 - len(piece))
            assert got.inputs[i].tolist()[: len(piece) - 1] == piece[:-1]
            i += 1
    assert i == rows.num_samples
    assert rows.num_targets == sum(len(d) - 1 for d in wanted) == (got.targets != -100).sum()


def test_bytes_of_targets_are_exact_or_shared_out(mixed):
    stream = split_by_document(mixed, 0, 0.3)[VAL]
    blocks = PackedBlocks(stream, 10, pad_id=E, keep_tail=True)
    table = np.array([1] * 256 + [0])
    total, is_exact = target_bytes(blocks, range(blocks.num_samples), table)
    split = split_of_documents(document_hashes(0, len(MIXED), 0), 0.3)
    text = [d for d, s in zip(MIXED, split, strict=True) if s == VAL]
    assert (total, is_exact) == (sum(len(x.encode()) for x in text) - 1, True)  # the first byte is no target
    some = [0, 3, 4, blocks.num_samples - 1]
    total, _ = target_bytes(blocks, some, table)
    targets = blocks.rows(some).targets
    assert total == ((targets != -100) & (targets != E)).sum()
    shared, is_exact = target_bytes(blocks, range(blocks.num_samples), None)
    first = len(text[0].encode())
    assert not is_exact
    assert shared == pytest.approx(sum(len(x.encode()) for x in text) - first / (first + 1))
