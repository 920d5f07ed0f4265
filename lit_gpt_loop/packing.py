"""Step 5 of 10, first half: the token store as training samples.

corpus -> tokenizer -> token store -> sample order -> **blocks** -> DataModule -> GPT -> LitGPT -> Trainer

A `DocumentStream` is the stream of one split: its documents, end to end, as if the others were not there. `PackedBlocks`
cuts it into blocks that overlap by one token, so that no target is lost at a border:

    stream     s0 s1 s2 s3 s4 s5 s6 s7 s8 ...          block length T = 4
    block 0    inputs s0..s3, targets s1..s4
    block 1    inputs s4..s7, targets s5..s8

`DocumentRows` has one document per row instead, padded. B rows, T tokens per row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lit_gpt_loop.token_store import TokenStore

IGNORE_INDEX = -100
TRAIN, VAL, TEST = 0, 1, 2
_CHUNK = 2**22  # documents or tokens looked at at a time


def document_hashes(start: int, stop: int, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each of the documents start..stop that depends on the seed and its index alone, float64."""
    with np.errstate(over="ignore"):
        x = np.arange(start, stop, dtype=np.uint64) + np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0xD6E8FEB86659FD93)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)  # splitmix64
    return (x >> np.uint64(11)).astype(np.float64) / 2**53


def split_of_documents(hashes: np.ndarray, val_fraction: float, test_fraction: float = 0.0) -> np.ndarray:
    """Return TRAIN, VAL or TEST for documents with these hashes, uint8.

    A document stays where it is when documents are appended to the corpus, and the validation documents are the same with and
    without a test split.
    """
    return np.where(
        hashes < val_fraction, VAL, np.where(hashes < val_fraction + test_fraction, TEST, TRAIN)
    ).astype(np.uint8)


@dataclass(frozen=True)
class DocumentStream:
    """Some runs of the store's stream, joined.

    Attributes:
        store: the token store.
        starts: where each run starts in the store, (R,) int64.
        offsets: where each run starts in this stream, and its end, (R + 1,) int64.
        num_documents: documents touched.
    """

    store: TokenStore
    starts: np.ndarray
    offsets: np.ndarray
    num_documents: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream, end tokens included."""
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start..stop, int64; short if the stream ends before."""
        stop = min(stop, self.num_tokens)
        result = np.empty(max(0, stop - start), dtype=np.int64)
        filled = 0
        run = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while filled < len(result):
            at = start + filled
            length = min(int(self.offsets[run + 1]), stop) - at
            first = int(self.starts[run]) + at - int(self.offsets[run])
            result[filled : filled + length] = self.store.tokens(first, first + length)
            filled += length
            run += 1
        return result


def _stream(
    store: TokenStore, starts: Sequence[int], stops: Sequence[int], num_documents: int
) -> DocumentStream:
    begin, end = np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)
    keep = end > begin
    return DocumentStream(
        store, begin[keep], np.concatenate([[0], np.cumsum((end - begin)[keep])]), num_documents
    )


