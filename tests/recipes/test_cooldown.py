"""Branches and extensions: in this process for speed, in real processes where one is killed."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from callbacks.checkpoint_retention import list_saved, read_manifest
from lit_gpt_loop.branch import Request, branch_config, moved, plan_branch
from lit_gpt_loop.checkpoint_files import read_full
from lit_gpt_loop.journal import read_journal
from lit_gpt_loop.schedules import ScheduleConfig
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a configuration, and no run yet."""
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    make_place(folder)
    before = os.getcwd()
    os.chdir(folder)
    stop_at("trunk", 20, 10)
    os.chdir(before)
    return folder


@pytest.fixture
def shared(shared_folder, monkeypatch):
    """A folder with a trunk that was planned for 20 updates and stopped after 10; no test changes it."""
    monkeypatch.chdir(shared_folder)
    before = digests("runs/trunk")
    yield shared_folder
    assert digests("runs/trunk") == before


def train(run, steps, *args):
    """Train a run of its own to `steps` updates."""
    logger = json.dumps(
        [{"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": f"runs/{run}"}}]
    )
    return pretrain(
        [
            "fit",
            "--config",
            "trunk.yaml",
            "--run",
            run,
            "--trainer.max_steps",
            str(steps),
            "--trainer.logger",
            logger,
            *args,
        ]
    )


def stop_at(run, planned, stop, *args):
    """Train a run that is planned for `planned` updates and stopped (as by a signal) after `stop`."""
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= stop

    from recipes import pretrain as recipe

    class StoppingCLI(recipe.PretrainCLI):
        def before_fit(self):
            self.trainer.callbacks.append(Stop())

    logger = json.dumps(
        [{"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": f"runs/{run}"}}]
    )
    return StoppingCLI(
        recipe.resolve,
        args=[
            "fit",
            "--config",
            "trunk.yaml",
            "--run",
            run,
            "--trainer.max_steps",
            str(planned),
            "--trainer.logger",
            logger,
            *args,
        ],
    )


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


# --- extension ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("C30")
def test_c30_extending_is_as_if_it_had_been_planned_so(shared):
    train("long", 30)
    shutil.copytree("runs/trunk", "runs/longer")
    train("longer", 30)
    expected = (
        {n: 0.25 * n for n in range(1, 5)}
        | dict.fromkeys(range(5, 27), 1.0)
        | {27: 0.75, 28: 0.5, 29: 0.25, 30: 0.0}
    )
    assert rates("longer") == rates("long") == expected
    assert losses("longer") == losses("long")
    for step in (15, 25, 30):
        assert same(state("longer", step)[0], state("long", step)[0]), step


@pytest.mark.slow
@pytest.mark.case("C30")
def test_c30_the_same_length_gives_the_same_rates(place):
    train("whole", 20)
    stop_at("trunk", 20, 10)
    train("trunk", 20)
    assert rates("trunk") == rates("whole")
    assert same(state("trunk", 20)[0], state("whole", 20)[0])


@pytest.mark.slow
def test_extending_a_decayed_run_names_the_last_stable_checkpoint(place):
    train("trunk", 20)
    with pytest.raises(ValueError, match=r"Its decay began after update 16.*step-00000016"):
        train("trunk", 30)
    train("longer", 30, "--ckpt_path", "runs/trunk/checkpoints/step-00000016")
    assert rates("longer")[26] == 1.0 and rates("longer")[27] == 0.75


@pytest.mark.slow
@pytest.mark.case("C30")
def test_c30_cosine_and_shares_say_why_not(place):
    stop_at("trunk", 20, 10, "--model.schedule.kind", "cosine")
    with pytest.raises(ValueError, match="a cosine's rates depend on the run's length"):
        train("trunk", 30, "--model.schedule.kind", "cosine")
    stop_at("share", 20, 10, "--model.schedule.warmup_steps", "0.2")
    with pytest.raises(ValueError, match=r"set model.schedule.warmup_steps=4"):
        train("share", 30, "--model.schedule.warmup_steps", "0.2")
    train("share", 30, "--model.schedule.warmup_steps", "4")


# --- branches ----------------------------------------------------------------------------------------------------------


