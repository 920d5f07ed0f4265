"""How the ranks share the work (beside the data flow: GPT -> LitGPT -> *Trainer* -> callbacks).

Lightning's strategies, changed in four places where training a GPT on several ranks goes wrong or is refused:

- **CPU ranks.** Each strategy runs on CPU with gloo, so that a laptop can rehearse a cluster run:
  `Trainer(accelerator="cpu", devices=2, strategy=FSDP())`.
- **Gradient sync.** Ranks exchange gradients once per update, at the last micro-batch of a window (short last windows
  included), not once per micro-batch. Lightning does this for DDP alone. It costs memory under FSDP: each rank holds
  unsharded gradients until the window ends, so `sync_every_micro_batch=True` switches back.
- **Reduction in fp32.** Gradients are summed over ranks in fp32, whatever dtype they are computed in.
- **The same numerics everywhere.** `bf16-mixed` is autocast over fp32 parameters under every strategy. Lightning's FSDP
  plugin casts parameters, buffers and the reduction to bf16, and its autocast is the GPU's.

Named in a config by class path:

    trainer:
      strategy:
        class_path: lit_gpt_loop.strategies.FSDP2
        init_args: {sync_every_micro_batch: false}

| strategy | one copy of the weights | use it when |
|---|---|---|
| `OneDevice` | on one device | one process |
| `DDP` | on every rank | the model, its gradients and moments fit on one device |
| `FSDP` | over all ranks (FSDP1, `FullyShardedDataParallel`) | a LightningModule that knows nothing of sharding |
| `FSDP2` | over all ranks (`fully_shard`) | a module that calls `shard_fsdp2` in `configure_model`, as LitGPT does |
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap
from torch.nn.parallel import DistributedDataParallel

from lit_gpt_loop.dist_checkpoint import NameKeyedCheckpoints
from lit_gpt_loop.sharding import find_blocks, same_weights_on_all_ranks, shard_fsdp2

__all__ = ["DDP", "FSDP", "FSDP2", "AnyDeviceFSDPPrecision", "OneDevice", "find_blocks", "shard_fsdp2"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class OneDevice(NameKeyedCheckpoints, SingleDeviceStrategy):
    """One process on the device that the Trainer's `accelerator` and `devices` name."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device; the Trainer assigns it."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ValueError(
                f"OneDevice runs on one device and the Trainer was given {len(devices)}: set devices=1, or "
                "strategy=DDP() / FSDP() / FSDP2() of lit_gpt_loop.strategies."
            )
        self._devices = list(devices or [])

    @property
    def root_device(self) -> torch.device:
        """The device that the model is on."""
        return self._devices[0] if self._devices else super().root_device


class DDP(NameKeyedCheckpoints, DDPStrategy):
    """A copy of the model on every rank; gradients exchanged once per update, in fp32.

    Args:
        sync_every_micro_batch: exchange at every micro-batch of a window instead of at its last.
        find_unused_parameters: allow parameters that take no part in a loss (costs a walk over the graph).
        gradient_as_bucket_view: gradients live in the communication buckets; saves a copy of them.
        timeout_s: seconds that a collective may take before the run fails.
        **kwargs: further arguments of Lightning's `DDPStrategy` and torch's `DistributedDataParallel`.
    """

    def __init__(
        self,
        *,
        sync_every_micro_batch: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        timeout_s: float = 1800.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            timeout=_timeout(timeout_s),
            **kwargs,
        )
        self.sync_every_micro_batch = sync_every_micro_batch

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this around each micro-batch but the last of a window."""
        if self.sync_every_micro_batch:
            yield
        else:
            with super().block_backward_sync():
                yield

    def configure_ddp(self) -> None:
        """Wrap the model; parameters in half precision get their gradients summed in fp32."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        low = {p.dtype for p in self.model.parameters() if p.requires_grad} - {torch.float32, torch.float64}
        if low and self._ddp_comm_hook is None:
            self.model.register_comm_hook(None, _all_reduce_in_fp32)


def _all_reduce_in_fp32(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    grads = bucket.buffer()
    total = grads.float().div_(dist.get_world_size())
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda f: grads.copy_(f.value()[0]))


