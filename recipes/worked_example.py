"""One trunk, two cooldowns, and cosine runs of the same tokens: `python -m recipes.worked_example`.

Does a decay cut from a stable trunk end where a cosine run ends? Hagele et al. 2024 (arXiv:2405.18392) find that 20% of
cooldown with the shape 1 - sqrt does. For each seed this trains, from configs/wsd_vs_cosine.yaml and nothing else,

    trunk                        recipes.pretrain, stable rate                        480 updates
    1-sqrt, linear               recipes.cooldown from the trunk's last checkpoint    120 updates each
    cosine to 0.1, cosine to 0   recipes.pretrain, model.schedule.kind: cosine        600 updates each: the same tokens

and compares the validation losses at the end: per model mean and spread over the seeds, and the difference to each cosine
seed by seed (the same initial weights and data order), with its 95% confidence interval. Cosine usually ends at a tenth of
its peak; the cooldowns end at 0, so a cosine that ends there too tells the shape from the end. Writes results.json, table.md
and a plot.

It takes 20 to 35 minutes on two idle cores, two runs at a time. Stopped (Ctrl-C, a kill), the same command continues each run
where it stood. The commands that it runs are printed.
"""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from recipes.help import Help
from recipes.pretrain import run_command

# Quantiles of Student's t for a two-sided 95% interval, by degrees of freedom: any two-sided table.
_T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
SHAPES = ("1-sqrt", "linear")


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


def worked_example(
    config: Path = Path("configs/wsd_vs_cosine.yaml"),
    seeds: int = 3,
    cooldown_share: float = 0.2,
    cosine_final_ratios: tuple[float, ...] = (0.1, 0.0),
    lr: float | None = None,
    out: Path = Path("runs/wsd_vs_cosine"),
    jobs: int = 2,
) -> dict[str, Any]:
    """Train trunk, cooldowns and cosine for each seed, compare, and write the result.

    Args:
        config: of the trunk; its max_steps is where the cooldowns are cut.
        seeds: how many; at least 3 for a spread worth the name.
        cooldown_share: decay / all updates of a branch.
        cosine_final_ratios: last rate / peak of the cosine runs (0.1 is the usual one; the cooldowns end at 0).
        lr: peak rate of all runs instead of the configuration's; name another `out` with it.
        out: folder of all runs, results.json, table.md and wsd_vs_cosine.png.
        jobs: runs at a time; they share the cores.

    Raises:
        RuntimeError: a run failed; the message names its log.
    """
    if not 2 <= seeds <= len(_T95) + 1 or not 0 < cooldown_share < 1 or jobs < 1:
        raise ValueError(
            f"seeds={seeds} must be 2 to {len(_T95) + 1}, cooldown_share={cooldown_share} in (0, 1), jobs={jobs} at least 1"
        )
    plan = make_jobs(config, seeds, cooldown_share, cosine_final_ratios, out, lr)
    console = Console()
    for job in plan[: len(plan) // seeds]:
        console.print(f"[dim]{job.model}: {shlex.join(['python', *job.command[1:]])}[/dim]", highlight=False)
    run_jobs(plan, jobs, console)
    result = compare(plan)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "table.md").write_text(markdown(result))
    console.print(table(result))
    console.print(verdict(result))
    try:
        plot(plan, result, out / "wsd_vs_cosine.png")
        console.print(f"wrote results.json, table.md and wsd_vs_cosine.png to {out}")
    except ModuleNotFoundError:
        console.print(
            f"wrote results.json and table.md to {out}; the plot needs matplotlib: pip install -e '.[report]'"
        )
    return result


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
                time.sleep(0.5)
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


# --------------------------------------------------------------------------------------------------------- the result


def compare(plan: list[Job]) -> dict[str, Any]:
    """Return final losses by model and seed, means and spreads, and differences to each cosine with their 95% intervals."""
    losses: dict[str, list[float]] = {}
    for job in plan:
        loss = job.final_loss
        assert loss is not None
        losses.setdefault(job.model, []).append(loss)
    result: dict[str, Any] = {
        "losses": losses,
        "mean": {model: mean(values) for model, values in losses.items()},
        "spread": {model: stdev(values) for model, values in losses.items()},
        "minus": {},
    }
    for reference in (model for model in losses if model.startswith("cosine")):
        result["minus"][reference] = {
            model: _difference(values, losses[reference])
            for model, values in losses.items()
            if model not in ("trunk", reference)
        }
    return result


