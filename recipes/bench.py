"""Benchmarks: `python -m recipes.bench {train,callbacks,memory,startup,checkpoints,proofs}`.

Machines drift by up to 2x within minutes, so what is compared takes turns: every contestant is a process of its own, all are
started, then each makes one update in rotation while the others sleep. An update is timed from the moment its process gets the
turn to the end of its next optimizer step. Ratios are medians over turns of (contestant / reference) within a turn.
"""

import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

from recipes.help import Help

Precision = Literal["fp32", "bf16"]
# 10.65 M parameters (nanoGPT's character model), and a tenth of it.
SHAPES: dict[str, dict[str, int]] = {
    "10m": {"layers": 6, "heads": 6, "width": 384, "context": 256, "batch": 12, "vocab_size": 65},
    "1m": {"layers": 6, "heads": 2, "width": 120, "context": 256, "batch": 12, "vocab_size": 65},
}
CALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "weight": ("TokenWeightedLoss", {}),
    "norm": ("GradNormMonitor", {"clip_norm": 1.0}),
    "mfu": ("MFUMonitor", {"peak_flops": 1e12}),
    "retention": ("CheckpointRetention", {"every_n_steps": 100_000}),
    "restart": ("RestartEquivalence", {}),
    "audit100": ("LoopAudit", {"every_n_steps": 100}),
    "audit1": ("LoopAudit", {"every_n_steps": 1}),
}
MEASURING = ("weight", "norm", "mfu")
DEFAULT = (*MEASURING, "retention", "restart")


# ---------------------------------------------------------------- contestants, each in a process of its own


def _text(folder: Path, num_chars: int = 2_000_000) -> Path:
    """Write a text of 64 different characters (65 tokens with the end token), the same every time."""
    import random

    file = folder / "bench.txt"
    if not file.exists():
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
        file.write_text("".join(random.Random(0).choices(letters, k=num_chars)))
    return file


def run_plain(folder: Path, shape: dict[str, int], precision: Precision) -> None:
    """nanoGPT's loop, written plainly; never returns."""
    import numpy as np

    from recipes.bench_nanogpt import train

    data = np.random.default_rng(0).integers(0, shape["vocab_size"], 2_000_000).astype(np.uint16)
    file = folder / "plain.bin"
    data.tofile(file)
    for _ in train(np.memmap(file, np.uint16, "r"), is_bf16=precision == "bf16", **shape):
        pass


def run_ours(
    folder: Path,
    shape: dict[str, int],
    precision: Precision,
    callbacks: tuple[str, ...],
    loggers: tuple[str, ...],
) -> None:
    """Our fit on the same shape and batch; never returns."""
    import lightning.pytorch as pl

    import callbacks as ours
    from lit_gpt_loop import GPTConfig, LitGPT, TextDataModule
    from lit_gpt_loop.journal import JournalLogger, RunWandbLogger
    from lit_gpt_loop.schedules import ScheduleConfig
    from lit_gpt_loop.strategies import OneDevice

    torch_seed = 1337
    pl.seed_everything(torch_seed, verbose=False)
    config = GPTConfig.preset(
        "nanogpt-char-10m",
        n_layer=shape["layers"], n_head=shape["heads"], n_embd=shape["width"], vocab_size=shape["vocab_size"],
        context_length=shape["context"],
    )  # fmt: skip
    module = LitGPT(config, lr=1e-3, schedule=ScheduleConfig("constant", 0))
    data = TextDataModule(
        corpus=str(_text(folder)), tokenizer="char", data_dir=str(folder / "data"), context_length=shape["context"],
        micro_batch_size=shape["batch"], val_fraction=0.1, val_split="tail",
    )  # fmt: skip
    run_dir = folder / f"run-{'-'.join(callbacks + loggers) or 'bare'}-{precision}"
    available: dict[str, Any] = {"journal": JournalLogger, "wandb": RunWandbLogger}
    classes = [CALLBACKS[name] for name in callbacks]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=OneDevice(), max_steps=10**9, max_epochs=-1, log_every_n_steps=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        logger=[available[name](run_dir) for name in loggers] or False,
        callbacks=[getattr(ours, name)(**arguments) for name, arguments in classes],
        enable_checkpointing="retention" in callbacks, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, num_sanity_val_steps=0, default_root_dir=run_dir,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)


