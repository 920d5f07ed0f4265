"""Step 5 of 10, second half: torch DataLoaders over blocks, for one rank.

Workers are given positions and answer with batches; torch returns these in the order in which they were asked for, whatever
the number of workers. Nothing here keeps a position: `TrainLoader` asks where to start when its first batch is wanted, so
what was prefetched never counts, and a position restored after the iterator was made still holds. Every loader draws its
workers' seeds from a generator of its own, never from torch's global one.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_gpt_loop.packing import DocumentRows, PackedBlocks, segment_ids
from lit_gpt_loop.sample_order import SampleOrder, micro_batch

Batch = dict[str, torch.Tensor]
# Micro-batches that an endless stream claims to have. Lightning fetches a loader without a length one batch ahead, even
# before a checkpoint's position is restored; of one with a length it fetches what it needs when it needs it.
ENDLESS = 2**40


@dataclass(frozen=True)
class LoaderOptions:
    """What every loader needs to know besides its samples."""

    num_workers: int = 0
    pin_memory: bool = False
    eot_id: int | None = None  # given: batches carry `segment_ids`


class BlockDataset(Dataset[Batch]):
    """Batches by position.

    Args:
        samples: the blocks or rows.
        order: position -> block and sample id; None takes positions as blocks, -1 for a row without targets.
        eot_id: given, batches carry `segment_ids`.
    """

    def __init__(
        self, samples: PackedBlocks | DocumentRows, order: SampleOrder | None, eot_id: int | None
    ) -> None:
        self.samples, self.order, self.eot_id = samples, order, eot_id

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        """Return one batch; the DataLoader calls this with a whole batch of positions."""
        if self.order is None:
            blocks, ids = positions, positions
        else:
            ids = [self.order.sample_id(p) for p in positions]
            blocks = [i % self.order.num_samples for i in ids]
        rows = self.samples.rows(blocks)
        batch = {
            "inputs": torch.from_numpy(rows.inputs),  # (B, T)
            "targets": torch.from_numpy(rows.targets),  # (B, T)
            "sample_ids": torch.tensor(ids, dtype=torch.int64),  # (B,)
        }
        if self.eot_id is not None:
            batch["segment_ids"] = torch.from_numpy(segment_ids(rows.inputs, self.eot_id))  # (B, T)
        return batch

    def __getitem__(self, position: int) -> Batch:
        return self.__getitems__([position])


class _Batches(Sampler[list[int]]):
    """Lists of positions that a function makes anew for every pass."""

    def __init__(self, make: Callable[[], Iterator[Sequence[int]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self._make())


def _same(batch: Any) -> Any:
    return batch


def _data_loader(dataset: BlockDataset, batches: _Batches, options: LoaderOptions) -> DataLoader[Batch]:
    # Workers end with the pass. Ones that stay would end when the garbage collector finds the Trainer's reference cycles,
    # where torch waits 5 s for each of them in vain: their queues are closed first.
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=_same,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        generator=torch.Generator().manual_seed(0),
    )


class TrainLoader:
    """The endless training stream as one rank reads it.

    Args:
        samples: training blocks.
        order: the order of the samples.
        micro_batch_size: rows per batch.
        rank: of this process, 0 <= rank < world_size.
        world_size: ranks that share the stream.
        position: called when the first batch of a pass is wanted; returns the samples consumed so far by all ranks.
        options: workers, pinning, segments.
    """

    def __init__(
        self,
        samples: PackedBlocks | DocumentRows,
        order: SampleOrder,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        position: Callable[[], int],
        options: LoaderOptions,
    ) -> None:
        self._dataset = BlockDataset(samples, order, options.eot_id)
        self._micro_batch_size, self._rank, self._world_size = micro_batch_size, rank, world_size
        self._position, self._options = position, options

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        # In a generator: runs when the first batch is asked for, not when the iterator is made.
        start = self._position()

        def batches() -> Iterator[Sequence[int]]:
            for k in range(ENDLESS):
                yield micro_batch(start, k, self._rank, self._world_size, self._micro_batch_size)

        yield from _data_loader(self._dataset, _Batches(batches), self._options)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is in the DataModule's state. Tells Lightning that a resume in mid-epoch is in order."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


class EvalLoader:
    """Each of some samples exactly once over all ranks, the same ones on every pass, sample ids as sample numbers.

    All ranks get equally many batches of equal size; rows that are over have no targets and the sample id -1.

    Args:
        samples: blocks or rows.
        indices: the ones to read, in order.
        batch_size: rows per batch.
        rank: of this process.
        world_size: ranks that share the samples.
        options: workers, pinning, segments.
    """

    def __init__(
        self,
        samples: PackedBlocks | DocumentRows,
        indices: Sequence[int],
        batch_size: int,
        rank: int,
        world_size: int,
        options: LoaderOptions,
    ) -> None:
        self._indices, self._batch_size, self._rank, self._world_size = indices, batch_size, rank, world_size
        self._dataset, self._options = BlockDataset(samples, None, options.eot_id), options

    def __len__(self) -> int:
        return math.ceil(len(self._indices) / (self._batch_size * self._world_size))

    def __iter__(self) -> Iterator[Batch]:
        indices, n, size = self._indices, len(self._indices), self._batch_size
        rank, world_size, num_batches = self._rank, self._world_size, len(self)

        def batches() -> Iterator[Sequence[int]]:
            for k in range(num_batches):
                yield [indices[p] if p < n else -1 for p in micro_batch(0, k, rank, world_size, size)]

        yield from _data_loader(self._dataset, _Batches(batches), self._options)


def measure_tokens_per_s(loader: TrainLoader | EvalLoader, num_batches: int = 200) -> float:
    """Return how many input tokens a loader delivers per second, the first batch (and the start of workers) left out."""
    batches = iter(loader)
    next(batches)
    started, tokens = time.perf_counter(), 0
    for batch in itertools.islice(batches, num_batches):
        tokens += batch["inputs"].numel()
    return tokens / (time.perf_counter() - started)
