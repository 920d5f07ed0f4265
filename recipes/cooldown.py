"""Cut a model off a run: `python -m recipes.cooldown --run runs/trunk --from latest --decay_steps 500`.

A run whose rate is stable (warmup-stable-decay, before its decay) can be decayed from any of its checkpoints. This trains that
decay as a run of its own, runs/TRUNK-cooldown-STEP-SHAPE (or --name): weights, moments, RNG and data go on from the checkpoint,
the trunk's files stay as they are, and the trunk may train on. Every manifest of the branch names its parent (run, step, hash
of the manifest, tokens, the parent's own lineage); branch.json and W&B's config say the same, and W&B groups both runs.

The same command again continues a branch that was killed. Different steps, shapes or names are different branches, and may
run at once.

examples:
  python -m recipes.cooldown --run runs/trunk --from latest --decay_steps 0.2          (a fifth of all its updates decay)
  python -m recipes.cooldown --run runs/trunk --from archive:4000 --decay_steps 1000 --shape linear --final_ratio 0.1

Arguments that begin with --trainer. or --data. override the trunk's configuration, as for recipes.pretrain.
"""

import fcntl
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

import yaml
from jsonargparse import ArgumentParser

import lit_gpt_loop  # noqa: F401  refuses compromised releases of Lightning before it is imported
from callbacks.checkpoint_retention import CheckpointRetention, list_saved, read_manifest
from callbacks.restart_equivalence import RestartEquivalence
from lit_gpt_loop.branch import Branch, Request, branch_config, plan_branch
from lit_gpt_loop.checkpoint_files import open_checkpoint
from lit_gpt_loop.cli import PretrainCLI
from lit_gpt_loop.journal import RunWandbLogger
from lit_gpt_loop.schedules import Schedule
from recipes.pretrain import find_run, newest_config, quiet, resolve, run_command

BRANCH_FILE, CONFIG_FILE, LOCK_FILE = "branch.json", "cooldown.yaml", "branch.lock"
_DECIDED = (
    "LIT_GPT_LOOP_BRANCH"  # in the environment of the ranks that Lightning starts with the same command
)
_WAIT_S = 120.0


def main(args: list[str] | None = None) -> PretrainCLI:
    """Run the command line (the process's own arguments by default)."""
    quiet()
    own, overrides = split_arguments(sys.argv[1:] if args is None else args)
    options = _parser().parse_args(own)
    run_dir = find_run(options.run)
    request = Request(
        run_dir.resolve().name, options["from"], options.decay_steps, options.shape, options.final_ratio
    )
    branch, lock = settle(run_dir, request, options.name)
    branch_dir = run_dir.parent / branch.name
    is_begun = bool(list_saved(branch_dir / "checkpoints"))
    environment = {_DECIDED: json.dumps(asdict(branch)), "WANDB_RUN_GROUP": request.parent_run}
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    if lock is not None:
        print(
            f"branch: {branch_dir}, {'continued; it was ' if is_begun else ''}cut from {request.parent_run} at update "
            f"{branch.parent_step:,}: {request.shape} decay over {branch.decay_steps:,} updates to {request.final_ratio:g} x peak"
        )
    try:
        start = "auto" if is_begun else branch.checkpoint
        return CooldownCLI(
            branch,
            is_begun,
            args=["fit", "--config", str(branch_dir / CONFIG_FILE), "--ckpt_path", start, *overrides],
        )
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        if lock is not None:
            lock.close()


class CooldownCLI(PretrainCLI):
    """`recipes.pretrain fit` for a branch: tells callbacks and loggers where it comes from."""

    def __init__(self, branch: Branch, is_begun: bool, **kwargs: Any) -> None:
        self.branch, self.is_begun = branch, is_begun
        super().__init__(self._resolve_once, **kwargs)

    def _resolve_once(self, spec: str, folder: Path, copy_to: str | None = None) -> Path | None:
        # The parent's checkpoint was resolved and its hashes compared already.
        return Path(spec) if spec == self.branch.checkpoint else resolve(spec, folder, copy_to)

    def before_fit(self) -> None:
        """Record the lineage (Lightning's CLI calls this before `fit`)."""
        request = self.branch.request
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CheckpointRetention):
                callback.lineage_note = {
                    "decay_shape": request.shape,
                    "decay_steps": self.branch.decay_steps,
                    "final_ratio": request.final_ratio,
                }
            if isinstance(callback, RestartEquivalence):
                callback.is_branch = not self.is_begun
        for logger in self.trainer.loggers:
            if isinstance(logger, RunWandbLogger):
                logger.log_hyperparams({"lineage": asdict(self.branch)})


# ---------------------------------------------------------------------------------------------------------- arguments


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m recipes.cooldown", description=__doc__)
    add = parser.add_argument
    add("--run", type=str, required=True, help="The trunk: a run's directory, or its name in runs/.")
    add(
        "--from",
        type=str,
        default="latest",
        help="Its checkpoint: latest, best, archive:STEP, a step directory or a path.",
    )
    add(
        "--decay_steps",
        type=float,
        required=True,
        help="Updates of decay; below 1, their share of all the branch's updates.",
    )
    add(
        "--shape",
        type=Literal["1-sqrt", "linear", "cosine", "exponential"],
        default="1-sqrt",
        help="How the rate falls.",
    )
    add("--final_ratio", type=float, default=0.0, help="Last rate / peak.")
    add(
        "--name",
        type=str | None,
        default=None,
        help="Name of the branch's run; default TRUNK-cooldown-STEP-SHAPE.",
    )
    return parser


