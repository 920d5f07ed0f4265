"""Checkpoints that survive: best, latest and archive under one policy, committed atomically and verified.

Drop it into any Lightning project (this one file is enough, which is why it is longer than 400 lines):

    trainer = pl.Trainer(callbacks=[CheckpointRetention(every_n_steps=500, archive_every_n_steps=10_000)])
    trainer.fit(model, ckpt_path=CheckpointRetention.resolve("runs/a/checkpoints", "auto"))

A save is made at an update boundary, after that update's validation where one is due. It is written into a hidden folder
beside its final place, flushed, hashed and renamed; then index.json moves; then the policy prunes. What is on the disk
decides, never memory: restarts, files deleted by hand and other runs in the same folder are safe.

    DIRPATH/step-00000200/manifest.json      what it is; complete if this is there and its hashes match
    DIRPATH/step-00000200/state[.ckpt]       what Trainer.fit(ckpt_path=...) takes
    DIRPATH/index.json                       roles -> steps, for people; rebuilt from the manifests

| role | which checkpoints | pruned |
|---|---|---|
| best | the `keep_best` best by `monitor`; a later one has to improve by more than `min_delta`; never NaN or inf | when beaten |
| latest | the `keep_latest` that were saved last | when older |
| archive | each n-th update, or the updates listed | never |

Neither is the last one that RestartEquivalence verified ever pruned. A checkpoint with several roles is stored once.

When it saves: every `every_n_steps` updates, every `every_n_minutes`, at archive updates, after a validation that enters
the best, at the end and on a signal. With neither interval given: after every validation and at the end of each epoch.

| key | unit | |
|---|---|---|
| `ckpt/step` | updates | which update was saved |
| `ckpt/blocked_s` | s | training stood still for it |
| `ckpt/write_s` | s | writing, flushing, hashing and renaming took |
| `ckpt/bytes` | bytes | size on disk |

Signals: SIGTERM, SIGINT and SIGUSR1 to any rank let the update (and a validation under way) finish, save once and exit
with 128 + signal number: 143, 130, 138. More of them change nothing; a third SIGINT breaks off like Ctrl-C.

What continues exactly: the RNG of Python, NumPy, torch and the device of each rank is part of the state and restored at
the first batch after a resume. At another world size each rank gets a seed derived from the saved state instead. Data
loading that draws from the global RNG of the main process cannot be continued: give the dataset a generator.
"""

import bisect
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import pickle
import platform
import random
import re
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist

# Through `pl`, so that the import above is the one line that a pytorch_lightning project changes.
Checkpoint = pl.callbacks.Checkpoint
AsyncCheckpointIO = pl.plugins.AsyncCheckpointIO
CheckpointIO = pl.plugins.CheckpointIO
TorchCheckpointIO = pl.plugins.TorchCheckpointIO
rank_zero_info, rank_zero_warn = pl.utilities.rank_zero_info, pl.utilities.rank_zero_warn

SCHEMA = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_STEP_DIR = re.compile(r"step-(\d{8,})(?:-[0-9a-f]{6})?\Z")
_UNHASHED = ("sha256", "verified")  # `verified` is written later, by whoever proves a restart


class DamagedCheckpointError(RuntimeError):
    """No checkpoint that was asked for is whole: a file is missing, cut short or altered."""


class UnsafeCheckpointError(RuntimeError):
    """Reading the checkpoint would run code from it."""


class CheckpointSaveError(RuntimeError):
    """A save failed; the checkpoints committed before it are untouched."""


# ---- policy: what is kept, as a pure function of what is there -------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """What to keep. `archive` is n for every n-th update, or the updates themselves."""

    monitor: str | None = "val/loss"
    mode: str = "min"
    min_delta: float = 0.0
    keep_best: int = 1
    keep_latest: int = 2
    archive: int | tuple[int, ...] | None = None

    def archives(self, step: int) -> bool:
        """Return whether a checkpoint at this update is to be archived."""
        if isinstance(self.archive, int):
            return step > 0 and step % self.archive == 0
        return self.archive is not None and step in self.archive

    def better(self, value: float, than: float) -> bool:
        """Return whether `value` improves on `than` by more than `min_delta`."""
        return (than - value if self.mode == "min" else value - than) > self.min_delta


@dataclass(frozen=True)
class Saved:
    """One checkpoint on disk, as far as the policy is concerned.

    `order` counts the saves of a run (a run that went back to an older checkpoint saves smaller steps later).
    `improved` is whether it entered the best when it was saved, None if unknown.
    """

    step: int
    metric: float | None = None
    order: int = 0
    name: str = ""
    run: str = ""
    improved: bool | None = None
    archived: bool = False
    is_verified: bool = False
    num_bytes: int = 0
    created: str = ""


def decide(saved: Iterable[Saved], policy: Policy) -> tuple[dict[str, list[Saved]], list[Saved]]:
    """Return ({"latest", "best", "archive"} -> checkpoints, those to prune); best first, latest newest first.

    Ties: the earlier stays best. A value that is NaN or infinite never counts. Checkpoints whose `improved` is False
    are best only if there are too few others, so that pruning one checkpoint never changes the rank of another.
    """
    by_age = sorted(saved, key=lambda s: (s.order, s.step))
    finite = [s for s in by_age if s.metric is not None and math.isfinite(s.metric)]
    sign = 1.0 if policy.mode == "min" else -1.0

    def rank(s: Saved) -> tuple[float, int, int]:
        assert s.metric is not None
        return sign * s.metric, s.order, s.step

    best: list[Saved] = []
    for s in finite:
        if policy.keep_best == 0 or s.improved is False or s.metric is None:
            continue
        worst = best[-1].metric if len(best) == policy.keep_best else None
        if worst is not None and not policy.better(s.metric, worst):
            continue
        best = sorted([*best[: policy.keep_best - 1], s], key=rank)
    spare = sorted((s for s in finite if s.improved is False), key=rank)
    best = sorted([*best, *spare[: policy.keep_best - len(best)]], key=rank)
    latest = by_age[::-1][: policy.keep_latest]
    archive = [s for s in by_age if s.archived or policy.archives(s.step)]
    verified = [s for s in by_age if s.is_verified][-1:]
    kept = {id(s) for s in (*best, *latest, *archive, *verified)}
    return {"latest": latest, "best": best, "archive": archive}, [s for s in by_age if id(s) not in kept]


# ---- files -----------------------------------------------------------------------------------------------------------


