"""How fast checkpoints are, for `python -m recipes.bench checkpoints`: each figure beside what it is measured against.

The two sides of a comparison take turns in one process, so that a machine whose speed drifts drifts under both.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpoint_retention import CheckpointRetention, Policy, decide, list_saved, manifest_hash
from lit_gpt_loop.strategies import OneDevice


@dataclass(frozen=True)
class Figure:
    """One comparison: seconds of ours and of what it is held against, and the limit on their ratio."""

    name: str
    ours_s: float
    reference_s: float
    limit: float  # ours_s / reference_s may be so much

    @property
    def ratio(self) -> float:
        """Ours over the reference."""
        return self.ours_s / self.reference_s

    @property
    def holds(self) -> bool:
        """Whether the ratio is within the limit."""
        return self.ratio <= self.limit


class _Heavy(pl.LightningModule):
    """State of a given size that costs nothing to train."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        tensors = 24  # as of a small model: not one huge piece, not thousands
        shape = (max(1, num_bytes // tensors // 4 // 1024), 1024)
        self.state = nn.ParameterList(
            nn.Parameter(torch.randn(shape), requires_grad=False) for _ in range(tensors)
        )
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.0)


class _InTurns(pl.Callback):
    """Runs the reference before each save and collects both sides."""

    def __init__(self, reference: Callable[[], float]) -> None:
        self.reference = reference
        self.pairs: list[tuple[float, float]] = []
        self._reference_s = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if "ckpt/blocked_s" in trainer.callback_metrics:
            self.pairs.append((float(trainer.callback_metrics["ckpt/blocked_s"]), self._reference_s))
        self._reference_s = self.reference()


def _train(
    folder: Path, num_bytes: int, turns: int, stock: bool, reference: Callable[[], float], **kwargs: Any
) -> list[tuple[float, float]]:
    in_turns = _InTurns(reference)
    # The check that reads back runs beside the next turn's reference and would slow it: left out of the comparison.
    retention = CheckpointRetention(
        folder / "checkpoints", every_n_steps=1, keep_latest=1, monitor=None, verify="sizes", **kwargs
    )
    trainer = pl.Trainer(
        max_steps=turns + 2, accelerator="cpu", devices=1, strategy="auto" if stock else OneDevice(), logger=False,
        callbacks=[in_turns, retention], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(_Heavy(num_bytes), DataLoader(TensorDataset(torch.ones(turns + 2, 1))))
    return in_turns.pairs[1:]  # the first one allocates


def _median(name: str, pairs: list[tuple[float, float]], limit: float) -> Figure:
    ratio = statistics.median(ours / reference for ours, reference in pairs)
    reference_s = statistics.median(reference for _, reference in pairs)
    return Figure(name, ratio * reference_s, reference_s, limit)


def sync_save(
    num_bytes: int = 500_000_000, turns: int = 7, stock: bool = False, folder: Path | None = None
) -> Figure:
    """A save, hashing included, against one plain write and fsync of as many bytes. At least 80% of its rate.

    Args:
        num_bytes: size of the state.
        turns: how often both are done.
        stock: Lightning's own single-file strategy instead of ours.
        folder: on the disk to measure; default the temporary folder.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "plain"
        content = memoryview(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy())  # type: ignore[arg-type]

        def plain() -> float:
            path.unlink(missing_ok=True)
            started = time.perf_counter()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            done = 0
            while done < num_bytes:
                done += os.write(fd, content[done:])
            os.fsync(fd)
            os.close(fd)
            return time.perf_counter() - started

        pairs = _train(Path(temporary), num_bytes, turns, stock, plain)
    return _median(
        f"synchronous save of {num_bytes / 1e6:.0f} MB{' (stock strategy)' if stock else ''}", pairs, 1 / 0.8
    )


def async_save(
    num_bytes: int = 500_000_000, turns: int = 7, stock: bool = False, folder: Path | None = None
) -> Figure:
    """How long an asynchronous save blocks, against a copy of the state in memory. At most 1.2 times.

    Each turn waits until the save before it is on the disk, so that waiting for it is not measured.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source = list(_Heavy(num_bytes).state)
        target = [torch.empty_like(t) for t in source]
        checkpoints = Path(temporary) / "checkpoints"
        turn = [0]

        def copy() -> float:
            turn[0] += 1
            end = time.monotonic() + 120
            while turn[0] > 1 and time.monotonic() < end:
                if (checkpoints / f"step-{turn[0] - 1:08d}" / "manifest.json").exists():
                    break
                time.sleep(0.05)
            time.sleep(0.5)  # flushing and pruning end
            started = time.perf_counter()
            for t, s in zip(target, source, strict=True):
                t.copy_(s)
            return time.perf_counter() - started

        pairs = _train(Path(temporary), num_bytes, turns, stock, copy, async_save=True)
    return _median(f"blocked by an asynchronous save of {num_bytes / 1e6:.0f} MB", pairs, 1.2)


def listing(num_checkpoints: int = 1000, turns: int = 5) -> Figure:
    """Listing and deciding over many checkpoints, against 0.2 s."""
    with tempfile.TemporaryDirectory() as temporary:
        for step in range(1, num_checkpoints + 1):
            folder = Path(temporary) / f"step-{step:08d}"
            folder.mkdir()
            files = {f"state/__{rank}_0.distcp": {"bytes": 10**9, "sha256": "0" * 64} for rank in range(8)}
            manifest: dict[str, Any] = {
                "schema": 1, "step": step, "order": step, "run": "r", "files": files, "created": "2026-01-01",
                "metric": {"name": "val/loss", "value": 3.0 - step / 1e4, "step": step, "mode": "min"},
            }  # fmt: skip
            manifest["sha256"] = manifest_hash(manifest)
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
        seconds = []
        for _ in range(turns):
            started = time.perf_counter()
            decide(list_saved(temporary), Policy(archive=100))
            seconds.append(time.perf_counter() - started)
    return Figure(
        f"listing and deciding over {num_checkpoints} checkpoints", statistics.median(seconds), 0.2, 1.0
    )


def run(num_bytes: int = 500_000_000, turns: int = 7, folder: Path | None = None) -> list[Figure]:
    """Return all figures."""
    return [
        sync_save(num_bytes, turns, folder=folder),
        sync_save(num_bytes, turns, stock=True, folder=folder),
        async_save(num_bytes, turns, folder=folder),
        async_save(num_bytes, turns, stock=True, folder=folder),
        listing(),
    ]
