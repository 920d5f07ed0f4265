"""Learning-rate range test: rates from far too small to far too large over a hundred updates, then everything put back (layer L).

    trainer = pl.Trainer(..., callbacks=[LRRangeTest(max_lr=1.0)])
    trainer.fit(model, datamodule=data)      # tests first, prints a suggestion, then trains as if nothing had been

The rate grows by a constant factor per update (Smith 2017, arXiv:1506.01186, in Howard and Gugger's geometric form). Rates work
from where the loss begins to fall to where it turns; `suggestion` is the rate of the steepest fall of the smoothed loss, and
`lr_at_minimum / 10` the cautious one. Both are for the batch that was tested: with warmup and decay, and to another
batch by `lr_scaling.py`.

Parameters, buffers, optimizer, RNG of Python, NumPy and torch, gradients, data position (`read_aside.py`) and callbacks are
bitwise what they were before. It needs memory for one more copy of parameters and moments.
(Longer than 400 lines: what the test does and what it puts back have to be seen side by side.)
"""

import json
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn

from lit_gpt_loop.grad_squares import Shares, local, sum_over_ranks
from lit_gpt_loop.read_aside import ReadAside

_TELLS_EVERY_S = 5.0
_SMOOTHING = 0.9  # of the moving average of the loss, corrected for its start


@dataclass
class RangeResult:
    """What a range test saw.

    Attributes:
        rates: the rate of each update.
        losses: the loss of each update's batch before that update, nats per token; weighted as its gradient is.
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
    update: Callable[[], float | None],
    optimizer: torch.optim.Optimizer,
    modules: Iterable[nn.Module],
    min_lr: float = 1e-7,
    max_lr: float = 1.0,
    num_updates: int = 100,
    stop_factor: float = 2.0,
) -> RangeResult:
    """Run updates at growing rates and put everything back.

    Args:
        update: makes one update with `optimizer` at the rates in its groups and returns the loss before it, or None for an
            update that says nothing and leaves no point; all ranks must see the same number.
        optimizer: its groups keep their ratios of rates.
        modules: those that `update` changes.
        min_lr: first rate (of the group with the largest one).
        max_lr: last rate.
        num_updates: updates from `min_lr` to `max_lr`.
        stop_factor: stop when the smoothed loss exceeds this many times its lowest, or is not finite.

    Raises:
        ValueError: the rates do not grow, or fewer than 3 updates.
    """
    _check(min_lr, max_lr, num_updates)
    result = RangeResult()
    peak = max(float(group["lr"]) for group in optimizer.param_groups)
    ratios = [float(group["lr"]) / peak if peak > 0 else 1.0 for group in optimizer.param_groups]
    average = 0.0
    with _same_random_numbers(), _Unchanged(optimizer, list(modules)):
        for i in range(num_updates):
            rate = min_lr * (max_lr / min_lr) ** (i / (num_updates - 1))
            for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
                group["lr"] = rate * ratio
            loss = update()
            if loss is None:
                continue
            if not math.isfinite(loss):
                result.stopped_early = True
                break
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            result.rates.append(rate)
            result.losses.append(loss)
            result.smoothed.append(average / (1 - _SMOOTHING ** len(result.losses)))
            if result.smoothed[-1] > stop_factor * min(result.smoothed):
                result.stopped_early = True
                break
    return result


def _check(min_lr: float, max_lr: float, num_updates: int) -> None:
    if not 0 < min_lr < max_lr:
        raise ValueError(f"min_lr={min_lr} must be above 0 and below max_lr={max_lr}")
    if num_updates < 3:
        raise ValueError(f"num_updates={num_updates}: a curve needs at least 3, 100 is usual")


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """After this context the RNG of Python, NumPy and torch are where they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def _same_attributes(owner: Any) -> Iterator[None]:
    """After this context an object holds the values that it held; they must not change in themselves."""
    saved = vars(owner).copy()
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(saved)


class _Unchanged:
    """Context after which parameters, buffers, gradients and optimizer are bitwise what they were before."""

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


