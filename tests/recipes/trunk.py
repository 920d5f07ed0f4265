"""A trunk of 20 small updates, for the tests of recipes.cooldown: training it, cutting branches, reading what came out."""

import hashlib
import json
from pathlib import Path

import torch
import yaml

from lit_gpt_loop.checkpoint_files import read_full
from lit_gpt_loop.journal import read_journal
from recipes import cooldown
from recipes.pretrain import main as pretrain

ROOT = Path(__file__).parents[2]
PEAK = 0.004
CONFIG = {
    "trainer": {
        "max_steps": 20,
        "val_check_interval": 4,  # so that saves fall between validations
        "precision": "32-true",
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "logger": [
            {"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": "runs/trunk"}}
        ],
        "callbacks": [
            {"class_path": "callbacks.TokenWeightedLoss"},
            {
                "class_path": "callbacks.CheckpointRetention",
                "init_args": {"every_n_steps": 5, "archive_every_n_steps": 5},
            },
            {"class_path": "callbacks.RestartEquivalence"},
        ],
    },
    "model": {
        "config": "tiny",
        "overrides": {"dropout": 0.1},
        "lr": PEAK,
        "schedule": {"kind": "wsd", "warmup_steps": 4, "decay_steps": 4, "decay_shape": "linear"},
    },
    "data": {
        "tokenizer": "bytes",
        "context_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "limit_val_blocks": 4,
    },
}


def make_place(folder):
    (folder / "text.txt").write_text("A farmer had a field, and in the field there was a well. " * 100)
    data = {"corpus": str(folder / "text.txt"), "val_split": "tail", "val_fraction": 0.1}
    (folder / "trunk.yaml").write_text(yaml.safe_dump(CONFIG | {"data": CONFIG["data"] | data}))


def train(run, steps, *args):
    """Train a run of its own to `steps` updates."""
    return pretrain(_arguments(run, steps, *args))


def _arguments(run, steps, *args):
    logger = {"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": f"runs/{run}"}}
    given = {"--config": "trunk.yaml", "--run": run, "--trainer.max_steps": str(steps)}
    given["--trainer.logger"] = json.dumps([logger])
    return ["fit", *(text for pair in given.items() for text in pair), *args]


def stop_at(run, planned, stop, *args, callback=None):
    """Train a run that is planned for `planned` updates and stopped (as by a signal) after `stop`, with one more callback."""
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= stop

    from recipes import pretrain as recipe

    class StoppingCLI(recipe.PretrainCLI):
        def before_fit(self):
            self.trainer.callbacks.extend([callback, Stop()] if callback else [Stop()])

    return StoppingCLI(recipe.resolve, args=_arguments(run, planned, *args))


def cut(*args):
    return cooldown.main(["--run", "runs/trunk", *map(str, args)])


def rates(run):
    return {row["step"]: row["optim/lr"] / PEAK for row in read_journal(f"runs/{run}", "update")}


def losses(run):
    return {
        row["step"]: (row["train/loss_sum"], row["progress/samples"])
        for row in read_journal(f"runs/{run}", "update")
    }


def state(run, step):
    tensors, rest = read_full(Path(f"runs/{run}/checkpoints/step-{step:08d}/state"))
    return tensors, rest


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def digests(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }
