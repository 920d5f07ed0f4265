"""LitGPT in a Trainer against a plain PyTorch loop, and what it counts, logs, schedules and refuses."""

import logging
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_gpt_loop import LitGPT
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.journal import JournalLogger, read_journal
from lit_gpt_loop.schedules import ScheduleConfig

CONFIG = GPTConfig.preset("tiny", vocab_size=31, context_length=16)


def batches(num, batch_size=4, seed=0, ignored=0.0):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(31, (num * batch_size, 17), generator=g)
    drop = torch.rand((num * batch_size, 16), generator=g) < ignored
    return [
        {
            "inputs": row[:-1],
            "targets": row[1:].masked_fill(d, -100),
            "sample_ids": torch.tensor(i),
        }
        for i, (row, d) in enumerate(zip(rows, drop, strict=True))
    ]


def trainer(tmp_path, **kwargs):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": JournalLogger(tmp_path),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(**(defaults | kwargs))


def plain_loop(model, data, updates, lr, schedule, batch_size=4):
    """nanoGPT-like: AdamW by hand on the two groups, one update per batch; returns losses and rates."""
    matrices = [
        p for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n and "head" not in n
    ]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    opt = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False,
    )  # fmt: skip
    losses, rates = [], []
    for n in range(updates):
        rows = [data[(n * batch_size + i) % len(data)] for i in range(batch_size)]
        x, y = (torch.stack([r[k] for r in rows]) for k in ("inputs", "targets"))
        for group in opt.param_groups:
            group["lr"] = lr * schedule(n)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        rates.append(opt.param_groups[0]["lr"])
    return losses, rates


