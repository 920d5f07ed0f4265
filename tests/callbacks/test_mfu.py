"""MFUMonitor against hand-computed values, with a clock that the test moves."""

import importlib.util
import sys
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from callbacks import mfu
from callbacks.grad_norm import GradNormMonitor
from callbacks.mfu import Ledger, MFUMonitor, count_matmul_params, peak_flops_of, resumed_ledger
from callbacks.token_weighted_loss import TokenWeightedLoss
from tests.distributed.toys import precision_arguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
]


class Clock:
    """Stands for the monitor's clock: it moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(mfu, "_clock", clock)
    return clock


class Batches(torch.utils.data.Dataset):
    """One dict per index: `sizes[i]` real tokens and as many ignored ones; reading it takes `wait_s`."""

    def __init__(self, sizes: list[int], clock: Clock | None = None, wait_s: float = 0.0) -> None:
        self.sizes, self.clock, self.wait_s = sizes, clock, wait_s

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if self.clock is not None:
            self.clock.now += self.wait_s
        n = self.sizes[i]
        ids = torch.arange(n)[None] % 10
        return {
            "inputs": torch.cat([ids, ids], 1),
            "targets": torch.cat([ids, torch.full_like(ids, -100)], 1),
        }


class Net(nn.Module):
    """A tied 10 x 4 embedding, one 4 x 4 block, one norm: 56 parameters multiply activations."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[0](self.emb(inputs))))


class TinyLM(pl.LightningModule):
    """Knows nothing of the callbacks. A micro-batch takes `seconds[batch_idx % len]` on the test's clock."""

    def __init__(self, clock: Clock, seconds: list[float], eval_s: float = 0.0, fail_at: int = -1) -> None:
        super().__init__()
        self.net = Net()
        self.clock, self.seconds, self.eval_s, self.fail_at = clock, seconds, eval_s, fail_at

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise RuntimeError("power cut")
        self.clock.now += self.seconds[batch_idx % len(self.seconds)]
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.clock.now += self.eval_s

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Overflows(TinyLM):
    """Its gradients are infinite in micro-batches `bad`."""

    bad: tuple[int, ...] = (1, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx in self.bad else loss


class ShardedTinyLM(Overflows):
    def configure_model(self) -> None:
        from lit_gpt_loop.strategies import shard_fsdp2

        if not isinstance(self.net.head.weight, torch.distributed.tensor.DTensor):
            shard_fsdp2(self.net, self.device_mesh)


class Points(pl.Callback):
    """Keeps what each update put on the trainer's bus."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.points):
            self.points.append(
                {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("perf/")}
            )


class SaveAt(pl.Callback):
    """Saves after update `step`, which takes `seconds` on the test's clock."""

    def __init__(self, clock: Clock, step: int, seconds: float, path: Any) -> None:
        self.clock, self.step, self.seconds, self.path = clock, step, seconds, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, *_: Any) -> None:
        self.clock.now += self.seconds


def loader(sizes: list[int], clock: Clock | None = None, wait_s: float = 0.0) -> DataLoader:
    return DataLoader(Batches(sizes, clock, wait_s), batch_size=None)


def trainer_for(root: Any, callbacks: list[pl.Callback], **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "use_distributed_sampler": False}
    return pl.Trainer(default_root_dir=root, callbacks=callbacks, **(quiet | {"devices": 1} | kwargs))


def fit(
    root: Any,
    clock: Clock,
    sizes: list[int],
    seconds: list[float],
    monitor: MFUMonitor | None = None,
    **kwargs: Any,
):
    points = Points()
    trainer = trainer_for(root, [monitor or MFUMonitor(peak_flops=1e11), points], **kwargs)
    trainer.fit(TinyLM(clock, seconds), loader(sizes))
    return points.points


# ---- tokens and time ----


