"""Where a branch starts: which one a `recipes.cooldown` command means, its directory, and the checkpoint that it is cut from.

RUNS/TRUNK-cooldown-STEP-SHAPE/   (-DECAY_STEPS, -to-FINAL_RATIO added where another branch has that name)
  branch.json      the branch: a directory without it is no branch yet, whatever a failed start left there
  config.yaml      training has started: until then the directory is free for another branch
  cooldown.yaml    the trunk's configuration at the checkpoint, with the branch's end and schedule
  .start/          the checkpoint as hard links (copies where the file system has none), until the branch has one of its
                   own: the trunk may prune it meanwhile
  .lock            one process trains here (lit_gpt_loop.run_lock)
"""

import hashlib
import json
import os
import re
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from callbacks.checkpoint_retention import CheckpointRetention, list_saved, read_manifest
from lit_gpt_loop.branch import (
    BRANCH_FILE,
    Branch,
    Request,
    branch_config,
    checkpoint_places,
    plan_branch,
    read_branch,
    setting_differences,
)
from lit_gpt_loop.checkpoint_files import open_checkpoint
from lit_gpt_loop.cli import check_run_name
from lit_gpt_loop.ranks import ask, rank_and_world_size, tell, topic
from lit_gpt_loop.run_lock import NAME as LOCK
from lit_gpt_loop.run_lock import RunLockedError, run_lock
from lit_gpt_loop.schedules import Schedule
from recipes.pretrain import newest_config

CONFIG_FILE, START = "cooldown.yaml", ".start"
# In the environment of the ranks that Lightning starts with the same command.
DECIDED = "LIT_GPT_LOOP_BRANCH"
_TRIES = 3  # to link the latest checkpoint before a trunk that is being trained prunes it


def settle(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, ExitStack | None]:
    """Decide which branch this command means; prepare its directory unless it has begun.

    Returns:
        The branch, and on rank 0 what holds its directory for this process until closed.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it cannot be branched from, or the name is taken; the message has the remedy.
    """
    if (decided := os.environ.get(DECIDED)) is not None:
        return Branch.from_dict(json.loads(decided)), None
    rank, world_size = rank_and_world_size()
    question = topic(str(run_dir.resolve()), asdict(request), name)
    if rank > 0:
        answer = ask(run_dir.parent, question, rank)
        if "error" in answer:
            raise ValueError(f"rank 0 cannot start the branch: {answer['error']}")
        return Branch.from_dict(answer["branch"]), None
    try:
        branch, lock = _decide(run_dir, request, name)
    except Exception as e:
        with suppress(RuntimeError):  # they are gone: this error says more
            tell(run_dir.parent, question, {"error": str(e)}, world_size, timeout_s=60.0)
        raise
    try:
        tell(run_dir.parent, question, {"branch": asdict(branch)}, world_size)
    except RuntimeError:
        lock.close()
        raise
    return branch, lock


def _decide(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, ExitStack]:
    if name is not None:
        check_run_name(name)
    if (begun := _begun(run_dir, request, name)) is not None:
        return begun
    pruned: _PrunedError | None = None
    for left in reversed(range(_TRIES)):
        try:
            return _begin(run_dir, request, name)
        except _PrunedError as e:
            pruned = e
        except _TakenError:
            if name is not None or not left:
                raise
            time.sleep(0.3)  # by a branch that began just now: until it says what it is
    raise FileNotFoundError(
        f"{pruned} was pruned while the branch was being prepared: name a checkpoint that stays, --from archive:STEP "
        "(CheckpointRetention's archive_every_n_steps), or raise its keep_latest"
    )


def start_of(branch: Branch, branch_dir: Path) -> Path:
    """Return the state that the branch starts from: what it keeps of it, else where the parent has it."""
    state = Path(branch.checkpoint)
    kept = branch_dir / START / state.parent.name / state.name
    return kept if kept.exists() else state


def forget_failed(branch: Branch, branch_dir: Path) -> None:
    """Remove the directory of a branch whose command failed before training started, so that its name stays free."""
    if not _was_trained(branch_dir) and Path(branch.checkpoint).exists():
        shutil.rmtree(branch_dir, ignore_errors=True)


