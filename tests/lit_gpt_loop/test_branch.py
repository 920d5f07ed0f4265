"""Branches as plain values: what can be cut, where it ends, which configuration it gets."""

import math
from pathlib import Path

import pytest

from lit_gpt_loop.branch import (
    Request,
    branch_config,
    checkpoint_places,
    moved,
    plan_branch,
    setting_differences,
)
from lit_gpt_loop.schedules import ScheduleConfig


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


@pytest.mark.parametrize(
    ("shape", "final", "ratios"),
    [
        ("linear", 0.0, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
        ("1-sqrt", 0.1, [1.0 - 0.9 * math.sqrt(k / 10) for k in range(1, 11)]),
    ],
)
def test_a_branch_after_skipped_updates_decays_to_its_end(shape, final, ratios):
    """16 updates happened in 26 steps: the branch ends at step 36, its schedule after 26 updates that happen."""
    trunk = ScheduleConfig("wsd", 4, 0).resolve(None)
    branch = plan_branch(Request("r", "latest", 10, shape, final), "c", trunk, 16, {"step": 26})
    assert (branch.decay_steps, branch.total_steps, branch.skipped_updates) == (10, 36, 10)
    config = branch_config({"trainer": {}, "model": {}}, branch, Path("runs/r"))
    assert config["trainer"]["max_steps"] == 36
    schedule = ScheduleConfig(**config["model"]["schedule"]).resolve(36)
    assert [schedule(n) for n in range(4, 16)] == [1.0] * 12
    assert [schedule(n) for n in range(16, 26)] == pytest.approx(ratios, abs=1e-12)
    assert schedule(25) == final


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


@pytest.mark.parametrize(
    "value", ["runs/trunk", "runs/trunk/logs", "../here/runs/trunk/logs", "{abs}/runs/trunk/logs"]
)
@pytest.mark.parametrize("run", ["runs/trunk", "{abs}/runs/trunk", "link/trunk"])
def test_a_path_into_the_trunk_is_found_however_both_are_written(tmp_path, monkeypatch, value, run):
    here = tmp_path / "here"
    (here / "runs" / "trunk").mkdir(parents=True)
    (here / "link").symlink_to(here / "runs")
    monkeypatch.chdir(here)
    value, run = (v.format(abs=here) for v in (value, run))
    new = Path(run).with_name("b")
    assert moved(value, Path(run), new) == str(new / "logs" if value.endswith("logs") else new)


def test_a_path_into_the_trunk_is_found_from_elsewhere_and_words_stay_words(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "trunk"
    (run / "logs").mkdir(parents=True)
    config = {
        "runs_dir": "runs",
        "run": "trunk",
        "trainer": {"logger": {"init_args": {"save_dir": "runs/trunk", "name": "trunk", "tags": ["trunk"]}}},
        "model": {},
        "data": {"corpus": "text", "data_dir": "data"},
    }
    request = Request("trunk", "latest", 2, "linear", 0.0)
    branch = plan_branch(request, "c", ScheduleConfig("wsd", 0, 0).resolve(None), 5, {"step": 5}, name="b")
    for cwd in (tmp_path, run, Path("/")):
        monkeypatch.chdir(cwd)
        new = branch_config(config, branch, run)
        settings = new["trainer"]["logger"]["init_args"]
        assert settings == {"save_dir": str(tmp_path / "runs" / "b"), "name": "trunk", "tags": ["trunk"]}
        assert new["data"] == config["data"]
    monkeypatch.chdir(run)
    assert moved("logs", run, run.with_name("b")) == str(tmp_path / "runs" / "b" / "logs")


def test_what_would_end_a_branch_or_write_into_the_trunks_records_is_left_out():
    config = {
        "trainer": {
            "max_time": "00:00:00:06",
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.Timer"},
                {"class_path": "callbacks.MFUMonitor"},
            ],
            "logger": {
                "class_path": "lightning.pytorch.loggers.WandbLogger",
                "init_args": {"id": "abc", "version": "abc", "project": "p"},
            },
        },
        "model": {},
    }
    request = Request("trunk", "latest", 2, "linear", 0.0)
    branch = plan_branch(request, "c", ScheduleConfig("wsd", 0, 0).resolve(None), 5, {"step": 5})
    trainer = branch_config(config, branch, Path("runs/trunk"))["trainer"]
    assert trainer["max_time"] is None
    assert trainer["callbacks"] == [{"class_path": "callbacks.MFUMonitor"}]
    assert trainer["logger"]["init_args"] == {"id": None, "version": None, "project": "p"}


def test_a_decayed_branch_names_where_its_own_trunk_can_be_cut():
    decaying = ScheduleConfig("wsd", 4, 6, "linear").resolve(16)
    request = Request("child", "latest", 2, "linear", 0.0)
    lineage = {
        "parent_run": "trunk",
        "parent_step": 12,
        "decay_shape": "linear",
    }  # cut after 2 skipped updates
    with pytest.raises(ValueError, match=r"since update 10\. This run was itself cut from trunk at update 12: .*--run out/trunk "
                       r"--from archive:12$"):  # fmt: skip
        plan_branch(
            request, "c", decaying, 16, {"step": 18, "lineage": lineage}, [14, 18], runs_dir=Path("out")
        )
    with pytest.raises(ValueError, match=r"since update 10\. No checkpoint from before it is left"):
        plan_branch(request, "c", decaying, 16, {"step": 16, "lineage": None}, [14, 16])


def test_settings_that_are_not_the_checkpoints_are_named():
    hyper_parameters = {
        "config": {"n_layer": 2, "dropout": 0.1, "vocab_size": 257},
        "lr": 0.004,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    model = {
        "config": {"n_layer": 2, "n_head": 2, "n_embd": 8},
        "overrides": {"dropout": 0.1},
        "vocab_size": 257,
        "lr": 0.004,
        "betas": [0.9, 0.95],
        "eps": "1e-8",  # YAML 1.1 reads a word
        "weight_decay": 0.1,
    }
    data = {"global_batch_size": 4, "context_length": 32}
    assert setting_differences({"model": model, "data": data}, hyper_parameters, 4) == []
    other = {**model, "lr": 0.5, "betas": [0.9, 0.99], "weight_decay": 0.0, "overrides": {"dropout": 0.2}}
    tokens = {"global_batch_size": None, "global_batch_tokens": 256, "context_length": 32}
    assert setting_differences({"model": other, "data": tokens}, hyper_parameters, 4) == [
        "betas: [0.9, 0.95] in the checkpoint, [0.9, 0.99] now",
        "config.dropout: 0.1 in the checkpoint, 0.2 now",
        "lr: 0.004 in the checkpoint, 0.5 now",
        "weight_decay: 0.1 in the checkpoint, 0.0 now",
        "global_batch_size: 4 in the checkpoint, 8 now",
    ]


def test_where_a_trunk_keeps_its_checkpoints():
    run = Path("runs/trunk")
    assert checkpoint_places({"trainer": {"callbacks": None}}, run) == (run / "checkpoints", None)
    saver = {
        "class_path": "callbacks.CheckpointRetention",
        "init_args": {"dirpath": "far", "copy_to": "s3://b/x"},
    }
    assert checkpoint_places({"trainer": {"callbacks": [{"class_path": "x.Y"}, saver]}}, run) == (
        Path("far"),
        "s3://b/x",
    )
    assert checkpoint_places({"trainer": {"callbacks": saver}}, run) == (Path("far"), "s3://b/x")
