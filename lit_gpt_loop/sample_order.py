"""Step 4 of 10: which block does the n-th training sample read, and who reads it?

corpus -> tokenizer -> token store -> **sample order** -> DataModule -> GPT -> LitGPT -> Trainer

The training stream is endless. Its position is one integer, `samples consumed`; everything else follows from it:

    epoch = position // num_samples         index = position % num_samples
    block = a permutation of range(num_samples) that (seed, epoch) fixes, at `index`

Nothing depends on rank, world size, workers or micro-batch size. They only decide who reads a sample (`micro_batch`), so
that a window of `global_batch` consecutive positions is one update on every layout. The permutation is computed index by
index, so a store of 1e12 blocks costs as much as one of 10, and resuming at sample 1e9 as much as starting at 0.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

_MASK = (1 << 64) - 1


def _num_rounds(size: int) -> int:
    """Return the rounds of the Feistel network: four are enough for wide halves, narrow ones mix less in each round.

    With these, all permutations of 5 elements are equally frequent over seeds, and those of 97 and 1,000 look random (tests).
    """
    return 24 if size < 2**8 else 12 if size < 2**16 else 6


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int, num_rounds: int) -> tuple[int, ...]:
    digest = b"".join(
        hashlib.blake2b(f"{seed}/{epoch}/{i}".encode(), digest_size=64, person=b"sample order").digest()
        for i in range(3)
    )
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(num_rounds))


def permute(index: int, size: int, seed: int, epoch: int = 0) -> int:
    """Return the element at `index` of a pseudo-random permutation of `range(size)`.

    A Feistel network with additions on a rectangle of rows x columns >= size cells; a result outside of `range(size)`
    goes through it again until it falls inside (cycle walking, Black and Rogaway 2002), which keeps it a bijection. The
    rectangle exceeds `size` by less than one row, so a second walk is rare.

    Args:
        index: 0 <= index < size.
        size: number of elements, of any magnitude.
        seed: any integer.
        epoch: each one has a permutation of its own.

    Raises:
        ValueError: `index` lies outside of `range(size)`.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside of range({size})")
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _round_keys(seed, epoch, _num_rounds(size))
    while True:
        row, column = divmod(index, columns)
        for i in range(0, len(keys), 2):
            # The finaliser of splitmix64 over (half ^ key): every bit of the half reaches every bit of the sum.
            x = (column + keys[i]) & _MASK
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
            row = (row + (x ^ (x >> 31))) % rows
            x = (row + keys[i + 1]) & _MASK
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
            column = (column + (x ^ (x >> 31))) % columns
        index = row * columns + column
        if index < size:
            return index


@dataclass(frozen=True)
class SampleOrder:
    """The endless training stream over `num_samples` blocks.

    Attributes:
        num_samples: blocks in one epoch.
        seed: fixes the permutation of every epoch.
        shuffle: False reads the blocks in the store's order, epoch after epoch.
    """

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: a stream needs at least one sample")

    def block(self, position: int) -> int:
        """Return the block that the sample at `position` (samples since the start of the run) reads."""
        epoch, index = divmod(position, self.num_samples)
        return permute(index, self.num_samples, self.seed, epoch) if self.shuffle else index

    def sample_id(self, position: int) -> int:
        """Return `epoch * num_samples + block`: another number for every sample of a run, equal modulo `num_samples` for equal blocks."""
        return position // self.num_samples * self.num_samples + self.block(position)


def micro_batch(start: int, k: int, rank: int, world_size: int, micro_batch_size: int) -> range:
    """Return the positions that `rank` reads as its micro-batch number `k` (0, 1, ...) after position `start`.

    All ranks together read `world_size * micro_batch_size` consecutive positions per micro-batch, so windows of
    `global_batch = accumulation * world_size * micro_batch_size` positions follow each other without a gap whatever the
    layout: `start` may be any number of samples that another layout has consumed.
    """
    first = start + (k * world_size + rank) * micro_batch_size
    return range(first, first + micro_batch_size)


def accumulation(global_batch: int, micro_batch_size: int, world_size: int) -> int:
    """Return how many micro-batches per rank make one update of `global_batch` samples.

    Raises:
        ValueError: the global batch does not divide; the message names numbers nearby that do.
    """
    if min(global_batch, micro_batch_size, world_size) < 1:
        raise ValueError(
            f"global batch {global_batch}, micro_batch_size={micro_batch_size}, world size {world_size}: each must be at least 1"
        )
    per_step = micro_batch_size * world_size
    if global_batch % per_step == 0:
        return global_batch // per_step
    below, above = global_batch // per_step * per_step, (global_batch // per_step + 1) * per_step
    near = " or ".join(str(n) for n in (below, above) if n)
    message = (
        f"a global batch of {global_batch} sequences does not divide into micro-batches of {micro_batch_size} on {world_size} "
        f"rank{'s' if world_size > 1 else ''}: it must be a multiple of {micro_batch_size} x {world_size} = {per_step}. "
        f"Take global_batch_size={near}"
    )
    if global_batch % world_size == 0:
        share = global_batch // world_size
        fits = [m for m in range(1, share + 1) if share % m == 0]
        message += f", or micro_batch_size={min(fits, key=lambda m: (abs(m - micro_batch_size), m))}"
    else:
        fits = [w for w in range(1, world_size) if global_batch % (w * micro_batch_size) == 0]
        message += f", or {fits[-1]} rank{'s' if fits[-1] > 1 else ''}" if fits else ""
    raise ValueError(message + ".")
