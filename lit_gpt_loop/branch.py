"""Cutting a decay off a run that trains at a stable rate (layer P, standard library only).

`recipes.cooldown` asks `plan_branch` what a checkpoint gives and `branch_config` for the configuration that trains it. Nothing
here touches a file. Warmup-stable-decay as a trunk with branches: Hu et al. 2024 (arXiv:2404.06395), Hagele et al. 2024
(arXiv:2405.18392).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_gpt_loop.schedules import Schedule


@dataclass(frozen=True)
class Request:
    """What a user asks of `recipes.cooldown`; the same request twice means the same branch.

    Attributes:
        parent_run: name of the run to cut from.
        checkpoint: which of its checkpoints: latest, best, archive:STEP or a path.
        decay_steps: updates of decay; below 1, their share of all updates of the branch.
        shape: how the rate falls.
        final_ratio: last rate / peak.
    """

    parent_run: str
    checkpoint: str
    decay_steps: float
    shape: str
    final_ratio: float

    def __post_init__(self) -> None:
        if self.decay_steps <= 0 or (self.decay_steps >= 1 and self.decay_steps != int(self.decay_steps)):
            raise ValueError(
                f"decay_steps={self.decay_steps:g} must be a whole number of updates (>= 1), or a share of the branch between 0 and 1"
            )
        if not 0.0 <= self.final_ratio <= 1.0:
            raise ValueError(
                f"final_ratio={self.final_ratio} must lie in [0, 1]: it is the last rate divided by the peak"
            )


@dataclass(frozen=True)
class Branch:
    """A branch: where it comes from and how it decays. Kept as branch.json in its run directory.

    Attributes:
        name: of its run.
        request: what was asked.
        parent_step: the update at which it was cut.
        parent_tokens: tokens that the parent had seen.
        parent_manifest_sha256: hash of the checkpoint's manifest.
        checkpoint: the checkpoint's state.
        warmup_steps: the parent's warmup, in updates.
        decay_steps: updates of decay, from the first one on.
        total_steps: where it ends.
    """

    name: str
    request: Request
    parent_step: int
    parent_tokens: int | None
    parent_manifest_sha256: str | None
    checkpoint: str
    warmup_steps: int
    decay_steps: int
    total_steps: int

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Branch":
        """Return the branch that `dataclasses.asdict` wrote."""
        return cls(**{**values, "request": Request(**values["request"])})


def plan_branch(
    request: Request,
    checkpoint: str,
    schedule: Schedule,
    updates: int,
    manifest: dict[str, Any],
    other_steps: Sequence[int] = (),
    name: str | None = None,
) -> Branch:
    """Return the branch that a checkpoint gives.

    Args:
        request: what is asked.
        checkpoint: path of the checkpoint's state.
        schedule: which the parent followed to it.
        updates: that had happened by then.
        manifest: the checkpoint's.
        other_steps: the parent's checkpoints, to name one that would do.
        name: of the branch's run; None makes one of parent, step and shape.

    Raises:
        ValueError: it cannot be branched from: no stable phase, warmup not over, decay begun; the message has the remedy.
    """
    if schedule.kind == "cosine":
        raise ValueError(
            f"{request.parent_run} follows a cosine, whose rate falls from the end of warmup to an end that was fixed before it began: "
            "it has no stable phase to branch from. Train a trunk with model.schedule.kind: wsd (decay_steps: 0 for one without an end)"
        )
    if updates < schedule.warmup_steps:
        raise ValueError(
            f"the checkpoint at update {updates} is still in warmup, which ends at update {schedule.warmup_steps}: branch from a later one"
        )
    if schedule.decay_start is not None and updates > schedule.decay_start:
        stable = [s for s in other_steps if s <= schedule.decay_start]
        remedy = (
            f"The last stable checkpoint is archive:{max(stable)}"
            if stable
            else "No checkpoint from before it is left: keep some with CheckpointRetention's archive_every_n_steps, or train a trunk "
            "with model.schedule.decay_steps: 0"
        )
        raise ValueError(
            f"the checkpoint at update {updates} is decaying already, since update {schedule.decay_start}. {remedy}"
        )
    step, share = int(manifest["step"]), request.decay_steps
    decay = max(1, round(updates * share / (1.0 - share))) if share < 1 else int(share)
    return Branch(
        name=name or f"{request.parent_run}-cooldown-{step}-{request.shape}",
        request=request,
        parent_step=step,
        parent_tokens=manifest.get("tokens"),
        parent_manifest_sha256=manifest.get("sha256"),
        checkpoint=checkpoint,
        warmup_steps=schedule.warmup_steps,
        # Updates that were skipped count as steps of the run, but not in its schedule: decay begins that much earlier.
        decay_steps=decay + step - updates,
        total_steps=step + decay,
    )


def branch_config(config: dict[str, Any], branch: Branch, parent_dir: Path) -> dict[str, Any]:
    """Return the parent's configuration with the branch's name, end and schedule, and no path into the parent's directory."""
    config = moved(copy.deepcopy(config), parent_dir, parent_dir.parent / branch.name)
    config.update(run=branch.name, runs_dir=str(parent_dir.parent), max_tokens=None, ckpt_path=None)
    config["trainer"].update(max_steps=branch.total_steps, default_root_dir=None)
    config["model"]["schedule"] = {
        "kind": "wsd",
        "warmup_steps": branch.warmup_steps,
        "decay_steps": branch.decay_steps,
        "decay_shape": branch.request.shape,
        "final_ratio": branch.request.final_ratio,
    }
    for callback in config["trainer"].get("callbacks") or []:
        if str(callback.get("class_path", "")).endswith("CheckpointRetention"):
            # The parent's folder, and its copies elsewhere, are the parent's alone.
            callback["init_args"] = {**(callback.get("init_args") or {}), "dirpath": None, "copy_to": None}
    return config


def moved(value: Any, old: Path, new: Path) -> Any:
    """Return a configuration in which every path inside of `old` lies in `new` instead."""
    if isinstance(value, dict):
        return {k: moved(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [moved(v, old, new) for v in value]
    if isinstance(value, str):
        for prefix, replacement in ((str(old), str(new)), (str(old.absolute()), str(new.absolute()))):
            if value == prefix or value.startswith(prefix + "/"):
                return replacement + value[len(prefix) :]
    return value
