"""The runs of the worked example: what they are, and running them (see recipes/worked_example.py)."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SHAPES = ("1-sqrt", "linear")
POLL_S = 0.5


@dataclass
class Job:
    """One run of the example.

    Attributes:
        model: "trunk", a shape, or "cosine to RATIO".
        seed: of the weights and of the data order.
        folder: its run directory.
        steps: where it ends.
        first: update before its first one.
        command: what trains it, and continues it.
        needs: the job that has to be complete before it begins.
    """

    model: str
    seed: int
    folder: Path
    steps: int
    first: int
    command: list[str]
    needs: "Job | None" = None
    process: subprocess.Popen[Any] | None = field(default=None, repr=False)
    _rows: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict, repr=False)
    _read_bytes: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        """Model and seed."""
        return f"{self.model}, seed {self.seed}"

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind in its journal, the last of each step; only what was added is read."""
        file = self.folder / "journal.jsonl"
        if file.is_file():
            with open(file, "rb") as f:
                f.seek(self._read_bytes)
                added = f.read()
            whole = added[: added.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            for line in whole.splitlines():
                if line.endswith(b"}"):  # else torn by a kill
                    row = json.loads(line)
                    self._rows.setdefault(row["kind"], {})[row["step"]] = row
        rows = self._rows.get(kind, {})
        return [rows[step] for step in sorted(rows)]

    @property
    def done(self) -> int:
        """Updates made so far."""
        rows = self.rows("update")
        return max(0, rows[-1]["step"] - self.first) if rows else 0

    @property
    def final_loss(self) -> float | None:
        """Validation loss of the final weights, None while there is none."""
        rows = self.rows("validation")
        return float(rows[-1]["val/loss"]) if rows and rows[-1]["step"] >= self.steps else None


def make_jobs(
    config: Path,
    seeds: int,
    cooldown_share: float,
    cosine_final_ratios: tuple[float, ...],
    out: Path,
    lr: float | None = None,
) -> list[Job]:
    """Return all runs, seed by seed, each trunk before what needs it."""
    settings = yaml.safe_load(config.read_text())
    trunk_steps = int(settings["trainer"]["max_steps"])
    decay = round(trunk_steps * cooldown_share / (1.0 - cooldown_share))
    total = trunk_steps + decay
    warmup = settings["model"]["schedule"]["warmup_steps"]
    found = []
    for seed in range(seeds):

        def pretrain(name: str, *args: str, seed: int = seed) -> list[str]:
            return [
                *(sys.executable, "-m", "recipes.pretrain", "fit", "--config", str(config)),
                *(
                    "--runs_dir",
                    str(out),
                    "--run",
                    name,
                    "--seed_everything",
                    str(seed),
                    "--data.seed",
                    str(seed),
                ),
                *("--trainer.enable_progress_bar", "false", "--trainer.logger", _journal(out / name)),
                *(() if lr is None else ("--model.lr", str(lr))),
                *args,
            ]

        trunk = Job("trunk", seed, out / f"trunk-{seed}", trunk_steps, 0, pretrain(f"trunk-{seed}"))
        found.append(trunk)
        for ratio in cosine_final_ratios:
            schedule = json.dumps({"kind": "cosine", "warmup_steps": warmup, "final_ratio": ratio})
            name = f"cosine-to-{ratio:g}-{seed}"
            cosine = pretrain(name, "--trainer.max_steps", str(total), "--model.schedule", schedule)
            found.append(Job(f"cosine to {ratio:g}", seed, out / name, total, 0, cosine))
        for shape in SHAPES:
            command = [
                *(
                    sys.executable,
                    "-m",
                    "recipes.cooldown",
                    "--run",
                    str(trunk.folder),
                    "--from",
                    f"archive:{trunk_steps}",
                ),
                *("--decay_steps", str(decay), "--shape", shape),
            ]
            folder = out / f"trunk-{seed}-cooldown-{trunk_steps}-{shape}"
            found.append(Job(shape, seed, folder, total, trunk_steps, command, trunk))
    return found


def _journal(folder: Path) -> str:
    return json.dumps(
        [{"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": str(folder)}}]
    )


def run_jobs(plan: list[Job], at_once: int, console: Console) -> None:
    """Run what is not complete, `at_once` at a time, with a progress bar over all updates.

    Stopped by SIGTERM or Ctrl-C, it lets the runs save and end first.

    Raises:
        RuntimeError: a run failed; the others are stopped.
    """
    threads = max(1, (os.cpu_count() or 1) // at_once)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    total = sum(job.steps - job.first for job in plan)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the runs, below
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=300.0) as progress:
        bar = progress.add_task("updates", total=total)
        try:
            while any(job.final_loss is None or job.process is not None for job in plan):
                running = [job for job in plan if job.process is not None]
                for job in running:
                    assert job.process is not None
                    code = job.process.poll()
                    if code is None:
                        continue
                    job.process = None
                    if code or job.final_loss is None:
                        raise RuntimeError(f"{job.name} ended with code {code}: see {_log_of(job)}")
                ready = [
                    job
                    for job in plan
                    if job.process is None
                    and job.final_loss is None
                    and (
                        job.needs is None or (job.needs.final_loss is not None and job.needs.process is None)
                    )
                ]
                # The first store is prepared by one run alone.
                limit = at_once if any(job.done for job in plan) else 1
                for job in ready[: max(0, limit - sum(j.process is not None for j in plan))]:
                    job.folder.parent.mkdir(parents=True, exist_ok=True)
                    with open(_log_of(job), "a") as log:
                        job.process = subprocess.Popen(job.command, env=environment, stdout=log, stderr=log)
                names = "; ".join(job.name for job in plan if job.process is not None)
                progress.update(bar, completed=sum(job.done for job in plan), description=names or "updates")
                time.sleep(POLL_S)
            progress.update(bar, completed=total, description="updates")
        finally:
            processes = [job.process for job in plan if job.process is not None]
            for process in processes:
                process.terminate()  # CheckpointRetention saves on SIGTERM
            for process in processes:
                process.wait()
            signal.signal(signal.SIGTERM, before)


def _log_of(job: Job) -> Path:
    return job.folder.parent / f"{job.folder.name}.log"  # with_suffix would cut "-to-0.1-0"