class HashingFile(io.RawIOBase):
    """A new file, hashed by a second thread while it is written; `close` flushes it to the disk.

    Args:
        path: must not exist.
        lasting: tensors in host memory that stay as they are until `close`; their bytes are hashed behind the writing,
            any other before `write` returns.
    """

    def __init__(self, path: Path, lasting: Iterable[torch.Tensor] = ()) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._sha = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        memory = sorted(
            {(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in lasting if t.is_cpu)}
        )
        self._starts, self._ends = [start for start, _ in memory], [start + n for start, n in memory]
        self._small = bytearray()  # pickles come in pieces of a few bytes
        self.num_bytes = 0
        self.error: OSError | None = None  # torch.save covers it with one of its own

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, everything written to it."""
        self._drain()
        return self._fd

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.num_bytes

    def write(self, data: Any) -> int:
        """Write all of `data`; the buffer is free again on return unless it is of a lasting tensor."""
        view = memoryview(data).cast("B")
        self.num_bytes += len(view)
        if len(view) < 1 << 16:
            self._small += view
            if len(self._small) > 1 << 20:
                self._drain()
        else:
            self._drain()
            self._put(view, waits=not self._lasts(view))
        return len(view)

    def _drain(self) -> None:
        if self._small:
            small, self._small = bytes(self._small), bytearray()
            self._put(memoryview(small), waits=False)

    def _put(self, view: memoryview, waits: bool) -> None:
        hashed = self._pool.submit(self._sha.update, view)
        done = 0
        try:
            while done < len(view):
                done += os.write(self._fd, view[done : done + (1 << 26)])
        except OSError as e:
            self.error = self.error or e
            raise
        finally:
            if waits:
                hashed.result()

    def _lasts(self, view: memoryview) -> bool:
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        i = bisect.bisect_right(self._starts, address) - 1
        return i >= 0 and address + len(view) <= self._ends[i]

    def close(self) -> None:
        """Flush to the disk, wait for the hash and close."""
        if not self.closed:
            try:
                self._drain()
                os.fsync(self._fd)
            except OSError as e:
                self.error = self.error or e
                raise
            finally:
                self._pool.shutdown()
                os.close(self._fd)
                super().close()

    @property
    def record(self) -> dict[str, Any]:
        """Size and hash, as the manifest lists them."""
        return {"bytes": self.num_bytes, "sha256": self._sha.hexdigest()}


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """Leave the checksums of torch's zip format out: the SHA-256 says more, and they cost as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, content: Any, is_flushed: bool = True) -> None:
    """Replace a JSON file atomically, by default flushed to the disk on return."""
    temporary = path.with_name(f".tmp-{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as f:
            json.dump(content, f, indent=1)
            f.flush()
            if is_flushed:
                os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if is_flushed:
        _fsync_folder(path.parent)


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the hash that a manifest carries of itself."""
    hashed = {k: v for k, v in manifest.items() if k not in _UNHASHED}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a step directory, None if there is none that can be read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return manifest if isinstance(manifest["files"], dict) and isinstance(manifest["step"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _as_saved(name: str, manifest: dict[str, Any], monitor: str | None = None) -> Saved:
    metric = manifest.get("metric") or {}
    if monitor is not None and metric.get("name") != monitor:
        metric = {}  # not comparable with what is monitored now
    verified = manifest.get("verified") or {}
    return Saved(
        step=manifest["step"],
        metric=float(metric["value"]) if metric.get("value") is not None else None,
        order=manifest.get("order", 0),
        name=name,
        run=manifest.get("run", ""),
        improved=metric.get("improved"),
        archived=bool(manifest.get("archived")),
        is_verified=verified.get("promise") in ("exact", "tolerance", "samples"),
        num_bytes=sum(f["bytes"] for f in manifest["files"].values()),
        created=str(manifest.get("created", "")),
    )


def list_saved(dirpath: str | Path, monitor: str | None = None) -> list[Saved]:
    """Return the checkpoints in a folder that have a manifest, whoever wrote them, oldest first.

    Args:
        dirpath: the folder; may be missing.
        monitor: take only metrics of this name; None takes any.
    """
    names = [n for n in (os.listdir(dirpath) if os.path.isdir(dirpath) else ()) if _STEP_DIR.match(n)]
    found = ((n, read_manifest(Path(dirpath, n))) for n in names)
    saved = [_as_saved(n, m, monitor) for n, m in found if m is not None]
    return sorted(saved, key=lambda s: (s.order, s.step))


def _hash_file(path: Path, from_disk: bool) -> str:
    with open(path, "rb", buffering=0) as f:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # forget what is cached: read the disk
        return hashlib.file_digest(f, "sha256").hexdigest()


def find_damage(folder: Path, *, hashes: bool = True, from_disk: bool = False) -> str | None:
    """Return what is wrong with a step directory, naming the file, or None if it is whole.

    Args:
        folder: the step directory.
        hashes: compare hashes too (several files at a time), not sizes only.
        from_disk: drop the files from the page cache first.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{folder / 'manifest.json'} is missing or cannot be read"
    if manifest.get("sha256") != manifest_hash(manifest):
        return f"{folder / 'manifest.json'} was altered: its hash does not match its content"
    for name, file in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != file["bytes"]:
            return (
                f"{path} has {size} bytes, the manifest says {file['bytes']}"
                if size
                else f"{path} is missing"
            )
    if not hashes:
        return None
    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        _progress(manifest, not from_disk) as advance,
    ):
        found = {n: pool.submit(_hash_file, folder / n, from_disk) for n in manifest["files"]}
        for name, file in manifest["files"].items():
            try:
                if found[name].result() != file["sha256"]:
                    return f"{folder / name} was altered: its SHA-256 is not the one in the manifest"
            except OSError as e:
                return f"{folder / name} cannot be read: {e}"
            advance(file["bytes"])
    return None


@contextlib.contextmanager
def _progress(manifest: dict[str, Any], is_shown: bool) -> Iterator[Callable[[int], Any]]:
    """A bar for what takes long, unless it goes on behind another one."""
    total = sum(f["bytes"] for f in manifest["files"].values())
    bar: Any = None
    if is_shown and total >= 1 << 30:
        with contextlib.suppress(Exception):  # no rich, or a bar is up already
            from rich.progress import Progress

            bar = Progress(transient=True)
            bar.start()
    if bar is None:
        yield lambda _: None
        return
    task = bar.add_task(f"checking step {manifest['step']}", total=total)
    try:
        yield lambda n: bar.advance(task, n)
    finally:
        bar.stop()


def _state_of(folder: Path) -> Path:
    return folder / "state" if (folder / "state").exists() else folder / "state.ckpt"


class _DataOnly(pickle.Unpickler):
    """Admits the classes that DCP's `.metadata` is made of and nothing else."""

    _modules = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _names: ClassVar = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in self._modules and "." not in name and name.lstrip("_")[:1].isupper():
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._names or is_dtype:
            return super().find_class(module, name)
        raise UnsafeCheckpointError(f"it asks for {module}.{name}, which no checkpoint needs")


def refuse_code(state: Path) -> None:
    """Check, running nothing from it, that loading `state` (file or DCP folder) runs no code.

    Raises:
        UnsafeCheckpointError: it holds a pickle that calls something other than what rebuilds tensors and containers.
    """

    def check(file: Any, name: Path) -> None:
        try:
            torch.load(file, map_location="meta", weights_only=True)  # meta: the tensors are not read
        except Exception as e:
            unsafe: list[str] = []
            with contextlib.suppress(Exception):
                if isinstance(file, io.BytesIO):
                    file.seek(0)
                unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            raise UnsafeCheckpointError(
                f"{name} is refused: {'loading it would call ' + ', '.join(sorted(unsafe)) if unsafe else e}. If you "
                "trust what it asks for, torch.serialization.add_safe_globals([...]) admits it; better, save plain values."
            ) from e

    if state.is_file():
        check(state, state)
        return
    for path in sorted(state.rglob("*.pt")) + sorted(state.rglob("*.ckpt")):
        check(path, path)
    if not (state / ".metadata").exists():
        return
    try:
        with open(state / ".metadata", "rb") as f:
            metadata = _DataOnly(f).load()
    except Exception as e:
        raise UnsafeCheckpointError(f"{state / '.metadata'} is refused: {e}.") from e
    for index, stored in (metadata.storage_data or {}).items():
        # Values that are no tensors: torch's own reader unpickles them without restriction.
        if not hasattr(metadata.state_dict_metadata.get(index.fqn), "size"):
            with open(state / stored.relative_path, "rb") as f:
                f.seek(stored.offset)
                check(io.BytesIO(f.read(stored.length)), state / stored.relative_path)


