"""The gradient noise scale while a run goes on, from GradNormMonitor's numbers (layer L; a callback).

    callbacks: [callbacks.TokenWeightedLoss, callbacks.GradNormMonitor, lit_gpt_loop.noise_scale.NoiseScale]

| key | unit | definition |
|---|---|---|
| `optim/noise_scale` | tokens | tr(S) / |G|^2, the batch at which noise and signal of the gradient are equal (McCandlish et al. 2018) |

An update's gradient has a smaller norm than those of its parts, by as much as noise averages out. The norm of the whole is
`optim/grad_norm`; that of a part is taken here, after the first micro-batch of each window. The part is each rank's micro-batch
(averaged over ranks) where ranks exchange gradients at the end of a window, and the first micro-batches of all ranks together
where they exchange them at every micro-batch. Both are norms of gradients of the mean loss per token: the loss scale and
TokenWeightedLoss's weights are divided out. Both unknowns follow (`lr_scaling.noise_estimate`); each is averaged over updates
before they are divided. Well below this many tokens per update, a larger batch needs nearly proportionally fewer updates; well
above, it buys little.

Tokens count as independent samples, which matters only where micro-batches differ in tokens. An update that was skipped or has
one micro-batch (the rest of an epoch) says nothing and is left out.

Costs one pass over the gradients per update and, on several ranks, one collective of two or three scalars.
"""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn

from lit_gpt_loop.grad_squares import Shares, sum_of_squares, sum_over_ranks
from lit_gpt_loop.lr_scaling import NoiseEstimate, noise_estimate, simple_noise_scale