class AnyDeviceFSDPPrecision(FSDPPrecision):
    """Lightning's precision plugin for FSDP1, right on CPU too, with norm clipping.

    `bf16-mixed` and `16-mixed` autocast over fp32 parameters, as under the other strategies.

    Args:
        precision: "32-true", "bf16-mixed", "bf16-true", "16-mixed" or "16-true".
        device_type: "cpu" or "cuda".
        scaler: for "16-mixed"; default `ShardedGradScaler(device_type)`.
        param_dtype: gather and compute parameters in this dtype.
    """

    def __init__(
        self,
        precision: Any,
        device_type: str,
        scaler: ShardedGradScaler | None = None,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning makes a scaler for the GPU first
            super().__init__(precision)
        self.device_type = device_type
        self.param_dtype = param_dtype
        self.scaler = None
        if precision == "16-mixed":
            self.scaler = scaler or ShardedGradScaler(device=device_type)
        self.root: FullyShardedDataParallel | None = None

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """What FSDP casts: nothing to compute in unless `param_dtype` says so, gradients to fp32 to sum them."""
        return MixedPrecision(
            param_dtype=self.param_dtype or self._desired_input_dtype,
            reduce_dtype=torch.float32,
            buffer_dtype=self._desired_input_dtype,
            cast_forward_inputs=self.param_dtype is not None or "true" in self.precision,
        )

    def forward_context(self) -> Any:
        """Autocast on the device that the model is on."""
        if "mixed" in self.precision:
            return torch.autocast(
                self.device_type, torch.bfloat16 if "bf16" in self.precision else torch.float16
            )
        return super().forward_context()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float = 0.0, *_: Any, **__: Any) -> None:
        """Clip by the norm over all shards. (Lightning's plugin refuses, having no handle of the root module.)"""
        if self.root is None:
            raise MisconfigurationException(
                "Norm clipping by the Trainer needs the whole model wrapped in one FSDP root. Leave gradient_clip_val "
                "out and add GradNormMonitor(clip_norm=...) to the callbacks."
            )
        self.root.clip_grad_norm_(clip_val)


