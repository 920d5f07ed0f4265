"""Branches and extensions: in this process for speed, in real processes where one is killed."""

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

from callbacks.checkpoint_retention import list_saved, read_manifest
from recipes import cooldown
from tests.distributed.ranks import free_port
from tests.recipes.trunk import (
    ROOT,
    cut,
    digests,
    losses,
    rates,
    same,
    state,
    stop_at,
    train,
)


@pytest.fixture(scope="module")
def long(trunk_folder):
    """Train a run in that folder that was planned for 30 updates; return its name."""
    before = os.getcwd()
    os.chdir(trunk_folder)
    train("long", 30)
    os.chdir(before)
    return "long"


# --- extension ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("C30")
def test_c30_extending_is_as_if_it_had_been_planned_so(shared, long):
    shutil.copytree("runs/trunk", "runs/longer")
    train("longer", 30)
    expected = (
        {n: 0.25 * n for n in range(1, 5)}
        | dict.fromkeys(range(5, 27), 1.0)
        | {27: 0.75, 28: 0.5, 29: 0.25, 30: 0.0}
    )
    assert rates("longer") == rates(long) == expected
    assert losses("longer") == losses(long)
    for step in (15, 25, 30):
        assert same(state("longer", step)[0], state(long, step)[0]), step


@pytest.mark.case("C30")
@pytest.mark.slow
def test_c30_a_token_budget_extends_like_a_number_of_updates(shared, long):
    """An update has 4 rows of 32 tokens; 30 updates are 3,840, and what does not pay for another one is not spent."""
    shutil.copytree("runs/trunk", "runs/budget")
    train("budget", -1, "--max_tokens", str(30 * 4 * 32 + 127))
    assert rates("budget") == rates(long)
    assert losses("budget") == losses(long)
    assert same(state("budget", 30)[0], state(long, 30)[0])
    assert state("budget", 30)[1]["lit_gpt"]["tokens"] == 3840
    with pytest.raises(ValueError, match=r"Its decay began after update 26\..*step-00000025"):
        train("budget", -1, "--max_tokens", str(40 * 4 * 32))


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
def test_a_branch_after_skipped_updates_ends_at_its_final_rate(place):
    """Two updates without a gradient do not count in the schedule; the branch decays over its own four all the same."""
    import lightning.pytorch as pl

    class Skip(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step in (6, 8):
                for p in pl_module.parameters():
                    p.grad = None

    stop_at("trunk", 20, 10, callback=Skip())
    assert state("trunk", 10)[1]["lit_gpt"]["updates"] == 8
    cut("--from", "archive:10", "--decay_steps", 4, "--shape", "linear", "--final_ratio", 0.2)
    assert rates("trunk-cooldown-10-linear") == pytest.approx({11: 0.8, 12: 0.6, 13: 0.4, 14: 0.2})


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


@pytest.mark.slow
def test_lineage_through_two_generations(shared):
    cut("--from", "archive:10", "--decay_steps", 6, "--shape", "linear", "--name", "child")
    # The child decays and has nothing from before: where it was cut itself is what can be branched from.
    with pytest.raises(
        ValueError,
        match=r"update 16 is decaying already, since update 10\. This run was itself cut from trunk at update 10: branch "
        r"from there, --run runs/trunk --from archive:10$",
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
@pytest.mark.parametrize(
    ("logger", "users_group"),
    [("lit_gpt_loop.journal.RunWandbLogger", None), ("lightning.pytorch.loggers.WandbLogger", "mine")],
)
def test_the_lineage_reaches_wandb(place, monkeypatch, logger, users_group):
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    wandb.teardown()  # it reads the environment once per process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    if users_group:
        monkeypatch.setenv("WANDB_RUN_GROUP", users_group)
    stop_at("trunk", 20, 5)
    loggers = json.dumps([{"class_path": logger, "init_args": {"save_dir": "runs/branch", "offline": True}}])
    cli = cut("--from", "latest", "--decay_steps", 2, "--name", "branch", "--trainer.logger", loggers)
    (wandb_logger,) = [item for item in cli.trainer.loggers if isinstance(item, WandbLogger)]
    run = wandb_logger.experiment
    assert run.group == (users_group or "trunk")
    lineage = dict(run.config["lineage"])
    asked = lineage["request"]
    assert (lineage["parent_step"], asked["parent_run"], asked["shape"]) == (5, "trunk", "1-sqrt")
    parent = read_manifest(Path("runs/trunk/checkpoints/step-00000005"))
    assert lineage["parent_manifest_sha256"] == parent["sha256"]
    assert os.environ.get("WANDB_RUN_GROUP") == users_group
    run.finish()


# --- ranks and kills ---------------------------------------------------------------------------------------------------


def on_ranks(folder):
    """Run in each of two ranks: extension and branch under FSDP2, as on one process."""
    os.chdir(folder)
    args = ("--trainer.strategy", "fsdp2", "--trainer.devices", "2", "--data.micro_batch_size", "1")
    train("long2", 30, *args)
    stop_at("trunk", 20, 10, *args)
    train("planned2", 14, *args)
    cut("--from", "archive:10", "--decay_steps", 4, "--shape", "linear")  # rank 1 asks rank 0 which branch
    train("trunk", 30, *args)
    return rates("trunk") == rates("long2")


@pytest.mark.slow
def test_extension_and_branch_on_two_ranks_of_fsdp2(ranks2, place):
    assert ranks2.run(on_ranks, str(place), timeout_s=240.0) == [True, True]
    assert same(state("trunk", 30)[0], state("long2", 30)[0])
    assert same(state("trunk-cooldown-10-linear", 14)[0], state("planned2", 14)[0])
    assert losses("trunk") == losses("long2")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_branch_starts_under_a_launcher(shared, launcher):
    """Two processes of one launcher, as it starts them; SLURM's variables are set by hand."""
    name = f"by-{launcher}"
    ours = [
        "--run",
        "runs/trunk",
        "--from",
        "latest",
        "--decay_steps",
        "3",
        "--shape",
        "linear",
        "--name",
        name,
    ]
    ours += ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.micro_batch_size", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = {
        "JOB_ID": "77",
        "STEP_ID": "0",
        "NTASKS": "2",
        "NTASKS_PER_NODE": "2",
        "JOB_NAME": "cooldown",
        "NODEID": "0",
        "NNODES": "1",
    }
    slurm = {f"SLURM_{k}": v for k, v in job.items()} | {
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
    }
    commands, environments = [[sys.executable, "-m", "recipes.cooldown", *ours]] * 2, []
    for rank in "01":
        environments.append(environment | slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank})
    if launcher == "torchrun":
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_port",
            str(free_port()),
            "-m",
            "--",
        ]
        commands, environments = [[*torchrun, "recipes.cooldown", *ours]], [environment]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(c, env=e, **pipes) for c, e in zip(commands, environments, strict=True)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert rates(name) == pytest.approx({11: 2 / 3, 12: 1 / 3, 13: 0.0}, abs=1e-12)
    manifest = read_manifest(Path(f"runs/{name}/checkpoints/step-00000013"))
    assert (manifest["lineage"]["parent_step"], manifest["layout"]["world_size"]) == (10, 2)


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
