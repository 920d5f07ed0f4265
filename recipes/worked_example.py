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
import shlex
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from recipes.help import Help
from recipes.pretrain import run_command
from recipes.worked_example_runs import SHAPES, Job, make_jobs, run_jobs

# Quantiles of Student's t for a two-sided 95% interval, by degrees of freedom: any two-sided table.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131
)  # fmt: skip


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
