import json

import pytest
import yaml

from lit_gpt_loop.journal import read_journal
from lit_gpt_loop.plan_check import compare_plan
from recipes import plan as recipe
from recipes.pretrain import main as pretrain
from tests.recipes.test_plan import CONFIG, run

UPDATE = {
    "kind": "update",
    "step": 1,
    "train/tokens": 262_144,
    "progress/update": 1,
    "progress/tokens": 262_144,
}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture
def trained(tmp_path):
    """Return the directory of a run of CONFIG that has made one update."""
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").write_text(json.dumps(UPDATE) + "\n")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"run": "mine"}))
    return run_dir


def test_predicted_against_measured(config_file, tmp_path, capsys):
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    rows = [
        {
            "kind": "update",
            "step": n,
            "train/tokens": 262_144,
            "progress/update": n,
            "progress/tokens": 262_144 * n,
            "perf/step_s": s,
        }
        for n, s in ((1, 9.0), (2, 2.0), (3, 2.0))
    ]
    (run_dir / "journal.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"torn')
    plan, text = run(capsys, "--config", config_file, "--gpu", "h100", "--against", run_dir, "--out", "none")
    compared = {c.name: c for c in compare_plan(plan.to_dict(), rows)}
    assert compared["tokens per update"].ratio == 1.0
    assert compared["updates"].ratio == 3 / 1000
    assert compared["time per update"].measured == 2.0
    assert compared["time per update"].ratio == pytest.approx(2.0 / plan.step_s)
    assert compared["peak memory"].measured is None and compared["peak memory"].ratio is None
    assert compared["epochs"].predicted is None
    assert "predicted against measured" in text and "time per update" in text and "peak memory " not in text
    with pytest.raises(FileNotFoundError, match="--against takes a run's directory"):
        recipe.main(["--config", str(config_file), "--against", str(tmp_path), "--out", "none"])


def test_predictions_hold_in_a_real_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the robot picks up the red box. " * 400)
    journal = {"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": "runs/real"}}
    config = {
        "trainer": {
            "max_steps": 3, "precision": "32-true", "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": [journal],
            "callbacks": [{"class_path": "callbacks.CheckpointRetention", "init_args": {"every_n_steps": 3}}],
        },
        "model": {"config": "nanogpt-char", "schedule": {"warmup_steps": 1, "decay_steps": 1}},
        "data": {"corpus": "text.txt", "tokenizer": "bytes", "context_length": 32, "micro_batch_size": 2, "global_batch_size": 6, "val_split": "tail", "val_fraction": 0.1},
    }  # fmt: skip
    (tmp_path / "real.yaml").write_text(yaml.safe_dump(config))
    pretrain(["fit", "--config", "real.yaml"])
    printed = capsys.readouterr().out
    command = next(line for line in printed.splitlines() if "recipes.plan" in line)
    assert "-m recipes.plan --config runs/real/config.yaml --against runs/real " in command
    _, text = run(capsys, *command.split()[3:7], "--out", "none")
    assert "predicted against measured" in text
    plan, _ = run(capsys, "--config", "runs/real/config.yaml", "--out", "none")
    compared = {c.name: c for c in compare_plan(plan.to_dict(), read_journal("runs/real"))}
    for name in ("tokens per update", "updates", "tokens", "epochs"):
        assert compared[name].ratio == 1.0, name
    assert compared["checkpoint"].ratio == pytest.approx(1.0, rel=0.1)
    # The configuration that a run writes down plans as the one it was started with.
    again, _ = run(capsys, "--config", "real.yaml", "--out", "none")
    assert again.to_dict() == plan.to_dict() | {"name": "real"}


def test_a_run_alone_is_planned_from_its_newest_configuration(trained, capsys):
    plan, text = run(capsys, "--against", trained, "--out", "none")
    assert plan.name == "mine" and plan.num_params > 0
    assert "predicted against measured" in text and "warning" not in text
    longer = CONFIG | {"run": "mine", "trainer": CONFIG["trainer"] | {"max_steps": 2000}}
    for number in (2, 10):
        (trained / f"config-{number}.yaml").write_text(yaml.safe_dump(longer))
        longer["trainer"]["max_steps"] = 3000
    plan, _ = run(capsys, "--against", trained, "--out", "none")
    assert plan.total_steps == 3000
    for path in trained.glob("config*.yaml"):
        path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"holds no config\.yaml: give the run's configuration by --config"
    ):
        recipe.main(["--against", str(trained)])


def test_another_run_than_the_planned_one_is_said(trained, config_file, capsys):
    args = ("--against", trained, "--config", config_file, "--out", "none")
    _, text = run(capsys, *args)
    assert "warning" not in text
    _, text = run(
        capsys,
        *args,
        "--model.overrides.n_layer",
        3,
        "--data.micro_batch_size",
        4,
        "--trainer.precision",
        "32-true",
    )
    words = " ".join(text.split())
    assert (
        "config.yaml is not the run planned here: model.n_layer 8 (planned 3), micro-batch 8 (planned 4), precision "
        "bf16-mixed (planned 32-true)"
    ) in words
    (trained / "config.yaml").write_text("trainer: {strategy: deepspeed}\n")
    _, text = run(capsys, *args)
    assert "is the run planned here cannot be said: no memory model for strategy 'deepspeed'" in " ".join(
        text.split()
    )
    (trained / "config.yaml").unlink()
    _, text = run(capsys, *args)
    assert "holds no config.yaml, which would say" in text


def test_what_cannot_be_compared_is_said_before_the_plan(trained, config_file, capsys):
    (trained / "journal.jsonl").write_text('{"kind": "start"}\n')
    with pytest.raises(
        ValueError, match=r"has no update yet \(1 lines\), so there is nothing to compare with"
    ):
        recipe.main(["--config", str(config_file), "--against", str(trained), "--out", "none"])
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere/journal\.jsonl"):
        recipe.main(["--config", str(config_file), "--against", "nowhere", "--out", "none"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("accelerator", "ratio"), [("cpu", None), ("gpu", 2.0)])
def test_memory_of_a_process_is_not_compared_with_that_of_tensors(trained, capsys, accelerator, ratio):
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"accelerator": accelerator}}
    (trained / "config.yaml").write_text(yaml.safe_dump(config))
    plan, _ = run(capsys, "--against", trained, "--out", "none")
    gib = 2.0 * plan.peak_memory_bytes / 2**30
    (trained / "journal.jsonl").write_text(json.dumps(UPDATE | {"perf/peak_memory_gib": gib}) + "\n")
    # Planned for a GPU, measured where the run was.
    for args in ((), ("--gpu", "h100")):
        _, text = run(capsys, "--against", trained, "--out", "none", *args)
        (line,) = (line for line in text.splitlines() if "peak memory " in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells[3] == ("" if ratio is None else f"{ratio:.3g}")
        assert ("planned tensors" in line) == (ratio is None)
