"""What may differ between a checkpoint and the run that continues it (layer P, standard library only)."""

from pathlib import Path
from typing import Any

from lit_gpt_loop.schedules import Schedule, first_difference

# Fields of GPTConfig that decide how a model is trained, not which tensors it has.
FREE_CONFIG = {
    "dropout",
    "activation_checkpointing",
    "in_document_attention",
    "init_std",
    "norm_eps",
    "rope_theta",
}


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return one line for each setting that both have and that differs; nested settings by dotted name."""
    lines = []
    for key in sorted(old.keys() & new.keys()):
        a, b = old[key], new[key]
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif (list(a) if isinstance(a, tuple) else a) != (list(b) if isinstance(b, tuple) else b):
            lines.append(f"{prefix}{key}: {a} in the checkpoint, {b} now")
    return lines


def check_architecture(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse to continue a model as another one.

    Args:
        old: GPTConfig's fields in the checkpoint.
        new: those of this run.

    Raises:
        ValueError: a field that decides which tensors the model has differs.
    """
    shapes = [{k: v for k, v in config.items() if k not in FREE_CONFIG} for config in (old, new)]
    fixed = differences(shapes[0], shapes[1])
    if fixed:
        raise ValueError(
            f"the checkpoint holds another model ({'; '.join(fixed)}): give the model of the run that wrote it, or start "
            "another run with --run NAME"
        )


def check_schedule(old: Schedule, new: Schedule, num_updates: int, ckpt_path: Path | None) -> int | None:
    """Return the index of the first update whose rate this run changes, or None if none does.

    Args:
        old: schedule of the checkpoint's run.
        new: schedule of this run.
        num_updates: updates that were made.
        ckpt_path: the checkpoint, beside which an earlier one may stand from which the run can be extended.

    Raises:
        ValueError: an update that was made would have used another rate under `new`.
    """
    n = first_difference(old, new, num_updates)
    if n is None:
        ends = [s.total_steps for s in (old, new) if s.total_steps is not None]
        return first_difference(old, new, max([num_updates, *ends]))
    if old.kind == "cosine":
        remedy = (
            "a cosine's rates depend on the run's length, so it can be neither extended nor cut: keep kind and length, or "
            "train with kind: wsd."
        )
    elif old.decay_start is not None and old.decay_start < num_updates:
        remedy = f"Its decay began after update {old.decay_start}. {_last_stable(ckpt_path, old.decay_start)}"
        if old.warmup_steps != new.warmup_steps:
            remedy += f" Its warmup, a share of its length, is set with model.schedule.warmup_steps={old.warmup_steps}."
    elif old.warmup_steps != new.warmup_steps:
        remedy = (
            "A warmup given as a share of the run changes with its length: set model.schedule.warmup_steps="
            f"{old.warmup_steps}."
        )
    else:
        remedy = (
            "Keep the schedule that the run began with, or lengthen the run: decay cannot begin in the past."
        )
    raise ValueError(
        f"This run's schedule disagrees with what the checkpoint's run did: update {n + 1} of {num_updates} used "
        f"{old(n):.6g} x peak, this schedule ({new.kind}, {new.total_steps} updates) says {new(n):.6g} x peak, and the rates "
        f"of the past cannot change. {remedy}"
    )


def _last_stable(ckpt_path: Path | None, decay_start: int) -> str:
    """Say from which checkpoint beside the present one a run can be extended."""
    stable: dict[int, Path] = {}
    if ckpt_path is not None:
        folder = ckpt_path if (ckpt_path / "manifest.json").is_file() else ckpt_path.parent
        for manifest in folder.parent.glob("step-" + "[0-9]" * 8 + "*/manifest.json"):
            step = int(manifest.parent.name.split("-")[1])
            if step <= decay_start:
                stable[step] = manifest.parent
    if not stable:
        return (
            "No checkpoint from before it is left, so it cannot be extended: archive some (CheckpointRetention's "
            "archive_every_n_steps), or cut decays off a trunk with recipes.cooldown."
        )
    return f"Extend from the last stable checkpoint: --ckpt_path {stable[max(stable)]}, with another --run to keep this one."
