"""What a user can do after a fit (layer P, standard library only)."""

import sys
from pathlib import Path

from lit_gpt_loop.branch import Branch
from lit_gpt_loop.schedules import Schedule


def after_the_end(schedule: Schedule, branch: Branch | None, run_dir: Path) -> str:
    """Say how training can go on after a run that was complete before it began."""
    if branch is not None:
        again = branch.command(run_dir.parent, f"archive:{branch.parent_step}", "N")
        return f"A branch ends where its decay does: cut another one ({again})."
    if schedule.decay_start is None:
        return (
            "Raise trainer.max_steps or --max_tokens to go on, or cut a decay off it: python -m recipes.cooldown --run "
            f"{run_dir} --from latest --decay_steps 0.2"
        )
    if schedule.kind == "cosine":
        return "A cosine ends where it was planned to: start another run with --run NAME."
    return (
        f"Its rate has decayed since update {schedule.decay_start}: to go on, begin another run from a checkpoint before that, "
        "--run NAME --ckpt_path PATH with a larger trainer.max_steps."
    )


def next_commands(
    run_dir: Path, config: Path | None, schedule: Schedule | None, updates: int, budget: str
) -> list[str]:
    """Return the commands that make something of a run, as the user would type them.

    Args:
        run_dir: of the run.
        config: its newest configuration.
        schedule: that it follows.
        updates: that have happened, skipped ones not counted.
        budget: the option that gives its length.
    """
    python = _python()
    commands = [
        f"{python} -m recipes.sample --run {run_dir} --prompt 'Once upon a time'",
        f"{python} -m recipes.evaluate --run {run_dir} --checkpoint best",
    ]
    if (run_dir / "journal.jsonl").is_file():
        commands.append(
            f"{python} -m recipes.plan --config {config} --against {run_dir}   (predicted and measured)"
        )
    if schedule is None:
        return commands
    if schedule.decay_start is None:  # past a decay there is nothing to extend
        commands.append(f"{python} -m recipes.pretrain fit --config {config} {budget} N   (more updates)")
    is_stable = schedule.decay_start is None or updates <= schedule.decay_start
    if schedule.kind != "cosine" and is_stable and updates >= schedule.warmup_steps:
        commands.append(
            f"{python} -m recipes.cooldown --run {run_dir} --from latest --decay_steps 0.2   (decay its rate: a model to use)"
        )
    return commands


def _python() -> str:
    """Return how the user calls this Python: relative where it lies below the working directory."""
    executable = Path(sys.executable)
    return str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else "python"
