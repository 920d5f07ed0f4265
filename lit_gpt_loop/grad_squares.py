"""The gradient's global norm under any strategy, each value counted once (layer T; beside the data flow).

`noise_scale.py` measures micro-batches with it, `lr_range.py` clips with it. (`callbacks/grad_norm.py` holds the same
arithmetic, because a callback file stands alone.)
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all values as a scalar, fp32 on MPS and float64 elsewhere."""
    tensors, parts, pieces = list(tensors), [], []
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    for t in tensors:
        # On CPU one fp32 accumulator runs over a whole tensor, and the norm of 4 M values is off by 8e-5. A noise estimate is
        # a difference of such norms. In rows of 1,024 it is off by 1e-9 and takes the same time.
        end = t.numel() // 1024 * 1024 if t.device.type == "cpu" and t.numel() > 2**12 else 0
        if end:
            t = t.reshape(-1)
            pieces.append(torch.linalg.vector_norm(t[:end].view(-1, 1024), dim=1, dtype=dtype))
        if end < t.numel():
            parts.append(t[end:] if end else t)
    if parts:
        pieces.append(torch.stack(torch._foreach_norm(parts, 2, dtype=dtype)))
    if not pieces:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.cat(pieces)
    return (norms if norms.device.type == "mps" else norms.double()).square().sum()


class Shares:
    """Which part of this rank's sum of squares to count, so that the sum over all ranks holds every value once.

    Args:
        model: the network as the strategy wrapped it.
        world_size: ranks.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
        flat_copies = 1.0
        if roots:  # a node's ranks hold one copy under HYBRID_SHARD, each rank does under NO_SHARD
            is_whole = roots[0].sharding_strategy.name == "NO_SHARD"
            flat_copies = world_size / (1 if is_whole else dist.get_world_size(roots[0].process_group))
        self._shares = {id(p): 1.0 / _copies(p, world_size, flat_copies) for p in model.parameters()}

    def sum_of_squares(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return this rank's share of the sum of squares of the gradients that are there; to be summed over ranks."""
        by_share: dict[float, list[Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                by_share.setdefault(self._shares[id(p)], []).append(local(p.grad))
        return sum(
            (share * sum_of_squares(grads) for share, grads in by_share.items()), start=sum_of_squares([])
        )


def _copies(parameter: Any, world_size: int, flat_copies: float) -> float:
    """Return how many ranks hold each of its values."""
    if hasattr(parameter, "_fsdp_flattened"):  # FSDP1 marks what it shards by this, and by nothing public
        return flat_copies
    if not hasattr(parameter, "placements"):
        return float(world_size)
    mesh = parameter.device_mesh
    return world_size / math.prod(
        mesh.size(i) for i, p in enumerate(parameter.placements) if not p.is_replicate()
    )


def sum_over_ranks(strategy: Any, values: list[float]) -> list[float]:
    """Return the sums of some numbers over the ranks of a Lightning strategy, the same on each: one collective, none on one rank."""
    if getattr(strategy, "world_size", 1) == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=strategy.root_device)
    return strategy.reduce(total, reduce_op="sum").tolist()


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
