"""Ways to split one global batch over micro-batches and ranks, and how far their gradients lie apart (layer T).

Beside the data flow: `recipes.verify_gradients` trains one update for each split and compares what reached the optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """`world_size` ranks, each with `accumulation` micro-batches of `micro_batch_size` sequences."""

    world_size: int
    micro_batch_size: int
    accumulation: int

    def __str__(self) -> str:
        ranks = "1 process" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks} x {self.accumulation} micro-batches of {self.micro_batch_size}"


def find_splits(batch_size: int, world_size: int) -> list[Split]:
    """Return splits of `batch_size` sequences: the whole batch at once first, then finer ones, then those of ranks.

    Args:
        batch_size: sequences of one update.
        world_size: the most ranks to use; 1 gives splits over micro-batches alone.

    Raises:
        ValueError: a batch that cannot be split, or not over that many ranks.
    """
    if batch_size < 2 or batch_size % world_size:
        raise ValueError(
            f"a batch of {batch_size} sequences cannot be split over {world_size} ranks: it has to be 2 or more and a multiple "
            "of the ranks"
        )
    splits = []
    for ranks in sorted({1, world_size}):
        each = batch_size // ranks
        divisors = [d for d in range(each, 0, -1) if each % d == 0]
        for micro in dict.fromkeys([*divisors[:2], divisors[-1]]):  # at once, the next coarser, one by one
            splits.append(Split(ranks, micro, each // micro))
    return splits


def mask_targets(targets: Tensor, sample_ids: Tensor, share: float, ignore_index: int = -100) -> None:
    """Leave a random share of up to `share` of each sequence's targets out, in place; a function of the sample alone.

    Sequences then hold different numbers of tokens, as padded or masked ones do, so that a loop which averages the means of
    micro-batches is wrong.

    Args:
        targets: (B, T).
        sample_ids: (B,).
        share: the largest share; each sequence draws its own, from 0 to this.
        ignore_index: the target that does not count.
    """
    for row, sample in zip(targets, sample_ids.tolist(), strict=True):
        generator = torch.Generator().manual_seed(int(sample))
        own = share * torch.rand((), generator=generator)
        row[(torch.rand(len(row), generator=generator) < own).to(row.device)] = ignore_index


def largest_difference(reference: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return (norm of the difference / norm of the reference, name) of the parameter where that is largest.

    A parameter that has a gradient in one of them only counts as infinitely far apart.
    """
    largest, name = 0.0, "-"
    for n in {**reference, **found}:
        if n not in reference or n not in found:
            return float("inf"), n
        a, b = reference[n].double(), found[n].double()
        norm = float(a.norm())
        apart = float((a - b).norm())
        relative = apart / norm if norm else (0.0 if apart == 0 else float("inf"))
        if relative > largest or relative != relative:
            largest, name = relative, n
            if relative != relative:
                return relative, n
    return largest, name