def test_twenty_updates_equal_a_plain_loop(tmp_path):
    # No biases: the gradient of a key's bias is zero but for rounding, which AdamW scales up to whole steps.
    config = replace(CONFIG, bias=False)
    data = batches(20)
    schedule = ScheduleConfig("wsd", 4, 5, "linear")
    torch.manual_seed(1)
    module = LitGPT(config, lr=3e-3, schedule=schedule)
    torch.manual_seed(1)
    reference = LitGPT(config).model
    losses, rates = plain_loop(reference, data, 20, 3e-3, schedule.resolve(20))
    trainer(tmp_path, max_steps=20).fit(module, DataLoader(data, batch_size=4))
    rows = read_journal(tmp_path, "update")
    assert [r["step"] for r in rows] == list(range(1, 21))
    assert [r["train/loss"] for r in rows] == pytest.approx(losses, rel=1e-5)
    assert [r["optim/lr"] for r in rows] == rates
    for (name, p), q in zip(module.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.case("C06")
def test_c06_own_loss_is_token_weighted_with_one_point_per_update(tmp_path):
    data = batches(8, ignored=0.4)
    module = LitGPT(CONFIG, lr=1e-9)
    with torch.no_grad():
        rows = [module.model(r["inputs"][None], r["targets"][None]) for r in data[:16]]
    expected = sum(float(s) for s, _ in rows) / sum(int(n) for _, n in rows)
    trainer(tmp_path, max_steps=2, accumulate_grad_batches=4).fit(module, DataLoader(data, batch_size=4))
    first = read_journal(tmp_path, "update")
    assert len(first) == 2
    assert first[0]["train/loss"] == pytest.approx(expected, rel=1e-6)
    assert first[0]["train/tokens"] == sum(int(n) for _, n in rows)
    assert first[1]["progress/tokens"] == first[0]["train/tokens"] + first[1]["train/tokens"]


@pytest.mark.case("C32")
def test_c32_schedule_counts_updates_not_micro_batches_or_epochs(tmp_path):
    schedule = ScheduleConfig("wsd", 8, 0)
    module = LitGPT(CONFIG, lr=1.0e-3, schedule=schedule)
    # 24 micro-batches an epoch: 6 updates an epoch, two epochs
    trainer(tmp_path / "a", max_steps=12, accumulate_grad_batches=4).fit(
        module, DataLoader(batches(24, 2), batch_size=2)
    )
    a = [r["optim/lr"] for r in read_journal(tmp_path / "a", "update")]
    assert a == [1e-3 * min(1, (n + 1) / 8) for n in range(12)]
    assert a[6] < 1e-3 == a[7]  # peak at update 8, micro-batch 32
    trainer(tmp_path / "b", max_steps=12, accumulate_grad_batches=4).fit(
        LitGPT(CONFIG, lr=1.0e-3, schedule=schedule), DataLoader(batches(48, 2), batch_size=2)
    )
    assert a == [r["optim/lr"] for r in read_journal(tmp_path / "b", "update")]


class DropGradient(pl.Callback):
    def __init__(self, at):
        self.at = at

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step in self.at:
            for p in pl_module.parameters():
                p.grad = None


@pytest.mark.case("C15")
def test_c15_a_skipped_update_advances_neither_schedule_nor_progress(tmp_path):
    module = LitGPT(CONFIG, lr=1e-3, schedule=ScheduleConfig("wsd", 5, 0))
    trainer(tmp_path, max_steps=6, callbacks=[DropGradient({0, 1, 2})]).fit(
        module, DataLoader(batches(6), batch_size=4)
    )
    rows = read_journal(tmp_path, "update")
    assert [r["progress/update"] for r in rows] == [0, 0, 0, 1, 2, 3]
    assert [r["optim/lr"] for r in rows] == [1e-3 * (k / 5) for k in (1, 1, 1, 1, 2, 3)]
    assert rows[2]["progress/tokens"] == 0


@pytest.mark.case("C07")
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_c07_validation_is_weighted_by_tokens_whatever_the_batch(tmp_path, batch_size):
    data = batches(4, ignored=0.5)
    module = LitGPT(CONFIG)
    with torch.no_grad():
        rows = [module.model(r["inputs"][None], r["targets"][None]) for r in data]
    expected = sum(float(s) for s, _ in rows) / sum(int(n) for _, n in rows)
    (out,) = trainer(tmp_path).validate(module, DataLoader(data, batch_size=batch_size), verbose=False)
    assert out["val/loss"] == pytest.approx(expected, rel=1e-6)
    assert out["val/ppl"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-5)
    assert out["val/tokens"] == sum(int(n) for _, n in rows)


class StopAfter(pl.Callback):
    def __init__(self, update):
        self.update = update

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= self.update


def save_and_stop(tmp_path, module, steps, stop, **kwargs):
    t = trainer(tmp_path, max_steps=steps, callbacks=[StopAfter(stop)], **kwargs)
    t.fit(module, DataLoader(batches(40), batch_size=4))
    path = tmp_path / "stop.ckpt"
    t.save_checkpoint(path)
    return path


@pytest.mark.case("C30")
def test_c30_extension_keeps_rates_and_moves_the_decay(tmp_path):
    schedule = ScheduleConfig("wsd", 4, 4, "linear")
    path = save_and_stop(tmp_path / "a", LitGPT(CONFIG, lr=1e-3, schedule=schedule), 20, 10)
    t = trainer(tmp_path / "b", max_steps=30)
    t.fit(
        LitGPT(CONFIG, lr=1e-3, schedule=schedule),
        DataLoader(batches(40), batch_size=4),
        ckpt_path=path,
        weights_only=True,
    )
    rates = [r["optim/lr"] / 1e-3 for r in read_journal(tmp_path / "b", "update")]
    assert rates == pytest.approx([1.0] * 16 + [0.75, 0.5, 0.25, 0.0], abs=0)


@pytest.mark.case("C30")
@pytest.mark.parametrize(
    ("schedule", "stop", "message"),
    [
        (ScheduleConfig("cosine", 4), 10, "a cosine's rates depend on the run's length"),
        (ScheduleConfig("wsd", 4, 4), 18, "Its decay began after update 16"),
    ],
)
def test_c30_what_would_change_the_past_is_refused(tmp_path, schedule, stop, message):
    path = save_and_stop(tmp_path, LitGPT(CONFIG, lr=1e-3, schedule=schedule), 20, stop)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, max_steps=30).fit(
            LitGPT(CONFIG, lr=1e-3, schedule=schedule),
            DataLoader(batches(40), batch_size=4),
            ckpt_path=path,
            weights_only=True,
        )