def forget_start(branch_dir: Path) -> None:
    """Remove the checkpoint that a branch started from, if it has one of its own by now."""
    if list_saved(branch_dir / "checkpoints"):
        shutil.rmtree(branch_dir / START, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------- beginning


class _PrunedError(Exception):
    """The checkpoint disappeared between finding and keeping it."""


class _TakenError(ValueError):
    """The directory is another run's, or is being trained."""


def _begin(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, ExitStack]:
    folder, copy_to = checkpoint_places(_read_config(newest_config(run_dir)), run_dir)
    state = CheckpointRetention.resolve(folder, request.checkpoint, copy_to=copy_to)
    step_dir = None
    if state is not None:
        step_dir = next((p for p in (state, state.parent) if (p / "manifest.json").is_file()), None)
    manifest = read_manifest(step_dir) if step_dir is not None else None
    if state is None or step_dir is None or manifest is None:
        raise FileNotFoundError(
            f"{run_dir} has no checkpoint {request.checkpoint!r} of CheckpointRetention: train first"
        )
    if step_dir.parent.resolve() != folder.resolve():
        raise ValueError(
            f"{step_dir} is no checkpoint of {run_dir}, whose checkpoints are in {folder}: the branch would name a wrong parent "
            f"and take another run's configuration. Give the run that wrote it, --run {step_dir.parent.parent}"
        )
    try:
        rest = open_checkpoint(state)[1]
    except FileNotFoundError as e:
        raise _PrunedError(step_dir) from e
    found = rest.get("lit_gpt") or {}
    if found.get("schedule") is None:
        raise ValueError(
            f"{state} does not say which schedule it followed: recipes.cooldown branches runs of recipes.pretrain"
        )
    branch = plan_branch(
        request,
        str(state),
        Schedule(**found["schedule"]),
        int(found["updates"]),
        manifest,
        [s.step for s in list_saved(folder)],
        name,
        run_dir.parent,
    )
    if name is None:
        branch = _named(branch, run_dir.parent)
    try:
        check_run_name(branch.name)
    except ValueError as e:
        raise ValueError(f"{e}. Give the branch another --name") from e
    config = branch_config(config_of(run_dir, state, rest), branch, run_dir)
    return _prepare(branch, run_dir.parent / branch.name, config, step_dir, manifest)


def _prepare(
    branch: Branch, branch_dir: Path, config: dict[str, Any], step_dir: Path, manifest: dict[str, Any]
) -> tuple[Branch, ExitStack]:
    """Take the branch's directory and put into it what it starts from; leave nothing behind if that fails."""
    _same_branch(branch, branch_dir)
    lock, is_new = ExitStack(), False
    try:
        lock.enter_context(run_lock(branch_dir))
        present = _same_branch(branch, branch_dir)  # again: nobody else begins it now
        is_new = present is None
        if present is not None and list_saved(branch_dir / "checkpoints"):
            return present, lock
        if is_new:
            _clear(branch_dir)
        _keep(step_dir, manifest, branch_dir)
        _write(branch_dir / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False))
        _write(branch_dir / BRANCH_FILE, json.dumps(asdict(branch), indent=2) + "\n")
    except RunLockedError as e:
        raise _TakenError(f"{e}. For a branch, give another --name") from e
    except BaseException:
        if is_new:
            shutil.rmtree(branch_dir, ignore_errors=True)
        lock.close()
        raise
    return branch, lock


def _named(branch: Branch, runs_dir: Path) -> Branch:
    """Return a branch under the name of the directory that holds it already, else under the first of its names that is free."""
    for folder in sorted(runs_dir.glob(f"{branch.request.parent_run}-cooldown-*")):
        present = read_branch(folder)
        if present is not None and present.name == folder.name and present.is_same_cut(branch):
            return present
    names = branch.default_names()
    free = (n for n in names if read_branch(runs_dir / n) is None or _is_free(runs_dir / n))
    return replace(branch, name=next(free, names[-1]))


def _same_branch(branch: Branch, branch_dir: Path) -> Branch | None:
    """Return the same branch if a directory holds it, None if the directory is free.

    Raises:
        _TakenError: it holds something else.
    """
    present = read_branch(branch_dir)
    if present is not None and present.is_same_cut(branch):
        return present
    if _is_free(branch_dir):
        return None
    if present is None:
        what = "a run that is no branch"
    elif present.parent_step == branch.parent_step and present.request == branch.request:
        what = f"a branch of another checkpoint of update {present.parent_step:,}, which {branch.request.parent_run} has replaced since"
    else:
        what = f"another branch ({present})"
    raise _TakenError(f"{branch_dir} holds {what}: give this one another --name")


