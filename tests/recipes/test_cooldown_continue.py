"""A run's own config.yaml continues the run: a branch as a branch, a second generation from its own checkpoints."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from callbacks.checkpoint_retention import list_saved, read_manifest
from lit_gpt_loop.branch import Request
from lit_gpt_loop.journal import RunWandbLogger
from recipes import cooldown, cooldown_start
from recipes.pretrain import main as pretrain
from tests.recipes.trunk import cut, digests, losses, rates, same, state, train

STABLE = ("--model.schedule.decay_steps", "0")


@pytest.fixture
def trunk(shared):
    """A trunk that was planned for 20 updates and stopped after 10; no test changes it."""
    return shared / "runs" / "trunk"


def fit(run, *args):
    return pretrain(["fit", "--config", f"runs/{run}/config.yaml", *args])


def stop_branch_at(monkeypatch, step):
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= step

    original = cooldown.CooldownCLI.before_fit
    monkeypatch.setattr(
        cooldown.CooldownCLI,
        "before_fit",
        lambda self: (original(self), self.trainer.callbacks.append(Stop())),
    )


def journal_steps(run):
    lines = [json.loads(line) for line in Path(f"runs/{run}/journal.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "update"]


# --- branches ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_branchs_own_configuration_continues_the_branch(trunk, monkeypatch):
    args = ("--from", "archive:10", "--decay_steps", 6, "--shape", "linear", "--name")
    cut(*args, "whole")
    with monkeypatch.context() as m:
        stop_branch_at(m, 13)
        cut(*args, "half")
    assert yaml.safe_load(Path("runs/half/config.yaml").read_text())["ckpt_path"] is None
    assert fit("half").model.updates_at_start == 13
    assert journal_steps("half") == [11, 12, 13, 14, 15, 16]
    assert losses("half") == losses("whole") and rates("half") == rates("whole")
    assert same(state("half", 16)[0], state("whole", 16)[0])
    lineages = [
        read_manifest(Path(f"runs/{run}/checkpoints/step-00000016"))["lineage"] for run in ("half", "whole")
    ]
    assert lineages[0] == lineages[1] and lineages[0]["decay_steps"] == 6


@pytest.mark.slow
def test_a_branch_that_is_complete_is_neither_extended_nor_begun_again(trunk, capsys):
    cut("--from", "archive:10", "--decay_steps", 2, "--shape", "linear", "--name", "done")
    saved = digests("runs/done/checkpoints")
    for args in (
        ["--trainer.max_steps", "60"],
        ["--trainer.max_steps", "60", "--model.schedule.final_ratio", "1"],
    ):
        with pytest.raises(
            ValueError,
            match=r"runs/done is a branch, cut from trunk at update 10: its decay has begun and ends at update 12, .*"
            r"recipes\.cooldown --run runs/trunk --from archive:10 --decay_steps N --shape linear --final_ratio 0$",
        ):
            fit("done", *args)
    # What an earlier version left in config.yaml: the checkpoint that the branch was cut from.
    cli = fit("done", "--ckpt_path", "runs/trunk/checkpoints/step-00000010/state")
    assert (cli.model.updates_at_start, cli.model.updates) == (12, 12)
    assert {k: v for k, v in digests("runs/done/checkpoints").items() if k in saved} == saved
    assert journal_steps("done") == [11, 12]
    assert [s.step for s in list_saved("runs/done/checkpoints")].count(12) == 1


def test_a_branch_without_a_checkpoint_is_continued_by_the_command_that_began_it(trunk):
    _, lock = cooldown_start.settle(trunk, Request("trunk", "latest", 0.25, "linear", 0.1), "young")
    lock.close()
    with pytest.raises(
        ValueError,
        match=r"recipes\.cooldown --run .*runs/trunk --from latest --decay_steps 0\.25 --shape linear --final_ratio 0\.1 --name young$",
    ):
        pretrain(["fit", "--config", "runs/young/cooldown.yaml"])
    assert not Path("runs/young/checkpoints").exists()


# --- second generations ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_generation_goes_on_from_its_own_checkpoints(trunk):
    """`trunk` compares every file of the parent before and after."""
    parent = ("--ckpt_path", "runs/trunk/checkpoints/step-00000010")
    train("gen1", 12, *parent, *STABLE)
    assert yaml.safe_load(Path("runs/gen1/config.yaml").read_text())["ckpt_path"] is None
    assert train("gen1", 14, *parent, *STABLE).model.updates_at_start == 12, "the same command, longer"
    assert fit("gen1", "--trainer.max_steps", "15").model.updates_at_start == 14
    assert journal_steps("gen1") == [11, 12, 13, 14, 15]
    for saved in list_saved("runs/gen1/checkpoints"):
        lineage = read_manifest(Path("runs/gen1/checkpoints") / saved.name)["lineage"]
        assert (lineage["parent_run"], lineage["parent_step"]) == ("trunk", 10)
    with pytest.raises(ValueError, match=r"is of another run, and runs/gen1 holds checkpoints of its own"):
        train("gen1", 16, "--ckpt_path", "runs/trunk/checkpoints/step-00000005", *STABLE)


@pytest.mark.slow
def test_a_second_generation_that_was_killed_before_its_first_save_begins_where_it_did(trunk):
    shutil.copytree(trunk, "elsewhere/trunk", dirs_exist_ok=True)
    train("gen2", 11, "--ckpt_path", "elsewhere/trunk/checkpoints/step-00000010", *STABLE)
    shutil.rmtree("runs/gen2/checkpoints")
    assert fit("gen2").model.updates_at_start == 10
    shutil.rmtree("elsewhere/trunk/checkpoints/step-00000010")
    again = ("--ckpt_path", "elsewhere/trunk/checkpoints/step-00000010", *STABLE)
    assert train("gen2", 12, *again).model.updates_at_start == 11, "its parent has pruned where it began"
    shutil.rmtree("runs/gen2/checkpoints")
    with pytest.raises(ValueError, match=r"runs/gen2 began from .*step-00000010.* no longer there"):
        fit("gen2")


def test_a_second_generation_and_its_branch_are_of_the_trunks_group(trunk):
    train("gen3", 12, "--ckpt_path", "runs/trunk/checkpoints/step-00000010", *STABLE)
    branch, lock = cooldown_start.settle(Path("runs/gen3"), Request("gen3", "latest", 2, "linear", 0.0), None)
    lock.close()
    manifest = read_manifest(Path("runs/gen3/checkpoints/step-00000012"))
    assert branch.group == "trunk" and branch.parent_lineage == manifest["lineage"]
    # Which hash it is, by the README's words: of the manifest as canonical JSON, without `sha256` and `verified`.
    hashed = {key: value for key, value in manifest.items() if key not in ("sha256", "verified")}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    assert branch.parent_manifest_sha256 == manifest["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert (
        json.loads(Path(f"runs/{branch.name}/branch.json").read_text())["parent_lineage"]["parent_step"] == 10
    )


@pytest.mark.slow
def test_wandb_shows_a_second_generation_in_the_trunks_group(trunk, monkeypatch):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    logger = {"class_path": "lit_gpt_loop.journal.RunWandbLogger", "init_args": {"save_dir": "runs/gen4"}}
    parent = ("--ckpt_path", "runs/trunk/checkpoints/step-00000010", "--trainer.logger", json.dumps([logger]))
    cli = train("gen4", 11, *parent, *STABLE)
    run = next(i for i in cli.trainer.loggers if isinstance(i, RunWandbLogger)).experiment
    assert run.group == "trunk" and dict(run.config["lineage"])["parent_step"] == 10
    run.finish()
