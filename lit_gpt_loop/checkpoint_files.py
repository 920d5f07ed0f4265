"""Files of a checkpoint that does not know how many ranks wrote it (beside the data flow: Trainer -> *checkpoints*).

Each strategy of lit_gpt_loop.strategies writes the same folder, whatever its layout, and reads any of them:

    state/__0_0.distcp ...   tensors, one file per rank that wrote some   (torch.distributed.checkpoint, "DCP")
    state/.metadata          which tensor lies where
    state/rest.pt            all that is no tensor of model or optimizer: loops, schedules, callbacks, hyper-parameters

Tensors are keyed by parameter name: `model/NAME` for weights and buffers, `optimizer/NAME/KEY` for what the optimizer
keeps about the parameter NAME.

Reading runs no code from the files: rest.pt loads with `weights_only=True`, `.metadata` (a pickle) through an unpickler
that admits DCP's classes only, and there are no other pickles.

Writing is split so that it can go on in the background without collectives: `stage` (all ranks, the plan is agreed on),
`StagedCheckpoint.write` (each rank for itself, any thread), `StagedCheckpoint.finish` (rank 0, given all ranks' parts).
(Longer than 400 lines: what is written and what is read has to be seen side by side.)
"""

import bisect
import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

REST = "rest.pt"
FORMAT = 1
_BYTES_PER_FILE = 32 << 20
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean_name(name: str) -> str:
    """Return a parameter's name without what compiling, wrapping and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


# ---- reading without running code ------------------------------------------------------------------------------------


class UnsafeCheckpointError(RuntimeError):
    """Reading the checkpoint would run code from it."""


class MetadataUnpickler(pickle.Unpickler):
    """Admits the classes that DCP's `.metadata` is made of and nothing else."""

    _modules = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _names: ClassVar = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted class.

        Raises:
            UnsafeCheckpointError: any other.
        """
        if module in self._modules and "." not in name and name.lstrip("_")[:1].isupper():
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._names or is_dtype:
            return super().find_class(module, name)
        raise UnsafeCheckpointError(f"it asks for {module}.{name}, which no checkpoint needs")


class SafeReader(FileSystemReader):
    """DCP's reader, with its metadata read by `MetadataUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            UnsafeCheckpointError: it holds anything but DCP's own classes.
        """
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as f:
                metadata = MetadataUnpickler(f).load()
        except OSError:
            raise
        except Exception as e:
            raise UnsafeCheckpointError(f"{path} is refused: {e}.") from e
        if not isinstance(metadata, Metadata):
            raise UnsafeCheckpointError(
                f"{path} is refused: it holds {type(metadata).__name__}, no DCP metadata."
            )
        return metadata


class MemoryReader(StorageReader):
    """Serves whole tensors that are in memory, as if they had been saved by one process."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return metadata in which each tensor is one piece."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=t.dtype),
                    t.size(),
                    [ChunkStorageMetadata(torch.Size([0] * t.dim()), t.size())],
                )
                for key, t in self.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the pieces asked for."""
        for item in plan.items:
            piece = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True."""
        return True


@torch.no_grad()
def read_tensors(reader: StorageReader, metadata: Metadata, into: Mapping[str, Any]) -> None:
    """Fill the tensors of `into` (plain, DTensor or ShardedTensor), each rank its own pieces, no collectives.

    Raises:
        ValueError: a tensor was saved with another shape.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(into), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def open_checkpoint(path: str | Path) -> tuple[StorageReader, dict[str, Any]]:
    """Return (reader of the tensors, the rest) of one of our folders or of a plain Lightning `.ckpt`.

    From a `.ckpt` the rest still holds `optimizer_states`, keyed by position.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a folder of another kind.
    """
    path = Path(path)
    if path.is_file():
        rest = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        weights = {f"model/{clean_name(k)}": v for k, v in rest.pop("state_dict").items()}
        rest["extra_state"] = {k: v for k, v in weights.items() if not isinstance(v, Tensor)}
        return MemoryReader({k: v for k, v in weights.items() if isinstance(v, Tensor)}), rest
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    if not (path / REST).is_file() or not (path / ".metadata").is_file():
        present = sorted(p.name for p in path.iterdir())[:8]
        raise ValueError(
            f"{path} is no checkpoint of these strategies ({REST} and .metadata expected, found {present}). Folders of "
            "Lightning's own FSDP strategies load with those strategies only; a single-file .ckpt loads here."
        )
    return SafeReader(path), torch.load(path / REST, map_location="cpu", weights_only=True)


def read_full(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (all tensors whole on the CPU, the rest) of a checkpoint, in one process without a Trainer."""
    reader, rest = open_checkpoint(path)
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(m.size, dtype=m.properties.dtype)
        for key, m in metadata.state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    read_tensors(reader, metadata, tensors)
    return tensors, rest


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the LightningModule's state dict of a checkpoint, whole and on the CPU."""
    reader, _ = open_checkpoint(path)
    metadata = reader.read_metadata()
    weights = {
        key: torch.empty(m.size, dtype=m.properties.dtype)
        for key, m in metadata.state_dict_metadata.items()
        if key.startswith("model/") and isinstance(m, TensorStorageMetadata)
    }
    read_tensors(reader, metadata, weights)
    return {key.removeprefix("model/"): t for key, t in weights.items()}


