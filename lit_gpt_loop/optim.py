"""AdamW in two groups: matrices decay, everything else does not (layer T).

Groups are decided by the class of the module that owns a parameter and by the parameter's name, never by its number of
dimensions (FSDP1 flattens matrices to vectors) nor by patterns in its full name (compile and FSDP add prefixes).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# Classes are compared by `isinstance`, so aliases and subclasses count. A tied head is reached through the embedding too,
# and an embedding wins: rare tokens would be pulled to zero by decay on updates that never saw them.
DECAYED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
NOT_DECAYED = (nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def split_parameters(
    modules: Iterable[tuple[str, nn.Module]],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (decayed, not decayed) trainable parameters of `module.named_modules()`, each parameter once.

    Weights of linear and convolution layers decay; biases, norms and embeddings do not, nor does a weight tied to one.

    Raises:
        ValueError: a trainable parameter belongs to a module of a class that is in neither list.
    """
    decayed: dict[int, nn.Parameter] = {}
    kept: dict[int, nn.Parameter] = {}
    for name, module in modules:
        for key, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if isinstance(module, NOT_DECAYED) or key == "bias":
                kept[id(p)] = p
            elif isinstance(module, DECAYED):
                decayed[id(p)] = p
            else:
                raise ValueError(
                    f"parameter {name}.{key} of a {type(module).__name__}: no rule says whether it decays; "
                    "add its class to DECAYED or NOT_DECAYED in lit_gpt_loop/optim.py"
                )
    return [p for i, p in decayed.items() if i not in kept], list(kept.values())


def build_adamw(
    module: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of `module`, matrices in the first group.

    Args:
        module: anything with parameters; wrapped, compiled and sharded modules give the same groups.
        lr: peak rate.
        betas: decay rates of the moments; 0.95 is GPT-3's second (Brown et al. 2020).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of the first group, times the rate (Loshchilov and Hutter 2019).
        fused: one kernel for all parameters. Must be off with a gradient scaler: a fused step unscales inside itself,
            after the norm was taken.

    Raises:
        ValueError: nothing is trainable, or `split_parameters` has no rule for a parameter.
    """
    decayed, kept = split_parameters(module.named_modules())
    groups: list[dict[str, Any]] = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": weight_decay})
    if kept:
        groups.append({"params": kept, "weight_decay": 0.0})
    if not groups:
        raise ValueError("the module has no trainable parameter: nothing to optimize")
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
