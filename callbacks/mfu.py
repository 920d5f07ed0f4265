"""MFUMonitor: real tokens per second, MFU and HFU, where the time of an update went, and goodput over restarts.

Drop in (copy this one file, or import it)::

    trainer = Trainer(..., callbacks=[MFUMonitor()])                 # device known: MFU is logged
    trainer = Trainer(..., callbacks=[MFUMonitor(peak_flops="measure")])   # a CPU: against a matmul timed here

Logged at each update (optimizer step), the same on every rank:

| key | unit | definition |
|---|---|---|
| perf/tokens_per_s | tokens/s | real tokens of all ranks / end-to-end time, over the last `window` updates |
| perf/tokens_per_s_per_device | tokens/s | the same / number of devices |
| perf/mfu | fraction | FLOPs per token (6N) x tokens/s / peak FLOP/s of all devices; left out when the peak is unknown |
| perf/hfu | fraction | the same with the forward passes that activation checkpointing repeats; only where the module says what they are |
| perf/step_s | s | end-to-end time of one update, mean over the window: data, compute, collectives, logging |
| perf/data_wait_s | s | the part of it that the loop waited for the loader (of the slowest rank) |
| perf/compute_s | s | the rest of it: step_s - data_wait_s |
| perf/eval_s, perf/checkpoint_s | s | evaluation and saving since the update before; in none of the above |
| perf/goodput | fraction | time in updates that were kept / wall time of all processes of the run |
| perf/goodput_{startup,data,eval,checkpoint,lost} | fraction | where the rest of that wall time went |
| perf/peak_memory_gib | GiB | most memory of any rank: CUDA's allocator peak; on CPU the process's peak resident size |

**Tokens.** A token counts if a loss is taken on it; padding never counts. The number is that of `count_tokens=` if given; else
the `num_tokens` that `training_step` returns beside the loss; else `train/tokens`, where TokenWeightedLoss counts them; else
that of the labels that are not -100 in `{"labels": ...}`, `{"targets": ...}` or `(inputs, targets)`.

**Time.** tokens/s is over the end-to-end time of training updates, data wait and collectives included, evaluation and
saving excluded: `perf/goodput` accounts for those. A rank that waits for a slower one shows its wait as compute,
so each duration is the maximum over ranks.

**FLOPs.** 6N per token: 2N forward, 4N backward (Kaplan et al. 2020, arXiv:2001.08361, section 2.1, table 1). N is
the number of parameters that multiply activations: the weights (2-D and up) of every module but embeddings, whose look-up
multiplies nothing; a tied embedding counts once, as the head. Biases and norms are left out (< 0.1%). 6N leaves out
attention scores: to add them pass `attention_flops_per_token=12 * layers * heads * head_width * context` (Chowdhery et al.
2022, PaLM, arXiv:2204.02311, appendix B), or your own count as `flops_per_token=`. N comes from `num_params=`, else the module's attribute
`flops_per_token` or `num_matmul_params`, else it is counted before anything is sharded. HFU adds the module's attribute
`recomputed_flops_per_token`, without which nobody knows it and perf/hfu is left out; MFU never does, so switching activation
checkpointing on leaves FLOPs per token as they were.

**Goodput.** A process of the run exists from when this callback is built until it ends; that is wall time (a machine is held), the gap
between two processes is not (`ledger.downtime_s` has it). The ledger is saved with each checkpoint, and every 10 s beside
the run as `goodput.json` in `trainer.default_root_dir`: at a resume the difference between the two is the work that died
with the process, and moves from kept to lost. An update that did not happen is lost too: no optimizer stepped (an overflow under
an fp16 scaler), or none had a gradient left (GradNormMonitor's skips, TokenWeightedLoss's updates without a token).

One wait for the device and, with several ranks, one small gather per update. The file is longer than others because it must
be copied alone: a third of it is this text and the table of peaks, a quarter the ledger.
"""

import json
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import fsspec
import lightning.pytorch as pl
import torch
from torch import Tensor, nn

IGNORE_INDEX = -100
HEARTBEAT_FILE = "goodput.json"
HEARTBEAT_EVERY_S = 10.0

