"""What a plan said against what the run measured (layer P, standard library only)."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lit_gpt_loop.memory import GIB
from lit_gpt_loop.run_spec import RunSpec


@dataclass(frozen=True)
class Compared:
    """One quantity, predicted and measured.

    Attributes:
        name: what it is.
        unit: of both values.
        predicted: by the plan; None where it had nothing to go by (no --gpu).
        measured: in the run; None where nothing logged it.
        note: why they may differ, if they are not the same thing.
        is_comparable: whether both values are of the same thing.
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str = ""
    is_comparable: bool = True

    @property
    def ratio(self) -> float | None:
        """Measured / predicted, None unless both are known and comparable and the prediction is above 0."""
        if not self.predicted or self.measured is None or not self.is_comparable:
            return None
        return self.measured / self.predicted


def read_measurements(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's journal; one that a kill tore is left out.

    Raises:
        FileNotFoundError: the directory holds no journal.
        ValueError: the journal has no update yet.
    """
    file = run_dir / "journal.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"--against takes a run's directory, and there is no {file}")
    lines = (line for line in file.read_text().splitlines() if line.startswith("{") and line.endswith("}"))
    rows = [json.loads(line) for line in lines]
    if not any("progress/update" in row for row in rows):
        raise ValueError(
            f"--against {run_dir}: {file} has no update yet ({len(rows)} lines), so there is nothing to compare with. Wait for the "
            "first update, or leave --against out"
        )
    return rows


def spec_differences(planned: RunSpec, trained: RunSpec) -> list[str]:
    """Return a line for each thing in which two runs differ, as far as what a plan predicts depends on it."""
    ours, theirs = _compared_values(planned), _compared_values(trained)
    return [f"{key} {theirs[key]} (planned {ours[key]})" for key in ours if ours[key] != theirs[key]]


def _compared_values(spec: RunSpec) -> dict[str, Any]:
    sequences = spec.global_batch or spec.micro_batch * spec.accumulation * spec.num_devices
    return {
        **{f"model.{name}": value for name, value in asdict(spec.config).items()},
        "sequences per update": sequences,
        "micro-batch": spec.micro_batch,
        "precision": spec.precision,
        "strategy": spec.strategy,
        "devices": spec.num_devices,
    }


def compare_plan(
    plan: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], on_cpu: bool | None = None
) -> list[Compared]:
    """Return the quantities of a plan that a run's journal measured.

    Args:
        plan: `RunPlan.to_dict()`, or plan.json read back.
        rows: the journal's lines (`lit_gpt_loop.journal.read_journal`).
        on_cpu: whether the run measured its memory on CPU; None is what the plan is for.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if "/" in key and isinstance(value, int | float):
                found.setdefault(key, []).append(float(value))

    def middle(key: str) -> float | None:
        return median(found[key]) if found.get(key) else None

    def most(key: str) -> float | None:
        return max(found[key]) if found.get(key) else None

    if on_cpu is None:
        on_cpu = plan.get("device_type") == "cpu"
    # CPU has no allocator of a device to ask: perf/peak_memory_gib is then the resident size of the whole process.
    memory_note = (
        "planned tensors, measured the whole process" if on_cpu else "measured with the allocator's peak"
    )
    return [
        Compared("tokens per update", "tokens", plan["tokens_per_update"], middle("train/tokens"), "planned without padding"),
        Compared("updates", "updates", plan["total_steps"], most("progress/update")),
        Compared("tokens", "tokens", plan["total_tokens"], most("progress/tokens")),
        Compared("epochs", "epochs", plan["epochs"], most("progress/epoch")),
        Compared("time per update", "s", plan["step_s"], middle("perf/step_s"), "planned from peak and --mfu"),
        Compared("speed", "tokens/s", plan["tokens_per_s"], middle("perf/tokens_per_s"), "planned from peak and --mfu"),
        Compared("peak memory", "GiB", plan["peak_memory_bytes"] / GIB, most("perf/peak_memory_gib"), memory_note, is_comparable=not on_cpu),
        Compared("checkpoint", "bytes", plan["checkpoint"]["bytes"], middle("ckpt/bytes")),
        Compared("a save blocks", "s", plan["checkpoint"]["blocked_s"], middle("ckpt/blocked_s"), "planned from --disk_gb_per_s"),
    ]  # fmt: skip
