"""The loss of a GPT: the sum of token cross-entropies, straight from the final hidden states.

Three ways to the same number, chosen by shape and dtype in `linear_cross_entropy_sum`:

- the logits fit easily (few tokens or a small vocabulary): a plain matmul and `F.cross_entropy`;
- many tokens and a vocabulary wider than the model, fp32: `F.linear_cross_entropy` in chunks, which never holds all logits;
- the same in bf16: `_ChunkedBf16`, the same algorithm. torch 2.13's own chunked kernel returns a bf16 *loss* for bf16 inputs
  (a sum of 3,000 token losses rounded to 8 bits) and, on CPU, runs its matmuls in fp32; ours keeps matmuls in bf16 and
  softmax, loss and the weight gradient's accumulation in fp32.

Shapes: N tokens, D width, V vocabulary, P >= V padded vocabulary (rows of the head).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gpt_loop.activations import chunk_tokens

IGNORE_INDEX = -100


def linear_cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the sum over tokens of `-log softmax(hidden @ weight[:vocab_size].T)[target]`, as an fp32 scalar.

    Args:
        hidden: final hidden states (N, D).
        weight: the head (P, D); rows from `vocab_size` on are padding and take no part.
        targets: (N,) int64; -100 is not trained. Without any valid target the sum is 0 and all gradients are zero.
        vocab_size: V.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    num_tokens, width = hidden.shape
    if num_tokens < width or vocab_size <= width:
        logits = F.linear(hidden, weight)  # (N, P)
        if weight.size(0) != vocab_size:
            logits = logits[:, :vocab_size]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return _chunked(hidden, weight, targets, vocab_size, dtype)


# Outside of compiled graphs: the loop over chunks would be unrolled, and torch runs its own chunked kernel eagerly as well.
@torch.compiler.disable
def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        return _ChunkedBf16.apply(hidden, weight, targets, vocab_size, needs_grad)
    if hidden.dtype == torch.float16 or weight.dtype == torch.float16 or dtype == torch.float16:
        # The kernel computes gradients before it knows the loss scale, so in fp16 the small ones would vanish.
        hidden, weight = hidden.float(), weight.float()
    padding = None
    if weight.size(0) != vocab_size:
        padding = torch.zeros(weight.size(0), dtype=hidden.dtype, device=hidden.device)
        padding[vocab_size:] = -torch.inf
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=padding,
            reduction="sum",
            ignore_index=IGNORE_INDEX,
            # torch's own choice is 4 rows for 1,024 tokens, width 384 and 50,257 words: several times slower.
            options=nn.LinearCrossEntropyOptions(
                batch_chunk_size=chunk_tokens(hidden.size(0), weight.size(0), hidden.device.type)
            ),
        )


class _ChunkedBf16(torch.autograd.Function):
    """Sum of cross-entropies with bf16 matmuls; gradients are made in forward, chunk by chunk, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, needs_grad: bool
    ) -> Tensor:
        h = hidden.to(torch.bfloat16)  # (N, D)
        w = weight.to(torch.bfloat16)  # (P, D)
        valid = targets != IGNORE_INDEX
        indices = torch.where(valid, targets, 0)[:, None]
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        grad_h = torch.empty_like(h) if needs_grad else None
        grad_w = torch.zeros_like(w, dtype=torch.float32) if needs_grad else None
        step = chunk_tokens(h.size(0), w.size(0), h.device.type)
        for start in range(0, h.size(0), step):
            rows = slice(start, start + step)
            logits = torch.mm(h[rows], w.t()).float()  # (chunk, P)
            logits[:, vocab_size:] = -torch.inf
            log_p = torch.log_softmax(logits, dim=1)
            loss -= log_p.gather(1, indices[rows]).squeeze(1).masked_fill_(~valid[rows], 0.0).sum()
            if grad_h is None or grad_w is None:
                continue
            g = log_p.exp_()
            g.scatter_add_(
                1, indices[rows], g.new_full((g.size(0), 1), -1.0)
            )  # d loss / d logits = p - onehot
            g = g.mul_(valid[rows, None]).to(torch.bfloat16)
            torch.mm(g, w, out=grad_h[rows])
            grad_w += torch.mm(g.t(), h[rows])
        ctx.grad_h, ctx.grad_w = grad_h, grad_w
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_h, grad_w, ctx.grad_h, ctx.grad_w = ctx.grad_h, ctx.grad_w, None, None
        if grad_h is None or grad_w is None:
            raise RuntimeError(
                "the chunked loss supports one backward per forward: its gradients are used up"
            )
        # To the leaf's type first: bf16 times a 0-dim fp32 is bf16, and a scale of 1 / tokens would round again in it.
        # In place: each gradient is ours, and used once.
        return (
            grad_h.to(ctx.dtypes[0]).mul_(grad_loss) if ctx.needs_input_grad[0] else None,
            grad_w.mul_(grad_loss).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )
