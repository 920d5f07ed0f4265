"""Memory of one device during training, by part, predicted from shapes alone (layer P, standard library only).

What is live when, in one update; the peak is the highest of these moments:

    loss       parameters, moments, all activations, low-precision copies; + the loss' chunks of logits, or all logits
    backward   activations shrink from the last block on while gradients grow; + the temporaries of the block at work
    embedding  all gradients; + the embedding's dense gradient, beside that of a tied head
    step       parameters, moments, gradients (fused AdamW makes no copies)

and, with several micro-batches per update, the gradients of the earlier ones throughout. Activations are counted tensor by
tensor in `activations.py`. Tests hold the sum against the allocator of real updates on CPU: within 10% on one device and DDP,
sharded within 25%. A communication buffer lives until its collective's thread lets go of it, so of two ranks the lower peak is
taken; the other is now and then one copy of the gradients above. Not counted: the framework itself (a CUDA context with NCCL
takes 0.5 to 2 GiB), workspaces of libraries, fragmentation: `largest_micro_batch` leaves `RESERVED_SHARE` of the device free.

Master weights: under bf16-mixed the parameters are the fp32 masters; what autocast adds is a low-precision copy of each matrix,
from its use in forward to its use in backward. The copies are whole on each device even where the masters are sharded,
unless the strategy gathers in low precision (`Layout.gathers_low`). bf16-true keeps no masters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lit_gpt_loop.activations import Activations, LossBuffers, Sizes, has_chunked_loss, precision_bytes
from lit_gpt_loop.config import GPTConfig

Strategy = Literal["single", "ddp", "fsdp", "fsdp2", "hybrid"]
STRATEGIES: tuple[Strategy, ...] = ("single", "ddp", "fsdp", "fsdp2", "hybrid")
RESERVED_SHARE = 0.08
MAX_MICRO_BATCH = 4096  # where the search ends if no batch bounds it
GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """How the state is spread over devices.

    Attributes:
        strategy: "single", "ddp" (a copy on each device), "fsdp" / "fsdp2" (sharded over all) or "hybrid" (sharded over
            `shard_size` devices, usually a node, and copied between such groups).
        num_devices: devices of the job.
        shard_size: devices that share one copy of the state; "hybrid" only.
        syncs_every_micro_batch: reduce gradients at each micro-batch. Off, sharded strategies hold a window's gradients whole,
            and DDP holds them outside of its buckets.
        gathers_low: sharded strategies gather parameters in low precision (FSDP's `param_dtype`); autocast then has
            nothing to copy.
        keeps_gathered: FSDP1's SHARD_GRAD_OP: parameters stay whole from forward to the end of backward.
    """

    strategy: Strategy = "single"
    num_devices: int = 1
    shard_size: int | None = None
    syncs_every_micro_batch: bool = False
    gathers_low: bool = False
    keeps_gathered: bool = False

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

    @property
    def is_fsdp1(self) -> bool:
        """Whether `FullyShardedDataParallel` shards; hybrid sharding is one of its modes."""
        return self.strategy in ("fsdp", "hybrid")


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
    """Return what one device holds at the peak of an update: the highest of `plan_moments`, which has the same arguments."""
    moments = plan_moments(config, micro_batch, layout, precision, accumulation, device_type)
    return max(moments, key=lambda m: m.peak)


def part_maxima(moments: Sequence[MemoryPlan]) -> dict[str, float]:
    """Return part -> the most bytes that it takes at any moment. Parts peak at different moments: the sum is above the peak."""
    return {part: max(m.parts[part] for m in moments) for part in moments[0].parts}


def plan_moments(
    config: GPTConfig,
    micro_batch: int,
    layout: Layout | None = None,
    precision: str = "bf16-mixed",
    accumulation: int = 1,
    device_type: str = "cuda",
) -> list[MemoryPlan]:
    """Return what one device holds at each moment of an update, once the optimizer has its moments.

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
        if layout.strategy == "ddp" and accumulation > 1 and not layout.syncs_every_micro_batch:
            standing *= 2  # micro-batches without an exchange add up outside of the buckets
    else:
        standing = size.total * param / shards if accumulation > 1 else 0.0
        kept_share = 0.0 if standing else 1.0 / shards
    if is_sharded:
        fresh = size.block * (param + 4.0)  # whole, and packed in fp32 for the reduction
    else:
        fresh = float(size.largest_matrix * param) if standing else 0.0
    # The root's, the block at work, the next one on its way; FSDP2 copies that out of its communication buffer.
    gathered = size.root + (2 if layout.is_fsdp1 else 3) * size.block
    if layout.keeps_gathered and layout.is_fsdp1:
        gathered = size.total
    state = {
        "parameters": size.total * param / shards,
        "moments": 2.0 * size.total * moment / shards,
        "gathered": float(gathered * gather) if is_sharded else 0.0,
    }
    head_grad = 0.0 if standing and size.head else size.vocabulary * param
    saved = [acts.block_input if c else acts.block for c in is_checkpointed]
    copied = size.block_matrices * copies
    moments = [
        MemoryPlan(
            **state,
            gradients=standing,
            # Autocast keeps copies of checkpointed blocks to the end of forward; not under FSDP1, whose parameters are views.
            low_precision=copied * (L - (sum(is_checkpointed) if layout.is_fsdp1 else 0)),
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
    # A tied head's gradient and the embedding's are added: in place, but not if the first is a transposed product of logits.
    sums = 2 if size.head == 0 and not has_chunked_loss(config, micro_batch) else 1
    root_rest = (size.root - size.vocabulary * (2 if size.head else 1)) * param
    moments.append(
        MemoryPlan(
            **state,
            gradients=standing + L * size.block * param * kept_share + (0.0 if standing else root_rest),
            activations=acts.root_input,
            logits=head_grad,
            temporaries=acts.residual + size.vocabulary * param * sums,
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
    return moments


@dataclass(frozen=True)
class Fit:
    """The largest micro-batch that fits on a device.

    Attributes:
        micro_batch: sequences; 0 when not even one fits, or none can.
        accumulation: micro-batches per update that go with it; 0 with `micro_batch` 0.
        limit: what keeps it from being larger. "memory"; "batch": it is the device's whole share of an update; "search": it is
            `MAX_MICRO_BATCH`, where the search ends; "devices": an update's sequences do not divide over the devices.
    """

    micro_batch: int
    accumulation: int
    limit: Literal["memory", "batch", "search", "devices"]


def largest_micro_batch(
    config: GPTConfig,
    device_bytes: float,
    layout: Layout | None = None,
    precision: str = "bf16-mixed",
    device_type: str = "cuda",
    global_batch: int | None = None,
    accumulation: int = 1,
) -> Fit:
    """Return the most sequences whose peak fits in `device_bytes` less `RESERVED_SHARE`.

    Args:
        config: as for `plan_moments`, like layout, precision and device type.
        device_bytes: memory of the device.
        layout: strategy and devices.
        precision: Lightning's name.
        device_type: "cuda" or "cpu".
        global_batch: sequences per update over all devices. The micro-batch then divides a device's share of it, and the
            accumulation follows. None: an update is `accumulation` micro-batches of whatever size.
        accumulation: micro-batches per update; read without `global_batch` only.

    Raises:
        ValueError: an unknown precision, or a number below 1.
    """
    layout = layout or Layout()
    usable = device_bytes * (1.0 - RESERVED_SHARE)

    def fits(n: int, micro_batches: int) -> bool:
        return plan_memory(config, n, layout, precision, micro_batches, device_type).peak <= usable

    if global_batch is None:
        fitting, too_many = 0, MAX_MICRO_BATCH + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            fitting, too_many = (middle, too_many) if fits(middle, accumulation) else (fitting, middle)
        limit: Literal["memory", "search"] = "search" if fitting == MAX_MICRO_BATCH else "memory"
        return Fit(fitting, accumulation if fitting else 0, limit)
    share, rest = divmod(global_batch, layout.num_devices)
    if rest or not share:
        return Fit(0, 0, "devices")
    for micro_batches in (k for k in range(1, share + 1) if share % k == 0):
        if fits(share // micro_batches, micro_batches):
            return Fit(share // micro_batches, micro_batches, "batch" if micro_batches == 1 else "memory")
    return Fit(0, 0, "memory")
