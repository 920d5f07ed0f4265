"""What the parts of a model hold in memory: parameters, tensors saved for backward, buffers of the loss (layer P).

Counted tensor by tensor as `model.py` saves them for backward and `cross_entropy.py` makes them, each storage once, in eager
mode. `memory.py` adds them up over an update and a layout.

Symbols: N tokens of a micro-batch, T per sequence, L layers, D width, P padded vocabulary, H query heads, G key-value heads, C channels
per head, M MLP width; bytes `res` per number of the residual stream, `low` per number in a matmul.
"""

from dataclasses import dataclass

from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.flops import count_parameters

# Lightning's precision -> bytes of (a parameter or gradient, a number in a matmul, a moment). Under mixed precision the
# residual stream has the parameters' width.
PRECISION_BYTES: dict[str, tuple[int, int, int]] = {
    "32-true": (4, 4, 4),
    "bf16-mixed": (4, 2, 4),
    "16-mixed": (4, 2, 4),
    "bf16-true": (2, 2, 2),
    "16-true": (2, 2, 2),
}


def precision_bytes(precision: str) -> tuple[int, int, int]:
    """Return the bytes of (a parameter, a number in a matmul, a moment) for Lightning's name of a precision.

    Raises:
        ValueError: the precision is none of `PRECISION_BYTES`.
    """
    aliases = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
    key = aliases.get(str(precision), str(precision))
    if key not in PRECISION_BYTES:
        raise ValueError(f"precision {precision!r} is unknown: use one of {', '.join(PRECISION_BYTES)}")
    return PRECISION_BYTES[key]


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, the padded vocabulary's rows included, since they take memory."""

    block: int
    block_matrices: int
    largest_matrix: int
    mlp_out: int
    vocabulary: int  # P x D: the embedding, and the head when it is another
    head: int  # 0 when tied
    root: int  # all that no block holds
    total: int

    @classmethod
    def of(cls, config: GPTConfig) -> "Sizes":
        """Count them."""
        counts = count_parameters(config)
        D, M, L = config.n_embd, config.hidden_size, config.n_layer
        qkv = D * (config.n_head + 2 * config.num_kv_heads) * config.head_dim
        mlp_in = D * M * (2 if config.mlp == "swiglu" else 1)
        final_norm = D * (1 + (config.norm == "layernorm" and config.bias))
        block = (counts.attention + counts.mlp + counts.norms - final_norm) // L
        vocabulary = config.padded_vocab_size * D
        head = 0 if config.tie_embeddings else vocabulary
        root = vocabulary + head + counts.position_embedding + final_norm
        return cls(
            block=block,
            block_matrices=qkv + D * D + mlp_in + M * D,
            largest_matrix=max(qkv, mlp_in, M * D, vocabulary),
            mlp_out=M * D,
            vocabulary=vocabulary,
            head=head,
            root=root,
            total=root + L * block,
        )


@dataclass(frozen=True)
class Activations:
    """Bytes saved for backward.

    Attributes:
        block: by one block, its input included.
        block_input: all that a checkpointed block keeps.
        root: by the last norm, beside the blocks; with the hidden states that the loss reads.
        root_input: token ids and masks, held to the end.
        residual: one residual stream.
        temporaries: the most that a block's backward holds beyond `block`, in its MLP.
    """

    block: float
    block_input: float
    root: float
    root_input: float
    residual: float
    temporaries: float

    @classmethod
    def of(cls, config: GPTConfig, micro_batch: int, precision: str, device_type: str) -> "Activations":
        """Count them for a micro-batch of full sequences.

        Args:
            config: the shape; activation checkpointing is `memory.py`'s business.
            micro_batch: sequences of `config.context_length` tokens.
            precision: Lightning's name.
            device_type: "cuda" or "cpu".

        Raises:
            ValueError: an unknown precision.
        """
        res, low, _ = precision_bytes(precision)
        T, D, M = config.context_length, config.n_embd, config.hidden_size
        H, G, C = config.n_head, config.num_kv_heads, config.head_dim
        is_cpu, is_gated, drops = device_type == "cpu", config.mlp == "swiglu", config.dropout > 0
        N = micro_batch * T
        # A norm saves its input and fp32 statistics; RMSNorm on CPU has no fused kernel and saves the normed input too.
        norm = D * res + (8 if config.norm == "layernorm" else 4)
        if config.norm == "rmsnorm" and is_cpu:
            norm += D * 4
        mask = (low if is_cpu else 1) if drops else 0  # bytes per number of a dropout mask
        attention = float(D * low + (H + 2 * G) * C * low)  # input of qkv; queries, keys, values
        if config.position == "rope":
            attention += (H + G) * C * low  # rotated copies
        if config.qk_norm:
            attention += (H + G) * (4 + C * (8 if is_cpu and low < 4 else 4))
        if is_cpu and drops:
            # Explicit attention: softmax, its mask, what is left of it; scaled copies of queries, keys, values.
            attention += 12 * H * T + 3 * H * C * 4 + D * low - (H + 2 * G) * C * low
        else:
            attention += D * low + 4 * H  # output and log-sum-exp
        if config.in_document_attention and is_cpu:
            attention += T * (1 + low) / config.n_layer  # the mask, shared by all blocks
        mlp = D * low + (4 if is_gated else 2) * M * low
        block = N * (2 * norm + attention + mlp + 2 * D * mask)
        return cls(
            block=block,
            block_input=N * D * res,
            root=N * (norm + D * res),
            root_input=N * (16 + (D * (res if is_cpu else 1) if drops else 0)),
            residual=N * D * res,
            temporaries=N * (D * res + (D * low if low < res else 0) + (2 if is_gated else 1) * M * low),
        )