@pytest.mark.case("C46")
def test_c46_settings_of_this_run_win_over_the_checkpoint_and_are_named(tmp_path, caplog):
    path = save_and_stop(
        tmp_path, LitGPT(CONFIG, lr=0.1, weight_decay=0.1, schedule=ScheduleConfig("constant", 0)), 8, 4
    )
    module = LitGPT(CONFIG, lr=0.001, weight_decay=0.3, schedule=ScheduleConfig("constant", 0))
    with caplog.at_level(logging.INFO):
        trainer(tmp_path / "b", max_steps=6).fit(
            module, DataLoader(batches(40), batch_size=4), ckpt_path=path, weights_only=True
        )
    assert [r["optim/lr"] for r in read_journal(tmp_path / "b", "update")] == [0.001, 0.001]
    assert [g["weight_decay"] for g in module.optimizers().param_groups] == [0.3, 0.0]


@pytest.mark.case("C52")
@pytest.mark.slow
def test_c52_compiled_checkpoints_load_uncompiled_and_back(tmp_path):
    data = DataLoader(batches(8), batch_size=4)

    def fit(folder, compile, steps, ckpt=None):
        torch.manual_seed(3)
        module = LitGPT(CONFIG, compile=compile, schedule=ScheduleConfig("constant", 0))
        t = trainer(tmp_path / folder, max_steps=steps)
        t.fit(module, data, ckpt_path=ckpt, weights_only=True if ckpt else None)
        t.save_checkpoint(tmp_path / f"{folder}.ckpt")
        return torch.load(tmp_path / f"{folder}.ckpt", weights_only=True)

    plain, compiled = fit("plain", False, 3), fit("compiled", True, 3)
    assert plain["state_dict"].keys() == compiled["state_dict"].keys()
    assert not any("_orig_mod" in k for k in compiled["state_dict"])
    for folder, compile, source in (("cu", False, "compiled"), ("pc", True, "plain")):
        out = fit(folder, compile, 4, tmp_path / f"{source}.ckpt")
        state = out["optimizer_states"][0]["state"]
        assert all(float(s["step"]) == 4 for s in state.values())


def test_hyper_parameters_are_plain_and_rebuild_the_module(tmp_path):
    path = save_and_stop(tmp_path, LitGPT("tiny", {"n_layer": 1}, vocab_size=31, context_length=16), 4, 2)
    again = LitGPT.load_from_checkpoint(path, weights_only=True)
    assert again.config == GPTConfig.preset("tiny", n_layer=1, vocab_size=31, context_length=16)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 must be above 0"),
        ({"config": "tinny"}, "did you mean tiny"),
        ({"config": CONFIG, "overrides": {"n_layers": 3}}, "n_layers"),
        ({"init_device": "disk"}, "must be 'cpu' or 'meta'"),
        ({"overrides": {"n_head": 5}}, "n_head=5 does not divide n_embd=32"),
        ({"overrides": {"context_length": 32}, "context_length": 16}, "overrides say context_length=32"),
    ],
)
def test_bad_input(kwargs, message):
    with pytest.raises(ValueError, match=message):
        LitGPT(**kwargs)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 32), ("context_length", 17)])
def test_data_that_does_not_fit_the_model_is_refused_before_anything_runs(tmp_path, name, value):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            pytest.fail("nothing may be read")

    data = Data()
    data.vocab_size, data.context_length = 31, 16
    setattr(data, name, value)
    with pytest.raises(ValueError, match=f"the data has {value} .*, the model's {name} is {value - 1}"):
        trainer(tmp_path, max_steps=1).fit(LitGPT(CONFIG), datamodule=data)
