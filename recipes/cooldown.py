"""Cut a model off a run: `python -m recipes.cooldown --run runs/trunk --from latest --decay_steps 500`.

A run whose rate is stable (warmup-stable-decay, before its decay) can be decayed from any of its checkpoints. This trains that
decay as a run of its own, runs/TRUNK-cooldown-STEP-SHAPE (or --name): weights, moments, RNG, data and settings go on from the
checkpoint, the trunk's files stay as they are, and the trunk may train on. Every manifest of the branch names its parent (run,
step, the field sha256 of its manifest.json, tokens, the parent's own lineage); branch.json and W&B's config say the same, and
W&B groups a trunk and all that descends from it.

The same command again continues a branch that was killed, and so does `recipes.pretrain fit --config runs/BRANCH/config.yaml`.
Other steps, shapes, lengths, final ratios or names are other branches, and may run at once; where a branch has the default
name already, the next one gets -DECAY_STEPS or -DECAY_STEPS-to-FINAL_RATIO added.

examples:
  python -m recipes.cooldown --run runs/trunk --from latest --decay_steps 0.2          (a fifth of all its updates decay)
  python -m recipes.cooldown --run runs/trunk --from archive:4000 --decay_steps 1000 --shape linear --final_ratio 0.1

Arguments that begin with --trainer. or --data. override the trunk's configuration, as for recipes.pretrain; the branch's length
is --decay_steps alone. It starts under srun and `torchrun ... -m -- recipes.cooldown ...` too (the -- keeps torchrun from reading
--run).
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

import lit_gpt_loop  # noqa: F401  refuses compromised releases of Lightning before it is imported
from callbacks.checkpoint_retention import CheckpointRetention, list_saved
from callbacks.restart_equivalence import RestartEquivalence
from lit_gpt_loop.branch import Branch, Request
from lit_gpt_loop.cli import PretrainCLI
from recipes.cooldown_start import CONFIG_FILE, DECIDED, forget_failed, forget_start, settle, start_of
from recipes.help import Help
from recipes.pretrain import default_callbacks, find_run, quiet, resolve, run_command

# What would give the branch another length than its decay.
_LENGTHS = tuple(
    f"--{name}" for name in ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "max_tokens")
)


def main(args: list[str] | None = None) -> PretrainCLI:
    """Run the command line (the process's own arguments by default)."""
    quiet()
    own, overrides = split_arguments(sys.argv[1:] if args is None else args)
    options = _parser().parse_args(own)
    run_dir = find_run(options.run)
    # A branch stands beside its trunk; these paths do not say where that is.
    if run_dir.name in ("", ".."):
        run_dir = run_dir.resolve()
    request = Request(
        run_dir.resolve().name, options["from"], options.decay_steps, options.shape, options.final_ratio
    )
    branch, lock = settle(run_dir, request, options.name)
    branch_dir = run_dir.parent / branch.name
    is_begun = bool(list_saved(branch_dir / "checkpoints"))
    start = str(start_of(branch, branch_dir))
    # The user's own group holds trunk and branch; else the name of the oldest run that they come from does.
    group = os.environ.get("WANDB_RUN_GROUP") or branch.group
    environment = {DECIDED: json.dumps(asdict(branch)), "WANDB_RUN_GROUP": group}
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    if lock is not None:
        print(f"branch: {branch_dir}, {'continued; it was ' if is_begun else ''}{branch}")
    try:
        return CooldownCLI(
            branch,
            None if is_begun else start,
            args=[
                "fit",
                "--config",
                str(branch_dir / CONFIG_FILE),
                "--ckpt_path",
                "auto" if is_begun else start,
                *overrides,
            ],
            # What an unknown argument is told to look at: what --trainer.X and --data.X may be.
            parser_kwargs={"prog": "python -m recipes.pretrain", "formatter_class": Help},
        )
    except BaseException:
        if lock is not None:
            forget_failed(branch, branch_dir)
        raise
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        if lock is not None:
            forget_start(branch_dir)
            lock.close()


class CooldownCLI(PretrainCLI):
    """`recipes.pretrain fit` for a branch: tells callbacks where it comes from."""

    def __init__(self, branch: Branch, start: str | None, **kwargs: Any) -> None:
        self.branch: Branch = branch
        self.start = start  # None: the branch has a checkpoint of its own
        super().__init__(self._resolve_once, default_callbacks, **kwargs)

    def _resolve_once(self, spec: str, folder: Path, copy_to: str | None = None) -> Path | None:
        # The parent's checkpoint was resolved and its hashes compared already.
        return Path(spec) if spec == self.start else resolve(spec, folder, copy_to)

    def before_fit(self) -> None:
        """Tell the callbacks where the branch comes from (Lightning's CLI calls this before `fit`)."""
        request = self.branch.request
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CheckpointRetention):
                # What the checkpoint's place says, which may be ours, is overridden.
                callback.lineage_note = {
                    "parent_run": request.parent_run,
                    "decay_shape": request.shape,
                    "decay_steps": self.branch.decay_steps,
                    "final_ratio": request.final_ratio,
                }
            if isinstance(callback, RestartEquivalence):
                callback.is_branch = self.start is not None


# ---------------------------------------------------------------------------------------------------------- arguments


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m recipes.cooldown", description=__doc__, formatter_class=Help)
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
        help="Name of the branch's run; default TRUNK-cooldown-STEP-SHAPE, longer where that is another branch's.",
    )
    return parser


def split_arguments(args: list[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments, and those for recipes.pretrain (--trainer.X and --data.X), each with its value.

    Raises:
        ValueError: one of them would give the branch another length.
    """
    own: list[str] = []
    overrides: list[str] = []
    items = list(args)
    while items:
        word = items.pop(0)
        if word.partition("=")[0] in _LENGTHS:
            raise ValueError(
                f"{word.partition('=')[0]} is not for a branch, which ends where its decay does: give the updates from the "
                "checkpoint to that end as --decay_steps (below 1: their share of all the branch's updates)"
            )
        target = overrides if word.startswith(("--trainer.", "--data.")) else own
        target.append(word)
        if word.startswith("--") and "=" not in word and items and not items[0].startswith("--"):
            target.append(items.pop(0))
    return own, overrides


if __name__ == "__main__":
    run_command(main)
