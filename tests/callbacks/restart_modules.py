"""A small run to interrupt and resume: module, data with a position, a callback that keeps the RNG (no test in here)."""

import random

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(torch.utils.data.IterableDataset):
    """Endless batches from a position on: row i is a function of i."""

    def __init__(self, dm):
        self.dm = dm

    def __iter__(self):
        i = self.dm.base
        while True:
            ids = torch.arange(i + self.dm.rank, i + self.dm.rank + 4 * self.dm.world, self.dm.world)
            g = [torch.Generator().manual_seed(int(k)) for k in ids]
            x = torch.stack([torch.randn(6, generator=k) for k in g])
            yield {"sample_ids": ids, "x": x, "y": x.sum(1, keepdim=True)}
            i += 4 * self.dm.world


class Positioned(pl.LightningDataModule):
    """Counts what was trained, not what was fetched."""

    base = 0
    base_step = 0

    def setup(self, stage):
        self.rank, self.world = self.trainer.global_rank, self.trainer.world_size

    def state_dict(self):
        k = self.trainer.accumulate_grad_batches
        done = (self.trainer.global_step - self.base_step) * 4 * k * self.trainer.world_size
        return {"samples_consumed": self.base + done}

    def load_state_dict(self, state):
        self.base = state["samples_consumed"]
        self.base_step = None

    def train_dataloader(self):
        if self.base_step is None:
            self.base_step = self.base // (4 * self.trainer.accumulate_grad_batches * self.trainer.world_size)
        return DataLoader(Rows(self), batch_size=None)


class Net(pl.LightningModule):
    """Dropout, a schedule, AdamW."""

    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 8), nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.mse_loss(self(x).float(), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda u: 1.0 / (1 + u))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KeepRng(pl.Callback):
    """Saves the RNG of each rank and puts it back at the first batch."""

    def __init__(self, drop_rank=None):
        self.drop_rank = drop_rank
        self.loaded = None

    def state_dict(self):
        mine = (list(random.getstate()[1]), np.random.get_state()[1].tolist(), torch.get_rng_state())
        mine = (*mine, int(np.random.get_state()[2]))
        found = [mine]
        if torch.distributed.is_initialized():
            found = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(found, mine)
        return {"rng": found}

    def load_state_dict(self, state):
        self.loaded = state["rng"]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.loaded is None:
            return
        rank = trainer.global_rank
        if rank != self.drop_rank:
            python, numpy, cpu, pos = self.loaded[rank]
            random.setstate((3, tuple(python), None))
            np.random.set_state(("MT19937", np.array(numpy, dtype=np.uint32), pos, 0, 0.0))
            torch.set_rng_state(cpu)
        self.loaded = None


def run(root, updates, *, callbacks=(), ckpt=None, module=None, data=None, loader=None, **kwargs):
    """Fit up to `updates` and return the Trainer."""
    is_saving = any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": is_saving}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
    trainer = pl.Trainer(
        max_steps=updates, default_root_dir=root, callbacks=list(callbacks), **(options | kwargs)
    )
    module = Net() if module is None else module
    if loader is not None:
        trainer.fit(module, loader, ckpt_path=ckpt)
    else:
        trainer.fit(module, datamodule=Positioned() if data is None else data, ckpt_path=ckpt)
    return trainer


def plain_loader(n=40):
    """A loader without a position, in order."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 6, generator=g)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