# ---- state -----------------------------------------------------------------------------------------------------------


def capture_rng(device: torch.device | None = None) -> tuple[Any, ...]:
    """Return this process's RNG states: Python, NumPy, torch on CPU and on `device` (if that is another)."""
    other = None
    if device is not None and device.type != "cpu":
        other = torch.get_device_module(device).get_rng_state(device)
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), other


def pack_rng(captured: tuple[Any, ...]) -> dict[str, Any]:
    """Return what `capture_rng` took as tensors and numbers, which load without running code."""
    (version, words, gauss), numpy_state, cpu, other = captured
    state = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": cpu,
    }
    if other is not None:
        state["device"] = other.cpu()
    return state


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put the states that `pack_rng` made back."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": numpy_state["key"].numpy().astype(np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    if device is not None and device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def derived_seed(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> int:
    """Return a rank's seed for a resume at another world size: a function of the saved states, rank and world size."""
    text = hashlib.sha256(states[0]["torch"].numpy().tobytes())
    text.update(f"{len(states)} {world_size} {rank}".encode())
    return int.from_bytes(text.digest()[:4], "little")


def rewind(checkpoint: dict[str, Any], num_batches: int) -> None:
    """Set the counters of a Lightning checkpoint back by micro-batches that were begun but led to no update."""
    loops = checkpoint["loops"]["fit_loop"]
    progress = loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        done = max(0, counts["ready"] - num_batches)
        counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), done))
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for kind in ("step", "zero_grad"):
        for counts in (steps[kind]["total"], steps[kind]["current"]):
            counts.update(dict.fromkeys(counts, counts["completed"]))


