"""How the strategies save and load: one name-keyed form for every layout (beside the data flow: Trainer -> *checkpoints*).

What one process, DDP, FSDP or FSDP2 at any world size saved, compiled or not, with activation checkpointing or without,
loads into any other, bit for bit, optimizer moments included: names carry no prefix of compiling or wrapping. A plain
Lightning `.ckpt` loads too. checkpoint_files.py says what the files are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from lit_gpt_loop.checkpoint_files import (
    MemoryReader,
    clean_name,
    open_checkpoint,
    read_tensors,
    split_checkpoint,
    stage,
    state_of,
)


class NameKeyedCheckpoints:
    """Mixin for Lightning strategies, to be named before the strategy: all read and write the folder described above.

    `Trainer.save_checkpoint(path, storage_options={"stage": "copy" | "view"})` writes nothing and leaves a
    `StagedCheckpoint` in `storage_options["staged"]`; CheckpointRetention asks for that.
    """

    stages_checkpoints = True
    _host_buffers: dict[Any, Tensor] | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors are read straight into the model as it is laid out."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` does it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state by clean name: plain tensors or this rank's shards, not copied."""
        if self._fsdp1 is not None:
            return get_model_state_dict(self._fsdp1)
        return {clean_name(k): v for k, v in self.lightning_module.state_dict().items()}  # type: ignore[attr-defined]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by clean parameter name."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._fsdp1 is not None:
            if not optimizer.state:
                names = self._names()
                groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
                return {"state": {}, "param_groups": groups}
            return get_optimizer_state_dict(self._fsdp1, optimizer)
        names = self._names()
        state = {names[p]: dict(s) for p, s in optimizer.state.items()}
        groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
        return {"state": state, "param_groups": groups}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Write the folder (all ranks), or stage it, see the class."""
        options = storage_options if storage_options is not None else {}
        if set(options) - {"stage", "staged"}:
            raise TypeError(
                f"storage_options={options}: these strategies know {{'stage': 'copy' | 'view'}} only."
            )
        if options.get("stage") == "copy" and self._host_buffers is None:
            self._host_buffers = {}
        tensors, rest = split_checkpoint(checkpoint)
        staged = stage(tensors, rest, self._host_buffers if options.get("stage") == "copy" else None)
        if "stage" in options:
            options["staged"] = staged
            return
        path = Path(self.broadcast(filepath))  # type: ignore[attr-defined]
        part: Any = None
        try:
            part = staged.write(path)
        except Exception as e:
            part = {"error": f"{type(e).__name__}: {e}"}
        parts = [part]
        if self._num_ranks > 1:
            parts = [None] * self._num_ranks
            dist.all_gather_object(parts, part)
        errors = [p["error"] for p in parts if "error" in p]
        if errors:
            raise OSError(f"Writing {path} failed: {errors[0]}")
        if self.is_global_zero:  # type: ignore[attr-defined]
            staged.finish(path, parts)
        self.barrier("NameKeyedCheckpoints.save_checkpoint")  # type: ignore[attr-defined]

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder of any layout, or a plain `.ckpt`, into model and (when fitting) optimizers.

        Args:
            checkpoint_path: folder or file.
            weights_only: has no effect; no code from the checkpoint is run either way.

        Returns:
            The rest, for Lightning to restore loops, callbacks and schedules from.

        Raises:
            RuntimeError: keys are missing or left over and the module loads strictly.
        """
        path = Path(self.broadcast(checkpoint_path))  # type: ignore[attr-defined]
        reader, rest = open_checkpoint(path)
        metadata = reader.read_metadata()
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:  # type: ignore[attr-defined]
            # Before the weights: FSDP1 makes room for the moments by a step at rate 0.
            self._load_optimizers(reader, metadata, rest)
        self._load_model(reader, metadata, rest)
        self.barrier("NameKeyedCheckpoints.load_checkpoint")  # type: ignore[attr-defined]
        for key in ("optimizers", "optimizer_states", "extra_state"):
            rest.pop(key, None)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has done it."""

    @property
    def _fsdp1(self) -> nn.Module | None:
        model = self.model  # type: ignore[attr-defined]
        is_fsdp1 = model is not None and any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
        return model if is_fsdp1 else None

    @property
    def _num_ranks(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def _names(self) -> dict[Any, str]:
        return {p: clean_name(n) for n, p in self.lightning_module.named_parameters()}  # type: ignore[attr-defined]

    def _load_model(self, reader: StorageReader, metadata: Metadata, rest: dict[str, Any]) -> None:
        module = self.lightning_module  # type: ignore[attr-defined]
        strict = module.strict_loading
        if self._fsdp1 is not None:
            state = get_model_state_dict(self._fsdp1)
            original = {k: k for k in state}
        else:
            state = module.state_dict()
            original = {clean_name(k): k for k in state}
        saved = {k for k in metadata.state_dict_metadata if k.startswith("model/")} | set(
            rest.get("extra_state", ())
        )
        saved = {k.removeprefix("model/") for k in saved}
        missing, unexpected = sorted(set(original) - saved), sorted(saved - set(original))
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"The checkpoint does not fit {type(module).__name__}: missing {missing[:5]} ({len(missing)}), left "
                f"over {unexpected[:5]} ({len(unexpected)}). Build the model as it was saved, or set "
                "strict_loading=False on the module to load what fits."
            )
        extra = {k.removeprefix("model/"): v for k, v in rest.get("extra_state", {}).items()}
        tensors = {f"model/{c}": state[o] for c, o in original.items() if c in saved and c not in extra}
        read_tensors(reader, metadata, tensors)
        loaded = {original[c]: extra.get(c, state[original[c]]) for c in original if c in saved}
        if self._fsdp1 is not None:
            set_model_state_dict(self._fsdp1, loaded, options=StateDictOptions(strict=strict))
        else:
            module.load_state_dict(loaded, strict=strict)

    def _load_optimizers(self, reader: StorageReader, metadata: Metadata, rest: dict[str, Any]) -> None:
        optimizers = self.optimizers  # type: ignore[attr-defined]
        saved = rest.get("optimizers")
        if saved is None and "optimizer_states" in rest:
            groups = [[[self._names()[p] for p in g["params"]] for g in o.param_groups] for o in optimizers]
            reader, saved = _from_positions(rest["optimizer_states"], groups)
            metadata = reader.read_metadata()
        if saved is None:
            raise KeyError(
                "The checkpoint holds weights only, no optimizer state: training cannot continue from it."
            )
        if len(saved) != len(optimizers):
            raise ValueError(
                f"The checkpoint holds {len(saved)} optimizers and the module configures {len(optimizers)}."
            )
        for optimizer, state in zip(optimizers, saved, strict=True):
            if self._fsdp1 is None:
                self._load_optimizer(optimizer, state, reader, metadata)
            else:
                self._load_fsdp1_optimizer(optimizer, state, reader, metadata)

    def _load_optimizer(
        self, optimizer: Optimizer, saved: dict[str, Any], reader: StorageReader, metadata: Metadata
    ) -> None:
        names = self._names()
        params = [p for g in optimizer.param_groups for p in g["params"]]
        position = {p: i for i, p in enumerate(params)}
        tensors: dict[str, Tensor] = {}
        for p in params:
            for key in saved["tensors"].get(names[p], ()):
                stored = metadata.state_dict_metadata[f"optimizer/{names[p]}/{key}"]
                assert isinstance(stored, TensorStorageMetadata)
                dtype = stored.properties.dtype
                like_param = stored.size == p.size()
                tensors[f"optimizer/{names[p]}/{key}"] = (
                    torch.zeros_like(p.detach(), dtype=dtype)
                    if like_param
                    else torch.zeros(stored.size, dtype=dtype)
                )
        read_tensors(reader, metadata, tensors)
        groups = []
        for group in optimizer.param_groups:
            options = _options_of([names[p] for p in group["params"]], saved["param_groups"])
            groups.append({**options, "params": [position[p] for p in group["params"]]})
        state = {position[p]: state_of(saved, names[p], tensors) for p in params}
        optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})

    def _load_fsdp1_optimizer(
        self, optimizer: Optimizer, saved: dict[str, Any], reader: StorageReader, metadata: Metadata
    ) -> None:
        assert self._fsdp1 is not None
        with without_step_hooks(optimizer):
            target: Any = get_optimizer_state_dict(self._fsdp1, optimizer)
        tensors = {
            f"optimizer/{name}/{key}": value
            for name, state in target["state"].items()
            for key, value in state.items()
            if key in saved["tensors"].get(name, ())
        }
        read_tensors(reader, metadata, tensors)
        for group in target["param_groups"]:
            group.update(_options_of(group["params"], saved["param_groups"]))
        target["state"] = {name: state_of(saved, name, tensors) for name in target["state"]}
        target["state"] = {name: state for name, state in target["state"].items() if state}
        if target["state"]:
            set_optimizer_state_dict(self._fsdp1, optimizer, target, options=StateDictOptions(strict=False))
        else:  # nothing but settings, as of plain SGD
            optimizer.state.clear()
            for group, restored in zip(optimizer.param_groups, target["param_groups"], strict=True):
                group.update({k: v for k, v in restored.items() if k != "params"})


def _options_of(names: list[str], saved_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of the saved group that held these parameters."""
    homes = {n: i for i, g in enumerate(saved_groups) for n in g["params"]}
    lost = [n for n in names if n not in homes]
    if lost:
        raise ValueError(
            f"The checkpoint's optimizer knows no {lost[:5]}: it was built over other parameters."
        )
    groups = sorted({homes[n] for n in names})
    if len(groups) > 1:
        raise ValueError(
            f"Parameters now in one group were saved in groups {groups}, such as {names[0]}: group them as before."
        )
    if not groups:
        return {}
    return {k: v for k, v in saved_groups[groups[0]].items() if k != "params"}