@dataclass(frozen=True)
class LossBuffers:
    """Bytes of the loss beyond the hidden states: at its highest in forward, and in backward."""

    in_forward: float
    in_backward: float

    @classmethod
    def of(cls, config: GPTConfig, micro_batch: int, precision: str, device_type: str) -> "LossBuffers":
        """Count them for the way that `cross_entropy.py` takes with this shape and precision.

        Raises:
            ValueError: an unknown precision.
        """
        param, low, _ = precision_bytes(precision)
        N, D, P = micro_batch * config.context_length, config.n_embd, config.padded_vocab_size
        if not has_chunked_loss(config, micro_batch):
            copies = (N + P) * D * low if low < param else 0
            # Logits in fp32 and their log-softmax; then that, its gradient and the logits' gradient.
            return cls(8.0 * N * P + copies, 12.0 * N * P + copies)
        chunk = chunk_tokens(N, P, device_type)
        if low == 2 and precision.startswith("bf16"):
            # Per logit: fp32 logits and log-softmax, bf16 gradient; those of the chunk before while the next one is made.
            while_made = chunk * P * (16.0 if chunk < N else 10.0)
            # The bf16 product for the head's gradient, which CPU casts to fp32 in order to add it.
            while_added = chunk * P * 10.0 + P * D * (2 + (4 if device_type == "cpu" else 0))
            held = N * D * 2 * 2 + P * D * (2 + 4)  # hidden states and head in bf16, and their gradients
            # The gradient of the hidden states is scaled in place, after a cast to fp32 where leaves are.
            return cls(
                held + max(while_made, while_added), P * D * 4 + N * D * (2 + (param if param > 2 else 0))
            )
        # torch's kernel: logits of a chunk in fp32, gradients of hidden states and head, no scratch. Its backward is given a
        # gradient for each of its outputs, zeros for those two.
        gradients = (N + P) * D * 4.0
        return cls(chunk * (P + 2 * D) * 4.0 + gradients, 2.0 * gradients)


def chunk_tokens(num_tokens: int, padded_vocab_size: int, device_type: str) -> int:
    """Return how many tokens' logits a chunked loss holds at once (the rule that `cross_entropy.py` follows).

    On CPU 2^21 logits (8 MiB in fp32, which a cache holds: 1.4 times faster at 4,096 words than all in one), but at least 256
    tokens, below which each chunk's sum into the head's gradient costs more than its matmuls. Elsewhere 2^27 logits.
    """
    limit = (
        max(256, 2**21 // padded_vocab_size) if device_type == "cpu" else max(1, 2**27 // padded_vocab_size)
    )
    return min(num_tokens, limit)


def has_chunked_loss(config: GPTConfig, micro_batch: int) -> bool:
    """Whether the loss goes chunk by chunk and never holds all logits (the rule of `cross_entropy.py`)."""
    return micro_batch * config.context_length >= config.n_embd < config.vocab_size
