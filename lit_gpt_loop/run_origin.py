"""Which checkpoint a run goes on from, and where the run came from (layer P, standard library only).

A run that began from another run's checkpoint keeps origin.json, a branch of recipes.cooldown branch.json. Its config.yaml
names no checkpoint: the same configuration again continues the run from its own latest one.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lit_gpt_loop.branch import Branch, lineage_root
from lit_gpt_loop.schedules import Schedule

ORIGIN_FILE = "origin.json"


def manifest_of(checkpoint: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return (step directory, manifest) of a checkpoint of CheckpointRetention; None for any other."""
    for folder in (checkpoint, checkpoint.parent):
        if (folder / "manifest.json").is_file():
            return folder, json.loads((folder / "manifest.json").read_text())
    return None


def is_of_another_run(checkpoint: Path, run_dir: Path, folder: Path) -> bool:
    """Return whether a checkpoint lies neither in a run's directory nor in its folder of checkpoints."""
    found = manifest_of(checkpoint)
    # A step directory may be a link to elsewhere; where it is linked from counts.
    path = found[0].parent.resolve() if found else checkpoint.resolve()
    return not any(path.is_relative_to(place.resolve()) for place in (folder, run_dir / "checkpoints"))


def later_steps(checkpoint: Path, folder: Path) -> list[int]:
    """Return the updates at which a folder has checkpoints of the same run that are later than one of its own; [] for another's."""
    found = manifest_of(checkpoint)
    if found is None or found[0].parent.resolve() != folder.resolve():
        return []
    mine = found[1]
    manifests = [json.loads(p.read_text()) for p in folder.glob("step-" + "[0-9]" * 8 + "*/manifest.json")]
    return sorted(
        m["step"] for m in manifests if m.get("run") == mine.get("run") and m["step"] > mine["step"]
    )


def lineage_of(checkpoint: Path, run_dir: Path, folder: Path) -> dict[str, Any] | None:
    """Return where a run that goes on from a checkpoint comes from, as its own manifests will say; None if from nowhere."""
    found = manifest_of(checkpoint)
    if found is None:
        return None
    step_dir, manifest = found
    if not is_of_another_run(checkpoint, run_dir, folder):
        lineage: dict[str, Any] | None = manifest.get("lineage")
        return lineage
    return {
        "parent_run": step_dir.parent.parent.name,
        "parent_step": manifest["step"],
        "parent_manifest_sha256": manifest.get("sha256"),
        "parent_tokens": manifest.get("tokens"),
        "parent_lineage": manifest.get("lineage"),
    }


def group_of(run: str, lineage: Mapping[str, Any] | None) -> str:
    """Return the name that a trunk and all that descends from it share: the oldest run's."""
    return lineage_root(lineage["parent_run"], lineage.get("parent_lineage")) if lineage else run


def find_start(
    spec: str,
    run_dir: Path,
    folder: Path,
    resolve: Callable[[str], Path | None],
    branch: Branch | None = None,
    may_begin_branch: bool = False,
) -> tuple[Path | None, bool]:
    """Return the checkpoint that training goes on from, and whether the run begins with it.

    Args:
        spec: what the user names: auto, none or a checkpoint.
        run_dir: of the run.
        folder: of its checkpoints.
        resolve: finds a checkpoint by its name; "auto" is the run's latest, None if it has none.
        branch: that the directory holds.
        may_begin_branch: whether this command may train it from its parent's checkpoint (recipes.cooldown).

    Returns:
        The checkpoint (None: a fresh start), and whether the run has none of its own yet.

    Raises:
        ValueError: it would mix two runs in one directory, or the run began from a checkpoint that is gone.
    """
    word = spec.lower()
    # The same command again, also when the parent has pruned that checkpoint meanwhile.
    if _began_from(run_dir, spec) and (own := resolve("auto")) is not None:
        return own, False
    given = resolve(spec) if word not in ("auto", "none") else None
    if given is not None and not is_of_another_run(given, run_dir, folder):
        return given, False
    own = resolve("auto")
    if own is not None and word == "none":
        raise ValueError(
            f"--ckpt_path none asks for a fresh start, but {run_dir} holds checkpoints ({own}): choose another --run, or leave "
            "--ckpt_path out to continue"
        )
    if own is not None:
        return (own if given is None else same_run(run_dir, given, own)), False
    if branch is not None and not may_begin_branch:
        raise ValueError(
            f"{run_dir} is a branch that has saved no checkpoint yet: the command that began it continues it, "
            f"{branch.command(run_dir.parent)}"
        )
    return (read_origin(run_dir) if word == "auto" else given), True


