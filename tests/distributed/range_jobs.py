"""What ranks run for the checks of LRRangeTest's updates, and the same updates in plain PyTorch and float64."""

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from callbacks.grad_norm import GradNormMonitor
from callbacks.token_weighted_loss import TokenWeightedLoss
from lit_gpt_loop.lr_range import LRRangeTest
from tests.distributed.token_jobs import rank_and_world
from tests.distributed.toys import Net, Toy, fit, sequences

UPDATES, ACCUMULATE, ROWS = 6, 2, 4
RATES = (0.05, 2.0)


def micro_batches(world: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches in the order (update, micro-batch, rank), with masks; one row has no target at all."""
    num = UPDATES * ACCUMULATE * world
    inputs, targets = sequences(num * ROWS)
    return list(zip(inputs.chunk(num), targets.chunk(num), strict=True))


def reference(world: int, is_weighted: bool, clip_norm: float | None) -> list[float]:
    """Return the loss before each update of a plain loop of SGD at growing rates."""
    torch.manual_seed(0)
    net = Net().double()
    losses, parts = [], micro_batches(world)
    for update in range(UPDATES):
        window = parts[update * ACCUMULATE * world : (update + 1) * ACCUMULATE * world]
        tokens = sum(int((targets != -100).sum()) for _, targets in window)
        net.zero_grad()
        loss: Any = 0.0
        for inputs, targets in window:
            part = F.cross_entropy(
                net(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            loss = loss + part / (tokens if is_weighted else int((targets != -100).sum()) * len(window))
        loss.backward()
        losses.append(float(loss.detach()))
        norm = sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) ** 0.5
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
        rate = RATES[0] * (RATES[1] / RATES[0]) ** (update / (UPDATES - 1))
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= rate * scale * p.grad
    return losses


def losses_of_test(
    strategy: str | None, is_weighted: bool, clip_norm: float | None, by_trainer: bool = False
) -> tuple[list[float], list[float]]:
    """Return the losses of a range test, and those of the reference.

    Args:
        strategy: a class of lit_gpt_loop.strategies; None is one process.
        is_weighted: with TokenWeightedLoss.
        clip_norm: None clips nothing.
        by_trainer: clip by `Trainer(gradient_clip_val=...)` instead of GradNormMonitor.
    """
    rank, world = rank_and_world() if strategy is not None else (0, 1)
    test = LRRangeTest(min_lr=RATES[0], max_lr=RATES[1], num_updates=UPDATES, stop_after=True, stop_factor=99)
    callbacks: list[pl.Callback] = [TokenWeightedLoss()] if is_weighted else []
    if not by_trainer:
        callbacks.append(GradNormMonitor(clip_norm=clip_norm))
    arguments = {"gradient_clip_val": clip_norm} if by_trainer else {}
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Toy(sharded=strategy == "FSDP2"),
            micro_batches(world)[rank::world],
            strategy=strategy,
            callbacks=[*callbacks, test],
            accumulate=ACCUMULATE,
            default_root_dir=folder,
            **arguments,
        )
    assert test.result is not None
    return test.result.losses, reference(world, is_weighted, clip_norm)
