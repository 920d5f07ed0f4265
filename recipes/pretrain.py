"""Pretrain a GPT: `python -m recipes.pretrain {fit,validate,test,predict} --config configs/quickstart.yaml`.

fit        train; the same command again continues the run (--ckpt_path auto, latest, best, archive:STEP, none or a path)
validate   token-weighted loss, perplexity and bits per byte of a checkpoint on the validation documents
test       the same on the test documents
predict    score sequences

Every value of the configuration can be given on the command line: --model.lr 3e-4 --trainer.max_steps 2000
--data.micro_batch_size 8 --run my-run. `fit --print_config` shows them all; `fit --help` explains them.
"""

import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import lit_gpt_loop  # noqa: F401  refuses compromised releases of Lightning before it is imported
from callbacks import CheckpointRetention, GradNormMonitor, MFUMonitor, RestartEquivalence, TokenWeightedLoss
from lit_gpt_loop.cli import PretrainCLI
from recipes.help import Help


def resolve(spec: str, folder: Path, copy_to: str | None = None) -> Path | None:
    """Return what `Trainer.fit(ckpt_path=)` takes for a checkpoint that a user names, or None for "auto" where none is.

    Args:
        spec: auto, latest, best, archive:STEP, a step directory or a path.
        folder: where the run's checkpoints are.
        copy_to: URL of their copies, fetched from where it has newer ones.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    try:
        return CheckpointRetention.resolve(folder, spec, copy_to=copy_to)
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e} {_about(folder.parent)}") from e


def _about(run_dir: Path) -> str:
    """Say what there is instead."""
    if run_dir.is_dir():
        saved = sorted(p.name for p in (run_dir / "checkpoints").glob("step-*"))
        return (
            f"The run {run_dir} has saved {', '.join(saved)}."
            if saved
            else f"The run {run_dir} has saved none; without --ckpt_path `fit` begins it."
        )
    runs = sorted(str(p.parent) for p in run_dir.parent.glob("*/config.yaml"))
    return f"There is no run {run_dir}; " + (
        f"runs here: {', '.join(runs)}." if runs else f"{run_dir.parent} holds no runs."
    )


def find_run(run: str | Path) -> Path:
    """Return the directory of a run that is named by its path, or by its name in runs/.

    Raises:
        FileNotFoundError: neither is there.
    """
    for path in (Path(run), Path("runs") / run):
        if path.is_dir():
            return path
    raise FileNotFoundError(
        f"--run {run} is neither a run's directory nor its name in runs/. {_about(Path('runs') / Path(run).name)}"
    )


def find_checkpoint(spec: str, run_dir: Path) -> Path:
    """Return the checkpoint that a user names; like `resolve`, but there has to be one.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    path = resolve(spec, run_dir / "checkpoints")
    if path is None:
        raise FileNotFoundError(f"No checkpoint. {_about(run_dir)}")
    return path


def newest_config(run_dir: Path) -> Path:
    """Return the configuration that a run was last started with.

    Raises:
        FileNotFoundError: the directory holds none.
    """
    configs = sorted(run_dir.glob("config*.yaml"), key=lambda p: int(re.sub(r"\D", "", p.stem) or 1))
    if not configs:
        raise FileNotFoundError(
            f"{run_dir} holds no config.yaml: --run takes a directory that recipes.pretrain made"
        )
    return configs[-1]


def quiet() -> None:
    """Leave out warnings that tell a user of these commands nothing."""
    warnings.filterwarnings(
        "ignore", message=r".*isinstance\(treespec, LeafSpec\).*"
    )  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings(
        "ignore", message=r".*does not have many workers.*"
    )  # blocks are read from memory
    warnings.filterwarnings(
        "ignore", message=r".*args parameter is intended to run from within Python.*"
    )  # other recipes do
    # LitGPT's own: torchmetrics has summed these over all ranks already.
    warnings.filterwarnings("ignore", message=r".*self\.log\('(val|test|progress)/.*sync_dist=True.*")


def default_callbacks() -> list[pl.Callback]:
    """Return the callbacks of a run whose configuration names none."""
    return [
        TokenWeightedLoss(),
        GradNormMonitor(clip_norm=1.0),
        MFUMonitor(),
        CheckpointRetention(),
        RestartEquivalence(),
    ]


def main(args: list[str] | None = None) -> PretrainCLI:
    """Run the command line (the process's own arguments by default)."""
    quiet()
    return PretrainCLI(
        resolve,
        default_callbacks,
        args=args,
        parser_kwargs={"description": __doc__, "prog": "python -m recipes.pretrain", "formatter_class": Help},
    )


def our_message(error: BaseException | None) -> str | None:
    """Return the message of the error that one of our own lines raised, which says all that the user needs; None if none did.

    jsonargparse wraps what a constructor raises in an account of every type that it tried: the cause is looked at too.
    """
    while error is not None:
        frames = list(traceback.walk_tb(error.__traceback__))
        module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
        if module.partition(".")[0] in ("lit_gpt_loop", "callbacks", "recipes", "__main__"):
            return str(error)
        error = error.__cause__
    return None


def run_command(command: Callable[[], Any]) -> None:
    """Run a command; end with a message alone where one of our own errors says all that the user needs."""
    try:
        command()
    except (ValueError, RuntimeError, OSError) as e:
        message = our_message(e)
        if message is None:
            raise
        sys.exit(f"error: {message}")


if __name__ == "__main__":
    run_command(main)
