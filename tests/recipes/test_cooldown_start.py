"""Where a branch starts: its checkpoint, its settings, its name and directory, and what all ranks agree on."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from callbacks.checkpoint_retention import list_saved, read_manifest
from lit_gpt_loop.branch import Request
from lit_gpt_loop.journal import read_journal
from recipes import cooldown, cooldown_start
from tests.recipes.trunk import (
    CONFIG,
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


@pytest.fixture
def trunk(trunk_folder, tmp_path, monkeypatch):
    """A copy of that trunk, which a test may change."""
    shutil.copytree(trunk_folder / "runs" / "trunk", tmp_path / "runs" / "trunk")
    for name in ("text.txt", "trunk.yaml"):
        shutil.copy(trunk_folder / name, tmp_path / name)
    shutil.copytree(trunk_folder / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "trunk"


# --- settings ----------------------------------------------------------------------------------------------------------


def test_a_command_that_was_refused_leaves_no_configuration(trunk):
    with pytest.raises(ValueError, match="warmup"):
        train(
            "trunk",
            20,
            "--model.lr",
            "0.5",
            "--data.global_batch_size",
            "8",
            "--model.schedule.warmup_steps",
            "6",
        )
    assert [p.name for p in trunk.glob("config*.yaml")] == ["config.yaml"]
    cut("--from", "archive:10", "--decay_steps", 2, "--shape", "linear")
    assert rates("trunk-cooldown-10-linear") == {11: 0.5, 12: 0.0}
    assert [samples for _, samples in losses("trunk-cooldown-10-linear").values()] == [44, 48]


@pytest.mark.slow
def test_a_branch_takes_the_settings_that_trained_its_checkpoint(trunk):
    """The trunk goes on at half the rate and twice the batch after update 10: each branch has what its checkpoint had."""
    changed = ("--model.lr", "0.002", "--data.global_batch_size", "8", "--model.schedule.decay_steps", "0")
    without_proof = json.dumps(CONFIG["trainer"]["callbacks"][:2])  # RestartEquivalence refuses another rate
    train("trunk", 15, *changed, "--trainer.callbacks", without_proof)
    assert [p.name for p in sorted(trunk.glob("config*.yaml"))] == ["config-2.yaml", "config.yaml"]
    for step, rate, batch in ((10, 0.004, 4), (15, 0.002, 8)):
        cut("--from", f"archive:{step}", "--decay_steps", 2, "--shape", "linear", "--name", f"from-{step}")
        row = read_journal(f"runs/from-{step}", "update")[0]
        assert (row["optim/lr"], row["train/tokens"]) == (rate / 2, batch * 32)
    # A checkpoint names its configuration; one that names none takes the newest that agrees with what it does know.
    path = trunk / "checkpoints/step-00000010/state"
    rest = state("trunk", 10)[1]
    assert rest["run_config"]["file"] == "config.yaml" and rest["run_config"]["sequences_per_update"] == 4
    del rest["run_config"]
    assert cooldown_start.config_of(trunk, path, rest)["model"]["lr"] == 0.004
    (trunk / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"no configuration .* lr: 0.004 in the checkpoint, 0.002 now"):
        cooldown_start.config_of(trunk, path, rest)


@pytest.mark.slow
def test_a_configuration_that_was_altered_is_compared_with_the_checkpoint(trunk):
    file = trunk / "config.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(config | {"data": config["data"] | {"global_batch_size": 8}}))
    with pytest.raises(ValueError, match="global_batch_size: 4 in the checkpoint, 8 now"):
        cut("--from", "archive:10", "--decay_steps", 2)
    assert not Path("runs/trunk-cooldown-10-1-sqrt").exists()
    file.write_text(yaml.safe_dump(config | {"data": config["data"] | {"num_workers": 0}}))
    cut("--from", "archive:10", "--decay_steps", 1)


@pytest.mark.slow
def test_a_trunk_that_time_ended_gives_whole_branches(place):
    """Lightning's Timer restores the time that the trunk has taken, which is all that it had."""
    stop_at("trunk", 20, 5, "--trainer.max_time", "00:00:20:00")
    path = Path("runs/trunk/checkpoints/step-00000005/state/rest.pt")
    config = Path("runs/trunk/config.yaml")
    config.write_text(config.read_text().replace("00:00:20:00", "00:00:00:00"))
    assert path.is_file() and "00:00:00:00" in config.read_text()
    cut("--from", "latest", "--decay_steps", 4, "--shape", "linear", "--name", "b")
    assert list(rates("b")) == [6, 7, 8, 9]


