"""The network: one decoder-only transformer for GPT-2 style and Llama style (step 6 of 10: batches in, token losses out).

    tokens (B, T) -> embedding (+ learned positions) -> blocks -> norm -> head -> logits (B, T, V) or loss

Each block adds attention and an MLP to the residual stream, both behind a norm. What one forward shares between blocks (RoPE
tables, document borders, the KV cache) is in `attention.py`, the loss in `cross_entropy.py`, sampling in `generate.py`, the
shape in `config.py`.

Shapes: B rows, T tokens per row, D width, V vocabulary, P padded vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_gpt_loop.attention import (
    CausalSelfAttention,
    KVCache,
    Shared,
    document_borders,
    document_mask,
    document_runs,
    has_varlen_kernel,
    rope_tables,
)
from lit_gpt_loop.config import PRESETS, GPTConfig
from lit_gpt_loop.cross_entropy import IGNORE_INDEX, linear_cross_entropy_sum

__all__ = ["GPT", "IGNORE_INDEX", "PRESETS", "Block", "GPTConfig", "KVCache"]


def _norm(config: GPTConfig) -> nn.Module:
    # Both kernels reduce in fp32 whatever the dtype of their input.
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=config.norm_eps)


class MLP(nn.Module):
    """The feed-forward sub-layer: GELU with two matrices, or SwiGLU with gate and up fused into one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        width_in = config.hidden_size * (2 if self.is_gated else 1)
        self.fc = nn.Linear(config.n_embd, width_in, bias=config.bias)  # gated: rows are gate, then up
        self.proj = nn.Linear(config.hidden_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map the normed residual stream (B, T, D) to this sub-layer's contribution (B, T, D)."""
        x = self.fc(x)
        if self.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.proj(F.silu(gate) * up)
        return self.proj(F.gelu(x, approximate=self.approximate))


class Block(nn.Module):
    """One transformer block: what FSDP wraps and what activation checkpointing recomputes."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = _norm(config)
        self.attention = CausalSelfAttention(config, layer)
        self.norm_2 = _norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        every = config.activation_checkpointing
        self.is_checkpointed = every > 0 and layer % every == 0
        self.preserve_rng_state = config.dropout > 0

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Add this block's two contributions to the residual stream (B, T, D)."""
        # Inside forward rather than around the block, so that a recomputation finds FSDP's parameters gathered already.
        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(
                self._forward, x, shared, use_reentrant=False, preserve_rng_state=self.preserve_rng_state
            )
        return self._forward(x, shared)

    def _forward(self, x: Tensor, shared: Shared) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), shared))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """A decoder-only transformer.

    Built on the device of the surrounding `torch.device(...)` context (else CPU) with its initial weights. Under
    `torch.device("meta")` nothing is allocated: shard or move the model, then call `to_empty(device=...)` and
    `init_weights()`, or load a state dict.

    With tied embeddings there is no head module: the embedding's matrix serves, as one parameter with one name, so nothing
    needs to be tied again after sharding, `to_empty` or loading. RoPE's tables are no buffers: they are made on the device
    at hand when first needed, so that no dtype conversion, meta device or checkpoint can touch them.

    Args:
        config: the shape; `GPTConfig.preset(name)` has the common ones.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        # On meta first, so that weights are drawn once, in init_weights, and not by each layer's own default as well.
        with torch.device("meta"):
            self.tok_embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
            self.pos_embedding = (
                nn.Embedding(config.context_length, config.n_embd) if config.position == "learned" else None
            )
            self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
            self.norm_f = _norm(config)
            self.head = (
                None
                if config.tie_embeddings
                else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
            )
        self._rope: tuple[Tensor, Tensor] | None = None
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @property
    def head_weight(self) -> Tensor:
        """The matrix (P, D) that turns final hidden states into logits; the embedding's own when tied."""
        return self.tok_embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew: normal with `init_std`, residual projections with `init_std / sqrt(2 n_layer)`.

        Biases and the padded vocabulary's rows are zero, norms one. Takes one number from torch's CPU generator, so it
        follows `torch.manual_seed`; every layout (one process, DDP, shards of any size) on one kind of device draws the
        same weights, because sharded parameters are drawn whole and cut.
        """
        std = self.config.init_std
        seed = int(torch.randint(2**62, (), device="cpu"))
        generators: dict[torch.device, torch.Generator] = {}

        def draw(parameter: Tensor, std: float) -> None:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            full.normal_(0.0, std, generator=generators[device])
            if parameter is self.tok_embedding.weight or (
                self.head is not None and parameter is self.head.weight
            ):
                full[self.config.vocab_size :] = 0.0
            _fill(parameter, full)

        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                is_residual = name.startswith("blocks.") and name.endswith(".proj")
                draw(module.weight, std / math.sqrt(2 * self.config.n_layer) if is_residual else std)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.weight.fill_(1.0)
            if (bias := getattr(module, "bias", None)) is not None:
                bias.zero_()
        if self.config.position == "rope":
            self._rope = rope_tables(self.config, self.tok_embedding.weight.device)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits, or the loss when targets are given.

        The loss is computed here and not by the caller so that FSDP's root has the head and the embedding gathered.

        Args:
            inputs: tokens (B, T) int64, T at most the context length.
            targets: the tokens to predict (B, T) int64; -100 is not trained.
            segment_ids: the document of each token (B, T) int64, only with `in_document_attention`; a run of equal ids is
                one document. None: each row is one document.

        Returns:
            Without targets: logits (B, T, V). With targets: the fp32 sum of cross-entropies in nats over targets that
            are not -100, and their number (int64); with none of them the sum is 0 and its gradient zero.

        Raises:
            ValueError: a sequence longer than the context, or segment_ids for a model that does not use them.
        """
        x = self._hidden(inputs, segment_ids)
        if targets is None:
            return F.linear(x, self.head_weight)[..., : self.config.vocab_size]
        loss_sum = linear_cross_entropy_sum(
            x.flatten(0, 1), self.head_weight, targets.flatten(), self.config.vocab_size
        )
        return loss_sum, (targets != IGNORE_INDEX).sum()

    def forward_cached(self, inputs: Tensor, cache: KVCache) -> Tensor:
        """Return logits (B, V) of the last of T new tokens, which follow those in the cache; the cache takes them up."""
        x = self._hidden(inputs, None, cache)
        cache.length += inputs.size(1)
        return F.linear(x[:, -1], self.head_weight)[:, : self.config.vocab_size]

    def _hidden(self, inputs: Tensor, segment_ids: Tensor | None, cache: KVCache | None = None) -> Tensor:
        """Run everything below the head: tokens (B, T) to normed hidden states (B, T, D)."""
        past = 0 if cache is None else cache.length
        size = inputs.size(1)
        if past + size > self.config.context_length:
            raise ValueError(
                f"a sequence of {past + size} tokens does not fit context_length={self.config.context_length}: "
                "cut the input or build the model with a longer context"
            )
        x = self.tok_embedding(inputs)
        shared = Shared(cache=cache)
        positions: Tensor | slice = slice(past, past + size)
        if segment_ids is not None:
            if not self.config.in_document_attention:
                raise ValueError(
                    "segment_ids were given, but in_document_attention is off and they would be ignored: "
                    "set it in GPTConfig, or leave segment_ids out of the batch"
                )
            starts, positions = document_runs(segment_ids)
            dtype = (
                torch.get_autocast_dtype(x.device.type)
                if torch.is_autocast_enabled(x.device.type)
                else x.dtype
            )
            if has_varlen_kernel(x.device, dtype, self.config.dropout if self.training else 0.0):
                shared.cu_seqlens = document_borders(starts)
            else:
                shared.mask = document_mask(starts)
        elif past and size > 1:
            shared.mask = torch.ones(size, past + size, dtype=torch.bool, device=x.device).tril(past)
        if self.pos_embedding is not None:
            if isinstance(positions, slice):
                positions = torch.arange(past, past + size, device=x.device)
            x = x + self.pos_embedding(positions)
        else:
            if self._rope is None or self._rope[0].device != x.device:
                self._rope = rope_tables(self.config, x.device)
            shared.cos, shared.sin = self._rope[0][positions], self._rope[1][positions]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, shared)
        return self.norm_f(x)


def _fill(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter; into its own shard alone if the parameter is a DTensor."""
    if type(parameter.data) is Tensor:
        parameter.copy_(full)
        return
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter.data, DTensor):
        parameter.copy_(full)
        return
    mesh = parameter.data.device_mesh
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.copy_(whole.redistribute(placements=parameter.data.placements))