@pytest.mark.case("C43")
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_c43_rate_does_not_depend_on_accumulation(tmp_path, clock, accumulate):
    points = fit(tmp_path, clock, [100] * 4, [0.5], accumulate_grad_batches=accumulate)
    assert len(points) == 4 // accumulate
    assert (
        points[-1]["perf/tokens_per_s"] == 200.0
    )  # 4 x 100 real tokens in 2 s; as many ignored ones are not counted
    assert points[-1]["perf/tokens_per_s_per_device"] == 200.0
    assert points[-1]["perf/step_s"] == 0.5 * accumulate


@pytest.mark.case("C43")
def test_c43_variable_sizes(tmp_path, clock):
    points = fit(tmp_path, clock, [100, 300], [0.5, 1.5])
    assert [p["perf/tokens_per_s"] for p in points] == [200.0, 200.0]
    points = fit(tmp_path, clock, [100, 300], [1.0, 1.0])
    assert [p["perf/tokens_per_s"] for p in points] == [100.0, 200.0]


@pytest.mark.case("C43")
def test_c43_evaluation_and_saving_are_excluded_and_shown(tmp_path, clock):
    points = Points()
    monitor = MFUMonitor(peak_flops=1e11)
    saver = SaveAt(clock, 1, 10.0, tmp_path / "a.ckpt")
    trainer = trainer_for(tmp_path, [saver, monitor, points], val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(TinyLM(clock, [0.5], eval_s=10.0), loader([100] * 4), loader([100]))
    assert [p["perf/tokens_per_s"] for p in points.points] == [200.0] * 4
    assert [p["perf/checkpoint_s"] for p in points.points] == [10.0, 0.0, 0.0, 0.0]
    assert [p["perf/eval_s"] for p in points.points] == [0.0, 0.0, 10.0, 0.0]
    assert monitor.ledger == Ledger(
        kept_s=2.0, eval_s=20.0, checkpoint_s=10.0
    )  # validated after update 4 as well
    assert points.points[-1]["perf/goodput"] == 2.0 / 22.0
    assert points.points[-1]["perf/goodput_eval"] == 10.0 / 22.0


def test_a_save_inside_validation_is_time_of_the_save(tmp_path, clock):
    class SaveAfterValidation(SaveAt):
        def on_train_batch_end(self, *_: Any) -> None:
            pass

        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(self.path)

    for order in (0, 1):  # the monitor's own on_validation_end before and after the save
        points, monitor = Points(), MFUMonitor(peak_flops=1e11)
        callbacks = [SaveAfterValidation(clock, 0, 7.0, tmp_path / "b.ckpt"), monitor]
        callbacks = callbacks[::-1] if order else callbacks
        trainer = trainer_for(tmp_path, [*callbacks, points], val_check_interval=1, num_sanity_val_steps=0)
        trainer.fit(TinyLM(clock, [0.5], eval_s=3.0), loader([100] * 2), loader([100]))
        assert points.points[-1]["perf/eval_s"] == 3.0
        assert points.points[-1]["perf/checkpoint_s"] == 7.0
        assert points.points[-1]["perf/step_s"] == 0.5


def test_time_of_other_callbacks_is_end_to_end_time_not_data_wait(tmp_path, clock):
    class Slow(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.now += 0.25

    for callbacks in ([MFUMonitor(peak_flops=1e11), Slow()], [Slow(), MFUMonitor(peak_flops=1e11)]):
        points = Points()
        trainer = trainer_for(tmp_path, [*callbacks, points])
        trainer.fit(TinyLM(clock, [0.5]), loader([100] * 3, clock, wait_s=0.25))
        last = points.points[-1]
        assert last["perf/data_wait_s"] == pytest.approx(0.25)
        assert last["perf/step_s"] == last["perf/data_wait_s"] + last["perf/compute_s"]
    assert last["perf/step_s"] == 1.0
    assert last["perf/tokens_per_s"] == 100.0


class SlowStart(DataLoader):
    """A loader whose iterator takes 5 s to start, as workers do."""

    def __init__(self, clock: Clock, sizes: list[int]) -> None:
        super().__init__(Batches(sizes), batch_size=None)
        self._clock = clock

    def __iter__(self):
        self._clock.now += 5.0
        return super().__iter__()


def test_starting_the_workers_of_an_evaluation_is_evaluation(tmp_path, clock):
    points = Points()
    trainer = trainer_for(
        tmp_path, [MFUMonitor(peak_flops=1e11), points], val_check_interval=1, num_sanity_val_steps=0
    )
    trainer.fit(TinyLM(clock, [0.5], eval_s=3.0), loader([100] * 2), SlowStart(clock, [100]))
    assert points.points[-1]["perf/eval_s"] == 8.0
    assert points.points[-1]["perf/tokens_per_s"] == 200.0


def test_starting_the_workers_of_a_later_epoch_is_data_wait(tmp_path, clock):
    points = Points()
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11, window=1), points], max_epochs=2)
    trainer.fit(TinyLM(clock, [0.5]), SlowStart(clock, [100, 100]))
    assert [p["perf/data_wait_s"] for p in points.points] == [0.0, 0.0, 5.0, 0.0]
    assert points.points[0]["perf/goodput_startup"] == pytest.approx(5.0 / 5.5)


def test_window_averages_the_last_updates_only(tmp_path, clock):
    points = fit(tmp_path, clock, [100] * 4, [8.0, 8.0, 1.0, 1.0], MFUMonitor(peak_flops=1e11, window=2))
    assert points[-1]["perf/tokens_per_s"] == 100.0
    assert points[-1]["perf/step_s"] == 1.0


@pytest.mark.case("W02")
def test_w02_tokens_of_an_update(tmp_path, clock):
    class Counts(TinyLM):
        def training_step(self, batch, batch_idx):
            self.clock.now += 0.25
            return self._loss(batch[0][:, :1])

        def _loss(self, inputs):
            return self.net(inputs).sum()

    ids = torch.zeros(16, 512, dtype=torch.long)
    points = Points()
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11), points], accumulate_grad_batches=4)
    trainer.fit(Counts(clock, [0.0]), DataLoader([(ids, ids)] * 8, batch_size=None))
    assert points.points[-1]["perf/tokens_per_s"] == 32_768  # of an update of one second


def test_profiler_is_left_as_it_was(tmp_path, clock):
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11)])
    trainer.fit(TinyLM(clock, [0.5]), loader([100]))
    before = trainer.profiler.start
    assert before.__func__ is type(trainer.profiler).start
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11)])
    with pytest.raises(RuntimeError, match="power cut"):
        trainer.fit(TinyLM(clock, [0.5], fail_at=0), loader([100]))
    assert trainer.profiler.stop.__func__ is type(trainer.profiler).stop


def test_stall_that_retention_reports_is_checkpoint_time(tmp_path, clock):
    class Reports(pl.Callback):
        """Stands for CheckpointRetention: 4 s in the save, 6 s hashing after it, all reported as blocked."""

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "c.ckpt")
                clock.now += 6.0
                trainer.callback_metrics.update(
                    {"ckpt/step": torch.tensor(1.0), "ckpt/blocked_s": torch.tensor(10.0)}
                )

        def on_save_checkpoint(self, *_: Any) -> None:
            clock.now += 4.0

    points = Points()
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11), Reports(), points])
    trainer.fit(TinyLM(clock, [0.5]), loader([100] * 3))
    assert [p["perf/checkpoint_s"] for p in points.points] == [0.0, 10.0, 0.0]
    assert points.points[-1]["perf/tokens_per_s"] == 200.0


# ---- FLOPs ----


