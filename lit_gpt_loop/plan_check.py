"""What a plan said against what the run measured (layer P, standard library only)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lit_gpt_loop.memory import GIB


@dataclass(frozen=True)
class Compared:
    """One quantity, predicted and measured.

    Attributes:
        name: what it is.
        unit: of both values.
        predicted: by the plan; None where it had nothing to go by (no --gpu).
        measured: in the run; None where nothing logged it.
        note: why they may differ, if they are not the same thing.
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured / predicted, None unless both are known and the prediction is above 0."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


def compare_plan(plan: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """Return the quantities of a plan that a run's journal measured.

    Args:
        plan: `RunPlan.to_dict()`, or plan.json read back.
        rows: the journal's lines (`lit_gpt_loop.journal.read_journal`).
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

    # The process's whole resident size where there is no device allocator to ask.
    is_cpu = plan.get("device_type") == "cpu"
    memory_note = (
        "measured with the interpreter and its libraries" if is_cpu else "measured with the allocator's peak"
    )
    return [
        Compared("tokens per update", "tokens", plan["tokens_per_update"], middle("train/tokens"), "planned without padding"),
        Compared("updates", "updates", plan["total_steps"], most("progress/update")),
        Compared("tokens", "tokens", plan["total_tokens"], most("progress/tokens")),
        Compared("epochs", "epochs", plan["epochs"], most("progress/epoch")),
        Compared("time per update", "s", plan["step_s"], middle("perf/step_s"), "planned from peak and --mfu"),
        Compared("speed", "tokens/s", plan["tokens_per_s"], middle("perf/tokens_per_s"), "planned from peak and --mfu"),
        Compared("peak memory", "GiB", plan["peak_memory_bytes"] / GIB, most("perf/peak_memory_gib"), memory_note),
        Compared("checkpoint", "bytes", plan["checkpoint"]["bytes"], middle("ckpt/bytes")),
        Compared("a save blocks", "s", plan["checkpoint"]["blocked_s"], middle("ckpt/blocked_s"), "planned from --disk_gb_per_s"),
    ]  # fmt: skip
