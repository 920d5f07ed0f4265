"""A tiny module and loader whose next update depends on everything that a checkpoint has to hold.

Dropout draws from torch, the loss is scaled by Python's and NumPy's generators, the rows come from a position that the
loader keeps; forget one of them in a checkpoint and the weights after a resume differ.
"""

import os
import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from callbacks.checkpoint_retention import CheckpointRetention
from lit_gpt_loop.strategies import DDP, FSDP2, OneDevice, shard_fsdp2

STRATEGIES = {"one": OneDevice, "ddp": DDP, "fsdp2": FSDP2}
QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    "accelerator": "cpu", "use_distributed_sampler": False,
}  # fmt: skip


class Rows(Dataset):
    def __init__(self, num_rows, offset=0):
        self.num_rows, self.offset = num_rows, offset

    def __len__(self):
        return self.num_rows - self.offset

    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(1000 + i + self.offset))


class Positioned:
    """A loader that knows how far it is. (Lightning stores its state_dict.)"""

    def __init__(self, num_rows=240, batch_size=2, num_workers=0):
        self.num_rows, self.batch_size, self.num_workers, self.position = num_rows, batch_size, num_workers, 0

    def __len__(self):
        return self.num_rows // self.batch_size

    def __iter__(self):
        self.position %= len(self)
        rows = Rows(self.num_rows, self.position * self.batch_size)
        for batch in DataLoader(rows, batch_size=self.batch_size, num_workers=self.num_workers):
            self.position += 1
            yield batch

    def state_dict(self):
        return {"position": self.position % len(self)}

    def load_state_dict(self, state):
        self.position = state["position"]


class Toy(pl.LightningModule):
    def __init__(self, on_step=None, val_losses=None):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(
            nn.Linear(6, 7), nn.Dropout(0.3), nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.Linear(5, 3)
        )
        self.on_step, self.val_losses, self.losses, self.batches = on_step, val_losses, [], []

    def configure_model(self):
        if isinstance(self.trainer.strategy, FSDP2):
            shard_fsdp2(self.net, self.device_mesh["data_parallel"], block_types=["Linear"])

    def training_step(self, batch, i):
        self.batches.append((self.global_step, i))
        noise = random.random() + np.random.rand()
        loss = self.net(batch).pow(2).mean() * noise + self.net(batch).mean()
        self.losses.append(loss.item())
        if self.on_step is not None:
            self.on_step(self, i)
        return loss

    def validation_step(self, batch, i):
        value = (
            self.net(batch).pow(2).mean() if self.val_losses is None else self.val_losses[self.global_step]
        )
        self.log("val/loss", value, sync_dist=True, batch_size=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    dirpath, num_steps, *, ckpt_path=None, strategy="one", num_ranks=1, workers=0, accumulate=1, validate=None,
    on_step=None, val_losses=None, stock=False, callbacks=(), batches=6, trainer_kwargs=None, **retention,
):  # fmt: skip
    """Train to `num_steps` updates; returns (module, trainer, callback). `validate` counts updates."""
    rank = int(os.environ.get("RANK", 0)) if num_ranks > 1 else 0
    random.seed(11 + rank)
    np.random.seed(12 + rank)
    module = Toy(on_step, val_losses)
    torch.manual_seed(13 + rank)
    callback = CheckpointRetention(dirpath, **retention)
    has_validation = validate is not None
    trainer = pl.Trainer(
        devices=num_ranks, strategy="auto" if stock else STRATEGIES[strategy](), max_steps=num_steps,
        callbacks=[*callbacks, callback], accumulate_grad_batches=accumulate,
        val_check_interval=validate * accumulate if has_validation else None,
        check_val_every_n_epoch=None if has_validation else 1, limit_val_batches=1 if has_validation else 0,
        default_root_dir=str(Path(dirpath).parent), **{**QUIET, **(trainer_kwargs or {})},
    )  # fmt: skip
    trainer.fit(
        module, Positioned(2 * batches * accumulate, num_workers=workers),
        DataLoader(Rows(4), batch_size=2) if has_validation else None, ckpt_path=ckpt_path,
    )  # fmt: skip
    return module, trainer, callback


def final_state(module, trainer):
    """All weights and moments, whole, by name."""

    def whole(t):
        return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()

    state = {}
    for name, p in module.named_parameters():
        state[name] = whole(p)
        for key, value in trainer.optimizers[0].state[p].items():
            state[f"{name}/{key}"] = whole(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
    state["lr"] = torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])
    return state


def assert_same(a, b):
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
