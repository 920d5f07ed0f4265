"""Pretrain a GPT: `python -m recipes.pretrain {fit,validate,test,predict} --config configs/quickstart.yaml`.

fit        train; the same command again continues the run (--ckpt_path auto, latest, best, archive:STEP, none or a path)
validate   token-weighted loss, perplexity and bits per byte of a checkpoint on the validation documents
test       the same on the test documents
predict    score sequences

Every value of the configuration can be given on the command line: --model.lr 3e-4 --trainer.max_steps 2000
--data.micro_batch_size 8 --run my-run. `fit --print_config` shows them all; `fit --help` explains them.
"""

import sys
import warnings
from pathlib import Path

import lit_gpt_loop  # noqa: F401  refuses compromised releases of Lightning before it is imported
from callbacks import CheckpointRetention
from lit_gpt_loop.cli import PretrainCLI


def resolve(spec: str, run_dir: Path) -> Path | None:
    """Return what `Trainer.fit(ckpt_path=)` takes for a checkpoint that a user names.

    Args:
        spec: "auto" (latest, or None if the run has no checkpoint yet), "latest", "best", "archive:STEP", or a path.
        run_dir: the run's directory.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    if spec == "auto":
        folder = run_dir / "checkpoints"
        if not folder.is_dir() or not any(folder.glob("step-*")):
            return None
        spec = "latest"
    if spec in ("latest", "best") or spec.startswith("archive:"):
        return CheckpointRetention.resolve(run_dir / "checkpoints", spec)
    path = Path(spec)
    if not path.exists():
        raise FileNotFoundError(
            f"no checkpoint at {path}: give a path, or auto, latest, best or archive:STEP for one of {run_dir / 'checkpoints'}"
        )
    return CheckpointRetention.resolve(path.parent, path.name) if (path / "manifest.json").is_file() else path


def main(args: list[str] | None = None) -> PretrainCLI:
    """Run the command line (the process's own arguments by default)."""
    warnings.filterwarnings(
        "ignore", message=r".*isinstance\(treespec, LeafSpec\).*"
    )  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings(
        "ignore", message=r".*does not have many workers.*"
    )  # blocks are read from memory
    return PretrainCLI(resolve, args=args, parser_kwargs={"description": __doc__})


if __name__ == "__main__":
    try:
        main()
    except (
        ValueError,
        FileNotFoundError,
    ) as e:  # what the user can mend: the message, not the way that led to it
        sys.exit(f"error: {e}")
