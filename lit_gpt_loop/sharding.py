"""What shards a network over ranks: which modules to shard one by one, and `fully_shard` (FSDP2) on each of them.

Torch only. `strategies.py` uses it for FSDP1, a LightningModule's `configure_model` for FSDP2.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def find_blocks(
    model: nn.Module, block_types: Sequence[type[nn.Module] | str] | None = None
) -> list[nn.Module]:
    """Return the modules to shard one by one, in module order.

    Args:
        model: the network.
        block_types: classes, or names of classes, of those modules. None takes the children of each outermost
            `nn.ModuleList`, which is how transformers hold their blocks.

    Raises:
        ValueError: no module of `model` is of these types.
    """
    if block_types is not None:
        names = {t if isinstance(t, str) else t.__name__ for t in block_types}
        blocks = [m for m in model.modules() if m is not model and type(m).__name__ in names]
        if not blocks:
            present = sorted({type(m).__name__ for m in model.modules()})
            raise ValueError(
                f"No module of types {sorted(names)} in {type(model).__name__}. Name classes that it holds: {present}, "
                "or leave block_types out to shard the children of each nn.ModuleList."
            )
        return blocks
    if isinstance(model, nn.ModuleList):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in find_blocks(child)]


def shard_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    block_types: Sequence[type[nn.Module] | str] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard `model` in place over the ranks of `mesh` with `fully_shard`: each block, then what is left, as the root.

    Call it in `LightningModule.configure_model` with `self.device_mesh`, and call the model through its `forward`: the
    root's parameters (embedding, head, last norm) are whole only while `forward` runs.

    Args:
        model: the network; parameters may be on the meta device.
        mesh: the mesh of the strategy; of a mesh with several dimensions, the one named `data_parallel` is taken.
        block_types: see `find_blocks`.
        param_dtype: gather and compute in this dtype; None keeps the parameters' own (autocast still applies).
        reduce_dtype: dtype in which gradients are summed over ranks, and accumulated over micro-batches.
        reshard_after_forward: free whole parameters after forward and gather them again for backward; False gathers
            once per micro-batch and keeps them.

    Returns:
        `model`.

    Raises:
        ValueError: no block of these types, or a mesh of several dimensions without one named `data_parallel`.
    """
    if mesh.ndim > 1:
        if "data_parallel" not in (mesh.mesh_dim_names or ()):
            raise ValueError(
                f"A mesh with dimensions {mesh.mesh_dim_names} has none named 'data_parallel': pass the one-dimensional "
                "part to shard over, as in shard_fsdp2(model, mesh['dp'])."
            )
        mesh = mesh["data_parallel"]
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    same_weights_on_all_ranks(model, mesh.get_group())
    for block in find_blocks(model, block_types):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return model


@torch.no_grad()
def same_weights_on_all_ranks(model: nn.Module, group: Any = None) -> None:
    """Give each rank rank 0's weights, as DDP does: sharding ranks of different seeds would mix their models.

    Parameters on the meta device have no weights yet and are passed over.
    """
    on_gpu = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, group_src=0, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