def same_run(run_dir: Path, given: Path, own: Path) -> Path:
    """Return the checkpoint that a run with checkpoints of its own goes on from when it is given one from elsewhere.

    That is its own latest if it began from the given one (the same command again), and the given one if it is a copy of its own.

    Args:
        run_dir: of the run.
        given: a checkpoint of another run.
        own: the run's latest.

    Raises:
        ValueError: the run did not begin from `given`.
    """
    found, latest = manifest_of(given), manifest_of(own)
    sha256 = found[1].get("sha256") if found else None
    lineage = (latest[1].get("lineage") if latest else None) or {}
    if found and latest and found[1].get("run") and found[1].get("run") == latest[1].get("run"):
        return given
    if sha256 is not None and lineage.get("parent_manifest_sha256") == sha256:
        return own
    raise ValueError(
        f"--ckpt_path {given} is of another run, and {run_dir} holds checkpoints of its own ({own}): one directory holds one "
        "run. Choose another --run, or leave --ckpt_path out to continue this one"
    )


def write_origin(run_dir: Path, checkpoint: Path | None) -> None:
    """Note the checkpoint of another run that a run begins from; None removes the note."""
    file = run_dir / ORIGIN_FILE
    if checkpoint is None:
        file.unlink(missing_ok=True)
        return
    found = manifest_of(checkpoint)
    sha256 = found[1].get("sha256") if found else None
    file.write_text(json.dumps({"checkpoint": str(checkpoint.resolve()), "manifest_sha256": sha256}) + "\n")


def _began_from(run_dir: Path, spec: str) -> bool:
    """Return whether a run began from the checkpoint that a path names: its state, or its step directory."""
    file = run_dir / ORIGIN_FILE
    if not file.is_file():
        return False
    state = Path(json.loads(file.read_text())["checkpoint"])
    return Path(spec).resolve() in (state, state.parent)


def read_origin(run_dir: Path) -> Path | None:
    """Return the checkpoint of another run that a run began from; None if it began from nothing.

    Raises:
        ValueError: that checkpoint is gone or has been replaced, and the run has none of its own.
    """
    file = run_dir / ORIGIN_FILE
    if not file.is_file():
        return None
    noted = json.loads(file.read_text())
    checkpoint = Path(noted["checkpoint"])
    found = manifest_of(checkpoint)
    if not checkpoint.exists() or (found[1].get("sha256") if found else None) != noted["manifest_sha256"]:
        raise ValueError(
            f"{run_dir} began from {checkpoint}, has saved no checkpoint of its own, and that one is no longer there: begin "
            "another run from a checkpoint that is, --run NAME --ckpt_path PATH"
        )
    return checkpoint


def check_branch(branch: Branch, run_dir: Path, schedule: Schedule, max_steps: int | None) -> None:
    """Refuse to train a branch as something else.

    Args:
        branch: that the run's directory holds.
        run_dir: its directory.
        schedule: that the configuration gives.
        max_steps: the end that the configuration gives.

    Raises:
        ValueError: its end or its rates differ from the branch's.
    """
    if max_steps == branch.total_steps and schedule == branch.schedule():
        return
    raise ValueError(
        f"{run_dir} is a branch, cut from {branch.request.parent_run} at update {branch.parent_step}: its decay has begun and ends "
        f"at update {branch.total_steps}, so it can be neither extended nor given another schedule (trainer.max_steps="
        f"{max_steps}, {schedule.kind}). Cut another one: {branch.command(run_dir.parent, f'archive:{branch.parent_step}', 'N')}"
    )
