"""The gradient noise scale while a run goes on, from GradNormMonitor's numbers (layer L; a callback).

    callbacks: [callbacks.TokenWeightedLoss, callbacks.GradNormMonitor, lit_gpt_loop.noise_scale.NoiseScale]

| key | unit | definition |
|---|---|---|
| `optim/noise_scale` | tokens | tr(S) / |G|^2, the batch at which noise and signal of the gradient are equal (McCandlish et al. 2018) |

An update's gradient has a smaller norm than each of its micro-batches' gradients, by as much as noise averages out. The norm of
the whole is `optim/grad_norm`; that of a part is taken here, after the first micro-batch of each window, averaged over ranks.
Both unknowns follow (`lr_scaling.noise_estimate`); each is averaged over updates before they are divided. Well below this many
tokens per update, a larger batch needs nearly proportionally fewer updates; well above, it buys little.

Micro-batches must be of equal size (packed batches are). Costs one pass over the gradients per update and, on several ranks,
one scalar collective.
"""

from typing import Any

import lightning.pytorch as pl
import torch

from lit_gpt_loop.lr_scaling import NoiseEstimate, noise_estimate, simple_noise_scale


class NoiseScale(pl.Callback):
    """Logs `optim/noise_scale`; see the top of the file.

    Args:
        memory: updates over which the averages reach back (an exponential average with decay 1 - 1 / memory).
        warmup: updates to average before the first value is logged.

    Raises:
        ValueError: an argument out of range; at the start of a fit, without GradNormMonitor earlier in the list, with one
            micro-batch per update, or with sharded gradients.
    """

    def __init__(self, *, memory: int = 100, warmup: int = 20) -> None:
        if memory < 1 or warmup < 1:
            raise ValueError(f"NoiseScale(memory={memory}, warmup={warmup}): both must be at least 1")
        self.memory, self.warmup = memory, warmup
        self.average: NoiseEstimate | None = None
        self.num_updates = 0
        self._small: torch.Tensor | None = None
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that both norms will be there."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        before = [type(c).__name__ for c in callbacks[: callbacks.index(self)]]
        if "GradNormMonitor" not in before:
            raise ValueError(
                "NoiseScale reads optim/grad_norm: list GradNormMonitor before it in trainer.callbacks"
            )
        if trainer.accumulate_grad_batches < 2:
            raise ValueError(
                "NoiseScale compares micro-batches with the update that they make, and there is one micro-batch per update: accumulate "
                "at least two (data.global_batch_size = 2 x micro_batch_size x devices), or leave the callback out"
            )
        model: Any = trainer.strategy.model
        if any(hasattr(p, "device_mesh") or hasattr(p, "_is_flat_param") for p in model.parameters()):
            raise ValueError(
                "NoiseScale needs whole gradients on each rank: use it on one device or DDP, or leave it out"
            )
        self._last_step, self._small = trainer.global_step, None

    @torch.no_grad()
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the first micro-batch of a window, note the squared norm of its gradient."""
        if self._small is not None:
            return
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            # Each micro-batch gives 1 / k of the update's gradient.
            self._small = (
                torch.stack(list(norms)).double().square().sum() * trainer.accumulate_grad_batches**2
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At an update, estimate, average and log."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        small, self._small = self._small, None
        norm, tokens = (trainer.callback_metrics.get(k) for k in ("optim/grad_norm", "train/tokens"))
        if small is None or norm is None or not torch.isfinite(norm) or not torch.isfinite(small):
            return
        small = trainer.strategy.reduce(small, reduce_op="mean")
        parts = trainer.accumulate_grad_batches * trainer.world_size
        total = float(tokens) if tokens is not None else float(parts)
        estimate = noise_estimate(float(small), float(norm) ** 2, total / parts, total)
        self.num_updates += 1
        weight = max(1.0 / self.num_updates, 1.0 / self.memory)
        old = self.average or estimate
        self.average = NoiseEstimate(
            old.grad_norm_squared + weight * (estimate.grad_norm_squared - old.grad_norm_squared),
            old.noise + weight * (estimate.noise - old.noise),
        )
        value = simple_noise_scale([self.average])
        if value is None or self.num_updates < self.warmup:
            return
        for logger in trainer.loggers:
            logger.log_metrics({"optim/noise_scale": value}, step=trainer.global_step)
        trainer.callback_metrics["optim/noise_scale"] = torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        average = None if self.average is None else [self.average.grad_norm_squared, self.average.noise]
        return {"average": average, "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the averages up."""
        average = state_dict["average"]
        self.average = None if average is None else NoiseEstimate(*average)
        self.num_updates = state_dict["num_updates"]