def _difference(ours: list[float], reference: list[float]) -> dict[str, Any]:
    by_seed = [a - b for a, b in zip(ours, reference, strict=True)]
    half = _T95[len(by_seed) - 2] * stdev(by_seed) / math.sqrt(len(by_seed))
    return {"by_seed": by_seed, "mean": mean(by_seed), "ci95": half}


def verdict(result: dict[str, Any]) -> str:
    """Say what came out, and no more than the intervals allow."""
    lines = []
    for reference, differences in result["minus"].items():
        for shape in SHAPES:
            d = differences[shape]
            text = f"{shape} - {reference} = {d['mean']:+.4f} ± {d['ci95']:.4f} nats/token (95%, {len(d['by_seed'])} seeds)"
            if abs(d["mean"]) <= d["ci95"]:
                text += ": no difference that these seeds can show"
            else:
                text += ": the cooldown ends " + ("lower" if d["mean"] < 0 else "higher")
            lines.append(text)
    return "\n".join(lines)


def _header(result: dict[str, Any]) -> list[str]:
    minus = [f"minus {reference} (95%)" for reference in result["minus"]]
    return ["model", "validation loss, seed by seed", "mean", "standard deviation", *minus]


def _table_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for model, values in result["losses"].items():
        differences = [of.get(model) for of in result["minus"].values()]
        rows.append(
            [
                model,
                " ".join(f"{v:.4f}" for v in values),
                f"{result['mean'][model]:.4f}",
                f"{result['spread'][model]:.4f}",
                *(f"{d['mean']:+.4f} ± {d['ci95']:.4f}" if d else "" for d in differences),
            ]
        )
    return rows


def table(result: dict[str, Any]) -> Table:
    """Return the result for a terminal."""
    found = Table(title="validation loss at the end, nats/token", title_justify="left")
    for name in _header(result):
        found.add_column(name)
    for row in _table_rows(result):
        found.add_row(*row)
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the result for the README."""
    header = _header(result)
    lines = [header, ["---"] * len(header), *_table_rows(result)]
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in lines)
        + "\n\n"
        + verdict(result).replace("\n", "  \n")
        + "\n"
    )


def plot(plan: list[Job], result: dict[str, Any], path: Path) -> None:
    """Write the validation curves of all seeds and their means.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colors = {"trunk": "0.5", "1-sqrt": "tab:orange", "linear": "tab:green"}
    cosines = dict(zip(result["minus"], ("tab:blue", "tab:cyan", "tab:purple"), strict=False))
    for model, color in (colors | cosines).items():
        curves = []
        for job in plan:
            if job.model == model:
                rows = job.rows("validation")
                if job.needs is not None:  # begin where the trunk was cut
                    rows = [r for r in job.needs.rows("validation") if r["step"] == job.first] + rows
                curves.append({r["step"]: float(r["val/loss"]) for r in rows})
        steps = sorted(set.intersection(*(set(c) for c in curves)))
        for curve in curves:
            axes.plot(steps, [curve[s] for s in steps], color=color, alpha=0.25, linewidth=0.8)
        label = f"{model}: {result['mean'][model]:.4f} ± {result['spread'][model]:.4f}"
        axes.plot(steps, [mean(c[s] for c in curves) for s in steps], color=color, label=label)
        axes.plot(steps[-1], mean(c[steps[-1]] for c in curves), "o", color=color, markersize=4)
    low = min(result["mean"].values())
    axes.set(xlabel="update", ylabel="validation loss, nats/token", ylim=(low - 0.05, low + 1.2))
    axes.legend(title="final mean and standard deviation", fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))


def main(args: list[str] | None = None) -> dict[str, Any]:
    """Run the command line (the process's own arguments by default)."""
    parser = ArgumentParser(
        prog="python -m recipes.worked_example", description=__doc__, formatter_class=Help
    )
    parser.add_function_arguments(worked_example, as_group=False)
    return worked_example(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    run_command(main)
