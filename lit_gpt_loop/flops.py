"""Parameters and floating-point operations of a GPT, counted from its shape alone.

The convention that `perf/mfu` uses is 6N per trained token: each parameter of a matrix costs one multiply and one add in
forward and twice that in backward (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1).

What N is here, and where others depart:

- N counts the weights of matrices that multiply activations: attention, MLP and the head, tied or not, once. Looking up an
  embedding is no multiplication, so embedding and position tables do not count unless the table is the head (Kaplan leave
  out the head as well; nanoGPT counts all parameters but the position table; nanochat leaves out every embedding).
- Biases and norm gains do not count: they are no matrices (below 0.1% of any real model).
- The padded vocabulary's rows count nowhere: they are never predicted.
- 6N has no attention term. Chowdhery et al. 2022 ("PaLM", appendix B) add 12 L H C T per token for the two products with T
  keys; `attention_flops_per_token` gives it for those who compare with published figures. A causal kernel does about half.
- Recomputation is not useful work: MFU leaves it out, HFU adds `recomputed_flops_per_token`.

Standard library only. Symbols: L layers, D width, H heads, G key-value heads, C channels per head, M MLP width, V vocabulary,
B rows, T tokens per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_gpt_loop.config import GPTConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part; padding rows excluded. `head` is 0 when the embedding's matrix serves as the head."""

    token_embedding: int
    position_embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All trainable parameters: what a checkpoint holds, the padded vocabulary's rows aside."""
        return (
            self.token_embedding
            + self.position_embedding
            + self.attention
            + self.mlp
            + self.norms
            + self.head
        )


def count_parameters(config: GPTConfig) -> ParameterCount:
    """Return the number of parameters by part, biases included with the matrix that they belong to."""
    D, L = config.n_embd, config.n_layer
    bias = int(config.bias)
    qkv, attention_out, mlp_in, mlp_out = _block_matrices(config)
    gains_per_norm = D * (1 + bias) if config.norm == "layernorm" else D
    qk_gains = 2 * config.head_dim if config.qk_norm else 0
    return ParameterCount(
        token_embedding=config.vocab_size * D,
        position_embedding=config.context_length * D if config.position == "learned" else 0,
        attention=L * (qkv + attention_out + bias * (qkv // D + D)),
        mlp=L * (mlp_in + mlp_out + bias * (mlp_in // D + D)),
        norms=L * (2 * gains_per_norm + qk_gains) + gains_per_norm,
        head=0 if config.tie_embeddings else config.vocab_size * D,
    )


def num_matmul_params(config: GPTConfig) -> int:
    """Return N of 6N: weights of the matrices that multiply activations, the head included, tied or not, once."""
    return config.n_layer * sum(_block_matrices(config)) + config.vocab_size * config.n_embd


def flops_per_token(config: GPTConfig) -> float:
    """Return 6N: useful FLOPs per trained token, forward and backward (Kaplan et al. 2020)."""
    return 6.0 * num_matmul_params(config)


def attention_flops_per_token(config: GPTConfig, sequence_length: int | None = None) -> float:
    """Return PaLM's attention term 12 L H C T per token (forward and backward, no causal discount).

    Args:
        config: the shape.
        sequence_length: T; None means the context length.
    """
    T = config.context_length if sequence_length is None else sequence_length
    return 12.0 * config.n_layer * config.n_head * config.head_dim * T


def recomputed_flops_per_token(config: GPTConfig) -> float:
    """Return the extra forward FLOPs per token that activation checkpointing costs; 0.0 when it is off.

    Counted as 6N counts: matrices only, 2 FLOPs per weight. Without dropout torch stops a recomputation at the last tensor
    that backward needs, which spares the MLP's output projection.
    """
    every = config.activation_checkpointing
    if every == 0:
        return 0.0
    num_blocks = math.ceil(config.n_layer / every)  # layers 0, every, 2 every, ...
    *others, mlp_out = _block_matrices(config)
    spared = mlp_out if config.dropout == 0 else 0
    return 2.0 * num_blocks * (sum(others) + mlp_out - spared)


def matmul_flops(config: GPTConfig, batch_size: int, sequence_length: int) -> tuple[int, int]:
    """Return the exact FLOPs of all matrix products in one forward and in its backward.

    Attention is counted in full, masked half included, as `torch.utils.flop_counter` counts it and as explicit matmuls do;
    fused kernels skip most of the masked half but redo the scores in backward. Recomputation is not included. The head is
    counted with its padding rows, which the hardware does multiply.
    """
    B, T = batch_size, sequence_length
    matrices = config.n_layer * sum(_block_matrices(config)) + config.padded_vocab_size * config.n_embd
    scores_and_values = 2 * B * T * T * config.n_head * config.head_dim  # multiply-adds of the two products
    forward = 2 * B * T * matrices + 2 * config.n_layer * scores_and_values
    return forward, 2 * forward


def _block_matrices(config: GPTConfig) -> tuple[int, int, int, int]:
    """Return the weights in a block's four matrices: fused qkv, attention output, MLP in (gate and up), MLP out."""
    D, M = config.n_embd, config.hidden_size
    qkv = D * (config.n_head + 2 * config.num_kv_heads) * config.head_dim
    return qkv, D * D, D * M * (2 if config.mlp == "swiglu" else 1), M * D
