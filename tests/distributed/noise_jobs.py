"""What ranks run for the checks of NoiseScale, and what it should have come to: float64, from every micro-batch's own gradient."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from callbacks.grad_norm import GradNormMonitor
from callbacks.token_weighted_loss import TokenWeightedLoss
from lit_gpt_loop import strategies
from lit_gpt_loop.noise_scale import NoiseScale
from tests.distributed.token_jobs import rank_and_world
from tests.distributed.toys import Net, Toy, fit, precision_arguments, sequences

ROWS = 4  # of a micro-batch
Parts = list[tuple[Tensor, Tensor]]


def micro_batches(world: int, accumulate: int, num_updates: int, masks: str) -> Parts:
    """Return micro-batches in the order (update, micro-batch, rank).

    Args:
        world: ranks.
        accumulate: micro-batches of each update and rank.
        num_updates: updates.
        masks: "none", "half" (the first half of every row does not count) or "random" (one row has no target at all).
    """
    num = world * accumulate * num_updates
    inputs, targets = sequences(num * ROWS)
    if masks != "random":
        targets = (inputs * 3 + 1) % 11
    if masks == "half":
        targets[:, : targets.shape[1] // 2] = -100
    if masks == "empty":  # the first micro-batch of rank 0
        targets[:ROWS] = -100
    return list(zip(inputs.chunk(num), targets.chunk(num), strict=True))


def reference(
    parts: Parts, world: int, window_sizes: list[int], is_synced: bool
) -> tuple[float, float] | None:
    """Return (|G|^2, tr(S) per token): the mean over updates of two linear equations in them, solved for each update.

    Args:
        parts: as `micro_batches` gives them.
        world: ranks.
        window_sizes: micro-batches of each update and rank.
        is_synced: whether the small batch is that of all ranks together, instead of each rank's own.
    """
    torch.manual_seed(0)
    net = Net().double()
    found, start = [], 0
    for size in window_sizes:
        gradients, counts = [], []
        for inputs, targets in parts[start : start + size * world]:
            net.zero_grad()
            F.cross_entropy(
                net(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            ).backward()
            gradients.append(
                np.concatenate([p.grad.flatten().numpy() for p in net.parameters() if p.grad is not None])
            )
            counts.append(int((targets != -100).sum()))
        start += size * world
        big = sum(gradients) / sum(counts)
        first = [(g, n) for g, n in zip(gradients[:world], counts[:world], strict=True) if n > 0]
        if size < 2 or not first:
            continue
        if is_synced:
            tokens = float(sum(n for _, n in first))
            norm = float((np.square(sum(g for g, _ in first) / tokens)).sum())
            inverse = 1 / tokens
        else:
            norm = float(np.mean([np.square(g / n).sum() for g, n in first]))
            inverse = float(np.mean([1 / n for _, n in first]))
        rows = [[1.0, inverse], [1.0, 1 / sum(counts)]]
        found.append(np.linalg.solve(rows, [norm, np.square(big).sum()]))
    mean = np.mean(found, axis=0)
    return float(mean[0]), float(mean[1])


def measure(
    strategy: str | None = None,
    masks: str = "none",
    accumulate: int = 4,
    num_updates: int = 3,
    drop: int = 0,
    precision: str = "32-true",
    **strategy_arguments: Any,
) -> dict[str, Any]:
    """Return what NoiseScale averaged and logged, and the reference, over updates of 4 micro-batches per rank.

    Args:
        strategy: a class of lit_gpt_loop.strategies; None is one process.
        masks: see `micro_batches`.
        accumulate: micro-batches of each update and rank.
        num_updates: updates.
        drop: micro-batches that the last window lacks on each rank.
        precision: of the Trainer.
        **strategy_arguments: for the strategy.
    """
    rank, world = rank_and_world() if strategy is not None else (0, 1)
    parts = micro_batches(world, accumulate, num_updates, masks)[: (accumulate * num_updates - drop) * world]
    scale = NoiseScale(warmup=1)
    _, logger, _ = fit(
        Toy(sharded=strategy == "FSDP2", lr=0.0),
        parts[rank::world],
        strategy=strategy,
        strategy_object=None if strategy is None else getattr(strategies, strategy)(**strategy_arguments),
        callbacks=[TokenWeightedLoss(), GradNormMonitor(), scale],
        accumulate=accumulate,
        **precision_arguments(precision, strategy),
    )
    average = scale.average
    sizes = [accumulate] * (num_updates - 1) + [accumulate - drop]
    is_synced = bool(strategy_arguments.get("sync_every_micro_batch"))
    return {
        "measured": None if average is None else (average.grad_norm_squared, average.noise),
        "expected": reference(parts, world, sizes, is_synced),
        "logged": logger.series("optim/noise_scale"),
    }
