"""A run's plan as tables for a terminal and as a picture of its schedule (for `recipes.plan`)."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lit_gpt_loop.budget import (
    CHINCHILLA_TOKENS_PER_PARAM,
    SECONDS_PER_HOUR,
    Proposal,
    compute_optimal_size,
    price,
    training_seconds,
)
from lit_gpt_loop.devices import Device
from lit_gpt_loop.memory import GIB, RESERVED_SHARE, Fit
from lit_gpt_loop.plan_check import Compared
from lit_gpt_loop.run_plan import RunPlan
from lit_gpt_loop.schedules import Schedule

NEAR = 5.0  # a preset suits a budget if its tokens per parameter are within this factor of Chinchilla's


def render(console: Console, plan: RunPlan, device: Device | None, notes: list[str]) -> None:
    """Print a plan as tables."""
    console.print(
        f"\n[bold]{plan.name}[/bold]: {plan.num_params:,} parameters, {plan.precision}, {plan.strategy} on {_n(plan.num_devices, 'device')}\n"
    )
    console.print(
        _facts(
            "model",
            [(k.replace("_", " "), f"{v:,}") for k, v in plan.parameters.items() if v]
            + [
                ("all", f"{plan.num_params:,}"),
                ("N of 6N", f"{plan.num_matmul_params:,}  (weights that multiply activations)"),
            ],
        )
    )
    console.print(_facts("run", _run_lines(plan)))
    console.print(_facts("compute", _compute_lines(plan, device)))
    console.print(_memory_table(plan, device))
    if (
        device is not None
        and device.memory_bytes
        and plan.peak_memory_bytes > device.memory_bytes * (1 - RESERVED_SHARE)
    ):
        console.print(
            f"[bold red]does not fit[/bold red]: {plan.peak_memory_bytes / GIB:.1f} GiB on a {device.name}. Lower data.micro_batch_size, "
            "set model.overrides.activation_checkpointing: 1, or shard over more devices (trainer.strategy: fsdp2)."
        )
    console.print(_facts("checkpoints", _checkpoint_lines(plan)))
    if plan.schedule_summary is not None and plan.schedule is not None:
        console.print(
            _facts(
                "schedule",
                [
                    ("kind", _kind(plan.schedule)),
                    ("phases", str(plan.schedule_summary)),
                ],
            )
        )
    for note in notes:
        console.print(f"[dim]note: {note}[/dim]")


def _run_lines(plan: RunPlan) -> list[tuple[str, str]]:
    lines = [
        (
            "update",
            f"{plan.global_batch:,} sequences = {plan.tokens_per_update:,} tokens ({_n(plan.accumulation, 'micro-batch', 'es')} of {plan.micro_batch} on {_n(plan.num_devices, 'device')})",
        ),
    ]
    if plan.total_steps is None or plan.total_tokens is None or plan.tokens_per_param is None:
        return [*lines, ("length", "not set: trainer.max_steps or --max_tokens")]
    share = plan.tokens_per_param / CHINCHILLA_TOKENS_PER_PARAM
    lines += [
        ("length", f"{plan.total_steps:,} updates = {plan.total_tokens:,} tokens"),
        (
            "tokens per parameter",
            f"{plan.tokens_per_param:.3g}, {share:.3g} x Chinchilla's 20 ({_si(plan.chinchilla_tokens)} tokens would be compute-optimal)",
        ),
    ]
    if plan.epochs is not None:
        about, why = (
            ("about ", ", its length an estimate: the store's tokens times the split's share")
            if plan.is_epochs_estimated
            else ("", "")
        )
        lines.append(("epochs", f"{about}{plan.epochs:.3g} over the training split{why}"))
    return lines


def _compute_lines(plan: RunPlan, device: Device | None) -> list[tuple[str, str]]:
    lines = [
        (
            "per token",
            f"{_si(plan.flops_per_token)}FLOPs (6N); attention adds {plan.attention_flops_per_token / plan.flops_per_token:.1%}, recomputation {plan.recomputed_flops_per_token / plan.flops_per_token:.1%}",
        )
    ]
    lines.append(("per update", f"{plan.flops_per_token * plan.tokens_per_update:.3e} FLOPs"))
    if plan.total_flops is not None:
        lines.append(("in all", f"{plan.total_flops:.3e} FLOPs"))
    if device is None or device.peak_flops is None or plan.step_s is None or plan.tokens_per_s is None:
        return [*lines, ("time", "unknown: add --gpu NAME (or --peak_tflops)")]
    lines.append(
        (
            "speed",
            f"{plan.tokens_per_s:,.0f} tokens/s, {plan.step_s:.3g} s per update ({device.name}: {device.peak_flops / 1e12:,.0f} TFLOP/s peak)",
        )
    )
    if plan.seconds is not None and plan.gpu_hours is not None:
        cost = f", {plan.price:,.2f} at the given price" if plan.price is not None else ""
        lines.append(("time", f"{_duration(plan.seconds)}, {_hours(plan.gpu_hours)} GPU-hours{cost}"))
    return lines


def _memory_table(plan: RunPlan, device: Device | None) -> Table:
    unit, size = ("GiB", GIB) if plan.peak_memory_bytes >= 2 * GIB else ("MiB", 2**20)
    where = (
        f", {device.name} with {device.memory_bytes / GIB:.1f} GiB"
        if device is not None and device.memory_bytes
        else ""
    )
    every = plan.activation_checkpointing or 1
    table = Table(
        title=f"memory of one device, {unit} (micro-batch {plan.micro_batch}{where})",
        title_justify="left",
        caption="* as configured, and its peak. "
        + (
            ""
            if all(row.divides for row in plan.memory)
            else "† would be refused: an update of "
            f"{plan.global_batch:,} sequences does not divide into micro-batches of {plan.micro_batch} over so many devices. "
        )
        + "Each part's own maximum; the peak is what is live at once, less than their sum. params: under mixed "
        "precision the fp32 master weights; low-prec.: autocast's copies. recomp.: with "
        f"{'every block' if every == 1 else f'one of {every} blocks'} recomputed in backward. fits: largest micro-batch that divides "
        f"an update, with {RESERVED_SHARE:.0%} of the device left to the framework; all: a device's whole share of an update "
        "fits; -: an update does not divide over so many devices.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("strategy", vertical="bottom", no_wrap=True)
    for name in (
        "devices", "params", "grads", "moments", "low-\nprec.", "gath-\nered", "activ.", "recomp.\nactiv.", "logits", "temp.",
        "peak", "fits", "recomp.\npeak", "recomp.\nfits",
    ):  # fmt: skip
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for row in plan.memory:
        parts = {name: _number(value / size) for name, value in row.plain.maxima.items()}
        activations = parts.pop("activations")
        again = _number(row.checkpointed.maxima["activations"] / size)
        *first, logits, temporaries = parts.values()
        peaks = [_number(memory.peak_bytes / size) for memory in (row.plain, row.checkpointed)]
        if row.as_configured:
            configured = int(plan.activation_checkpointing > 0)
            peaks[configured] = f"[bold]*{peaks[configured]}[/bold]"
        table.add_row(
            row.strategy + (" *" if row.as_configured else "" if row.divides else " †"),
            str(row.num_devices),
            *first,
            activations,
            again,
            logits,
            temporaries,
            peaks[0],
            _fit(row.plain.fit),
            peaks[1],
            _fit(row.checkpointed.fit),
        )
    return table


def _fit(fit: Fit | None) -> str:
    if fit is None:
        return ""
    if fit.limit == "devices":
        return "-"
    sign = {"batch": "all ", "search": ">"}.get(fit.limit, "")
    return f"{sign}{fit.micro_batch}" if fit.micro_batch else "none"


def _checkpoint_lines(plan: RunPlan) -> list[tuple[str, str]]:
    c = plan.checkpoint
    lines = [("size", f"{_bytes(c.bytes)} (parameters and two moments)")]
    if c.kept is not None and c.disk_bytes is not None:
        most = "" if c.kept.is_exact else "at most "
        more = (
            f", {c.kept.num_on_disk} while one is being written"
            if c.kept.num_on_disk > c.kept.num_kept
            else ""
        )
        lines.append(("disk", f"{most}{_bytes(c.disk_bytes)}: {c.kept.num_kept} kept{more}"))
    else:
        lines.append(
            ("disk", f"{_bytes(c.bytes)} each (trainer.callbacks without CheckpointRetention, or no length)")
        )
    lines.append(("a save blocks", f"{_duration(c.blocked_s)}"))
    steps = f" = every {c.save_interval_steps:,} updates" if c.save_interval_steps is not None else ""
    lines.append(
        (
            "save every",
            f"{_duration(c.save_interval_s)}{steps} (Young-Daly, for a failure every {_duration(c.mtbf_s)}, {c.failures_per_day:.3g} a day)",
        )
    )
    lost = f"{c.lost_share:.2%}" if c.lost_share >= 5e-5 else "under 0.01%"
    lines.append(
        (
            "then lost",
            f"{lost} of the time: saves, work done again, and {_duration(c.restart_s)} for each restart",
        )
    )
    return lines


def comparison_table(compared: list[Compared]) -> Table:
    """Return what was predicted beside what was measured."""
    table = Table(title="predicted against measured", title_justify="left")
    for name in ("", "predicted", "measured", "measured / predicted", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    for c in compared:
        if c.measured is not None:
            ratio = f"{c.ratio:.3g}" if c.ratio is not None else ""
            predicted = "" if c.predicted is None else f"{c.predicted:,.6g} {c.unit}"
            table.add_row(c.name, predicted, f"{c.measured:,.6g} {c.unit}", ratio, c.note)
    return table


def proposals_table(flops: float, proposals: list[Proposal]) -> Table:
    """Return the first presets that a budget could train."""
    table = Table(
        title=f"presets for {flops:.3e} FLOPs, the compute-optimal one first (20 tokens per parameter)",
        title_justify="left",
    )
    for name in ("preset", "parameters", "tokens", "tokens per parameter"):
        table.add_column(name, justify="left" if name == "preset" else "right")
    for p in proposals[:5]:
        table.add_row(p.preset, _si(p.num_params), _si(p.num_tokens), f"{p.tokens_per_param:.3g}")
    size, tokens = compute_optimal_size(flops)
    table.caption = (
        f"at 20 tokens per parameter this budget trains {_si(size)} parameters on {_si(tokens)} tokens"
    )
    table.caption_justify = "left"
    return table


def cost_line(
    flops: float, device: Device | None, mfu: float, num_devices: int, price_per_gpu_hour: float | None
) -> str:
    """Return what it takes to spend a budget, on whichever model: `flops` at `mfu` of the peak of so many devices."""
    if device is None or device.peak_flops is None:
        return "its time and price: add --gpu NAME (or --peak_tflops)"
    seconds = training_seconds(flops, device.peak_flops, mfu, num_devices)
    gpu_hours = seconds * num_devices / SECONDS_PER_HOUR
    cost = (
        f", {price(gpu_hours, price_per_gpu_hour):,.2f} at the given price"
        if price_per_gpu_hour is not None
        else ""
    )
    return (
        f"to spend it: {_duration(seconds)} on {_n(num_devices, 'device')} ({device.name} at MFU {mfu:g}), "
        f"{_hours(gpu_hours)} GPU-hours{cost}"
    )


def budget_line(flops: float, plan: RunPlan) -> str:
    """Return how long a budget trains the planned configuration."""
    tokens = flops / plan.flops_per_token
    steps = int(tokens // plan.tokens_per_update)
    if not steps:
        per_update = plan.flops_per_token * plan.tokens_per_update
        return f"\nbudget: {flops:.3g} FLOPs do not pay for one update of this configuration, which takes {per_update:.3g}"
    return (
        f"\nbudget: {flops:.3g} FLOPs train this configuration for {_n(steps, 'update')} = {_si(steps * plan.tokens_per_update)} tokens, "
        f"{steps * plan.tokens_per_update / plan.num_params:.3g} per parameter: --trainer.max_steps {steps}"
    )


def proposal_line(flops: float, best: Proposal) -> str:
    """Return the arguments of the preset that comes nearest, or a warning where none comes near."""
    arguments = f"--model.config {best.preset} --max_tokens {round(best.num_tokens)}"
    ratio = best.tokens_per_param / CHINCHILLA_TOKENS_PER_PARAM
    if 1.0 / NEAR <= ratio <= NEAR:
        return f"proposed: {arguments}"
    size, _ = compute_optimal_size(flops)
    return (
        f"[bold red]no preset suits this budget[/bold red]: it trains {_si(size)} parameters best, and the nearest ({arguments}) would "
        f"see {best.tokens_per_param:.3g} tokens per parameter, {ratio:.3g} x Chinchilla's 20. Give model.config a shape of its own "
        "(n_layer, n_embd, ...), or another budget."
    )


def _facts(title: str, lines: list[tuple[str, str]]) -> Table:
    table = Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2), title_style="bold"
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in lines:
        table.add_row(key, value)
    return table


def draw_schedule(plan: RunPlan, path: Path) -> None:
    """Write the schedule's curve as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    assert plan.schedule is not None and plan.total_steps is not None
    n = plan.total_steps
    points = sorted({round(i * (n - 1) / 2000) for i in range(2001)} | set(range(min(n, 50))))
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([p + 1 for p in points], [plan.schedule(p) for p in points])
    axes.set(
        xlabel="update", ylabel="rate / peak", title=f"{plan.name}: {plan.schedule.kind}", ylim=(0, 1.05)
    )
    FigureCanvasAgg(figure).print_png(str(path))


def _kind(schedule: Schedule) -> str:
    if schedule.kind != "wsd":
        return schedule.kind
    return f"wsd, decay {schedule.decay_shape}" if schedule.decay_steps else "wsd, no decay"


def _n(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural}"


def _number(value: float) -> str:
    return "" if value == 0 else f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def _hours(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def _si(value: float) -> str:
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g} "


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
