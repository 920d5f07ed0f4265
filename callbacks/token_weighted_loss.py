"""Exact token weighting of the gradient and of the logged loss, over micro-batches and ranks.

Averaging per-micro-batch mean losses, as every trainer does unless told otherwise, weighs a token by how few others share
its micro-batch: turning accumulation on, adding a rank or masking a prompt changes the gradient. With this callback the
gradient of an update is that of (sum of token losses) / (tokens) over all micro-batches and ranks of the update, to 1e-6
in fp32, short last windows included.

Drop it in (this file stands alone; copy it or import it):

    from callbacks import TokenWeightedLoss
    trainer = pl.Trainer(..., callbacks=[TokenWeightedLoss()])

The LightningModule stays as it is: it returns the mean loss of its micro-batch over the tokens that count, as
`F.cross_entropy(..., ignore_index=-100)` does, or a dict `{"loss": mean, "num_tokens": n}`, whose count is then used.
Otherwise tokens are counted in the batch: `{"labels": ...}`, `{"targets": ...}` and `(inputs, targets)` are understood,
other batches need `count_tokens=`. A module that shifts labels itself (those of transformers) trains on one token less
per row: `count_tokens=lambda batch: (batch["labels"][:, 1:] != -100).sum()`.

| key | unit | definition |
|---|---|---|
| `train/loss` | nats/token | sum of token losses over all ranks and micro-batches of one update / their tokens |
| `train/loss_sum` | nats | that numerator |
| `train/tokens` | tokens | that denominator |
| `train/empty_updates` | count | updates skipped because no token of theirs counted; only logged once there is one |

One point per update, the same on every rank, in every logger and in `trainer.callback_metrics`. An update without a token
has no `train/loss`.

How: a hook on the loss scales each micro-batch's gradient by (its tokens / nominal tokens) as backward begins, so the
gradient buffer keeps its usual magnitude; at the boundary one collective of a few scalars sums tokens and losses over
ranks, and the remaining factor (nominal / actual) multiplies the gradients once, after the fp16 scaler's division and
before anything measures or clips. For full batches both factors are 1 and nothing is touched. So that the order of the
callback list does not matter, the callback moves to its front.

The same collective compares the names of the metrics logged so far: a metric logged on some ranks only, which elsewhere
ends in a hang or in ranks that disagree about the best checkpoint, is an error that names it. `self.log(sync_dist=True)`
on some ranks hangs in the call itself; it is caught in the first `training_step` of a fit.

Costs: a few scalar operations per micro-batch, one pass over the gradients for updates that are not full. The module must
use automatic optimization. (Longer than our other files, because a file that is copied alone cannot be split.)
"""

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def find_targets(batch: Any) -> Tensor | None:
    """Return the integer targets of a batch that is `{"labels"}`, `{"targets"}` or `(inputs, targets)`, else None."""
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in ("labels", "targets") if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        found = batch[1]
    else:
        found = None
    is_integer = isinstance(found, Tensor) and not (found.is_floating_point() or found.is_complex())
    return found if is_integer else None


def describe(batch: Any, depth: int = 0) -> str:
    """Return the structure of a batch in one line: types, keys, dtypes and shapes."""
    if isinstance(batch, Tensor):
        return f"Tensor({str(batch.dtype).removeprefix('torch.')}, shape {tuple(batch.shape)})"
    if depth < 3 and isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v, depth + 1)}" for k, v in batch.items()) + "}"
    if depth < 3 and isinstance(batch, (tuple, list)):
        inside = ", ".join(describe(v, depth + 1) for v in batch[:8]) + (", ..." if len(batch) > 8 else "")
        return f"{type(batch).__name__}({inside})"
    return type(batch).__name__


def remaining_factor(nominal: float, num_tokens: float) -> float:
    """Return what is left to multiply gradients by, once each micro-batch was scaled by (its tokens / nominal).

    Args:
        nominal: tokens that a full window would hold, over all micro-batches and ranks.
        num_tokens: tokens that it held, > 0.
    """
    return nominal / num_tokens


def keys_differ(sum_of_hashes: float, sum_of_squares: float, num_ranks: int) -> bool:
    """Whether ranks hold different hashes, from two sums over ranks (equality in the Cauchy-Schwarz inequality)."""
    return int(sum_of_hashes) ** 2 != num_ranks * int(sum_of_squares)


