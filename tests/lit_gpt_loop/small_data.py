"""Small corpora, and a LightningModule that notes which samples it was given; for the tests of the data files."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lit_gpt_loop.corpus import TextCorpus
from lit_gpt_loop.data import TextDataModule
from lit_gpt_loop.store_build import build_store
from lit_gpt_loop.token_store import TokenStore

# Each differs from the others, and bytes, code points and UTF-16 units differ in number.
MIXED = [f"{i}: naïve 数据 𝒳 {'🙂' * (i % 5)}\n" * (1 + i % 7) for i in range(60)]


def store_of(folder: Path, texts: list[str], tokenizer: str = "bytes", **kwargs: Any) -> TokenStore:
    """Return the store of some texts."""
    corpus = TextCorpus(texts, texts_per_item=kwargs.pop("texts_per_item", 7))
    return TokenStore(build_store(corpus, tokenizer, folder, progress=False, **kwargs))


def data_of(folder: Path, **kwargs: Any) -> TextDataModule:
    """Return a DataModule over MIXED with small batches."""
    defaults: dict[str, Any] = {
        "corpus": TextCorpus(MIXED),
        "tokenizer": "bytes",
        "data_dir": str(folder),
        "context_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
    }
    return TextDataModule(**{**defaults, **kwargs})


def ready(data: TextDataModule) -> TextDataModule:
    """Prepare and set up a DataModule without a Trainer."""
    data.prepare_data()
    data.setup()
    return data


class Recorder(pl.LightningModule):
    """Notes the sample ids of every batch; `updates` groups them by optimizer step."""

    def __init__(self, estimate: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.estimate = estimate
        self.micro_batches: list[list[int]] = []
        self.updates: list[list[int]] = []
        self.val_ids: list[list[int]] = []
        self._window: list[int] = []

    def training_step(self, batch, batch_idx):
        ids = batch["sample_ids"].tolist()
        self.micro_batches.append(ids)
        self._window += ids
        return (self.w * batch["inputs"].float().mean()).sum()

    def on_before_optimizer_step(self, optimizer):
        self.updates.append(self._window)
        self._window = []

    def validation_step(self, batch, batch_idx):
        self.val_ids.append(batch["sample_ids"].tolist())

    def test_step(self, batch, batch_idx):
        self.val_ids.append(batch["sample_ids"].tolist())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.estimate:
            return optimizer
        # Makes Lightning build the loaders before it restores anything.
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(pl.Callback):
    """Saves a checkpoint after some micro-batch."""

    def __init__(self, micro_batch: int, path: Path) -> None:
        self.micro_batch, self.path = micro_batch, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(pl_module.micro_batches) == self.micro_batch:
            trainer.save_checkpoint(self.path)


def fit(
    data: TextDataModule, steps: int, ckpt_path: Path | None = None, estimate: bool = False, **kwargs: Any
) -> tuple[Recorder, pl.Trainer]:
    """Fit a Recorder for `steps` updates in total."""
    module = Recorder(estimate)
    trainer = pl.Trainer(
        **{
            "max_steps": steps,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            **kwargs,
        }
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return module, trainer
