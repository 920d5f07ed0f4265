import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from recipes.worked_example import compare, markdown, plot, verdict
from recipes.worked_example_runs import Job, make_jobs, run_jobs

ROOT = Path(__file__).parents[2]
# Stands for a training command: appends a journal and ends, like a run that is continued by the same command.
TRAIN = """
import json, sys, pathlib
folder, first, steps, loss, stop = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:])
folder.mkdir(parents=True, exist_ok=True)
file = folder / "journal.jsonl"
rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
begin = int(max([r["step"] for r in rows], default=first))
with open(file, "a") as f:
    for step in range(begin + 1, int(steps) + 1):
        f.write(json.dumps({"kind": "update", "step": step}) + "\\n")
        if stop and step == int(stop) and begin < step - 1:
            sys.exit(3)
    f.write(json.dumps({"kind": "validation", "step": int(steps), "val/loss": loss}) + "\\n")
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("recipes.worked_example_runs.POLL_S", 0.01)


def job(folder, model, seed, loss, first=0, steps=4, needs=None, stop=0):
    command = [
        sys.executable,
        "-c",
        TRAIN,
        str(folder / f"{model}-{seed}"),
        str(first),
        str(steps),
        str(loss),
        str(stop),
    ]
    return Job(model, seed, folder / f"{model}-{seed}", steps, first, command, needs)


def plan_of(folder, **stop):
    losses = {
        "trunk": [3.0, 3.1, 3.2],
        "cosine to 0.1": [2.0, 2.1, 2.2],
        "1-sqrt": [1.9, 2.0, 2.1],
        "linear": [2.0, 2.2, 2.1],
    }
    jobs = []
    for seed in range(3):
        trunk = job(folder, "trunk", seed, losses["trunk"][seed], stop=stop.get("trunk", 0))
        jobs += [trunk, job(folder, "cosine to 0.1", seed, losses["cosine to 0.1"][seed], steps=6)]
        jobs += [job(folder, s, seed, losses[s][seed], 4, 6, trunk) for s in ("1-sqrt", "linear")]
    return jobs


def test_all_runs_are_made_and_compared(tmp_path):
    plan = plan_of(tmp_path)
    run_jobs(plan, 2, Console(quiet=True))
    assert sum(j.done for j in plan) == 3 * (4 + 6 + 2 + 2)
    result = compare(plan)
    assert result["mean"]["cosine to 0.1"] == pytest.approx(2.1)
    assert result["spread"]["cosine to 0.1"] == pytest.approx(0.1)
    # Differences -0.1 three times; and 0, 0.1, -0.1: mean 0, deviation 0.1, 4.303 * 0.1 / sqrt(3).
    assert result["minus"]["cosine to 0.1"]["1-sqrt"]["mean"] == pytest.approx(-0.1)
    assert result["minus"]["cosine to 0.1"]["1-sqrt"]["ci95"] == pytest.approx(0.0, abs=1e-12)
    assert result["minus"]["cosine to 0.1"]["linear"]["ci95"] == pytest.approx(4.303 * 0.1 / 3**0.5)
    text = verdict(result)
    assert "1-sqrt - cosine to 0.1 = -0.1000" in text and "the cooldown ends lower" in text
    assert "no difference that these seeds can show" in text
    assert "| 1-sqrt | 1.9000 2.0000 2.1000 | 2.0000 | 0.1000 | -0.1000 ± 0.0000 |" in markdown(result)
    plot(plan, result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_names_its_log_and_the_same_command_goes_on(tmp_path):
    with pytest.raises(RuntimeError, match=r"trunk, seed 0 ended with code 3: see .*trunk-0.log"):
        run_jobs(plan_of(tmp_path, trunk=2), 1, Console(quiet=True))
    again = plan_of(tmp_path)
    assert again[0].done == 2
    run_jobs(again, 2, Console(quiet=True))
    assert [r["step"] for r in again[0].rows("update")] == [1, 2, 3, 4]
    for j in again:
        j.command = [sys.executable, "-c", "raise SystemExit(1)"]
    run_jobs(again, 2, Console(quiet=True))  # complete: nothing runs


def test_a_journal_is_read_as_it_grows(tmp_path):
    one = job(tmp_path, "trunk", 0, 3.0)
    assert one.done == 0 and one.final_loss is None
    one.folder.mkdir()
    with open(one.folder / "journal.jsonl", "w") as f:
        f.write(
            '{"kind": "update", "step": 1}\n{"kind": "upd\n{"kind": "update", "step": 2}\n{"kind": "update", "st'
        )
        f.flush()
        assert one.done == 2
        f.write('ep": 3}\n{"kind": "validation", "step": 4, "val/loss": 2.5}\n')
    assert one.done == 3 and one.final_loss == 2.5


def test_a_stopped_example_leaves_no_run_behind(tmp_path):
    ran = """
import pathlib, sys, threading, os, signal, time
from rich.console import Console
from recipes.worked_example_runs import Job, run_jobs
folder = pathlib.Path(sys.argv[1])
code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
def stop():
    while not pathlib.Path("pid").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop, daemon=True).start()
run_jobs([Job("trunk", 0, folder / "trunk-0", 4, 0, [sys.executable, "-c", code])], 1, Console(quiet=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", ran, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_the_commands_of_the_real_example():
    config = ROOT / "configs" / "wsd_vs_cosine.yaml"
    plan = make_jobs(config, 3, 0.2, (0.1, 0.0), Path("runs/x"))
    settings = yaml.safe_load(config.read_text())
    assert len(plan) == 15
    assert sum(j.steps - j.first for j in plan) == 3 * (480 + 120 + 120 + 600 + 600)
    by_model = {j.model: j for j in plan if j.seed == 2}
    assert by_model["1-sqrt"].needs is by_model["trunk"]
    assert by_model["1-sqrt"].folder == Path("runs/x/trunk-2-cooldown-480-1-sqrt")
    assert by_model["1-sqrt"].command[-6:] == [
        "--from",
        "archive:480",
        "--decay_steps",
        "120",
        "--shape",
        "1-sqrt",
    ]
    cosine = by_model["cosine to 0.1"].command
    assert by_model["cosine to 0"].command != cosine
    assert json.loads(cosine[cosine.index("--model.schedule") + 1]) == {
        "kind": "cosine",
        "warmup_steps": settings["model"]["schedule"]["warmup_steps"],
        "final_ratio": 0.1,
    }
    assert cosine[cosine.index("--trainer.max_steps") + 1] == "600"
    assert cosine[cosine.index("--data.seed") + 1] == "2" == cosine[cosine.index("--seed_everything") + 1]
    assert all("--model.lr" not in j.command for j in plan)
    other = make_jobs(config, 3, 0.2, (0.1,), Path("runs/y"), 6e-3)
    trained = [j.command for j in other if j.needs is None]  # branches have their trunk's rate
    assert all(c[c.index("--model.lr") + 1] == "0.006" for c in trained)
    # Every model is validated at its last update.
    assert all(j.steps % settings["trainer"]["val_check_interval"] == 0 for j in plan)
