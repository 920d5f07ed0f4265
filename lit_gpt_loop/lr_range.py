"""Learning-rate range test: rates from far too small to far too large over a hundred updates, then everything put back (layer L).

    trainer = pl.Trainer(..., callbacks=[LRRangeTest(max_lr=1.0)])
    trainer.fit(model, datamodule=data)      # tests first, prints a suggestion, then trains as if nothing had been

The rate grows by a constant factor per update (Smith 2017, arXiv:1506.01186, in Howard and Gugger's geometric form). Rates work
from where the loss begins to fall to where it turns; `suggestion` is the rate of the steepest fall of the smoothed loss, and
`lr_at_minimum / 10` the cautious one. Both are for the batch that was tested: with warmup and decay, and to another
batch by `lr_scaling.py`.

Parameters, buffers, optimizer, RNG of Python, NumPy and torch, gradients and data position are bitwise what they were before. It
needs memory for one more copy of parameters and moments.
"""

import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn

_SMOOTHING = 0.9  # of the moving average of the loss, corrected for its start


@dataclass
class RangeResult:
    """What a range test saw.

    Attributes:
        rates: the rate of each update.
        losses: the loss of each update's batch before that update, nats per token.
        smoothed: the losses' moving average.
        stopped_early: whether the loss diverged before `max_lr`.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    stopped_early: bool = False

    @property
    def lr_at_minimum(self) -> float | None:
        """The rate at which the smoothed loss was lowest."""
        if not self.smoothed:
            return None
        return self.rates[min(range(len(self.smoothed)), key=self.smoothed.__getitem__)]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss fell fastest per factor of the rate, before its minimum; None if it never fell."""
        if len(self.smoothed) < 3:
            return None
        best = min(range(len(self.smoothed)), key=self.smoothed.__getitem__)
        slopes = [
            self.smoothed[i + 1] - self.smoothed[i - 1]
            for i in range(1, min(best + 1, len(self.smoothed) - 1))
        ]
        if not slopes or min(slopes) >= 0:
            return None
        return self.rates[1 + slopes.index(min(slopes))]


def range_test(
    update: Callable[[], float],
    optimizer: torch.optim.Optimizer,
    modules: Iterable[nn.Module],
    min_lr: float = 1e-7,
    max_lr: float = 1.0,
    num_updates: int = 100,
    stop_factor: float = 2.0,
) -> RangeResult:
    """Run updates at growing rates and put everything back.

    Args:
        update: makes one update with `optimizer` at the rates in its groups and returns the loss before it; all ranks must
            see the same number.
        optimizer: its groups keep their ratios of rates.
        modules: those that `update` changes.
        min_lr: first rate (of the group with the largest one).
        max_lr: last rate.
        num_updates: updates from `min_lr` to `max_lr`.
        stop_factor: stop when the smoothed loss exceeds this many times its lowest, or is not finite.

    Raises:
        ValueError: the rates do not grow, or fewer than 3 updates.
    """
    if not 0 < min_lr < max_lr:
        raise ValueError(f"min_lr={min_lr} must be above 0 and below max_lr={max_lr}")
    if num_updates < 3:
        raise ValueError(f"num_updates={num_updates}: a curve needs at least 3, 100 is usual")
    result = RangeResult()
    peak = max(float(group["lr"]) for group in optimizer.param_groups)
    ratios = [float(group["lr"]) / peak if peak > 0 else 1.0 for group in optimizer.param_groups]
    average = 0.0
    with _Unchanged(optimizer, list(modules)):
        for i in range(num_updates):
            rate = min_lr * (max_lr / min_lr) ** (i / (num_updates - 1))
            for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
                group["lr"] = rate * ratio
            loss = update()
            if not math.isfinite(loss):
                result.stopped_early = True
                break
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            result.rates.append(rate)
            result.losses.append(loss)
            result.smoothed.append(average / (1 - _SMOOTHING ** (i + 1)))
            if result.smoothed[-1] > stop_factor * min(result.smoothed):
                result.stopped_early = True
                break
    return result