@torch.no_grad()
def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors (of sharded ones this rank's part) are free of NaN and infinity."""
    local = [getattr(t, "_local_tensor", t).detach() for t in tensors]
    local = [t for t in local if t.is_floating_point() and t.numel() and not t.is_meta]
    if not local:
        return True
    # One pass, no copies. A sum of squares may overflow where no value is infinite: then look at the values.
    norms = torch.stack([n.float() for n in torch._foreach_norm(local)])
    return bool(norms.isfinite().all()) or all(bool(t.isfinite().all()) for t in local)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for x in state.values() if isinstance(state, dict) else state:
            yield from _tensors(x)


class HostCopy:
    """Copies a nested state to host memory, into the same buffers each time (pinned if the state is on a GPU)."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    def __call__(self, state: Any) -> Any:
        """Return the copy; tensors that share memory share it in the copy. Good until the next call."""
        used: dict[Any, torch.Tensor] = {}
        devices: set[torch.device] = set()
        copied = self._copy(state, used, devices, ())
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        self._buffers = used
        return copied

    def _copy(self, x: Any, used: dict[Any, torch.Tensor], devices: set[torch.device], path: Any) -> Any:
        if isinstance(x, torch.Tensor):
            shared = (
                "shared",
                x.untyped_storage().data_ptr(),
                x.storage_offset(),
                x.shape,
                x.stride(),
                x.dtype,
            )
            if x.numel() and shared in used:
                return used[shared]
            key = (path, x.shape, x.dtype, x.device.type)
            buffer = self._buffers.get(key)
            if buffer is None:
                pin = x.device.type == "cuda"
                buffer = torch.empty(x.shape, dtype=x.dtype, pin_memory=pin)
            buffer.copy_(x.detach(), non_blocking=True)
            if x.device.type != "cpu":
                devices.add(x.device)
            used[key] = used[shared] = buffer
            return buffer
        if isinstance(x, dict):
            same_kind = copy.copy(x)
            same_kind.update({k: self._copy(v, used, devices, (*path, k)) for k, v in x.items()})
            return same_kind
        if isinstance(x, (list, tuple)):
            items = [self._copy(v, used, devices, (*path, i)) for i, v in enumerate(x)]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        return copy.deepcopy(x)


class _Recorder(CheckpointIO):
    """Stands in for TorchCheckpointIO during a save: takes the state instead of writing it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.state = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        raise NotImplementedError("stands in while a save is recorded: nothing is read or removed then")

    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError("stands in while a save is recorded: nothing is read or removed then")


@dataclass
class _Job:
    """One save on its way: what this rank writes, and what rank 0 then adds."""

    step: int
    folder: Path
    manifest: dict[str, Any]
    write: Callable[[], dict[str, Any]]  # -> {"files": ..., ...}
    finish: Callable[[list[Any]], dict[str, Any]]  # rank 0: parts of all ranks -> files it added
    blocked_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    future: Future[Any] | None = None


# ---- the callback ----------------------------------------------------------------------------------------------------


class CheckpointRetention(Checkpoint):
    """Keep best, latest and archive checkpoints; see the top of the file for what it promises.

    Args:
        dirpath: where the step directories go; default `Trainer.default_root_dir`/checkpoints.
        every_n_steps: save every so many updates.
        every_n_minutes: save when so much time has passed since the last save (rank 0's clock).
        monitor: the metric that judges best, as logged in validation; None keeps no best.
        mode: "min" or "max".
        min_delta: a later checkpoint has to be better than the best by more than this.
        keep_best: how many best ones to keep; 0 for none.
        keep_latest: how many recent ones to keep, at least 1.
        archive_every_n_steps: keep every n-th update for good, or a list of updates.
        async_save: copy to host memory and write in the background. A request while one is being written waits for it;
            so does the end. The copy's buffers are kept: host memory holds the state once more, never twice.
        verify: "write" reads each file back from the disk and compares hashes after the commit, in the background,
            before anything is pruned; "load" compares hashes when training resumes; "both"; "sizes" does neither.
        save_on_exit: save at the end, on signals, and (one process) on an error that leaves the weights healthy.
        copy_to: an fsspec URL (s3://..., memory://...) that gets a copy of each committed checkpoint, in the background,
            retried; the same policy prunes there.

    Raises:
        ValueError: a value that makes no sense.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        monitor: str | None = "val/loss",
        mode: str = "min",
        min_delta: float = 0.0,
        keep_best: int = 1,
        keep_latest: int = 2,
        archive_every_n_steps: int | list[int] | None = None,
        async_save: bool = False,
        verify: str = "write",
        save_on_exit: bool = True,
        copy_to: str | None = None,
    ) -> None:
        super().__init__()
        archive = archive_every_n_steps
        for name, value, rule, is_bad in (
            ("every_n_steps", every_n_steps, "1 or more", every_n_steps is not None and every_n_steps < 1),
            ("every_n_minutes", every_n_minutes, "> 0", every_n_minutes is not None and every_n_minutes <= 0),
            ("mode", mode, "'min' or 'max'", mode not in ("min", "max")),
            ("min_delta", min_delta, "0 or more", not 0 <= min_delta < math.inf),
            ("keep_best", keep_best, "0 or more", keep_best < 0),
            ("keep_latest", keep_latest, "1 or more, a run has to be able to continue", keep_latest < 1),
            (
                "archive_every_n_steps",
                archive,
                "1 or more, or a list of such",
                any(n < 1 for n in ([archive] if isinstance(archive, int) else archive or [])),
            ),
            (
                "verify",
                verify,
                "one of write, load, both, sizes",
                verify not in ("write", "load", "both", "sizes"),
            ),
        ):
            if is_bad:
                raise ValueError(f"CheckpointRetention({name}={value!r}): it has to be {rule}.")
        steps = archive if archive is None or isinstance(archive, int) else tuple(sorted(archive))
        self.policy = Policy(monitor, mode, min_delta, keep_best if monitor else 0, keep_latest, steps)
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.async_save = async_save
        self.verify = verify
        self.save_on_exit = save_on_exit
        self.copy_to = copy_to
        self.num_refused = 0
        self.lineage_note: dict[
            str, Any
        ] = {}  # what whoever branches a run wants to say in `lineage` of its manifests
        self._dir = Path()
        self._is_active = False
        self._world_size = 1
        self._group: Any = None
        self._own_group = False
        self._run = ""
        self._lineage: dict[str, Any] | None = None
        self._loaded: dict[str, Any] = {}
        self._last_step = -1
        self._last_saved = -1
        self._last_tried = -1
        self._last_save_time = time.monotonic()
        self._pending: list[str] | None = None
        self._micro_batches = 0
        self._rewind = 0
        self._boundary_rng: tuple[Any, ...] | None = None
        self._is_stepping = False
        self._signal = 0
        self._num_sigints = 0
        self._handlers: dict[int, Any] = {}
        self._job: _Job | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._tails: list[Future[Any]] = []
        self._uploader: _Uploader | None = None
        self._host_copy = HostCopy()
        self._warned: set[str] = set()

    # -- set-up and end --

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Join the other ranks, take over the signals and clear what a killed process left behind."""
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO) if _has_io(trainer) else False:
            raise ValueError(
                "CheckpointRetention cannot tell when AsyncCheckpointIO has finished writing: leave that plugin out "
                "and give CheckpointRetention(async_save=True)."
            )
        self._is_active = True
        self._world_size = trainer.world_size if dist.is_available() and dist.is_initialized() else 1
        if self._world_size > 1 and dist.get_backend() != "gloo":
            self._group, self._own_group = dist.new_group(backend="gloo"), True  # flags without a GPU sync
        self._dir = Path(
            self._broadcast(str(self.dirpath or Path(trainer.default_root_dir) / "checkpoints"))
        ).absolute()
        self._run, self._lineage, self._loaded = uuid.uuid4().hex, None, {}
        self._job, self._pending, self._signal, self._num_sigints = None, None, 0, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._tails = []
        if self.copy_to and trainer.is_global_zero:
            self._uploader = _Uploader(self.copy_to, self.policy)
        self._take_signals(trainer)
        problem = _prepare(self._dir) if trainer.is_global_zero else None
        problem = self._broadcast(problem)
        if problem:
            self._give_signals_back(trainer)
            raise CheckpointSaveError(
                f"Nothing can be saved under {self._dir}: {problem}. Name another dirpath."
            )

    def _take_signals(self, trainer: pl.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("CheckpointRetention runs outside the main thread: signals will not save.")
            return
        # Lightning's own SIGTERM notifier, registered after this hook, broadcasts from inside the signal handler of the
        # one rank that was hit: the other ranks are not in that collective, so it hangs or corrupts theirs. There is
        # no public way to keep it from being registered.
        trainer._signal_connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]
        for number in SIGNALS:
            previous = signal.signal(number, self._on_signal)
            if previous != self._on_signal:
                self._handlers[number] = previous

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self._is_active:  # somebody put this handler back after our end
            previous = self._handlers.get(number, signal.SIG_DFL)
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signal = self._signal or number
        self._num_sigints += number == signal.SIGINT
        if self._num_sigints >= 3:
            raise KeyboardInterrupt

    def _give_signals_back(self, trainer: pl.Trainer) -> None:
        self._is_active = False
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        # After an error Lightning puts back what it found when it registered its own handlers, which was ours.
        trainer._signal_connector._original_handlers.update(self._handlers)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop the threads and give the signals back."""
        if stage != "fit" or self._pool is None:
            return
        self._give_signals_back(trainer)
        self._pool.shutdown(wait=True)
        self._pool = None
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None
        if self._own_group:
            dist.destroy_process_group(self._group)
            self._own_group = False
        self._group = None

    # -- what ranks tell each other --

    def _max(self, *values: int) -> list[int]:
        if self._world_size == 1:
            return list(values)
        flags = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [int(v) for v in flags.tolist()]

    def _gather(self, value: Any) -> list[Any]:
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _broadcast(self, value: Any) -> Any:
        if self._world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    # -- state --

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the RNG states of all ranks in. (Every rank is here: saving is collective.)"""
        if self._rewind:
            rewind(checkpoint, self._rewind)
        at_boundary = self._boundary_rng if self._rewind else None
        rng = pack_rng(at_boundary or capture_rng(trainer.strategy.root_device))
        checkpoint.setdefault("callbacks", {})[self.state_key] = {
            "rng": self._gather(rng),
            "world_size": self._world_size,
            "is_epoch_end": bool(trainer.is_last_batch),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "num_refused": self.num_refused,
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Find out which run is continued or branched from, and check hashes if asked to."""
        if not self._is_active or not trainer.ckpt_path:
            return
        self._loaded = dict(checkpoint.get("callbacks", {}).get(self.state_key, {}))
        self.num_refused = int(self._loaded.get("num_refused", 0))
        self._restore_rng(trainer)
        problem = None
        path = Path(trainer.ckpt_path).absolute()
        folder = next((p for p in (path, path.parent) if (p / "manifest.json").exists()), None)
        if trainer.is_global_zero and folder is not None:
            if self.verify in ("load", "both"):
                problem = find_damage(folder)
            manifest = read_manifest(folder)
            if manifest is not None and folder.parent.resolve() == self._dir.resolve():
                self._run = manifest.get("run") or self._run
                self._lineage = manifest.get("lineage")
            elif manifest is not None:
                self._lineage = {
                    "parent_run": folder.parent.parent.name,
                    "parent_step": manifest["step"],
                    "parent_manifest_sha256": manifest.get("sha256"),
                    "parent_tokens": manifest.get("tokens"),
                    "parent_lineage": manifest.get("lineage"),
                    **self.lineage_note,
                }
        problem = self._broadcast(problem)
        if problem:
            raise DamagedCheckpointError(
                f"{problem}. Resume from another one: CheckpointRetention.resolve finds it."
            )

    # -- when to save --

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note where training starts, finish interrupted pruning."""
        if not self._is_active:
            return
        self._last_step = self._last_saved = self._last_tried = trainer.global_step
        self._last_save_time = time.monotonic()
        self._micro_batches = 0
        if trainer.is_global_zero and self._dir.is_dir():
            self._warn_about_missing()
            self._apply_policy()
        self._leave_if_signalled(trainer, self._max(self._signal)[0])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After a resume at the end of an epoch: the RNG that the first shuffle of the next one draws from."""
        if self._is_active and self._loaded.get("is_epoch_end"):
            self._restore_rng(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the RNG at the first batch after a resume; refuse a window that cannot be continued."""
        if not self._is_active:
            return
        saved_k, k = self._loaded.get("accumulate_grad_batches"), trainer.accumulate_grad_batches
        # At the first batch: a data module that counts samples has put Lightning's counters right by then.
        if self._micro_batches == 0 and saved_k not in (None, k) and batch_idx % k:
            raise ValueError(
                f"The checkpoint was saved after micro-batch {batch_idx} of the epoch with accumulate_grad_batches={saved_k}; "
                f"with {k} the first window would be short. Resume with {saved_k}, or with a divisor of {batch_idx}."
            )
        self._micro_batches += 1
        device = trainer.strategy.root_device
        if self._pending is not None:  # the validation that was foreseen did not come
            self._rewind, self._boundary_rng = 1, capture_rng(device)
            self._at_boundary(trainer, self._pending, None)
            self._rewind = 0
        if not self._loaded.get(
            "is_epoch_end"
        ):  # else the loader's start has drawn since, as without a resume
            self._restore_rng(trainer)
        self._loaded = {}
        if self._micro_batches == 1 and self.save_on_exit and self._world_size == 1:
            self._boundary_rng = capture_rng(device)

    def _restore_rng(self, trainer: pl.Trainer) -> None:
        states, rank = self._loaded.get("rng", []), trainer.global_rank
        if len(states) == self._world_size:
            restore_rng(states[rank], trainer.strategy.root_device)
        elif states:
            self._warn_once(
                f"RNG states of {len(states)} ranks cannot continue on {self._world_size}: each rank gets a seed "
                "derived from them. Without dropout this changes nothing."
            )
            seed = derived_seed(states, rank, self._world_size)
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """From here to the end of the batch the weights may be half updated."""
        self._is_stepping = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At an update boundary: save now, or after the validation that is due."""
        if not self._is_active or trainer.global_step == self._last_step:
            return
        before, self._last_step = self._last_step, trainer.global_step
        self._is_stepping, self._micro_batches = False, 0
        step, n = trainer.global_step, self.every_n_steps
        reasons = ["interval"] if n and step // n > before // n else []
        reasons += ["archive"] if self.policy.archives(step) else []
        reasons += ["epoch"] if not n and not self.every_n_minutes and trainer.is_last_batch else []
        reasons += ["exit"] if self.save_on_exit and _ends(trainer) else []
        # Whether a validation follows is not public. Lightning decides it by this call right after this hook.
        loop = trainer.fit_loop
        follows = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
        self._at_boundary(trainer, reasons, None, validation_follows=follows)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the weights that were just validated."""
        if not self._is_active or trainer.sanity_checking or self._loaded:  # loaded: nothing was trained yet
            return
        if self._micro_batches:
            self._warn_once(
                "This validation ran inside an accumulation window, where nothing can be saved, so it judges no "
                "checkpoint. Set val_check_interval to a multiple of accumulate_grad_batches."
            )
            return
        reasons = self._pending if self._pending is not None else []
        metric = self._read_metric(trainer)
        if self.every_n_steps is None and self.every_n_minutes is None:
            reasons = [*reasons, "validation"]
        if metric is not None and self._broadcast(trainer.is_global_zero and self._improves(metric)):
            reasons = [*reasons, "best"]
        self._at_boundary(trainer, reasons, metric)

    def _read_metric(self, trainer: pl.Trainer) -> float | None:
        if not self.policy.keep_best or self.policy.monitor is None:
            return None
        found = trainer.callback_metrics.get(self.policy.monitor)
        values = self._gather(None if found is None else float(found))
        if any(v is None for v in values) and any(v is not None for v in values):
            has = [r for r, v in enumerate(values) if v is not None]
            raise RuntimeError(
                f"{self.policy.monitor!r} was logged on ranks {has} of {len(values)} only. Log it on every rank."
            )
        if values[0] is None:
            self._warn_once(
                f"CheckpointRetention(monitor={self.policy.monitor!r}): validation logged no such key, so nothing can be "
                f"best. Logged: {sorted(trainer.callback_metrics)}. Name one of them, or monitor=None."
            )
        elif len({v for v in values if v == v}) > 1:
            self._warn_once(
                f"{self.policy.monitor!r} differs between ranks ({values}); rank 0's value judges. "
                "Log it with sync_dist=True, or from a metric that sums over ranks."
            )
        return values[0]

    def _improves(self, metric: float) -> bool:
        """Return whether a checkpoint with this metric would be among the best."""
        new = Saved(step=self._last_step, metric=metric, order=1 << 62)
        mine = [s for s in self._mine() if s.step != self._last_step]
        return any(s is new for s in decide([*mine, new], self.policy)[0]["best"])

    def _at_boundary(
        self, trainer: pl.Trainer, reasons: list[str], metric: float | None, validation_follows: bool = False
    ) -> None:
        """Agree with the other ranks; save if there is reason to and no validation to come; leave if a signal came."""
        self._pending = None
        waited = time.monotonic() - self._last_save_time
        by_time = bool(
            self.every_n_minutes and trainer.is_global_zero and waited >= 60 * self.every_n_minutes
        )
        number, is_due, has_best, unfinished, validation_follows_ = self._max(
            self._signal, bool(reasons) or by_time, "best" in reasons, self._unfinished(), validation_follows
        )
        if not unfinished:
            self._settle(trainer)
        if validation_follows_:
            self._pending = ["due"] if is_due else []
            return
        is_new = self._last_tried != trainer.global_step or has_best
        if (is_due or (number and self.save_on_exit)) and is_new:
            self._save(trainer, metric)
        self._leave_if_signalled(trainer, number)

    def _leave_if_signalled(self, trainer: pl.Trainer, number: int) -> None:
        if not number:
            return
        self._settle(trainer, wait=True)
        name = signal.Signals(number).name
        newest = (
            "" if self._last_saved <= 0 else f" the newest checkpoint is that of update {self._last_saved};"
        )
        rank_zero_info(f"Leaving at update {self._last_step} on {name};{newest} exit code {128 + number}.")
        if self._world_size > 1:
            dist.barrier(group=self._group)  # gloo aborts when one rank leaves while another still talks
        raise SystemExit(128 + number)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what is not saved yet and wait for what is being written."""
        if not self._is_active:
            return
        if self.save_on_exit and self._last_tried != trainer.global_step:
            self._save(trainer, None)
        self._settle(trainer, wait=True)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """On an error in one process, save the last update if its weights are whole and healthy."""
        if not self._is_active:
            return
        if (
            self.save_on_exit
            and not isinstance(exception, (SystemExit, CheckpointSaveError))
            and self._world_size == 1
            and trainer.global_step == self._last_step != self._last_tried
            and not self._is_stepping
        ):
            try:
                self._rewind = self._micro_batches
                self._save(trainer, None)
                self._settle(trainer, wait=True)
            except Exception as e:
                rank_zero_warn(f"Nothing was saved on the way out: {e}")
            finally:
                self._rewind = 0
        elif self._world_size == 1:
            with contextlib.suppress(CheckpointSaveError):
                self._settle(None, wait=True)
        self.teardown(trainer, pl_module, "fit")

    # -- saving --

    def _save(self, trainer: pl.Trainer, metric: float | None) -> None:
        started = time.perf_counter()
        self._settle(trainer, wait=True)
        step = self._last_tried = trainer.global_step
        temporary = self._dir / f".tmp-step-{step:08d}.{socket.gethostname()}.{os.getpid()}"
        folder = Path(self._broadcast(str(temporary)))
        if trainer.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)
        manifest: dict[str, Any] = {}
        job = self._job = self._capture(trainer, folder, manifest)
        manifest.update(
            self._describe(trainer, metric)
        )  # now: the module may count this update when it is saved
        self._last_save_time = time.monotonic()
        work = self._write_and_commit if self._world_size == 1 else self._write
        if self.async_save and self._pool is not None:
            job.future = self._pool.submit(work, job)
            job.blocked_s = time.perf_counter() - started
            return
        job.future = Future()
        job.future.set_result(work(job))
        self._settle(trainer, wait=True, blocked_since=started)

    def _describe(self, trainer: pl.Trainer, metric: float | None) -> dict[str, Any]:
        module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
        hparams = {
            k: dict(x.hparams) for k, x in (("model", module), ("data", data)) if x is not None and x.hparams
        }
        tokens = trainer.callback_metrics.get("progress/tokens")
        data_state = data.state_dict() if data is not None else {}
        judged = {
            "name": self.policy.monitor,
            "value": metric if metric is None or math.isfinite(metric) else str(metric),
            "step": trainer.global_step,
            "mode": self.policy.mode,
        }
        return {
            "schema": SCHEMA,
            "step": trainer.global_step,
            "tokens": None if tokens is None else int(tokens),
            "created": datetime.now(UTC).isoformat(),
            "run": self._run,
            "order": 0,
            "metric": None if metric is None else judged,
            "archived": self.policy.archives(trainer.global_step),
            "policy": {**vars(self.policy)},
            "lineage": self._lineage,
            "layout": {
                "strategy": type(trainer.strategy).__name__,
                "world_size": trainer.world_size,
                "devices": trainer.num_devices,
                "num_nodes": trainer.num_nodes,
                "precision": str(trainer.precision),
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
            },
            "config_sha256": hashlib.sha256(
                json.dumps(hparams, sort_keys=True, default=str).encode()
            ).hexdigest(),
            "data_fingerprint": data_state.get("fingerprint") if isinstance(data_state, dict) else None,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "lightning": pl.__version__,
                "numpy": np.__version__,
            },
            "files": {},
        }

    def _capture(self, trainer: pl.Trainer, folder: Path, manifest: dict[str, Any]) -> _Job:
        """Take the state of this update, on every rank; what is still to be written comes with the job."""
        strategy, step = trainer.strategy, trainer.global_step

        def in_state(files: dict[str, Any]) -> dict[str, Any]:
            return {f"state/{name}": record for name, record in files.items()}

        # 1. A strategy that hands its state over (lit_gpt_loop.strategies do): each rank writes its part later.
        if getattr(strategy, "stages_checkpoints", False):
            options: dict[str, Any] = {"stage": "copy" if self.async_save else "view"}
            trainer.save_checkpoint(folder / "state", weights_only=False, storage_options=options)
            staged = options["staged"]

            def write_part() -> dict[str, Any]:
                if not staged.is_finite():
                    return {"refused": True}
                part = staged.write(folder / "state")
                return {"files": in_state(part["files"]), "part": part}

            return _Job(
                step,
                folder,
                manifest,
                write_part,
                lambda parts: in_state(staged.finish(folder / "state", [p["part"] for p in parts])),
            )

        # 2. A strategy that writes one file through Lightning's plain CheckpointIO: take what it would write.
        recorder = _Recorder()
        original = strategy.checkpoint_io if _has_io(trainer) else None
        if type(original) is TorchCheckpointIO:
            strategy.checkpoint_io = recorder
        try:
            trainer.save_checkpoint(folder / "state.ckpt", weights_only=False)
        finally:
            if type(original) is TorchCheckpointIO:
                strategy.checkpoint_io = original
        state = recorder.state
        if self._broadcast(state is not None):
            if state is not None and self.async_save:
                state = self._host_copy(state)

            def write_file() -> dict[str, Any]:
                if state is None:
                    return {"files": {}}
                if not is_finite(_tensors(state["state_dict"])):
                    return {"refused": True}
                folder.mkdir(parents=True)
                with HashingFile(folder / "state.ckpt", lasting=_tensors(state)) as f, without_crc32():
                    try:
                        torch.save(state, f)  # type: ignore[arg-type]
                    except RuntimeError as e:
                        raise f.error or e from e
                return {"files": {"state.ckpt": f.record}}

            return _Job(step, folder, manifest, write_file, lambda parts: {})

        # 3. Anything else has written by now, a file or a folder.
        if self.async_save:
            self._warn_once(
                f"{type(strategy).__name__} writes checkpoints itself, so this save was synchronous in spite of "
                "async_save=True. The strategies of lit_gpt_loop.strategies can save in the background."
            )

        def hash_files(parts: list[Any]) -> dict[str, Any]:
            if (folder / "state.ckpt").is_dir():
                os.rename(folder / "state.ckpt", folder / "state")
            paths = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                records = pool.map(_flush_and_hash, paths)
                return {str(p.relative_to(folder)): record for p, record in zip(paths, records, strict=True)}

        whole = is_finite(trainer.lightning_module.parameters())
        return _Job(step, folder, manifest, lambda: {"files": {}} if whole else {"refused": True}, hash_files)

    def _write(self, job: _Job) -> dict[str, Any]:
        try:
            return {"error": None, **job.write()}
        except Exception as e:
            return {"error": f"{type(e).__name__}: {e}"}

    def _write_and_commit(self, job: _Job) -> dict[str, Any]:
        return self._commit(job, [self._write(job)])

    def _commit(self, job: _Job, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: make the checkpoint count. Returns what the other ranks are to know."""
        error = next((p["error"] for p in parts if p["error"]), None)
        is_refused = any(p.get("refused") for p in parts)
        try:
            if error is None and not is_refused:
                files = {k: v for p in parts for k, v in p["files"].items()}
                files.update(job.finish(parts))
                name = self._publish(job, files)
                if self._pool is not None:
                    self._tails.append(self._pool.submit(self._tail, name))
                num_bytes = sum(f["bytes"] for f in files.values())
                return {"error": None, "bytes": num_bytes, "write_s": time.perf_counter() - job.started}
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        shutil.rmtree(job.folder, ignore_errors=True)
        return {"error": error, "refused": is_refused}

    def _publish(self, job: _Job, files: dict[str, Any]) -> str:
        for path in (p for p in job.folder.rglob("*") if p.is_dir()):
            _fsync_folder(path)
        mine = [s for s in self._mine() if s.step != job.step]
        manifest = {**job.manifest, "files": files, "order": 1 + max([s.order for s in mine], default=0)}
        new = _as_saved("", manifest)
        if manifest["metric"]:
            entered = any(s is new for s in decide([*mine, new], self.policy)[0]["best"])
            manifest["metric"] = {**manifest["metric"], "improved": entered}
        manifest["sha256"], manifest["verified"] = manifest_hash(manifest), None
        write_json(job.folder / "manifest.json", manifest)
        name = f"step-{job.step:08d}"
        present = read_manifest(self._dir / name)
        if (self._dir / name).exists() and (present is None or present.get("run") != self._run):
            name = f"{name}-{self._run[:6]}"  # another run's, or nothing we know: never touched
        old = self._dir / f".old-{name}.{socket.gethostname()}.{os.getpid()}"
        if (self._dir / name).exists():
            os.rename(self._dir / name, old)
        os.rename(job.folder, self._dir / name)
        _fsync_folder(self._dir)
        shutil.rmtree(old, ignore_errors=True)
        roles = decide([*mine, _as_saved(name, manifest, self.policy.monitor)], self.policy)[0]
        self._write_index(roles)
        return name

    def _mine(self) -> list[Saved]:
        return [s for s in list_saved(self._dir, self.policy.monitor) if s.run == self._run]

    def _write_index(self, roles: dict[str, list[Saved]]) -> None:
        content = {role: [s.step for s in kept] for role, kept in roles.items()}
        with contextlib.suppress(OSError, ValueError):
            if json.loads((self._dir / "index.json").read_bytes()) == content:
                return
        write_json(self._dir / "index.json", content, is_flushed=False)  # the manifests can rebuild it

    def _tail(self, name: str) -> None:
        """What follows a commit, in the background: read back, then prune, then copy."""
        if self.verify in ("write", "both"):
            problem = find_damage(self._dir / name, from_disk=True)
            if problem:
                os.rename(self._dir / name, self._dir / f".damaged-{name}")
                self._write_index(decide(self._mine(), self.policy)[0])
                raise CheckpointSaveError(
                    f"A checkpoint reads back otherwise than it was written: {problem}."
                )
        self._apply_policy()
        if self._uploader is not None:
            self._uploader.put(self._dir / name)

    def _apply_policy(self) -> None:
        roles, prune = decide(self._mine(), self.policy)
        if any(roles.values()):
            self._write_index(roles)
        for s in prune:
            if self._uploader is None or self._uploader.busy_with != s.name:
                remove(self._dir / s.name)

    def _unfinished(self) -> bool:
        return self._job is not None and self._job.future is not None and not self._job.future.done()

    def _settle(
        self, trainer: pl.Trainer | None, wait: bool = False, blocked_since: float | None = None
    ) -> None:
        """Complete the save that is under way (every rank comes here together) and raise what went wrong."""
        job, self._job = self._job, None
        outcome: dict[str, Any] = {"error": None}
        if job is not None:
            entered = time.perf_counter()
            assert job.future is not None
            outcome = job.future.result()
            if self._world_size > 1:
                parts = self._gather(outcome)
                outcome = self._broadcast(self._commit(job, parts) if dist.get_rank() == 0 else None)
            if blocked_since is not None:
                job.blocked_s = time.perf_counter() - blocked_since
            elif self._world_size > 1 or wait:
                job.blocked_s += time.perf_counter() - entered
            if outcome["error"] is None and outcome.get("refused"):
                self.num_refused += 1
                rank_zero_warn(
                    f"Update {job.step} is not saved: its weights are not finite. ({self.num_refused} refused so far; "
                    f"the last good checkpoint is step {self._last_saved} or older.)"
                )
            elif outcome["error"] is None:
                self._last_saved = job.step
                if trainer is not None:
                    self._log(trainer, job, outcome)
        tail_error: Any = None
        if blocked_since is None:  # right after its own save the tail has only just begun
            done = [t for t in self._tails if wait or t.done()]
            self._tails = [t for t in self._tails if t not in done]
            tail_error = next((e for t in done if (e := t.exception()) is not None), None)
            if tail_error is not None and not isinstance(tail_error, CheckpointSaveError):
                tail_error = f"Pruning {self._dir} failed ({tail_error}); its checkpoints are whole."
            tail_error = None if tail_error is None else str(tail_error)
            if wait:
                tail_error = self._broadcast(tail_error)
        if outcome["error"] is not None and job is not None:
            raise CheckpointSaveError(
                f"Saving update {job.step} under {self._dir} failed: {outcome['error']}. The checkpoints committed "
                "before are untouched. Mend the cause (space, permission, mount) and resume from `latest`."
            )
        if tail_error is not None:
            raise CheckpointSaveError(tail_error)

    def _log(self, trainer: pl.Trainer, job: _Job, outcome: dict[str, Any]) -> None:
        metrics = {
            "ckpt/step": float(job.step),
            "ckpt/blocked_s": self._broadcast(job.blocked_s),
            "ckpt/write_s": outcome["write_s"],
            "ckpt/bytes": float(outcome["bytes"]),
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        trainer.callback_metrics.update({k: torch.as_tensor(v) for k, v in metrics.items()})

    def _warn_about_missing(self) -> None:
        try:
            index = json.loads((self._dir / "index.json").read_text())
            listed = {int(step) for steps in index.values() for step in steps}
        except (OSError, ValueError, TypeError, AttributeError):
            return
        missing = sorted(listed - {s.step for s in list_saved(self._dir)})
        if missing:
            rank_zero_warn(
                f"Checkpoints of steps {missing} were removed from {self._dir} by hand; going on without."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            rank_zero_warn(message)

    # -- finding --

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint's state, "" if there is none; what `Trainer.test(ckpt_path="best")` reads."""
        best = decide(self._mine(), self.policy)[0]["best"] if self._run else []
        return str(_state_of(self._dir / best[0].name)) if best else ""

    @staticmethod
    def resolve(
        dirpath: str | Path, spec: str | Path = "latest", *, verify: str = "load", copy_to: str | None = None
    ) -> Path | None:
        """Return the path of the state that `Trainer.fit(ckpt_path=...)` takes.

        A damaged `latest` or `best` is passed over for the next one, with a warning that names the file.

        Args:
            dirpath: the folder with the step directories (a run's `checkpoints`).
            spec: "latest", "best", "archive:STEP" or "step:STEP", a step directory, or a path; "auto" is latest, or
                None if nothing was ever saved here.
            verify: "load" compares the hashes of all files; "sizes" only their sizes.
            copy_to: the fsspec URL given to the callback: what is newer or only there is fetched into `dirpath`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            DamagedCheckpointError: there are checkpoints and none of them is whole.
            UnsafeCheckpointError: loading it would run code from it.
        """
        directory, wanted = Path(dirpath), str(spec)
        hashes = verify in ("load", "both", "write")
        named = re.fullmatch(r"(?:archive|step):(\d+)", wanted)
        if wanted not in ("latest", "best", "auto") and named is None:
            return _resolve_path(directory, Path(spec), hashes)
        found = [(s, "") for s in list_saved(directory)]
        if copy_to:
            here = {s.name: s.order for s, _ in found}
            found += [(s, copy_to) for s in _list_store(copy_to) if here.get(s.name, -1) < s.order]
        if not found:
            broken = sorted(n for n in _names(directory) if _STEP_DIR.match(n))
            if broken:
                raise DamagedCheckpointError(
                    f"{directory} holds {len(broken)} checkpoint(s), {broken[-1]} the newest, and no manifest.json "
                    "that can be read. Restore one from a copy, or name another folder."
                )
            if wanted == "auto":
                return None
            raise FileNotFoundError(f"No checkpoint in {directory}.")
        last = max((s for s, _ in found), key=lambda s: s.created)  # of several runs the one that saved last
        mine = [(s, where) for s, where in found if s.run == last.run]
        ordered = _candidates([s for s, _ in mine], "latest" if wanted == "auto" else wanted, directory)
        if not ordered:
            steps = sorted({s.step for s, _ in mine})
            raise FileNotFoundError(f"No checkpoint {wanted!r} in {directory}; there are steps {steps}.")
        whereabouts = {id(s): where for s, where in mine}
        for s in ordered:
            folder = directory / s.name
            if whereabouts[id(s)]:
                _fetch(copy_to or "", s.name, directory)
            problem = find_damage(folder, hashes=hashes)
            if problem is None:
                refuse_code(_state_of(folder))
                return _state_of(folder)
            rank_zero_warn(f"Step {s.step} is damaged and passed over: {problem}.")
            if named:
                break
        raise DamagedCheckpointError(f"No whole checkpoint for {wanted!r} in {directory}: {problem}.")


def _candidates(saved: list[Saved], wanted: str, directory: Path) -> list[Saved]:
    newest_first = sorted(saved, key=lambda s: (s.order, s.step), reverse=True)
    if wanted == "latest":
        return newest_first
    if wanted == "best":
        modes = ((read_manifest(directory / s.name) or {}).get("policy") or {} for s in newest_first)
        policy: dict[str, Any] = next((m for m in modes if m), {"mode": "min", "min_delta": 0.0})
        return decide(saved, Policy(None, policy["mode"], policy["min_delta"], len(saved)))[0]["best"]
    step = int(wanted.split(":")[1])
    return [s for s in newest_first if s.step == step]


def _names(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def _resolve_path(directory: Path, path: Path, hashes: bool) -> Path:
    path = next((p for p in (path, directory / path) if p.exists()), path)
    if not path.exists():
        raise FileNotFoundError(
            f"No checkpoint {str(path)!r}: give latest, best, archive:STEP, step:STEP, a step directory or a path."
        )
    folder = next((p for p in (path, path.parent) if (p / "manifest.json").exists()), None)
    if folder is None and _STEP_DIR.match(path.name):
        raise DamagedCheckpointError(f"{path} has no manifest.json: it was never completed.")
    if folder is not None:
        problem = find_damage(folder, hashes=hashes)
        if problem:
            raise DamagedCheckpointError(f"{problem}.")
        path = _state_of(folder)
    refuse_code(path)
    return path


def remove(folder: Path) -> None:
    """Delete a step directory; from the first moment on it is no checkpoint any more."""
    trash = folder.with_name(f".trash-{folder.name}.{socket.gethostname()}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _prepare(directory: Path) -> str | None:
    """Make the folder, see that it can be written, clean it; returns what is wrong, hours before the first save."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".tmp-index.json.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
        _clean(directory)
    except OSError as e:
        return str(e)
    return None


def _clean(directory: Path) -> None:
    """Delete what killed processes left half done; put a checkpoint back that was being replaced."""
    for name in os.listdir(directory):
        match = re.fullmatch(r"\.(tmp|trash|old)-((?:step-|index).*?)(?:\.([^/]+))?\.(\d+)", name)
        if match is None or not _is_dead(directory / name, match[3] or socket.gethostname(), int(match[4])):
            continue
        path, final = directory / name, directory / match[2]
        if match[1] == "old" and not final.exists():
            os.rename(path, final)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_dead(path: Path, host: str, pid: int) -> bool:
    if host != socket.gethostname():
        return time.time() - path.stat().st_mtime > 86400
    return pid == os.getpid() or not Path(f"/proc/{pid}").exists()


def _flush_and_hash(path: Path) -> dict[str, Any]:
    with open(path, "rb+", buffering=0) as f:
        os.fsync(f.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _has_io(trainer: pl.Trainer) -> bool:
    try:
        return isinstance(trainer.strategy.checkpoint_io, CheckpointIO)
    except NotImplementedError:  # strategies that write folders may have none
        return False


def _ends(trainer: pl.Trainer) -> bool:
    """Return whether this update is the last one of the fit."""
    last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (
        trainer.max_epochs or 0
    )
    by_steps = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    return by_steps or trainer.should_stop or (trainer.is_last_batch and last_epoch)


# ---- copies on another store -----------------------------------------------------------------------------------------


def _store(url: str) -> tuple[Any, str]:
    fs, root = fsspec.core.url_to_fs(url)
    return fs, root.rstrip("/")


def _list_store(url: str) -> list[Saved]:
    """Return the checkpoints of a store that have a manifest."""
    fs, root = _store(url)
    fs.invalidate_cache()
    saved = []
    for path in fs.ls(root, detail=False) if fs.exists(root) else []:
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if _STEP_DIR.match(name):
            with contextlib.suppress(OSError, ValueError, KeyError):
                saved.append(_as_saved(name, json.loads(fs.cat_file(f"{root}/{name}/manifest.json"))))
    return saved


def _fetch(url: str, name: str, directory: Path) -> None:
    fs, root = _store(url)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".tmp-{name}.{socket.gethostname()}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    manifest = fs.cat_file(f"{root}/{name}/manifest.json")
    for file in json.loads(manifest)["files"]:
        (temporary / file).parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{root}/{name}/{file}", str(temporary / file))
    (temporary / "manifest.json").write_bytes(manifest)
    if (directory / name).exists():
        remove(directory / name)
    os.rename(temporary, directory / name)


class _Uploader:
    """One thread that copies committed checkpoints to a store, each up to `tries` times, and prunes there."""

    tries = 5
    first_wait_s = 1.0

    def __init__(self, url: str, policy: Policy) -> None:
        self.url = url
        self.policy = policy
        self.busy_with = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._stop = threading.Event()

    def put(self, folder: Path) -> None:
        """Copy a step directory when its turn comes; one that was pruned by then is passed over."""
        self._pool.submit(self._run, folder)

    def close(self) -> None:
        """Wait for what is queued. A store that fails is not waited for beyond the tries under way."""
        self._stop.set()
        self._pool.shutdown(wait=True)

    def _run(self, folder: Path) -> None:
        self.busy_with = folder.name
        try:
            for attempt in range(self.tries):
                if not folder.exists():
                    return
                try:
                    self._copy(folder)
                    return
                except Exception as e:
                    rank_zero_warn(f"Copying {folder.name} to {self.url} failed (try {attempt + 1}): {e}")
                    wait_s = self.first_wait_s * 2**attempt
                    if attempt + 1 < self.tries and self._stop.wait(wait_s):
                        time.sleep(min(wait_s, 1.0))
        finally:
            self.busy_with = ""

    def _copy(self, folder: Path) -> None:
        fs, root = _store(self.url)
        manifest = json.loads((folder / "manifest.json").read_bytes())
        target = f"{root}/{folder.name}"
        if fs.exists(f"{target}/manifest.json"):
            fs.rm_file(f"{target}/manifest.json")  # first: from here on it is incomplete
        for name in [*manifest["files"], "manifest.json"]:
            fs.makedirs(f"{target}/{name}".rsplit("/", 1)[0], exist_ok=True)
            fs.put_file(str(folder / name), f"{target}/{name}")
        for s in decide([s for s in _list_store(self.url) if s.run == manifest["run"]], self.policy)[1]:
            fs.rm_file(f"{root}/{s.name}/manifest.json")
            fs.rm(f"{root}/{s.name}", recursive=True)