def to_lightning_ckpt(path: str | Path, target: str | Path) -> None:
    """Write a checkpoint folder as the plain single-file `.ckpt` that any Lightning project loads."""
    tensors, rest = read_full(path)
    optimizer_states = []
    for saved in rest.pop("optimizers", []):
        names = [n for g in saved["param_groups"] for n in g["params"]]
        state = {i: state_of(saved, n, tensors) for i, n in enumerate(names)}
        position = {n: i for i, n in enumerate(names)}
        groups = [{**g, "params": [position[n] for n in g["params"]]} for g in saved["param_groups"]]
        optimizer_states.append({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})
    weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    weights.update({k.removeprefix("model/"): v for k, v in rest.pop("extra_state", {}).items()})
    temporary = Path(f"{target}.tmp{os.getpid()}")
    torch.save({**rest, "state_dict": weights, "optimizer_states": optimizer_states}, temporary)
    os.replace(temporary, target)


def state_of(saved: dict[str, Any], name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer kept about one parameter, tensors and others together."""
    state = {key: tensors[f"optimizer/{name}/{key}"] for key in saved["tensors"].get(name, ())}
    return {**state, **saved["state"].get(name, {})}


# ---- writing ---------------------------------------------------------------------------------------------------------


class _HashingFile(io.RawIOBase):
    """A new file, hashed by a second thread while it is written. (CheckpointRetention, which stands alone, has the like.)

    The bytes of `lasting` tensors, which stay as they are until `close`, are hashed behind the writing, others before
    `write` returns.
    """

    def __init__(self, path: Path, lasting: Iterable[Tensor] = ()) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
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
        return True

    def fileno(self) -> int:
        self._drain()
        return self._fd

    def tell(self) -> int:
        return self.num_bytes

    def write(self, data: Any) -> int:
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
        if not self.closed:
            try:
                self._drain()
            finally:
                self._pool.shutdown()
                os.close(self._fd)
                super().close()

    @property
    def record(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": self._sha.hexdigest()}


class _HashingFileSystem(FileSystem):
    def __init__(self, lasting: Iterable[Tensor] = ()) -> None:
        self.lasting = list(lasting)
        self.files: dict[str, _HashingFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with _HashingFile(Path(path), self.lasting) as stream:
            self.files[Path(path).name.removesuffix(".tmp")] = stream
            yield stream


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave the checksums of torch's zip format out: the SHA-256 says more, and they cost as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Planner(DefaultSavePlanner):
    """DCP's planner over a flat dict; takes the copies of `stage` where there are any."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies: dict[Any, Tensor] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        copy = self.copies.get(write_item.index)
        return super().resolve_data(write_item) if copy is None else copy


class StagedCheckpoint:
    """A state that was taken and not written yet."""

    def __init__(self, planner: _Planner, plan: Any, metadata: Metadata | None, rest: bytes) -> None:
        self._planner = planner
        self._plan = plan
        self._metadata = metadata  # on rank 0
        self._rest = rest

    def _data(self, prefix: str = "") -> list[Tensor]:
        items = [i for i in self._plan.items if i.index.fqn.startswith(prefix)]
        return [self._planner.resolve_data(i).detach() for i in items]

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Return whether the weights that this rank writes are free of NaN and infinity."""
        local = [t for t in self._data("model/") if t.is_floating_point() and t.numel()]
        if not local:
            return True
        # A sum of squares may overflow where no value is infinite: then look at the values.
        norms = torch.stack([n.float() for n in torch._foreach_norm(local)])
        return bool(norms.isfinite().all()) or all(bool(t.isfinite().all()) for t in local)

    def write(self, folder: str | Path) -> dict[str, Any]:
        """Write and flush this rank's tensors. No collectives: any thread may do it.

        Returns:
            "files" (name -> bytes and sha256) and what `finish` needs of each rank; picklable.
        """
        data = self._data()
        # Several files at a time: one hash alone is slower than a fast disk. From a GPU one, whose copies overlap.
        num_files = min(4, os.cpu_count() or 1, 1 + sum(t.nbytes for t in data) // _BYTES_PER_FILE)
        num_files = num_files if all(t.is_cpu for t in data) else 1
        writer = FileSystemWriter(folder, thread_count=num_files)
        writer.fs = files = _HashingFileSystem(data)
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            with _without_crc32():
                results = writer.write_data(self._plan, self._planner).wait()
        except RuntimeError as e:
            raise next((f.error for f in files.files.values() if f.error), e) from e
        # DCP loses what its further threads raise.
        for file in files.files.values():
            if file.error is not None:
                raise file.error
        if len(results) != len(self._plan.items):
            raise RuntimeError(f"only {len(results)} of {len(self._plan.items)} tensors were written")
        return {"files": {n: f.record for n, f in files.files.items()}, "results": results}

    def finish(self, folder: str | Path, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0, with all ranks' parts in order: write metadata and rest. Returns those files."""
        assert self._metadata is not None
        writer = FileSystemWriter(folder)
        writer.fs = _HashingFileSystem()
        writer.finish(self._metadata, [p["results"] for p in parts])
        with writer.fs.create_stream(Path(folder) / REST, "wb") as f:
            f.write(self._rest)
            os.fsync(f.fileno())
        return {n: f.record for n, f in writer.fs.files.items()}


def stage(
    tensors: Mapping[str, Any], rest: Mapping[str, Any], buffers: dict[Any, Tensor] | None = None
) -> StagedCheckpoint:
    """Agree with all ranks on who writes what, and optionally copy this rank's part to host memory.

    Args:
        tensors: key -> plain tensor (the same on all ranks), DTensor or ShardedTensor.
        rest: anything that `torch.load(weights_only=True)` admits; serialised here and now.
        buffers: where to copy; used again if given again. None writes from the tensors themselves.

    Raises:
        TypeError: the rest holds an object that cannot be loaded without running code.
    """
    file = io.BytesIO()
    torch.save(dict(rest), file)
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise TypeError(
            f"The checkpoint would hold {', '.join(sorted(unsafe))}, which loads only by running code. Keep hyper-"
            "parameters and callback states to tensors, numbers, strings, lists and dicts, or admit the class with "
            "torch.serialization.add_safe_globals([...])."
        )
    planner = _Planner()
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rank = dist.get_rank() if world_size > 1 else 0
    planner.set_up_planner(dict(tensors), None, rank == 0)
    local = planner.create_local_plan()
    plans: list[Any] = [local]
    if world_size > 1:
        plans = [None] * world_size
        dist.gather_object(local, plans if rank == 0 else None, dst=0)
    metadata: Metadata | None = None
    answers: list[Any] = [None] * world_size
    if rank == 0:
        try:
            plans, metadata = planner.create_global_plan(plans)
            answers = list(FileSystemWriter("").prepare_global_plan(plans))
        except Exception as e:
            answers = [f"{type(e).__name__}: {e}"] * world_size
    box = [answers[0]]
    if world_size > 1:
        dist.scatter_object_list(box, answers if rank == 0 else None, src=0)
    if isinstance(box[0], str):
        raise RuntimeError(f"The checkpoint cannot be laid out: {box[0]}")
    plan = planner.finish_plan(box[0])
    if buffers is not None:
        _copy_to_host(planner, plan, buffers)
    return StagedCheckpoint(planner, plan, metadata, file.getvalue())


def _copy_to_host(planner: _Planner, plan: Any, buffers: dict[Any, Tensor]) -> None:
    devices = set()
    copies: dict[Any, Tensor] = {}
    used: dict[Any, Tensor] = {}
    for item in plan.items:
        source = planner.resolve_data(item).detach()
        shared = (source.data_ptr(), source.shape, source.stride(), source.dtype)
        if source.numel() == 0 or shared not in used:
            key = (item.index.fqn, item.index.offset, source.shape, source.dtype)
            if key not in buffers:
                pin = source.device.type == "cuda"
                buffers[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pin)
            used[shared] = buffers[key].copy_(source, non_blocking=True)
            if source.device.type != "cpu":
                devices.add(source.device)
        copies[item.index] = used[shared]
    for device in devices:
        torch.get_device_module(device).synchronize(device)
    planner.copies = copies
    planner.state_dict = {}  # the live tensors are not needed any more


def split_checkpoint(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tensors of model and optimizers by key, the rest) of what Lightning wants saved."""
    weights = {f"model/{k}": v for k, v in checkpoint["state_dict"].items()}
    is_tensor = {k: hasattr(v, "size") and hasattr(v, "dtype") for k, v in weights.items()}
    tensors = {k: v for k, v in weights.items() if is_tensor[k]}
    optimizers = []
    for saved in checkpoint.get("optimizer_states", []):
        entry: dict[str, Any] = {"param_groups": saved["param_groups"], "tensors": {}, "state": {}}
        for name, state in saved["state"].items():
            own = {k: v for k, v in state.items() if hasattr(v, "size") and hasattr(v, "dtype")}
            tensors.update({f"optimizer/{name}/{k}": v for k, v in own.items()})
            entry["tensors"][name] = list(own)
            entry["state"][name] = {k: v for k, v in state.items() if k not in own}
        optimizers.append(entry)
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    rest["extra_state"] = {k: v for k, v in weights.items() if not is_tensor[k]}
    rest["format"] = FORMAT
    if "optimizer_states" in checkpoint:
        rest["optimizers"] = optimizers
    return tensors, rest
