"""The gradient's global norm before clipping, clipping by that number, and updates that must not happen.

Drop it in (this file stands alone; copy it or import it):

    from callbacks import GradNormMonitor
    trainer = pl.Trainer(..., callbacks=[GradNormMonitor(clip_norm=1.0)])   # and no gradient_clip_val

The norm is taken once per update: after the fp16 scaler's division and after token weighting, before clipping; over all
shards under FSDP and FSDP2, each tied parameter once. The same number is logged and clips, so clipping works under FSDP,
where Lightning refuses it. With `Trainer(gradient_clip_val=...)` and no `clip_norm` the callback only watches.

| key | unit | definition |
|---|---|---|
| `optim/grad_norm` | | global L2 norm of the gradient, before clipping; left out for an update that was skipped |
| `optim/clip_coefficient` | | what clipping multiplied the gradient by; 1 when it did not clip |
| `optim/clipped` | 0/1 | whether this update was clipped |
| `optim/clip_fraction` | share | clipped updates / measured updates since the run began, restarts included |
| `optim/nonfinite_updates` | count | updates whose gradient held inf or NaN, restarts included |
| `optim/skipped_updates` | count | those, and updates without any gradient |
| `optim/loss_scale` | | the fp16 scaler's scale in this update; only with a scaler |
| `optim/weight_norm` | | global L2 norm of the module's parameters, before the update |
| `optim/grad_norm/<layer>` | | with `per_layer=True`: one for each block, embedding, head |

Skips. When the gradient is not finite on any rank, every rank skips the update: each `p.grad` becomes None, so that no
optimizer touches weights, moments or step counts, and the schedulers of this update's step are put back. (Lightning's
`global_step` still counts it.) The first parameter that holds a non-finite value is named in a warning. The norm of such an
update enters nothing. After `max_consecutive_skips` in a row the run stops with an error that names the samples; the
weights are those before the first of them, and if the Trainer has a checkpoint callback they are saved beside its files as
`healthy-step=N.ckpt` (CheckpointRetention, with `save_on_exit`, makes them its latest).

Cost: one pass over the gradients, one over the weights where they are measured, a second over the gradients when clipping;
one host synchronisation; one collective of a few scalars when parameters are sharded, none otherwise. (Longer than our
other files, because a file that is copied alone cannot be split.)
"""

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Return min(1, clip_norm / norm): what to multiply gradients by so that their norm is at most `clip_norm`."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of all values as a float64 scalar, right to 1e-6 for tensors of any size."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    device = tensors[0].device
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    parts, pieces = tensors, []
    if device.type == "cpu":
        # There one fp32 accumulator runs over a whole tensor: the norm of 19 M values is off by 9e-4 (torch 2.13, and so
        # is clip_grad_norm_). In rows of 1,024 it is off by 1e-9 and takes the same time.
        parts = []
        for t in tensors:
            if t.numel() <= (2**16 if t.dtype == torch.float32 else 2**12):
                parts.append(t)
                continue
            flat = t.reshape(-1)
            end = flat.numel() // 1024 * 1024
            pieces.append(torch.linalg.vector_norm(flat[:end].view(-1, 1024), dim=1, dtype=dtype))
            if end < flat.numel():
                parts.append(flat[end:])
    if parts:
        pieces.append(torch.stack(torch._foreach_norm(parts, 2, dtype=dtype)))
    norms = torch.cat(pieces)
    return (norms if device.type == "mps" else norms.double()).square().sum()


def is_weight_norm_due(update: int, log_every: int, measure_every: int) -> bool:
    """Whether to measure the weights at this update: it is logged, and early, or the first logged from a multiple on."""
    is_first_since = update // measure_every > (update - log_every) // measure_every
    return update % log_every == 0 and (update <= 10 or is_first_since)


def layer_of(name: str) -> str:
    """Return the layer of a parameter: up to its block's number, else its module.

    `model.blocks.3.attn.weight` is in `model.blocks.3`, `model.embed.weight` in `model.embed`.
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number else parts[:-1]) or name


def plain_name(name: str) -> str:
    """Return a parameter's name without what FSDP, torch.compile and activation checkpointing put into it."""
    for wrapper in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


@dataclass
class Counts:
    """What the run has seen so far; kept across restarts."""

    measured: int = 0
    clipped: int = 0
    nonfinite: int = 0
    skipped: int = 0


