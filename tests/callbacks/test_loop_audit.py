"""LoopAudit: each fault is planted in a small module or loop and must be named, and nothing else with it."""

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from callbacks import loop_audit
from callbacks.grad_norm import GradNormMonitor
from callbacks.loop_audit import CHECKS, LoopAudit, LoopViolation, Seen, digest, hash_rows, judge_clipping
from callbacks.token_weighted_loss import TokenWeightedLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Found .* module.*in eval mode"),
]


def rows(num: int, length: int = 6) -> TensorDataset:
    """`num` different rows of token ids, and the same as targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (num, length), generator=generator)
    x[:, 0], x[:, 1], x[:, 2] = torch.arange(num) % 11, torch.arange(num) // 11 % 11, torch.arange(num) // 121
    return TensorDataset(x, x)


class Tiny(pl.LightningModule):
    """A small token model that does nothing wrong; tests plant faults in subclasses or through `plant`."""

    def __init__(self, plant: Callable[["Tiny", int], Any] | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.register_buffer("count", torch.zeros(3))
        self.plant = plant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[0](self.emb(x))))

    def loss(self, batch: Any) -> Tensor:
        x, y = (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.plant is not None:
            self.plant(self, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(num: int = 8, batch_size: int = 1, **kwargs: Any) -> DataLoader:
    return DataLoader(rows(num), batch_size=batch_size, **kwargs)


def val_loader() -> DataLoader:
    return DataLoader(rows(4), batch_size=2, generator=torch.Generator())


def trainer_for(root: Any, callbacks: list[pl.Callback], **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(default_root_dir=root, callbacks=callbacks, **(quiet | kwargs))


def audit(
    root: Any, module: pl.LightningModule, train: Any = None, val: Any = None, **kwargs: Any
) -> LoopAudit:
    """Fit with an audit that keeps all violations and goes on."""
    callback = kwargs.pop("audit", None) or LoopAudit(
        on_violation="mark", every_n_steps=kwargs.pop("every", 1)
    )
    others, ckpt_path = kwargs.pop("others", []), kwargs.pop("ckpt_path", None)
    datamodule = kwargs.pop("datamodule", None)
    trainer = trainer_for(root, [callback, *others], **kwargs)
    if datamodule is not None:
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    else:
        trainer.fit(module, train if train is not None else loader(), val, ckpt_path=ckpt_path)
    return callback


def names(callback: LoopAudit) -> set[str]:
    return {v.check for v in callback.violations}


# ---- the planted faults ----


def test_gradients_not_zeroed(tmp_path):
    class Fault(Tiny):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    found = audit(tmp_path, Fault())
    assert names(found) == {"gradients_empty"}
    assert (found.violations[0].update, found.violations[0].micro_batch) == (2, 1)
    assert "emb.weight" in found.violations[0].found


def test_parameters_written_inside_a_window(tmp_path):
    def plant(module: Tiny, batch_idx: int) -> None:
        if batch_idx == 3:
            module.head.weight.data[0, 0] = torch.nextafter(module.head.weight[0, 0], torch.tensor(1e9))

    found = audit(tmp_path, Tiny(plant), accumulate_grad_batches=2)
    assert names(found) == {"parameters_constant"}
    assert found.violations[0].update == 2
    assert "head.weight" in found.violations[0].found


def test_two_steps_in_a_window(tmp_path):
    class Fault(Tiny):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            optimizer.optimizer.step()

    found = audit(tmp_path, Fault())
    assert names(found) == {"one_step_per_window"}
    assert (found.violations[0].expected, found.violations[0].found) == (
        "one optimizer step in the window",
        "2",
    )


def test_no_step_in_a_window(tmp_path):
    class Fault(Tiny):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()

    assert names(audit(tmp_path, Fault())) == {"one_step_per_window"}


def test_step_before_the_window_ends(tmp_path):
    def plant(module: Tiny, batch_idx: int) -> None:
        if batch_idx == 1:
            module.trainer.optimizers[0].step()

    found = audit(tmp_path, Tiny(plant), accumulate_grad_batches=4)
    assert names(found) == {"one_step_per_window", "parameters_constant"}
    early = next(v for v in found.violations if v.check == "one_step_per_window")
    assert (early.update, early.micro_batch) == (1, 2)


class Scheduled(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_schedule_stepped_per_micro_batch(tmp_path):
    def plant(module: Tiny, batch_idx: int) -> None:
        module.trainer.lr_scheduler_configs[0].scheduler.step()

    found = audit(tmp_path, Scheduled(plant), accumulate_grad_batches=4)
    assert names(found) == {"schedule_per_update"}
    assert found.violations[0].found == "by 5"
    assert names(audit(tmp_path, Scheduled(), accumulate_grad_batches=4)) == set()


@pytest.mark.case("C15")
def test_c15_schedule_advances_on_an_update_that_the_scaler_skipped(tmp_path):
    class Overflows(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (float("inf") if batch_idx < 2 else 1.0)

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    found = audit(tmp_path, Overflows(), plugins=[plugin])
    assert names(found) == {"schedule_per_update"}
    assert [v.update for v in found.violations] == [1, 2]
    assert "skipped" in found.violations[0].expected


@pytest.mark.case("C15")
def test_c15_schedule_advances_on_an_update_without_gradients(tmp_path):
    class Skips(pl.Callback):
        def on_before_optimizer_step(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any
        ) -> None:
            if trainer.global_step == 2:
                for p in pl_module.parameters():
                    p.grad = None

    found = audit(tmp_path, Scheduled(), others=[Skips()])
    assert names(found) == {"schedule_per_update"}
    assert [v.update for v in found.violations] == [3]


def test_counter_that_advances_on_a_skipped_update(tmp_path):
    class Counts(pl.Callback):
        def on_before_optimizer_step(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any
        ) -> None:
            if trainer.global_step == 2:
                for p in pl_module.parameters():
                    p.grad = None

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.callback_metrics["progress/update"] = torch.tensor(trainer.global_step)

    found = audit(tmp_path, Tiny(), others=[Counts()])
    assert [(v.check, v.update) for v in found.violations] == [("schedule_per_update", 3)]
    assert "progress/update" in found.violations[0].expected


@pytest.mark.case("C04")
def test_c04_short_last_window_is_divided_by_the_full_count(tmp_path):
    found = audit(tmp_path, Tiny(), loader(6), accumulate_grad_batches=4)
    assert names(found) == {"window_weights"}
    v = found.violations[0]
    assert (v.update, v.micro_batch, v.found) == (2, 2, "0.5")


@pytest.mark.case("C04")
@pytest.mark.parametrize("clip", [None, 0.01])
def test_c04_token_weighting_mends_it(tmp_path, clip):
    others: list[pl.Callback] = [TokenWeightedLoss(), GradNormMonitor(clip_norm=clip)]
    callback = LoopAudit(on_violation="mark")
    for order in ([callback, *others], [*others, callback]):
        trainer_for(tmp_path, order, accumulate_grad_batches=4).fit(Tiny(), loader(6))
    assert callback.violations == []
    # a clipped short window cannot be judged without the norm before clipping, and is not
    assert (
        names(audit(tmp_path, Tiny(), loader(6), accumulate_grad_batches=4, gradient_clip_val=1e-4)) == set()
    )


class Logs(pl.Callback):
    """Logs what it is told as the tokens of each update."""

    def __init__(self, tokens: float, loss: float = 2.0, loss_sum: float = 12.0) -> None:
        self.metrics = {"train/tokens": tokens, "train/loss": loss, "train/loss_sum": loss_sum}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in self.metrics.items()})


def test_logged_denominator_is_not_the_tokens(tmp_path):
    found = audit(tmp_path, Tiny(), others=[Logs(7.0)])
    assert names(found) == {"token_denominator"}
    assert "train/tokens = 6" in found.violations[0].expected
    found = audit(tmp_path, Tiny(), others=[Logs(6.0, loss=3.0)])
    assert names(found) == {"token_denominator"}
    assert "train/loss_sum / tokens = 2" in found.violations[0].expected
    assert names(audit(tmp_path, Tiny(), others=[Logs(6.0)])) == set()


class SaveAt(pl.Callback):
    def __init__(self, step: int, path: Any) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.case("C17")
@pytest.mark.parametrize("saved_at", [1, 3, 9])
def test_c17_plain_loader_resumed_inside_an_epoch(tmp_path, saved_at):
    path = tmp_path / "mid.ckpt"
    assert names(audit(tmp_path, Tiny(), loader(10), others=[SaveAt(saved_at, path)])) == set()
    found = audit(tmp_path, Tiny(), loader(10), ckpt_path=str(path))
    assert names(found) == {"samples_once"}
    assert found.violations[0].update == saved_at + 1


class Resumable(DataLoader):
    """A loader with state: goes on where it was."""

    start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= start:
                self.position = i + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def test_epoch_that_ends_early(tmp_path):
    class EndsEarly(Resumable):
        def __iter__(self):
            return iter(list(super().__iter__())[:5])

    found = audit(tmp_path, Tiny(), EndsEarly(rows(8), batch_size=1))
    assert [(v.check, v.found) for v in found.violations] == [("samples_once", "5, 3 left out")]
    assert names(audit(tmp_path, Tiny(), loader(8), max_epochs=-1, max_steps=5)) == set()


@pytest.mark.case("C17")
def test_c17_resumable_loader_is_clean(tmp_path):
    path = tmp_path / "mid.ckpt"
    audit(tmp_path, Tiny(), Resumable(rows(10), batch_size=1), others=[SaveAt(3, path)])
    found = audit(tmp_path, Tiny(), Resumable(rows(10), batch_size=1), ckpt_path=str(path), max_epochs=2)
    assert found.violations == []
    assert found._num_samples == 10


def test_repeated_sample_by_content(tmp_path):
    class Repeats(SequentialSampler):
        def __iter__(self):
            return iter([0, 1, 2, 1, 4, 5, 6, 7])

    found = audit(tmp_path, Tiny(), DataLoader(rows(8), sampler=Repeats(rows(8))))
    assert names(found) == {"samples_once"}
    assert found.violations[0].update == 4


def test_rows_that_are_equal_in_the_data_are_no_fault(tmp_path):
    data = rows(4)
    double = TensorDataset(*(torch.cat([t, t]) for t in data.tensors))
    assert names(audit(tmp_path, Tiny(), DataLoader(double))) == set()
    constant = TensorDataset(torch.ones(8, 6, dtype=torch.long), torch.ones(8, 6, dtype=torch.long))
    assert names(audit(tmp_path, Tiny(), DataLoader(constant))) == set()


def test_sample_left_out(tmp_path):
    class LeavesOut(SequentialSampler):
        def __iter__(self):
            return iter(range(7))

        def __len__(self) -> int:
            return 7

    found = audit(tmp_path, Tiny(), DataLoader(rows(8), sampler=LeavesOut(rows(8))))
    assert names(found) == {"samples_once"}
    assert found.violations[0].found == "7, 1 left out"
    assert names(audit(tmp_path, Tiny(), loader(7, batch_size=2, drop_last=True))) == set()


def test_drawing_with_replacement_is_no_fault(tmp_path):
    sampler = torch.utils.data.RandomSampler(rows(8), replacement=True, num_samples=16)
    assert names(audit(tmp_path, Tiny(), DataLoader(rows(8), sampler=sampler))) == set()


class IdModule(pl.LightningDataModule):
    """An endless stream of blocks with ids, as `ids` says."""

    samples_per_epoch = 4

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids, self.position = ids, 0

    def train_dataloader(self) -> Any:
        data = rows(4).tensors[0]
        tokens = [data[i % 4][None] for i in self.ids]
        batches = [
            {"inputs": t, "targets": t, "sample_ids": torch.tensor([i])}
            for t, i in zip(tokens, self.ids, strict=True)
        ]
        return DataLoader(batches, batch_size=None)

    def val_dataloader(self) -> Any:
        return val_loader()

    def state_dict(self) -> dict[str, int]:
        return {"samples_consumed": self.position}


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([0, 1, 2, 3, 6, 5, 4, 7, 8], None),
        ([0, -1, 1, 2, 3, -1, 4], None),
        ([0, 1, 2, 2, 4], "sample id 2 again"),
        ([0, 1, 3, 4, 5, 6, 7, 8], "3, 1 left out"),
        ([0, 1, 2, 3, 4, 5, 7, 8], "3, 1 left out"),
    ],
)
def test_samples_by_id_over_epochs_of_an_endless_stream(tmp_path, ids, found):
    callback = audit(tmp_path, Tiny(), datamodule=IdModule(ids), limit_val_batches=0)
    assert [v.found for v in callback.violations if v.check == "samples_once"][:1] == (
        [] if found is None else [found]
    )


def test_clipping_per_parameter(tmp_path):
    class PerParameter(Tiny):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **_: Any) -> None:
            for p in self.parameters():
                torch.nn.utils.clip_grad_norm_([p], gradient_clip_val / 10)

    found = audit(tmp_path, PerParameter(), gradient_clip_val=0.1)
    assert names(found) == {"clipping_global"}
    assert "factors from" in found.violations[0].found
    assert names(audit(tmp_path, Tiny(), gradient_clip_val=0.1)) == set()
    assert names(audit(tmp_path, Tiny(), gradient_clip_val=100.0)) == set()


def test_clipping_that_does_not_happen(tmp_path):
    class Forgets(Tiny):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            pass

    found = audit(tmp_path, Forgets(), gradient_clip_val=0.01)
    assert names(found) == {"clipping_global"}
    assert "at most 0.01" in found.violations[0].expected


@pytest.mark.parametrize(
    ("before", "after", "logged", "ok"),
    [
        ([9.0, 16.0], [0.36, 0.64], 5.0, True),
        ([9.0, 16.0], [0.36, 0.64], None, True),
        ([36.0, 64.0], [0.36, 0.64], 5.0, True),  # rescaled by token weighting after it was measured
        ([9.0, 16.0], [0.5, 0.5], None, False),  # each parameter for itself
        ([0.09, 0.16], [0.36, 0.64], 0.5, False),  # blown up to the threshold
        ([0.09, 0.16], [0.09, 0.16], 0.5, True),
        ([9.0, 16.0], [0.72, 1.28], None, False),  # sqrt(2) too much: each of two shards for itself
    ],
)
def test_judge_clipping(before, after, logged, ok):
    verdict = judge_clipping(torch.tensor(before), torch.tensor(after), 1.0, logged)
    assert (verdict is None) == ok


def test_loss_and_gradient_not_finite(tmp_path):
    class Explodes(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (float("nan") if batch_idx == 3 else 1.0)

    found = audit(tmp_path, Explodes(), accumulate_grad_batches=2)
    assert names(found) == {"finite"}
    first = [v for v in found.violations if v.update == 2]
    assert [(v.micro_batch, v.expected) for v in first] == [
        (2, "a finite loss"),
        (0, "finite gradients in an update that is applied"),
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m.head.weight.data.mul_(1.0001), "parameter head.weight"),
        (lambda m: m.count.add_(1), "buffer count"),
        (
            lambda m: m.trainer.optimizers[0].state[m.head.weight]["momentum_buffer"].zero_(),
            "optimizer state of head.weight",
        ),
        (lambda m: m.trainer.optimizers[0].param_groups[0].update(lr=1.0), "optimizer settings"),
        (lambda m: torch.rand(1), "RNG of torch CPU"),
        (lambda m: random.random(), "RNG of Python"),
        (lambda m: np.random.rand(), "RNG of NumPy"),
        (lambda m: setattr(m.trainer.datamodule, "position", 5), "data position"),
    ],
)
def test_evaluation_that_changes_something(tmp_path, change, what):
    class Fault(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                change(self)

    kwargs: dict[str, Any] = {"val_check_interval": 2, "limit_train_batches": 3}
    found = audit(tmp_path, Fault(), datamodule=IdModule([0, 1, 2, 3]), **kwargs)
    assert names(found) == {"evaluation_changes_nothing"}
    assert what in found.violations[0].found
    assert found.violations[0].update == 2


def test_validation_loader_that_seeds_from_the_global_generator(tmp_path):
    found = audit(tmp_path, Tiny(), val=DataLoader(rows(4)), val_check_interval=4)
    assert names(found) == {"evaluation_changes_nothing"}
    assert "generator=torch.Generator()" in found.violations[0].found
    assert names(audit(tmp_path, Tiny(), val=val_loader(), val_check_interval=4)) == set()


def test_sanity_check_is_an_evaluation(tmp_path):
    class Fault(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.count += 1

        def on_validation_model_train(self) -> None:
            pass

    found = audit(tmp_path, Fault(), val=val_loader(), num_sanity_val_steps=1, limit_train_batches=1)
    assert [(v.check, v.update) for v in found.violations][:2] == [
        ("evaluation_changes_nothing", 0),
        ("module_modes", 0),
    ]
    clean = audit(tmp_path, Tiny(), val=val_loader(), num_sanity_val_steps=1)
    assert clean.violations == []


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_sixteen_bits_with_clipping(tmp_path, precision):
    assert (
        names(audit(tmp_path, Tiny(), precision=precision, gradient_clip_val=0.1, accumulate_grad_batches=2))
        == set()
    )


def test_modes_after_validation(tmp_path):
    class Frozen(Tiny):
        def on_train_start(self) -> None:
            self.blocks[0].eval()

    class ForgetsModes(Frozen):
        def on_validation_model_train(self) -> None:
            self.train()

    found = audit(tmp_path, ForgetsModes(), val=val_loader(), val_check_interval=4)
    assert names(found) == {"module_modes"}
    assert "blocks.0 (now train)" in found.violations[0].found
    assert names(audit(tmp_path, Frozen(), val=val_loader(), val_check_interval=4)) == set()


def test_parameter_in_no_optimizer(tmp_path):
    class Misses(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for n, p in self.named_parameters() if n != "head.bias"], lr=0.1)

    found = audit(tmp_path, Misses())
    assert [(v.check, v.found) for v in found.violations] == [("optimizer_coverage", "in none: head.bias")]


def test_parameter_in_two_optimizers(tmp_path):
    class Twice(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.parameters(), lr=0.1),
                torch.optim.SGD(self.head.parameters(), lr=0.1),
            ]

    found = audit(tmp_path, Twice())
    assert names(found) == {"optimizer_coverage"}
    assert "head.weight (optimizer 0 group 0, optimizer 1 group 0)" in found.violations[0].found


def test_weight_decay_on_norms_and_biases(tmp_path):
    class DecaysAll(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    found = audit(tmp_path, DecaysAll())
    assert [v.check for v in found.violations] == ["weight_decay"]
    assert (
        found.violations[0].found
        == "blocks.0.0.bias (decay 0.01), norm.weight (decay 0.01), norm.bias (decay 0.01) and 1 more"
    )


class RMSNorm(nn.Module):
    pass


class NormalizedLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("module", "name", "verdict"),
    [
        (nn.Linear(1, 1), "weight", False),
        (nn.Linear(1, 1), "bias", True),
        (nn.MultiheadAttention(1, 1), "in_proj_bias", True),
        (nn.LSTM(1, 1), "bias_ih_l0", True),
        (nn.LSTM(1, 1), "weight_ih_l0", False),
        (nn.BatchNorm1d(1), "weight", True),
        (RMSNorm(), "scale", True),
        (NormalizedLinear(1, 1), "weight", False),
        (nn.Embedding(1, 1), "weight", False),
    ],
)
def test_norms_and_biases_are_told_by_class_and_name(module, name, verdict):
    assert loop_audit.is_norm_or_bias(module, name) == verdict


# ---- how it reports ----


def test_raise_names_place_and_cause(tmp_path):
    class Fault(Tiny):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    message = r"gradients_empty does not hold at update 2, micro-batch 1.*Expected:.*Found:.*Usual cause: optimizer_zero_grad"
    with pytest.raises(LoopViolation, match=message):
        audit(tmp_path, Fault(), audit=LoopAudit())


def test_warn_once_per_check_and_mark_counts(tmp_path):
    class Fault(Tiny):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    with pytest.warns(UserWarning, match="gradients_empty") as caught:
        callback = audit(tmp_path, Fault(), audit=LoopAudit(on_violation="warn"))
    assert sum("gradients_empty" in str(w.message) for w in caught) == 1
    assert callback.num_violations == 7
    callback = LoopAudit(on_violation="mark")
    trainer = trainer_for(tmp_path, [callback])
    trainer.fit(Fault(), loader())
    assert float(trainer.callback_metrics["audit/violations"]) == 7.0


def test_checks_are_selectable(tmp_path):
    class Fault(Tiny):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    others = [name for name in CHECKS if name != "gradients_empty"]
    assert names(audit(tmp_path, Fault(), audit=LoopAudit(checks=others, on_violation="mark"))) == set()
    assert names(
        audit(tmp_path, Fault(), audit=LoopAudit(checks=["gradients_empty"], on_violation="mark"))
    ) == {"gradients_empty"}


def test_every_n_steps_thins_the_costly_checks(tmp_path, monkeypatch):
    calls = []
    real = loop_audit.digests
    monkeypatch.setattr(loop_audit, "digests", lambda named: calls.append(1) or real(named))
    audit(tmp_path, Tiny(), every=4)
    assert len(calls) == 2 * 2  # updates 4 and 8, at the start and before the step


@pytest.mark.parametrize(
    "kwargs", [{"every_n_steps": 0}, {"on_violation": "explode"}, {"checks": ["gradients_full"]}]
)
def test_bad_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        LoopAudit(**kwargs)


def test_every_check_is_in_the_table():
    assert all(f"| {name} |" in (loop_audit.__doc__ or "") for name in CHECKS)


def test_hooks_are_taken_away(tmp_path):
    trainer = trainer_for(tmp_path, [LoopAudit()])
    trainer.fit(Tiny(), loader())
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


# ---- digests and sets ----


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5000),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_digest_notices_a_bit_a_swap_and_a_view(size, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    t = (torch.rand(size, generator=generator) * 100 - 50).to(dtype)
    base = int(digest(t, "w"))
    assert int(digest(t.clone(), "w")) == base
    i, j = torch.randint(0, size, (2,), generator=generator).tolist()
    flipped = t.clone()
    flipped.view(torch.uint8)[i] ^= 1 << (seed % 8)
    assert int(digest(flipped, "w")) != base
    swapped = t.clone()
    swapped[i], swapped[j] = t[j].clone(), t[i].clone()
    assert (int(digest(swapped, "w")) == base) == torch.equal(swapped, t)
    assert int(digest(t[None], "w")) != base
    assert int(digest(t, "v")) != base
    if dtype == torch.float32:
        assert int(digest(t.view(torch.int32), "w")) != base
        signs = torch.ones(size)  # swaps of numbers that differ in the sign bit alone
        signs[i] = -1.0
        other = torch.ones(size)
        other[j] = -1.0
        assert (int(digest(signs)) == int(digest(other))) == (i == j)


@pytest.mark.parametrize("size", [511, 512, 1024, 8192, 16 * 1024, 100_000])
def test_digest_sees_every_position(size):
    base = int(digest(torch.zeros(size)))
    for i in {0, 1, size // 2, size - 1}:
        t = torch.zeros(size)
        t[i] = 1.0
        assert int(digest(t)) != base


def test_hash_of_a_row_does_not_depend_on_its_batch():
    x, y = torch.randn(5, 7), torch.randint(0, 9, (5, 3))
    whole = hash_rows({"x": x, "y": y})
    assert whole.tolist() == [int(hash_rows({"x": x[i : i + 1], "y": y[i : i + 1]})) for i in range(5)]
    assert len(set(whole.tolist())) == 5
    assert int(hash_rows(x[:1].flip(1))) != int(hash_rows(x[:1]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20_000), max_size=200), st.integers(0, 3))
def test_seen_is_a_set(values, split):
    seen, reference = Seen(), set()
    for i, v in enumerate(values):
        assert seen.add(v, is_id=True) == (v in reference)
        reference.add(v)
        if i == split:
            restored = Seen()
            restored.load_state_dict(seen.state_dict())
            seen = restored
    assert seen.count(100, 5000) == len([v for v in reference if 100 <= v < 5000])


def test_full_chunks_cost_nothing():
    seen = Seen()
    for v in range(10_000):
        assert not seen.add(v, is_id=True)
    assert [c is None for c in seen.chunks.values()] == [True, True, False]
    assert seen.add(5, is_id=True)
    assert seen.count(0, 10**9) == 10_000
    assert seen.state_dict()["bits"].numel() == 512