@pytest.mark.slow
def test_a_trunk_without_callbacks_of_its_own_gives_a_branch_with_the_same_defaults(place):
    """Its configuration names none, so recipes.pretrain clips at 1.0, weighs tokens and saves; so does the branch."""
    config = yaml.safe_load(Path("trunk.yaml").read_text())
    del config["trainer"]["callbacks"]
    Path("trunk.yaml").write_text(yaml.safe_dump(config))
    train("trunk", 5, "--model.schedule.decay_steps", "0")
    cli = cut("--from", "latest", "--decay_steps", 1, "--name", "b")
    clipping = [c.clip_norm for c in cli.trainer.callbacks if type(c).__name__ == "GradNormMonitor"]
    assert clipping == [1.0]
    assert read_manifest(Path("runs/b/checkpoints/step-00000006"))["lineage"]["parent_step"] == 5


@pytest.mark.parametrize(
    "override",
    [
        ["--trainer.max_steps", "20"],
        ["--trainer.max_steps=12"],
        ["--trainer.max_time", "00:01:00:00"],
        ["--trainer.max_epochs=1"],
        ["--max_tokens", "9"],
    ],
)
def test_a_branchs_length_is_its_decay_alone(shared, override):
    with pytest.raises(
        ValueError, match=rf"^{override[0].partition('=')[0]} is not for a branch.*--decay_steps"
    ):
        cut("--from", "archive:10", "--decay_steps", 4, *override)
    assert not list(Path("runs").glob("trunk-cooldown*"))


# --- the checkpoint ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_refused(trunk):
    shutil.copytree(trunk, "runs/other")
    with pytest.raises(ValueError, match=r"is no checkpoint of runs/trunk.*--run runs/other$"):
        cut("--from", "runs/other/checkpoints/step-00000010", "--decay_steps", 2)
    assert not Path("runs/trunk-cooldown-10-1-sqrt").exists()
    cut("--from", "runs/trunk/checkpoints/step-00000010/state", "--decay_steps", 1, "--name", "by-path")
    assert list(rates("by-path")) == [11]
    os.rename(trunk / "checkpoints/step-00000010", "archived")
    (trunk / "checkpoints/step-00000010").symlink_to(Path("archived").absolute())
    cut("--from", "archive:10", "--decay_steps", 1, "--name", "by-link")
    assert list(rates("by-link")) == [11]


@pytest.mark.slow
def test_the_trunk_may_prune_the_checkpoint_once_the_branch_is_decided(trunk):
    request = Request("trunk", "latest", 2, "linear", 0.0)
    _, lock = cooldown_start.settle(trunk, request, None)
    lock.close()
    cut("--from", "archive:10", "--decay_steps", 2, "--shape", "linear", "--name", "whole")
    shutil.rmtree(trunk / "checkpoints" / "step-00000010")
    folder = Path("runs/trunk-cooldown-10-linear")
    assert (folder / ".start/step-00000010/state").is_dir()
    cut(
        "--from", "latest", "--decay_steps", 2, "--shape", "linear"
    )  # as a killed branch that had saved nothing
    assert same(state(folder.name, 12)[0], state("whole", 12)[0])
    assert not (folder / ".start").exists(), "it has checkpoints of its own"
    lineage = read_manifest(folder / "checkpoints/step-00000012")["lineage"]
    assert (lineage["parent_run"], lineage["parent_step"]) == ("trunk", 10)


def test_a_checkpoint_pruned_before_it_is_kept_gives_way_to_the_next(trunk, monkeypatch):
    link, step = os.link, trunk / "checkpoints" / "step-00000010"

    def prune_first(source, target):
        if step in source.parents:
            shutil.rmtree(step, ignore_errors=True)
        link(source, target)

    monkeypatch.setattr(cooldown_start.os, "link", prune_first)
    branch, lock = cooldown_start.settle(trunk, Request("trunk", "latest", 2, "linear", 0.0), None)
    lock.close()
    assert not step.exists() and branch.parent_step == 8
    assert not Path("runs/trunk-cooldown-10-linear").exists()


