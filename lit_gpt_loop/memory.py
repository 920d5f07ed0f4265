"""Memory of one device during training, by part, predicted from shapes alone (layer P, standard library only).

What is live when, in one update; the peak is the highest of these moments:

    loss       parameters, moments, all activations, low-precision copies; + the loss' chunks of logits, or all logits
    backward   activations shrink from the last block on while gradients grow; + the temporaries of the block at work
    embedding  all gradients; + the embedding's dense gradient, beside that of a tied head
    step       parameters, moments, gradients (fused AdamW makes no copies)

and, with several micro-batches per update, the gradients of the earlier ones throughout. Activations are counted tensor by
tensor as `model.py` saves them for backward, each storage once, in eager mode; compile may save less. Tests hold the
sum against the allocator of real updates on CPU. Not counted: the framework itself (a CUDA context with NCCL takes 0.5 to
2 GiB), workspaces of libraries, fragmentation: `largest_micro_batch` leaves `RESERVED_SHARE` of the device free for them.

Master weights: under bf16-mixed the parameters are the fp32 masters; what autocast adds is a low-precision copy of each matrix,
from its use in forward to its use in backward. The copies are whole on each device even where the masters are sharded,
unless the strategy gathers in low precision (`Layout.gathers_low`). bf16-true keeps no masters.

Symbols: N tokens of a micro-batch, D width, P padded vocabulary, H query heads, G key-value heads, C channels per head, M MLP width.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.flops import count_parameters

Strategy = Literal["single", "ddp", "fsdp", "fsdp2", "hybrid"]
STRATEGIES: tuple[Strategy, ...] = ("single", "ddp", "fsdp", "fsdp2", "hybrid")
RESERVED_SHARE = 0.08
GIB = 2**30

# Lightning's precision -> bytes of (a parameter or gradient, a number in a matmul, a moment). Under mixed precision the
# residual stream has the parameters' width.
PRECISION_BYTES: dict[str, tuple[int, int, int]] = {
    "32-true": (4, 4, 4),
    "bf16-mixed": (4, 2, 4),
    "16-mixed": (4, 2, 4),
    "bf16-true": (2, 2, 2),
    "16-true": (2, 2, 2),
}


@dataclass(frozen=True)
class Layout:
    """How the state is spread over devices.

    Attributes:
        strategy: "single", "ddp" (a copy on each device), "fsdp" / "fsdp2" (sharded over all) or "hybrid" (sharded over
            `shard_size` devices, usually a node, and copied between such groups).
        num_devices: devices of the job.
        shard_size: devices that share one copy of the state; "hybrid" only.
        syncs_every_micro_batch: reduce gradients at each micro-batch; off, sharded strategies hold a window's gradients whole.
        gathers_low: sharded strategies gather parameters in low precision (FSDP's `param_dtype`); autocast then has
            nothing to copy.
    """

    strategy: Strategy = "single"
    num_devices: int = 1
    shard_size: int | None = None
    syncs_every_micro_batch: bool = False
    gathers_low: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is unknown: use one of {', '.join(STRATEGIES)}")
        if self.num_devices < 1 or (self.strategy == "single" and self.num_devices != 1):
            raise ValueError(
                f"num_devices={self.num_devices} does not suit strategy {self.strategy!r}: 'single' has 1, others at least 1"
            )
        if self.strategy == "hybrid" and (not self.shard_size or self.num_devices % self.shard_size):
            raise ValueError(
                f"shard_size={self.shard_size} must divide num_devices={self.num_devices}: it is the number of devices that "
                "share one copy of the state, usually those of one node"
            )

    @property
    def num_shards(self) -> int:
        """Parts that one copy of the state is cut into."""
        if self.strategy in ("fsdp", "fsdp2"):
            return self.num_devices
        return (self.shard_size or 1) if self.strategy == "hybrid" else 1


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device at the peak, by part.

    Attributes:
        parameters: parameters (this device's shard); under mixed precision they are the fp32 master weights.
        gradients: gradients, reduced or not.
        moments: AdamW's two.
        low_precision: autocast's copies of matrices.
        gathered: under sharding, whole parameters of the blocks at work.
        activations: saved for backward.
        logits: the loss' buffers: logits or chunks of them, and the gradients that it makes in forward.
        temporaries: of the block at work.
        moment: when the peak is: "loss", "backward", "embedding" or "step".
    """

    parameters: float = 0.0
    gradients: float = 0.0
    moments: float = 0.0
    low_precision: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    temporaries: float = 0.0
    moment: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """Part -> bytes, in the order of the fields."""
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def peak(self) -> float:
        """Bytes live at the peak."""
        return math.fsum(self.parts.values())


def plan_memory(
    config: GPTConfig,
    micro_batch: int,
    layout: Layout | None = None,
    precision: str = "bf16-mixed",
    accumulation: int = 1,
    device_type: str = "cuda",
) -> MemoryPlan:
    """Return what one device holds at the peak of an update, once the optimizer has its moments.

    Args:
        config: the shape, activation checkpointing included.
        micro_batch: sequences of `config.context_length` tokens on the device at a time.
        layout: strategy and devices; None is one device.
        precision: Lightning's name, a key of `PRECISION_BYTES`.
        accumulation: micro-batches per update.
        device_type: "cuda" or "cpu": their kernels save different tensors.

    Raises:
        ValueError: an unknown precision, or a number below 1.
    """
    layout = layout or Layout()
    param, low, moment = precision_bytes(precision)
    if micro_batch < 1 or accumulation < 1:
        raise ValueError(f"micro_batch={micro_batch} and accumulation={accumulation} must be at least 1")
    shards, L, every = layout.num_shards, config.n_layer, config.activation_checkpointing
    size = Sizes.of(config)
    acts = Activations.of(config, micro_batch, precision, device_type)
    loss = LossBuffers.of(config, micro_batch, precision, device_type)
    is_sharded, is_checkpointed = shards > 1, [every > 0 and i % every == 0 for i in range(L)]
    copies = 0 if is_sharded and layout.gathers_low else (low if low < param else 0)
    gather = low if layout.gathers_low else param

    # Gradients that stand from the start (DDP's buckets, earlier micro-batches), and what a new one adds for a while.
    if layout.strategy == "ddp" or (
        accumulation > 1 and (not is_sharded or not layout.syncs_every_micro_batch)
    ):
        standing, kept_share = float(size.total * param), 0.0
    else:
        standing = size.total * param / shards if accumulation > 1 else 0.0
        kept_share = 0.0 if standing else 1.0 / shards
    if is_sharded:
        fresh = size.block * (param + 4.0)  # whole, and packed in fp32 for the reduction
    else:
        fresh = float(size.largest_matrix * param) if standing else 0.0
    state = {
        "parameters": size.total * param / shards,
        "moments": 2.0 * size.total * moment / shards,
        # the root's, the block at work, the next one on its way and its communication buffer
        "gathered": (size.root + min(3, L + 1) * size.block) * gather if is_sharded else 0.0,
    }
    head_grad = 0.0 if standing and size.head else size.vocabulary * param
    saved = [acts.block_input if c else acts.block for c in is_checkpointed]
    copied = size.block_matrices * copies
    moments = [
        MemoryPlan(
            **state,
            gradients=standing,
            low_precision=L * copied,
            activations=sum(saved) + acts.root,
            logits=loss.in_forward,
            moment="loss",
        ),
        MemoryPlan(
            **state,
            gradients=standing,
            low_precision=sum(copied for c in is_checkpointed if not c),
            activations=sum(saved) + acts.root,
            logits=loss.in_backward,
            moment="loss",
        ),
    ]
    for layer in range(L):
        done = L - 1 - layer
        again = is_checkpointed[layer]
        moments.append(
            MemoryPlan(
                **state,
                gradients=standing + (done * size.block + size.mlp_out) * param * kept_share + fresh,
                low_precision=copied * (sum(not c for c in is_checkpointed[: layer + 1]) + again),
                activations=sum(saved[:layer]) + acts.block + acts.root_input,
                logits=head_grad,
                temporaries=acts.temporaries,
                moment="backward",
            )
        )
    root_rest = (size.root - size.vocabulary * (2 if size.head else 1)) * param
    moments.append(
        MemoryPlan(
            **state,
            gradients=standing + L * size.block * param * kept_share + (0.0 if standing else root_rest),
            activations=acts.root_input,
            logits=head_grad,
            temporaries=acts.residual + size.vocabulary * param,
            moment="embedding",
        )
    )
    whole = layout.strategy == "ddp" or not is_sharded
    moments.append(
        MemoryPlan(
            parameters=state["parameters"],
            moments=state["moments"],
            gradients=size.total * param / (1 if whole else shards),
            moment="step",
        )
    )
    return max(moments, key=lambda m: m.peak)


def largest_micro_batch(
    config: GPTConfig,
    device_bytes: float,
    layout: Layout | None = None,
    precision: str = "bf16-mixed",
    accumulation: int = 1,
    device_type: str = "cuda",
    limit: int = 4096,
) -> int:
    """Return the most sequences whose peak fits in `device_bytes` less `RESERVED_SHARE`; 0 when not even one does."""
    usable = device_bytes * (1.0 - RESERVED_SHARE)

    def fits(n: int) -> bool:
        return plan_memory(config, n, layout, precision, accumulation, device_type).peak <= usable

    fitting, too_many = 0, limit + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


def precision_bytes(precision: str) -> tuple[int, int, int]:
    """Return the bytes of (a parameter, a number in a matmul, a moment) for Lightning's name of a precision."""
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
        """Count them for a micro-batch of full sequences."""
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
        if (
            is_cpu and drops
        ):  # explicit attention: softmax, its mask, what is left; scaled copies of queries, keys, values
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
        """Count them for the way that `cross_entropy.py` takes with this shape and precision."""
        param, low, _ = precision_bytes(precision)
        N, D, P = micro_batch * config.context_length, config.n_embd, config.padded_vocab_size
        if not has_chunked_loss(config, micro_batch):
            copies = (N + P) * D * low if low < param else 0
            # Logits in fp32 and their log-softmax; then that, its gradient and the logits' gradient.
            return cls(8.0 * N * P + copies, 12.0 * N * P + copies)
        if low == 2 and precision.startswith("bf16"):
            budget = 2**24 if device_type == "cpu" else 2**27  # as cross_entropy.chunk_tokens
            chunk = max(1, min(N, budget // P))
            # Per logit: fp32 logits and log-softmax, bf16 gradient; those of the chunk before while the next one is made.
            while_made = chunk * P * (16.0 if chunk < N else 10.0)
            # The bf16 product for the head's gradient, which CPU casts to fp32 in order to add it.
            while_added = chunk * P * 10.0 + P * D * (2 + (4 if device_type == "cpu" else 0))
            held = N * D * 2 * 2 + P * D * (2 + 4)  # hidden states and head in bf16, and their gradients
            return cls(held + max(while_made, while_added), P * D * 4 + N * D * (2 + 2 + param))
        # torch's kernel: logits of a chunk in fp32, gradients of hidden states and head, no scratch. Its backward is given a
        # gradient for each of its outputs, zeros for those two.
        chunk = max(1, 2 ** math.ceil(math.log2(math.ceil(N / math.ceil(P / D)))) // 2)
        gradients = (N + P) * D * 4.0
        return cls(chunk * (P + 2 * D) * 4.0 + gradients, 2.0 * gradients)


def has_chunked_loss(config: GPTConfig, micro_batch: int) -> bool:
    """Whether the loss goes chunk by chunk and never holds all logits (the rule of `cross_entropy.py`)."""
    return micro_batch * config.context_length >= config.n_embd < config.vocab_size