def _was_trained(branch_dir: Path) -> bool:
    """Return whether training has started in a branch's directory."""
    return any(branch_dir.glob("config*.yaml")) or bool(list_saved(branch_dir / "checkpoints"))


def _is_free(branch_dir: Path) -> bool:
    """Return whether a directory is missing or holds nothing but what a start that failed has left."""
    if not branch_dir.exists():
        return True
    ours = (".lock", "branch.lock", BRANCH_FILE, CONFIG_FILE, "tokenizer.json", "wandb", "checkpoints")
    names = [p.name for p in branch_dir.iterdir()]
    parts = (START, f".{CONFIG_FILE}", f".{BRANCH_FILE}")
    left = all(name in ours or name.startswith(parts) for name in names)
    return bool(names) and left and not _was_trained(branch_dir)


def _clear(branch_dir: Path) -> None:
    """Remove what a start that failed has left in a directory that this process holds."""
    for path in branch_dir.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _keep(step_dir: Path, manifest: dict[str, Any], branch_dir: Path) -> None:
    """Put a checkpoint's files into the branch's directory, in place at once or not at all."""
    kept, temporary = branch_dir / START, branch_dir / f"{START}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for name in ("manifest.json", *manifest["files"]):
            source, target = step_dir / name, temporary / step_dir.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                shutil.copy2(source, target)
    except FileNotFoundError as e:
        raise _PrunedError(step_dir) from e
    shutil.rmtree(kept, ignore_errors=True)
    os.rename(temporary, kept)


def config_of(run_dir: Path, state: Path, rest: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that a run's checkpoint was trained with.

    Args:
        run_dir: of the run, with its config.yaml, config-2.yaml ...
        state: the checkpoint, for messages.
        rest: what it holds besides tensors; `run_config` names the file. Without that, the newest that agrees.

    Raises:
        ValueError: the file is another one by now, or none agrees with the checkpoint's hyper-parameters.
    """
    named = rest.get("run_config") or {}
    file = run_dir / str(named.get("file"))
    files = [file] if file.is_file() else _configs(run_dir)
    lines: list[str] = []
    for file in files:
        config = _read_config(file)
        if hashlib.sha256(file.read_bytes()).hexdigest() == named.get("sha256"):
            return config
        found = setting_differences(
            config, rest.get("hyper_parameters") or {}, named.get("sequences_per_update")
        )
        if not found:
            return config
        lines = lines or [f"{files[0]}: {'; '.join(found)}"]
    raise ValueError(
        f"no configuration in {run_dir} is the one that trained {state}: {lines[0]}. A branch goes on with its checkpoint's "
        "settings: put them into that file, or name a checkpoint that was trained with the file's"
    )


def _configs(run_dir: Path) -> list[Path]:
    """Return a run's configurations, newest first."""
    return sorted(run_dir.glob("config*.yaml"), key=lambda p: -int(re.sub(r"\D", "", p.stem) or 1))


def _read_config(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(file.read_text())
    return config


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


# --------------------------------------------------------------------------------------------------------- continuing


def _begun(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, ExitStack] | None:
    """Return the branch that this same command began earlier and nobody is training, held for this process.

    With `--from latest` the trunk may have moved on since: such a branch goes on from where it was cut, until it is complete.
    """
    pattern = name or f"{request.parent_run}-cooldown-*"
    begun = [(b, d) for d in run_dir.parent.glob(pattern) if (b := read_branch(d)) is not None]
    for branch, folder in sorted(begun, key=lambda item: -item[0].parent_step):
        saved = list_saved(folder / "checkpoints")
        is_complete = any(s.step >= branch.total_steps for s in saved)
        is_lost = not saved and not start_of(branch, folder).exists()
        moves = request.checkpoint in ("latest", "best") and name is None
        if branch.request != request or is_lost or (is_complete and moves):
            continue
        lock = ExitStack()
        try:
            lock.enter_context(run_lock(folder))
        except RunLockedError:
            continue
        return branch, lock
    return None