def test_files_are_copied_where_links_are_impossible(trunk, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(cooldown_start.os, "link", refuse)
    _, lock = cooldown_start.settle(trunk, Request("trunk", "archive:10", 2, "linear", 0.0), None)
    lock.close()
    kept = Path("runs/trunk-cooldown-10-linear/.start/step-00000010")
    original = digests(trunk / "checkpoints/step-00000010")
    copied = digests(kept)
    assert copied == {name: original[name] for name in copied} and "manifest.json" in copied


@pytest.mark.slow
def test_checkpoints_elsewhere_and_copies_are_found(place):
    callbacks = json.loads(json.dumps(CONFIG["trainer"]["callbacks"]))
    callbacks[1]["init_args"] |= {"dirpath": "elsewhere", "copy_to": "store"}
    stop_at("trunk", 20, 10, "--trainer.callbacks", json.dumps(callbacks))
    assert list_saved("elsewhere") and not Path("runs/trunk/checkpoints").exists()
    cut("--from", "archive:10", "--decay_steps", 1, "--name", "a")
    assert read_manifest(Path("runs/a/checkpoints/step-00000011"))["lineage"]["parent_run"] == "trunk"
    shutil.rmtree("elsewhere/step-00000010")  # newer in the store than here
    cut("--from", "latest", "--decay_steps", 1, "--name", "b")
    assert list(rates("b")) == [11]


def test_the_trunk_stays_as_it_is_when_its_paths_are_written_otherwise(shared):
    """`--run` absolute, the trunk's journal at a relative path (`shared` compares the trunk's files)."""
    cooldown.main(
        ["--run", str(shared / "runs/trunk"), "--from", "archive:10", "--decay_steps", "1", "--name", "abs"]
    )
    assert list(rates("abs")) == [11]


def test_from_within_the_trunks_directory_the_branch_stands_beside_it(shared, monkeypatch):
    data_dir = str(shared / "data")
    monkeypatch.chdir(shared / "runs" / "trunk")
    cooldown.main(["--run", ".", "--decay_steps", "1", "--name", "dot", "--data.data_dir", data_dir])
    monkeypatch.chdir(shared)
    assert list(rates("dot")) == [11]


# --- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bad name", "a/b", "..", "*"])
def test_a_name_that_is_no_directorys_leaves_nothing_behind(shared, name):
    before = sorted(os.listdir("runs"))
    with pytest.raises(ValueError, match=r"run name .* may hold letters"):
        cut("--from", "archive:10", "--decay_steps", 2, "--name", name)
    assert sorted(os.listdir("runs")) == before


def test_a_start_that_failed_does_not_block_the_name(trunk, monkeypatch):
    os.rename(trunk / "config.yaml", "config.yaml")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.yaml"):
        cut("--from", "archive:10", "--decay_steps", 1, "--name", "b")
    assert not Path("runs/b").exists()
    os.rename("config.yaml", trunk / "config.yaml")
    write = cooldown_start._write
    monkeypatch.setattr(cooldown_start, "_write", lambda path, text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cut("--from", "archive:10", "--decay_steps", 1, "--name", "b")
    assert not Path("runs/b").exists()
    # What a kill between the first file and branch.json leaves, by this version or an earlier one.
    Path("runs/b/.start.tmp").mkdir(parents=True)
    for left in (".lock", "branch.lock", "cooldown.yaml", ".branch.json.77"):
        Path("runs/b", left).write_text("")
    monkeypatch.setattr(cooldown_start, "_write", write)
    cut("--from", "archive:10", "--decay_steps", 1, "--name", "b")
    assert list(rates("b")) == [11]


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
    hold = "import sys, time\nfrom pathlib import Path\nfrom lit_gpt_loop.run_lock import run_lock\n"
    hold += (
        f"with run_lock(Path({str(shared / 'runs' / 'b')!r})):\n    print(1, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        with pytest.raises(ValueError, match=rf"is being trained by process {holder.pid} .*another --name"):
            cut("--decay_steps", 2, "--name", "b")
        holder.kill()


# --- ranks -------------------------------------------------------------------------------------------------------------

LAUNCHERS = {
    "torchrun": lambda rank: {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    "srun": lambda rank: {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NAME": "cooldown",
    },
}


def settled(environment, request, queue):
    """In a process of its own: report the branch, or the error."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        branch, lock = cooldown_start.settle(Path("runs/trunk"), Request(**request), None)
        queue.put((asdict(branch), lock is not None))
    except (ValueError, FileNotFoundError) as e:
        queue.put(str(e))


def on_two_ranks(launcher, **request):
    """Run `settled` in two processes, rank 1 first."""
    asked = {
        "parent_run": "trunk",
        "checkpoint": "archive:10",
        "decay_steps": 2,
        "shape": "linear",
        "final_ratio": 0.0,
    }
    context = multiprocessing.get_context("fork")
    processes, queues = [], []
    for rank in (1, 0):
        queues.append(context.Queue())
        arguments = (LAUNCHERS[launcher](rank), asked | request, queues[-1])
        processes.append(context.Process(target=settled, args=arguments, daemon=True))
        processes[-1].start()
        time.sleep(0.05)
    answers = [queue.get(timeout=30) for queue in queues]
    for process in processes:
        process.join(timeout=30)
    return answers


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.slow
def test_both_ranks_of_a_launcher_train_the_same_branch(trunk, launcher):
    (one, one_locks), (zero, zero_locks) = on_two_ranks(launcher)
    assert one == zero and one["name"] == "trunk-cooldown-10-linear"
    assert (zero_locks, one_locks) == (True, False)
    # The next job of the same name at once, with another request: what the first one said is not taken for an answer.
    (one, _), (zero, _) = on_two_ranks(launcher, decay_steps=3, shape="cosine")
    assert one == zero and one["request"]["decay_steps"] == 3
    # The same request after the trunk moved: what a killed job asked and was told is not taken for an answer either.
    on_two_ranks(launcher, checkpoint="latest")
    assert not list(Path("runs").glob(".ranks-*"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_error_of_rank_zero_reaches_the_others(trunk, launcher):
    one, zero = on_two_ranks(launcher, checkpoint="archive:7")
    assert zero.startswith("No checkpoint 'archive:7'") and one == f"rank 0 cannot start the branch: {zero}"
