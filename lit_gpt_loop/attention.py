"""Causal self-attention of a GPT block, and what all blocks of one forward share: positions, document borders, KV cache.

Shapes: B rows, T tokens per row, D width, H query heads, G key-value heads, C channels per head, S keys (cached + new).
Softmax runs inside `F.scaled_dot_product_attention` or `varlen_attn`, whose kernels keep its maximum and sum in fp32 for
bf16 inputs; RoPE and QK-norm are computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gpt_loop.config import GPTConfig


class KVCache:
    """Keys and values of the tokens seen so far, for every layer; filled by `GPT.forward_cached`.

    Room for `max_length` tokens is taken layer by layer at the first append, on the device and in the dtype of the keys.

    Args:
        max_length: tokens that fit; the context length is all that a model can use.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, G, T, C) of one layer behind the cached ones; return all (B, G, S, C)."""
        end = self.length + k.size(2)
        if layer not in self._layers:
            shape = (k.size(0), k.size(1), self.max_length, k.size(3))
            self._layers[layer] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


class Shared:
    """What every block of one forward needs besides its input.

    A plain class, no dataclass or tuple, on purpose: FSDP1 and FSDP2 with mixed precision cast every tensor that they find
    in a block's arguments, and RoPE's tables in bf16 would place tokens wrongly; they do not look inside this.
    """

    __slots__ = ("cache", "cos", "cu_seqlens", "mask", "sin")

    def __init__(
        self,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> None:
        self.cos = cos  # (T, 1, C/2) or (B, T, 1, C/2)
        self.sin = sin
        self.mask = mask  # True where a query may look; broadcasts to (B, H, T, S); None is plain causal
        self.cu_seqlens = (
            cu_seqlens  # (documents + 1,) int32 borders in the flattened batch, for the GPU kernel
        )
        self.cache = cache


def rope_tables(config: GPTConfig, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE's angles, each (context_length, 1, C/2) in fp32 (Su et al. 2021, Llama's half-split order)."""
    # Never an inference tensor: the first forward may be a validation, and autograd cannot save such a tensor later.
    with torch.inference_mode(False):
        channels = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
        frequencies = 1.0 / config.rope_theta ** (channels / config.head_dim)
        angles = torch.outer(
            torch.arange(config.context_length, device=device, dtype=torch.float32), frequencies
        )
        return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + C/2) of x (B, T, heads, C) by each token's angles; fp32 inside, x's dtype outside."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def document_runs(segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each token (B, T) starts a document, and its position inside its document.

    A document is a run of equal ids within a row; the first token of a row always starts one.
    """
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    index = torch.arange(segment_ids.size(1), device=segment_ids.device)
    last_start = torch.where(starts, index, 0).cummax(dim=1).values
    return starts, index - last_start


def document_mask(starts: Tensor) -> Tensor:
    """Return the causal mask (B, 1, T, T) that keeps each token inside its document; True where it may look."""
    runs = starts.cumsum(dim=1)
    size = starts.size(1)
    causal = torch.ones(size, size, dtype=torch.bool, device=starts.device).tril()
    return ((runs[:, :, None] == runs[:, None, :]) & causal)[:, None]


def document_borders(starts: Tensor) -> Tensor:
    """Return the borders (documents + 1,) int32 of the documents in the flattened batch, as `varlen_attn` takes them."""
    firsts = starts.flatten().nonzero().flatten()
    return F.pad(firsts, (0, 1), value=starts.numel()).to(torch.int32)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype, dropout: float) -> bool:
    """Whether `torch.nn.attention.varlen` can serve: NVIDIA of compute capability 8 or more, 16-bit floats, no dropout."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and dropout == 0.0
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class CausalSelfAttention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values; grouped when G < H."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.num_kv_heads, config.head_dim
        self.dropout = config.dropout
        width_qkv = (config.n_head + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.n_embd, width_qkv, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Map the normed residual stream (B, T, D) to this sub-layer's contribution (B, T, D)."""
        B, T, D = x.shape
        H, G = self.n_head, self.n_kv_head
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim)  # (B, T, H + 2G, C)
        if self.q_norm is None or self.k_norm is None:
            qk, v = qkv.split([H + G, G], dim=2)
            if shared.cos is not None and shared.sin is not None:
                qk = rotate(qk, shared.cos, shared.sin)  # queries and keys at once: half the kernel launches
            q, k = qk.split([H, G], dim=2)
        else:
            q, k, v = qkv.split([H, G, G], dim=2)
            gain = (
                self.q_norm.weight.dtype
            )  # fp32 under autocast: normed and rotated there, rounded once at the end
            q, k = self.q_norm(q.to(gain)), self.k_norm(k.to(gain))
            if shared.cos is not None and shared.sin is not None:
                q, k = rotate(q, shared.cos, shared.sin), rotate(k, shared.cos, shared.sin)
            q, k = q.to(v.dtype), k.to(v.dtype)
        dropout = self.dropout if self.training else 0.0
        if shared.cu_seqlens is not None:
            y = self._attend_varlen(q, k, v, shared.cu_seqlens, T)
        else:
            y = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), shared, dropout)
        return self.proj(y.reshape(B, T, D))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared, dropout: float) -> Tensor:
        if shared.cache is not None:
            k, v = shared.cache.append(self.layer, k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=shared.mask,
            dropout_p=dropout,
            is_causal=shared.mask is None and q.size(2) > 1,
            enable_gqa=self.n_head != self.n_kv_head,
        )  # (B, H, T, C)
        return y.transpose(1, 2)

    def _attend_varlen(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, T: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # GPU only, and its import registers operators

        y = varlen_attn(
            q.flatten(0, 1),  # (B T, H, C)
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens,
            cu_seqlens,
            T,  # no document is longer than a row; the true maximum would cost a device synchronisation
            T,
            window_size=(-1, 0),  # causal
            enable_gqa=self.n_head != self.n_kv_head,
        )
        return y.view(q.shape)  # type: ignore[union-attr]
