"""Cutting a decay off a run that trains at a stable rate (layer P, standard library only).

`recipes.cooldown` asks `plan_branch` what a checkpoint gives, `setting_differences` whether a configuration is the one that
trained it, and `branch_config` for the configuration of the branch. Nothing here writes a file. Warmup-stable-decay as a trunk
with branches: Hu et al. 2024 (arXiv:2404.06395), Hagele et al. 2024 (arXiv:2405.18392).
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.resume import differences
from lit_gpt_loop.schedules import Schedule, ScheduleConfig

BRANCH_FILE = "branch.json"  # in its run directory
_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")
_LINKED = ("vocab_size", "context_length", "in_document_attention")


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
        parent_step: the update at which it was cut, skipped ones counted.
        parent_tokens: tokens that the parent had seen.
        parent_manifest_sha256: the field `sha256` of the checkpoint's manifest.json: the manifest's hash of itself without that
            field and without `verified`, which is written later (callbacks.checkpoint_retention.manifest_hash).
        checkpoint: the checkpoint's state, where the parent has it.
        warmup_steps: the parent's warmup, in updates.
        decay_steps: updates of decay, from the first one on.
        total_steps: the update at which it ends, skipped ones counted.
        skipped_updates: of the parent, up to the cut; they are not in the schedule.
        parent_lineage: where the parent itself comes from, as its manifest says; None if from nowhere.
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
    skipped_updates: int = 0
    parent_lineage: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Branch":
        """Return the branch that `dataclasses.asdict` wrote."""
        return cls(**{**values, "request": Request(**values["request"])})

    def __str__(self) -> str:
        asked = self.request
        return (
            f"cut from {asked.parent_run} at update {self.parent_step:,}: {asked.shape} decay over {self.decay_steps:,} updates to "
            f"{asked.final_ratio:g} x peak"
        )

    def is_same_cut(self, other: "Branch") -> bool:
        """Return whether another branch starts from the same checkpoint and decays alike, however both were asked for."""
        mine, theirs = (
            (b.request.parent_run, b.parent_step, b.parent_manifest_sha256, b.decay_steps, b.request.shape, b.request.final_ratio)
            for b in (self, other)
        )  # fmt: skip
        return mine == theirs

    def default_names(self) -> list[str]:
        """Return names for its run, the first that is free to be taken; the last one says all that tells it from others."""
        asked = self.request
        short = f"{asked.parent_run}-cooldown-{self.parent_step}-{asked.shape}"
        with_length = f"{short}-{self.decay_steps}"
        return [short, with_length, f"{with_length}-to-{asked.final_ratio:g}"]

    @property
    def group(self) -> str:
        """Name of the oldest run that it comes from, under which W&B shows them all."""
        return lineage_root(self.request.parent_run, self.parent_lineage)

    def schedule_config(self) -> ScheduleConfig:
        """Return what its configuration says of the schedule."""
        return ScheduleConfig(
            kind="wsd",
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            decay_shape=self.request.shape,  # type: ignore[arg-type]
            final_ratio=self.request.final_ratio,
            skipped_updates=self.skipped_updates,
        )

    def schedule(self) -> Schedule:
        """Return its rates."""
        return self.schedule_config().resolve(self.total_steps)

    def command(self, runs_dir: Path, checkpoint: str | None = None, decay_steps: str | None = None) -> str:
        """Return the command that continues it, or with another checkpoint or length cuts one like it."""
        asked = self.request
        whole = asked.decay_steps >= 1
        steps = decay_steps or str(int(asked.decay_steps) if whole else asked.decay_steps)
        name = "" if decay_steps else f" --name {self.name}"
        return (
            f"python -m recipes.cooldown --run {runs_dir / asked.parent_run} --from {checkpoint or asked.checkpoint} "
            f"--decay_steps {steps} --shape {asked.shape} --final_ratio {asked.final_ratio:g}{name}"
        )


def lineage_root(parent_run: str, parent_lineage: Mapping[str, Any] | None) -> str:
    """Return the name of the oldest run in a lineage."""
    while parent_lineage:
        parent_run, parent_lineage = parent_lineage["parent_run"], parent_lineage.get("parent_lineage")
    return parent_run


def read_branch(branch_dir: Path) -> Branch | None:
    """Return the branch that a run directory holds, None if it is no branch."""
    file = branch_dir / BRANCH_FILE
    return Branch.from_dict(json.loads(file.read_text())) if file.is_file() else None


def plan_branch(
    request: Request,
    checkpoint: str,
    schedule: Schedule,
    updates: int,
    manifest: dict[str, Any],
    other_steps: Sequence[int] = (),
    name: str | None = None,
    runs_dir: Path = Path("runs"),
) -> Branch:
    """Return the branch that a checkpoint gives.

    Args:
        request: what is asked.
        checkpoint: path of the checkpoint's state.
        schedule: which the parent followed to it.
        updates: that had happened by then, skipped ones not counted.
        manifest: the checkpoint's.
        other_steps: the parent's checkpoints, to name one that would do.
        name: of the branch's run; None takes the first of `Branch.default_names`.
        runs_dir: where the parent's own parent is looked for, to name it in an error.

    Raises:
        ValueError: it cannot be branched from (no stable phase, warmup not over, decay begun), or a share makes the decay longer
            than the run before it; the message has the remedy.
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
        raise ValueError(
            f"the checkpoint at update {updates} is decaying already, since update {schedule.decay_start}. "
            + _stable_instead(schedule.decay_start, other_steps, manifest.get("lineage"), runs_dir)
        )
    step, share = int(manifest["step"]), request.decay_steps
    decay = max(1, round(updates * share / (1.0 - share))) if share < 1 else int(share)
    if share < 1 and decay > updates:
        raise ValueError(
            f"decay_steps={share:g} is a share of the branch's updates, which makes {decay:,} updates of decay after {updates:,}: more "
            f"than half of a run is seldom meant. If it is, give the number: --decay_steps {decay}"
        )
    return Branch(
        name=name or f"{request.parent_run}-cooldown-{step}-{request.shape}",
        request=request,
        parent_step=step,
        parent_tokens=manifest.get("tokens"),
        parent_manifest_sha256=manifest.get("sha256"),
        checkpoint=checkpoint,
        warmup_steps=schedule.warmup_steps,
        decay_steps=decay,
        total_steps=step + decay,
        skipped_updates=step - updates,
        parent_lineage=manifest.get("lineage"),
    )


