"""All callbacks at once: any order of the list gives the same numbers, and none of them changes what is trained."""

import itertools
import random

import lightning.pytorch as pl
import pytest
import torch

from callbacks import (
    CheckpointRetention,
    GradNormMonitor,
    LoopAudit,
    MFUMonitor,
    RestartEquivalence,
    SampleText,
    TokenWeightedLoss,
)
from lit_gpt_loop import LitGPT, TextDataModule
from lit_gpt_loop.journal import JournalLogger, read_journal
from lit_gpt_loop.schedules import ScheduleConfig
from lit_gpt_loop.strategies import DDP, FSDP, FSDP2, OneDevice

CLOCKS = ("perf/", "time", "ckpt/")  # measured in seconds or bytes: not the same twice


def make():
    return [
        TokenWeightedLoss(),
        GradNormMonitor(clip_norm=0.5),
        MFUMonitor(peak_flops=1e12),
        CheckpointRetention(every_n_steps=2),
        RestartEquivalence(),
        LoopAudit(),
        SampleText(["The"], every_n_steps=2, max_new_tokens=4, print_samples=False),
    ]


def fit(folder, callbacks, text, strategy=None, devices=1):
    torch.manual_seed(7)
    data = TextDataModule(
        corpus=text, tokenizer="bytes", data_dir=f"{folder}/data", context_length=16, micro_batch_size=2,
        global_batch_size=8, packed=False, val_split="tail", val_fraction=0.1, limit_val_blocks=4,
    )  # fmt: skip
    module = LitGPT("tiny", vocab_size=257, context_length=16, lr=0.01, schedule=ScheduleConfig("wsd", 2, 0))
    pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy or OneDevice(), max_steps=5, max_epochs=-1, callbacks=callbacks,
        logger=JournalLogger(folder), default_root_dir=folder, log_every_n_steps=1, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=2 * 8 // (2 * devices),
        check_val_every_n_epoch=None, enable_checkpointing=any(isinstance(c, CheckpointRetention) for c in callbacks),
    ).fit(module, datamodule=data)  # fmt: skip
    return module


def numbers(folder):
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCKS)}
        for row in read_journal(folder)
        if row["kind"] in ("update", "validation")
    ]


@pytest.fixture
def text(tmp_path):
    r = random.Random(0)
    files = []
    for i in range(
        40
    ):  # documents of many lengths: rows with padding, so that token weighting has work to do
        file = tmp_path / f"doc{i:02}.txt"
        file.write_text("".join(r.choices("abc de", k=r.randrange(2, 40))))
        files.append(str(file))
    return files


@pytest.mark.slow
def test_any_order_gives_the_same_numbers(tmp_path, text):
    r = random.Random(1)
    orders = [list(range(7)), list(range(6, -1, -1))] + [r.sample(range(7), 7) for _ in range(4)]
    results, weights = [], []
    for n, order in enumerate(orders):
        callbacks = make()
        module = fit(tmp_path / f"o{n}", [callbacks[i] for i in order], text)
        results.append(numbers(tmp_path / f"o{n}"))
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert len(results[0]) == 5 + 2
    assert any(row.get("optim/clipped") == 1 for row in results[0])
    for n in range(1, len(orders)):
        assert results[n] == results[0], f"order {orders[n]}"
        assert torch.equal(weights[n], weights[0]), f"order {orders[n]}"


def test_watchers_change_no_weight(tmp_path, text):
    """Those that only watch or save (all but token weighting and clipping) leave training bitwise as it was."""
    acting = fit(tmp_path / "a", make()[:2], text)
    watched = fit(tmp_path / "b", make(), text)
    assert all(torch.equal(p, q) for p, q in zip(acting.parameters(), watched.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(itertools.combinations(range(6), 2)))
def test_each_pair_trains(tmp_path, text, pair):
    callbacks = make()
    fit(tmp_path, [callbacks[i] for i in reversed(pair)], text)


def _on_ranks(folder, text):
    out = {}
    for strategy in (DDP(), FSDP(), FSDP2()):
        name = type(strategy).__name__
        fit(f"{folder}/{name}", make(), text, strategy, devices=2)
        out[name] = numbers(f"{folder}/{name}") if torch.distributed.get_rank() == 0 else None
    return out


@pytest.mark.slow
def test_ranks_give_the_numbers_of_one_process(ranks2, tmp_path, text):
    fit(tmp_path / "one", make(), text)
    one = numbers(tmp_path / "one")
    on_ranks, _ = ranks2.run(_on_ranks, str(tmp_path), text)
    for name, rows in on_ranks.items():
        assert len(rows) == len(one), name
        for a, b in zip(one, rows, strict=True):
            assert a.keys() == b.keys(), name
            for key, value in a.items():
                if isinstance(value, float):
                    rel = 1e-3 if key == "val/loss_stderr" else 2e-5  # a small difference of large sums
                    assert b[key] == pytest.approx(value, rel=rel, abs=1e-7), (name, a["step"], key)
                else:
                    assert b[key] == value, (name, a["step"], key)
