"""How long a run takes to begin, for `python -m recipes.bench startup`: from the command to the first update's line in the journal."""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_TRUNK_STEPS = 4


def seconds_to_first_update(command: list[str], folder: Path, journal: Path, after: int = 0) -> float:
    """Start a command, wait for its first update, and end it.

    Args:
        command: of a training.
        folder: where it is run.
        journal: where its updates are written.
        after: the update that it continues from.

    Returns:
        Seconds.

    Raises:
        RuntimeError: it ended before an update.
    """
    started = time.perf_counter()
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            while not _has_update(journal, after):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(
                        f"{' '.join(command)} ended with {process.returncode} before its first update:\n{log.read()[-2000:]}"
                    )
                time.sleep(0.01)
            return time.perf_counter() - started
        finally:
            process.kill()
            process.wait()


def _has_update(journal: Path, after: int) -> bool:
    if not journal.is_file():
        return False
    lines = journal.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return any(row["kind"] == "update" and row["step"] > after for row in rows)


def startup(config: Path, repeats: int) -> dict[str, list[float]]:
    """Start, resume and branch in turns.

    Args:
        config: a configuration of recipes.pretrain.
        repeats: turns.

    Returns:
        Seconds of each turn: "first" (once; it prepares the store), "start", "resume" and "branch".
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs = folder / "runs"

        def fit(name: str, steps: int) -> list[str]:
            schedule = json.dumps({"kind": "wsd", "warmup_steps": 2, "decay_steps": 0})
            return [
                *(sys.executable, "-m", "recipes.pretrain", "fit", "--config", str(config.resolve())),
                *("--run", name, "--trainer.max_steps", str(steps), "--model.schedule", schedule),
            ]

        first = seconds_to_first_update(fit("first", 10**5), folder, runs / "first" / "journal.jsonl")
        subprocess.run(fit("trunk", _TRUNK_STEPS), cwd=folder, check=True, capture_output=True)
        seconds: dict[str, list[float]] = {"first": [first], "start": [], "resume": [], "branch": []}
        for n in range(repeats):
            shutil.copytree(runs / "trunk", runs / f"resume{n}")
            cut = [
                *(sys.executable, "-m", "recipes.cooldown", "--run", "runs/trunk"),
                *("--decay_steps", "100", "--name", f"branch{n}"),
            ]
            for kind, command, after in (
                ("start", fit(f"start{n}", 10**5), 0),
                ("resume", fit(f"resume{n}", 10**5), _TRUNK_STEPS),
                ("branch", cut, _TRUNK_STEPS),
            ):
                journal = runs / f"{kind}{n}" / "journal.jsonl"
                seconds[kind].append(seconds_to_first_update(command, folder, journal, after))
    return seconds


def report(seconds: dict[str, list[float]]) -> str:
    """Return the result as text: medians, and the median over turns of branch / resume."""
    lines = [f"first start, which prepares the store: {seconds['first'][0]:.1f} s"]
    for kind, label in (
        ("start", "start"),
        ("resume", "resume"),
        ("branch", "first update of a branch"),
    ):
        values = seconds[kind]
        lines.append(f"{label}: median {statistics.median(values):.1f} s of {[round(s, 1) for s in values]}")
    ratio = statistics.median(b / r for b, r in zip(seconds["branch"], seconds["resume"], strict=True))
    return "\n".join([*lines, f"branch / resume: {ratio:.2f} (wanted: at most 1.2)"])
