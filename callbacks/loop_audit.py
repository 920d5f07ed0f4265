"""LoopAudit: checks the invariants of a training loop at the boundaries where they can break, and says which one broke.

Drop in (copy this one file, or import it)::

    trainer = Trainer(..., callbacks=[LoopAudit()])                                   # stop at the first violation
    trainer = Trainer(..., callbacks=[LoopAudit(every_n_steps=100, on_violation="warn")])  # a long run

It knows nothing of the module but what Lightning tells every callback. "Update" is one optimizer step, "window" the micro-batches
of one update, P the parameters. Cost "audited" is paid at every n-th update (`every_n_steps=n`), the rest always.

| check | what must hold | cost |
|---|---|---|
| gradients_empty | gradient buffers are empty before the first backward of a window | a look per parameter |
| parameters_constant | no parameter changes between the start of a window and its optimizer step | audited: 2 digests of P |
| one_step_per_window | the optimizer steps once per window, at its end (a scaler may skip it) | none |
| schedule_per_update | schedules and `progress/update` advance by one per successful update, not on skipped ones | none |
| window_weights | the micro-batches of a short window weigh 1 together, not (their number) / accumulate | 2 norms in short windows |
| token_denominator | logged `train/tokens` is what the batches hold; `train/loss` is its sum over it | a count per micro-batch |
| samples_once | no sample comes twice in an epoch, none is left out, also after a resume | a hash per sample |
| ranks_differ | no sample is on two ranks in one update | audited: 1 gather |
| replicas_identical | ranks that hold whole replicas hold the same bits (not judged under FSDP) | audited: 1 digest of P, 1 gather |
| clipping_global | norm clipping scaled all gradients by one factor, that of the global norm | audited: 2 norms |
| finite | losses and gradients of an update that was applied are finite | audited: 1 norm |
| evaluation_changes_nothing | parameters, buffers, optimizer, RNG, data position: as before | per evaluation: 2 digests of P, moments |
| module_modes | each submodule is in train or eval mode as before the evaluation | a list of flags |
| optimizer_coverage | each trainable parameter is in one optimizer, in one group | start, audited |
| weight_decay | no norm or bias is decayed | start, audited |

`audit/violations` (count so far) is logged at audited updates unless `on_violation="raise"`, which stops at the first one.
`on_violation="warn"` warns once per check, "mark" only counts; `LoopAudit.violations` holds all of them. With several ranks
a violation on one is told to all at the next audited update, so that all stop together.

Limits: what happens in manual optimization or with several optimizers is the module's own business: `gradients_empty`,
`parameters_constant`, `one_step_per_window`, `schedule_per_update`, `window_weights` and `clipping_global` are then left out.
Samples are told apart by `batch["sample_ids"]` where the data module gives them (epoch * samples per epoch + block, so unique
over the run; its attribute `samples_per_epoch` lets the audit see what an epoch left out), else by a 64-bit hash of the batch's
rows; rows that are truly equal in the data are looked up in the dataset before anybody is blamed. Memory: one bit per
id, or 8 bytes per hash up to 200,000 an epoch, kept in the checkpoint so that a resume that repeats data is seen.
A clip value is known from Trainer(gradient_clip_val), a callback's attribute `clip_norm`, or `LoopAudit(clip_norm=)`.

The file is longer than others because it must be copied alone.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

CAUSES = {
    "gradients_empty": "optimizer_zero_grad was overridden, or something called backward outside the window.",
    "parameters_constant": "a callback or the module writes weights (EMA swap, clamping, re-tying) or steps an optimizer inside the window.",
    "one_step_per_window": "optimizer_step was overridden and calls step or the closure wrongly, or training_step steps by itself.",
    "schedule_per_update": "Lightning steps schedulers on updates that the fp16 scaler or a callback skipped; or "
    "the schedule is stepped per micro-batch by hand. Step it only after an update that happened (lr_scheduler_step).",
    "window_weights": "Lightning divides each loss by accumulate_grad_batches also in a short last window. Use "
    "TokenWeightedLoss, drop_last=True, or an epoch length that is a multiple of accumulate_grad_batches.",
    "token_denominator": "the count is taken on one rank or one micro-batch only, counts padding, or lags by an update.",
    "samples_once": "a loader without state restarted its epoch at a resume, or the sampler is not told the epoch or rank. Use a "
    "resumable loader (state_dict / load_state_dict) or resume at epoch ends only.",
    "ranks_differ": "use_distributed_sampler=False without a sampler of one's own: every rank reads the same data.",
    "replicas_identical": "a rank changed weights alone: unsynchronised gradients, parameters unknown to DDP, or rank-dependent code.",
    "clipping_global": "clipping per layer, per shard or per micro-batch: clip by the norm over all parameters and ranks.",
    "finite": "too high a rate, overflow in 16 bits, a loss over zero tokens. Skip such updates (GradNormMonitor does).",
    "evaluation_changes_nothing": "evaluation ran in train mode, stepped something, drew random numbers or read training data.",
    "module_modes": "an evaluation hook or a callback calls .train() or .eval() on the whole model and does not restore each submodule.",
    "optimizer_coverage": "configure_optimizers misses a module, lists a parameter twice, or was called before the model was complete.",
    "weight_decay": "one parameter group for all: put weights of 2 and more dimensions in a group of their own (Loshchilov & "
    "Hutter decay; norms and biases have weight_decay=0).",
}
EXPECTED = {
    "gradients_empty": "empty gradient buffers as the window begins",
    "parameters_constant": "no change until the optimizer steps",
    "one_step_per_window": "one optimizer step in the window",
    "ranks_differ": "different samples on each rank",
    "replicas_identical": "the same bits on all ranks",
    "finite": "finite gradients in an update that is applied",
    "evaluation_changes_nothing": "all as before the evaluation",
    "module_modes": "each submodule in the mode it had before the evaluation",
    "optimizer_coverage": "every trainable parameter in one optimizer",
    "weight_decay": "no decay of norms and biases",
}
CHECKS = tuple(CAUSES)
_ONE_OPTIMIZER = {  # what manual optimization and several optimizers do is the module's own business
    "gradients_empty",
    "parameters_constant",
    "one_step_per_window",
    "schedule_per_update",
    "window_weights",
    "clipping_global",
}
IGNORE_INDEX = -100
_MAX_HASHES = 200_000  # samples of an epoch told apart by hash
_MAX_CHUNKS = 65_536  # x 4,096 ids
_MAX_LOOKUP = 200_000  # rows of a dataset searched for true duplicates
_MAX_KEPT = 1000  # violations that are kept; all are counted
_CLIP_RTOL = 1e-2


class LoopViolation(RuntimeError):
    """An invariant of the loop does not hold; the message says which, where, and what usually causes it."""


@dataclass(frozen=True)
class Violation:
    """One broken invariant: check, place (update and micro-batch count from 1; micro-batch 0: none), expected and found."""

    check: str
    update: int
    micro_batch: int
    expected: str
    found: str
    rank: int = 0

    def __str__(self) -> str:
        place = f"update {self.update}" + (f", micro-batch {self.micro_batch}" if self.micro_batch else "")
        return (
            f"LoopAudit: {self.check} does not hold at {place} (rank {self.rank}). Expected: {self.expected}. "
            f"Found: {self.found}. Usual cause: {CAUSES[self.check]}"
        )


# ---- digests: bit-exact, sensitive to order, about two passes over memory ----

_weights_cache: dict[torch.device, Tensor] = {}


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit integers: high bits must reach low ones, or flips of the sign bit cancel in sums."""
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * -7046029254386353131  # odd: a bijection modulo 2**64
    return x ^ ((x >> 29) & 0x7FFFFFFFF)


