"""Run in a process of its own: each callback file, copied alone to an empty folder, trains an unrelated LightningModule.

Usage: python standalone_fit.py FOLDER_OF_CALLBACKS EMPTY_FOLDER [pytorch_lightning]

With the third argument the one line of each copy that names Lightning is flipped, and module and Trainer come from that
package; Lightning's other name is then as good as not installed.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = sys.argv[3] if len(sys.argv) > 3 else "lightning.pytorch"
OTHER = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning"}[PACKAGE]
FORBIDDEN = ("lit_gpt_loop", "callbacks", "recipes", OTHER)
LINE = "import lightning.pytorch as pl\n"


class Forbid:
    """An import hook that makes our packages as good as not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"{name} is not installed here")


sys.meta_path.insert(0, Forbid())

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

pl = importlib.import_module(PACKAGE)


class Unrelated(pl.LightningModule):
    """A bigram table that returns its mean loss and knows nothing of anybody (as in the worked value W12)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 16)

    def forward(self, x):
        return self.table(x)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.0)


ARGUMENTS = {
    "CheckpointRetention": {"every_n_steps": 2},
    "GradNormMonitor": {"clip_norm": 1.0},
    "MFUMonitor": {"peak_flops": 1e12, "num_params": 256},
    "SampleText": {
        "prompts": ["ab"], "every_n_steps": 2, "max_new_tokens": 4, "context_length": 8, "print_samples": False,
        "encode": lambda s: [ord(c) % 16 for c in s], "decode": lambda ids: " ".join(map(str, ids)),
    },
}  # fmt: skip


def main(source, empty):
    rows = torch.randint(16, (32, 9), generator=torch.Generator().manual_seed(0))
    # With a generator of its own: LoopAudit finds that a loader without one draws from torch's global generator.
    data = DataLoader([(r[:-1], r[1:]) for r in rows], batch_size=4, generator=torch.Generator())
    for file in sorted(Path(source).glob("*.py")):
        if file.stem == "__init__":
            continue
        home = Path(empty) / file.stem
        home.mkdir()
        text = file.read_text()
        assert text.count(LINE) == 1
        (home / file.name).write_text(text.replace(LINE, f"import {PACKAGE} as pl\n"))
        spec = importlib.util.spec_from_file_location(f"alone_{file.stem}", home / file.name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        (cls,) = [
            v for v in vars(module).values()
            if isinstance(v, type) and issubclass(v, pl.Callback) and v.__module__ == spec.name and not v.__name__.startswith("_")
        ]  # fmt: skip
        callback = cls(**ARGUMENTS.get(cls.__name__, {}))
        torch.manual_seed(0)
        model = Unrelated()
        for max_steps in (4, 6):  # fitted twice with one callback
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, max_steps=max_steps, max_epochs=-1, accumulate_grad_batches=2, callbacks=[callback],
                logger=pl.loggers.CSVLogger(home), enable_progress_bar=False, enable_model_summary=False, default_root_dir=home,
                enable_checkpointing=cls.__name__ == "CheckpointRetention", val_check_interval=2, check_val_every_n_epoch=None,
                log_every_n_steps=1,
            )  # fmt: skip
            trainer.fit(model, data, data)
            assert trainer.global_step == max_steps
        print(f"{cls.__name__} trained alone")


if __name__ == "__main__":
    main(*sys.argv[1:3])
