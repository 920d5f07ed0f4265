"""What a run will take, before it costs anything: `python -m recipes.plan --config configs/quickstart.yaml`.

Reads the configuration of `recipes.pretrain` and prints parameters, tokens, FLOPs, time and money, memory per device for
several layouts, checkpoints and how often to save them, and the schedule; writes plan.json and schedule.png into the run's
directory (runs/NAME/plan). Takes a second and allocates nothing.

examples:
  python -m recipes.plan --config configs/gpt2_124m.yaml --gpu a100 --price_per_gpu_hour 1.8
  python -m recipes.plan --config configs/llama_1b_fsdp.yaml --devices 64 --gpu h100 --mfu 0.45
  python -m recipes.plan --config configs/gpt2_124m.yaml --trainer.max_steps 50000 --data.micro_batch_size 32
  python -m recipes.plan --budget_gpu_hours 500 --gpu h100      (which preset, how many tokens?)
  python -m recipes.plan --config runs/mine/config.yaml --gpu a100 --against runs/mine      (predicted and measured)

Values of the configuration can be overridden as for recipes.pretrain: --model.X, --data.X, --trainer.X, --run, --max_tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console

from lit_gpt_loop.budget import flops_of_gpu_hours
from lit_gpt_loop.devices import Device, find_device
from lit_gpt_loop.memory import GIB
from lit_gpt_loop.plan_check import compare_plan
from lit_gpt_loop.plan_config import matmul_dtype, merge, peak_flops_table, read_run_spec
from lit_gpt_loop.plan_tables import (
    comparison_table,
    draw_schedule,
    proposal_line,
    proposals_table,
    render,
)
from lit_gpt_loop.run_plan import RunPlan, plan_run, propose_preset

_OVERRIDES = ("--model.", "--data.", "--trainer.", "--run", "--max_tokens")


def main(args: list[str] | None = None) -> RunPlan | None:
    """Run the command line; return the plan (None if only a budget was asked about)."""
    own, overrides = _split_arguments(sys.argv[1:] if args is None else args)
    options = _parser().parse_args(own)
    console = Console(width=max(Console().width, 132), highlight=False)
    budget_flops = _budget(options)
    if budget_flops is not None:
        proposals = propose_preset(budget_flops)
        console.print(proposals_table(budget_flops, proposals))
        console.print(proposal_line(budget_flops, proposals[0]))
    if not options.config:
        if budget_flops is None:
            raise ValueError("nothing to plan: give --config FILE, or --budget_flops or --budget_gpu_hours")
        return None
    config: dict[str, Any] = {}
    for path in options.config:
        config = merge(config, _read_yaml(Path(path)))
    config = merge(config, overrides)
    precision = str((config.get("trainer") or {}).get("precision") or "bf16-mixed")
    notes: list[str] = []
    settings = (
        {"corpus_tokens": options.corpus_tokens, "is_corpus_estimated": False}
        if options.corpus_tokens is not None
        else {}
    )
    spec = read_run_spec(
        config,
        Path(options.config[-1]).stem,
        notes,
        num_devices=options.devices,
        device=_device(options, precision),
        devices_per_node=options.gpus_per_node,
        mfu=options.mfu,
        price_per_gpu_hour=options.price_per_gpu_hour,
        write_bytes_per_s=options.disk_gb_per_s * 1e9,
        node_mtbf_s=options.node_mtbf_hours * 3600.0,
        **settings,
    )
    plan = plan_run(spec)
    render(console, plan, spec.device, notes)
    if options.against:
        file = Path(options.against) / "journal.jsonl"
        if not file.is_file():
            raise FileNotFoundError(f"--against takes a run's directory, and there is no {file}")
        lines = [
            line for line in file.read_text().splitlines() if line.startswith("{") and line.endswith("}")
        ]
        console.print(comparison_table(compare_plan(plan.to_dict(), map(json.loads, lines))))
    if options.out != "none":
        out = Path(options.out or Path(config.get("runs_dir") or "runs") / spec.name / "plan")
        _write(console, plan, out)
    return plan


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m recipes.plan", description=__doc__)
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


def _split_arguments(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return our own arguments, and those that override the configuration as a nested dict."""
    own, pairs, items = [], [], list(args)
    while items:
        word = items.pop(0)
        key, has_value, value = word.partition("=")
        if not (key.startswith(_OVERRIDES[:3]) or key in _OVERRIDES[3:]):
            # A repeated --config adds a file.
            own.append(word.replace("--config", "--config+", 1) if key == "--config" else word)
            continue
        if not has_value:
            if not items:
                raise ValueError(f"{word} needs a value")
            value = items.pop(0)
        pairs.append((key[2:], yaml.safe_load(value)))
    nested: dict[str, Any] = {}
    for key, parsed in pairs:
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = parsed
    return own, nested


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"no configuration at {path}: give a YAML file such as configs/quickstart.yaml"
        )
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no configuration: expected keys such as trainer, model and data")
    return content


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


def _budget(options: Any) -> float | None:
    if options.budget_flops is not None and options.budget_gpu_hours is not None:
        raise ValueError("--budget_flops and --budget_gpu_hours say the same: give one of them")
    if options.budget_gpu_hours is None:
        return options.budget_flops
    device = _device(options, "bf16-mixed")
    if device is None or device.peak_flops is None:
        raise ValueError("--budget_gpu_hours needs to know the device: add --gpu h100 (or --peak_tflops)")
    return flops_of_gpu_hours(options.budget_gpu_hours, device.peak_flops, options.mfu)


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
