"""Step 5 of 10, between blocks and loaders: the samples of the three splits of a store, and their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lit_gpt_loop.packing import (
    TEST,
    TRAIN,
    VAL,
    DocumentRows,
    PackedBlocks,
    split_by_document,
    split_tail,
    target_bytes,
)
from lit_gpt_loop.token_store import TokenStore

_NAMES = {TRAIN: "train", VAL: "val", TEST: "test"}


@dataclass(frozen=True)
class SplitSpec:
    """How a store is cut into samples. Position in a run is counted in these samples, so it holds for one spec only."""

    context_length: int
    seed: int = 0
    packed: bool = True
    val_split: Literal["document", "tail"] = "document"
    val_fraction: float = 0.05
    test_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ValueError(f"context_length={self.context_length}: at least 1")
        if min(self.val_fraction, self.test_fraction) < 0 or self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction={self.val_fraction} and test_fraction={self.test_fraction}: neither below 0, and together below 1, "
                f"so that something is left to train on"
            )
        if self.val_split not in ("document", "tail"):
            raise ValueError(f"val_split={self.val_split!r}: document or tail")


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a validation or test set reads.

    Attributes:
        indices: its samples, in order.
        tokens: targets.
        text_bytes: UTF-8 bytes of the text that those targets stand for; end tokens stand for none.
        is_exact: whether `text_bytes` is a count rather than a share of the documents' bytes (see `target_bytes`).
    """

    indices: Sequence[int]
    tokens: int
    text_bytes: float
    is_exact: bool

    @property
    def bytes_per_token(self) -> float:
        """Bits per byte = loss in nats per token / ln 2 / this."""
        return self.text_bytes / self.tokens if self.tokens else float("nan")


@dataclass
class Splits:
    """The samples of a store.

    Args:
        store: the token store.
        spec: how it is cut.
        limits: at most so many samples of TRAIN (the first), VAL and TEST (evenly spread); None is all.

    Raises:
        ValueError: too little text for a block, or for a split.
    """

    store: TokenStore
    spec: SplitSpec
    limits: dict[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.val_split == "tail":
            streams = split_tail(self.store, spec.val_fraction, spec.test_fraction)
        else:
            streams = split_by_document(self.store, spec.seed, spec.val_fraction, spec.test_fraction)
        self.samples: list[PackedBlocks | DocumentRows] = []
        for kind, stream in zip((TRAIN, VAL, TEST), streams, strict=True):
            if spec.packed:
                blocks = PackedBlocks(stream, spec.context_length, self.store.eot_id, keep_tail=kind != TRAIN)
                self.samples.append(blocks)
            else:
                self.samples.append(DocumentRows(stream, spec.context_length, self.store.eot_id))
        self._check()
        self._evaluations: dict[int, Evaluation] = {}

    def _check(self) -> None:
        for kind, limit in self.limits.items():
            if limit is not None and limit < 1:
                raise ValueError(f"limit_{_NAMES[kind]}_blocks={limit}: at least 1, or null for all")
        train, val = self.samples[TRAIN], self.samples[VAL]
        if not train.num_samples:
            raise ValueError(
                f"the training split of {self.store.path} has {train.stream.num_tokens} tokens, fewer than one block of "
                f"context_length + 1 = {self.spec.context_length + 1}: take a larger corpus, or `--data.context_length` "
                f"{max(1, train.stream.num_tokens - 1)} or less."
            )
        if self.spec.val_fraction > 0 and not val.num_samples:
            raise ValueError(
                f"the validation split of {self.store.path} has {val.stream.num_tokens} tokens; it takes 2 to predict one. "
                f"Raise `--data.val_fraction`, now {self.spec.val_fraction}."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Training samples of one pass."""
        n, limit = self.samples[TRAIN].num_samples, self.limits.get(TRAIN)
        return n if limit is None else min(n, limit)

    @property
    def tokens_per_epoch(self) -> int:
        """Training targets of one pass."""
        train = self.samples[TRAIN]
        if self.samples_per_epoch == train.num_samples:
            return train.num_targets
        return sum(stop - first for first, stop in map(train.token_range, range(self.samples_per_epoch)))

    def evaluation_indices(self, kind: int) -> Sequence[int]:
        """Return the samples that one pass over a split reads: all, or `limit` evenly spread ones."""
        n, limit = self.samples[kind].num_samples, self.limits.get(kind)
        return range(n) if limit is None or limit >= n else [i * n // limit for i in range(limit)]

    def evaluation(self, kind: int) -> Evaluation:
        """Return what one pass over VAL or TEST reads; counted once, by going over its tokens."""
        if kind not in self._evaluations:
            samples, indices = self.samples[kind], self.evaluation_indices(kind)
            tokens = sum(stop - first for first, stop in map(samples.token_range, indices))
            self._evaluations[kind] = Evaluation(
                indices, tokens, *target_bytes(samples, indices, self.store.tokenizer.token_bytes())
            )
        return self._evaluations[kind]

    def summary(self) -> str:
        """Return a few lines for people."""
        store = self.store
        lines = [
            f"data {store.path}: {store.num_documents:,} documents ({store.empty_documents:,} empty ones skipped), "
            f"{store.num_tokens:,} tokens, {store.text_bytes:,} bytes, {store.text_bytes / store.num_tokens:.2f} bytes per token, "
            f"vocabulary {store.vocab_size:,}"
        ]
        for kind, samples in enumerate(self.samples):
            if samples.num_samples:
                unit = "blocks" if self.spec.packed else "rows"
                tail = f", {samples.num_tail_tokens:,} at the end left out" if samples.num_tail_tokens else ""
                lines.append(
                    f"  {_NAMES[kind]:5s} {samples.stream.num_documents:,} documents, {samples.num_targets:,} targets in "
                    f"{samples.num_samples:,} {unit} of {self.spec.context_length}{tail}"
                )
        return "\n".join(lines)