class _Unchanged:
    """Context after which parameters, buffers, gradients, optimizer and RNG are bitwise what they were before."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> None:
        self.optimizer = optimizer
        self.tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __enter__(self) -> None:
        self.values = [t.detach().clone() for t in self.tensors]
        self.gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        self.state = {
            p: {k: (v, v.detach().clone() if isinstance(v, Tensor) else v) for k, v in state.items()}
            for p, state in self.optimizer.state.items()
        }
        self.groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        # Private in torch, which has no way to step without telling those who watch (LoopAudit, LitGPT): these are no updates
        # of the run. tests/lit_gpt_loop/test_lr_tools.py notices if torch renames them.
        self.hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        self.optimizer._optimizer_step_pre_hooks = OrderedDict()
        self.optimizer._optimizer_step_post_hooks = OrderedDict()
        self.rng = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self.cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    @torch.no_grad()
    def __exit__(self, *exc: Any) -> None:
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        self.optimizer.state.clear()
        for p, state in self.state.items():
            # Into the tensors that were there: others may hold references to them.
            for old, value in state.values():
                if isinstance(old, Tensor):
                    old.copy_(value)
            self.optimizer.state[p] = {k: old for k, (old, _) in state.items()}
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(settings)
        self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks = self.hooks
        random.setstate(self.rng[0])
        np.random.set_state(self.rng[1])
        torch.set_rng_state(self.rng[2])
        if self.cuda_rng is not None:
            torch.cuda.set_rng_state_all(self.cuda_rng)


class LRRangeTest(pl.Callback):
    """Run a range test when a fit starts (after a checkpoint was restored), then train as if it had not been.

    Updates are those of the run: its micro-batches, accumulation and ranks. Only the learning rate differs. The result is in
    `result`, and in `lr_range.json` in the run's directory.

    Args:
        min_lr: first rate.
        max_lr: last rate.
        num_updates: updates of the test.
        stop_factor: see `range_test`.
        stop_after: end the fit after the test.
    """

    def __init__(
        self,
        *,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        num_updates: int = 100,
        stop_factor: float = 2.0,
        stop_after: bool = False,
    ) -> None:
        self.min_lr, self.max_lr, self.num_updates = min_lr, max_lr, num_updates
        self.stop_factor, self.stop_after = stop_factor, stop_after
        self.result: RangeResult | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Test, put back, report."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ValueError(
                "LRRangeTest works with one optimizer and automatic optimization; leave the callback out"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "LRRangeTest does not work with the fp16 scaler, whose skips would hide divergence: use bf16-mixed or 32-true"
            )
        optimizer: torch.optim.Optimizer = trainer.optimizers[0]
        loader: Any = trainer.train_dataloader
        strategy: Any = trainer.strategy
        num_micro = trainer.accumulate_grad_batches
        batches: Iterator[Any] = iter(())

        def update() -> float:
            nonlocal batches
            total = torch.zeros((), device=strategy.root_device)
            optimizer.zero_grad()
            for k in range(num_micro):
                batch = next(batches, None)
                if batch is None:  # a loader with an end
                    batches = iter(loader)
                    batch = next(batches)
                batch = strategy.batch_to_device(batch)
                with strategy.block_backward_sync() if _blocks(trainer, k, num_micro) else nullcontext():
                    output: Any = strategy.training_step(batch, k)
                    loss = (output["loss"] if isinstance(output, dict) else output) / num_micro
                    loss.backward()  # not the strategy's, which would tell the other callbacks
                total += loss.detach()
            optimizer.step()
            return float(strategy.reduce(total, reduce_op="mean"))

        rank_zero_info(
            f"learning-rate range test: {self.num_updates} updates from {self.min_lr:g} to {self.max_lr:g}"
        )
        self.result = range_test(
            update, optimizer, [pl_module], self.min_lr, self.max_lr, self.num_updates, self.stop_factor
        )
        optimizer.zero_grad()
        self._report(trainer, self.result)
        if self.stop_after:
            trainer.should_stop = True

    @rank_zero_only
    def _report(self, trainer: pl.Trainer, result: RangeResult) -> None:
        suggestion, minimum = result.suggestion, result.lr_at_minimum
        rank_zero_info(
            "learning-rate range test: "
            + (f"steepest fall at {suggestion:.3g}, " if suggestion is not None else "the loss never fell, ")
            + (
                f"lowest loss at {minimum:.3g} (a tenth of it: {minimum / 10:.3g})"
                if minimum is not None
                else "no finite loss"
            )
            + (f"; diverged after {len(result.rates)} updates" if result.stopped_early else "")
        )
        path = Path(trainer.default_root_dir) / "lr_range.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({**asdict(result), "suggestion": suggestion, "lr_at_minimum": minimum}) + "\n"
        )


def _blocks(trainer: pl.Trainer, k: int, num_micro: int) -> bool:
    return k < num_micro - 1 and hasattr(trainer.strategy, "block_backward_sync")
