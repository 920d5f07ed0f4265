"""What a run will take, before it costs anything: `python -m recipes.plan --config configs/quickstart.yaml`.

Reads the configuration of `recipes.pretrain` and prints parameters, tokens, FLOPs, time and money, memory per device for
several layouts, checkpoints and how often to save them, and the schedule; writes plan.json and schedule.png into the run's
directory (runs/NAME/plan). Takes a second and allocates nothing.

examples:
  python -m recipes.plan --config configs/gpt2_124m.yaml --gpu a100 --price_per_gpu_hour 1.8
  python -m recipes.plan --config configs/llama_1b_fsdp.yaml --devices 64 --gpu h100 --mfu 0.45
  python -m recipes.plan --config configs/gpt2_124m.yaml --trainer.max_steps 50000 --data.micro_batch_size 32
  python -m recipes.plan --budget_gpu_hours 500 --gpu h100      (which preset, how many tokens?)
  python -m recipes.plan --against runs/mine --gpu a100         (predicted and measured)

Values of the configuration can be overridden as for recipes.pretrain: --model.X, --data.X, --trainer.X, --run, --runs_dir,
--max_tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.markup import escape

from lit_gpt_loop.budget import flops_of_gpu_hours
from lit_gpt_loop.devices import Device, find_device
from lit_gpt_loop.memory import GIB
from lit_gpt_loop.plan_check import compare_plan, read_measurements, spec_differences
from lit_gpt_loop.plan_config import matmul_dtype, merge, peak_flops_table, read_run_spec
from lit_gpt_loop.plan_input import check_options, newest_config, read_yaml, split_arguments
from lit_gpt_loop.plan_tables import (
    budget_line,
    comparison_table,
    cost_line,
    draw_schedule,
    proposal_line,
    proposals_table,
    render,
)
from lit_gpt_loop.run_plan import RunPlan, plan_run, propose_preset
from lit_gpt_loop.run_spec import RunSpec
from recipes.help import Help


def main(args: list[str] | None = None) -> RunPlan | None:
    """Run the command line; return the plan (None if only a budget was asked about)."""
    own, overrides = split_arguments(sys.argv[1:] if args is None else args)
    options = _parser().parse_args(own)
    check_options(vars(options))
    run_dir = Path(options.against) if options.against else None
    rows = read_measurements(run_dir) if run_dir is not None else []
    files = [Path(path) for path in options.config or []]
    if run_dir is not None and not files:
        files = [_config_of(run_dir)]
    config: dict[str, Any] = {}
    for path in files:
        config = merge(config, read_yaml(path))
    config = merge(config, overrides)
    trainer = config.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}  # read_run_spec refuses anything else
    device = _device(options, str(trainer.get("precision") or "bf16-mixed"))
    console = Console(width=max(Console().width, 132), highlight=False)
    budget_flops = _budget(options, device)
    if budget_flops is not None:
        _propose(console, budget_flops, device, options)
    if not files:
        if budget_flops is None:
            raise ValueError("nothing to plan: give --config FILE, or --budget_flops or --budget_gpu_hours")
        return None
    notes: list[str] = []
    settings = (
        {"corpus_tokens": options.corpus_tokens, "is_corpus_estimated": False}
        if options.corpus_tokens is not None
        else {}
    )
    spec = read_run_spec(
        config,
        files[-1].stem,
        notes,
        num_devices=options.devices,
        device=device,
        devices_per_node=options.gpus_per_node,
        mfu=options.mfu,
        price_per_gpu_hour=options.price_per_gpu_hour,
        write_bytes_per_s=options.disk_gb_per_s * 1e9,
        node_mtbf_s=options.node_mtbf_hours * 3600.0,
        restart_s=options.restart_s,
        **settings,
    )
    if options.price_per_gpu_hour is not None and (device is None or device.peak_flops is None):
        notes.append("price: unknown without the time; add --gpu NAME (or --peak_tflops)")
    plan = plan_run(spec)
    render(console, plan, device, notes)
    if budget_flops is not None:
        console.print(budget_line(budget_flops, plan))
    if run_dir is not None:
        _compare(console, spec, plan, run_dir, rows)
    if options.out != "none":
        root = trainer.get("default_root_dir") or Path(config.get("runs_dir") or "runs") / spec.name
        _write(console, plan, Path(options.out or Path(root) / "plan"))
    return plan


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m recipes.plan", description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add(
        "--config",
        type=list[str],
        default=None,
        help="YAML of recipes.pretrain, or a run's own config.yaml; give it twice to merge two.",
    )
    add(
        "--devices",
        type=int | None,
        default=None,
        help="Number of devices in all, instead of the configuration's.",
    )
    add(
        "--gpus_per_node",
        type=int | None,
        default=None,
        help="Devices that hybrid sharding shards over; nodes fail as a whole. Default: trainer.devices, or 8 where that is 1.",
    )
    add(
        "--gpu",
        type=str | None,
        default=None,
        help="Device of the table: h100, h200, a100, l40s, ... Without it no time, price or fit.",
    )
    add(
        "--peak_tflops",
        type=float | None,
        default=None,
        help="Peak of a device that is not in the table, dense, 1e12 FLOP/s.",
    )
    add(
        "--device_memory_gib",
        type=float | None,
        default=None,
        help="Memory of a device that is not in the table.",
    )
    add(
        "--mfu",
        type=float,
        default=0.4,
        help="Share of peak that training reaches; take it from perf/mfu of a short run.",
    )
    add(
        "--price_per_gpu_hour",
        type=float | None,
        default=None,
        help="Price of one device for an hour, in any currency.",
    )
    add(
        "--corpus_tokens",
        type=int | None,
        default=None,
        help="Tokens to train on, for the number of epochs; default: the prepared store's.",
    )
    add(
        "--disk_gb_per_s",
        type=float,
        default=1.0,
        help="What one rank writes to the checkpoint disk, hashing included.",
    )
    add("--node_mtbf_hours", type=float, default=8760.0, help="Mean time between failures of one node.")
    add(
        "--restart_s",
        type=float,
        default=300.0,
        help="Seconds from a failure to the first new update: finding it, starting, loading.",
    )
    add(
        "--budget_flops",
        type=float | None,
        default=None,
        help="Propose the compute-optimal preset and its tokens for this many FLOPs.",
    )
    add(
        "--budget_gpu_hours",
        type=float | None,
        default=None,
        help="The same for GPU-hours at --mfu of the peak of --gpu.",
    )
    add(
        "--against",
        type=str | None,
        default=None,
        help="A run's directory: also print what its journal measured beside what this plan predicts.",
    )
    add(
        "--out",
        type=str | None,
        default=None,
        help="Folder of plan.json and schedule.png; none writes nothing. Default: runs/NAME/plan.",
    )
    return parser


def _device(options: Any, precision: str) -> Device | None:
    if options.gpu is None and options.peak_tflops is None and options.device_memory_gib is None:
        return None
    name = options.gpu or "device"
    if options.gpu is None:
        memory = options.device_memory_gib
        peak = options.peak_tflops
        return Device(
            name,
            memory * GIB if memory is not None else None,
            peak * 1e12 if peak is not None else None,
        )
    return find_device(
        name, peak_flops_table(), matmul_dtype(precision), options.peak_tflops, options.device_memory_gib
    )


def _budget(options: Any, device: Device | None) -> float | None:
    """Return the FLOPs that are to be spent, None if no budget was given."""
    if options.budget_flops is not None and options.budget_gpu_hours is not None:
        raise ValueError("--budget_flops and --budget_gpu_hours say the same: give one of them")
    if options.budget_gpu_hours is None:
        return options.budget_flops
    if device is None or device.peak_flops is None:
        raise ValueError("--budget_gpu_hours needs to know the device: add --gpu h100 (or --peak_tflops)")
    return flops_of_gpu_hours(options.budget_gpu_hours, device.peak_flops, options.mfu)


def _propose(console: Console, flops: float, device: Device | None, options: Any) -> None:
    proposals = propose_preset(flops)
    console.print(proposals_table(flops, proposals))
    console.print(cost_line(flops, device, options.mfu, options.devices or 1, options.price_per_gpu_hour))
    console.print(proposal_line(flops, proposals[0]))


def _config_of(run_dir: Path) -> Path:
    path = newest_config(run_dir)
    if path is None:
        raise FileNotFoundError(
            f"{run_dir} holds no config.yaml: give the run's configuration by --config FILE"
        )
    return path


def _compare(
    console: Console, spec: RunSpec, plan: RunPlan, run_dir: Path, rows: list[dict[str, Any]]
) -> None:
    """Print what a run measured beside the plan, and whether it is the run that was planned."""
    path = newest_config(run_dir)
    trained: RunSpec | None = None
    warning = f"{run_dir} holds no config.yaml, which would say whether it is the run planned here"
    if path is not None:
        try:
            trained = read_run_spec(read_yaml(path), path.stem, [])
            differences = ", ".join(spec_differences(spec, trained))
            warning = f"{path} is not the run planned here: {differences}" if differences else ""
        except ValueError as e:
            warning = f"whether {path} is the run planned here cannot be said: {e}"
    if warning:
        console.print(f"\n[bold red]warning[/bold red]: {escape(warning)}")
    on_cpu = "cpu" in (plan.device_type, trained.device_type if trained is not None else "")
    console.print(comparison_table(compare_plan(plan.to_dict(), rows, on_cpu)))


def _write(console: Console, plan: RunPlan, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
    written = ["plan.json"]
    if plan.schedule is not None and plan.total_steps is not None:
        try:
            draw_schedule(plan, out / "schedule.png")
            written.append("schedule.png")
        except ModuleNotFoundError:
            console.print("schedule.png needs matplotlib: pip install -e '.[report]'")
    console.print(f"wrote {' and '.join(written)} to {out}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as e:
        sys.exit(f"error: {e}")
