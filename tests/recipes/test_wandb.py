"""What arrives at W&B, read back from offline files: exact names over progress/tokens, one row per update, one run id."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lit_gpt_loop.journal import RunWandbLogger, read_journal
from tests.wandb_file import read_offline

CONFIG = {
    "trainer": {
        "max_steps": 20,
        "val_check_interval": 5,
        "precision": "32-true",
        "callbacks": [
            {"class_path": "callbacks.TokenWeightedLoss"},
            {"class_path": "callbacks.GradNormMonitor", "init_args": {"clip_norm": 1.0}},
            {"class_path": "callbacks.MFUMonitor", "init_args": {"peak_flops": 1.0e12}},
            {"class_path": "callbacks.CheckpointRetention", "init_args": {"every_n_steps": 5}},
            {"class_path": "tests.recipes.test_wandb.DieAt"},
        ],
    },
    "model": {"config": "tiny", "schedule": {"warmup_steps": 1, "decay_steps": 0}},
    "data": {"corpus": "text.txt", "tokenizer": "bytes", "context_length": 32, "micro_batch_size": 2, "global_batch_size": 4,
             "limit_val_blocks": 4, "val_split": "tail", "val_fraction": 0.1},
}  # fmt: skip


def __getattr__(
    name,
):  # lazy: this module is imported by the test process too, which need not wait for Lightning
    if name == "DieAt":
        import lightning.pytorch as pl

        class DieAt(pl.Callback):
            """Kills its own process after update DIE_AT, once the loggers have taken that update in."""

            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if trainer.global_step == int(os.environ.get("DIE_AT", -1)):
                    os.kill(os.getpid(), signal.SIGKILL)

        return DieAt
    raise AttributeError(name)


def run(folder, die_at=-1):
    # Without wandb's own variables: a process of its own must not join the service that this test process may have started.
    clean = {k: v for k, v in os.environ.items() if "WANDB" not in k}
    env = clean | {
        "DIE_AT": str(die_at),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "WANDB_MODE": "offline",
    }
    command = [sys.executable, "-m", "recipes.pretrain", "fit", "--config", "wb.yaml"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.case("C45")
def test_c45_save_at_10_die_at_12_resume(tmp_path):
    (tmp_path / "text.txt").write_text("In the morning the ship left the harbour, and nobody waved. " * 100)
    (tmp_path / "wb.yaml").write_text(yaml.safe_dump(CONFIG))
    killed = run(tmp_path, die_at=12)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    time.sleep(2)  # wandb's own process notices that its parent is gone and closes the file
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dropped" not in done.stderr.lower()

    rows, defined, ids = read_offline(tmp_path / "runs/wb/wandb")
    assert len(set(ids)) == 1, "the same command continues the same W&B run"
    updates = [r for r in rows if "train/loss" in r]
    last_wins = {int(r["progress/update"]): r for r in updates}
    assert sorted(last_wins) == list(range(1, 21))
    resumed = [int(r["progress/update"]) for r in updates][-10:]
    assert resumed == list(range(11, 21)), "each update of the resumed run is one row"
    assert all(r["progress/tokens"] == n * 128 for n, r in last_wins.items())
    for key in ("train/loss", "optim/lr", "optim/grad_norm", "optim/clip_fraction", "perf/tokens_per_s", "perf/mfu", "val/loss",
                "val/bits_per_byte", "ckpt/step", "ckpt/blocked_s"):  # fmt: skip
        assert defined[key] == "progress/tokens", key
    validations = {int(r["progress/update"]): r["val/loss"] for r in rows if "val/loss" in r}
    assert sorted(validations) == [5, 10, 15, 20]
    assert all(r["progress/tokens"] == r["progress/update"] * 128 for r in rows if "val/loss" in r)
    # the journal tells the same story
    journal = read_journal(tmp_path / "runs/wb", "update")
    assert [r["step"] for r in journal] == list(range(1, 21))
    assert [r["train/loss"] for r in journal] == [last_wins[n]["train/loss"] for n in range(1, 21)]


@pytest.mark.parametrize(
    ("env", "offline"),
    [
        ({}, True),
        ({"WANDB_API_KEY": "0" * 40}, False),
        ({"WANDB_MODE": "online"}, False),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40}, True),
    ],
)
def test_offline_unless_logged_in_or_asked(tmp_path, monkeypatch, env, offline):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert RunWandbLogger(tmp_path)._offline is offline
