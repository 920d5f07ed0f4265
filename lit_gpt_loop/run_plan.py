"""A whole run on paper: from what the configuration says to what it will take (layer P, standard library only).

`RunSpec` (`run_spec.py`) is the question, `plan_run` answers with a `RunPlan` of plain numbers, which `recipes.plan` prints, writes to
plan.json and, with `--against RUN`, holds against what was measured (`plan_check.py`). The arithmetic is in `budget.py`,
`flops.py`, `memory.py` and `schedules.py`.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from lit_gpt_loop import budget
from lit_gpt_loop.activations import Sizes, precision_bytes
from lit_gpt_loop.config import PRESETS, GPTConfig
from lit_gpt_loop.flops import (
    attention_flops_per_token,
    count_parameters,
    flops_per_token,
    num_matmul_params,
    recomputed_flops_per_token,
)
from lit_gpt_loop.memory import (
    Fit,
    Layout,
    MemoryPlan,
    Strategy,
    largest_micro_batch,
    part_maxima,
    plan_memory,
    plan_moments,
)
from lit_gpt_loop.run_spec import Kept, Retention, RunSpec
from lit_gpt_loop.sample_order import accumulation
from lit_gpt_loop.schedules import Schedule, ScheduleSummary, summarize


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds.

    Attributes:
        peak_bytes: the most at any moment.
        at_peak: parts at that moment, bytes.
        maxima: part -> its own most at any moment, bytes; together above the peak.
        fit: the largest micro-batch; None where the device's memory is not known.
    """

    peak_bytes: float
    at_peak: MemoryPlan
    maxima: dict[str, float]
    fit: Fit | None


@dataclass(frozen=True)
class MemoryRow:
    """One layout at the configured micro-batch.

    Attributes:
        strategy: of the layout.
        num_devices: all devices.
        as_configured: whether it is the run's own.
        accumulation: micro-batches per update, with which the memory is counted.
        divides: whether an update divides into such micro-batches over so many devices; else the run would be refused.
        plain: without recomputation.
        checkpointed: with activation checkpointing, at the configured interval or else of every block.
    """

    strategy: Strategy
    num_devices: int
    as_configured: bool
    accumulation: int
    divides: bool
    plain: DeviceMemory
    checkpointed: DeviceMemory


@dataclass(frozen=True)
class CheckpointPlan:
    """What saving takes and what failures cost; None where something it needs is not known.

    Attributes:
        bytes: of one checkpoint.
        kept: checkpoints of an uninterrupted run, by the retention policy.
        disk_bytes: of all that are on disk at once.
        blocked_s: seconds that a save keeps training waiting.
        mtbf_s: mean seconds between failures of the job.
        failures_per_day: expected failures of the job in a day.
        save_interval_s: seconds between saves that lose least time (Young and Daly).
        save_interval_steps: the same in updates.
        restart_s: seconds that a restart is taken to last, from the failure to the first new update.
        lost_share: share of wall time that saves, repeated work and restarts then take, 0 to 1.
    """

    bytes: float
    kept: Kept | None
    disk_bytes: float | None
    blocked_s: float
    mtbf_s: float
    failures_per_day: float
    save_interval_s: float
    save_interval_steps: int | None
    restart_s: float
    lost_share: float


@dataclass(frozen=True)
class RunPlan:
    """The answer; None where something it needs is not known.

    Attributes:
        name: of the run.
        precision: Lightning's name.
        device_type: whose kernels run, "cuda" or "cpu".
        strategy: how the state is spread.
        num_devices: all devices.
        parameters: part -> number of parameters; padding rows of the vocabulary count nowhere.
        num_params: all parameters.
        num_matmul_params: N of 6N, weights that multiply activations.
        micro_batch: sequences per device at a time.
        accumulation: micro-batches per update and device.
        activation_checkpointing: every so many blocks are recomputed in backward; 0 is none.
        global_batch: sequences per update over all devices.
        tokens_per_update: tokens, padding included.
        total_steps: updates.
        total_tokens: tokens of all updates.
        tokens_per_param: tokens / all parameters.
        chinchilla_tokens: tokens at 20 per parameter.
        epochs: passes over the training split.
        is_epochs_estimated: the split's length is no count.
        flops_per_token: 6N, FLOPs of forward and backward.
        attention_flops_per_token: FLOPs of the attention term, beyond 6N.
        recomputed_flops_per_token: FLOPs of recomputation, beyond 6N.
        total_flops: 6N FLOPs of all tokens.
        step_s: seconds per update.
        tokens_per_s: tokens per second over all devices.
        seconds: wall seconds of all updates.
        gpu_hours: device-hours of all updates.
        price: in the currency of the price per hour.
        peak_memory_bytes: bytes of tensors on one device at the peak.
        memory: layouts to compare.
        checkpoint: what saving takes.
        schedule: of the learning rate.
        schedule_summary: what it amounts to.
    """

    name: str
    precision: str
    device_type: str
    strategy: Strategy
    num_devices: int
    parameters: dict[str, int]
    num_params: int
    num_matmul_params: int
    micro_batch: int
    accumulation: int
    activation_checkpointing: int
    global_batch: int
    tokens_per_update: int
    total_steps: int | None
    total_tokens: int | None
    tokens_per_param: float | None
    chinchilla_tokens: float
    epochs: float | None
    is_epochs_estimated: bool
    flops_per_token: float
    attention_flops_per_token: float
    recomputed_flops_per_token: float
    total_flops: float | None
    step_s: float | None
    tokens_per_s: float | None
    seconds: float | None
    gpu_hours: float | None
    price: float | None
    peak_memory_bytes: float
    memory: list[MemoryRow]
    checkpoint: CheckpointPlan
    schedule: Schedule | None
    schedule_summary: ScheduleSummary | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and words, for JSON."""
        return asdict(self)


def plan_run(spec: RunSpec) -> RunPlan:
    """Return what a run will take.

    Raises:
        ValueError: a batch that does not divide, phases that overlap, two budgets; each names the remedy.
    """
    config, counts = spec.config, count_parameters(spec.config)
    global_batch = spec.global_batch
    if global_batch is None:
        global_batch = budget.sequences_per_update(spec.micro_batch, spec.accumulation, spec.num_devices)
    accumulate = accumulation(global_batch, spec.micro_batch, spec.num_devices)
    per_update = global_batch * config.context_length
    steps = spec.max_steps
    if spec.max_tokens is not None:
        if steps is not None:
            raise ValueError(
                f"both max_tokens={spec.max_tokens} and trainer.max_steps={steps} are given: a run has one budget. A run's own "
                "config.yaml holds it in updates: add --trainer.max_steps -1 for the tokens, or --max_tokens null for the updates"
            )
        steps = budget.updates_for_tokens(spec.max_tokens, per_update)
    tokens = steps * per_update if steps is not None else None
    schedule = spec.schedule.resolve(steps) if steps is not None else None
    matrices = num_matmul_params(config)
    total_flops = budget.training_flops(matrices, tokens) if tokens is not None else None
    step_s = seconds = gpu_hours = None
    if spec.device is not None and spec.device.peak_flops is not None:
        step_s = budget.training_seconds(
            budget.training_flops(matrices, per_update), spec.device.peak_flops, spec.mfu, spec.num_devices
        )
        if steps is not None:
            seconds = step_s * steps
            gpu_hours = seconds * spec.num_devices / budget.SECONDS_PER_HOUR
    layout = _layout(spec, spec.strategy, spec.num_devices)
    return RunPlan(
        name=spec.name,
        precision=spec.precision,
        device_type=spec.device_type,
        strategy=spec.strategy,
        num_devices=spec.num_devices,
        parameters=asdict(counts),
        num_params=counts.total,
        num_matmul_params=matrices,
        micro_batch=spec.micro_batch,
        accumulation=accumulate,
        activation_checkpointing=config.activation_checkpointing,
        global_batch=global_batch,
        tokens_per_update=per_update,
        total_steps=steps,
        total_tokens=tokens,
        tokens_per_param=tokens / counts.total if tokens is not None else None,
        chinchilla_tokens=budget.chinchilla_tokens(counts.total),
        epochs=budget.epochs(tokens, spec.corpus_tokens)
        if tokens and spec.corpus_tokens is not None
        else None,
        is_epochs_estimated=spec.is_corpus_estimated,
        flops_per_token=flops_per_token(config),
        attention_flops_per_token=attention_flops_per_token(config),
        recomputed_flops_per_token=recomputed_flops_per_token(config),
        total_flops=total_flops,
        step_s=step_s,
        tokens_per_s=per_update / step_s if step_s else None,
        seconds=seconds,
        gpu_hours=gpu_hours,
        price=budget.price(gpu_hours, spec.price_per_gpu_hour)
        if gpu_hours is not None and spec.price_per_gpu_hour is not None
        else None,
        peak_memory_bytes=plan_memory(
            config, spec.micro_batch, layout, spec.precision, accumulate, spec.device_type
        ).peak,
        memory=_memory_rows(spec),
        checkpoint=_checkpoint(spec, steps, step_s),
        schedule=schedule,
        schedule_summary=summarize(schedule) if schedule is not None else None,
    )


def _layout(spec: RunSpec, strategy: Strategy, num_devices: int) -> Layout:
    shard_size = None
    if strategy == "hybrid":
        shard_size = min(spec.devices_per_node, num_devices)
        if num_devices % shard_size:
            raise ValueError(
                f"hybrid sharding shards over whole nodes, and {num_devices} devices are no nodes of {spec.devices_per_node}: "
                "set trainer.devices (of one node) and trainer.num_nodes, or give --gpus_per_node"
            )
    return Layout(
        strategy, num_devices, shard_size, spec.syncs_every_micro_batch, spec.gathers_low, spec.keeps_gathered
    )


def _memory_rows(spec: RunSpec) -> list[MemoryRow]:
    """Return the layouts worth comparing: one device, copies, shards over a node, over all, and over eight nodes."""
    node = spec.devices_per_node
    counts = sorted({node, spec.num_devices, 8 * node} - {1})
    copies = sorted(
        {spec.num_devices, node} - {1}
    )  # with an update of the same size, DDP's peak does depend on their number
    wanted: list[tuple[Strategy, int]] = [("single", 1), *(("ddp", n) for n in copies)]
    for strategy in ("fsdp", "fsdp2"):
        wanted += [(strategy, n) for n in counts]
    wanted += [("hybrid", n) for n in counts if n > node and n % node == 0]
    if (spec.strategy, spec.num_devices) not in wanted:  # hybrid sharding on one node
        wanted.append((spec.strategy, spec.num_devices))
    return [_memory_row(spec, strategy, n) for strategy, n in wanted]


def _memory_row(spec: RunSpec, strategy: Strategy, num_devices: int) -> MemoryRow:
    layout = _layout(spec, strategy, num_devices)
    accumulate, rest = spec.accumulation, 0
    if spec.global_batch is not None:
        accumulate, rest = divmod(spec.global_batch, spec.micro_batch * num_devices)
        rest, accumulate = rest or not accumulate, max(1, accumulate)
    memory = spec.device.memory_bytes if spec.device is not None else None

    def with_checkpointing(every: int) -> DeviceMemory:
        config = replace(spec.config, activation_checkpointing=every)
        moments = plan_moments(config, spec.micro_batch, layout, spec.precision, accumulate, spec.device_type)
        at_peak, fit = max(moments, key=lambda m: m.peak), None
        if memory is not None:
            fit = largest_micro_batch(
                config,
                memory,
                layout,
                spec.precision,
                spec.device_type,
                spec.global_batch,
                spec.accumulation,
            )
        return DeviceMemory(at_peak.peak, at_peak, part_maxima(moments), fit)

    return MemoryRow(
        strategy,
        num_devices,
        (strategy, num_devices) == (spec.strategy, spec.num_devices),
        accumulate,
        not rest,
        with_checkpointing(0),
        with_checkpointing(spec.config.activation_checkpointing or 1),
    )


def _checkpoint(spec: RunSpec, steps: int | None, step_s: float | None) -> CheckpointPlan:
    retention = spec.retention or Retention()
    param, _, moment = precision_bytes(spec.precision)
    size = budget.adamw_state_bytes(Sizes.of(spec.config).total, param, moment)
    shards = _layout(spec, spec.strategy, spec.num_devices).num_shards
    blocked = budget.save_blocks_s(
        size, shards, spec.write_bytes_per_s, spec.copy_bytes_per_s if retention.async_save else None
    )
    num_nodes = -(-spec.num_devices // spec.devices_per_node)
    mtbf = budget.system_mtbf_s(spec.node_mtbf_s, num_nodes)
    interval = budget.save_interval_s(blocked, mtbf)
    kept = None
    if spec.retention is not None and steps is not None:
        kept = retention.replay(steps)
    return CheckpointPlan(
        bytes=size,
        kept=kept,
        disk_bytes=size * kept.num_on_disk if kept is not None else None,
        blocked_s=blocked,
        mtbf_s=mtbf,
        failures_per_day=budget.failures_per_day(spec.node_mtbf_s, num_nodes),
        save_interval_s=interval,
        save_interval_steps=max(1, round(interval / step_s)) if step_s else None,
        restart_s=spec.restart_s,
        lost_share=budget.lost_share(interval, blocked, mtbf, spec.restart_s),
    )


def propose_preset(flops: float) -> list[budget.Proposal]:
    """Return the presets for a compute budget, the best first; those made for tests are left out.

    Raises:
        ValueError: the budget trains none of them on one sequence.
    """
    presets, least = {}, {}
    for name in PRESETS:
        if not name.startswith("tiny"):
            config = GPTConfig.preset(name)
            presets[name] = (count_parameters(config).total, flops_per_token(config))
            least[name] = flops_per_token(config) * config.context_length
    cheapest = min(least, key=least.__getitem__)
    if flops < least[cheapest]:
        raise ValueError(
            f"a budget of {flops:g} FLOPs trains no preset: one sequence of the smallest, {cheapest}, takes {least[cheapest]:.3g}"
        )
    return budget.propose(flops, presets)