def _weights(n: int, device: torch.device) -> Tensor:
    """Return `n` fixed odd pseudo-random integers, one per position."""
    known = _weights_cache.get(device)
    if known is None or known.numel() < n:
        size = max(4096, 1 << (n - 1).bit_length())
        known = _weights_cache[device] = _mix(_mix(torch.arange(1, size + 1, device=device))) | 1
    return known[:n]


def _as_int64(t: Tensor) -> Tensor:
    """View the bytes of a tensor as int64, padded with zeros to a multiple of 8 bytes."""
    flat = t.detach().contiguous().view(-1).view(torch.uint8)
    num_tail = flat.numel() % 8
    if num_tail:
        flat = torch.cat([flat, flat.new_zeros(8 - num_tail)])
    elif flat.storage_offset() % 8:  # a piece of FSDP1's flat parameter may start anywhere
        flat = flat.clone()
    return flat.view(torch.int64)


def digest(t: Tensor, name: str = "") -> Tensor:
    """Return a 64-bit digest of a tensor's bits, their order, its dtype, shape and name, as an int64 scalar on its device.

    `torch.hash_tensor` (an XOR) of each run of 512 integers tells runs apart; 16 slices XORed onto each other tell the
    positions inside the slices apart; so no swap of two elements escapes both.
    """
    if isinstance(t, DTensor):
        t = t.to_local()
    salt = int.from_bytes(
        hashlib.blake2b(f"{name}|{tuple(t.shape)}|{t.dtype}".encode(), digest_size=7).digest(), "big"
    )
    v = _as_int64(t)
    num_body = v.numel() // 512 * 512
    small = v[num_body:]
    if num_body:
        body = v[:num_body]
        rows = torch.hash_tensor(body.view(-1, 512), 1).view(torch.int64)
        while body.numel() > 512 and body.numel() % 2 == 0 and body.numel() * 16 > num_body:
            half = body.numel() // 2
            body = body[:half] ^ body[half:]
        small = torch.cat([rows, small, body])
    return _mix((_mix(small + salt) * _weights(small.numel(), v.device)).sum() + salt)