def block_gradients(loss: Tensor) -> list[Any]:
    """Make every gradient of `loss` zero, also where the graph would turn 0 into NaN (a mean over no token is 0 / 0).

    Returns:
        Handles to remove after backward: nodes of parameters outlive the graph.
    """

    def zero(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in grads)

    handles, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            handles.append(node.register_prehook(zero))
            todo.extend(parent for parent, _ in node.next_functions)
    return handles


class _Count:
    """Tokens of a micro-batch. On a GPU they are read back without making it wait for what was enqueued later."""

    def __init__(self, count: Any, device: torch.device) -> None:
        self._event = None
        if not isinstance(count, Tensor) or device.type != "cuda":
            self._host: Any = float(count)
        else:
            self._device = count.detach().to(device, torch.float64).reshape(())
            self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._host.copy_(self._device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def item(self) -> float:
        """Return the count on the host."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)

    def weigh(self, mean_loss: Tensor) -> tuple[Any, Any]:
        """Return the loss sum and the tokens, as numbers, or on the loss's device where reading them would wait."""
        if mean_loss.device.type == "cuda":
            return self.weigh_on_device(mean_loss)
        num_tokens = self.item()
        return (num_tokens * mean_loss.item() if num_tokens > 0 else 0.0), num_tokens

    def weigh_on_device(self, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as scalar tensors."""
        num_tokens = self._device if self._event is not None else _scalar(self._host, mean_loss.device)
        return torch.where(num_tokens > 0, num_tokens * mean_loss, 0.0), num_tokens


class TokenWeightedLoss(pl.Callback):
    """Weighs every token of an update alike; logs `train/loss`, `train/loss_sum`, `train/tokens`. See the file's top.

    Args:
        count_tokens: `count_tokens(batch) -> int | Tensor`, the number of tokens that the mean loss is over. Takes
            precedence over a `num_tokens` that the module returns.
        ignore_index: targets that do not count, for batches that need no `count_tokens`.
    """

    def __init__(
        self, *, count_tokens: Callable[[Any], int | Tensor] | None = None, ignore_index: int = -100
    ) -> None:
        self.count_tokens = count_tokens
        self.ignore_index = ignore_index
        self.empty_updates = 0
        self._saved: dict[str, Any] = {}
        self._restore_step: Callable[[], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._nominal = 0.0  # tokens of a full micro-batch; 0 until a fit's first one
        self._capacity = 0.0
        self._micro_batch: tuple[Tensor, _Count, _Count] | None = None  # between forward and backward
        self._loss_sum: Any = 0.0  # of the window so far, on this rank; numbers or scalar tensors
        self._num_tokens: Any = 0.0
        self._handles: list[Any] = []
        self._metrics: dict[str, float] | None = None

    # -- start and end of a fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move to the front of the list: whoever looks at gradients at the boundary must see the weighted ones."""
        if stage == "fit":
            callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.remove(self)
            callbacks.insert(0, self)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be weighted; listen to what `training_step` returns."""
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"TokenWeightedLoss needs automatic optimization, and {type(pl_module).__name__} sets "
                "automatic_optimization = False: leave backward and step to Lightning, or weigh tokens in the module."
            )
        _refuse_fused_with_scaler(trainer)
        self._reset()
        self._listen(trainer, pl_module)

    def _listen(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning hands what training_step returns to callbacks after backward only; the weight is needed before.
        self._stop_listening()
        step, own_step = pl_module.training_step, pl_module.__dict__.get("training_step")

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else kwargs.get("batch")
            counted = self._count(batch, pl_module.device)
            is_first = self._nominal == 0.0 and trainer.world_size > 1
            with _same_synced_logs(trainer, pl_module) if is_first else nullcontext():
                output = step(*args, **kwargs)
            self._micro_batch = self._read(output, batch, counted)
            return output

        def restore() -> None:
            del pl_module.training_step
            if own_step is not None:
                pl_module.training_step = own_step  # type: ignore[method-assign]

        pl_module.training_step = training_step  # type: ignore[method-assign]
        self._restore_step = restore

    def _stop_listening(self) -> None:
        if self._restore_step is not None:
            self._restore_step()
        self._restore_step = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._stop_listening()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the module as it was."""
        self._stop_listening()

    def state_dict(self) -> dict[str, Any]:
        """What the same weights bit for bit after a restart need."""
        return {**self._saved, "empty_updates": self.empty_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.empty_updates = int(state_dict.get("empty_updates", 0))
        self._saved = {k: state_dict[k] for k in ("layout", "nominal") if k in state_dict}

    @property
    def window(self) -> tuple[Any, Any]:
        """Sum of token losses (nats) and tokens on this rank, of the window so far; numbers or scalar tensors."""
        return self._loss_sum, self._num_tokens

    @property
    def nominal_tokens(self) -> float:
        """Each micro-batch's gradient is scaled by (its tokens / this) until the window ends; 0 before a fit's first one."""
        return self._nominal

    # -- each micro-batch

    def _count(self, batch: Any, device: torch.device) -> _Count | None:
        targets = find_targets(batch) if self.count_tokens is None else None
        if self._nominal == 0.0:
            self._capacity = 0.0 if targets is None else float(targets.numel())
        if self.count_tokens is not None:
            return _Count(self.count_tokens(batch), device)
        return None if targets is None else _Count((targets != self.ignore_index).sum(), device)

    def _read(self, output: Any, batch: Any, counted: _Count | None) -> tuple[Tensor, _Count, _Count] | None:
        is_dict = isinstance(output, Mapping)
        loss = output.get("loss") if is_dict else output
        if not isinstance(loss, Tensor):
            return None  # no loss: Lightning passes over the micro-batch, or says what is wrong
        count = counted
        if is_dict and self.count_tokens is None and output.get("num_tokens") is not None:
            count = _Count(output["num_tokens"], loss.device)
        if count is None:
            raise ValueError(
                f"TokenWeightedLoss cannot count the tokens of this batch: {describe(batch)}. It understands "
                "{'labels': integers}, {'targets': integers} and (inputs, integer targets). Give it a counter, "
                "TokenWeightedLoss(count_tokens=lambda batch: ...), or return {'loss': mean, 'num_tokens': n} from "
                "training_step."
            )
        if self._nominal == 0.0 and not count.item() >= 0:
            raise ValueError(
                f"A number of tokens must be >= 0, got {count.item()} for the batch {describe(batch)}."
            )
        return loss.detach().reshape(()), count, counted or count

    @torch.no_grad()
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Scale this micro-batch by (its tokens / nominal) through a hook on the root of the graph."""
        if self._micro_batch is None:
            raise RuntimeError(
                f"TokenWeightedLoss saw a backward whose training_step it did not: {type(pl_module).__name__}."
                "training_step was replaced after the fit began. Replace it in the module's __init__ or setup()."
            )
        mean_loss, count, counted = self._micro_batch
        self._micro_batch = None
        if self._nominal == 0.0:
            self._nominal = self._choose_nominal(trainer, count, loss.device)
        loss_sum, num_tokens = count.weigh(mean_loss)
        self._loss_sum, self._num_tokens = self._loss_sum + loss_sum, self._num_tokens + num_tokens
        if not loss.requires_grad:
            return
        # On a GPU the count that a module returns is known only after forward: wait for it where the batch's is zero.
        if (counted.item() == 0 or not isinstance(num_tokens, Tensor)) and count.item() == 0:
            self._handles = block_gradients(loss)
        elif isinstance(num_tokens, Tensor):
            weight = (num_tokens / self._nominal).to(loss.dtype)
            loss.register_hook(lambda grad: grad * weight)
        elif num_tokens != self._nominal:
            loss.register_hook(lambda grad: grad * (num_tokens / self._nominal))

    def _choose_nominal(self, trainer: pl.Trainer, count: _Count, device: torch.device) -> float:
        """Return the tokens of a full micro-batch. Any number > 0 on which ranks agree is right; this one is exact."""
        layout = [trainer.accumulate_grad_batches, _data_parallel(trainer)[1]]
        if self._saved.get("layout") != layout:
            nominal = torch.tensor([max(self._capacity, count.item(), 1.0)], device=device)
            self._saved = {"layout": layout, "nominal": float(_all_reduce(trainer, nominal, "max")[0])}
        return float(self._saved["nominal"])

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the hooks of a micro-batch without tokens off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- each update

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Sum tokens and losses over ranks; apply the remaining factor to the gradients."""
        _, num_ranks = _data_parallel(trainer)
        loss_sum, num_tokens = self._loss_sum, self._num_tokens
        self._loss_sum, self._num_tokens = 0.0, 0.0
        if num_ranks > 1:
            hashed = _hash(trainer.callback_metrics)
            local = torch.stack(
                [_scalar(v, pl_module.device) for v in (loss_sum, num_tokens, hashed, hashed**2)]
            )
            loss_sum, num_tokens, hash_sum, hash_squares = _all_reduce(trainer, local, "sum").tolist()
            if keys_differ(hash_sum, hash_squares, num_ranks):
                _compare_keys(trainer, trainer.callback_metrics, f"before update {trainer.global_step + 1}")
        loss_sum, num_tokens = float(loss_sum), float(num_tokens)

        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if num_tokens == 0:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = None  # no optimizer touches a parameter without a gradient, nor its moments
            self.empty_updates += 1
            pl.utilities.rank_zero_warn(
                f"Update {trainer.global_step + 1} holds no token that counts and was skipped ({self.empty_updates} so "
                "far). Check the masks of the data, or ignore_index / count_tokens of TokenWeightedLoss."
            )
        else:
            nominal = self._nominal * trainer.accumulate_grad_batches * num_ranks
            factor = remaining_factor(nominal, num_tokens)
            if factor != 1.0 and gradients:
                torch._foreach_mul_([_local(g) for g in gradients], factor)

        self._metrics = {"train/tokens": num_tokens, "train/loss_sum": loss_sum}
        if num_tokens > 0:
            self._metrics["train/loss"] = loss_sum / num_tokens
        if self.empty_updates:
            self._metrics["train/empty_updates"] = float(self.empty_updates)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log once per update."""
        if self._metrics is None:
            return
        metrics, self._metrics = self._metrics, None
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        shared = trainer.callback_metrics
        if "train/loss" not in metrics:
            shared.pop("train/loss", None)
        shared.update({k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the names of metrics that are logged once per epoch."""
        if trainer.world_size > 1:
            _compare_keys(trainer, trainer.callback_metrics, f"at the end of epoch {trainer.current_epoch}")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # this rank's shard of a DTensor


def _scalar(value: Any, device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.as_tensor(value, dtype=dtype).to(device, non_blocking=True)


def _data_parallel(trainer: pl.Trainer) -> tuple[Any, int]:
    """Return the process group over which gradients are averaged (None: all ranks) and its size."""
    mesh = getattr(trainer.strategy, "device_mesh", None)
    if mesh is not None and mesh.ndim > 1 and "data_parallel" in (mesh.mesh_dim_names or ()):
        return mesh["data_parallel"].get_group(), mesh["data_parallel"].size()
    return None, trainer.world_size


def _all_reduce(trainer: pl.Trainer, tensor: Tensor, operation: str) -> Tensor:
    group, num_ranks = _data_parallel(trainer)
    if num_ranks > 1:
        op = torch.distributed.ReduceOp.MAX if operation == "max" else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(tensor, op=op, group=group)
    return tensor


def _hash(keys: Iterable[str]) -> int:
    # 20 bits: sums over ranks of its square are whole numbers in float64 up to 8,192 ranks.
    return zlib.crc32("\n".join(sorted(keys)).encode()) & 0xFFFFF


def _compare_keys(trainer: pl.Trainer, keys: Iterable[str], when: str) -> None:
    """Raise the same error on every rank if ranks hold different keys. Collective."""
    group, num_ranks = _data_parallel(trainer)
    everywhere: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(everywhere, sorted(keys), group=group)
    common = set(everywhere[0]).intersection(*everywhere)
    extra = {rank: sorted(set(k) - common) for rank, k in enumerate(everywhere) if set(k) - common}
    if extra:
        raise RuntimeError(
            f"Metrics logged on some ranks only: {extra} (rank: names), seen {when}. Ranks that hold different metrics "
            "choose different best checkpoints, or wait for each other forever. Log the same names on every rank; what "
            "rank 0 alone knows goes to trainer.logger.log_metrics, not through self.log."
        )


@contextmanager
def _same_synced_logs(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
    """Hold back `log(sync_dist=True)`, a collective each, until ranks have compared the names they would log."""
    held: list[Callable[[], None]] = []
    names: list[str] = []
    log = pl_module.log

    def holding(name: str, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("sync_dist"):
            names.append(name)
            held.append(functools.partial(log, name, *args, **kwargs))
        else:
            log(name, *args, **kwargs)

    pl_module.log = holding  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pl_module.log
    _compare_keys(trainer, names, "in the first training_step with sync_dist=True")
    for call in held:
        call()


def _refuse_fused_with_scaler(trainer: pl.Trainer) -> None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    for optimizer in trainer.optimizers if scaler is not None else []:
        # Set by torch's fused optimizers; Lightning leaves their gradients scaled, and reads the same attribute.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name}(fused=True) divides gradients by the loss scale inside its own step, so what is measured, "
                f"weighted or clipped before the step would carry the scale. With fp16 use {name}(..., fused=False), or "
                "train with precision='bf16-mixed'."
            )