@pytest.mark.case("C44")
def test_c44_six_percent(tmp_path, clock):
    points = fit(tmp_path, clock, [500] * 4, [0.5], MFUMonitor(num_params=10**6, peak_flops=1e11))
    assert points[-1]["perf/tokens_per_s"] == 1000.0
    assert points[-1]["perf/mfu"] == pytest.approx(0.06, rel=1e-12)
    assert "perf/hfu" not in points[-1]  # the module does not say what is recomputed


@pytest.mark.case("C44")
def test_c44_recomputation_moves_hfu_alone(tmp_path, clock):
    class Recomputes(TinyLM):
        num_matmul_params = 10**6
        recomputed_flops_per_token = 2e6  # one more forward

    points = Points()
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11), points])
    trainer.fit(Recomputes(clock, [0.5]), loader([500] * 2))
    assert points.points[-1]["perf/mfu"] == pytest.approx(0.06, rel=1e-12)
    assert points.points[-1]["perf/hfu"] == pytest.approx(0.08, rel=1e-12)


def test_hfu_is_mfu_for_a_module_that_says_that_nothing_is_recomputed(tmp_path, clock):
    module, points = TinyLM(clock, [0.5]), Points()
    module.recomputed_flops_per_token = 0.0
    trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11), points]).fit(module, loader([500] * 2))
    assert points.points[-1]["perf/hfu"] == points.points[-1]["perf/mfu"] > 0