def _from_positions(
    states: list[dict[str, Any]], groups: list[list[list[str]]]
) -> tuple[MemoryReader, list[dict[str, Any]]]:
    """Name what a plain `.ckpt` keys by position, given each optimizer's parameter names per group."""
    tensors: dict[str, Tensor] = {}
    named = []
    for saved, names in zip(states, groups, strict=True):
        sizes = [len(g["params"]) for g in saved["param_groups"]], [len(g) for g in names]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The .ckpt holds parameter groups of sizes {sizes[0]}, the optimizer has {sizes[1]}."
            )
        ids = {
            i: n
            for g, ns in zip(saved["param_groups"], names, strict=True)
            for i, n in zip(g["params"], ns, strict=True)
        }
        as_names = {
            "state": {ids[i]: s for i, s in saved["state"].items()},
            "param_groups": [{**g, "params": [ids[i] for i in g["params"]]} for g in saved["param_groups"]],
        }
        own, rest = split_checkpoint({"state_dict": {}, "optimizer_states": [as_names]})
        tensors.update(own)
        named += rest["optimizers"]
    return MemoryReader(tensors), named


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Keep hooks from seeing the step at rate 0 by which torch makes room for moments; put gradients back after it."""
    # torch offers no way to list or suspend these; a hook that counts updates would count this one.
    import torch.optim.optimizer as module

    holders: list[tuple[Any, str]] = [
        (optimizer, "_optimizer_step_pre_hooks"),
        (optimizer, "_optimizer_step_post_hooks"),
        (module, "_global_optimizer_pre_hooks"),
        (module, "_global_optimizer_post_hooks"),
    ]
    kept = [dict(getattr(owner, name)) for owner, name in holders]
    for owner, name in holders:
        getattr(owner, name).clear()
    try:
        yield
    finally:
        for (owner, name), hooks in zip(holders, kept, strict=True):
            getattr(owner, name).update(hooks)