class LRRangeTest(pl.Callback):
    """Run a range test when a fit starts (after a checkpoint was restored), then train as if it had not been.

    Updates are those of the run, and only the learning rate differs: micro-batches, accumulation, ranks and precision; weighted
    by TokenWeightedLoss, clipped by GradNormMonitor or the Trainer, and without the gradients that GradNormMonitor drops, where
    the run has these. What the run does and the test does not: the end of a loader cuts its last window short (the test goes on
    with the next pass), and hooks of the other callbacks and of the module are called. Of the module the test calls
    `training_step`, `backward`, `configure_gradient_clipping` and the hooks of batch transfer; what they `log` is dropped, what
    they keep in attributes of their own (a metric's sums) stays.

    The result is in `result`, and in `lr_range.json` in the run's directory.

    Args:
        min_lr: first rate.
        max_lr: last rate.
        num_updates: updates of the test.
        stop_factor: see `range_test`.
        stop_after: end the fit after the test.

    Raises:
        ValueError: a rate or number is out of range; at the start of a fit, with several optimizers, manual optimization, an fp16
            scaler, several training loaders or one that is an iterator without a state.
        RuntimeError: a loader or datamodule whose `load_state_dict` does not bring its position back.
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
        _check(min_lr, max_lr, num_updates)
        self.min_lr, self.max_lr, self.num_updates = min_lr, max_lr, num_updates
        self.stop_factor, self.stop_after = stop_factor, stop_after
        self.result: RangeResult | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Go to the front of the callbacks: the clocks that others start in `on_train_start` must not count the test."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)
        callbacks.insert(0, self)

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
        rank_zero_info(
            f"learning-rate range test: {self.num_updates} updates from {self.min_lr:g} to {self.max_lr:g}"
        )
        optimizer = trainer.optimizers[0]
        num_done, told = 0, time.monotonic()

        def update() -> float | None:
            nonlocal num_done, told
            loss = updates()
            num_done += 1
            if time.monotonic() - told > _TELLS_EVERY_S:
                told = time.monotonic()
                at = f"update {num_done} of {self.num_updates}, rate {optimizer.param_groups[0]['lr']:.3g}"
                rank_zero_info(
                    f"learning-rate range test: {at}, loss {'unknown' if loss is None else f'{loss:.4g}'}"
                )
            return loss

        aside = ReadAside(trainer.train_dataloader, getattr(trainer, "datamodule", None))
        with _same_random_numbers(), aside:
            updates = _Updates(trainer, pl_module, aside.batches)
            with nullcontext() if updates.weigher is None else _same_attributes(updates.weigher):
                self.result = range_test(
                    update,
                    optimizer,
                    [pl_module],
                    self.min_lr,
                    self.max_lr,
                    self.num_updates,
                    self.stop_factor,
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


@contextmanager
def _nothing_logged(module: pl.LightningModule) -> Iterator[None]:
    """Drop what the module logs: these are no updates of the run, and Lightning would file it under `on_train_start`."""
    attributes = vars(module)
    own = attributes.get("log")
    attributes["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        attributes.pop("log", None)  # TokenWeightedLoss, which holds logs back once, takes it away
        if own is not None:
            attributes["log"] = own


class _Updates:
    """Called, makes one update as the run makes them, at the rates in the optimizer's groups; returns its loss.

    Attributes:
        weigher: the run's TokenWeightedLoss, if it has one.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, batches: Iterator[Any]) -> None:
        self.trainer, self.module, self.batches = trainer, module, batches
        self.strategy: Any = trainer.strategy
        self.optimizer = trainer.optimizers[0]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        by_name: dict[str, Any] = {type(c).__name__: c for c in callbacks}
        self.weigher = by_name.get("TokenWeightedLoss")
        self.monitor = by_name.get("GradNormMonitor")
        self.shares = Shares(trainer.strategy.model or module, trainer.world_size)

    def __call__(self) -> float | None:
        self.optimizer.zero_grad()
        num_micro = self.trainer.accumulate_grad_batches
        total = torch.zeros((), device=self.strategy.root_device)
        for k in range(num_micro):
            with self.strategy.block_backward_sync() if self._blocks(k, num_micro) else nullcontext():
                total += self._micro_batch(k, num_micro)
        loss = self._loss(float(total))
        if loss is None or not math.isfinite(loss):
            return loss
        if self.weigher is not None:
            self.weigher.on_before_optimizer_step(self.trainer, self.module, self.optimizer)
        self._clip()
        self.optimizer.step()
        return loss

    def _micro_batch(self, k: int, num_micro: int) -> Tensor:
        """Add the gradient of the next micro-batch; return its part of the loss."""
        batch = self.trainer.precision_plugin.convert_input(next(self.batches))
        # Private in Lightning: it alone asks the datamodule's hook and the module's as a run does.
        # tests/lit_gpt_loop/test_lr_tools.py notices if Lightning renames it.
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self.strategy.batch_to_device(batch, dataloader_idx=0)
        with _nothing_logged(self.module):
            output: Any = self.strategy.training_step(batch, k)
        loss = (output["loss"] if isinstance(output, dict) else output) / num_micro
        # Not by the strategy, which would tell the other callbacks.
        if self.weigher is not None:
            self.weigher.on_before_backward(self.trainer, self.module, loss)
        self.module.backward(loss)
        if self.weigher is not None:
            self.weigher.on_after_backward(self.trainer, self.module)
        return loss.detach()

    def _loss(self, mean: float) -> float | None:
        """Return the update's loss, the same on every rank; None if no token of it counts."""
        if self.weigher is None:
            return sum_over_ranks(self.strategy, [mean])[0] / self.trainer.world_size
        loss_sum, num_tokens = sum_over_ranks(self.strategy, [float(x) for x in self.weigher.window])
        return loss_sum / num_tokens if num_tokens > 0 else None

    @torch.no_grad()
    def _clip(self) -> None:
        """Clip as the run does, and as GradNormMonitor does drop a gradient that is not finite."""
        if self.monitor is not None:
            squares = float(self.shares.sum_of_squares(self.parameters))
            norm = math.sqrt(sum_over_ranks(self.strategy, [squares])[0])
            gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
            clip_norm = self.monitor.clip_norm
            if not math.isfinite(norm):
                for p in self.parameters:
                    p.grad = None
            elif clip_norm is not None and norm > clip_norm and gradients:
                torch._foreach_mul_(gradients, clip_norm / norm)
        with _nothing_logged(self.module):
            self.module.configure_gradient_clipping(
                self.optimizer,
                gradient_clip_val=self.trainer.gradient_clip_val,
                gradient_clip_algorithm=self.trainer.gradient_clip_algorithm,
            )

    def _blocks(self, k: int, num_micro: int) -> bool:
        return k < num_micro - 1 and hasattr(self.strategy, "block_backward_sync")