@pytest.mark.case("C44")
def test_c44_tied_embedding_counts_once():
    tied = nn.ModuleDict({"emb": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    tied["head"].weight = tied["emb"].weight
    assert sum(v.numel() for v in tied.state_dict().values()) == 80
    assert count_matmul_params(tied) == 40
    untied = nn.ModuleDict({"emb": nn.Embedding(10, 4), "head": nn.Linear(4, 10)})
    assert count_matmul_params(untied) == 40  # the look-up multiplies nothing, the bias is not a matrix
    assert count_matmul_params(Net()) == 56


@pytest.mark.parametrize(
    ("kwargs", "attributes", "flops"),
    [
        ({}, {}, 6 * 56),
        ({"attention_flops_per_token": 64.0}, {}, 6 * 56 + 64),
        ({"flops_per_token": 1000.0}, {"num_matmul_params": 7}, 1000),
        ({"num_params": 10}, {"num_matmul_params": 7, "flops_per_token": 5.0}, 60),
        ({}, {"num_matmul_params": 7}, 42),
        ({}, {"num_matmul_params": 7, "flops_per_token": 50.0}, 50),
    ],
)
def test_flops_per_token_by_argument_attribute_or_count(tmp_path, clock, kwargs, attributes, flops):
    module, points = TinyLM(clock, [1.0]), Points()
    for k, v in attributes.items():
        setattr(module, k, v)
    trainer_for(tmp_path, [MFUMonitor(peak_flops=1e6, **kwargs), points]).fit(module, loader([100]))
    assert points.points[-1]["perf/mfu"] == pytest.approx(flops * 100 / 1e6, rel=1e-12)


def test_nothing_to_count_names_both_remedies(tmp_path, clock):
    module = TinyLM(clock, [1.0])
    module.net = nn.Embedding(10, 10)
    with pytest.raises(ValueError, match=r"num_params=N\).*num_matmul_params"):
        trainer_for(tmp_path, [MFUMonitor(peak_flops=1e6)]).fit(module, loader([100]))


# ---- peaks ----


@pytest.mark.case("C43")
@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA B200", "bf16", 2.25e15),
        ("NVIDIA GB200", "bf16", 2.5e15),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("NVIDIA A10", "fp16", 125e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-32GB", "fp16", 112e12),
        ("Tesla V100S-PCIE-32GB", "fp16", 130e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        # never a default, never another chip's
        ("Tesla T4", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA H20", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_c43_peaks_are_dense_and_of_that_chip(name, dtype, peak):
    assert peak_flops_of(name, dtype) == peak


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("16-mixed", "fp16"),
        ("32-true", "fp32"),
        ("64-true", "fp64"),
    ],
)
def test_dtype_follows_the_precision(precision, dtype):
    assert mfu.matmul_dtype(precision, "cpu") == dtype
    assert mfu.matmul_dtype("transformer-engine", "cpu") is None


def test_tf32_counts_as_tf32_where_it_is_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert mfu.matmul_dtype("32-true", "cuda") == "fp32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert mfu.matmul_dtype("32-true", "cuda") == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert mfu.matmul_dtype("32-true", "cuda") == "fp32"


@pytest.mark.case("C43")
def test_c43_unknown_device_leaves_mfu_out_and_warns_once(tmp_path, clock):
    monitor, points = MFUMonitor(), Points()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer_for(tmp_path, [monitor, points]).fit(TinyLM(clock, [1.0]), loader([100]))
    assert [str(w.message) for w in caught if "peak_flops=" in str(w.message)] != []
    assert sum("peak_flops=" in str(w.message) for w in caught) == 1
    assert "perf/mfu" not in points.points[-1]
    assert "perf/hfu" not in points.points[-1]
    assert points.points[-1]["perf/tokens_per_s"] == 100.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_measured_peak_is_a_rate_that_a_matmul_reaches(dtype):
    flops = mfu.measure_matmul_flops(torch.device("cpu"), dtype, budget_s=0.05)
    assert 1e8 < flops < 1e14


def test_measure_logs_mfu_on_cpu(tmp_path, clock, monkeypatch):
    asked = []
    monkeypatch.setattr(
        mfu, "measure_matmul_flops", lambda device, dtype: asked.append((device.type, dtype)) or 1e6
    )
    points = fit(tmp_path, clock, [100], [1.0], MFUMonitor(peak_flops="measure"), precision="bf16-mixed")
    assert asked == [("cpu", "bf16")]
    assert points[-1]["perf/mfu"] == pytest.approx(6 * 56 * 100 / 1e6)


def test_peak_memory_is_that_of_the_process(tmp_path, clock):
    point = fit(tmp_path, clock, [100], [1.0])[-1]
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert point["perf/peak_memory_gib"] * 2**20 == pytest.approx(peak_kb, rel=0.05)


# ---- bad input ----


@pytest.mark.parametrize(
    "kwargs",
    [
        {"peak_flops": "guess"},
        {"peak_flops": 0.0},
        {"num_params": -1},
        {"window": 0},
        {"flops_per_token": 1.0, "num_params": 1},
        {"flops_per_token": 1.0, "attention_flops_per_token": 1.0},
    ],
)
def test_bad_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        MFUMonitor(**kwargs)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(2, 3)},
        torch.zeros(2, 3),
        (torch.zeros(2, 3), torch.zeros(2, 1)),
        [torch.zeros(2)] * 3,
    ],
)
def test_batch_not_understood_shows_its_structure(batch):
    with pytest.raises(ValueError, match=r"Tensor\(2.*count_tokens="):
        mfu.count_label_tokens(batch)


def test_counting_function_of_the_user(tmp_path, clock):
    monitor = MFUMonitor(peak_flops=1e11, count_tokens=lambda batch: 7)
    assert fit(tmp_path, clock, [100] * 2, [1.0], monitor)[-1]["perf/tokens_per_s"] == 7.0


