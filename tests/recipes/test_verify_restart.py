"""recipes.verify_restart: holds for a good checkpoint, names each planted fault, says when it cannot judge."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_gpt_loop.module import LitGPT
from recipes import verify_restart
from recipes.pretrain import main

CONFIG = {
    "trainer": {
        "max_steps": 8,
        "val_check_interval": 4,
        "precision": "32-true",
        "enable_progress_bar": False,
        "callbacks": [
            {"class_path": "callbacks.TokenWeightedLoss"},
            {"class_path": "callbacks.GradNormMonitor", "init_args": {"clip_norm": 0.5}},
            {
                "class_path": "callbacks.CheckpointRetention",
                "init_args": {"every_n_steps": 3, "keep_latest": 3, "monitor": None},
            },
            {"class_path": "callbacks.RestartEquivalence"},
        ],
    },
    "model": {
        "config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "dropout": 0.1},
        "lr": 0.01,
        "schedule": {"warmup_steps": 6, "decay_steps": 0},
    },
    "data": {
        "tokenizer": "bytes",
        "context_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "limit_val_blocks": 4,
        "val_split": "tail",
        "val_fraction": 0.1,
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 8 updates with checkpoints at 3, 6 and 8, the first two with a trace."""
    place = tmp_path_factory.mktemp("verify")
    (place / "text.txt").write_text("A farmer had a field, and in the field there was a well. " * 100)
    journal = {
        "class_path": "lit_gpt_loop.journal.JournalLogger",
        "init_args": {"save_dir": str(place / "runs/small")},
    }
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"logger": [journal]}}
    config["data"] = config["data"] | {"corpus": str(place / "text.txt"), "data_dir": str(place / "data")}
    (place / "small.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(place / "small.yaml"), "--runs_dir", str(place / "runs")])
    return place / "runs" / "small"


@pytest.fixture
def here(monkeypatch):
    """Replay in this process, for speed; one test below does it as users do."""

    def run_replay(name, spec, folder):
        own = folder / name
        own.mkdir()
        spec = spec | {"folder": str(own / "run"), "report": str(own / "report.json")}
        (own / "spec.json").write_text(json.dumps(spec))
        torch.manual_seed(99)
        verify_restart.replay(own / "spec.json")
        return json.loads((own / "report.json").read_text())

    monkeypatch.setattr(verify_restart, "run_replay", run_replay)
    return monkeypatch


def verdict_of(run, step):
    return json.loads((run / f"checkpoints/step-{step:08d}/manifest.json").read_text())["verified"]


def test_a_good_checkpoint_holds(run, here, capsys):
    assert verify_restart.verify(run, "archive:6") == verify_restart.HOLDS
    out = capsys.readouterr().out
    assert (
        "promise   exact (same layout and versions)" in out and "verdict   exact, 2 updates compared" in out
    )
    assert out.count(" holds") == 12 and "differs" not in out
    verified = verdict_of(run, 6)
    assert (verified["promise"], verified["updates"], verified["by"]) == (
        "exact",
        2,
        "recipes.verify_restart",
    )
    assert sorted(p.name for p in run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.yaml",
        "journal.jsonl",
        "tokenizer.json",
    ]
    assert sorted(p.name for p in (run / "checkpoints").iterdir())[:3] == [
        "index.json",
        "step-00000003",
        "step-00000006",
    ]


def loaded(change):
    """Plant by changing the checkpoint as it is loaded: what is not weights or optimizer passes here."""

    def plant(monkeypatch):
        load = LitGPT.on_load_checkpoint

        def on_load_checkpoint(self, checkpoint):
            change(checkpoint)
            load(self, checkpoint)

        monkeypatch.setattr(LitGPT, "on_load_checkpoint", on_load_checkpoint)

    return plant


def started(change):
    """Plant by changing what was restored, before the first update."""

    def plant(monkeypatch):
        start = LitGPT.on_train_start

        def on_train_start(self):
            start(self)
            with torch.no_grad():
                change(self, self.optimizers(use_pl_optimizer=False))

        monkeypatch.setattr(LitGPT, "on_train_start", on_train_start)

    return plant


def swap_moments(module, optimizer):
    by_shape = {}
    for p in optimizer.param_groups[0]["params"]:
        by_shape.setdefault(p.shape, []).append(optimizer.state[p])
    a, b = next(states for states in by_shape.values() if len(states) > 1)[:2]
    a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]


def one_ulp(module, optimizer):
    p = next(module.parameters())
    p[0, 0] = p[0, 0].nextafter(torch.tensor(10.0))


def other_mask(module, optimizer):
    own = torch.Generator().manual_seed(5)
    module.model.blocks[0].register_forward_hook(
        lambda m, i, o: o * (torch.rand(o.shape, generator=own) > 0.1)
    )


def shift_schedule(module, optimizer):
    scheduler = module.lr_schedulers()
    scheduler.last_epoch += 1
    for group in optimizer.param_groups:
        group["lr"] = module.lr * module._rate(scheduler.last_epoch)


