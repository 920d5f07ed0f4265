"""Prove a checkpoint: `python -m recipes.verify_restart --run runs/quickstart`.

Restores the checkpoint in a fresh process, makes the next updates and compares them with the trace that the run recorded
after it saved: data position, samples, RNG, weights, optimizer state, schedule, loss, gradient. Prints one line for each,
writes the verdict into the checkpoint's manifest, and exits with

    0  it holds
    1  it does not; the report names the first thing that differs
    2  it cannot be judged; the report says why

--against uninterrupted needs no trace: the updates are made twice from the checkpoint, and again from a second checkpoint
saved on the way. Another layout (--devices, --strategy) is held to what it can promise: same samples and weights, losses
within a tolerance. Nothing is written into the run but the verdict.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import yaml
from jsonargparse import auto_cli

from callbacks import restart_equivalence as equivalence
from callbacks.checkpoint_retention import CheckpointRetention, write_json
from callbacks.restart_equivalence import COMPONENTS, RestartEquivalence
from lit_gpt_loop.cli import PretrainCLI
from recipes.help import Help
from recipes.pretrain import find_checkpoint, newest_config, resolve, run_command

HOLDS, FAILED, UNKNOWN = 0, 1, 2


class Stop(pl.Callback):
    """Ends a replay after so many updates, without Lightning's last validation; may save on the way."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Leave before the first batch that is not wanted."""
        if trainer.global_step >= self.spec["stop"]:
            raise SystemExit(0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the second checkpoint, at an update boundary."""
        if self.spec.get("save_to") and trainer.global_step == self.spec["save_at"]:
            save_to, self.spec["save_to"] = self.spec["save_to"], None
            trainer.save_checkpoint(save_to)


class ReplayCLI(PretrainCLI):
    """The run's own command, which saves nothing, logs nothing and stops early."""

    spec: ClassVar[dict[str, Any]] = {}
    checkers: ClassVar[list[RestartEquivalence]] = []  # of the class: SystemExit leaves no instance behind

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the run's Trainer; have RestartEquivalence judge, and leave the run's folders alone."""
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, CheckpointRetention):  # stays, as it restores the RNG
                callback.every_n_steps, callback.every_n_minutes = 2**62, None
                callback.save_on_exit, callback.copy_to = False, None
                callback.dirpath = Path(self.spec["folder"]) / "checkpoints"
                callback.policy = replace(callback.policy, monitor=None, keep_best=0, archive=None)
        found = [c for c in callbacks if isinstance(c, RestartEquivalence)]
        checker = found[0] if found else RestartEquivalence()
        if not found:
            callbacks.insert(0, checker)
        checker.on_mismatch, checker.promise = "mark", "exact"
        checker.updates = self.spec["updates"]
        checker.by, checker.marks_other_runs = "recipes.verify_restart", True
        if self.spec.get("trace_file"):
            checker.trace_file = Path(self.spec["trace_file"])
        self.checkers.append(checker)
        callbacks.append(Stop(self.spec))
        return trainer

    def after_fit(self) -> None:
        """Nothing: the run's own ending is not wanted."""


def replay(spec_file: Path) -> None:
    """Make the updates of a specification written by `main`, in this process (and, under DDP, in those it starts)."""
    spec = json.loads(spec_file.read_text())
    args = ["fit", "--config", spec["config"], "--trainer.default_root_dir", spec["folder"]]
    args += [
        "--trainer.logger",
        "false",
        "--trainer.enable_progress_bar",
        "false",
        "--ckpt_path",
        spec["checkpoint"],
    ]
    for name in ("devices", "strategy", "max_steps"):
        if spec.get(name) is not None:
            args += [f"--trainer.{name}", str(spec[name])]
    ReplayCLI.spec = spec
    try:
        ReplayCLI(resolve, args=args)
    except SystemExit as e:
        if e.code:
            raise
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        Path(spec["report"]).write_text(json.dumps(ReplayCLI.checkers[-1].report))


class CannotJudgeError(RuntimeError):
    """A replay did not come to a verdict; the message says why."""


def run_replay(name: str, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one replay in a fresh process and return what RestartEquivalence reported.

    Raises:
        CannotJudgeError: the process failed, or made no update.
    """
    own = folder / name
    own.mkdir()
    spec = spec | {"folder": str(own / "run"), "report": str(own / "report.json")}
    (own / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "recipes.verify_restart", "--replay", str(own / "spec.json")]
    with open(own / "log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    report = json.loads((own / "report.json").read_text()) if (own / "report.json").is_file() else None
    if code or report is None:
        tail = "\n".join((own / "log").read_text().splitlines()[-15:])
        ended = f"ended with exit code {code}" if code else "made no update"
        raise CannotJudgeError(f"the {name} replay {ended}; its last lines:\n{tail}")
    return report


def against_trace(base: dict[str, Any], num_updates: int, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Compare with what the run recorded after it saved."""
    checkpoint = Path(base["checkpoint"])
    file = equivalence.trace_file_of(checkpoint)
    trace = json.loads(file.read_text()) if file.is_file() else {}
    if not trace.get("updates"):
        raise CannotJudgeError(
            f"{file} records no update after this save (the run ended or died there, or ran without RestartEquivalence). "
            f"--against uninterrupted needs no trace.{_with_traces(checkpoint)}"
        )
    num = min(num_updates, len(trace["updates"]))
    spec = base | {"updates": num, "stop": trace["step"] + num}
    who = "an earlier resume from it" if trace.get("origin") == "resume" else "the run that saved it"
    return [(f"the {num} updates recorded by {who}", run_replay("first", spec, folder))]


def _with_traces(checkpoint: Path) -> str:
    manifest = equivalence.manifest_of(checkpoint)
    found = sorted(manifest.parent.parent.glob("step-*/trace.json")) if manifest else []
    return f" Checkpoints with one: {', '.join(f.parent.name for f in found)}." if found else ""


def against_uninterrupted(
    base: dict[str, Any], num_updates: int, folder: Path
) -> list[tuple[str, dict[str, Any]]]:
    """Make the updates twice from the checkpoint, and again from a second checkpoint saved on the way."""
    step, n = base["step"], num_updates
    end = yaml.safe_load(Path(base["config"]).read_text())["trainer"].get("max_steps") or -1
    if 0 < end < step + 2 * n:  # the checkpoint is (near) the run's last: go on for as long as it takes
        base = base | {"max_steps": step + 2 * n}
    trace, second = str(folder / "trace.json"), str(folder / "second.ckpt")
    spec = base | {"updates": 2 * n, "trace_file": trace, "stop": step + 2 * n}
    run_replay("first", spec | {"save_at": step + n, "save_to": second}, folder)
    if not Path(trace).is_file():
        raise CannotJudgeError(
            "the first replay made no update: the run ends at this checkpoint (trainer.max_steps)"
        )
    again = run_replay("second", spec, folder)
    later = {"checkpoint": second, "trace_file": None, "updates": n, "step": step + n}
    resumed = run_replay("third", spec | later, folder)
    return [
        (f"{2 * n} updates, made twice from the checkpoint", again),
        (f"{n} updates after a second save and restore, at update {step + n}", resumed),
    ]


def table(against: str, report: dict[str, Any]) -> str:
    """Return the report as text: what was compared with what, one line per component, the first difference."""
    lines = [f"against   {against}", f"promise   {report.get('promise')} ({report.get('why')})", ""]
    components = report.get("components", {})
    first = {d["component"]: d for d in reversed(report.get("differences", []))}
    for name in COMPONENTS:
        state = components.get(name, "not compared")
        d = first.get(name)
        at = "" if d is None else f"  {d['name']}: {d['recorded']} -> {d['found']}"
        lines.append(f"  {name:<20} {state}{at}")
    lines += ["", f"verdict   {report['verdict']}, {report['updates_compared']} updates compared"]
    if report.get("differences"):
        lines += ["", report["differences"][0]["text"]]
    return "\n".join(lines)


def exit_code(reports: list[dict[str, Any]]) -> int:
    """Return 0 if every report holds, 1 if one failed, 2 if one came to no verdict."""
    verdicts = [r["verdict"] for r in reports]
    if "failed" in verdicts:
        return FAILED
    return HOLDS if reports and all(v in equivalence.PROMISES for v in verdicts) else UNKNOWN


def verify(
    run: Path,
    checkpoint: str = "latest",
    updates: int = 3,
    devices: int | None = None,
    strategy: str | None = None,
    against: str = "trace",
) -> int:
    """Restore a checkpoint in a fresh process, make the next updates and compare them with those the run made.

    Exit codes: 0 it holds, 1 it does not (the report names the first difference), 2 it cannot be judged (and why).

    Args:
        run: the run's directory.
        checkpoint: latest, best, archive:STEP, a step directory or a path.
        updates: how many updates to compare.
        devices: another number of devices than the run's.
        strategy: another strategy: one_device, ddp, fsdp or fsdp2.
        against: trace (what the run recorded), or uninterrupted: the updates are made twice, and again after a second save.

    Returns:
        0 holds, 1 mismatch, 2 cannot be judged.
    """
    if updates < 1 or against not in ("trace", "uninterrupted"):
        raise ValueError(
            f"--updates {updates} has to be 1 or more, --against {against!r} trace or uninterrupted"
        )
    try:
        found, config = find_checkpoint(checkpoint, run).absolute(), newest_config(run).absolute()
    except (FileNotFoundError, ValueError) as e:
        print(f"cannot be judged: {e}")
        return UNKNOWN
    manifest_file = equivalence.manifest_of(found)
    print(f"checkpoint {found}")
    base: dict[str, Any] = {"config": str(config), "checkpoint": str(found)}
    base |= {"devices": devices, "strategy": strategy}
    with tempfile.TemporaryDirectory(prefix="verify-restart-") as folder:
        try:
            if against == "trace":
                results = against_trace(base, updates, Path(folder))
            else:
                if manifest_file is None:
                    raise CannotJudgeError(f"{found} has no manifest.json beside it, which says its update")
                base["step"] = json.loads(manifest_file.read_text())["step"]
                results = against_uninterrupted(base, updates, Path(folder))
        except CannotJudgeError as e:
            print(f"\ncannot be judged: {e}")
            return UNKNOWN
    for what, report in results:
        print("\n" + table(what, report))
    code = exit_code([report for _, report in results])
    failed = [report for _, report in results if report["verdict"] == "failed"]
    if failed and manifest_file is not None:  # a later replay may have failed after an earlier one held
        manifest = json.loads(manifest_file.read_text())
        text = failed[0]["differences"][0]["text"]
        manifest["verified"] = (manifest.get("verified") or {}) | {
            "promise": "failed",
            "first_difference": text,
        }
        write_json(manifest_file, manifest)
    if manifest_file is not None:
        print(f"\nwritten   {manifest_file}: verified")
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replay"]:  # our own fresh process, or a rank that it started
        replay(Path(sys.argv[2]))
    else:
        run_command(
            lambda: sys.exit(
                auto_cli(
                    verify,
                    as_positional=False,
                    prog="python -m recipes.verify_restart",
                    description=__doc__,
                    formatter_class=Help,
                )
            )
        )