def _contestant(
    turn: Connection, threads: int, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run `target`, handing the turn back after every optimizer step."""
    import logging
    import os
    import warnings

    os.environ["WANDB_SILENT"] = "true"
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(threads)
    started = [0.0]

    def after_step(*_: Any) -> None:
        turn.send(time.perf_counter() - started[0])
        turn.recv()
        started[0] = time.perf_counter()

    register_optimizer_step_post_hook(after_step)
    target(*arguments)


def take_turns(
    contestants: dict[str, tuple[Callable[..., None], tuple[Any, ...]]],
    turns: int,
    threads: int,
    warmup: int = 3,
) -> dict[str, list[float]]:
    """Return seconds per update of each contestant, turn by turn.

    Args:
        contestants: name -> (function that trains without end, its arguments).
        turns: timed turns; each contestant makes one update in each.
        threads: torch threads of each process (only one process works at a time).
        warmup: turns before, not timed.
    """
    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name, (target, arguments) in contestants.items():
        here, there = context.Pipe()
        process = context.Process(target=_contestant, args=(there, threads, target, arguments), daemon=True)
        process.start()
        processes.append(process)
        pipes[name] = here
        if not here.poll(300):
            raise TimeoutError(f"{name} made no update in 300 s")
        here.recv()  # the first update, with all start-up in it
        print(f"{name} is ready", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    try:
        for n in range(warmup + turns):
            for name, pipe in pipes.items():
                pipe.send(None)
                if not pipe.poll(300):
                    raise TimeoutError(f"{name} made no update in 300 s")
                value = pipe.recv()
                if n >= warmup:
                    seconds[name].append(value)
            print(f"\rturn {n + 1 - warmup}/{turns} ", end="", file=sys.stderr, flush=True)
    finally:
        print(file=sys.stderr)
        for process in processes:
            process.kill()
            process.join()
    return seconds


def _report(title: str, seconds: dict[str, list[float]], reference: str) -> None:
    table = Table(title=title)
    for column in ("contestant", "ms per update", f"ratio to {reference}", "quartiles"):
        table.add_column(column)
    for name, values in seconds.items():
        ratios = sorted(a / b for a, b in zip(values, seconds[reference], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        table.add_row(
            name,
            f"{statistics.median(values) * 1e3:,.1f}",
            f"{statistics.median(ratios):.3f}",
            f"{low:.3f} .. {high:.3f}",
        )
    Console(width=110).print(table)


# ---------------------------------------------------------------- commands


def train(
    shape: str = "10m", turns: int = 20, threads: int = 2, precisions: list[Precision] | None = None
) -> None:
    """Our full fit with its default callbacks and logging against nanoGPT's loop.

    Args:
        shape: 10m or 1m.
        turns: timed updates of each.
        threads: torch threads.
        precisions: fp32, bf16 or both (the default).
    """
    with tempfile.TemporaryDirectory() as folder:
        for precision in precisions or ["fp32", "bf16"]:
            where = Path(folder)
            seconds = take_turns(
                {
                    "nanoGPT's loop": (run_plain, (where, SHAPES[shape], precision)),
                    "our fit, bare": (run_ours, (where, SHAPES[shape], precision, (), ())),
                    "our fit, defaults": (
                        run_ours,
                        (where, SHAPES[shape], precision, DEFAULT, ("journal", "wandb")),
                    ),
                },
                turns,
                threads,
            )
            _report(f"{shape}, {precision}", seconds, "nanoGPT's loop")


def callbacks(
    shapes: list[str] | None = None,
    turns: int = 60,
    threads: int = 2,
    precision: Precision = "bf16",
    sets: Literal["measuring", "proofs", "each"] = "measuring",
) -> None:
    """What callbacks cost: the same fit with and without them.

    Args:
        shapes: 10m, 1m or both (the default).
        turns: timed updates of each.
        threads: torch threads.
        precision: fp32 or bf16.
        sets: measuring (the three and the journal), proofs (RestartEquivalence, LoopAudit at 100 and at 1), or each alone.
    """
    groups: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
        "measuring": {"three callbacks and journal": (MEASURING, ("journal",))},
        "proofs": {name: ((name,), ()) for name in ("restart", "audit100", "audit1")},
        "each": {name: ((name,), ()) for name in (*MEASURING, "retention")} | {"journal": ((), ("journal",))},
    }
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes or ["10m", "1m"]:
            contestants: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
                "none": (run_ours, (Path(folder), SHAPES[shape], precision, (), ()))
            }
            for name, (names, loggers) in groups[sets].items():
                contestants[name] = (run_ours, (Path(folder), SHAPES[shape], precision, names, loggers))
            _report(f"{shape}, {precision}", take_turns(contestants, turns, threads), "none")


def _peak_gib(target: Callable[..., None], arguments: tuple[Any, ...], updates: int) -> float:
    """Return the peak resident memory in GiB of a whole process, libraries included, after some updates."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_contestant, args=(there, 2, target, arguments), daemon=True)
    process.start()
    for _ in range(updates):
        if not here.poll(300):
            raise TimeoutError("no update in 300 s")
        here.recv()
        here.send(None)
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.kill()
    process.join()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def memory(updates: int = 4, precision: Precision = "fp32") -> None:
    """Peak memory of our full fit and of nanoGPT's loop, on the benchmark's shape and with a vocabulary of 50,257.

    Args:
        updates: updates before the peak is read.
        precision: fp32 or bf16.
    """
    large = SHAPES["10m"] | {"vocab_size": 50257, "batch": 16}
    logits_gib = large["batch"] * large["context"] * large["vocab_size"] * 4 / 2**30
    table = Table(title=f"peak resident memory, {precision}")
    for column in ("shape", "contestant", "GiB"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        for label, shape in (
            ("10m", SHAPES["10m"]),
            (f"50,257 words (fp32 logits: {logits_gib:.2f} GiB)", large),
        ):
            for name, target, rest in (
                ("nanoGPT's loop", run_plain, ()),
                ("our fit, bare", run_ours, ((), ())),
                ("our fit, defaults", run_ours, (DEFAULT, ("journal",))),
            ):
                peak = _peak_gib(target, (Path(folder), shape, precision, *rest), updates)
                table.add_row(label, name, f"{peak:.3f}")
    Console(width=110).print(table)


def startup(run_config: Path = Path("configs/quickstart.yaml"), repeats: int = 3) -> None:
    """Seconds from the command to the first update: of a start, of a resume, and of a branch by recipes.cooldown, in turns.

    Args:
        run_config: a configuration of recipes.pretrain.
        repeats: turns; medians count.
    """
    from recipes.bench_startup import report
    from recipes.bench_startup import startup as measure

    print(report(measure(run_config, repeats)))


def checkpoints(num_bytes: int = 500_000_000, turns: int = 7) -> None:
    """Saving and listing: a synchronous save against one plain write, an asynchronous one against a copy, 1,000 manifests.

    Args:
        num_bytes: size of the state.
        turns: measurements of each; medians count.
    """
    from recipes.bench_checkpoints import run

    for figure in run(num_bytes, turns):
        print(figure)


def proofs(num_bytes: int = 1 << 30, updates: int = 40, threads: int = 2) -> None:
    """Digests against a plain sum, and what RestartEquivalence costs while it traces.

    Args:
        num_bytes: size of the parameters that are digested.
        updates: updates of the fit.
        threads: torch threads.
    """
    from recipes.bench_proofs import proofs as measure

    measure(num_bytes, updates, threads)


def main() -> None:
    """Run the chosen benchmark."""
    commands: Any = {f.__name__: f for f in (train, callbacks, memory, startup, checkpoints, proofs)}
    auto_cli(
        commands,
        as_positional=False,
        prog="python -m recipes.bench",
        description=__doc__,
        formatter_class=Help,
    )


if __name__ == "__main__":
    main()