def test_a_branch_is_as_if_the_trunk_had_decayed_there(shared):
    train("planned", 14)  # warmup 4, decay 4: decays from update 10 on
    cli = cut("--from", "archive:10", "--decay_steps", 4, "--shape", "linear")
    assert cli.run_dir == Path("runs/trunk-cooldown-10-linear")
    assert rates("trunk-cooldown-10-linear") == {11: 0.75, 12: 0.5, 13: 0.25, 14: 0.0}
    assert losses("trunk-cooldown-10-linear") == {k: v for k, v in losses("planned").items() if k > 10}
    (ours, rest), (theirs, their_rest) = state("trunk-cooldown-10-linear", 14), state("planned", 14)
    assert same(ours, theirs)
    assert rest["lit_gpt"]["tokens"] == their_rest["lit_gpt"]["tokens"] == 14 * 4 * 32


@pytest.mark.slow
def test_the_trunk_goes_on_while_branches_are_cut_from_it(place):
    train("alone", 20, "--model.schedule.decay_steps", "0")
    stop_at("trunk", 20, 10, "--model.schedule.decay_steps", "0")
    cut("--from", "latest", "--decay_steps", 2)
    cut("--from", "archive:5", "--decay_steps", 0.5, "--shape", "exponential", "--final_ratio", 0.1)
    train("trunk", 20, "--model.schedule.decay_steps", "0")
    assert same(state("alone", 20)[0], state("trunk", 20)[0])
    assert losses("alone") == losses("trunk")
    branch = rates("trunk-cooldown-5-exponential")
    assert list(branch) == [6, 7, 8, 9, 10] and branch[10] == pytest.approx(0.1)


def test_lineage_through_two_generations(shared):
    cut("--from", "archive:10", "--decay_steps", 6, "--shape", "linear", "--name", "child")
    # The child decays, so nothing can be cut from it; its own stable trunk is the run at update 10.
    with pytest.raises(
        ValueError, match=r"decaying already, since update 10. The last stable|No checkpoint from before"
    ):
        cooldown.main(["--run", "runs/child", "--from", "latest", "--decay_steps", "2"])
    # A second generation: a longer trunk begun from the first one, and a branch of that.
    shutil.copytree(
        "runs/trunk", "elsewhere/trunk"
    )  # RestartEquivalence writes beside what recipes.pretrain resumes
    train(
        "trunk2",
        20,
        "--ckpt_path",
        "elsewhere/trunk/checkpoints/step-00000010",
        "--model.schedule.decay_steps",
        "0",
    )
    cooldown.main(
        ["--run", "runs/trunk2", "--from", "archive:15", "--decay_steps", "3", "--name", "grandchild"]
    )
    parent = read_manifest(Path("runs/trunk/checkpoints/step-00000010"))
    middle = read_manifest(Path("runs/trunk2/checkpoints/step-00000015"))
    for saved in list_saved("runs/child/checkpoints"):
        lineage = read_manifest(Path("runs/child/checkpoints") / saved.name)["lineage"]
        assert lineage == {
            "parent_run": "trunk", "parent_step": 10, "parent_manifest_sha256": parent["sha256"], "parent_tokens": 10 * 4 * 32,
            "parent_lineage": None, "decay_shape": "linear", "decay_steps": 6, "final_ratio": 0.0,
        }  # fmt: skip
    lineage = read_manifest(Path("runs/grandchild/checkpoints/step-00000018"))["lineage"]
    assert (lineage["parent_run"], lineage["parent_step"]) == ("trunk2", 15)
    assert lineage["parent_manifest_sha256"] == middle["sha256"]
    assert lineage["parent_lineage"]["parent_run"] == "trunk"
    assert lineage["parent_lineage"]["parent_manifest_sha256"] == parent["sha256"]


@pytest.mark.slow
def test_the_same_command_again_continues_the_branch(place):
    """A branch stopped half way resumes as one, also after the trunk has moved on; then the command starts the next branch."""
    args = ["--from", "latest", "--decay_steps", "8", "--shape", "linear"]
    stop_at("trunk", 30, 10, "--model.schedule.decay_steps", "0")
    cut(*args, "--name", "whole")
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 14

    original = cooldown.CooldownCLI.before_fit
    cooldown.CooldownCLI.before_fit = lambda self: (original(self), self.trainer.callbacks.append(Stop()))
    try:
        cut(*args)
    finally:
        cooldown.CooldownCLI.before_fit = original
    assert max(rates("trunk-cooldown-10-linear")) == 14
    train("trunk", 15, "--model.schedule.decay_steps", "0")
    cut(*args)
    assert same(state("trunk-cooldown-10-linear", 18)[0], state("whole", 18)[0])
    manifest = read_manifest(Path("runs/trunk-cooldown-10-linear/checkpoints/step-00000018"))
    assert manifest["lineage"]["parent_step"] == 10 and manifest["lineage"]["decay_shape"] == "linear"
    cut(*args)
    assert Path("runs/trunk-cooldown-15-linear/checkpoints/step-00000023").is_dir()


