"""What proofs cost, for `python -m recipes.bench proofs`: digests beside a plain sum, RestartEquivalence beside its updates.

Sum and digest take turns in one process, so that a machine whose speed drifts drifts under both.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from callbacks.restart_equivalence import RestartEquivalence, measure
from lit_gpt_loop.module import LitGPT
from lit_gpt_loop.strategies import OneDevice

MIN_DIGEST_SHARE = 0.25  # of the bandwidth of a plain sum
MAX_RESTART_SHARE = 0.005  # of a run that saves every 500 updates


def digests(
    num_bytes: int = 1 << 30, turns: int = 9, threads: int = 2, device: str = "cpu"
) -> dict[str, float]:
    """Measure the bandwidth of digests, with and without the norm, beside that of `tensor.sum()`.

    Args:
        num_bytes: fp32 parameters to go over.
        turns: how often each takes its turn.
        threads: torch threads.
        device: cpu or cuda.

    Returns:
        name -> GB/s (1e9 bytes), medians, and `name / sum` -> the median of the ratios within a turn.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.randn(num_bytes // 4, device=device)
    contestants: dict[str, Callable[[], Any]] = {
        "sum": lambda: x.sum().item(),
        "digest": lambda: measure(x, norm=False)[0].item(),
        "digest and norm": lambda: measure(x)[1].item(),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns + 1):  # the first warms up
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    torch.set_num_threads(before)
    found = {name: num_bytes / 1e9 / statistics.median(s) for name, s in seconds.items()}
    for name in ("digest", "digest and norm"):
        ratios = [a / b for a, b in zip(seconds["sum"], seconds[name], strict=True)]
        found[f"{name} / sum"] = statistics.median(ratios)
    return found


class _Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, vocab_size: int, context_length: int) -> None:
        self.tokens = torch.randint(vocab_size, (4096, context_length + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.tokens[i, :-1], "targets": self.tokens[i, 1:], "sample_ids": torch.tensor(i)}


class _Save(pl.Callback):
    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            trainer.save_checkpoint(self.path)


class _Clock(pl.Callback):
    """Seconds from the start of each batch to that of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def _timed(checker: RestartEquivalence, seconds: dict[str, float]) -> None:
    names = [n for n in dir(checker) if n.startswith("on_")] + ["_note_gradient", "_before_first_step"]
    for name in names:
        method = getattr(checker, name)

        def timed(*args: Any, _method: Callable[..., Any] = method, _name: str = name, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return _method(*args, **kwargs)
            finally:
                seconds[_name] += time.perf_counter() - start

        setattr(checker, name, wraps(method)(timed))


def restart(
    updates: int = 40, every: int = 10, threads: int = 2, precision: Any = "bf16-mixed"
) -> dict[str, float]:
    """Measure what RestartEquivalence spends in its hooks for one save and its trace, beside the updates themselves.

    the benchmark's model: 10.65 M parameters, 6 layers, width 384, context 256, micro-batch 12, vocabulary 65.

    Args:
        updates: length of the run.
        every: a save after so many updates; the cost is then counted for one save in 500.
        threads: torch threads.
        precision: of the Trainer.

    Returns:
        `update_s` (median), `save_and_trace_s` (per save), `idle_s` (per update outside of traces) and `share`, the part of a
        run that saves every 500 updates.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds: dict[str, float] = defaultdict(float)
    clock, checker = _Clock(), RestartEquivalence()
    _timed(checker, seconds)
    config = {"n_layer": 6, "n_head": 6, "n_embd": 384, "context_length": 256, "vocab_size": 65}
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=OneDevice(),
            precision=precision,
            max_steps=updates,
            default_root_dir=folder,
            callbacks=[checker, _Save(Path(folder) / "saved.ckpt", every), clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(LitGPT(config), DataLoader(_Tokens(65, 256), batch_size=12))
        with_saves = sum(seconds.values())
        idle = RestartEquivalence()
        num_idle = 100_000
        start = time.perf_counter()
        for i in range(num_idle):  # nothing is open: what each batch outside of a trace costs
            idle.on_train_batch_start(trainer, trainer.lightning_module, None, i)
            idle.on_train_batch_end(trainer, trainer.lightning_module, None, None, i)
        idle_s = (time.perf_counter() - start) / num_idle
    torch.set_num_threads(before)
    update_s = statistics.median(b - a for a, b in zip(clock.starts, clock.starts[1:], strict=False))
    save_s = with_saves / max(1, updates // every)
    share = (save_s + 500 * idle_s) / (500 * update_s)
    return {"update_s": update_s, "save_and_trace_s": save_s, "idle_s": idle_s, "share": share}


def proofs(num_bytes: int = 1 << 30, updates: int = 40, threads: int = 2) -> bool:
    """Print both; returns whether both limits hold.

    Args:
        num_bytes: of the digests.
        updates: of the run.
        threads: torch threads.
    """
    found = digests(num_bytes, threads=threads)
    print(f"plain sum of {num_bytes / 2**30:.2g} GiB: {found['sum']:.1f} GB/s on {threads} threads")
    for name in ("digest", "digest and norm"):
        print(
            f"{name}: {found[name]:.1f} GB/s, {found[name + ' / sum']:.2f} of the sum (at least {MIN_DIGEST_SHARE})"
        )
    cost = restart(updates, threads=threads)
    print(
        f"RestartEquivalence: {cost['save_and_trace_s'] * 1e3:.0f} ms for a save and its trace, "
        f"{cost['idle_s'] * 1e6:.1f} us per update between traces; an update takes {cost['update_s'] * 1e3:.0f} ms: "
        f"{cost['share']:.3%} of a run that saves every 500 updates (at most {MAX_RESTART_SHARE:.1%})"
    )
    return found["digest / sum"] >= MIN_DIGEST_SHARE and cost["share"] <= MAX_RESTART_SHARE


if __name__ == "__main__":
    proofs()