class CountsItself(TinyLM):
    """Returns 7 tokens per micro-batch, whatever is in it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": super().training_step(batch, batch_idx), "num_tokens": torch.tensor(7)}


class PadsWithZero(TinyLM):
    """Trains on targets that are not 0."""

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["inputs"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=0)


def test_tokens_that_the_module_returns_are_counted(tmp_path, clock):
    points = Points()
    trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11), points], accumulate_grad_batches=2)
    trainer.fit(CountsItself(clock, [0.5]), loader([100] * 4))
    assert [p["perf/tokens_per_s"] for p in points.points] == [14.0, 14.0]


@pytest.mark.parametrize("is_monitor_first", [True, False])
def test_tokens_are_those_of_the_weighted_loss(tmp_path, clock, is_monitor_first):
    ids = torch.arange(100)[None] % 10  # 10 of 100 are 0
    points, callbacks = Points(), [MFUMonitor(peak_flops=1e11), TokenWeightedLoss(ignore_index=0)]
    callbacks = callbacks if is_monitor_first else callbacks[::-1]
    trainer = trainer_for(tmp_path, [*callbacks, points], accumulate_grad_batches=2)
    trainer.fit(
        PadsWithZero(clock, [0.5]), DataLoader([{"inputs": ids, "targets": ids}] * 4, batch_size=None)
    )
    assert float(trainer.callback_metrics["train/tokens"]) == 180
    assert [p["perf/tokens_per_s"] for p in points.points] == [180.0, 180.0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_only_the_weighted_loss_can_count(tmp_path, clock, accumulate):
    class Triples(TinyLM):
        def _loss(self, batch: Any) -> Tensor:
            return super()._loss({"inputs": batch[0], "targets": batch[1]})

    ids = torch.arange(100)[None] % 10
    data = DataLoader([(ids, ids, ids)] * 4, batch_size=None)
    points = Points()
    callbacks = [MFUMonitor(peak_flops=1e11), TokenWeightedLoss(count_tokens=lambda batch: 5), points]
    trainer_for(tmp_path, callbacks, accumulate_grad_batches=accumulate).fit(Triples(clock, [0.5]), data)
    assert points.points[-1]["perf/tokens_per_s"] == 10.0
    with pytest.raises(ValueError, match="cannot tell how many tokens"):
        trainer = trainer_for(tmp_path, [MFUMonitor(peak_flops=1e11)], accumulate_grad_batches=accumulate)
        trainer.fit(Triples(clock, [0.5]), data)


def test_counting_function_goes_before_all_others(tmp_path, clock):
    points = Points()
    callbacks = [MFUMonitor(peak_flops=1e11, count_tokens=lambda batch: 3), TokenWeightedLoss(), points]
    trainer_for(tmp_path, callbacks).fit(CountsItself(clock, [1.0]), loader([100] * 2))
    assert points.points[-1]["perf/tokens_per_s"] == 3.0


def test_tokens_that_nobody_renews_are_not_read(tmp_path, clock):
    class Stale(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.callback_metrics["train/tokens"] = torch.tensor(5.0)

    points = Points()
    trainer = trainer_for(tmp_path, [Stale(), MFUMonitor(peak_flops=1e11), points])
    trainer.fit(TinyLM(clock, [1.0]), loader([100] * 2))
    assert [p["perf/tokens_per_s"] for p in points.points] == [100.0, 100.0]


def test_a_mapping_is_counted_and_described_as_a_dict_is():
    labels = torch.tensor([[1, -100, 2]])
    assert int(mfu.count_label_tokens(UserDict(labels=labels))) == 2  # as transformers' BatchEncoding
    with pytest.raises(ValueError, match=r"'x': Tensor\(1, 3\)"):
        mfu.count_label_tokens(UserDict(x=labels))


def test_without_the_resource_module_peak_memory_is_left_out(tmp_path, clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows has none
    spec = importlib.util.spec_from_file_location("mfu_on_windows", mfu.__file__)
    monkeypatch.setitem(sys.modules, spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules[spec.name])
    point = fit(tmp_path, clock, [100], [1.0])[-1]
    assert "perf/peak_memory_gib" not in point
    assert "perf/tokens_per_s" in point


# ---- the ledger ----


def test_resumed_ledger_moves_unsaved_work_to_lost():
    saved = Ledger(startup_s=5.0, kept_s=100.0, data_s=1.0, checkpoint_s=4.0)
    last = Ledger(startup_s=5.0, kept_s=130.0, data_s=2.0, checkpoint_s=6.0, eval_s=3.0)
    resumed = resumed_ledger(saved, last, downtime_s=60.0)
    assert resumed == Ledger(5.0, 100.0, 2.0, 3.0, 6.0, lost_s=30.0, downtime_s=60.0)
    assert resumed.wall_s == last.wall_s
    assert resumed_ledger(saved, None) == saved
    assert resumed_ledger(saved, Ledger(kept_s=50.0)) == saved  # a heartbeat from before the save


def test_goodput_over_a_crash_and_a_restart(tmp_path, clock):
    def run(fail_at: int, ckpt_path: str | None) -> tuple[MFUMonitor, list[dict[str, float]]]:
        monitor, points = MFUMonitor(peak_flops=1e11), Points()
        clock.now += 10.0  # start-up
        saver = SaveAt(clock, 4, 2.0, tmp_path / "last.ckpt")
        trainer = trainer_for(tmp_path, [monitor, points, saver])
        module = TinyLM(clock, [1.0], fail_at=fail_at)
        if fail_at >= 0:
            with pytest.raises(RuntimeError, match="power cut"):
                trainer.fit(module, loader([100] * 10), ckpt_path=ckpt_path)
        else:
            trainer.fit(module, loader([100] * 10), ckpt_path=ckpt_path)
        return monitor, points.points

    first, _ = run(fail_at=7, ckpt_path=None)
    assert first.ledger == Ledger(startup_s=10.0, kept_s=7.0, checkpoint_s=2.0)
    second, points = run(fail_at=-1, ckpt_path=str(tmp_path / "last.ckpt"))
    # updates 5, 6, 7 were done twice; both starts and the save took their time
    assert second.ledger.kept_s == 10.0
    assert second.ledger.lost_s == 3.0
    assert second.ledger.startup_s == 20.0
    assert second.ledger.checkpoint_s == 2.0
    assert second.ledger.wall_s == clock.now - 1000.0
    assert points[-1]["perf/goodput"] == 10.0 / 35.0
    assert points[-1]["perf/goodput_lost"] == 3.0 / 35.0
    shares = [v for k, v in points[-1].items() if k.startswith("perf/goodput")]
    assert sum(shares) == pytest.approx(1.0)


def test_another_run_in_the_same_folder_owes_nothing(tmp_path, clock):
    fit(tmp_path, clock, [100] * 3, [1.0])
    monitor = MFUMonitor(peak_flops=1e11)
    fit(tmp_path, clock, [100] * 2, [1.0], monitor)
    assert monitor.ledger.lost_s == 0.0
    assert monitor.ledger.kept_s == 2.0


@pytest.mark.filterwarnings("ignore:Update . is skipped")
@pytest.mark.parametrize("is_monitor_first", [True, False])
def test_skipped_updates_are_not_goodput_in_any_order_of_the_callbacks(tmp_path, clock, is_monitor_first):
    monitor, norms, points = MFUMonitor(peak_flops=1e11), GradNormMonitor(), Points()
    callbacks = [monitor, norms] if is_monitor_first else [norms, monitor]
    trainer = trainer_for(tmp_path, [*callbacks, points])
    trainer.fit(Overflows(clock, [1.0, 2.0, 4.0, 8.0]), loader([100] * 4))
    assert norms.counts.skipped == 2
    # each skip in its own update, that of the last one too
    assert [p["perf/goodput_lost"] for p in points.points] == [0.0, 2 / 3, 2 / 7, 10 / 15]
    assert monitor.ledger == Ledger(kept_s=5.0, lost_s=10.0)


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_the_scaler_skips_is_not_goodput(tmp_path, clock, fused):
    class Fp16(Overflows):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, fused=fused)

    monitor = MFUMonitor(peak_flops=1e11)
    trainer = trainer_for(tmp_path, [monitor], **precision_arguments("16-mixed", None))
    trainer.fit(Fp16(clock, [1.0, 2.0, 4.0, 8.0]), loader([100] * 4))
    assert monitor.ledger == Ledger(kept_s=5.0, lost_s=10.0)
    assert not trainer.optimizers[0]._optimizer_step_post_hooks  # left as it was


@pytest.mark.filterwarnings("ignore:Update . holds no token")
def test_an_update_without_a_token_is_not_goodput(tmp_path, clock):
    monitor = MFUMonitor(peak_flops=1e11)
    trainer = trainer_for(tmp_path, [monitor, TokenWeightedLoss()])
    trainer.fit(TinyLM(clock, [1.0, 2.0]), loader([100, 0]))
    assert monitor.ledger == Ledger(kept_s=1.0, lost_s=2.0)


def test_state_is_plain(tmp_path, clock):
    monitor = MFUMonitor(peak_flops=1e11)
    fit(tmp_path, clock, [100], [1.0], monitor)
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["ledger"]["kept_s"] == 1.0


# ---- several ranks ----


def rank_job(
    kind: str, root: str, seconds: list[float], *, is_weighted: bool = False, bad_rank: int | None = None
) -> list[dict[str, float]]:
    """Fit on this rank with `seconds[rank]` per update of 100 tokens; return the points that it saw.

    The second and the fourth update overflow on `bad_rank`.
    """
    from lit_gpt_loop import strategies

    rank = torch.distributed.get_rank()
    clock, kept = Clock(), mfu._clock
    mfu._clock = clock
    try:
        strategy = {"ddp": strategies.DDP, "fsdp": strategies.FSDP, "fsdp2": strategies.FSDP2}[kind]()
        module = (ShardedTinyLM if kind == "fsdp2" else Overflows)(clock, [seconds[rank]])
        module.bad = (1, 3) if rank == bad_rank else ()
        points = Points()
        others = [TokenWeightedLoss()] * is_weighted + [GradNormMonitor()] * (bad_rank is not None)
        trainer = trainer_for(
            root, [MFUMonitor(peak_flops=1e6), *others, points], strategy=strategy, devices=2
        )
        trainer.fit(module, loader([100] * 4))
        return points.points
    finally:
        mfu._clock = kept


@pytest.mark.case("C43")
@pytest.mark.case("C44")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_c43_c44_two_ranks(ranks2, tmp_path, kind):
    first, second = ranks2.run(rank_job, kind, str(tmp_path), [0.5, 0.5])
    assert first[-1]["perf/tokens_per_s"] == 400.0
    assert first[-1]["perf/tokens_per_s_per_device"] == 200.0
    # N unsharded: 56 on every strategy; twice the tokens over twice the peak
    assert first[-1]["perf/mfu"] == pytest.approx(6 * 56 * 200 / 1e6, rel=1e-12)
    assert first == second


def test_slowest_rank_sets_the_pace_on_all(ranks2, tmp_path):
    first, second = ranks2.run(rank_job, "ddp", str(tmp_path), [0.5, 2.0])
    assert first == second
    assert first[-1]["perf/step_s"] == 2.0
    assert first[-1]["perf/tokens_per_s"] == 100.0


def test_tokens_of_the_weighted_loss_are_those_of_all_ranks(ranks2, tmp_path):
    first, second = ranks2.run(rank_job, "ddp", str(tmp_path), [0.5, 0.5], is_weighted=True)
    assert first == second
    assert first[-1]["perf/tokens_per_s"] == 400.0


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_an_update_skipped_on_two_ranks_is_lost_on_both(ranks2, tmp_path, kind):
    first, second = ranks2.run(rank_job, kind, str(tmp_path), [0.5, 0.5], bad_rank=1)
    assert first == second
    assert [p["perf/goodput_lost"] for p in first] == [0.0, 1 / 2, 1 / 3, 1 / 2]