@pytest.mark.slow
def test_the_lineage_reaches_wandb(place, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    stop_at("trunk", 20, 5)
    from lit_gpt_loop.journal import RunWandbLogger

    logger = json.dumps(
        [{"class_path": "lit_gpt_loop.journal.RunWandbLogger", "init_args": {"save_dir": "runs/branch"}}]
    )
    cli = cut("--from", "latest", "--decay_steps", 2, "--name", "branch", "--trainer.logger", logger)
    (wandb_logger,) = [item for item in cli.trainer.loggers if isinstance(item, RunWandbLogger)]
    run = wandb_logger.experiment
    assert run.group == "trunk"
    lineage = dict(run.config["lineage"])
    assert (lineage["parent_step"], lineage["request"]["parent_run"], lineage["request"]["shape"]) == (
        5,
        "trunk",
        "1-sqrt",
    )
    assert (
        lineage["parent_manifest_sha256"]
        == read_manifest(Path("runs/trunk/checkpoints/step-00000005"))["sha256"]
    )
    assert "WANDB_RUN_GROUP" not in os.environ
    run.finish()


# --- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "updates", "message"),
    [
        (ScheduleConfig("cosine", 4), 10, "follows a cosine.*kind: wsd"),
        (ScheduleConfig("wsd", 4, 0), 3, "still in warmup, which ends at update 4"),
        (
            ScheduleConfig("wsd", 4, 4),
            17,
            "decaying already, since update 16. The last stable checkpoint is archive:15",
        ),
    ],
)
def test_what_cannot_be_branched_from(schedule, updates, message):
    request = Request("r", "latest", 4, "linear", 0.0)
    with pytest.raises(ValueError, match=message):
        plan_branch(request, "c", schedule.resolve(20), updates, {"step": updates}, [5, 10, 15, 20])


def test_what_a_branch_is_by_hand():
    schedule = ScheduleConfig("wsd", 100, 0).resolve(None)
    branch = plan_branch(
        Request("r", "latest", 0.2, "1-sqrt", 0.0),
        "c",
        schedule,
        4000,
        {"step": 4000, "tokens": 7, "sha256": "x"},
    )
    assert (branch.name, branch.decay_steps, branch.total_steps) == ("r-cooldown-4000-1-sqrt", 1000, 5000)
    resolved = ScheduleConfig("wsd", 100, 1000).resolve(5000)
    assert resolved.decay_start == 4000
    # At the very start of its own decay a run can be branched; 3 skipped updates are steps that the schedule did not see.
    at_start = ScheduleConfig("wsd", 4, 4).resolve(20)
    skipped = plan_branch(Request("r", "latest", 10, "linear", 0.0), "c", at_start, 16, {"step": 19})
    assert (skipped.decay_steps, skipped.total_steps) == (13, 29)
    assert ScheduleConfig("wsd", 4, 13).resolve(29).decay_start == 16


@pytest.mark.parametrize(
    ("key", "value"), [("decay_steps", 0), ("decay_steps", -1), ("decay_steps", 2.5), ("final_ratio", 1.5)]
)
def test_arguments_out_of_range(key, value):
    with pytest.raises(ValueError, match=key):
        Request(
            **{
                "parent_run": "r",
                "checkpoint": "latest",
                "decay_steps": 1,
                "shape": "linear",
                "final_ratio": 0.0,
                key: value,
            }
        )


def test_names_that_are_taken_and_runs_that_are_not_there(shared):
    with pytest.raises(FileNotFoundError, match="There is no run runs/nowhere"):
        cooldown.main(["--run", "nowhere", "--decay_steps", "2"])
    with pytest.raises(FileNotFoundError, match="steps"):
        cut("--from", "archive:7", "--decay_steps", 2)
    cut("--decay_steps", 2, "--name", "b")
    with pytest.raises(ValueError, match=r"another branch.*another --name"):
        cut("--decay_steps", 3, "--name", "b")
    (shared / "runs" / "other").mkdir()
    with pytest.raises(ValueError, match="a run that is no branch"):
        cut("--decay_steps", 3, "--name", "other")
    lock = cooldown._lock(shared / "runs" / "b")
    with pytest.raises(ValueError, match="another process"):
        cut("--decay_steps", 2, "--name", "b")
    lock.close()