def _stable_instead(
    decay_start: int, steps: Sequence[int], lineage: Mapping[str, Any] | None, runs_dir: Path
) -> str:
    """Say from which checkpoint a branch can be cut, when the one asked for is decaying since `decay_start`."""
    stable = [s for s in steps if s <= decay_start]
    if stable:
        return f"The last stable checkpoint is archive:{max(stable)}"
    if lineage and ("decay_shape" in lineage or int(lineage["parent_step"]) <= decay_start):
        return (
            f"This run was itself cut from {lineage['parent_run']} at update {lineage['parent_step']}: branch from there, "
            f"--run {runs_dir / str(lineage['parent_run'])} --from archive:{lineage['parent_step']}"
        )
    return (
        "No checkpoint from before it is left: keep some with CheckpointRetention's archive_every_n_steps, or train a trunk "
        "with model.schedule.decay_steps: 0"
    )


def setting_differences(
    config: Mapping[str, Any], hyper_parameters: Mapping[str, Any], sequences_per_update: int | None = None
) -> list[str]:
    """Return one line for each setting in which a run's configuration is not what trained a checkpoint.

    Args:
        config: of a run, as its config.yaml has it.
        hyper_parameters: LitGPT's, in the checkpoint.
        sequences_per_update: the checkpoint's global batch, if it is known.
    """
    model, data = config.get("model") or {}, config.get("data") or {}
    now: dict[str, Any] = {k: _number(model[k]) for k in _OPTIMIZER if model.get(k) is not None}
    if model.get("config") is not None:
        linked = {k: model[k] for k in _LINKED if model.get(k) is not None}
        changed = {**(model.get("overrides") or {}), **linked}
        named = model["config"]
        shape = (
            GPTConfig.preset(named, **changed)
            if isinstance(named, str)
            else GPTConfig(**{**named.get("init_args", named), **changed})
        )
        now["config"] = asdict(shape)
    lines = differences(dict(hyper_parameters), now)
    batch = data.get("global_batch_size")
    if batch is None and data.get("global_batch_tokens") is not None:
        batch = data["global_batch_tokens"] // data["context_length"]
    if batch is not None and sequences_per_update is not None:
        lines += differences({"global_batch_size": sequences_per_update}, {"global_batch_size": batch})
    return lines