def digests(named: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Return the digest of each tensor, on the host."""
    found = [digest(t, name) for name, t in named]
    return torch.stack(found).cpu() if found else torch.zeros(0, dtype=torch.int64)


def _leaves(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return [leaf for value in values for leaf in _leaves(value)]


def hash_rows(batch: Any) -> Tensor:
    """Return a 64-bit hash of each sample (row along the first dimension) of a batch, over all its tensors."""
    leaves = [t.detach() for t in _leaves(batch) if t.ndim > 0]
    if not leaves:
        return torch.zeros(0, dtype=torch.int64)
    num_rows = leaves[0].size(0)
    total, position = torch.zeros(num_rows, dtype=torch.int64, device=leaves[0].device), 0
    for t in (t for t in leaves if t.size(0) == num_rows):
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(t.element_size(), torch.uint8)
        x = t.reshape(num_rows, -1).contiguous()
        x = (x.to(torch.uint8) if t.dtype == torch.bool else x.view(bits)).to(torch.int64)
        weights = _weights(position + x.size(1), x.device)[position:]
        total, position = total + (_mix(x + 1) * weights).sum(1), position + x.size(1)
    return _mix(total)


_FULL = bytes([255]) * 512


class Seen:
    """The samples of an epoch: ids as bits in chunks of 4,096 (full chunks cost nothing), hashes as a set."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytearray | None] = {}  # None: full
        self.hashes: set[int] = set()
        self.is_over = False  # past the memory limit: no longer judged

    def add(self, value: int, is_id: bool) -> bool:
        """Note a sample; return whether it was there already."""
        if not is_id:
            if value in self.hashes:
                return True
            self.is_over |= len(self.hashes) >= _MAX_HASHES
            if not self.is_over:
                self.hashes.add(value)
            return False
        chunk = self.chunks.setdefault(value >> 12, bytearray(512))
        byte, bit = (value & 4095) >> 3, 1 << (value & 7)
        if chunk is None or chunk[byte] & bit:
            return True
        chunk[byte] |= bit
        if chunk == _FULL:
            self.chunks[value >> 12] = None
        self.is_over |= len(self.chunks) > _MAX_CHUNKS
        return False

    def count(self, start: int, stop: int) -> int:
        """Count the ids noted in [start, stop)."""
        total = 0
        for key, chunk in self.chunks.items():
            low, high = max(start - (key << 12), 0), min(stop - (key << 12), 4096)
            if low < high:
                bits = np.unpackbits(np.frombuffer(chunk or _FULL, dtype=np.uint8), bitorder="little")
                total += int(bits[low:high].sum())
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return all of it in tensors."""
        part = {k: c for k, c in self.chunks.items() if c is not None}
        return {
            "full": torch.tensor([k for k, c in self.chunks.items() if c is None], dtype=torch.int64),
            "keys": torch.tensor(list(part), dtype=torch.int64),
            "bits": torch.frombuffer(
                bytearray().join(part.values()) or bytearray(512), dtype=torch.uint8
            ).clone(),
            "hashes": torch.tensor(sorted(self.hashes), dtype=torch.int64),
            "is_over": self.is_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        rows = state["bits"].view(-1, 512).numpy()
        self.chunks = {
            k: bytearray(row.tobytes()) for k, row in zip(state["keys"].tolist(), rows, strict=False)
        }
        self.chunks.update(dict.fromkeys(state["full"].tolist()))
        self.hashes, self.is_over = set(state["hashes"].tolist()), state["is_over"]


# ---- pure judgements ----


def is_norm_or_bias(module: nn.Module, parameter_name: str) -> bool:
    """Whether a parameter that `module` holds under this name is a bias or belongs to a normalisation."""
    is_norm = (
        re.search(r"Norm([A-Z0-9]|$)|norm$", type(module).__name__) is not None
    )  # but not NormalizedLinear
    return is_norm or "bias" in parameter_name.split("_")


def judge_clipping(
    before: Tensor, after: Tensor, clip: float, logged_norm: float | None, rtol: float = _CLIP_RTOL
) -> tuple[str, str] | None:
    """Compare squared norms per parameter before and after clipping; return (expected, found) if one factor cannot explain them.

    `before` may be off by a factor common to all (token weighting acts after it is taken); `logged_norm` is the global
    norm that was clipped with, where a monitor logs it.
    """
    norm = float(after.sum().sqrt())
    if norm > clip * (1 + rtol):
        return f"a global norm of at most {clip:g} after clipping", f"{norm:.6g}"
    if logged_norm is not None and abs(norm - min(logged_norm, clip)) > rtol * min(logged_norm, clip):
        return f"min(global norm {logged_norm:.6g}, clip {clip:g}) after clipping", f"{norm:.6g}"
    significant = before > 1e-8 * before.sum()
    ratios = (after[significant] / before[significant]).sqrt()
    if ratios.numel() and float(ratios.max()) > float(ratios.min()) * (1 + rtol):
        return (
            "one factor for all gradients",
            f"factors from {float(ratios.min()):.4g} to {float(ratios.max()):.4g}",
        )
    return None


def count_labels(batch: Any) -> Tensor | None:
    """Count labels that are not -100 in a dict with "labels" or "targets" or a pair (inputs, targets); None for other batches."""
    labels = None
    if isinstance(batch, dict):
        labels = batch.get("labels", batch.get("targets"))
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    return (labels != IGNORE_INDEX).sum()


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "Python": random.getstate(),
        "NumPy": np.random.get_state(legacy=True),
        "torch CPU": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch CUDA"] = torch.cuda.get_rng_state()
    return states


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class LoopAudit(pl.Callback):
    """Check the training loop's invariants while it runs. See the file's docstring for the checks and their cost.

    Args:
        every_n_steps: audit each n-th update with the checks that cost something.
        on_violation: "raise" a `LoopViolation`, "warn" once per check, or "mark": count in `audit/violations`.
        checks: names of the checks to run; None runs all.
        count_tokens: `f(batch) -> int | Tensor`, trained tokens of a batch on this rank, if the default does not understand it.
        clip_norm: the norm that gradients are clipped to, where neither the Trainer nor a callback tells.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        on_violation: str = "raise",
        checks: Sequence[str] | None = None,
        count_tokens: Callable[[Any], int | Tensor] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"LoopAudit(every_n_steps={every_n_steps}): must be at least 1.")
        if on_violation not in ("raise", "warn", "mark"):
            raise ValueError(f'LoopAudit(on_violation={on_violation!r}): give "raise", "warn" or "mark".')
        if unknown := sorted(set(checks or ()) - set(CHECKS)):
            raise ValueError(f"LoopAudit(checks=...): unknown {unknown}; known: {', '.join(CHECKS)}.")
        self.every_n_steps = every_n_steps
        self.on_violation = on_violation
        self.checks = frozenset(CHECKS if checks is None else checks)
        self.count_tokens = count_tokens or count_labels
        self.clip_norm = clip_norm
        self.violations: list[Violation] = []
        self._queue: list[Violation] = []
        self._seen = Seen()
        self._seen_epoch = -1
        self._num_samples = self._num_repeats = 0
        self._has_gap = False  # samples of this epoch that we do not know of
        self._num_resumed: int | None = None  # micro-batches since a resume
        self._num_common = 0  # updates in a row whose samples were on several ranks
        self._lookup_of: Any = None
        self._lookup: dict[int, int] = {}
        self._id_epoch: int | None = None
        self._told: set[tuple[str, str]] = set()
        self.num_violations = 0
        self._is_running = False

    # ---- reporting ----

    def _found(self, check: str, found: str, *, expected: str = "", update: int = -1, micro: int = 0) -> None:
        update = self._step + 1 if update < 0 else update
        self._queue.append(Violation(check, update, micro, expected or EXPECTED[check], found, self._rank))

    def _act(self) -> None:
        """Raise, warn about or keep what was found."""
        queue, self._queue = self._queue, []
        self.num_violations += len(queue)
        for v in queue:
            is_first = all(v.check != old.check for old in self.violations)
            if len(self.violations) < _MAX_KEPT:
                self.violations.append(v)
            if self.on_violation == "warn" and is_first:
                pl.utilities.rank_zero_warn(f"{v} (later violations of this check are only counted)")
        if queue and self.on_violation == "raise":
            others = sorted({v.check for v in queue} - {queue[0].check})
            raise LoopViolation(str(queue[0]) + (f" Also: {', '.join(others)}." if others else ""))

    def _flush(self, trainer: pl.Trainer) -> None:
        """Act at once on one process; several ranks wait for `_share`, as one that stopped alone would hang the others."""
        if trainer.world_size == 1:
            self._act()

    def _share(self, trainer: pl.Trainer) -> None:
        """Tell all ranks what any of them found. Called on all ranks at the same place."""
        if trainer.world_size > 1:
            counts = self._gather(trainer, torch.tensor([len(self._queue)]))
            if int(counts.sum()):
                queues: list[list[Violation]] = [[] for _ in range(trainer.world_size)]
                torch.distributed.all_gather_object(queues, self._queue)
                self._queue = [v for queue in queues for v in queue]
        self._act()

    @staticmethod
    def _gather(trainer: pl.Trainer, row: Tensor) -> Tensor:
        """Return the rows of all ranks, on the host."""
        if trainer.world_size == 1:
            return row[None].cpu()
        return trainer.strategy.all_gather(row.to(trainer.strategy.root_device)).cpu()

    # ---- start and end ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget an earlier fit."""
        self._is_running = False
        self._modes: list[tuple[str, nn.Module, bool]] = []
        self._rng: dict[str, Any] | None = None
        self._step, self._micro, self._rank = trainer.global_step, 0, trainer.global_rank

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note modes before the first evaluation."""
        self._note_modes(pl_module)

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare them after it."""
        self._check_modes()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the optimizers, and start to follow the loop."""
        self._params = [(_clean(n), p) for n, p in pl_module.named_parameters()]
        self._is_fsdp1 = any(
            isinstance(m, FullyShardedDataParallel) for m in (trainer.model or pl_module).modules()
        )
        self._is_sharded = self._is_fsdp1 or any(isinstance(p, DTensor) for _, p in self._params)
        is_simple = pl_module.automatic_optimization and len(trainer.optimizers) == 1
        self._active = self.checks if is_simple else self.checks - _ONE_OPTIMIZER
        sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        self._data_rank, self._num_data_ranks = sampler["rank"], sampler["num_replicas"]
        self._step, self._micro, self._steps, self._is_applied = trainer.global_step, 0, 0, False
        self._accumulate = trainer.accumulate_grad_batches
        self._is_audited = self._is_open = False
        self._start: Tensor | None = None  # digests of the parameters at the start of the window
        self._squares: Tensor | None = None  # squared gradient norms before clipping
        self._after: Tensor | None = None  # and as the optimizer used them
        self._losses: list[Tensor] = []
        self._root_grads: list[Tensor] = []
        self._short: tuple[Tensor, float] | None = None
        self._tokens: int | Tensor | None = 0
        self._samples: list[
            tuple[int, int, Tensor, bool]
        ] = []  # update, micro-batch, values, whether they are ids
        self._is_in_batch = False
        self._later: list[
            Callable[[pl.Trainer], None]
        ] = []  # judged once every callback has logged the update
        self._evaluated = False
        if trainer.global_step == 0:  # a new run with the same callback
            self._seen, self._seen_epoch, self._has_gap, self._id_epoch = Seen(), -1, False, None
        self._has_gap |= self._seen_epoch < 0 < trainer.global_step
        self._hooks = [o.register_step_post_hook(self._after_step) for o in trainer.optimizers]
        self._is_running = True
        self._positions = self._schedule_positions(trainer)
        self._check_optimizers(trainer, pl_module)
        self._share(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the last update."""
        self._settle(trainer)
        self._share(trainer)
        self._log(trainer)
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the hooks away."""
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks if self._is_running else []:
            hook.remove()
        self._is_running = False

    def state_dict(self) -> dict[str, Any]:
        """Return the samples of the epoch so far, so that a resume that repeats them is seen."""
        gap = self._has_gap or (self._is_running and (self._is_in_batch or bool(self._samples)))
        counts = {"num_samples": self._num_samples, "num_repeats": self._num_repeats}
        return {"epoch": self._seen_epoch, "has_gap": gap, "seen": self._seen.state_dict()} | counts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the samples of a checkpoint."""
        self._seen_epoch, self._has_gap = state_dict["epoch"], state_dict["has_gap"]
        self._num_samples, self._num_repeats = state_dict["num_samples"], state_dict["num_repeats"]
        self._num_resumed = 0
        self._seen.load_state_dict(state_dict["seen"])

    # ---- optimizers ----

    def _check_optimizers(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        places: dict[int, list[str]] = {}
        decay: dict[int, float] = {}
        for i, optimizer in enumerate(trainer.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    places.setdefault(id(p), []).append(f"optimizer {i} group {j}")
                    decay[id(p)] = max(decay.get(id(p), 0.0), float(group.get("weight_decay") or 0.0))
        found: list[tuple[str, str]] = []
        missing = [n for n, p in self._params if p.requires_grad and id(p) not in places]
        if missing:
            found.append(("optimizer_coverage", f"in none: {_some(missing)}"))
        double = [(n, places[id(p)]) for n, p in self._params if len(places.get(id(p), ())) > 1]
        if double:
            found.append(
                ("optimizer_coverage", "in several: " + _some([f"{n} ({', '.join(at)})" for n, at in double]))
            )
        decayed = {
            id(p): f"{_clean(f'{module_name}.{n}')} (decay {decay[id(p)]:g})"
            for module_name, module in pl_module.named_modules()
            for n, p in module.named_parameters(recurse=False)
            if decay.get(id(p), 0.0) > 0 and is_norm_or_bias(module, n)
        }
        if decayed:
            found.append(("weight_decay", _some(list(decayed.values()))))
        for check, what in found:
            if check in self.checks and (check, what) not in self._told:  # once, not at each audited update
                self._told.add((check, what))
                self._found(check, what)

    def _schedule_positions(self, trainer: pl.Trainer) -> dict[str, int]:
        """Return the position of every schedule that is to advance once per update."""
        positions = {
            f"{type(c.scheduler).__name__} {i}": int(c.scheduler.last_epoch)
            for i, c in enumerate(trainer.lr_scheduler_configs)
            if c.interval == "step"
            and c.frequency == 1
            and not c.reduce_on_plateau
            and hasattr(c.scheduler, "last_epoch")
        }
        updates = trainer.callback_metrics.get("progress/update")
        return positions if updates is None else positions | {"progress/update": int(updates)}

    # ---- the window ----

    def _settle(self, trainer: pl.Trainer) -> None:
        """Judge the update that ended: by now every callback and scheduler has had its turn."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._schedule_positions(trainer)
        if "schedule_per_update" in self._active:
            want = 1 if self._was_applied else 0
            for name in now.keys() & self._positions.keys():
                if (moved := now[name] - self._positions[name]) != want:
                    kind = "a successful update" if want else "a skipped update"
                    expected = f"{name} advances by {want} on {kind}"
                    self._found("schedule_per_update", f"by {moved}", expected=expected, update=self._step)
        self._positions = now
        later, self._later = self._later, []
        for judge in later:
            judge(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before the first micro-batch: judge the last update, and begin to audit this one."""
        self._batch_idx, self._is_in_batch = batch_idx, True
        if self._evaluated:
            self._check_modes()
        if self._micro == 0:
            self._settle(trainer)
            self._accumulate = trainer.accumulate_grad_batches
            self._is_audited = (trainer.global_step + 1) % self.every_n_steps == 0
            if self._is_audited:
                self._check_optimizers(trainer, pl_module)
                if "parameters_constant" in self._active:
                    self._start = digests(self._params)
        self._flush(trainer)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Gradients are zeroed by now, and this micro-batch's are not there yet."""
        if self._micro == 0 and "gradients_empty" in self._active:
            owned = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
            grads = [(n, p.grad) for n, p in self._params if p.grad is not None and id(p) in owned]
            full = [n for n, grad in grads if bool(_local(grad).any())]
            if full:
                self._found("gradients_empty", f"values in {_some(full)}", micro=1)
        if self._is_audited and "finite" in self.checks:
            self._losses.append(loss.detach().reshape(()))
        if self._accumulate > 1 and "window_weights" in self._active and loss.grad_fn is not None:
            # A hook on the node sees the gradient after all hooks on the loss tensor, whoever registered them and when.
            loss.grad_fn.register_hook(lambda _, grads: self._root_grads.append(grads[0].detach()))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """At the end of a short window take the norm before anybody rescales the gradients."""
        ends = trainer.is_last_batch or (self._batch_idx + 1) % self._accumulate == 0
        if self._root_grads and ends and self._micro + 1 < self._accumulate:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._short = (self._grad_squares(), float(scaler.get_scale()) if scaler is not None else 1.0)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """All gradients are there; Lightning clips after this hook."""
        if self._start is not None:
            changed = (self._start != digests(self._params)).nonzero().flatten().tolist()
            if changed:
                names = _some([self._params[i][0] for i in changed])
                self._found("parameters_constant", f"other bits in {names}", micro=self._micro + 1)
            self._start = None
        if self._is_audited and "clipping_global" in self._active and self._clip(trainer) is not None:
            self._squares = self._grad_squares()

    def _after_step(self, *_: Any) -> None:
        """The optimizer has stepped; gradients are still those that it used."""
        self._steps += 1
        self._is_applied |= any(p.grad is not None for _, p in self._params)
        if (self._is_audited and self.checks & {"finite", "clipping_global"}) or self._short is not None:
            self._after = self._grad_squares()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count what this micro-batch held; at the end of the window judge it."""
        if trainer.current_epoch != self._seen_epoch:
            self._begin_epoch(trainer.current_epoch)
        self._micro += 1
        self._is_in_batch = False
        if "token_denominator" in self.checks and self._tokens is not None:
            count = self.count_tokens(batch)
            self._tokens = None if count is None else self._tokens + count
        if self.checks & {"samples_once", "ranks_differ"}:
            ids = batch.get("sample_ids") if isinstance(batch, dict) else None
            values = hash_rows(batch) if ids is None else ids.detach().flatten().to(torch.int64)
            self._samples.append((self._step + 1, self._micro, values, ids is not None))
        if trainer.global_step != self._step:
            self._end_window(trainer)
        elif self._steps and "one_step_per_window" in self._active:
            expected = "no optimizer step before the window ends"
            self._found("one_step_per_window", f"{self._steps}", expected=expected, micro=self._micro)
            self._steps = 0
        if trainer.enable_validation:
            self._note_modes(pl_module)
            self._rng = _rng_states() if "evaluation_changes_nothing" in self.checks else None
        self._flush(trainer)

    def _end_window(self, trainer: pl.Trainer) -> None:
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if (
            "one_step_per_window" in self._active
            and self._steps != 1
            and not (has_scaler and not self._steps)
        ):
            self._found("one_step_per_window", f"{self._steps}", micro=self._micro)
        self._was_applied = self._steps > 0 and self._is_applied
        if self._is_audited:
            self._check_finite()
            self._check_clipping(trainer)
            self._check_tokens(trainer)
            self._check_replicas(trainer)
        if self._short is not None:
            self._check_window_weights(trainer)
        is_near = trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"
        if self._is_audited or is_near:  # elsewhere it costs a wait for the device or the other ranks
            self._check_samples(trainer)
        self._step, self._micro, self._steps, self._is_applied = trainer.global_step, 0, 0, False
        self._losses, self._root_grads, self._short = [], [], None
        self._squares = self._after = None
        self._tokens, self._is_open = 0, True
        if self._is_audited:
            self._share(trainer)
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        if self.on_violation == "raise":
            return
        metrics = {"audit/violations": float(self.num_violations)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        trainer.callback_metrics.update({k: torch.as_tensor(v) for k, v in metrics.items()})

    # ---- checks at the end of a window ----

    def _grad_squares(self) -> Tensor:
        """Return the squared norm of each gradient, of this rank's part if parameters are sharded."""
        grads = [p.grad for _, p in self._params]
        there = [_local(g) for g in grads if g is not None and _local(g).numel()]
        is_low = any(g.dtype in (torch.float16, torch.bfloat16) for g in there)
        norms = iter(torch._foreach_norm(there, 2, torch.float32 if is_low else None) if there else [])
        squares = [next(norms).double() ** 2 if g is not None and _local(g).numel() else None for g in grads]
        zero = torch.zeros((), dtype=torch.float64, device=there[0].device if there else "cpu")
        return torch.stack(
            [zero if s is None else s / _num_copies(g) for s, g in zip(squares, grads, strict=True)]
        )

    def _over_ranks(self, trainer: pl.Trainer, squares: Tensor) -> Tensor:
        """Sum squared norms over the ranks' parts."""
        return self._gather(trainer, squares).sum(0) if self._is_sharded else squares.cpu()

    def _check_finite(self) -> None:
        if "finite" not in self.checks or not self._was_applied:
            return
        losses = torch.stack(self._losses) if self._losses else torch.zeros(1)
        for i in (~torch.isfinite(losses)).nonzero().flatten().tolist():
            self._found("finite", f"{float(losses[i])}", expected="a finite loss", micro=i + 1)
        if self._after is not None and (bad := (~torch.isfinite(self._after)).nonzero().flatten().tolist()):
            names = _some([self._params[i][0] for i in bad])
            self._found("finite", f"not finite: {names}")

    def _clip(self, trainer: pl.Trainer) -> float | None:
        """Return the norm that this run clips to, None if that is not known or it clips otherwise."""
        if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").endswith("norm"):
            return float(trainer.gradient_clip_val)
        values = [getattr(c, "clip_norm", None) for c in trainer.callbacks]  # type: ignore[attr-defined]
        return next((float(v) for v in values if v is not None), None)

    def _check_clipping(self, trainer: pl.Trainer) -> None:
        clip = self._clip(trainer)
        if self._squares is None or self._after is None or clip is None:
            return
        before, after, update = (
            self._over_ranks(trainer, self._squares),
            self._over_ranks(trainer, self._after),
            self._step + 1,
        )
        if not (self._was_applied and bool(torch.isfinite(before).all() and torch.isfinite(after).all())):
            return

        def judge(trainer: pl.Trainer) -> None:
            logged = trainer.callback_metrics.get("optim/grad_norm")
            verdict = judge_clipping(before, after, clip, None if logged is None else float(logged))
            if verdict is not None:
                self._found("clipping_global", verdict[1], expected=verdict[0], update=update)

        self._later.append(judge)

    def _check_window_weights(self, trainer: pl.Trainer) -> None:
        """The gradient is linear in the losses: their weights, times what rescaled it since, must add up to 1."""
        assert self._short is not None
        squares, scale = self._short
        grads = float(torch.stack(self._root_grads).sum()) / scale / self._accumulate
        after = self._after if self._after is not None else torch.full_like(squares, float("nan"))
        weight = float(self._gather(trainer, torch.tensor([grads], dtype=torch.float64)).mean())
        before_norm = float(self._over_ranks(trainer, squares).sum().sqrt()) / scale
        after_norm = float(self._over_ranks(trainer, after).sum().sqrt())
        num, accumulate, update, clip = self._micro, self._accumulate, self._step + 1, self._clip(trainer)
        if not (self._was_applied and 0.0 < before_norm < float("inf") and after_norm < float("inf")):
            return

        def judge(trainer: pl.Trainer) -> None:
            norm = after_norm
            if clip is not None and norm > clip * (1 - _CLIP_RTOL):
                logged = trainer.callback_metrics.get("optim/grad_norm")
                if logged is None:
                    return  # clipped: what rescaled the gradients before cannot be told from it
                norm = float(logged)
            total = weight * norm / before_norm
            if abs(total - 1.0) > _CLIP_RTOL:
                expected = f"weights of the {num} micro-batches of a short window (accumulate_grad_batches={accumulate}) add up to 1"
                self._found("window_weights", f"{total:.4g}", expected=expected, update=update, micro=num)

        self._later.append(judge)

    def _check_tokens(self, trainer: pl.Trainer) -> None:
        if "token_denominator" not in self.checks or self._tokens is None:
            return
        copies, update = trainer.world_size / self._num_data_ranks, self._step + 1
        tokens = (
            float(self._gather(trainer, torch.tensor([float(self._tokens)], dtype=torch.float64)).sum())
            / copies
        )

        def judge(trainer: pl.Trainer) -> None:
            bus = trainer.callback_metrics
            logged, loss, loss_sum = (bus.get(k) for k in ("train/tokens", "train/loss", "train/loss_sum"))
            if logged is not None and abs(float(logged) - tokens) > 1e-6 * tokens:
                expected = f"train/tokens = {tokens:.0f}, as the batches hold"
                self._found("token_denominator", f"{float(logged):.0f}", expected=expected, update=update)
            elif logged is not None and loss is not None and loss_sum is not None and tokens:
                want = float(loss_sum) / tokens
                if abs(float(loss) - want) > 1e-5 * abs(want):
                    expected = f"train/loss = train/loss_sum / tokens = {want:.6g}"
                    self._found("token_denominator", f"{float(loss):.6g}", expected=expected, update=update)

        self._later.append(judge)

    def _check_replicas(self, trainer: pl.Trainer) -> None:
        if "replicas_identical" not in self.checks or trainer.world_size == 1 or self._is_sharded:
            return
        mine = digests(self._params)
        rows = self._gather(trainer, digest(mine)[None])
        if len(rows.unique()) > 1:
            rows = self._gather(trainer, mine)  # the same decision on every rank
            names = [self._params[i][0] for i in (rows != rows[0]).any(0).nonzero().flatten().tolist()]
            self._found("replicas_identical", f"they differ in {_some(names)}")

    # ---- samples ----

    def _begin_epoch(self, epoch: int) -> None:
        if self._seen_epoch >= 0:
            self._has_gap = False
        self._seen, self._seen_epoch = Seen(), epoch
        self._num_repeats = self._num_samples = 0

    def _check_samples(self, trainer: pl.Trainer) -> None:
        samples, self._samples = self._samples, []
        if not samples:
            return
        # values, update and micro-batch of each sample; ranks may hold different numbers of samples
        places = [torch.tensor([update, micro]).expand(v.numel(), 2) for update, micro, v, _ in samples]
        table = torch.cat(
            [torch.cat([v.cpu() for _, _, v, _ in samples])[:, None], torch.cat(places)], 1
        )  # (samples, 3)
        is_id = samples[0][3]
        if is_id:
            table = table[table[:, 0] >= 0]  # -1: a row that fills up the batch
        tables = [table]
        if trainer.world_size > 1:
            sizes = self._gather(trainer, torch.tensor([len(table), self._data_rank]))
            padded = torch.zeros(int(sizes[:, 0].max()), 3, dtype=torch.int64)
            padded[: len(table)] = table
            rows = self._gather(trainer, padded)
            # ranks of one tensor-parallel group read the same batch: the first speaks for it
            first = {int(d): r for r, (_, d) in reversed(list(enumerate(sizes.tolist())))}
            tables = [rows[r][: int(sizes[r, 0])] for _, r in sorted(first.items())]
        repeats = (
            self._find_common(trainer, tables, is_id)
            if "ranks_differ" in self.checks and len(tables) > 1
            else set()
        )
        if "samples_once" in self.checks:
            for t in tables:
                self._find_repeats(trainer, t.tolist(), is_id, repeats)
            if is_id and len(table):
                self._check_id_epoch(trainer, int(table[:, 0].min()), int(table[:, 0].max()))

    def _find_common(self, trainer: pl.Trainer, tables: list[Tensor], is_id: bool) -> set[int]:
        """Find samples on several ranks in one update; return them, so that they are not reported as repeats as well."""
        owners: dict[tuple[int, int], set[int]] = {}
        for rank, t in enumerate(tables):
            for value, update, _ in t.tolist():
                owners.setdefault((update, value), set()).add(rank)
        common = {key: ranks for key, ranks in owners.items() if len(ranks) > 1}
        is_whole = len(common) * len(tables) >= sum(len(t) for t in tables)
        self._num_common = self._num_common + 1 if is_whole else 0
        for (update, value), ranks in common.items():
            # equal rows may be in the data: only rows known to be there once are to blame, or a habit of sharing all
            copies = 1 if is_id else self._copies_in_dataset(trainer, value)
            if copies == 1 or (copies == 0 and self._num_common == 3):
                found = f"{_name(value, is_id)} on ranks {sorted(ranks)}, {len(common)} such samples"
                self._found("ranks_differ", found, update=update)
                break
        return {value for _, value in common}

    def _find_repeats(self, trainer: pl.Trainer, rows: list[list[int]], is_id: bool, known: set[int]) -> None:
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        if getattr(sampler, "replacement", False):
            return  # drawn with replacement on purpose
        allowed = 0
        if isinstance(sampler, torch.utils.data.DistributedSampler) and not sampler.drop_last:
            allowed = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        expected = f"each sample once in epoch {self._seen_epoch}"
        unknown: dict[tuple[int, int], bool] = {}  # micro-batches of repeats that nobody can look up
        for value, update, micro in rows:
            self._num_samples += 1
            is_repeat = self._seen.add(value, is_id) and not self._seen.is_over and value not in known
            copies = 1 if is_id or not is_repeat else self._copies_in_dataset(trainer, value)
            unknown[update, micro] = unknown.get((update, micro), True) and is_repeat and copies == 0
            if is_repeat and copies == 1:
                self._num_repeats += 1
                if self._num_repeats == allowed + 1:
                    found = f"{_name(value, is_id)} again"
                    self._found("samples_once", found, expected=expected, update=update, micro=micro)
        for (update, micro), is_unknown in unknown.items():
            # an endless stream may come round to its start, but not just where a process resumed
            if self._num_resumed is not None:
                self._num_resumed = self._num_resumed + 1 if is_unknown else None
                if self._num_resumed == 3:
                    found = "three micro-batches after a resume whose rows had all been seen"
                    self._found("samples_once", found, expected=expected, update=update, micro=micro)

    def _copies_in_dataset(self, trainer: pl.Trainer, value: int) -> int:
        """Count how often a row is in the dataset; 0 if it cannot be looked up."""
        loader = trainer.train_dataloader
        dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        if collate is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return 0
        assert dataset is not None
        if len(dataset) > _MAX_LOOKUP:
            return 0
        is_batched = getattr(loader, "batch_sampler", None) is not None
        if self._lookup_of is not dataset:
            self._lookup = {}
            with pl.utilities.seed.isolate_rng():
                for i in range(len(dataset)):
                    for h in hash_rows(collate([dataset[i]] if is_batched else dataset[i])).tolist():
                        self._lookup[h] = self._lookup.get(h, 0) + 1
            self._lookup_of = dataset
        return self._lookup.get(value, 0)

    def _check_id_epoch(self, trainer: pl.Trainer, low: int, high: int) -> None:
        """Ids of an endless stream are epoch * num_samples + block: once all are of a later epoch, the earlier is complete."""
        num_samples = getattr(trainer.datamodule, "samples_per_epoch", None)  # type: ignore[attr-defined]
        if num_samples is None:
            return
        epoch = low // num_samples
        previous, self._id_epoch = self._id_epoch, epoch
        if previous is None or epoch == previous or self._has_gap or self._seen.is_over:
            self._has_gap &= previous is None or epoch == previous
            return
        count = self._seen.count(previous * num_samples, (previous + 1) * num_samples)
        if count != num_samples:
            found = f"{count}, {num_samples - count} left out"
            self._found("samples_once", found, expected=f"all {num_samples} samples of epoch {previous}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the last batch of an epoch with a length: modes, and whether every sample came."""
        if self._evaluated:
            self._check_modes()
        loader = trainer.train_dataloader
        dataset, batch_size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
        is_cut = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        is_whole = (trainer.is_last_batch or not is_cut) and trainer.limit_train_batches in (1.0, None)
        self._check_samples(trainer)
        is_judged = "samples_once" in self.checks and is_whole and not self._has_gap
        is_known = batch_size is not None and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        sampler = getattr(loader, "sampler", None)
        stock = (
            torch.utils.data.SequentialSampler,
            torch.utils.data.RandomSampler,
            torch.utils.data.DistributedSampler,
        )
        if (
            is_judged
            and is_known
            and isinstance(sampler, stock)
            and not getattr(sampler, "replacement", False)
        ):
            assert dataset is not None
            num_left_out = len(dataset) - self._num_samples
            dropped = self._num_data_ranks * batch_size - 1 if getattr(loader, "drop_last", False) else 0
            if num_left_out > dropped:
                found = f"{self._num_samples}, {num_left_out} left out"
                expected = f"all {len(dataset)} samples in epoch {self._seen_epoch}"
                self._found("samples_once", found, expected=expected, update=self._step)
        self._flush(trainer)

    # ---- evaluation ----

    def _note_modes(self, pl_module: pl.LightningModule) -> None:
        if "module_modes" in self.checks:
            self._modes = [(n, m, m.training) for n, m in pl_module.named_modules()]

    def _check_modes(self) -> None:
        self._evaluated = False
        wrong = [
            f"{_clean(n) or 'the module'} ({_mode(m.training)})"
            for n, m, was in self._modes
            if m.training != was
        ]
        if wrong:
            self._found("module_modes", _some(wrong), update=self._step)

    def _evaluation_state(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        named: list[tuple[str, Tensor]] = [
            (f"parameter {_clean(n)}", p) for n, p in pl_module.named_parameters()
        ]
        named += [(f"buffer {_clean(n)}", b) for n, b in pl_module.named_buffers()]
        names = {id(p): _clean(n) for n, p in pl_module.named_parameters()}
        for optimizer in trainer.optimizers:
            for p, state in optimizer.state.items():
                name = f"optimizer state of {names.get(id(p), '?')}"
                named += [(f"{name}.{k}", v) for k, v in state.items() if isinstance(v, Tensor)]
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for o in trainer.optimizers
        ]
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        return {
            "names": [n for n, _ in named],
            "digests": digests(named),
            "optimizer settings": repr(groups),
            "data position": None if datamodule is None else datamodule.state_dict(),
            "RNG": _rng_states(),
        }

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note everything that the evaluation must leave alone."""
        self._before = None
        if trainer.state.fn != "fit" or "evaluation_changes_nothing" not in self.checks:
            return
        self._before = self._evaluation_state(trainer, pl_module)
        if self._rng is not None and not trainer.sanity_checking:
            now = self._before["RNG"]["torch CPU"]
            # What other callbacks drew since the batch ended is theirs; a loader's seed can be recognised.
            generator = torch.Generator()
            generator.set_state(self._rng["torch CPU"])
            for _ in range(8):
                if torch.equal(generator.get_state(), now):
                    break
                torch.empty((), dtype=torch.int64).random_(generator=generator)
                if torch.equal(generator.get_state(), now):
                    found = "the validation loader drew its seed from torch's global generator, so later dropout masks and shuffles depend on it: give it generator=torch.Generator()"
                    expected = "RNG as without the evaluation"
                    self._found("evaluation_changes_nothing", found, expected=expected, update=self._step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare after it."""
        self._evaluated = not trainer.sanity_checking
        before, self._before = getattr(self, "_before", None), None
        if before is None:
            return
        after = self._evaluation_state(trainer, pl_module)
        changed: list[str] = []
        if before["names"] != after["names"]:
            changed = sorted(set(before["names"]) ^ set(after["names"]))
        else:
            changed = [
                before["names"][i]
                for i in (before["digests"] != after["digests"]).nonzero().flatten().tolist()
            ]
        changed += [k for k in ("optimizer settings", "data position") if not _same(before[k], after[k])]
        if not trainer.sanity_checking:  # Lightning isolates the RNG there
            changed += [f"RNG of {k}" for k, v in before["RNG"].items() if not _same(v, after["RNG"].get(k))]
        if changed:
            self._found("evaluation_changes_nothing", f"changed: {_some(changed)}", update=self._step)
        self._flush(trainer)


def _clean(name: str) -> str:
    """Take out what wrappers put into names."""
    for part in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _mode(is_training: bool) -> str:
    return "now train" if is_training else "now eval"


def _name(value: int, is_id: bool) -> str:
    return f"sample id {value}" if is_id else f"a sample with hash {value & 0xFFFFFFFFFFFFFFFF:016x}"


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _num_copies(t: Tensor | None) -> int:
    """Ranks of the mesh that hold the same part of a DTensor."""
    if not isinstance(t, DTensor):
        return 1
    sizes = [
        t.device_mesh.size(i) for i, placement in enumerate(t.placements) if isinstance(placement, Replicate)
    ]
    return int(np.prod(sizes)) if sizes else 1
