"""What ranks run for the checks of TokenWeightedLoss; each function gives back plain numbers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from callbacks.token_weighted_loss import TokenWeightedLoss
from tests.distributed.toys import CountingToy, DividingToy, Net, Toy, distance, fit, full_batch, sequences


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def split(inputs: Tensor, targets: Tensor, num_micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's micro-batches of one update."""
    rank, world = rank_and_world()
    parts = list(
        zip(inputs.chunk(world * num_micro_batches), targets.chunk(world * num_micro_batches), strict=True)
    )
    return parts[rank::world]


def sweep(
    strategy: str | None, kinds: tuple[str, ...] = ("Toy",), callback: Any = None
) -> list[dict[str, Any]]:
    """Return, for 1, 2, 4 and 8 micro-batches and each module, distances from the full batch."""
    inputs, targets = sequences()
    torch.manual_seed(0)
    loss, gradient, tokens = full_batch(Net(), inputs, targets)
    rows = []
    for kind in kinds:
        for k in (1, 2, 4, 8):
            batches: list[Any] = split(inputs, targets, k)
            module = {"Toy": Toy, "CountingToy": CountingToy, "DividingToy": DividingToy}[kind](
                sharded=strategy == "FSDP2"
            )
            if kind == "CountingToy":
                batches = [{"x": x, "y": y} for x, y in batches]
            weighted = (callback or TokenWeightedLoss)()
            _, logger, record = fit(module, batches, strategy=strategy, callbacks=[weighted], accumulate=k)
            rows.append(
                {
                    "case": (strategy, kind, k),
                    "gradient": distance(record.gradients[0], gradient),
                    "loss": abs(record.metrics[0]["train/loss"] / loss - 1.0),
                    "tokens": record.metrics[0]["train/tokens"] - tokens,
                    "points": len(logger.series("train/loss")) if rank_and_world()[0] == 0 else 1,
                    "updates": len(record.gradients),
                    "seen": record.metrics[0]["train/loss"],
                }
            )
    return rows