def _number(value: Any) -> Any:
    """Return the number that a word stands for: YAML reads 1e-8 as one."""
    if isinstance(value, list | tuple):
        return [_number(v) for v in value]
    return float(value) if isinstance(value, str) else value


def checkpoint_places(config: Mapping[str, Any], run_dir: Path) -> tuple[Path, str | None]:
    """Return (folder of a run's checkpoints, URL of their copies or None), as its CheckpointRetention was told."""
    for callback in _listed(config, "callbacks"):
        if _is_class(callback, "CheckpointRetention"):
            settings = callback.get("init_args") or {}
            given = settings.get("dirpath") or str(run_dir / "checkpoints")
            return Path(moved(given, run_dir, run_dir, _written_as(config, run_dir))), settings.get("copy_to")
    return run_dir / "checkpoints", None


def _written_as(config: Mapping[str, Any], run_dir: Path) -> Path:
    """Return how a configuration calls its run's directory, which may be relative to where the run was started."""
    return Path(config.get("runs_dir") or "runs") / str(config.get("run") or run_dir.name)


def _listed(config: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return what the trainer has under `key`, one or several, as far as it has settings."""
    found = (config.get("trainer") or {}).get(key)
    return [item for item in (found if isinstance(found, list) else [found]) if isinstance(item, dict)]


def _is_class(item: Mapping[str, Any], name: str) -> bool:
    return str(item.get("class_path", "")).split(".")[-1] == name


def branch_config(config: dict[str, Any], branch: Branch, parent_dir: Path) -> dict[str, Any]:
    """Return the parent's configuration with the branch's name, end and schedule, and no path into the parent's directory."""
    branch_dir = parent_dir.parent / branch.name
    config = moved(copy.deepcopy(config), parent_dir, branch_dir, _written_as(config, parent_dir))
    config.update(run=branch.name, runs_dir=str(parent_dir.parent), max_tokens=None, ckpt_path=None)
    # max_time: Lightning restores the time that the parent has taken, which would end the branch at once.
    config["trainer"].update(max_steps=branch.total_steps, max_time=None, default_root_dir=None)
    config["model"]["schedule"] = asdict(branch.schedule_config())
    callbacks = config["trainer"].get("callbacks")
    if isinstance(callbacks, list):
        config["trainer"]["callbacks"] = [
            c for c in callbacks if not (isinstance(c, dict) and _is_class(c, "Timer"))
        ]
    for callback in _listed(config, "callbacks"):
        if _is_class(callback, "CheckpointRetention"):
            # The parent's folder, and its copies elsewhere, are the parent's alone.
            callback["init_args"] = {**(callback.get("init_args") or {}), "dirpath": None, "copy_to": None}
    for logger in _listed(config, "logger"):
        for key in ("id", "version"):  # of the parent's own W&B run
            if "WandbLogger" in str(logger.get("class_path")) and (logger.get("init_args") or {}).get(key):
                logger["init_args"][key] = None
    return config


def moved(value: Any, old: Path, new: Path, written: Path | None = None) -> Any:
    """Return a configuration in which every path inside of `old` lies in `new` instead.

    Args:
        value: the configuration, or a part of it.
        old: a run's directory.
        new: what takes its place.
        written: how the configuration itself calls `old`, which may be relative to where the run was started.
    """
    if isinstance(value, dict):
        return {k: moved(v, old, new, written) for k, v in value.items()}
    if isinstance(value, list):
        return [moved(v, old, new, written) for v in value]
    if not isinstance(value, str):
        return value
    rest = _inside(value, old)
    # One word alone may be a name rather than a path.
    if (
        rest is None
        and written is not None
        and len(written.parts) > 1
        and Path(value).is_relative_to(written)
    ):
        rest = os.path.relpath(value, written)
    return value if rest is None else str(new / rest)


def _inside(value: str, folder: Path) -> str | None:
    """Return the path that a word names, relative to the folder that it lies in; None if it is no path in there."""
    inner = os.path.realpath(folder)
    if not os.path.exists(value) and Path(os.path.realpath(".")).is_relative_to(inner):
        return None  # from in there any word at all would be a path
    path = os.path.realpath(value)
    return os.path.relpath(path, inner) if Path(path).is_relative_to(inner) else None
