"""Loggers of a run (step 9 of 10: Trainer + callbacks -> *journal, W&B* -> report).

`JournalLogger` writes `journal.jsonl`: one JSON object per line, one line per update, per validation and per save,
flushed at once, so that it can be read after a kill. `RunWandbLogger` sends the same lines to Weights & Biases.

Callbacks and the module log independently of each other; both loggers put everything of one step and kind together:

    {"kind": "update", "step": 7, "time": 1764412345.1, "train/loss": 5.21, "optim/lr": 0.0003, "progress/tokens": 57344, ...}
    {"kind": "validation", "step": 8, "time": ..., "val/loss": 5.02, "progress/update": 8, ...}
    {"kind": "save", "step": 8, "time": ..., "ckpt/step": 8, "ckpt/bytes": 1203456, ...}

Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity", which Python's `float` reads back. A run that
crashed at update 212 and resumed from 200 has two lines for 201 .. 212; `read_journal` lets the later one win.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

X_AXIS = "progress/tokens"


def kind_of(metrics: Mapping[str, Any]) -> str:
    """Return the kind of line that these metrics belong to: "validation", "test", "save" or "update"."""
    for key in metrics:
        prefix = key.partition("/")[0]
        if prefix in ("val", "test", "ckpt"):
            return {"val": "validation", "test": "test", "ckpt": "save"}[prefix]
    return "update"


class _Rows:
    """Merges what is logged in pieces into one row per (kind, step), and fills in the last known progress."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int], dict[str, Any]] = {}
        self._progress: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Any], step: int | None) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Take metrics in; yield the rows before, if these begin a new step of their kind."""
        metrics = {
            k: v for k, v in metrics.items() if k != "epoch"
        }  # Lightning's; always 0 in an endless stream
        if not metrics:
            return
        kind = kind_of(metrics)
        # Lightning numbers the points of a validation by its own loop state; the module's own count is exact.
        at = (
            int(metrics.get("progress/update", step or 0))
            if kind in ("validation", "test")
            else int(step or 0)
        )
        if any(k == kind and s != at for k, s in self._pending):
            # Not the row of another kind that this step is still filling: a save is logged before the update it follows.
            yield from self._take(lambda k, s: k == kind or s < at)
        self._pending.setdefault((kind, at), {}).update(metrics)

    def flush(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield the rows that are waiting."""
        yield from self._take(lambda kind, step: True)

    def _take(self, is_done: Callable[[str, int], bool]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        done = [key for key in self._pending if is_done(*key)]
        for kind, step in done:
            row = self._pending.pop((kind, step))
            self._progress.update({k: v for k, v in row.items() if k.startswith("progress/")})
            yield kind, step, {**self._progress, **row}


class JournalLogger(Logger):
    """Writes `journal.jsonl` in a run's directory.

    Args:
        save_dir: the run's directory, made if it is not there.

    Raises:
        OSError: the file cannot be opened for appending (at the first line).
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self._dir = Path(save_dir)
        self._rows = _Rows()
        self._file: TextIO | None = None

    @property
    def name(self) -> str:
        """Name of the run: the last part of its directory."""
        return self._dir.name

    @property
    def version(self) -> str:
        """Empty: a run has one journal."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's directory."""
        return str(self._dir)

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self._dir / "journal.jsonl"

    @property
    @rank_zero_experiment
    def experiment(self) -> TextIO:
        """The open file (rank 0; elsewhere Lightning's stand-in that does nothing)."""
        if self._file is None:
            self._dir.mkdir(parents=True, exist_ok=True)
            _end_torn_line(self.path)
            self._file = open(self.path, "a", encoding="utf-8")
        return self._file

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` beside the journal holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take metrics of one step in; they are written with everything else of that step."""
        for row in self._rows.add(metrics, step):
            self._write(*row)

    @rank_zero_only
    def log_text(self, key: str, columns: list[str], data: list[list[str]], step: int | None = None) -> None:
        """Write a line of kind "text" with rows of strings, such as samples."""
        self._write("text", int(step or 0), {key: [dict(zip(columns, row, strict=True)) for row in data]})

    @rank_zero_only
    def save(self) -> None:
        """Write the line that is waiting (Lightning calls this at the end of each update)."""
        for row in self._rows.flush():
            self._write(*row)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is waiting and close the file; a later line opens it again."""
        self.save()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, step: int, row: dict[str, Any]) -> None:
        line = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        self.experiment.write(json.dumps(line | {k: _plain(v) for k, v in row.items()}) + "\n")
        self.experiment.flush()


class RunWandbLogger(WandbLogger):
    """A WandbLogger with one row per update, exact metric names over `progress/tokens`, and one W&B run per run directory.

    Args:
        save_dir: the run's directory; W&B's files go to `wandb/` in it, the W&B run's id to `wandb/run_id`, so that the
            same command run again continues the same W&B run.
        offline: None goes online if a key is at hand (WANDB_API_KEY or a login) or WANDB_MODE asks for it, else offline;
            `wandb sync` uploads an offline run later.
        project: W&B project.
        **kwargs: further arguments of `WandbLogger` and `wandb.init`, such as `group` or `tags`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        offline: bool | None = None,
        project: str = "lit-gpt-loop",
        **kwargs: Any,
    ) -> None:
        self._run_dir = Path(save_dir)
        if offline is None:
            offline = not _wants_online()
        kwargs.setdefault("name", self._run_dir.name)
        self._has_users_group = bool(kwargs.get("group") or os.environ.get("WANDB_RUN_GROUP"))
        # A trunk and all that descends from it form one group, named after the trunk (`join`; recipes.cooldown sets the variable).
        kwargs.setdefault("group", os.environ.get("WANDB_RUN_GROUP") or self._run_dir.name)
        # console="off": wandb would otherwise copy the terminal, progress bar included, into a file.
        if "settings" not in kwargs:
            import wandb  # here, as in Lightning's own: half a second that a journal-only run need not pay

            kwargs["settings"] = wandb.Settings(console="off", x_disable_stats=offline, init_timeout=300)
        super().__init__(
            save_dir=str(save_dir), offline=offline, project=project, id=self._stored_id(), **kwargs
        )
        self._wandb_init.pop(
            "anonymous", None
        )  # Lightning passes it on, wandb 0.31 warns that it has no effect
        self._rows = _Rows()
        self._defined: set[str] = set()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run (rank 0). A run that was killed a moment ago holds its id until W&B's process notices: wait for it."""
        for wait_s in (1, 2, 4, 8, 16, 32, None):
            try:
                return super().experiment
            except Exception as e:
                if "in use" not in str(e):
                    raise
                if wait_s is not None:
                    rank_zero_info(f"W&B: {e}; trying again in {wait_s} s")
                    time.sleep(wait_s)
        rank_zero_warn(
            f"W&B run {self._wandb_init['id']} is still held by another process after a minute: this process logs to a W&B run of "
            "its own, in the same group; the journal has both"
        )
        self._wandb_init["id"] = f"{self._wandb_init['id']}-{uuid.uuid4().hex[:4]}"
        return super().experiment

    def join(self, group: str) -> None:
        """Put the W&B run into a group before it starts, unless the user has named one."""
        if not self._has_users_group:
            self._wandb_init["group"] = group

    def _stored_id(self) -> str | None:
        file = self._run_dir / "wandb" / "run_id"
        return file.read_text().strip() if file.is_file() else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take metrics of one step in; they are sent with everything else of that step."""
        for row in self._rows.add(metrics, step):
            self._send(*row)

    @rank_zero_only
    def save(self) -> None:
        """Send the row that is waiting."""
        for row in self._rows.flush():
            self._send(*row)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what is waiting, then finish as Lightning does."""
        self.save()
        super().finalize(status)

    def _send(self, kind: str, step: int, row: dict[str, Any]) -> None:
        run = self.experiment
        if not self._defined:
            (self._run_dir / "wandb").mkdir(parents=True, exist_ok=True)
            (self._run_dir / "wandb" / "run_id").write_text(str(run.id))
            run.define_metric(X_AXIS)
            self._defined.add(X_AXIS)
        for key in row.keys() - self._defined:
            # Exact names: Lightning has defined the glob "*" already, and the earlier glob wins.
            run.define_metric(key, step_metric=X_AXIS)
        self._defined |= row.keys()
        super().log_metrics({k: v.item() if hasattr(v, "item") else v for k, v in row.items()}, step)


def read_journal(path: str | os.PathLike[str], kind: str | None = None) -> list[dict[str, Any]]:
    """Return a journal's lines in the order of their first appearance, the later of two lines for one step winning.

    Args:
        path: the file, or the run's directory.
        kind: return lines of this kind only.

    Raises:
        FileNotFoundError: no journal there.
        ValueError: a line other than the last is not JSON (a torn last line is what a kill leaves, and is left out).
    """
    file = Path(path)
    if file.is_dir():
        file = file / "journal.jsonl"
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    lines = file.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#torn "):
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            if number == len(lines):
                continue
            raise ValueError(f"{file}, line {number} is not JSON: {line[:80]!r}; remove that line") from e
        if kind is None or row["kind"] == kind:
            rows[(row["kind"], row["step"])] = row
    return list(rows.values())


def _end_torn_line(path: Path) -> None:
    """Mark a line that a kill left without its end, so that the next line starts a line of its own."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        start = text.rfind(b"\n") + 1
        with open(path, "r+b") as f:
            f.seek(start)
            f.write(b"#torn " + text[start:] + b"\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _wants_online() -> bool:
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode:
        return mode in ("online", "run")
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc
    from urllib.parse import urlparse

    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