def drop_rng(checkpoint):
    checkpoint["callbacks"]["CheckpointRetention"].pop("rng")


def shift_position(checkpoint):
    checkpoint["TextDataModule"]["samples_consumed"] += 1


FAULTS = {
    "optimizer state dropped": (
        started(lambda module, optimizer: optimizer.state.clear()),
        "optimizer at load",
    ),
    "moments swapped": (started(swap_moments), "optimizer at load"),
    "schedule off by one": (started(shift_schedule), "schedule"),
    "RNG dropped": (loaded(drop_rng), "RNG"),
    "position off by one sample": (loaded(shift_position), "data position"),
    "another dropout mask": (started(other_mask), "loss"),
    "a callback's state dropped": (loaded(lambda c: c["callbacks"].pop("GradNormMonitor")), "callbacks"),
    "a weight by one ulp": (started(one_ulp), "parameters at load"),
}  # the scaler, and one rank's RNG: tests/callbacks/test_restart_equivalence.py, tests/distributed/


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(run, here, capsys, fault):
    plant, component = FAULTS[fault]
    plant(here)
    assert verify_restart.verify(run, "archive:6") == verify_restart.FAILED
    out = capsys.readouterr().out
    assert f"{component} differs" in out and "Usual cause" in out and "verdict   failed" in out
    before = out[: out.index("verdict")].split(f"\n  {component} ")[0]
    assert "differs" not in before, "named the first component"
    verified = verdict_of(run, 6)
    assert verified["promise"] == "failed" and verified["first_difference"].startswith(component)


@pytest.mark.slow
def test_no_trace_cannot_be_judged_and_uninterrupted_updates_can(run, here, capsys):
    assert verify_restart.verify(run, "latest") == verify_restart.UNKNOWN
    out = capsys.readouterr().out
    assert "records no update after this save" in out and "step-00000003, step-00000006" in out
    assert verify_restart.verify(run, "latest", updates=2, against="uninterrupted") == verify_restart.HOLDS
    out = capsys.readouterr().out
    assert "4 updates, made twice from the checkpoint" in out
    assert "2 updates after a second save and restore, at update 10" in out
    assert out.count("verdict   exact") == 2


@pytest.mark.slow
def test_uninterrupted_finds_what_a_second_save_loses(run, here, capsys):
    loaded(lambda c: c["lit_gpt"].update(tokens=10**6))(here)  # the same in every replay: nothing is lost
    assert verify_restart.verify(run, "archive:3", updates=1, against="uninterrupted") == verify_restart.HOLDS
    save = LitGPT.on_save_checkpoint

    def forget(self, checkpoint):
        save(self, checkpoint)
        checkpoint["TextDataModule"]["samples_consumed"] -= 4

    here.setattr(LitGPT, "on_save_checkpoint", forget)
    assert (
        verify_restart.verify(run, "archive:3", updates=1, against="uninterrupted") == verify_restart.FAILED
    )
    assert "data position differs" in capsys.readouterr().out
    assert verdict_of(run, 3)["promise"] == "failed"


def test_missing_runs_and_checkpoints_cannot_be_judged(run, tmp_path, capsys):
    assert verify_restart.verify(tmp_path) == verify_restart.UNKNOWN
    assert verify_restart.verify(run, "archive:99") == verify_restart.UNKNOWN
    assert capsys.readouterr().out.count("cannot be judged") == 2
    with pytest.raises(ValueError, match="trace or uninterrupted"):
        verify_restart.verify(run, against="nothing")


def command(run, *args):
    return subprocess.run(
        [sys.executable, "-m", "recipes.verify_restart", "--run", str(run), *args],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=280,
    )


@pytest.mark.slow
def test_the_command_in_fresh_processes_on_one_and_two_ranks(run):
    """Real processes; one, then DDP on two ranks, which is another layout."""
    found = command(run, "--checkpoint", "archive:3")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "verdict   exact" in found.stdout
    found = command(run, "--checkpoint", "archive:3", "--devices", "2", "--strategy", "ddp")
    assert found.returncode == 0, found.stdout + found.stderr
    assert (
        "world_size 1 -> 2; strategy OneDevice -> DDP" in found.stdout
        and "verdict   tolerance" in found.stdout
    )


@pytest.mark.slow
def test_the_command_exits_with_1_and_2(run, tmp_path):
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["callbacks"][1]["init_args"]["clip_norm"] = 0.4
    (tmp_path / "config-2.yaml").write_text(yaml.safe_dump(config))
    checkpoint = ("--checkpoint", str(run / "checkpoints/step-00000003"))
    found = command(tmp_path, *checkpoint)
    assert found.returncode == 1 and "gradient differs at update 4" in found.stdout, (
        found.stdout + found.stderr
    )
    config["data"]["seed"] = 4321  # another order of the samples: the data module refuses to go on
    (tmp_path / "config-3.yaml").write_text(yaml.safe_dump(config))
    found = command(tmp_path, *checkpoint)
    assert found.returncode == 2 and "ended with exit code 1" in found.stdout, found.stdout + found.stderr
    assert "seed was 0, is 4321" in found.stdout