class FSDP(NameKeyedCheckpoints, FSDPStrategy):
    """Parameters, gradients and moments sharded over the ranks by `FullyShardedDataParallel` (FSDP1).

    Args:
        sync_every_micro_batch: reduce gradients at every micro-batch. The default reduces at the last of a window and
            holds the window's gradients whole on each rank until then.
        block_types: names of the classes to shard one by one, see `find_blocks`.
        param_dtype: "bf16" gathers and computes parameters in bf16, which halves traffic; gradients of the
            micro-batches of a window then add up in bf16 unless `sync_every_micro_batch` is on.
        state_dict_type: "sharded" (FSDP1's full form ends the interpreter on CPU).
        timeout_s: seconds that a collective may take before the run fails.
        **kwargs: further arguments of Lightning's `FSDPStrategy` and torch's `FullyShardedDataParallel`.
    """

    def __init__(
        self,
        *,
        sync_every_micro_batch: bool = False,
        block_types: Sequence[str] | None = None,
        param_dtype: str | None = None,
        state_dict_type: str = "sharded",
        timeout_s: float = 1800.0,
        **kwargs: Any,
    ) -> None:
        if param_dtype is not None and param_dtype not in _DTYPES:
            raise ValueError(
                f"FSDP(param_dtype={param_dtype!r}): give one of {sorted(_DTYPES)} or leave it out."
            )
        if block_types is not None and "auto_wrap_policy" in kwargs:
            raise ValueError("FSDP got both block_types and auto_wrap_policy: give one of them.")
        super().__init__(state_dict_type=state_dict_type, timeout=_timeout(timeout_s), **kwargs)  # type: ignore[arg-type]
        self.sync_every_micro_batch = sync_every_micro_batch
        self.block_types = block_types
        self.param_dtype = None if param_dtype is None else _DTYPES[param_dtype]

    @property
    def precision_plugin(self) -> FSDPPrecision:
        """The plugin, made for the device that the ranks are on."""
        plugin = self._precision_plugin
        if not isinstance(plugin, AnyDeviceFSDPPrecision):
            precision = plugin.precision if isinstance(plugin, FSDPPrecision) else "32-true"
            scaler = getattr(plugin, "scaler", None)
            device_type = self.root_device.type if self.parallel_devices else "cpu"
            if device_type == "cpu":
                scaler = None  # Lightning made it for the GPU
            plugin = AnyDeviceFSDPPrecision(precision, device_type, scaler, self.param_dtype)
            if self.parallel_devices:
                self._precision_plugin = plugin
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, FSDPPrecision):
            raise TypeError(
                f"FSDP works with Trainer(precision=...) or an FSDPPrecision plugin, got {type(plugin).__name__}: "
                "give lit_gpt_loop.strategies.AnyDeviceFSDPPrecision."
            )
        self._precision_plugin = plugin

    def _fsdp_kwargs(self) -> dict[str, Any]:
        # FSDP1 takes an index for a GPU and torch.device("cpu") for CPU ranks; Lightning passes the index only.
        on_cpu = self.root_device.type == "cpu"
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": torch.device("cpu") if on_cpu else self.root_device.index,
            **self.kwargs,
        }

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
            return super()._setup_model(model)
        same_weights_on_all_ranks(model)
        kwargs = self._fsdp_kwargs()
        if "auto_wrap_policy" not in kwargs:
            blocks = {id(m) for m in find_blocks(model, self.block_types)}
            kwargs["auto_wrap_policy"] = CustomPolicy(lambda m: id(m) in blocks)
        # Wrapped here and handed on: what Lightning does after wrapping (metrics, recomputation) stays Lightning's.
        return super()._setup_model(FullyShardedDataParallel(module=model, **kwargs))

    def setup_precision_plugin(self) -> None:
        """Tell the precision plugin which module can clip."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if isinstance(plugin, AnyDeviceFSDPPrecision) and isinstance(self.model, FullyShardedDataParallel):
            plugin.root = self.model

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context of `configure_model`, where a module may wrap parts of itself with `torch`'s `wrap`."""
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._fsdp_kwargs()):
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this around each micro-batch but the last of a window."""
        with ExitStack() as stack:
            if not self.sync_every_micro_batch and self.model is not None:
                for root in FullyShardedDataParallel.fsdp_modules(self.model, root_only=True):
                    stack.enter_context(root.no_sync())
            yield


class FSDP2(NameKeyedCheckpoints, ModelParallelStrategy):
    """Parameters, gradients and moments sharded over the ranks by `fully_shard` (FSDP2).

    The LightningModule shards its network in `configure_model`:
    `shard_fsdp2(self.model, self.device_mesh)`.

    Args:
        sync_every_micro_batch: reduce gradients at every micro-batch. The default reduces at the last of a window and
            holds the window's gradients whole, in fp32, on each rank until then.
        timeout_s: seconds that a collective may take before the run fails.
        **kwargs: further arguments of Lightning's `ModelParallelStrategy`.
    """

    def __init__(
        self, *, sync_every_micro_batch: bool = False, timeout_s: float = 1800.0, **kwargs: Any
    ) -> None:
        super().__init__(timeout=_timeout(timeout_s), **kwargs)
        self.sync_every_micro_batch = sync_every_micro_batch

    def setup_environment(self) -> None:
        """Join the group; all ranks form the data-parallel dimension unless sizes were given."""
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes // self._tensor_parallel_size
        super().setup_environment()

    def setup(self, trainer: "pl.Trainer") -> None:
        """Check that the module sharded itself, then set up as Lightning does."""
        if self.model is not None and not any(isinstance(m, FSDPModule) for m in self.model.modules()):
            raise TypeError(
                f"FSDP2 shards what the LightningModule asks it to, and {type(self.model).__name__} holds no sharded "
                "module: call shard_fsdp2(self.model, self.device_mesh) in its configure_model(), or use "
                "strategy=FSDP(), which needs nothing of the module."
            )
        super().setup(trainer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this around each micro-batch but the last of a window."""
        if self.sync_every_micro_batch or self.model is None:
            yield
            return
        sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


def _timeout(timeout_s: float) -> timedelta:
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s}: a collective needs a time > 0 s.")
    return timedelta(seconds=timeout_s)
