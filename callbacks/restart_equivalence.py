"""Proves at each restart that the restored run makes the updates that the interrupted one made.

Drop it into any Lightning project, with stock ModelCheckpoint or any other way to save (this one file is enough, which
is why it is longer than 400 lines):

    trainer = pl.Trainer(callbacks=[RestartEquivalence(), ModelCheckpoint(every_n_train_steps=500)])

At every `trainer.save_checkpoint` it puts digests of what is saved into the checkpoint, and the trace of the next
`updates` updates beside it (`trace.json` in a folder with a manifest, else `<checkpoint>.trace.json`). A later
`trainer.fit(ckpt_path=...)` compares what was loaded, and then each of those updates as it happens: nothing is computed
twice. Between traces it does nothing.

What is compared, in the order in which the first difference is named:

| component | recorded |
|---|---|
| data position | update count and `datamodule.state_dict()` |
| samples | `batch["sample_ids"]`, else a digest of each row of the batch, of each micro-batch and rank |
| RNG | Python, NumPy, torch and the device's, per rank, as `training_step` begins |
| parameters at load, optimizer at load | each tensor by name: bit-exact digest and norm |
| scaler, schedule | the precision plugin's state; learning rates and schedulers' states |
| callbacks | whether each callback took up the state that was saved for it |
| loss | of each micro-batch and rank, bit for bit; numerator and denominator where the step returns them |
| gradient | of each parameter as the optimizer used it; `optim/grad_norm` where it is logged |
| parameters after, optimizer after | as at load |

| promise | holds for | means |
|---|---|---|
| `exact` | same world size, strategy, precision, device, versions, threads | all of it, bitwise |
| `tolerance` | another layout, kernel or machine | position, samples, loaded state, rates exact; losses within `rtol` |
| `samples` | other precision or model code | position and samples |

The promise that applies is derived from the layouts of then and now, printed, and never stronger than the `promise`
asked for. Where kernels are not repeatable (CUDA without deterministic algorithms) everything up to the schedule stays
exact; what the update computes is held to a tolerance that one repeated forward and backward calibrates.

| key | unit | |
|---|---|---|
| `restart/verified_updates` | count | updates after restarts that held, kept across restarts |
| `restart/mismatches` | count | those that did not, and states that did not load |

The verdict goes into `verified` of a `manifest.json` beside the checkpoint ({"promise": "exact" | "tolerance" |
"samples" | "failed", "when", "by", "updates", ...}), else into the trace. A checkpoint in a folder where no callback of this
run saves belongs to another run, and stays as it is.

Digests: the bytes of a tensor times weights of their position, summed modulo 2^64. Sums of shards add up, so one process,
DDP, FSDP and FSDP2 give the same digest. A single changed byte always changes it; of other changes about one in
2^18 escapes at worst (two bytes of the same 4 KiB), one in 2^57 in general.
"""

import hashlib
import json
import math
import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Through `pl`, so that the import above is the one line that a pytorch_lightning project changes.
Checkpoint = pl.callbacks.Checkpoint
rank_zero_info, rank_zero_warn = pl.utilities.rank_zero_info, pl.utilities.rank_zero_warn

SCHEMA = 1
PROMISES = ("exact", "tolerance", "samples")  # strongest first
COMPONENTS = (
    "data position",
    "samples",
    "RNG",
    "parameters at load",
    "optimizer at load",
    "scaler",
    "schedule",
    "callbacks",
    "loss",
    "gradient",
    "parameters after",
    "optimizer after",
)
CAUSES = {
    "data position": "the data module counts what workers fetched instead of what was trained on, or its state was not loaded",
    "samples": "the loader starts the epoch again after a resume, or shuffles with a seed that the checkpoint does not hold; "
    "a data module (or loader) with state_dict and load_state_dict mends it",
    "RNG": "the checkpoint holds no random state (Lightning saves none; CheckpointRetention does), or that of one rank only; "
    "or evaluation drew random numbers",
    "parameters at load": "the checkpoint was written while or after the weights changed, was altered, or was loaded in another dtype or partly (strict=False)",
    "optimizer at load": "the optimizer's state was not saved or loaded, or matched to parameters by a position that moved",
    "scaler": "the loss scale starts again: the precision plugin's state was not loaded",
    "schedule": "the scheduler's position was not restored, or was stepped once more or less than the optimizer",
    "callbacks": "this callback's state was not saved or has no load_state_dict that takes it up",
    "loss": "with equal weights, samples and RNG: something else that the forward pass uses was not saved (own generator, "
    "buffer that is not persistent, train/eval mode, counter), or kernels are not repeatable",
    "gradient": "the save fell inside an accumulation window, gradients were not empty, clipping or scaling differs, or kernels are not repeatable",
    "parameters after": "the optimizer's rule differs (other fused/foreach choice, weight decay, step count), or ranks hold different replicas",
    "optimizer after": "the optimizer's rule differs (betas, fused or foreach choice, step count)",
}


class RestartMismatchError(RuntimeError):
    """A restored run does not continue the run that was interrupted."""


# ---- digests ---------------------------------------------------------------------------------------------------------

_ROW = 4096  # bytes that share one set of weights
_BLOCK = 1024  # rows that share one set of row weights
_NUM_WEIGHTS = 3


def _mix(x: int) -> int:
    # The finaliser of splitmix64 (Steele et al. 2014): a bijection of 64-bit integers that looks random.
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def _odd64(x: int) -> int:
    odd = _mix(x) | 1
    return odd - 2**64 if odd >= 2**63 else odd


@cache
def _byte_weights(device: torch.device) -> Tensor:
    # (3, 4096) odd int8 in +-63, each column different from every other and from its negative: a change of one byte, or the
    # same change of two, always shows. |w| <= 63 keeps pairs of products inside the int16 of CPUs without VNNI.
    seen: set[tuple[int, ...]] = set()
    columns: list[tuple[int, ...]] = []
    for i in range(10**9):
        column = tuple((_mix(3 * i + n) >> 32) % 64 * 2 - 63 for n in range(_NUM_WEIGHTS))
        if column not in seen and tuple(-w for w in column) not in seen:
            seen.add(column)
            columns.append(column)
            if len(columns) == _ROW:
                break
    return torch.tensor(columns, dtype=torch.int8).t().contiguous().to(device)


@cache
def _row_weights(device: torch.device) -> Tensor:
    weights = [[_odd64(2**40 + _NUM_WEIGHTS * r + n) for n in range(_NUM_WEIGHTS)] for r in range(_BLOCK)]
    return torch.tensor(weights, device=device)  # (1024, 3)