class NoiseScale(pl.Callback):
    """Logs `optim/noise_scale`; see the top of the file.

    Args:
        memory: updates over which the averages reach back (an exponential average with decay 1 - 1 / memory).
        warmup: updates to average before the first value is logged.

    Raises:
        ValueError: an argument out of range; at the start of a fit, without TokenWeightedLoss and GradNormMonitor earlier in the
            list, with one micro-batch per update, or under a strategy that shows no micro-batch's gradient: FSDP2 that exchanges
            gradients once per update, FSDP1 with `use_orig_params=False`, tensor parallelism, strategies other than one device,
            DDP, FSDP1 and FSDP2.
    """

    def __init__(self, *, memory: int = 100, warmup: int = 20) -> None:
        if memory < 1 or warmup < 1:
            raise ValueError(f"NoiseScale(memory={memory}, warmup={warmup}): both must be at least 1")
        self.memory, self.warmup = memory, warmup
        self.average: NoiseEstimate | None = None
        self.num_updates = 0
        self._weigher: Any = None
        self._is_synced = False
        self._shares: Shares | None = None
        self._last_step = 0
        self._start_window()

    def _start_window(self) -> None:
        self._num_micro_batches = 0
        self._squares = torch.zeros(())  # of the first micro-batch's gradient, as backward left it
        self._num_tokens: Any = 0.0  # of the first micro-batch, on this rank
        self._divisor = 1  # of its loss
        self._loss_scale = 1.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that both norms will be there."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        before = {type(c).__name__: c for c in callbacks[: callbacks.index(self)]}
        for name, number in (
            ("GradNormMonitor", "optim/grad_norm"),
            ("TokenWeightedLoss", "the tokens of an update"),
        ):
            if name not in before:
                raise ValueError(f"NoiseScale reads {number}: list {name} before it in trainer.callbacks")
        if trainer.accumulate_grad_batches < 2:
            raise ValueError(
                "NoiseScale compares micro-batches with the update that they make, and there is one micro-batch per update: accumulate "
                "at least two (data.global_batch_size = 2 x micro_batch_size x devices), or leave the callback out"
            )
        self._weigher = before["TokenWeightedLoss"]
        self._is_synced = _exchanges_every_micro_batch(trainer.strategy)
        model: nn.Module = trainer.strategy.model  # type: ignore[assignment]
        if any(hasattr(p, "_is_flat_param") for p in model.parameters()):
            raise ValueError(
                "NoiseScale got FSDP1 with use_orig_params=False, whose gradients belong to no parameter of the module: leave "
                "use_orig_params out (true is the default), or leave the callback out"
            )
        self._shares = Shares(model, trainer.world_size) if self._is_synced else None
        self._last_step = trainer.global_step
        self._start_window()

    @torch.no_grad()
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the first micro-batch of a window, note its tokens and the sum of squares of its gradient."""
        self._num_micro_batches += 1
        if self._num_micro_batches > 1:
            return
        parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        if self._shares is not None:
            self._squares = self._shares.sum_of_squares(parameters)
        else:
            self._squares = sum_of_squares(p.grad for p in parameters if p.grad is not None)
        _, self._num_tokens = self._weigher.window
        self._divisor = trainer.accumulate_grad_batches

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note the loss scale of this window, before the scaler moves it."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._loss_scale = 1.0 if scaler is None else float(scaler.get_scale())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At an update, estimate, average and log."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        estimate = self._estimate(trainer)
        self._start_window()
        if estimate is None:
            return
        self.num_updates += 1
        weight = max(1.0 / self.num_updates, 1.0 / self.memory)
        old = self.average or estimate
        self.average = NoiseEstimate(
            old.grad_norm_squared + weight * (estimate.grad_norm_squared - old.grad_norm_squared),
            old.noise + weight * (estimate.noise - old.noise),
        )
        value = simple_noise_scale([self.average])
        if value is None or self.num_updates < self.warmup:
            trainer.callback_metrics.pop("optim/noise_scale", None)
            return
        for logger in trainer.loggers:
            logger.log_metrics({"optim/noise_scale": value}, step=trainer.global_step)
        trainer.callback_metrics["optim/noise_scale"] = torch.tensor(value)

    def _estimate(self, trainer: pl.Trainer) -> NoiseEstimate | None:
        """Return this update's estimate, the same on every rank; None if the update says nothing."""
        norm, tokens = (trainer.callback_metrics.get(k) for k in ("optim/grad_norm", "train/tokens"))
        if norm is None or tokens is None or self._num_micro_batches < 2:
            return None
        squares, num_tokens = float(self._squares), float(self._num_tokens)
        # Backward left (tokens / nominal / micro-batches x loss scale) of the gradient of the micro-batch's mean loss.
        unit = self._divisor * self._weigher.nominal_tokens / self._loss_scale
        if self._is_synced:
            # The mean over ranks of what each of them left.
            total, small_batch = sum_over_ranks(trainer.strategy, [squares, num_tokens])
            small = total * (trainer.world_size * unit / small_batch) ** 2 if small_batch > 0 else 0.0
        else:
            # A rank whose micro-batch holds no token has no mean gradient. E |g_n|^2 = |G|^2 + tr(S) / n, averaged over ranks.
            mine = (
                [squares * (unit / num_tokens) ** 2, 1.0 / num_tokens, 1.0] if num_tokens > 0 else [0.0] * 3
            )
            total, inverse, num_ranks = sum_over_ranks(trainer.strategy, mine)
            small, small_batch = (total / num_ranks, num_ranks / inverse) if num_ranks > 0 else (0.0, 0.0)
        big, big_batch = float(norm) ** 2, float(tokens)
        if not 0 < small_batch < big_batch or not math.isfinite(small + big):
            return None
        return noise_estimate(small, big, small_batch, big_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        average = None if self.average is None else [self.average.grad_norm_squared, self.average.noise]
        return {"average": average, "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the averages up."""
        average = state_dict["average"]
        self.average = None if average is None else NoiseEstimate(*average)
        self.num_updates = state_dict["num_updates"]


def _exchanges_every_micro_batch(strategy: Any) -> bool:
    """Whether a micro-batch's gradient is the mean over ranks, instead of each rank's own, before a window ends.

    Raises:
        ValueError: the strategy shows neither.
    """
    ours = getattr(strategy, "sync_every_micro_batch", None)  # Lightning's own strategies have no such choice
    if isinstance(strategy, SingleDeviceStrategy):
        return False
    if isinstance(strategy, DDPStrategy):
        return bool(ours)
    if isinstance(strategy, FSDPStrategy):
        return ours is not False
    if not isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            f"NoiseScale does not know when {type(strategy).__name__} exchanges gradients: use one device, DDP, FSDP or FSDP2 of "
            "lit_gpt_loop.strategies, or leave the callback out"
        )
    mesh = strategy.device_mesh
    if "tensor_parallel" in (mesh.mesh_dim_names or ()) and mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"NoiseScale takes each rank to train on rows of its own, and {mesh['tensor_parallel'].size()} ranks share theirs by "
            "tensor parallelism: set tensor_parallel_size=1, or leave the callback out"
        )
    if ours is False:
        raise ValueError(
            "NoiseScale cannot see a micro-batch's gradient under FSDP2, which keeps a window's gradients to itself until they are "
            "exchanged: use FSDP2(sync_every_micro_batch=True), DDP or FSDP, or leave the callback out"
        )
    return True