def split_by_document(
    store: TokenStore, seed: int, val_fraction: float, test_fraction: float = 0.0
) -> list[DocumentStream]:
    """Return the [train, val, test] streams when a hash of (seed, document index) decides.

    A small corpus in which no document falls below `val_fraction` holds out the one with the smallest hash.

    Raises:
        ValueError: too few documents for the fractions.
    """
    n = store.num_documents
    if n < 2 and val_fraction + test_fraction > 0:
        raise ValueError(
            f"{store.path} holds {n} document, so none can be held out for validation. Split the text with "
            f"`--data.document_separator`, or take the end of the stream: `--data.val_split tail`."
        )
    runs: list[list[tuple[int, int]]] = [[], [], []]
    counts = [0, 0, 0]
    position, previous = 0, -1
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        hashes = document_hashes(start, stop, seed)
        split = split_of_documents(hashes, val_fraction, test_fraction)
        if n <= _CHUNK and val_fraction > 0 and not (split == VAL).any():
            split[hashes.argmin()] = VAL
        ends = store.document_ends(start, stop)
        borders = (np.flatnonzero(np.diff(split)) + 1).tolist()
        for a, b in zip([0, *borders], [*borders, stop - start], strict=True):
            kind, end = int(split[a]), int(ends[b - 1])
            if kind == previous:  # a run that goes on in the next chunk
                runs[kind][-1] = (runs[kind][-1][0], end)
            else:
                runs[kind].append((position, end))
            counts[kind] += b - a
            position, previous = end, kind
    for kind, name, fraction in (
        (TRAIN, "training", 1.0),
        (VAL, "validation", val_fraction),
        (TEST, "test", test_fraction),
    ):
        if fraction > 0 and not runs[kind]:
            raise ValueError(
                f"of the {n} documents of {store.path} none fell into the {name} split "
                f"(val_fraction={val_fraction}, test_fraction={test_fraction}): change the fractions or the seed."
            )
    return [
        _stream(store, [a for a, _ in r], [b for _, b in r], c) for r, c in zip(runs, counts, strict=True)
    ]


def split_tail(store: TokenStore, val_fraction: float, test_fraction: float = 0.0) -> list[DocumentStream]:
    """Return the [train, val, test] streams when the end of the stream is held out, whatever documents it cuts."""
    n = store.num_tokens
    val, test = round(n * val_fraction), round(n * test_fraction)
    cuts = [0, n - val - test, n - test, n]
    bounds = [(cuts[0], cuts[1]), (cuts[1], cuts[2]), (cuts[2], cuts[3])]
    return [_stream(store, [a], [b], _documents_between(store, a, b)) for a, b in bounds]


def _documents_between(store: TokenStore, start: int, stop: int) -> int:
    if start >= stop:
        return 0
    ends = store.document_ends(0, store.num_documents)
    return int(np.searchsorted(ends, stop - 1, side="right") - np.searchsorted(ends, start, side="right")) + 1


@dataclass(frozen=True)
class Rows:
    """What a batch is made of: inputs and targets (B, T) int64, targets -100 where nothing is to be learnt."""

    inputs: np.ndarray
    targets: np.ndarray


