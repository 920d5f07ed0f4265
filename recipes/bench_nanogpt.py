"""The loop to beat: nanoGPT's training loop and model, written plainly, for `recipes.bench` alone.

The same choices as nanoGPT on a CPU: learned positions, LayerNorm without bias, one fused qkv matrix, SDPA, GELU, tied head;
random blocks from a memory map, cross-entropy over materialised logits, autocast where bf16 is asked for, clipping to 1.0,
AdamW in two groups (not fused: nanoGPT fuses on CUDA only).
"""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            t.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """The network; `forward(idx, targets)` returns the mean loss, logits materialised."""

    def __init__(self, vocab_size: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.tokens.weight = self.head.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p,
                    std=0.02 / (2 * layers) ** 0.5 if name.endswith(("proj.weight", "down.weight")) else 0.02,
                )

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy (scalar) of tokens (B, T)."""
        x = self.tokens(idx) + self.positions(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def train(
    data: np.ndarray,
    vocab_size: int,
    context: int,
    layers: int,
    heads: int,
    width: int,
    batch: int,
    is_bf16: bool,
) -> Iterator[float]:
    """Train without end, yielding the loss after each update (nanoGPT reads it every tenth; so do we)."""
    torch.manual_seed(1337)
    model = PlainGPT(vocab_size, context, layers, heads, width)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    autocast = torch.autocast("cpu", torch.bfloat16) if is_bf16 else nullcontext()

    def get_batch() -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data) - context, (batch,))
        x = torch.stack([torch.from_numpy(data[i : i + context].astype(np.int64)) for i in ix.tolist()])
        y = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + context].astype(np.int64)) for i in ix.tolist()]
        )
        return x, y

    x, y = get_batch()
    loss_value, n = 0.0, 0
    while True:
        with autocast:
            loss = model(x, y)
        x, y = get_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if n % 10 == 0:
            loss_value = loss.item()
        n += 1
        yield loss_value