def test_no_path_of_the_trunk_stays_in_a_branches_configuration(tmp_path):
    parent = tmp_path / "runs" / "trunk"
    config = {
        "run": "trunk",
        "max_tokens": 5,
        "trainer": {
            "default_root_dir": str(parent),
            "logger": [{"init_args": {"save_dir": f"{parent}/logs"}}],
            "callbacks": [
                {
                    "class_path": "callbacks.CheckpointRetention",
                    "init_args": {"dirpath": "elsewhere", "copy_to": "s3://b/trunk", "keep_latest": 3},
                },
                {"class_path": "callbacks.MFUMonitor"},
            ],
        },
        "model": {"schedule": {"kind": "constant"}, "lr": 1.0},
        "data": {"corpus": str(tmp_path / "runs" / "trunk.txt")},
    }
    branch = plan_branch(
        Request("trunk", "latest", 2, "linear", 0.1),
        "c",
        ScheduleConfig("constant", 0).resolve(None),
        5,
        {"step": 5},
    )
    new = branch_config(config, branch, parent)
    assert new["trainer"]["logger"][0]["init_args"]["save_dir"] == str(
        tmp_path / "runs" / branch.name / "logs"
    )
    assert new["trainer"]["callbacks"][0]["init_args"] == {"dirpath": None, "copy_to": None, "keep_latest": 3}
    assert (
        new["trainer"]["max_steps"] == 7
        and new["max_tokens"] is None
        and new["trainer"]["default_root_dir"] is None
    )
    assert new["model"]["schedule"]["decay_shape"] == "linear" and new["model"]["lr"] == 1.0
    assert new["data"] == config["data"], "a path that only begins alike is another one"
    assert config["trainer"]["max_steps" if "max_steps" in config["trainer"] else "default_root_dir"] == str(
        parent
    )
    assert moved("runs/trunk", Path("runs/trunk"), Path("runs/b")) == "runs/b"


# --- ranks and kills ---------------------------------------------------------------------------------------------------


def on_ranks(folder):
    """Run in each of two ranks: extension and branch under FSDP2, as on one process."""
    os.chdir(folder)
    args = ("--trainer.strategy", "fsdp2", "--trainer.devices", "2", "--data.micro_batch_size", "1")
    train("long2", 30, *args)
    stop_at("trunk", 20, 10, *args)
    train("planned2", 14, *args)
    environment = {
        k: os.environ.pop(k) for k in ("RANK", "WORLD_SIZE")
    }  # these ranks are threads of one test, not of a job
    request = Request("trunk", "archive:10", 4, "linear", 0.0)
    if environment["RANK"] == "0":
        branch, lock = cooldown.settle(Path("runs/trunk"), request, None)
        os.environ.update(environment)
        cooldown._write(
            cooldown._meeting_point(Path("runs/trunk")),
            json.dumps({**vars(branch), "request": vars(request)}),
        )
        lock.close()
    else:
        os.environ.update(environment)
        branch = cooldown._wait_for_rank_zero(Path("runs/trunk"))
    os.environ[cooldown._DECIDED] = json.dumps({**vars(branch), "request": vars(request)})
    cut("--from", "archive:10", "--decay_steps", 4, "--shape", "linear")
    os.environ.pop(cooldown._DECIDED, None)
    train("trunk", 30, *args)
    return rates("trunk") == rates("long2")


@pytest.mark.slow
def test_extension_and_branch_on_two_ranks_of_fsdp2(ranks2, place):
    assert ranks2.run(on_ranks, str(place), timeout_s=240.0) == [True, True]
    assert same(state("trunk", 30)[0], state("long2", 30)[0])
    assert same(state("trunk-cooldown-10-linear", 14)[0], state("planned2", 14)[0])
    assert losses("trunk") == losses("long2")


def command(place, *args):
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.cooldown", "--run", "runs/trunk", *args],
        cwd=place, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_branch_resumes_as_a_branch(place):
    stop_at("trunk", 20, 10, "--model.schedule.decay_steps", "0")
    cut("--from", "latest", "--decay_steps", 60, "--name", "whole")
    before = digests("runs/trunk")
    process = command(place, "--from", "latest", "--decay_steps", "60")
    journal = place / "runs/trunk-cooldown-10-1-sqrt/journal.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and (not journal.is_file() or journal.read_text().count('"update"') < 20):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert max(rates("trunk-cooldown-10-1-sqrt")) < 70, "killed too late"
    again = command(place, "--from", "latest", "--decay_steps", "60")
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert same(state("trunk-cooldown-10-1-sqrt", 70)[0], state("whole", 70)[0])
    assert (
        read_manifest(place / "runs/trunk-cooldown-10-1-sqrt/checkpoints/step-00000070")["lineage"][
            "parent_step"
        ]
        == 10
    )
    assert digests("runs/trunk") == before
