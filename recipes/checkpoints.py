"""Look at, check and thin out the checkpoints of a run: `python -m recipes.checkpoints {ls,verify,prune} --run NAME`.

ls       a table: step, roles, metric, size, verified or not
verify   read every file again and compare hashes; ends with code 1 if one is damaged
prune    delete what the run's own policy would delete, or a stricter one (--keep_latest 1); --dry_run only says what

examples:
  python -m recipes.checkpoints ls --run quickstart
  python -m recipes.checkpoints verify --run runs/quickstart
  python -m recipes.checkpoints prune --run quickstart --keep_latest 1 --dry_run true
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich import box
from rich.console import Console
from rich.table import Table

from callbacks.checkpoint_retention import (
    CheckpointRetention,
    Policy,
    Saved,
    decide,
    find_damage,
    list_saved,
    read_manifest,
    remove,
    write_json,
)
from recipes.help import Help


def checkpoint_dir(run: str, runs_dir: str) -> Path:
    """Return where a run's checkpoints are, given its name or directory.

    Raises:
        FileNotFoundError: there are none.
    """
    candidates = [Path(run), Path(run) / "checkpoints", Path(runs_dir) / run / "checkpoints"]
    for folder in candidates:
        if folder.is_dir() and any(folder.glob("step-*")):
            return folder
    tried = ", ".join(str(c) for c in candidates)
    raise FileNotFoundError(f"No checkpoints of run {run!r}: looked in {tried}.")


def policy_of(folder: Path, saved: list[Saved]) -> Policy:
    """Return the policy that the run had when it last saved."""
    kept = (read_manifest(folder / saved[-1].name) or {}).get("policy") or {}
    archive = kept.get("archive")
    return Policy(**{**kept, "archive": tuple(archive) if isinstance(archive, list) else archive})


def by_run(folder: Path) -> dict[str, list[Saved]]:
    """Return the checkpoints of a folder by the run that saved them; the run that saved last comes last."""
    runs: dict[str, list[Saved]] = {}
    for saved in list_saved(folder):
        runs.setdefault(saved.run, []).append(saved)

    def created(run: str) -> str:
        return str((read_manifest(folder / runs[run][-1].name) or {}).get("created", ""))

    return {run: runs[run] for run in sorted(runs, key=created)}


def restart_column(manifest: dict[str, Any]) -> str:
    """Return how far a restart from this checkpoint has been proved."""
    verified = manifest.get("verified")
    if not verified:
        return "not tried"
    return "FAILED" if verified.get("promise") == "failed" else str(verified.get("promise"))


def ls(folder: Path, check_hashes: bool = False) -> tuple[Table, list[str]]:
    """Return (the table, what is damaged)."""
    saved = list_saved(folder)
    metrics = {((read_manifest(folder / s.name) or {}).get("metric") or {}).get("name") for s in saved} - {
        None
    }
    table = Table(title=str(folder), box=box.SIMPLE_HEAD)
    metric = str(next(iter(metrics))) if len(metrics) == 1 else "metric"
    for name in ("step", "roles", metric, "size", "saved", "files", "restart"):
        table.add_column(name, justify="right" if name in ("step", metric, "size") else "left", no_wrap=True)
    damaged: list[str] = []
    for saved_of_run in by_run(folder).values():
        roles, _ = decide(saved_of_run, policy_of(folder, saved_of_run))
        for s in sorted(saved_of_run, key=lambda s: s.step):
            manifest = read_manifest(folder / s.name) or {}
            problem = find_damage(folder / s.name, hashes=check_hashes)
            damaged += [problem] if problem else []
            whole = "hashes ok" if check_hashes else "sizes ok"
            table.add_row(
                str(s.step),
                ", ".join(role for role, kept in roles.items() if s in kept) or "-",
                "-" if s.metric is None else f"{s.metric:.5g}",
                _size(s.num_bytes),
                str(manifest.get("created", ""))[5:16].replace("T", " "),
                "[red]DAMAGED[/red]" if problem else whole,
                restart_column(manifest),
            )
    known = {s.name for s in list_saved(folder)}
    for path in sorted(folder.glob("step-*")):
        if path.name not in known:
            damaged.append(f"{path / 'manifest.json'} is missing or cannot be read")
            table.add_row(
                path.name.removeprefix("step-").lstrip("0"), "-", "-", "-", "-", "[red]DAMAGED[/red]", "-"
            )
    return table, damaged


def _size(num_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes:.2f} GiB"


def prune(
    folder: Path, keep_latest: int | None = None, keep_best: int | None = None, dry_run: bool = False
) -> list[Path]:
    """Delete what the policy of the run that saved last does not keep; other runs' checkpoints stay.

    Args:
        folder: the step directories.
        keep_latest: instead of the run's own number.
        keep_best: instead of the run's own number.
        dry_run: delete nothing.

    Returns:
        What was (or would be) deleted.
    """
    saved = list(by_run(folder).values())[-1]
    policy = policy_of(folder, saved)
    if keep_latest is not None:
        if keep_latest < 1:
            raise ValueError(f"--keep_latest {keep_latest}: at least 1, or the run could not continue.")
        policy = replace(policy, keep_latest=keep_latest)
    if keep_best is not None:
        policy = replace(policy, keep_best=keep_best)
    # Never the only one that is whole: what is damaged does not count towards what is kept.
    whole = [s for s in saved if find_damage(folder / s.name, hashes=False) is None]
    roles, unwanted = decide(whole, policy)
    if not dry_run and whole:
        write_json(folder / "index.json", {role: [s.step for s in kept] for role, kept in roles.items()})
        for s in unwanted:
            remove(folder / s.name)
    return [folder / s.name for s in unwanted]


def main(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = ArgumentParser(prog="python -m recipes.checkpoints", description=__doc__, formatter_class=Help)
    commands = parser.add_subcommands(required=True)
    for name, text in (
        ("ls", "show a table"),
        ("verify", "compare hashes"),
        ("prune", "delete what no role keeps"),
    ):
        sub = ArgumentParser(description=text)
        sub.add_argument("--run", type=str, required=True, help="Name of the run, or its directory.")
        sub.add_argument("--runs_dir", type=str, default="runs", help="Where run directories stand.")
        if name == "prune":
            sub.add_argument(
                "--keep_latest", type=int | None, default=None, help="Instead of the run's own number."
            )
            sub.add_argument(
                "--keep_best", type=int | None, default=None, help="Instead of the run's own number."
            )
            sub.add_argument(
                "--dry_run", type=bool, default=False, help="Say what would be deleted, delete nothing."
            )
        commands.add_subcommand(name, sub)
    options = parser.parse_args(args)
    chosen = options[options.subcommand]
    console = Console(width=max(Console().width, 100), highlight=False)  # no cut columns in logs and pipes
    folder = checkpoint_dir(chosen.run, chosen.runs_dir)
    if options.subcommand == "prune":
        gone = prune(folder, chosen.keep_latest, chosen.keep_best, chosen.dry_run)
        for path in gone:
            console.print(f"{'would delete' if chosen.dry_run else 'deleted'} {path}", soft_wrap=True)
        if not gone:
            console.print("nothing to delete")
        return 0
    table, damaged = ls(folder, check_hashes=options.subcommand == "verify")
    console.print(table)
    for problem in damaged:
        console.print(f"damaged: {problem}", soft_wrap=True, markup=False)
    if damaged:
        console.print(f"latest that is whole: {_latest(folder)}", soft_wrap=True, markup=False)
    return 1 if damaged and options.subcommand == "verify" else 0


def _latest(folder: Path) -> str:
    try:
        return str(CheckpointRetention.resolve(folder, "latest"))
    except RuntimeError as e:
        return f"none: {e}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FileNotFoundError, ValueError) as e:
        sys.exit(f"error: {e}")