def split_arguments(args: list[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments, and those for recipes.pretrain (--trainer.X and --data.X), each with its value."""
    own: list[str] = []
    overrides: list[str] = []
    items = list(args)
    while items:
        word = items.pop(0)
        target = overrides if word.startswith(("--trainer.", "--data.")) else own
        target.append(word)
        if word.startswith("--") and "=" not in word and items and not items[0].startswith("--"):
            target.append(items.pop(0))
    return own, overrides


# ----------------------------------------------------------------------------------------------------------- deciding


def settle(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, TextIO | None]:
    """Decide which branch this command means; write its branch.json and configuration unless it has begun.

    Returns:
        The branch, and on rank 0 the lock that keeps a second process off it.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it cannot be branched from, or the name is taken; the message has the remedy.
    """
    if (decided := os.environ.get(_DECIDED)) is not None:
        return Branch.from_dict(json.loads(decided)), None
    if int(os.environ.get("RANK", 0)) > 0:
        return _wait_for_rank_zero(run_dir), None
    branch, lock = _begun(run_dir, request, name) or _begin(run_dir, request, name)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _write(_meeting_point(run_dir), json.dumps(asdict(branch)))
    return branch, lock


def _begin(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, TextIO]:
    checkpoint = CheckpointRetention.resolve(run_dir / "checkpoints", request.checkpoint)
    folder = None
    if checkpoint is not None:
        folder = next((p for p in (checkpoint, checkpoint.parent) if (p / "manifest.json").is_file()), None)
    manifest = read_manifest(folder) if folder is not None else None
    if checkpoint is None or manifest is None:
        raise FileNotFoundError(
            f"{run_dir} has no checkpoint {request.checkpoint!r} of CheckpointRetention: train first"
        )
    state = open_checkpoint(checkpoint)[1].get("lit_gpt") or {}
    if state.get("schedule") is None:
        raise ValueError(
            f"{checkpoint} does not say which schedule it followed: recipes.cooldown branches runs of recipes.pretrain"
        )
    steps = [s.step for s in list_saved(run_dir / "checkpoints")]
    schedule = Schedule(**state["schedule"])
    branch = plan_branch(request, str(checkpoint), schedule, int(state["updates"]), manifest, steps, name)
    branch_dir = run_dir.parent / branch.name
    present = read_branch(branch_dir)
    if (present is None and branch_dir.exists()) or (present is not None and present.request != request):
        what = f"another branch ({present.request})" if present else "a run that is no branch"
        raise ValueError(f"{branch_dir} holds {what}: give this one another --name")
    branch_dir.mkdir(parents=True, exist_ok=True)
    lock = _lock(branch_dir)
    if lock is None:
        raise ValueError(
            f"{branch_dir} is being trained by another process: wait for it, or give another --name"
        )
    config = branch_config(yaml.safe_load(newest_config(run_dir).read_text()), branch, run_dir)
    _write(branch_dir / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False))
    _write(branch_dir / BRANCH_FILE, json.dumps(asdict(branch), indent=2) + "\n")
    return branch, lock


def _begun(run_dir: Path, request: Request, name: str | None) -> tuple[Branch, TextIO] | None:
    """Return the branch that this same command began earlier and nobody is training, with its lock.

    With `--from latest` the trunk may have moved on since: such a branch goes on from where it was cut, until it is complete.
    """
    pattern = name or f"{request.parent_run}-cooldown-*-{request.shape}"
    begun = [(b, d) for d in run_dir.parent.glob(pattern) if (b := read_branch(d)) is not None]
    for branch, folder in sorted(begun, key=lambda item: -item[0].parent_step):
        saved = list_saved(folder / "checkpoints")
        is_complete = any(s.step >= branch.total_steps for s in saved)
        is_moot = (
            not saved and not Path(branch.checkpoint).exists()
        )  # never saved, and the trunk has pruned its start
        moves = request.checkpoint in ("latest", "best") and name is None
        if branch.request != request or is_moot or (is_complete and moves):
            continue
        if (lock := _lock(folder)) is not None:
            return branch, lock
    return None


def read_branch(branch_dir: Path) -> Branch | None:
    """Return the branch that a run directory belongs to, None if it is no branch."""
    file = branch_dir / BRANCH_FILE
    return Branch.from_dict(json.loads(file.read_text())) if file.is_file() else None


def _lock(branch_dir: Path) -> TextIO | None:
    file = open(branch_dir / LOCK_FILE, "w")  # noqa: SIM115  held until the branch is trained
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when this process ends, however it ends
    except BlockingIOError:
        file.close()
        return None
    return file


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _meeting_point(run_dir: Path) -> Path:
    """Return the file by which rank 0 tells ranks that it did not start itself (torchrun, SLURM) what it decided."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return run_dir.parent / f".branch-{run_dir.resolve().name}-{job}-{os.environ.get('MASTER_PORT', '')}.json"


def _wait_for_rank_zero(run_dir: Path) -> Branch:
    path, begin = _meeting_point(run_dir), time.time()
    while time.time() < begin + _WAIT_S:
        # Not an earlier job's: that one's same command made the same branch, but perhaps long ago.
        if path.is_file() and path.stat().st_mtime > begin - 60.0:
            return Branch.from_dict(json.loads(path.read_text()))
        time.sleep(0.2)
    raise RuntimeError(
        f"rank 0 did not say within {_WAIT_S:.0f} s which branch to train ({path}): look at its output"
    )


if __name__ == "__main__":
    run_command(main)