# Peak FLOP/s of one device as PyTorch sees it, dense: NVIDIA's tables print the figure with 2:4 sparsity, twice these.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    # NVIDIA V100 datasheet (2020): SXM2, PCIe, V100S. No bf16, no TF32.
    "V100 SXM": {"fp16": 125e12, "fp32": 15.7e12},
    "V100 PCIE": {"fp16": 112e12, "fp32": 14e12},
    "V100S": {"fp16": 130e12, "fp32": 16.4e12},
    # NVIDIA T4 datasheet (2019)
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    # NVIDIA A10 datasheet (2021). The A10G of a cloud is another chip and deliberately not here.
    "A10": {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12},
    # NVIDIA A100 datasheet (2021): SXM and PCIe alike
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    # NVIDIA L4 and L40S datasheets (2023)
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "L40S": {"bf16": 362.05e12, "fp16": 362.05e12, "tf32": 183e12, "fp32": 91.6e12},
    # NVIDIA H100 whitepaper v1.04 (SXM5, PCIe) and H100 datasheet (NVL: 1,671 with sparsity, per GPU)
    "H100 SXM": {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12},
    "H100 PCIE": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12},
    "H100 NVL": {"bf16": 835.5e12, "fp16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12},
    # NVIDIA H200 datasheet (2024): the SXM board has H100 SXM's arithmetic, the NVL board H100 NVL's
    "H200 SXM": {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12},
    "H200 NVL": {"bf16": 835.5e12, "fp16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12},
    # NVIDIA Blackwell datasheet (2025), per GPU: HGX B200 4.5 and GB200 NVL72 5 PFLOPS with sparsity
    "B200": {"bf16": 2.25e15, "fp16": 2.25e15, "tf32": 1.1e15, "fp32": 75e12},
    "GB200": {"bf16": 2.5e15, "fp16": 2.5e15, "tf32": 1.25e15, "fp32": 80e12},
    # AMD MI250X data sheet (2021): 383 per board, of which PyTorch sees each of the two dies as a device
    "MI250X": {"bf16": 191.5e12, "fp16": 191.5e12, "fp32": 47.9e12},
    # AMD MI300X data sheet (2023)
    "MI300X": {"bf16": 1307.4e12, "fp16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12},
}
_BOARDS = {"V100": ("PCIE", "SXM"), "H100": ("NVL", "PCIE", "SXM"), "H200": ("NVL", "SXM")}


def _clock() -> float:
    """Seconds on a clock that never jumps; tests put their own here."""
    return time.perf_counter()


def peak_flops_of(device_name: str, dtype: str) -> float | None:
    """Look up the dense peak FLOP/s of one device; None if the table does not hold that device and dtype.

    The chip must be a whole word of the name ("NVIDIA H200", "Tesla V100-SXM2-16GB"), so that an A100 is never taken
    for an A10. A slice of a device (MIG) has no entry. The last board of `_BOARDS` is the one whose name is not printed.
    """
    words = device_name.upper().replace("-", " ").split()
    if "MIG" in words:
        return None
    for chip in {key.split()[0] for key in PEAK_FLOPS}.intersection(words):
        boards = _BOARDS.get(chip, ())
        board = next((b for b in boards if any(w.startswith(b) for w in words)), boards[-1] if boards else "")
        return PEAK_FLOPS[f"{chip} {board}".strip()].get(dtype)
    return None


def matmul_dtype(precision: str, device_type: str) -> str | None:
    """Say in which type the matmuls of a Lightning `precision` run: bf16, fp16, tf32, fp32, fp64, or None if unknown."""
    kind = {"bf16": "bf16", "16": "fp16", "32": "fp32", "64": "fp64"}.get(str(precision).split("-")[0])
    if kind == "fp32" and device_type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        has_tf32 = torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
        return "tf32" if has_tf32 else "fp32"
    return kind


def measure_matmul_flops(device: torch.device, dtype: str, budget_s: float = 0.4) -> float:
    """Time square matmuls on `device` and return the best FLOP/s seen: a measurement, not a published peak."""
    tensor_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(
        dtype, torch.float32
    )
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=tensor_dtype, device=device)
    best_s, end = float("inf"), time.perf_counter() + budget_s
    a @ a  # the first call sets up kernels
    while time.perf_counter() < end or best_s == float("inf"):
        _wait_for(device)
        start = time.perf_counter()
        a @ a
        _wait_for(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * size**3 / best_s


def count_matmul_params(module: nn.Module) -> int:
    """Count the parameters that multiply activations: weights of 2 dimensions and more outside embeddings, each once.

    An embedding tied to a linear layer is counted there. DTensors count with their unsharded shape.
    """
    weights: dict[int, int] = {}
    for m in module.modules():
        if not isinstance(m, nn.Embedding | nn.EmbeddingBag):
            weights.update({id(p): p.numel() for p in m.parameters(recurse=False) if p.ndim >= 2})
    return sum(weights.values())


def describe(batch: Any) -> str:
    """Show the structure of a batch in one line, for error messages."""
    if isinstance(batch, Tensor):
        return f"Tensor{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return type(batch).__name__ + "(" + ", ".join(describe(v) for v in batch) + ")"
    return type(batch).__name__


def count_label_tokens(batch: Any) -> Tensor:
    """Count the labels of a batch that are not -100, on the batch's device.

    Raises:
        ValueError: the batch is neither a mapping with "labels" or "targets" nor `(inputs, targets)` with integer targets.
    """
    labels = None
    if isinstance(batch, Mapping):
        labels = batch.get("labels", batch.get("targets"))
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise ValueError(
            f"MFUMonitor cannot tell how many tokens are trained in this batch: {describe(batch)}. It understands a mapping with "
            '"labels" or "targets" and a pair (inputs, targets), integer targets, -100 = not trained. For anything else '
            "pass MFUMonitor(count_tokens=f) with f(batch) -> int or Tensor, or return num_tokens beside the loss."
        )
    return (labels != IGNORE_INDEX).sum()


@dataclass(frozen=True)
class Ledger:
    """Wall time of a run by where it went, in seconds; all but `downtime_s` add up to the life of its processes."""

    startup_s: float = 0.0
    kept_s: float = 0.0
    data_s: float = 0.0
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    lost_s: float = 0.0
    downtime_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Time in which a process of the run existed."""
        return self.startup_s + self.kept_s + self.data_s + self.eval_s + self.checkpoint_s + self.lost_s

    @property
    def goodput(self) -> float:
        """Share of the wall time spent in updates that were kept."""
        return self.kept_s / self.wall_s if self.wall_s > 0 else 0.0

    def add(self, **seconds: float) -> "Ledger":
        """Return a ledger with these seconds added."""
        return replace(self, **{k: getattr(self, k) + v for k, v in seconds.items()})

    def metrics(self) -> dict[str, float]:
        """Return `perf/goodput` and the shares of the rest."""
        wall_s = self.wall_s or 1.0
        rest = ("startup", "data", "eval", "checkpoint", "lost")
        shares = {f"perf/goodput_{k}": getattr(self, f"{k}_s") / wall_s for k in rest}
        return {"perf/goodput": self.goodput} | shares


def resumed_ledger(saved: Ledger, last: Ledger | None, downtime_s: float = 0.0) -> Ledger:
    """Continue the ledger `saved` in a checkpoint, given the `last` one known of the run before it ended.

    What was trained after the checkpoint is redone: it moves from kept to lost. Start-up, data, evaluation and saves after the
    checkpoint stay what they were. A heartbeat older than the checkpoint knows nothing of it and is not used.
    """
    if last is None or last.wall_s < saved.wall_s:
        return saved
    return replace(last, kept_s=saved.kept_s).add(
        lost_s=max(0.0, last.kept_s - saved.kept_s), downtime_s=downtime_s
    )


class Stopwatch:
    """Exclusive time per kind: a save inside an evaluation is time of the save alone."""

    def __init__(self) -> None:
        self.seconds = {"data": 0.0, "eval": 0.0, "checkpoint": 0.0}
        self._open: list[str] = []
        self._mark = 0.0

    def _book(self) -> None:
        now = _clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._mark
        self._mark = now

    def open(self, kind: str) -> None:
        """Time belongs to `kind` from now on; nothing if it is open already."""
        if kind not in self._open:
            self._book()
            self._open.append(kind)

    def close(self, kind: str) -> None:
        """End `kind` and whatever was opened inside it; nothing if it is not open."""
        if kind in self._open:
            self._book()
            del self._open[self._open.index(kind) :]

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        self._book()
        taken = dict(self.seconds)
        self.seconds = dict.fromkeys(taken, 0.0)
        return taken


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type == "cpu":
        try:
            import resource
        except ImportError:  # Windows
            return float("nan")
        unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes on macOS, kilobytes elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return float("nan")


def _value(metrics: Mapping[str, Any], key: str) -> float:
    """Read what another callback reports, -1 if nobody does."""
    return float(metrics.get(key, -1.0))


class MFUMonitor(pl.Callback):
    """Log throughput, utilisation, the split of the time, and goodput. See the file's docstring for keys and definitions.

    Args:
        num_params: N of 6N, if the module does not say and counting its weights would be wrong.
        peak_flops: Dense peak FLOP/s of one device in the precision that is trained in; "measure" times a matmul once
            at the start, on all ranks together; None looks the device up.
        count_tokens: `f(batch) -> int | Tensor`: trained tokens of one batch on this rank, before anybody else's count.
        window: Updates over which rates and step times are averaged.
        flops_per_token: All FLOPs of one token, forward and backward, instead of 6N.
        attention_flops_per_token: Added to 6N (PaLM's attention term).
    """

    def __init__(
        self,
        *,
        num_params: int | None = None,
        peak_flops: float | str | None = None,
        count_tokens: Callable[[Any], int | Tensor] | None = None,
        window: int = 50,
        flops_per_token: float | None = None,
        attention_flops_per_token: float = 0.0,
    ) -> None:
        if isinstance(peak_flops, str) and peak_flops != "measure":
            raise ValueError(
                f'peak_flops={peak_flops!r}: give FLOP/s of one device, "measure", or None to look it up.'
            )
        for name, value in {"num_params": num_params, "peak_flops": peak_flops, "window": window}.items():
            if value is not None and not isinstance(value, str) and value <= 0:
                raise ValueError(f"MFUMonitor({name}={value}): must be positive.")
        if flops_per_token is not None and (num_params is not None or attention_flops_per_token):
            raise ValueError(
                "MFUMonitor: flops_per_token= is the whole count; leave out num_params= and attention_flops_per_token=, "
                "or give those two alone."
            )
        self.num_params = num_params
        self.peak_flops = peak_flops
        self.count_tokens = count_tokens
        self.window = window
        self.flops_per_token = flops_per_token
        self.attention_flops_per_token = attention_flops_per_token
        self.ledger = Ledger()
        self._run_id = ""
        self._born: float | None = _clock()
        self._saved: Ledger | None = None
        self._counted = 0
        self._warned = False
        self._watch: Stopwatch | None = None
        self._unobserve: Callable[[], None] = lambda: None
        self._handles: list[Any] = []
        self._found_inf: Tensor | None = None

    # ---- start ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Watch the trainer's own time marks, and count parameters while none is sharded."""
        if stage != "fit":
            return
        if self._born is None:  # a second fit with the same callback
            self._born = _clock()
        self._saved = None
        self._counted = count_matmul_params(pl_module)
        self._watch = Stopwatch()
        self._observe(trainer, pl_module)

    def _observe(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Follow the profiler's actions: the only place where Lightning tells when it waits for data or saves.

        `Profiler.start` and `stop` are public, the names of the actions are not a contract: a test fails if they change.
        """
        self._unobserve()
        watch = self._watch
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        assert watch is not None
        fetch = "[_TrainingEpochLoop].train_dataloader_next"
        opens = {
            fetch: "data",
            "run_training_epoch": "data",  # the iterator and its workers start here; closed by the first fetch
            "save_checkpoint": "checkpoint",
            f"[LightningModule]{type(pl_module).__name__}.on_validation_model_zero_grad": "eval",
        }
        closes = {
            fetch: "data",
            "run_training_epoch": "data",
            "save_checkpoint": "checkpoint",
            f"[Strategy]{type(trainer.strategy).__name__}.on_validation_end": "eval",
        }
        start, stop = profiler.start, profiler.stop

        def observed_start(action_name: str) -> None:
            if action_name in opens:
                watch.open(opens[action_name])
            start(action_name)

        def observed_stop(action_name: str) -> None:
            stop(action_name)
            if action_name in closes:
                watch.close(closes[action_name])

        profiler.start, profiler.stop = observed_start, observed_stop

        def unobserve() -> None:
            profiler.start, profiler.stop = start, stop
            self._unobserve = lambda: None

        self._unobserve = unobserve

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Settle FLOPs per token and the peak, or say once that the peak is unknown."""
        device = trainer.strategy.root_device
        dtype = matmul_dtype(trainer.precision or "", device.type)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak: float | None
        if self.peak_flops == "measure":
            trainer.strategy.barrier("MFUMonitor measures")  # ranks that share a machine share its speed
            peak = measure_matmul_flops(device, dtype or "fp32")
        elif self.peak_flops is not None:
            peak = float(self.peak_flops)
        else:
            peak = peak_flops_of(name, dtype) if dtype is not None else None
        peaks = torch.tensor([float("nan") if peak is None else peak], dtype=torch.float64, device=device)
        if trainer.world_size > 1:
            peaks = trainer.strategy.all_gather(peaks)
        self._sum_peak = float(peaks.sum())  # NaN if any is unknown
        self._flops = self._recomputed = float("nan")
        if self._sum_peak == self._sum_peak:
            self._flops = self._resolve_flops(trainer, pl_module)
            self._recomputed = float(getattr(pl_module, "recomputed_flops_per_token", "nan"))
        elif not self._warned:
            self._warned = True
            pl.utilities.rank_zero_warn(
                f"MFUMonitor: no peak FLOP/s known for device {name!r} at precision {trainer.precision!r}, so perf/mfu and "
                "perf/hfu are left out. Pass MFUMonitor(peak_flops=<dense FLOP/s of one device>), or peak_flops='measure'."
            )

    def _resolve_flops(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        if self.flops_per_token is not None:
            return float(self.flops_per_token)
        num_params = self.num_params
        if num_params is None:
            if (flops := getattr(pl_module, "flops_per_token", None)) is not None:
                return float(flops) + self.attention_flops_per_token
            num_params = getattr(pl_module, "num_matmul_params", None)
        if num_params is None:
            # FSDP1 has flattened and cut the weights by now; everyone else shows full shapes, also those built
            # after setup, in configure_model
            is_flat = trainer.model is not None and any(
                type(m).__name__ == "FullyShardedDataParallel" for m in trainer.model.modules()
            )
            num_params = self._counted if is_flat else count_matmul_params(pl_module)
            if num_params == 0:
                raise ValueError(
                    f"MFUMonitor finds no weight matrix to count in {type(pl_module).__name__}"
                    + (" before FSDP flattened it" if is_flat else "")
                    + ". Pass MFUMonitor(num_params=N), or give the LightningModule an attribute num_matmul_params: the number "
                    "of parameters that multiply activations."
                )
        return 6.0 * num_params + self.attention_flops_per_token

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read what became of the run before this process, and start the first update's clock."""
        # the clock and the disk of rank 0 speak for all
        beat: dict[str, Any] | None = self._read_heartbeat(trainer) if trainer.is_global_zero else None
        run_id, beat, now = trainer.strategy.broadcast((self._run_id or uuid.uuid4().hex, beat, time.time()))
        self._run_id, born = run_id, _clock() if self._born is None else self._born
        if self._saved is not None:
            last, downtime_s = None, 0.0
            if beat is not None and beat["run_id"] == run_id:
                last = Ledger(**beat["ledger"])
                downtime_s = max(0.0, now - (_clock() - born) - beat["time"])
            self.ledger = resumed_ledger(self._saved, last, downtime_s)
            self._saved = None
        data_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        # ranks of one tensor-parallel group read the same batch
        self._copies = trainer.world_size / data_ranks
        # tokens, step_s, data_wait_s of each update
        self._history: deque[tuple[float, float, float]] = deque(maxlen=self.window)
        self._forget_window()
        self._bus_tokens = trainer.callback_metrics.get(
            "train/tokens"
        )  # what an earlier fit may have left there
        self._follow_steps(trainer)
        self._step = trainer.global_step
        self._saves_seen = _value(trainer.callback_metrics, "ckpt/step")
        assert self._watch is not None
        self._watch.take()
        self._boundary = self._beat = _clock()
        self._startup_s = self._boundary - born
        self._born = None

    def _follow_steps(self, trainer: pl.Trainer) -> None:
        """Note each step of an optimizer that had a gradient, so that it does not matter who skips an update, or when."""
        self._unfollow()

        def stepped(optimizer: Any, *_: Any) -> None:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self._num_steps += 1
                # A fused optimizer under a scaler decides inside its step; read where the device is waited for
                self._found_inf = getattr(optimizer, "found_inf", None)

        # an optimizer of another make than torch's has no such hook: then every update counts as one that happened
        followed = [o for o in trainer.optimizers if hasattr(o, "register_step_post_hook")]
        self._handles = [o.register_step_post_hook(stepped) for o in followed]

    def _unfollow(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forget_window(self) -> None:
        """Begin the next update."""
        self._tokens: int | Tensor = 0
        self._is_module_counting, self._refusal = True, ""
        self._num_steps, self._found_inf = 0, None

    # ---- while training ----

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Nothing but training from here on, whatever end mark was missed."""
        assert self._watch is not None
        self._watch.close("eval")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluation inside an accumulation window has no earlier mark."""
        if self._watch is not None and not trainer.sanity_checking:
            self._watch.open("eval")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count tokens; at the end of an update measure and log."""
        self._count(outputs, batch)
        if trainer.global_step == self._step:
            return
        device = trainer.strategy.root_device
        _wait_for(device)
        now = _clock()
        assert self._watch is not None
        taken = self._watch.take()
        step_s = now - self._boundary - taken["eval"] - taken["checkpoint"]
        memory_gib = _peak_memory_gib(device)
        seconds = [step_s, taken["data"], taken["eval"], taken["checkpoint"], self._startup_s]
        has_stepped = self._num_steps > 0 and not (self._found_inf is not None and bool(self._found_inf))
        tokens = float(self._tokens)
        most = [
            float(not self._is_module_counting),
            float(has_stepped or not self._handles),
            memory_gib,
            *seconds,
        ]
        if trainer.world_size > 1:
            row = torch.tensor([tokens, *most], dtype=torch.float64, device=device)
            rows = trainer.strategy.all_gather(row).cpu()
            tokens = float(rows[:, 0].sum()) / self._copies
            most = rows[:, 1:].amax(0).tolist()
        others_count, happened, memory_gib, step_s, data_s, eval_s, checkpoint_s, startup_s = most
        bus = trainer.callback_metrics
        if others_count:
            tokens = self._tokens_of_others(bus, tokens)
        self._step, self._boundary, self._startup_s = trainer.global_step, now, 0.0
        self._forget_window()

        saves = _value(bus, "ckpt/step")
        if saves != self._saves_seen:  # hashing and renaming stall the loop outside Trainer.save_checkpoint
            more_s = min(max(0.0, _value(bus, "ckpt/blocked_s") - checkpoint_s), step_s - data_s)
            step_s, checkpoint_s = step_s - more_s, checkpoint_s + more_s
        self._saves_seen = saves
        self.ledger = self.ledger.add(
            startup_s=startup_s, data_s=data_s, eval_s=eval_s, checkpoint_s=checkpoint_s,
            **{"kept_s" if happened else "lost_s": step_s - data_s},
        )  # fmt: skip
        self._history.append((tokens, step_s, data_s))
        metrics = self._window_metrics(trainer.world_size)
        metrics |= {"perf/eval_s": eval_s, "perf/checkpoint_s": checkpoint_s}
        if memory_gib == memory_gib:
            metrics["perf/peak_memory_gib"] = memory_gib
        metrics |= self.ledger.metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        values = torch.tensor(list(metrics.values()), dtype=torch.float64).unbind()
        bus.update(dict(zip(metrics, values, strict=True)))
        if now - self._beat > HEARTBEAT_EVERY_S:
            self._write_heartbeat(trainer)

    def _count(self, outputs: Any, batch: Any) -> None:
        """Add the tokens of a micro-batch, without waiting for the device."""
        count: Any = None
        if self.count_tokens is not None:
            count = self.count_tokens(batch)
        elif isinstance(outputs, Mapping):
            count = outputs.get("num_tokens")
        if count is None:
            self._is_module_counting, count = False, 0
            try:
                count = count_label_tokens(batch)
            except ValueError as e:  # no matter if TokenWeightedLoss was told how to count
                self._refusal = str(e)
        self._tokens = self._tokens + count

    def _tokens_of_others(self, bus: Mapping[str, Any], tokens: float) -> float:
        """Return the tokens that TokenWeightedLoss counted in this update on all ranks; without it those of the batches.

        It keeps itself in front of the callbacks, so that its value is here by now; a value is fresh if it is a new tensor.
        """
        before, self._bus_tokens = self._bus_tokens, bus.get("train/tokens")
        if self._bus_tokens is not None and self._bus_tokens is not before:
            return float(self._bus_tokens)
        if self._refusal:
            raise ValueError(self._refusal)
        return tokens

    def _window_metrics(self, world_size: int) -> dict[str, float]:
        num = len(self._history)
        tokens, step_s, data_s = (sum(column) for column in zip(*self._history, strict=True))
        if step_s <= 0:
            return {}
        rate = tokens / step_s
        metrics = {
            "perf/tokens_per_s": rate,
            "perf/tokens_per_s_per_device": rate / world_size,
            "perf/step_s": step_s / num,
            "perf/data_wait_s": data_s / num,
            "perf/compute_s": (step_s - data_s) / num,
        }
        if self._flops == self._flops:
            metrics["perf/mfu"] = self._flops * rate / self._sum_peak
            if self._recomputed == self._recomputed:
                metrics["perf/hfu"] = (self._flops + self._recomputed) * rate / self._sum_peak
        return metrics

    # ---- the ledger on disk ----

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger up to the last update, in plain types."""
        return {"run_id": self._run_id, "ledger": asdict(self.ledger)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the ledger of a checkpoint; what happened after it is read at the start of training."""
        self._run_id = state_dict["run_id"]
        self._saved = Ledger(**state_dict["ledger"])

    @staticmethod
    def _heartbeat_path(trainer: pl.Trainer) -> str:
        return os.path.join(str(trainer.default_root_dir), HEARTBEAT_FILE)

    def _write_heartbeat(self, trainer: pl.Trainer) -> None:
        self._beat = _clock()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        beat = {"run_id": self._run_id, "ledger": asdict(self.ledger), "time": time.time()}
        fs, path = fsspec.core.url_to_fs(self._heartbeat_path(trainer))
        fs.makedirs(os.path.dirname(path), exist_ok=True)
        fs.pipe_file(path + ".tmp", json.dumps(beat).encode())
        fs.mv(path + ".tmp", path)  # a crash leaves the old file or the new one

    def _read_heartbeat(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        fs, path = fsspec.core.url_to_fs(self._heartbeat_path(trainer))
        return json.loads(fs.cat_file(path)) if fs.exists(path) else None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Book what followed the last update."""
        self._finish(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Book it also when the run ends by an error or a signal."""
        if self._watch is not None and hasattr(self, "_boundary"):
            self._finish(trainer)
        self._unobserve()
        self._unfollow()

    def _finish(self, trainer: pl.Trainer) -> None:
        assert self._watch is not None
        taken, now = self._watch.take(), _clock()
        rest_s = max(0.0, now - self._boundary - sum(taken.values()))
        self._boundary = now
        # an unfinished update and shutting down: nothing of it is kept
        self.ledger = self.ledger.add(
            startup_s=rest_s + self._startup_s, **{f"{k}_s": v for k, v in taken.items()}
        )
        self._startup_s = 0.0
        self._write_heartbeat(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the trainer as it was."""
        self._unobserve()
        self._unfollow()