def _products(rows: Tensor) -> Tensor:
    """Return rows (R, 4096) int8 times the byte weights, exact: (R, 3) integers below 2^25."""
    weights = _byte_weights(rows.device)
    # torch._int_mm is private, but 4 times as fast as anything public; what follows it gives the same numbers in public.
    if rows.device.type == "cpu" and hasattr(torch, "_int_mm"):
        return torch.cat(
            [torch._int_mm(rows, w[:, None]) for w in weights], 1
        )  # matrix times vector: memory speed
    if rows.device.type == "cuda" and hasattr(torch, "_int_mm"):
        try:  # wants more than 16 rows, and columns in eights
            padded = torch.nn.functional.pad(rows, (0, 0, 0, max(0, 32 - len(rows))))
            eight = torch.nn.functional.pad(weights, (0, 0, 0, 5)).t()
            return torch._int_mm(padded, eight)[: len(rows), :_NUM_WEIGHTS]
        except RuntimeError:
            pass  # no int8 kernels on this GPU
    halves = rows.view(
        -1, 2, _ROW // 2
    ).float()  # sums of 2,048 products stay below 2^24: exact in fp32, in TF32 too
    by_half = weights.t().reshape(2, _ROW // 2, _NUM_WEIGHTS).float()
    return torch.einsum("rhk,hkn->rhn", halves, by_half).long().sum(1)


def _sum_blocks(products: Tensor, first_block: int) -> Tensor:
    # products (R, 3) of whole blocks, the first being block `first_block` of its tensor -> 0-dim int64
    by_block = (products.view(-1, _BLOCK, _NUM_WEIGHTS) * _row_weights(products.device)).sum((1, 2))
    weights = [_odd64(2**41 + first_block + b) for b in range(len(by_block))]
    return (by_block * torch.tensor(weights, device=products.device)).sum()


def _sum_bytes(raw: Tensor, first: int) -> Tensor:
    # raw int8 within one block; the first is byte `first` of its tensor -> 0-dim int64
    begin, row = first % _ROW, first // _ROW
    if begin or len(raw) % _ROW:
        raw = torch.nn.functional.pad(raw, (begin, -(begin + len(raw)) % _ROW))  # zeros weigh nothing
    products = _products(raw.view(-1, _ROW))
    weights = _row_weights(raw.device)[row % _BLOCK : row % _BLOCK + len(products)]
    return (products * weights).sum() * _odd64(2**41 + row // _BLOCK)


def _norm2(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point or x.dtype.itemsize < 4:
        x = x.float()
    return torch.dot(x, x)


@torch.no_grad()
def measure(tensor: Tensor, first: int = 0, norm: bool = True) -> tuple[Tensor, Tensor]:
    """Return the position-weighted sum modulo 2^64 and the squared norm of a contiguous part of a tensor.

    Args:
        tensor: the part, any dtype and device.
        first: index of its first element in the flattened whole. Sums of disjoint parts add up to the whole's.
        norm: False leaves the norm out (0).

    Returns:
        0-dim int64 and float64 on the tensor's device.
    """
    flat = tensor.detach()
    if flat.is_complex():
        flat, first = torch.view_as_real(flat.resolve_conj()), 2 * first
    flat = flat.contiguous().reshape(-1)
    size = flat.element_size()
    block = _ROW * _BLOCK // size  # elements; 4 MiB stay in a CPU's cache from one pass to the next
    at_once = block if flat.device.type == "cpu" else 64 * block
    sums, norms = [], []
    at = 0
    while at < len(flat):
        offset, left = (first + at) % block, len(flat) - at
        if offset or left < block:
            piece = flat[at : at + min(block - offset, left)]
            sums.append(_sum_bytes(piece.view(torch.int8), (first + at) * size))
            norms += [_norm2(piece)] if norm else []
        else:
            piece, products = flat[at : at + left // block * block], []
            for part in piece.split(at_once):
                products.append(_products(part.view(torch.int8).view(-1, _ROW)))
                norms += [_norm2(part)] if norm else []
            sums.append(_sum_blocks(torch.cat(products), (first + at) // block))
        at += len(piece)
    nothing = torch.zeros((), dtype=torch.int64, device=flat.device)
    total = torch.stack(sums).sum() if sums else nothing
    return total, torch.stack(norms).double().sum() if norms else nothing.double()


def finish_digest(total: int, dtype: str, shape: Sequence[int]) -> str:
    """Return the digest, 16 hexadecimal digits, from the sum over all parts, the dtype and the whole's shape."""
    text = f"{dtype} {tuple(shape)} {total % 2**64}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a whole tensor: of its bits, their order, its dtype and shape."""
    return finish_digest(int(measure(tensor, norm=False)[0]), str(tensor.dtype), tensor.shape)


def tree_digest(tree: Mapping[str, Sequence[Any]]) -> str:
    """Return one digest of a tree name -> (digest, norm): of names and digests, not of norms."""
    text = json.dumps(sorted((name, leaf[0]) for name, leaf in tree.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- what a tensor is under each strategy ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """Where a local tensor lies in the whole one: `first` in the flattened whole, of shape `shape`.

    `replica` is the lowest rank of the mesh or group that holds a whole, None where a part is there a second time. Of
    several wholes the one with the lowest rank counts.
    """

    shape: tuple[int, ...]
    first: int
    replica: int | None = 0


def fsdp1_shards(module: torch.nn.Module) -> dict[int, Shard]:
    """Return id(parameter) -> shard, for parameters that FSDP1 holds as pieces of flat ones (`use_orig_params=True`).

    Raises:
        RuntimeError: FSDP1 with `use_orig_params=False`, where single parameters cannot be told apart.
    """
    shards = {}
    for m in module.modules():
        # Private: FSDP1 tells nowhere else which part of a parameter this rank holds. test_fsdp1_* fails if it changes.
        handle = getattr(m, "_handle", None) if hasattr(m, "_fsdp_wrapped_module") else None
        if handle is None:
            continue
        flat = handle.flat_param
        if flat._params is None:
            raise RuntimeError(
                "RestartEquivalence needs FSDP's original parameters: use FSDPStrategy(use_orig_params=True), the default."
            )
        replica = min(dist.get_process_group_ranks(handle.process_group))  # hybrid sharding holds several
        for p, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            if handle.uses_sharded_strategy:
                shards[id(p)] = Shard(tuple(shape), info.intra_param_start_idx or 0, replica)
    return shards


def local_part(tensor: Tensor, shard: Shard | None) -> tuple[Tensor, Shard | None]:
    """Return what this rank holds of a tensor as one contiguous part, and where it lies; None if it holds all of it.

    FSDP2 and tensor parallelism: DTensor. All other tensors are whole, or `shard` says what they are.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor, shard
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # to_local() would build autograd's graph
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    if not any(p.is_shard() for p in placements):
        return local, None
    # Private: torch has no public function for it; DCP uses it for the same.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinates = mesh.get_coordinate() or []
    is_first = all(c == 0 for c, p in zip(coordinates, placements, strict=True) if not p.is_shard())
    # A mesh may be a slice of a larger one, whose other slices hold the same.
    replica = int(mesh.mesh.min()) if is_first else None
    shape = tuple(tensor.shape)
    if local.numel() and local.shape[1:] != tensor.shape[1:]:  # zeros weigh nothing: pad to whole rows
        pad = [
            n
            for o, m, w in zip(offsets[:0:-1], local.shape[:0:-1], shape[:0:-1], strict=True)
            for n in (o, w - o - m)
        ]
        local = torch.nn.functional.pad(local, pad)
    return local, Shard(shape, offsets[0] * math.prod(shape[1:]), replica)


def _clean(name: str) -> str:
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


Leaf = tuple[str, Tensor, Shard | None]


def model_leaves(module: torch.nn.Module, root: torch.nn.Module | None = None) -> Iterator[Leaf]:
    """Yield (name, tensor, shard) of each parameter and each persistent buffer.

    Args:
        module: what names them.
        root: what a strategy wrapped around `module` (`trainer.model`): FSDP1's outermost wrapper is outside of it.
    """
    shards = fsdp1_shards(root or module)
    for name, p in module.named_parameters():
        yield _clean(name), p, shards.get(id(p))
    kept = {
        id(b)
        for m in module.modules()
        for n, b in m._buffers.items()
        if n not in m._non_persistent_buffers_set
    }
    for name, b in module.named_buffers():
        if id(b) in kept:
            yield f"{_clean(name)} (buffer)", b, None


def gradient_leaves(module: torch.nn.Module, root: torch.nn.Module | None = None) -> Iterator[Leaf]:
    """Yield (name, gradient, shard) of each parameter that has one; arguments as for `model_leaves`."""
    shards = fsdp1_shards(root or module)
    for name, p in module.named_parameters():
        if p.grad is not None:
            yield _clean(name), p.grad, shards.get(id(p))


def optimizer_leaves(
    module: torch.nn.Module, optimizers: Iterable[Any], root: torch.nn.Module | None = None
) -> Iterator[Leaf]:
    """Yield (name, tensor, shard) of each optimizer state, named by its parameter; plain numbers as fp64 tensors."""
    shards = fsdp1_shards(root or module)
    names = {id(p): _clean(n) for n, p in module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        prefix = f"optimizer{i}." if i else ""
        for j, group in enumerate(optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                name = names.get(id(p), f"group{j}.param{k}")
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        shard = shards.get(id(p)) if value.shape == p.shape else None
                        yield f"{prefix}{name}.{key}", value, shard
                    elif isinstance(value, (int, float)):
                        yield f"{prefix}{name}.{key}", torch.tensor(value, dtype=torch.float64), None


@torch.no_grad()
def measure_all(found: Iterable[Leaf]) -> dict[str, list[Any]]:
    """Return name -> [sum, squared norm, dtype, shape, is sharded, replica] of this rank's parts."""
    parts: dict[str, list[Any]] = {}
    results: list[tuple[Tensor, Tensor]] = []
    for name, tensor, shard in found:
        local, shard = local_part(tensor, shard)
        results.append(measure(local, shard.first if shard else 0))
        shape = list(shard.shape if shard else local.shape)
        parts[name] = [0, 0.0, str(local.dtype), shape, shard is not None, shard.replica if shard else 0]
    for device in {s.device for s, _ in results}:  # one wait for each device
        here = [i for i, (s, _) in enumerate(results) if s.device == device]
        sums = torch.stack([results[i][0] for i in here]).tolist()
        norms = torch.stack([results[i][1] for i in here]).tolist()
        keys = list(parts)
        for i, s, n in zip(here, sums, norms, strict=True):
            parts[keys[i]][:2] = [s, n]
    return parts


def merge(by_rank: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return name -> [digest, norm] of whole tensors from what `measure_all` gave on each rank."""
    tree: dict[str, list[Any]] = {}
    for name in {n: None for parts in by_rank for n in parts}:
        parts = [p[name] for p in by_rank if name in p]
        _, _, dtype, shape, is_sharded, _ = parts[0]
        if is_sharded:
            first = min(p[5] for p in parts if p[5] is not None)
            parts = [p for p in parts if p[5] == first]
        else:
            parts = parts[:1]
        digest = finish_digest(sum(p[0] for p in parts), dtype, shape)
        tree[name] = [digest, math.sqrt(sum(p[1] for p in parts))]
    return tree


# ---- everything that is no tensor of the model -----------------------------------------------------------------------


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _bytes_of(t: Tensor) -> bytes:
    t = getattr(t, "_local_tensor", t).detach().cpu().contiguous()
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def leaves(value: Any, path: str = "") -> dict[str, str]:
    """Return path -> value as text of a nested state; numbers exact, tensors and long lists as digests."""
    if isinstance(value, Mapping):
        return {
            k: v
            for key, x in value.items()
            for k, v in leaves(x, f"{path}.{key}" if path else str(key)).items()
        }
    if isinstance(value, (list, tuple)) and len(value) <= 64:
        return {k: v for i, x in enumerate(value) for k, v in leaves(x, f"{path}.{i}").items()}
    if isinstance(value, Tensor):
        text = (
            f"{value.item()!r}" if value.numel() == 1 else f"{tuple(value.shape)} {_hash(_bytes_of(value))}"
        )
    elif isinstance(value, np.ndarray):
        text = f"{value.shape} {_hash(value.tobytes())}"
    elif isinstance(value, (list, tuple, bytes)):
        text = _hash(repr(value).encode())
    elif isinstance(value, (str, int, float, bool, np.generic)) or value is None:
        text = repr(value)
    else:
        text = f"<{type(value).__qualname__}>"
    return {path: text}


def rng_digests(device: torch.device) -> dict[str, str]:
    """Return the digests of this process's random states: Python, NumPy, torch, and the device's unless it is the CPU."""
    found = {
        "python": _hash(repr(random.getstate()).encode()),
        "numpy": _hash(
            repr([x.tobytes() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]).encode()
        ),
        "torch": _hash(_bytes_of(torch.get_rng_state())),
    }
    if device.type != "cpu":
        found[device.type] = _hash(_bytes_of(torch.get_device_module(device).get_rng_state(device)))
    return found


def sample_ids(batch: Any) -> list[Any]:
    """Return what identifies each sample of a batch: `batch["sample_ids"]`, else a digest of each row of its tensors."""
    if isinstance(batch, Mapping) and isinstance(batch.get("sample_ids"), Tensor):
        return [int(i) for i in batch["sample_ids"].reshape(-1).tolist()]
    tensors: list[Tensor] = []

    def collect(x: Any) -> None:
        if isinstance(x, Tensor):
            tensors.append(x.detach().cpu())
        elif isinstance(x, Mapping):
            for key in sorted(x, key=str):
                collect(x[key])
        elif isinstance(x, (list, tuple)):
            for y in x:
                collect(y)

    collect(batch)
    if not tensors:
        return [_hash(repr(batch).encode())]
    if len({t.shape[0] if t.ndim else -1 for t in tensors}) == 1 and tensors[0].ndim:
        return [_hash(b"".join(_bytes_of(t[i]) for t in tensors)) for i in range(len(tensors[0]))]
    return [_hash(b"".join(_bytes_of(t) for t in tensors))]


def schedule_state(trainer: pl.Trainer) -> dict[str, str]:
    """Return the learning rates of all parameter groups and the states of all schedulers, exact."""
    state: dict[str, Any] = {}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            state[f"optimizer{i}.group{j}.lr"] = float(group["lr"])
    for i, config in enumerate(trainer.lr_scheduler_configs):
        own = {k: v for k, v in config.scheduler.state_dict().items() if k != "_get_lr_called_within_step"}
        state[f"scheduler{i}"] = own
    return leaves(state)


def position(trainer: pl.Trainer) -> dict[str, str]:
    """Return the update count and the data module's own state."""
    datamodule = getattr(trainer, "datamodule", None)
    return leaves(
        {"update": trainer.global_step, "datamodule": datamodule.state_dict() if datamodule else {}}
    )


def layout(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return what decides whether the same numbers can be expected: layout, machine, versions, the model's shape."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shapes = [
        (n, str(t.dtype), s.shape if s else tuple(t.shape)) for n, t, s in model_leaves(module, trainer.model)
    ]
    return {
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "device": name,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "repeatable": kernels_repeatable(device),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "precision": str(trainer.precision),
        "model": _hash(repr([(n, d, tuple(s)) for n, d, s in shapes]).encode()),
    }


def kernels_repeatable(device: torch.device) -> bool:
    """Return whether the same inputs give the same bits on this device: always on CPU, else if asked of torch."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def gradient_noise(step: Callable[[], Any], module: torch.nn.Module, device: torch.device) -> float | None:
    """Return how far two forward and backward passes of the same step lie apart: largest relative difference of a gradient.

    Random states, buffers and gradients are as before afterwards, and nothing is logged. None if it cannot be found out.
    """
    buffers = [(b, b.clone()) for b in module.buffers()]
    rng = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    devices = torch.get_device_module(device) if device.type != "cpu" else None
    device_rng = devices.get_rng_state(device) if devices else None
    own = {n: module.__dict__[n] for n in ("log", "log_dict") if n in module.__dict__}
    parameters = [p for p in module.parameters() if p.requires_grad]
    gradients = []
    try:
        module.log = module.log_dict = lambda *_, **__: None  # type: ignore[assignment]
        for _ in range(2):
            output = step()
            loss = output["loss"] if isinstance(output, Mapping) else output
            gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True))
            with torch.no_grad():
                for b, saved in buffers:
                    b.copy_(saved)
            random.setstate(rng[0])
            np.random.set_state(rng[1])
            torch.set_rng_state(rng[2])
            if devices:
                devices.set_rng_state(device_rng, device)
    except RuntimeError:  # such as reentrant checkpointing, which torch.autograd.grad cannot follow
        return None
    finally:
        for n in ("log", "log_dict"):
            module.__dict__.pop(n, None)
        for n, value in own.items():
            setattr(module, n, value)
    pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None]
    return max((float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs), default=0.0)


# ---- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first difference of one component: where, what was recorded, what was found."""

    component: str
    update: int | None  # None: at load
    name: str
    recorded: str
    found: str
    detail: str = ""

    def __str__(self) -> str:
        when = "when the checkpoint was loaded" if self.update is None else f"at update {self.update}"
        text = f"{self.component} differs {when}: {self.name}: recorded {self.recorded}, found {self.found}"
        return (
            f"{text}{' (' + self.detail + ')' if self.detail else ''}. Usual cause: {CAUSES[self.component]}."
        )


def derive_promise(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the strongest promise that two layouts allow, and what differs between them."""
    changed = [k for k in present if recorded.get(k) != present[k] and k != "repeatable"]
    reasons = [f"{k} {recorded.get(k)} -> {present[k]}" for k in changed]
    if {"precision", "model"} & set(changed):
        return "samples", reasons
    return ("tolerance" if changed else "exact"), reasons


def _hex(number: Any) -> str | None:
    number = number.detach() if isinstance(number, Tensor) else number
    return None if number is None else float(number).hex()


def _readable(text: str) -> str:
    return repr(float.fromhex(text)) if text.lstrip("-").startswith("0x") else text


def compare_leaves(
    component: str, recorded: Mapping[str, str], found: Mapping[str, str], update: int | None
) -> Difference | None:
    """Return the first leaf that differs, None if none does."""
    for name in {**recorded, **found}:
        a, b = recorded.get(name, "absent"), found.get(name, "absent")
        if a != b:
            return Difference(component, update, name, _readable(a), _readable(b))
    return None


def compare_trees(
    component: str,
    recorded: Mapping[str, Sequence[Any]],
    found: Mapping[str, Sequence[Any]],
    update: int | None,
) -> Difference | None:
    """Return the first tensor whose digest differs, with the size of the difference as far as norms tell it."""
    different = [n for n in {**recorded, **found} if (recorded.get(n) or "?")[0] != (found.get(n) or "?")[0]]
    if not different:
        return None
    name = different[0]
    a, b = recorded.get(name), found.get(name)
    of = f"{len(different)} of {len({**recorded, **found})} tensors differ"
    if a is None or b is None:
        gone = "absent"
        return Difference(
            component, update, name, f"norm {a[1]:.9g}" if a else gone, f"norm {b[1]:.9g}" if b else gone, of
        )
    holds = [n for n, leaf in recorded.items() if leaf[0] == b[0] and n != name]
    size = abs(b[1] - a[1])
    if holds:
        detail = f"it holds what was recorded for {holds[0]}"
    elif size <= 1e-6 * abs(a[1]):
        detail = "norms agree to 6 digits: few bits, or the order"
    else:
        detail = f"norms differ by {size:.3g}, {size / max(abs(a[1]), 1e-300):.2g} of it"
    return Difference(
        component, update, name, f"{a[0]} norm {a[1]:.9g}", f"{b[0]} norm {b[1]:.9g}", f"{detail}; {of}"
    )


def mean_loss(record: Mapping[str, Any]) -> float | None:
    """Return the loss of an update over all ranks and micro-batches; token-weighted where tokens are known."""
    bus = record.get("bus", {})
    if "train/loss" in bus:
        return float.fromhex(bus["train/loss"])
    parts = [m for r in record["ranks"] for m in r["micro_batches"] if m["loss"] is not None]
    if not parts:
        return None
    if all(m["tokens"] for m in parts):
        return math.fsum(float.fromhex(m["loss_sum"]) for m in parts) / sum(m["tokens"] for m in parts)
    return math.fsum(float.fromhex(m["loss"]) for m in parts) / len(parts)


def draws_random_numbers(record: Mapping[str, Any]) -> bool:
    """Return whether an update moved a random state (dropout does): on another layout other numbers fall on a sample."""
    return any(r["rng"] and r["rng"] != r["rng_after"] for r in record["ranks"])


def _norm_of(tree: Mapping[str, Sequence[Any]]) -> float:
    return math.sqrt(math.fsum(leaf[1] ** 2 for leaf in tree.values()))


def _samples(record: Mapping[str, Any], promise: str) -> dict[str, str]:
    if promise == "exact":  # who trained on what, and when
        return {
            f"rank {r}, micro-batch {m}, sample {i}": str(s)
            for r, rank in enumerate(record["ranks"])
            for m, micro_batch in enumerate(rank["micro_batches"])
            for i, s in enumerate(micro_batch["samples"])
        }
    ids = [s for rank in record["ranks"] for m in rank["micro_batches"] for s in m["samples"]]
    return {
        f"sample {i} of the update": str(s)
        for i, s in enumerate(sorted(ids, key=lambda s: (str(type(s)), s)))
    }


def _position(state: Mapping[str, str], promise: str) -> Mapping[str, str]:
    if promise == "exact":
        return state
    # A data module's state may name its layout; what has to agree in any layout is how far the run got.
    return {
        k: v for k, v in state.items() if k == "update" or k.endswith(("samples_consumed", "tokens_consumed"))
    }


def _compare_rng(
    recorded: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], key: str, update: int | None
) -> Difference | None:
    if not all(r[key] for r in recorded):
        return None
    return compare_leaves("RNG", _by_rank(recorded, key), _by_rank(found, key), update)


def _by_rank(ranks: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    return {f"rank {r}: {name}": v for r, rank in enumerate(ranks) for name, v in rank[key].items()}


def compare_load(recorded: Mapping[str, Any], found: Mapping[str, Any], promise: str) -> list[Difference]:
    """Return the differences between what was saved and what was loaded, in the order of `COMPONENTS`.

    Args:
        recorded: the snapshot at the save; its `rng` is that at the next update's start where a trace has it.
        found: the snapshot as the first `training_step` after the resume began.
        promise: what applies.
    """
    pairs: list[Difference | None] = [
        compare_leaves(
            "data position",
            _position(recorded["position"], promise),
            _position(found["position"], promise),
            None,
        )
    ]
    if promise != "samples":
        if promise == "exact":
            pairs.append(_compare_rng(recorded["ranks"], found["ranks"], "rng", None))
        pairs.append(compare_trees("parameters at load", recorded["parameters"], found["parameters"], None))
        pairs.append(compare_trees("optimizer at load", recorded["optimizer"], found["optimizer"], None))
        pairs.append(compare_leaves("scaler", recorded["scaler"], found["scaler"], None))
        pairs.append(compare_leaves("schedule", recorded["schedule"], found["schedule"], None))
        pairs.append(_compare_callbacks(recorded["callbacks"], found["callbacks"], found["callbacks_before"]))
    return [d for d in pairs if d is not None]


def _compare_callbacks(
    saved: Mapping[str, Mapping[str, str]], now: Mapping[str, Any], before: Mapping[str, Any]
) -> Difference | None:
    # What a callback returns may move on by itself (a clock does), so differing from what was saved proves nothing. Being
    # in every value what it was before the checkpoint was loaded, though other values were saved, does.
    for key, state in saved.items():
        if key not in now:
            return Difference(
                "callbacks",
                None,
                key,
                f"{len(state)} values",
                "absent",
                "the Trainer has no such callback now",
            )
        fresh = before.get(key, {})
        telling = [n for n, value in state.items() if value != fresh.get(n, "absent")]
        if telling and all(now[key].get(n, "absent") == fresh.get(n, "absent") for n in telling):
            name, what = telling[0], f"{len(telling)} values as if nothing was loaded"
            return Difference(
                "callbacks", None, f"{key}: {name}", state[name], now[key].get(name, "absent"), what
            )
    return None


def compare_update(
    recorded: Mapping[str, Any], found: Mapping[str, Any], promise: str, rtol: float, is_bitwise: bool = True
) -> list[Difference]:
    """Return the differences between an update as it was and as it is now, in the order of `COMPONENTS`.

    Args:
        recorded: the record in the trace.
        found: the record of the same update after the resume.
        promise: what applies.
        rtol: relative tolerance of what the update computes, where it is not bitwise.
        is_bitwise: under `exact`, whether kernels are repeatable.
    """
    update = found["update"]
    pairs: list[Difference | None] = [
        compare_leaves(
            "data position",
            _position(recorded["position"], promise),
            _position(found["position"], promise),
            update,
        ),
        compare_leaves("samples", _samples(recorded, promise), _samples(found, promise), update),
    ]
    if promise != "samples":
        ranks, ranks_now = recorded["ranks"], found["ranks"]
        if promise == "exact":
            pairs += [_compare_rng(ranks, ranks_now, key, update) for key in ("rng", "rng_after")]
        pairs.append(compare_leaves("schedule", recorded["schedule"], found["schedule"], update))
        if promise == "exact" and is_bitwise:
            keys = ("train/loss_sum", "train/tokens", "train/loss")
            losses, losses_now = ({k: v for k, v in r["bus"].items() if k in keys} for r in (recorded, found))
            pairs.append(
                compare_leaves("loss", _losses(ranks) | losses, _losses(ranks_now) | losses_now, update)
            )
            norms, norms_now = (
                {k: v for k, v in r["bus"].items() if k == "optim/grad_norm"} for r in (recorded, found)
            )
            pairs.append(compare_trees("gradient", recorded["gradient"], found["gradient"], update))
            pairs.append(compare_leaves("gradient", norms, norms_now, update))
            pairs.append(
                compare_trees("parameters after", recorded["parameters"], found["parameters"], update)
            )
            replicas, replicas_now = (
                {f"replica on rank {i}": r["replica"] for i, r in enumerate(x)} for x in (ranks, ranks_now)
            )
            pairs.append(compare_leaves("parameters after", replicas, replicas_now, update))
            pairs.append(compare_trees("optimizer after", recorded["optimizer"], found["optimizer"], update))
        else:
            pairs.append(_compare_number("loss", mean_loss(recorded), mean_loss(found), rtol, update))
            if promise == "exact":
                norms2 = (_norm_of(recorded["gradient"]), _norm_of(found["gradient"]))
                pairs.append(_compare_number("gradient", *norms2, rtol, update))
                weights = (_norm_of(recorded["parameters"]), _norm_of(found["parameters"]))
                pairs.append(_compare_number("parameters after", *weights, rtol, update))
    order = sorted((d for d in pairs if d is not None), key=lambda d: COMPONENTS.index(d.component))
    return [d for i, d in enumerate(order) if i == 0 or d.component != order[i - 1].component]


def _losses(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"rank {r}, micro-batch {m}{what}": str(micro_batch[key])
        for r, rank in enumerate(ranks)
        for m, micro_batch in enumerate(rank["micro_batches"])
        for key, what in (("loss", ""), ("loss_sum", ", sum"), ("tokens", ", tokens"))
    }


def _compare_number(
    component: str, a: float | None, b: float | None, rtol: float, update: int
) -> Difference | None:
    if a is None or b is None or abs(a - b) <= rtol * abs(a) or (math.isnan(a) and math.isnan(b)):
        return None
    apart = f"{abs(a - b) / max(abs(a), 1e-300):.2g} apart, {rtol:.2g} is allowed"
    return Difference(component, update, "of all ranks", f"{a!r}", f"{b!r}", apart)


# ---- the callback ----------------------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """A trace that is being recorded for one checkpoint."""

    id: str
    snapshot: dict[str, Any]
    skip: int  # micro-batches of the window that were over when the save fell into it
    path: Path | None = None  # what was passed to save_checkpoint
    origin: str = "run"  # or "resume"
    updates: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Resume:
    """A comparison under way."""

    snapshot: dict[str, Any] | None  # at the save; None if the checkpoint has none
    recorded: list[dict[str, Any]]
    trace_file: Path | None
    checkpoint: Path
    promise: str
    rtol: float
    is_bitwise: bool
    is_loss_compared: bool = True
    verified: int = 0
    differences: list[Difference] = field(default_factory=list)


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f".tmp-{path.name}.{os.getpid()}")
    with open(temporary, "w") as f:
        json.dump(content, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else None
    except (OSError, ValueError):
        return None


def manifest_of(checkpoint: Path) -> Path | None:
    """Return the manifest of the folder that a checkpoint is or lies in, None if it has none."""
    return next(
        (d / "manifest.json" for d in (checkpoint, checkpoint.parent) if (d / "manifest.json").is_file()),
        None,
    )


def trace_file_of(checkpoint: Path) -> Path:
    """Return where the trace of a checkpoint lies: in its folder if that has a manifest, else beside it."""
    manifest = manifest_of(checkpoint)
    return (
        manifest.with_name("trace.json")
        if manifest
        else checkpoint.with_name(checkpoint.name + ".trace.json")
    )


class RestartEquivalence(pl.Callback):
    """Records traces after saves and compares the updates after a resume with them. See the file's top.

    After a resume, `report` holds the verdict: promise, why, updates compared, first differences, state of each component.

    Args:
        promise: "exact", "tolerance" or "samples": what is to be held to at most; layouts may allow only less.
        updates: updates to record after each save. Each costs one pass over parameters, gradients and optimizer state.
        rtol: relative tolerance of losses where they are not compared bitwise. 0 takes 1e-4, or 2e-2 in half precision.
        on_mismatch: "raise" RestartMismatchError, "warn", or "mark" (verdict and metrics only).

    Raises:
        ValueError: an argument outside of these.
    """

    def __init__(
        self, *, promise: str = "exact", updates: int = 2, rtol: float = 0.0, on_mismatch: str = "raise"
    ) -> None:
        if promise not in PROMISES:
            raise ValueError(f"promise={promise!r} is none of {PROMISES}.")
        if on_mismatch not in ("raise", "warn", "mark"):
            raise ValueError(f"on_mismatch={on_mismatch!r} is none of ('raise', 'warn', 'mark').")
        if updates < 1 or rtol < 0:
            raise ValueError(f"updates={updates} has to be 1 or more, rtol={rtol} 0 or more.")
        self.promise, self.updates, self.rtol, self.on_mismatch = promise, updates, rtol, on_mismatch
        self.verified_updates = 0
        self.mismatches = 0
        self.is_branch = (
            False  # set before a fit that branches off another run: its updates differ from those by design
        )
        self.report: dict[str, Any] | None = None
        self.by = "RestartEquivalence"  # who verified, for the manifest
        self.marks_other_runs = (
            False  # for a process that replays a run beside it to judge the run's own checkpoints
        )
        self.trace_file: Path | None = None  # of the checkpoint resumed from, if not beside it
        self._is_foreign = False  # the checkpoint resumed from belongs to another run
        self._is_inside = False  # a window, since this batch began or the last one ended
        self._last_step = -1
        self._reset()

    def _reset(self) -> None:
        self._open: list[_Trace] = []
        self._placed: list[tuple[Path, Path]] = []  # (trace file, its checkpoint)
        self._unplaced: dict[str, _Trace] = {}
        self._resume: _Resume | None = None
        self._is_resuming = False
        self._loaded: dict[str, Any] = {}
        self._callbacks_before: dict[str, Any] = {}
        self._at_load: dict[str, Any] | None = None
        self._window: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._saving_to: Path | None = None
        self._undo: list[Callable[[], None]] = []  # for one batch
        self._undo_fit: list[Callable[[], None]] = []
        self._hooks: list[Any] = []

    # -- saving and loading

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note where checkpoints go."""
        if stage != "fit":
            return
        self._reset()
        save = trainer.save_checkpoint

        @wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            self._saving_to = Path(filepath)
            try:
                save(filepath, *args, **kwargs)
            finally:
                self._saving_to = None

        own_save = trainer.__dict__.get("save_checkpoint")

        def restore() -> None:
            trainer.__dict__.pop("save_checkpoint", None)
            if own_save is not None:
                trainer.save_checkpoint = own_save  # type: ignore[method-assign]

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
        self._undo_fit.append(restore)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put digests of what is saved into the checkpoint and begin a trace."""
        if trainer.state.fn != "fit":
            return
        self._close_window(trainer, pl_module)
        self._finish(trainer, pl_module)
        snapshot = self._snapshot(trainer, pl_module)
        # Whoever saves inside a window may save the RNG of its beginning, or this one.
        is_known = not self._is_inside or trainer.global_step != self._last_step
        rng = self._gather({"rng": rng_digests(trainer.strategy.root_device) if is_known else {}})
        others = {c.state_key for c in self._others(trainer)}
        states = {k: leaves(v) for k, v in checkpoint.get("callbacks", {}).items() if k in others}
        snapshot |= {"ranks": rng, "callbacks": states}
        skip = len(self._window["micro_batches"]) if self._window else 0
        trace = _Trace(uuid.uuid4().hex, snapshot, skip, self._saving_to)
        counters = {"verified_updates": self.verified_updates, "mismatches": self.mismatches}
        content = {"schema": SCHEMA, "id": trace.id, "snapshot": snapshot, **counters}
        checkpoint.setdefault("callbacks", {})[self.state_key] = {"json": json.dumps(content)}
        self._retire(trainer)
        self._open.append(trace)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take up the digests; note what other callbacks hold before they load."""
        if trainer.state.fn != "fit":
            return
        saved = checkpoint.get("callbacks", {})
        text = saved.get(self.state_key, {}).get("json")
        self._loaded = json.loads(text) if text else {}
        self._callbacks_before = {c.state_key: leaves(c.state_dict()) for c in self._others(trainer)}

    def _others(self, trainer: pl.Trainer) -> list[pl.Callback]:
        # Callbacks that save may change from run to run, with their settings and folders: they do not touch the training.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return [c for c in callbacks if c is not self and not isinstance(c, Checkpoint)]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that this is a resume."""
        self._is_resuming = trainer.ckpt_path is not None and not self.is_branch

    # -- one update

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """While a trace is recorded or compared: begin a window, watch `training_step`."""
        self._is_inside, self._last_step = True, trainer.global_step
        self._finish(trainer, pl_module)
        if self._is_resuming:
            self._is_resuming = False
            self._begin_resume(trainer, pl_module)
        if not (self._open or self._resume):
            return
        if self._window is None:
            self._window = {
                "step": trainer.global_step,
                "schedule": schedule_state(trainer),
                "micro_batches": [],
                "rng": None,
                "gradient": {},
                # The objects, to tell a value that this update logged from one left over.
                "bus": dict(trainer.callback_metrics),
            }
            for optimizer in trainer.optimizers:
                self._hooks.append(
                    optimizer.register_step_post_hook(lambda *_: self._note_gradient(trainer, pl_module))
                )
        self._watch(trainer, pl_module, batch)

    def _watch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        # Only here have all on_train_batch_start hooks run, whatever their order: someone may restore the RNG in one.
        step, own_step = module.training_step, module.__dict__.get("training_step")

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            window = self._window
            assert window is not None
            if window["rng"] is None:
                self._before_first_step(trainer, module, window, lambda: step(*args, **kwargs))
            ids = sample_ids(batch)
            output = step(*args, **kwargs)
            found = output if isinstance(output, Mapping) else {"loss": output}
            loss, loss_sum, tokens = (found.get(k) for k in ("loss", "loss_sum", "num_tokens"))
            micro_batch = {
                "samples": ids,
                "loss": _hex(loss),
                "loss_sum": _hex(loss_sum),
                "tokens": None if tokens is None or loss_sum is None else int(tokens),
            }
            window["micro_batches"].append(micro_batch)
            return output

        def restore() -> None:
            module.__dict__.pop("training_step", None)
            if own_step is not None:
                module.training_step = own_step  # type: ignore[method-assign]

        module.training_step = training_step  # type: ignore[method-assign]
        self._undo.append(restore)

    def _before_first_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, window: dict[str, Any], step: Callable[[], Any]
    ) -> None:
        device = trainer.strategy.root_device
        window["rng"] = rng_digests(device)
        resume, at_load = self._resume, self._at_load
        if resume is None or at_load is None or "callbacks" in at_load:
            return
        at_load["rng"] = window["rng"]
        at_load["callbacks"] = {c.state_key: leaves(c.state_dict()) for c in self._others(trainer)}
        at_load["callbacks_before"] = self._callbacks_before
        if not resume.is_bitwise and resume.promise == "exact" and not at_load["is_sharded"]:
            noise = gradient_noise(step, module, device)
            if noise is not None:
                resume.rtol = max(resume.rtol, 8 * noise)

    def _note_gradient(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # After the optimizer stepped: weighted, unscaled and clipped, whoever did that and in which order.
        if self._window is not None:
            self._window["gradient"] |= measure_all(gradient_leaves(module, trainer.model))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a window that is recorded or compared: digests of what it left behind."""
        self._is_inside = trainer.global_step == self._last_step
        if self._window is not None:
            self._stop_watching()
            self._close_window(trainer, pl_module)

    def _stop_watching(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _close_window(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        window = self._window
        if window is None or trainer.global_step == window["step"]:
            return
        self._window = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        parameters = measure_all(model_leaves(module, trainer.model))
        window |= {
            "position": position(trainer),
            "parameters": parameters,
            "optimizer": measure_all(optimizer_leaves(module, trainer.optimizers, trainer.model)),
            "rng_after": rng_digests(trainer.strategy.root_device),
            "replica": _replica(parameters),
            "update": trainer.global_step,
        }
        self._pending = window

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Complete the record of the last update, once other callbacks have logged theirs; compare; write."""
        window, self._pending = self._pending, None
        if window is None:
            return
        metrics = trainer.callback_metrics
        keys = ("train/loss", "train/loss_sum", "train/tokens", "optim/grad_norm")
        fresh = [k for k in keys if k in metrics and metrics[k] is not window["bus"].get(k)]
        mine = {k: window[k] for k in ("rng", "rng_after", "micro_batches", "replica")}
        ranks, trees = self._gather_trees(
            mine, {k: window[k] for k in ("gradient", "parameters", "optimizer")}
        )
        record = {k: window[k] for k in ("update", "position", "schedule")}
        record |= {"bus": {k: float(metrics[k]).hex() for k in fresh}, "ranks": ranks, **trees}
        if self._resume is not None:
            self._compare(trainer, record)
        for trace in self._open:
            own = record
            if trace.skip and not trace.updates:
                after: dict[str, Any] = {"rng": {}}  # that of the save is not known
                ranks = [
                    {**r, **after, "micro_batches": r["micro_batches"][trace.skip :]} for r in record["ranks"]
                ]
                own = {**record, "ranks": ranks}
            trace.updates.append(own)
            num = len(trace.updates)
            if num <= 4 or num % 16 == 0 or num == self.updates:
                self._write(trainer, trace)
        self._open = [t for t in self._open if len(t.updates) < self.updates]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the last record before evaluation."""
        self._finish(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the last record of the epoch."""
        self._finish(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the last record; put traces where they belong."""
        self._finish(trainer, pl_module)
        if self._resume is not None and (self._resume.verified or self._resume.differences):
            self._conclude(trainer)
        self._retire(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Conclude with what was compared; leave the module, the optimizers and the Trainer as they were."""
        if self._resume is not None and self._resume.verified and not self._resume.differences:
            self._conclude(trainer)
        self._clean_up()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module, the optimizers and the Trainer as they were."""
        self._clean_up()

    def _clean_up(self) -> None:
        self._stop_watching()
        while self._undo_fit:
            self._undo_fit.pop()()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._window = None

    # -- ranks

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return [mine]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def _gather_trees(
        self, mine: dict[str, Any], parts: dict[str, dict[str, list[Any]]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        # Of replicas rank 0's tensors are enough; of shards everybody's are needed.
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        is_sharded = any(p[4] for tree in parts.values() for p in tree.values())
        sent = parts if is_first or is_sharded else {k: {} for k in parts}
        gathered = self._gather({"mine": mine, "parts": sent})
        trees = {k: merge([g["parts"][k] for g in gathered]) for k in parts}
        return [g["mine"] for g in gathered], trees

    def _snapshot(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        parts = {
            "parameters": measure_all(model_leaves(module, trainer.model)),
            "optimizer": measure_all(optimizer_leaves(module, trainer.optimizers, trainer.model)),
        }
        _, trees = self._gather_trees({}, parts)
        return {
            "step": trainer.global_step,
            "layout": layout(trainer, module),
            "position": position(trainer),
            "scaler": leaves(trainer.precision_plugin.state_dict()),
            "schedule": schedule_state(trainer),
            **trees,
        }

    # -- after a resume

    def _begin_resume(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        checkpoint = Path(str(trainer.ckpt_path))
        self._is_foreign = not self.marks_other_runs and self._belongs_to_another_run(trainer, checkpoint)
        found = self._snapshot(trainer, module)
        parts = (local_part(t, s) for _, t, s in model_leaves(module, trainer.model))
        found["is_sharded"] = any(shard is not None for _, shard in parts)
        self._at_load = found
        own = self._loaded
        self.verified_updates = int(own.get("verified_updates", 0))
        self.mismatches = int(own.get("mismatches", 0))
        wanted = own.get("id", f"unmarked-{trainer.global_step}")
        file, trace = trainer.strategy.broadcast(self._find_trace(trainer, checkpoint, wanted), src=0)
        snapshot = own.get("snapshot") or (trace or {}).get("snapshot")
        recorded = (trace or {}).get("updates", [])
        # A run that was lengthened follows another schedule on purpose, from an update that its module may know.
        changes_at = getattr(module, "rates_change_at", None)
        if changes_at is not None:
            recorded = recorded[: max(0, changes_at - trainer.global_step)]
            if snapshot is not None and changes_at <= trainer.global_step:
                snapshot = {**snapshot, "schedule": found["schedule"]}
        if snapshot is None:
            rank_zero_warn(
                f"RestartEquivalence cannot judge this restart: {checkpoint} was saved without it. The next {self.updates} "
                "updates are recorded; another resume from this checkpoint will be compared with them."
            )
            self.report = {
                "checkpoint": str(checkpoint),
                "verdict": "cannot be judged",
                "updates_compared": 0,
            }
            self._record_again(trainer, wanted, checkpoint, found)
            return
        allowed, reasons = derive_promise(snapshot["layout"], found["layout"])
        promise = max(allowed, self.promise, key=PROMISES.index)
        is_bitwise = promise == "exact" and snapshot["layout"]["repeatable"] and found["layout"]["repeatable"]
        half = "16" in found["layout"]["precision"]
        rtol = self.rtol or (2e-2 if half else 1e-4)
        self._resume = _Resume(snapshot, recorded, file, checkpoint, promise, rtol, is_bitwise)
        why = "; ".join(reasons) or "same layout and versions"
        if promise != allowed:
            why += "; narrowed by the promise asked for"
        if promise == "exact" and not is_bitwise:
            why += "; kernels are not repeatable, so what an update computes is held to a tolerance"
        changed = {r.split(" ", 1)[0] for r in reasons}
        is_elsewhere = {"world_size", "accumulate_grad_batches", "device"} & changed
        if promise == "tolerance" and is_elsewhere and any(draws_random_numbers(u) for u in recorded):
            self._resume.is_loss_compared = False
            why += "; the updates draw random numbers, which fall otherwise here, so losses are not compared"
        origin = {"resume": "an earlier resume"}.get((trace or {}).get("origin", ""), "the run that saved it")
        against = (
            f"{len(recorded)} updates of {origin}"
            if recorded
            else "what was saved; no update after it was recorded"
        )
        rank_zero_info(
            f"RestartEquivalence: resuming from {checkpoint} at update {trainer.global_step}. Promise: {promise} ({why}). "
            f"Comparing with {against}."
        )
        self.report = {
            "checkpoint": str(checkpoint),
            "step": trainer.global_step,
            "promise": promise,
            "why": why,
            "origin": (trace or {}).get("origin"),
            "updates_recorded": len(recorded),
            "updates_compared": 0,
            "verdict": "under way",
            "differences": [],
        }
        if not (trace or {}).get("updates"):
            self._record_again(trainer, wanted, checkpoint, snapshot)

    def _record_again(
        self, trainer: pl.Trainer, name: str, checkpoint: Path, snapshot: dict[str, Any]
    ) -> None:
        # The run died before its trace was complete: what this resume does is what the next one is held to.
        kept = {k: v for k, v in snapshot.items() if k != "is_sharded"}
        kept.setdefault("ranks", self._gather({"rng": rng_digests(trainer.strategy.root_device)}))
        kept.setdefault("callbacks", {})
        self._open.append(_Trace(name, kept, 0, checkpoint, origin="resume"))

    def _compare(self, trainer: pl.Trainer, record: dict[str, Any]) -> None:
        resume, at_load = self._resume, self._at_load
        assert resume is not None and resume.snapshot is not None and self.report is not None
        index = self.report["updates_compared"]
        recorded = resume.recorded[index] if index < len(resume.recorded) else None
        found: list[Difference] = []
        if at_load is not None:
            saved = dict(resume.snapshot)
            if recorded is not None:  # what evaluation after the save drew belongs to the run
                saved["ranks"] = recorded["ranks"]
            found += compare_load(saved, {**at_load, "ranks": record["ranks"]}, resume.promise)
            self._at_load = None
        if recorded is not None:
            rtol = resume.rtol * (index + 1)  # differences grow from update to update
            differences = compare_update(recorded, record, resume.promise, rtol, resume.is_bitwise)
            found += [d for d in differences if d.component != "loss" or resume.is_loss_compared]
            self.report["updates_compared"] += 1
        first_of: dict[str, Difference] = {}
        for d in sorted(found, key=lambda d: COMPONENTS.index(d.component)):
            first_of.setdefault(d.component, d)
        resume.differences += first_of.values()
        if first_of:
            self.mismatches += 1
        elif recorded is not None:
            resume.verified += 1
            self.verified_updates += 1
        metrics = {"restart/verified_updates": self.verified_updates, "restart/mismatches": self.mismatches}
        for logger in trainer.loggers:
            logger.log_metrics({k: float(v) for k, v in metrics.items()}, step=trainer.global_step)
        trainer.callback_metrics.update({k: torch.tensor(float(v)) for k, v in metrics.items()})
        if first_of or self.report["updates_compared"] >= len(resume.recorded):
            self._conclude(trainer)

    def _conclude(self, trainer: pl.Trainer) -> None:
        """Write the verdict and say it."""
        resume, self._resume = self._resume, None
        assert resume is not None and self.report is not None
        first = resume.differences[0] if resume.differences else None
        num = self.report["updates_compared"]
        verdict = "failed" if first else resume.promise if num else "loaded"
        compared = (
            COMPONENTS
            if resume.promise == "exact"
            else (
                tuple(
                    c
                    for c in COMPONENTS
                    if c not in ("RNG", "gradient", "parameters after", "optimizer after")
                )
                if resume.promise == "tolerance"
                else COMPONENTS[:2]
            )
        )
        if not resume.is_loss_compared:
            compared = tuple(c for c in compared if c != "loss")
        if not num:
            compared = tuple(c for c in compared if c in COMPONENTS[:8] and c != "samples")
        by_component = {d.component: d for d in resume.differences}
        self.report |= {
            "verdict": verdict,
            "rtol": None if resume.is_bitwise else resume.rtol,
            "differences": [asdict(d) | {"text": str(d)} for d in resume.differences],
            "components": {
                c: "not compared" if c not in compared else "differs" if c in by_component else "holds"
                for c in COMPONENTS
            },
        }
        if num or first:
            self._mark(trainer, resume, verdict, first)
        if first is None:
            missing = "" if num else " What follows cannot be judged: no update after the save was recorded."
            rank_zero_info(
                f"RestartEquivalence: {num} updates after the resume from {resume.checkpoint} hold ({resume.promise})."
                if num
                else f"RestartEquivalence: what was loaded from {resume.checkpoint} is what was saved.{missing}"
            )
            return
        others = [c for c in by_component if c != first.component]
        text = f"The restart from {resume.checkpoint} does not continue the run it was saved by ({resume.promise}). {first}"
        if others:
            text += f" Also different: {', '.join(others)}."
        if self.on_mismatch == "raise":
            raise RestartMismatchError(text)
        if self.on_mismatch == "warn":
            rank_zero_warn(text)
        else:
            rank_zero_info(text)

    # -- files

    def _find_trace(
        self, trainer: pl.Trainer, checkpoint: Path, name: str
    ) -> tuple[Path | None, dict[str, Any] | None]:
        if trainer.global_rank:
            return None, None
        places = [self.trace_file] if self.trace_file else []
        if not places:
            places = [trace_file_of(checkpoint), trace_file_of(Path(os.path.realpath(checkpoint)))]
            places.append(self._spare(trainer, name))
        for file in places:
            trace = _read_json(file)
            if trace is not None and trace.get("id") == name:
                return file, trace
        return None, None

    def _spare(self, trainer: pl.Trainer, name: str) -> Path:
        return Path(trainer.default_root_dir) / "restart_traces" / f"{name}.json"

    @staticmethod
    def _belongs_to_another_run(trainer: pl.Trainer, checkpoint: Path) -> bool:
        """Return whether a folder with a manifest lies where no callback of this run saves: its files stay as they are."""
        manifest = manifest_of(checkpoint) or manifest_of(Path(os.path.realpath(checkpoint)))
        root = Path(trainer.default_root_dir) / "checkpoints"
        homes = {
            Path(c.dirpath or root).resolve() for c in trainer.checkpoint_callbacks if hasattr(c, "dirpath")
        }
        return manifest is not None and bool(homes) and manifest.parent.parent.resolve() not in homes

    def _locate(self, trace: _Trace) -> Path | None:
        # Whoever saved may have written into a hidden folder and renamed it: step-00000200, by its manifest.
        path = trace.path
        if trace.origin == "resume" and self.trace_file is not None:
            return self.trace_file
        if path is None or (trace.origin == "resume" and self._is_foreign):
            return None
        if path.exists() and not any(part.startswith(".") for part in path.parts[-3:]):
            return trace_file_of(path)
        pattern = f"step-{trace.snapshot['step']:08d}*"
        folders = [
            d
            for base in list(path.parents)[:3]
            for d in base.glob(pattern)
            if (d / "manifest.json").is_file()
        ]
        return max(folders, key=lambda d: d.stat().st_mtime) / "trace.json" if folders else None

    def _write(self, trainer: pl.Trainer, trace: _Trace) -> None:
        if trainer.global_rank:
            return
        content = {k: getattr(trace, k) for k in ("id", "origin", "snapshot", "updates")}
        content = {"schema": SCHEMA, "step": trace.snapshot["step"], **content, "verified": None}
        place = self._locate(trace)
        spare = self._spare(trainer, trace.id)
        if place is None:
            spare.parent.mkdir(parents=True, exist_ok=True)
            place = spare
            self._unplaced[trace.id] = trace
        elif trace.path is not None:
            spare.unlink(missing_ok=True)
            self._unplaced.pop(trace.id, None)
            if place.name != "trace.json":
                self._placed.append((place, trace.path))
        _write_json(place, content)

    def _retire(self, trainer: pl.Trainer) -> None:
        """Move traces to checkpoints that have got their place by now; drop those of checkpoints that were removed."""
        for trace in list(self._unplaced.values()):
            if self._locate(trace) is not None:
                self._write(trainer, trace)
        for file, checkpoint in self._placed:
            if not checkpoint.exists():
                file.unlink(missing_ok=True)
        self._placed = [(f, c) for f, c in self._placed if c.exists()]

    def _mark(self, trainer: pl.Trainer, resume: _Resume, verdict: str, first: Difference | None) -> None:
        if trainer.global_rank or self._is_foreign:
            return
        verified = {
            "promise": verdict,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "by": self.by,
            "updates": resume.verified,
            "run": str(trainer.default_root_dir),
            "first_difference": str(first) if first else None,
        }
        places = [
            manifest_of(resume.checkpoint),
            manifest_of(Path(os.path.realpath(resume.checkpoint))),
            resume.trace_file,
        ]
        for file in places:
            content = _read_json(file) if file is not None else None
            if content is not None and file is not None:
                content["verified"] = verified
                _write_json(file, content)
                return


def _replica(parameters: Mapping[str, list[Any]]) -> str:
    whole = [(n, p[0]) for n, p in parameters.items() if not p[4] and not n.endswith("(buffer)")]
    return _hash(repr(whole).encode())