class PackedBlocks:
    """Blocks of `context_length` inputs and as many targets over a stream.

    Args:
        stream: the tokens of one split.
        context_length: T.
        pad_id: input id where there is nothing.
        keep_tail: whether a last block that is not full counts, padded; else its targets are `num_tail_tokens`.

    Attributes:
        num_samples: blocks.
        num_targets: targets in all blocks together: every token of the stream but the first, and but the tail.
        num_tail_tokens: targets that no block holds.
    """

    def __init__(
        self, stream: DocumentStream, context_length: int, pad_id: int, keep_tail: bool = False
    ) -> None:
        self.stream, self.context_length, self.pad_id = stream, context_length, pad_id
        targets = max(0, stream.num_tokens - 1)
        self.num_samples = -(-targets // context_length) if keep_tail else targets // context_length
        self.num_targets = targets if keep_tail else self.num_samples * context_length
        self.num_tail_tokens = targets - self.num_targets

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return the blocks at `indices`; -1 gives a row without targets."""
        t = self.context_length
        tokens = np.full((len(indices), t + 1), -1, dtype=np.int64)
        for row, i in zip(tokens, indices, strict=True):
            if i >= 0:
                block = self.stream.read(i * t, i * t + t + 1)
                row[: len(block)] = block
        return _shifted(tokens, self.pad_id)

    def token_range(self, index: int) -> tuple[int, int]:
        """Return which tokens of the stream are the targets of a block."""
        first = index * self.context_length + 1
        return first, min(first + self.context_length, self.stream.num_tokens)


class DocumentRows:
    """One document per row, padded; a longer one goes on in the next row, overlapping by one token, so nothing is dropped.

    The first token of a document is no target: there is nothing before it in its row. Arguments and attributes are those of
    `PackedBlocks`; there is no tail. Takes 8 bytes of memory per document.
    """

    num_tail_tokens = 0

    def __init__(self, stream: DocumentStream, context_length: int, pad_id: int) -> None:
        self.stream, self.context_length, self.pad_id = stream, context_length, pad_id
        ends = stream.store.document_ends(0, stream.store.num_documents)
        pieces = []
        for start, offset, stop in zip(stream.starts, stream.offsets[:-1], stream.offsets[1:], strict=True):
            last = start + stop - offset
            found = ends[slice(*np.searchsorted(ends, [start, last], side="right"))]
            if not len(found) or found[-1] != last:  # the run cuts its last document
                found = np.append(found, last)
            pieces.append(found - start + offset)
        self._ends = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        targets = np.diff(self._ends, prepend=0) - 1
        self._rows_until = np.cumsum(-(-targets // context_length))
        self.num_samples = int(self._rows_until[-1]) if len(targets) else 0
        self.num_targets = int(targets.sum())

    def token_range(self, index: int) -> tuple[int, int]:
        """Return which tokens of the stream are the targets of a row."""
        document = int(np.searchsorted(self._rows_until, index, side="right"))
        row = index - (int(self._rows_until[document - 1]) if document else 0)
        start = int(self._ends[document - 1]) if document else 0
        first = start + row * self.context_length + 1
        return first, min(first + self.context_length, int(self._ends[document]))

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return the rows at `indices`; -1 gives a row without targets."""
        tokens = np.full((len(indices), self.context_length + 1), -1, dtype=np.int64)
        for row, i in zip(tokens, indices, strict=True):
            if i >= 0:
                first, stop = self.token_range(i)
                row[: stop - first + 1] = self.stream.read(first - 1, stop)
        return _shifted(tokens, self.pad_id)


def _shifted(tokens: np.ndarray, pad_id: int) -> Rows:
    """Split (B, T + 1) tokens, -1 where there is none, into inputs and targets."""
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    inputs[inputs < 0] = pad_id
    targets[targets < 0] = IGNORE_INDEX
    return Rows(inputs, targets)


def segment_ids(inputs: np.ndarray, eot_id: int) -> np.ndarray:
    """Return the number of each input's document within its row, (B, T) int64; an end token belongs to the document it ends."""
    is_end = inputs == eot_id
    return np.cumsum(is_end, axis=1) - is_end


def target_bytes(
    samples: PackedBlocks | DocumentRows, indices: Sequence[int], token_bytes: np.ndarray | None
) -> tuple[float, bool]:
    """Return how many bytes of text the targets of some samples stand for, and whether that is exact.

    With `token_bytes` (bytes per id, 0 for the end token) it is a sum over the targets and exact. Without, the bytes of each
    document are shared out evenly over its tokens.
    """
    total = 0.0
    if token_bytes is not None:
        for first, stop in _merged(samples.token_range(i) for i in indices):
            for a in range(first, stop, _CHUNK):
                total += int(token_bytes[samples.stream.read(a, min(a + _CHUNK, stop))].sum())
        return total, True
    stream, store = samples.stream, samples.stream.store
    ends = store.document_ends(0, store.num_documents)
    per_document = store.document_bytes(0, store.num_documents)
    begins = np.concatenate([[0], ends[:-1]])
    for first, stop in _merged(samples.token_range(i) for i in indices):
        while first < stop:
            run = int(np.searchsorted(stream.offsets, first, side="right")) - 1
            last = min(stop, int(stream.offsets[run + 1]))
            shift = int(stream.starts[run]) - int(stream.offsets[run])
            a, b = first + shift, last + shift
            i, j = (
                int(np.searchsorted(ends, a, side="right")),
                int(np.searchsorted(ends, b - 1, side="right")) + 1,
            )
            covered = np.minimum(ends[i:j], b) - np.maximum(begins[i:j], a)
            total += float((per_document[i:j] * covered / (ends[i:j] - begins[i:j])).sum())
            first = last
    return total, False


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch; they come in rising order."""
    result: list[tuple[int, int]] = []
    for first, stop in ranges:
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((first, stop))
    return result
