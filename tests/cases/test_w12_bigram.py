"""W12: any LightningModule trains with our data and callbacks; the smallest one is a bigram table (one embedding, V x V)."""

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from callbacks import (
    CheckpointRetention,
    GradNormMonitor,
    LoopAudit,
    MFUMonitor,
    RestartEquivalence,
    TokenWeightedLoss,
)
from lit_gpt_loop import TextDataModule


class Bigram(pl.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.zeros_(self.table.weight)

    def loss(self, batch):
        return F.cross_entropy(
            self.table(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100
        )

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), batch_size=len(batch["inputs"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.0)


def fit(folder, text, max_steps, callbacks, ckpt_path=None):
    data = TextDataModule(
        corpus=text, tokenizer="char", data_dir=f"{folder}/data", context_length=16, micro_batch_size=8, val_split="tail",
        val_fraction=0.1,
    )  # fmt: skip
    module = Bigram(data.vocab_size)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=max_steps, max_epochs=-1, callbacks=callbacks, logger=False, val_check_interval=200,
        check_val_every_n_epoch=None, num_sanity_val_steps=-1, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, enable_checkpointing=any(isinstance(c, CheckpointRetention) for c in callbacks),
    )  # fmt: skip
    first = trainer.validate(module, data, verbose=False)[0]["val/loss"]
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer, module, first, data.vocab_size


def make():
    return [
        TokenWeightedLoss(), GradNormMonitor(clip_norm=1.0), MFUMonitor(peak_flops=1e12, num_params=576), CheckpointRetention(every_n_steps=200),
        RestartEquivalence(), LoopAudit(),
    ]  # fmt: skip


@pytest.mark.case("W12")
def test_w12_bigram_learns_saves_restores_and_goes_on(tmp_path):
    text = tmp_path / "robot.txt"
    text.write_text("the robot picks up the red box. " * 60)
    a, trained, first, vocab_size = fit(tmp_path / "a", str(text), 200, make())
    assert first == pytest.approx(math.log(vocab_size), abs=1e-5)
    assert float(a.callback_metrics["val/loss"]) == pytest.approx(0.7, abs=0.1)

    path = CheckpointRetention.resolve(tmp_path / "a/checkpoints", "latest")
    saved = torch.load(path, weights_only=True)
    assert torch.equal(saved["state_dict"]["table.weight"], trained.table.weight)
    assert float(saved["optimizer_states"][0]["state"][0]["step"]) == 200

    whole, uninterrupted, _, _ = fit(tmp_path / "b", str(text), 201, make())
    resumed, continued, _, _ = fit(tmp_path / "a", str(text), 201, make(), path)
    assert resumed.global_step == whole.global_step == 201
    assert torch.equal(continued.table.weight, uninterrupted.table.weight)