class GradNormMonitor(pl.Callback):
    """Logs and clips the gradient's global norm; skips non-finite updates. See the file's top for keys and rules.

    Args:
        clip_norm: clip the global norm to this; None clips nothing.
        per_layer: also log the norm of each block, embedding and head.
        log_every_n_steps: log at updates that are a multiple of this. Clipping and skipping happen at every update.
        weight_norm_every_n_steps: measure `optim/weight_norm` at those of the first ten updates that are logged, then at
            the first logged update from each multiple of this on.
        max_consecutive_skips: stop the run after so many non-finite updates in a row. An fp16 scaler that starts at
            2^16 may need 16 to find its scale.

    Raises:
        ValueError: an argument out of range; at the start of a fit, `clip_norm` beside `Trainer(gradient_clip_val=...)`.
    """

    def __init__(
        self,
        *,
        clip_norm: float | None = None,
        per_layer: bool = False,
        log_every_n_steps: int = 1,
        weight_norm_every_n_steps: int = 10,
        max_consecutive_skips: int = 20,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(
                f"clip_norm={clip_norm}: give a number > 0, or None to log the norm without clipping."
            )
        for name, value in (
            ("log_every_n_steps", log_every_n_steps),
            ("weight_norm_every_n_steps", weight_norm_every_n_steps),
            ("max_consecutive_skips", max_consecutive_skips),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: give a whole number >= 1.")
        self.clip_norm = clip_norm
        self.per_layer = per_layer
        self.log_every_n_steps = log_every_n_steps
        self.weight_norm_every_n_steps = weight_norm_every_n_steps
        self.max_consecutive_skips = max_consecutive_skips
        self.counts = Counts()
        self._consecutive = 0
        self._metrics: dict[str, float] | None = None
        self._window: list[dict[str, Any]] = []  # samples and loss of each micro-batch since the last update
        self._schedule: list[tuple[Any, dict[str, Any]]] | None = None  # to put back after a skipped update
        self._names: dict[int, str] = {}
        self._shards: Any = None
        self._fault = self._error = ""

    # -- start of a fit

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be measured or would clip twice."""
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"GradNormMonitor needs automatic optimization, and {type(pl_module).__name__} sets "
                "automatic_optimization = False: leave the optimizer's steps to Lightning, or clip in the module."
            )
        if self.clip_norm is not None and trainer.gradient_clip_val:
            raise ValueError(
                f"GradNormMonitor(clip_norm={self.clip_norm}) and Trainer(gradient_clip_val={trainer.gradient_clip_val}) "
                "would both clip. Remove gradient_clip_val from the Trainer, or clip_norm from GradNormMonitor."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for optimizer in trainer.optimizers if scaler is not None else []:
            # Set by torch's fused optimizers; Lightning leaves their gradients scaled, and reads the same attribute.
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                name = type(optimizer).__name__
                raise RuntimeError(
                    f"{name}(fused=True) divides gradients by the loss scale inside its own step, so a norm taken before "
                    f"it would carry the scale. With fp16 use {name}(..., fused=False), or train with "
                    "precision='bf16-mixed'."
                )
        self._names = {id(p): plain_name(n) for n, p in pl_module.named_parameters()}
        self._shards = _Shards(trainer, pl_module)
        self._window, self._metrics, self._schedule, self._consecutive, self._error = [], None, None, 0, ""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts that continue after a restart."""
        return asdict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.counts = Counts(**state_dict)

    # -- each micro-batch: who to name if its gradient is not finite

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the samples of this micro-batch."""
        self._raise_if_stopped()  # Trainer(min_steps=...) goes on where should_stop is set
        has_ids = isinstance(batch, Mapping) and "sample_ids" in batch
        self._window.append(
            {"samples": batch["sample_ids"] if has_ids else f"batch_idx {batch_idx}", "loss": None}
        )

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Note the loss of this micro-batch."""
        self._window[-1]["loss"] = loss.detach()

    # -- each update

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measure, then clip or skip."""
        update = trainer.global_step + 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        weights: list[nn.Parameter] = []
        if is_weight_norm_due(update, self.log_every_n_steps, self.weight_norm_every_n_steps):
            weights = list(pl_module.parameters())
        with_grad = [p for p in parameters if p.grad is not None]
        groups = {"": with_grad}
        if self.per_layer:
            groups = {layer_of(self._names.get(id(p), "other")): [] for p in parameters}
            for p in with_grad:
                groups[layer_of(self._names.get(id(p), "other"))].append(p)
        shards = self._shards
        sums = [shards.sum_of_squares([p.grad for p in group], group) for group in groups.values()]
        sums.append(shards.sum_of_squares(weights, weights))
        *layer_totals, weight_total, num_grads = shards.sum_over_ranks(sums, len(with_grad), pl_module.device)
        total = sum(layer_totals)
        if not math.isfinite(weight_total):
            raise RuntimeError(
                f"The parameters hold inf or NaN before update {update}: nothing after this can be trained. Go back to a "
                "checkpoint from before; with GradNormMonitor on from the start no update makes them so."
            )

        metrics: dict[str, float] = {}
        if num_grads == 0 or not math.isfinite(total):
            if num_grads > 0:
                self._consecutive += 1
                self.counts.nonfinite += 1
                self._fault = self._describe_fault(trainer, with_grad)
                pl.utilities.rank_zero_warn(
                    f"Update {update} is skipped: its gradient is not finite. {self._fault}"
                )
            self._skip(trainer, optimizer, parameters)
        else:
            norm = math.sqrt(total)
            coefficient = self._clip(trainer, norm, [_local(p.grad) for p in with_grad])
            self._consecutive = 0
            self.counts.measured += 1
            self.counts.clipped += coefficient < 1.0
            metrics = {
                "optim/grad_norm": norm,
                "optim/clip_coefficient": coefficient,
                "optim/clipped": float(coefficient < 1.0),
            }
            if self.per_layer:
                by_layer = zip(groups, layer_totals, strict=True)
                metrics.update({f"optim/grad_norm/{layer}": math.sqrt(square) for layer, square in by_layer})
        if self.counts.measured:
            metrics["optim/clip_fraction"] = self.counts.clipped / self.counts.measured
        metrics["optim/nonfinite_updates"] = float(self.counts.nonfinite)
        metrics["optim/skipped_updates"] = float(self.counts.skipped)
        if weights:
            metrics["optim/weight_norm"] = math.sqrt(weight_total)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            metrics["optim/loss_scale"] = float(scaler.get_scale())
        self._metrics = metrics

    def _clip(self, trainer: pl.Trainer, norm: float, gradients: list[Tensor]) -> float:
        if self.clip_norm is None:
            is_by_norm = str(trainer.gradient_clip_algorithm or "norm").lower().endswith("norm")
            limit = trainer.gradient_clip_val if is_by_norm else None
            return (
                clip_coefficient(norm + 1e-6, float(limit)) if limit else 1.0
            )  # as clip_grad_norm_, which will clip
        coefficient = clip_coefficient(norm, self.clip_norm)
        if coefficient < 1.0 and gradients:
            torch._foreach_mul_(gradients, coefficient)
        return coefficient

    def _skip(
        self, trainer: pl.Trainer, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
    ) -> None:
        for p in parameters:
            p.grad = None
        self.counts.skipped += 1
        steps = [
            c.scheduler
            for c in trainer.lr_scheduler_configs
            if c.interval == "step" and not c.reduce_on_plateau
        ]
        if steps:  # Lightning will step them all the same; on_train_batch_end puts back what they say now
            groups = [
                {k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
            ]
            self._schedule = [(s, copy.deepcopy(s.state_dict())) for s in steps]
            self._schedule.append((optimizer, {"groups": groups}))

    def _restore_schedule(self) -> None:
        for target, state in self._schedule or []:
            if isinstance(target, torch.optim.Optimizer):
                for group, options in zip(target.param_groups, state["groups"], strict=True):
                    group.update(options)
            else:
                target.load_state_dict(state)
        self._schedule = None

    def _describe_fault(self, trainer: pl.Trainer, with_grad: list[nn.Parameter]) -> str:
        """Return which parameter and which samples, the same text on every rank. Collective; for faults only."""
        bad = next((p for p in with_grad if not bool(torch.isfinite(_local(p.grad)).all())), None)
        name = None if bad is None else self._names.get(id(bad), "?")
        order = {name: i for i, name in enumerate(self._names.values())}
        losses_ok = [m["loss"] is None or bool(torch.isfinite(m["loss"]).all()) for m in self._window]
        samples = [
            m["samples"].tolist() if isinstance(m["samples"], Tensor) else m["samples"] for m in self._window
        ]
        here = {
            "name": name,
            "bad": [s for s, ok in zip(samples, losses_ok, strict=True) if not ok],
            "all": samples,
        }
        everywhere: list[Any] = [here]
        if trainer.world_size > 1:
            everywhere = [None] * trainer.world_size
            torch.distributed.all_gather_object(everywhere, here)
        names = [r["name"] for r in everywhere if r["name"] is not None]
        first = (
            min(names, key=lambda n: order.get(n, len(order)))
            if names
            else "none, the norm leaves fp32's range"
        )
        which = "bad" if any(r["bad"] for r in everywhere) else "all"
        where = "; ".join(f"rank {rank}: {r[which]}" for rank, r in enumerate(everywhere) if r[which])
        what = "whose loss is not finite" if which == "bad" else "of the update (each loss was finite)"
        return f"First parameter with inf or NaN: {first}. Sample ids of the micro-batches {what}: {where}."

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log once per update; put schedulers back after a skip; stop when skips do not end."""
        if self._metrics is None:
            return
        metrics, self._metrics, self._window = self._metrics, None, []
        self._restore_schedule()
        if trainer.global_step % self.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        shared = trainer.callback_metrics
        if "optim/grad_norm" not in metrics:
            for stale in [k for k in shared if k.startswith("optim/grad_norm")]:
                shared.pop(stale)
        shared.update({k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()})
        if self._consecutive >= self.max_consecutive_skips:
            self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        """End the run with an error, and the weights, which no faulty update touched, in a checkpoint."""
        callbacks, saved = trainer.checkpoint_callbacks, ""
        saves_itself = any(getattr(callback, "save_on_exit", False) for callback in callbacks)
        if saves_itself:
            saved = "They are in the latest checkpoint. "
        elif callbacks:
            folder = getattr(callbacks[0], "dirpath", None) or trainer.default_root_dir
            path = os.path.join(str(folder), f"healthy-step={trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            saved = f"They are saved in {path}. "
        self._error = (
            f"{self._consecutive} updates in a row had a non-finite gradient (max_consecutive_skips). {self._fault} "
            f"The weights are those of the last finite update. {saved}Look at these samples; a lower learning rate, "
            "clip_norm= or precision='bf16-mixed' in place of fp16 are the usual remedies."
        )
        if saves_itself:
            trainer.should_stop = (
                True  # such a callback saves when it sees this, after us; then _raise_if_stopped
            )
        else:
            self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._error:
            raise RuntimeError(self._error)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise, once the checkpoint is saved, what stopped the run."""
        self._raise_if_stopped()


class _Shards:
    """How much of each parameter this rank holds, so that sums over ranks count every value once."""

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_ranks = trainer.world_size
        parameters = list(pl_module.parameters())
        # FSDP1 marks parameters that it flattened and sharded by this attribute, and by nothing public.
        flattened = {id(p) for p in parameters if hasattr(p, "_fsdp_flattened")}
        self._is_sharded = bool(flattened) or any(hasattr(p, "placements") for p in parameters)
        self._parts: dict[
            int, float
        ] = {}  # for parameters of which the sum over ranks would count a value twice
        fsdp_part = 1.0
        if flattened:
            roots = FullyShardedDataParallel.fsdp_modules(trainer.strategy.model, root_only=True)  # type: ignore[arg-type]
            fsdp_part = _fsdp_shards(roots[0]) / self._num_ranks
        for p in parameters if self._is_sharded else []:
            part = fsdp_part if id(p) in flattened else _part_of_dtensor(p, self._num_ranks)
            if part != 1.0:
                self._parts[id(p)] = part

    def sum_of_squares(self, tensors: list[Any], parameters: list[nn.Parameter]) -> Tensor:
        """Return what this rank adds to the sum of squares of these tensors, each shaped as its parameter."""
        if not self._parts:
            return sum_of_squares([_local(t) for t in tensors])
        by_part: dict[float, list[Tensor]] = {}
        for t, p in zip(tensors, parameters, strict=True):
            by_part.setdefault(self._parts.get(id(p), 1.0), []).append(_local(t))
        return sum((part * sum_of_squares(group) for part, group in by_part.items()), sum_of_squares([]))

    def sum_over_ranks(self, sums: list[Tensor], count: int, device: torch.device) -> list[float]:
        """Return the sums and the count over all ranks, on the host: one collective if parameters are sharded.

        Otherwise every rank holds the same sums already.
        """
        values = torch.stack([s.to(device) for s in sums])
        if not self._is_sharded or self._num_ranks == 1:
            return [*values.tolist(), float(count)]
        values = torch.cat((values, values.new_full((1,), float(count))))
        torch.distributed.all_reduce(values)
        return values.tolist()


def _part_of_dtensor(parameter: Any, num_ranks: int) -> float:
    if not hasattr(parameter, "placements"):
        return 1.0 / num_ranks  # whole on every rank
    mesh = (
        parameter.device_mesh
    )  # along dimensions that do not shard it, it is there as often as they are long
    return 1.0 / math.prod(mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_replicate())


def _fsdp_shards(root: FullyShardedDataParallel) -> int:
    """Return over how many ranks FSDP1 shards: one under NO_SHARD, a node's under HYBRID_SHARD."""
    return (
        1
        if root.sharding_strategy.name == "NO_SHARD"
        else torch.distributed.get_world_size(root.process_group)
    )


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # this rank's shard of a DTensor
