"""Files that the command line leaves in a run's directory: its configuration, its tokenizer, predictions (layer L)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lit_gpt_loop.trained import TOKENIZER_FILE


def config_files(run_dir: Path) -> tuple[Path | None, Path]:
    """Return a run directory's newest configuration, if it has one, and the name of the next."""
    newest, path, number = None, run_dir / "config.yaml", 1
    while path.exists():
        number += 1
        newest, path = path, run_dir / f"config-{number}.yaml"
    return newest, path


class KeepConfig(pl.Callback):
    """Write the configuration once the checkpoint is accepted, when training starts; name it in every checkpoint.

    Args:
        write: writes it and returns what checkpoints are to say about it (`run_config`).
    """

    def __init__(self, write: Callable[[], dict[str, Any]]) -> None:
        self._write = write
        self._written: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it."""
        self._written = self._write()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it if the run was complete and nothing was trained."""
        self._written = self._written or self._write()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Name it."""
        if self._written is not None:
            checkpoint["run_config"] = self._written


class KeepTokenizer(pl.Callback):
    """Put the tokenizer into the run's directory, so that the run can be used without its data."""

    @rank_zero_only
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it."""
        path = Path(trainer.default_root_dir) / TOKENIZER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        trainer.datamodule.tokenizer.save(path)  # type: ignore[attr-defined]


class WritePredictions(BasePredictionWriter):
    """Write what `predict` computes to `predictions.jsonl` in the run's directory, one line per sequence."""

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin this rank's file."""
        suffix = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        self.path = Path(trainer.default_root_dir) / f"predictions{suffix}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append a batch."""
        keys = ("sample_ids", "loss_sum", "num_tokens")
        with open(self.path, "a", encoding="utf-8") as f:
            for sample_id, loss_sum, num_tokens in zip(*(prediction[k].tolist() for k in keys), strict=True):
                if sample_id >= 0:  # -1 fills up a batch
                    f.write(
                        json.dumps({"sample_id": sample_id, "loss_sum": loss_sum, "num_tokens": num_tokens})
                        + "\n"
                    )

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where it is."""
        rank_zero_info(f"wrote {self.path}: sum of losses (nats) and number of targets of each sequence")
