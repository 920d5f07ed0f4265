"""TextDataModule under a Trainer: batches, accumulation, position, evaluation, and what bad arguments get."""

import pickle
import random
import time

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lit_gpt_loop.corpus import TextCorpus
from lit_gpt_loop.data import TextDataModule
from lit_gpt_loop.loaders import BlockDataset, EvalLoader, LoaderOptions, measure_tokens_per_s
from lit_gpt_loop.packing import PackedBlocks, split_tail
from lit_gpt_loop.sample_order import SampleOrder
from lit_gpt_loop.token_store import TokenStore
from lit_gpt_loop.tokenizer import train_bpe
from tests.lit_gpt_loop.small_data import MIXED, Recorder, SaveAt, data_of, fit, ready, store_of


def stream_ids(data: TextDataModule, updates: int, start: int = 0) -> list[list[int]]:
    """Return the sample ids of each update as the order alone gives them."""
    order = SampleOrder(data.samples_per_epoch, data.seed, data.shuffle)
    size = data.global_batch_size
    return [[order.sample_id(start + u * size + i) for i in range(size)] for u in range(updates)]


# ---- batches


def test_a_batch_holds_the_blocks_that_its_sample_ids_name(tmp_path):
    data = ready(data_of(tmp_path))
    n, t = data.samples_per_epoch, data.context_length
    stream = [x for s in data.splits.samples[:1] for x in s.stream.read(0, s.stream.num_tokens).tolist()]
    batches = iter(data.train_dataloader())
    for _ in range(n):  # 2 n samples
        batch = next(batches)
        assert set(batch) == {"inputs", "targets", "sample_ids"}
        assert all(v.dtype == torch.int64 for v in batch.values())
        for inputs, targets, i in zip(batch["inputs"], batch["targets"], batch["sample_ids"], strict=True):
            block = int(i) % n
            assert inputs.tolist() == stream[block * t : block * t + t]
            assert targets.tolist() == stream[block * t + 1 : block * t + t + 1]


def test_segment_ids_number_the_documents_within_a_row(tmp_path):
    data = ready(data_of(tmp_path, in_document_attention=True, context_length=100))
    batch = next(iter(data.train_dataloader()))
    assert batch["segment_ids"].shape == batch["inputs"].shape
    for inputs, segments in zip(batch["inputs"].tolist(), batch["segment_ids"].tolist(), strict=True):
        number, wanted = 0, []
        for token in inputs:
            wanted.append(number)
            number += token == data.eot_id
        assert segments == wanted


def test_unpacked_rows_hold_one_document_padded(tmp_path):
    data = ready(data_of(tmp_path, packed=False, context_length=64, shuffle=False, val_fraction=0.2))
    rows = [b for b, _ in zip(data.train_dataloader(), range(data.samples_per_epoch), strict=False)]
    ids = torch.cat([b["sample_ids"] for b in rows])[: data.samples_per_epoch]
    assert ids.tolist() == list(range(data.samples_per_epoch))
    total = 0
    for inputs, targets in zip(
        torch.cat([b["inputs"] for b in rows])[: len(ids)],
        torch.cat([b["targets"] for b in rows])[: len(ids)],
        strict=True,
    ):
        valid = targets != -100
        length = int(valid.sum())
        total += length
        assert valid[:length].all() and (inputs[length:] == data.pad_id).all()
        assert (targets[: length - 1] != data.eot_id).all() and (inputs[:length] != data.eot_id).all()
    assert total == data.num_train_tokens
    assert data.num_train_tail_tokens == 0


# ---- vocabulary, tokenizer, store


def test_the_vocabulary_is_known_before_anything_is_prepared(tmp_path):
    train_bpe(MIXED, 290).save(tmp_path / "tokenizer.json")
    characters = {c for t in MIXED for c in t}
    for word, size, end in (
        ("bytes", 257, 256),
        ("bpe:300", 300, 0),
        ("gpt2", 50257, 50256),
        (str(tmp_path / "tokenizer.json"), 290, 0),
        ("char", len(characters) + 1, len(characters)),
    ):
        data = data_of(tmp_path / "data", tokenizer=word)
        assert (data.vocab_size, data.eot_id, data.pad_id) == (size, end, end)
        assert not (tmp_path / "data").exists()
        if word == "bpe:300":
            with pytest.raises(RuntimeError, match="is trained when the corpus is prepared"):
                _ = data.tokenizer
        else:
            assert data.tokenizer.eot_id == end
    data = data_of(tmp_path / "data", tokenizer="bpe:300")
    data.prepare_data()
    assert data.tokenizer.vocab_size == 300
    data.setup()
    assert data.tokenizer.decode(data.tokenizer.encode("数据 ok")) == "数据 ok"


def test_a_given_store_needs_no_corpus(tmp_path):
    store = store_of(tmp_path, MIXED, "bpe:300")
    data = ready(data_of(tmp_path, store=str(store.path), tokenizer=None, corpus="no such thing"))
    assert (data.vocab_size, data.fingerprint) == (300, store.fingerprint)
    assert ready(data_of(tmp_path, store=str(store.path), tokenizer="bpe:300")).vocab_size == 300
    with pytest.raises(ValueError, match=r"written with the tokenizer bpe:300, not with bpe:310"):
        data_of(tmp_path, store=str(store.path), tokenizer="bpe:310")
    with pytest.raises(ValueError, match=r"written with the tokenizer bpe:300 \(SHA-256 .*not with bytes"):
        data_of(tmp_path, store=str(store.path), tokenizer="bytes")
    with pytest.raises(FileNotFoundError, match="there is no token store"):
        data_of(tmp_path, store=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="is prepared already"):
        data.prepare()


def test_setting_up_what_is_not_prepared(tmp_path):
    data = data_of(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no token store"):
        data.setup()
    with pytest.raises(RuntimeError, match=r"call `prepare_data\(\)` and `setup\(\)`"):
        _ = data.samples_per_epoch
    assert data.state_dict() == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context_length": 0}, "context_length=0: at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size=0: at least 1"),
        ({"val_fraction": 0.6, "test_fraction": 0.4}, "together below 1"),
        ({"val_fraction": -0.1}, "neither below 0"),
        ({"val_split": "head"}, "val_split='head': document or tail"),
        ({"global_batch_tokens": 128}, "give one of them"),
        (
            {"global_batch_size": None, "global_batch_tokens": 100},
            "no multiple of context_length=16: take 96",
        ),
        ({"global_batch_size": None, "global_batch_tokens": 3}, "no multiple of context_length=16: take 16"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        data_of(tmp_path, **arguments)


def test_too_little_text(tmp_path):
    short = {"corpus": TextCorpus(["abc", "de"]), "val_fraction": 0.0}
    with pytest.raises(
        ValueError,
        match=r"has 7 tokens, fewer than one block of context_length \+ 1 = 17.*context_length` 6 or less",
    ):
        ready(data_of(tmp_path, **short))
    assert ready(data_of(tmp_path, **short, context_length=6)).samples_per_epoch == 1
    with pytest.raises(ValueError, match="holds 1 document, so none can be held out"):
        ready(data_of(tmp_path, corpus=TextCorpus(["one long document" * 9])))
    with pytest.raises(ValueError, match=r"validation split .* has 1 tokens; it takes 2"):
        ready(
            data_of(
                tmp_path, corpus=TextCorpus(["one long document" * 9]), val_split="tail", val_fraction=0.005
            )
        )
    with pytest.raises(ValueError, match="limit_val_blocks=0: at least 1"):
        ready(data_of(tmp_path, limit_val_blocks=0))


def test_one_file_as_nanogpt_reads_it(tmp_path):
    text = "To be, or not to be\n" * 50
    (tmp_path / "input.txt").write_text(text)
    data = ready(
        data_of(
            tmp_path, corpus=str(tmp_path / "input.txt"), tokenizer="char", val_split="tail", val_fraction=0.1
        )
    )
    assert data.vocab_size == len(set(text)) + 1
    train, val = data.splits.samples[:2]
    assert (train.stream.num_tokens, val.stream.num_tokens) == (901, 100)
    assert data.tokenizer.decode(train.stream.read(0, 19).tolist()) == "To be, or not to be"


# ---- numbers


def test_numbers_for_bits_per_byte_and_reports(tmp_path):
    data = ready(data_of(tmp_path, val_fraction=0.3, test_fraction=0.2))
    for evaluation, loader in (
        (data.val_evaluation, data.val_dataloader()),
        (data.test_evaluation, data.test_dataloader()),
    ):
        targets = torch.cat([b["targets"].flatten() for b in loader])
        targets = targets[targets != -100]
        assert evaluation.tokens == len(targets)
        assert evaluation.text_bytes == data.token_bytes[targets].sum() == (targets != data.eot_id).sum()
        assert evaluation.is_exact
    assert data.val_bytes_per_token == data.val_evaluation.text_bytes / data.val_evaluation.tokens
    limited = ready(data_of(tmp_path, val_fraction=0.3, limit_val_blocks=5))
    blocks = [int(i) for b in limited.val_dataloader() for i in b["sample_ids"] if i >= 0]
    n = limited.splits.samples[1].num_samples
    assert blocks == [0, n // 5, 2 * n // 5, 3 * n // 5, 4 * n // 5]
    assert limited.val_evaluation.tokens == 80
    train = data.splits.samples[0]
    assert data.num_train_tokens + data.num_train_tail_tokens == train.stream.num_tokens - 1
    assert data.num_train_tokens == 16 * data.num_train_blocks
    assert f"{data.num_train_tail_tokens} at the end left out" in data.summary()


def test_without_a_test_split_the_test_set_is_the_validation_set(tmp_path):
    data = ready(data_of(tmp_path))
    assert [b["sample_ids"].tolist() for b in data.test_dataloader()] == [
        b["sample_ids"].tolist() for b in data.val_dataloader()
    ]
    assert [b["sample_ids"].tolist() for b in data.predict_dataloader()] == [
        b["sample_ids"].tolist() for b in data.val_dataloader()
    ]
    assert data.test_bytes_per_token == data.val_bytes_per_token


def test_limit_train_blocks_repeats_the_first_blocks(tmp_path):
    data = ready(data_of(tmp_path, limit_train_blocks=5, micro_batch_size=5, global_batch_size=5))
    batches = iter(data.train_dataloader())
    for epoch in range(4):
        assert sorted(next(batches)["sample_ids"].tolist()) == list(range(5 * epoch, 5 * epoch + 5))
    assert data.num_train_tokens == 5 * 16


# ---- accumulation and the Trainer's arguments


def test_accumulation_follows_from_the_global_batch(tmp_path):
    module, trainer = fit(data_of(tmp_path), steps=3)
    assert trainer.accumulate_grad_batches == 4
    assert [len(u) for u in module.updates] == [8, 8, 8]
    data = data_of(tmp_path, global_batch_size=None, global_batch_tokens=64)
    assert fit(data, 1)[1].accumulate_grad_batches == 2
    assert data.samples_per_update == 4
    # without a global batch the Trainer's own value holds
    data = data_of(tmp_path, global_batch_size=None)
    module, trainer = fit(data, 2, accumulate_grad_batches=3)
    assert [len(u) for u in module.updates] == [6, 6]
    assert (data.samples_per_update, data.samples_consumed) == (6, 12)
    assert fit(data_of(tmp_path), 1, accumulate_grad_batches=4)[1].accumulate_grad_batches == 4


def test_two_fits_of_one_trainer_may_set_it_twice(tmp_path):
    _, trainer = fit(data_of(tmp_path), 2)
    trainer.fit_loop.epoch_loop.max_steps = 3
    module = Recorder()
    trainer.fit(module, datamodule=data_of(tmp_path))
    assert trainer.accumulate_grad_batches == 4


@pytest.mark.filterwarnings("ignore:.*max_epochs. was not set")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"accumulate_grad_batches": 2},
            r"accumulate_grad_batches=2\), but global_batch_size=8 in micro-batches of 2 on 1 ranks takes 4",
        ),
        (
            {"max_steps": -1, "max_epochs": 3},
            r"endless, so max_epochs does not end it.*One epoch .* is ([\d.]+) updates, 3 are \d+",
        ),
        ({"max_steps": -1}, "endless, so max_epochs does not end it"),
        ({"limit_train_batches": 0.5}, "share of an endless stream"),
        (
            {"limit_train_batches": 6},
            "cuts a window of 4 micro-batches: take a multiple of it, for example 8",
        ),
        ({"overfit_batches": 2}, "limit_train_blocks N"),
        (
            {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]},
            "changes the global batch",
        ),
    ],
)
def test_trainer_arguments_that_do_not_go_with_an_endless_stream(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(data_of(tmp_path), **{"steps": 2, **arguments})


def test_a_global_batch_that_does_not_divide(tmp_path):
    with pytest.raises(
        ValueError, match=r"global batch of 7 sequences.*global_batch_size=6 or 8, or micro_batch_size=1"
    ):
        fit(data_of(tmp_path, global_batch_size=7), 1)


def test_dry_runs_and_time_limits_and_lightnings_epochs(tmp_path):
    fit(data_of(tmp_path), -1, fast_dev_run=1)
    module, _ = fit(data_of(tmp_path), -1, max_time="00:00:00:00")
    data = data_of(tmp_path)
    module, trainer = fit(data, -1, max_epochs=3, limit_train_batches=8)  # epochs of two updates
    assert trainer.global_step == 6
    assert module.updates == stream_ids(data, 6)


# ---- position


def test_the_stream_runs_on_over_epochs_and_is_counted(tmp_path):
    data = data_of(tmp_path)
    n = ready(data_of(tmp_path)).samples_per_epoch
    updates = 2 * n // 8 + 2
    module, _ = fit(data, updates)
    assert module.updates == stream_ids(data, updates)
    ids = [i for u in module.updates for i in u]
    assert sorted(ids[: 2 * n]) == list(range(2 * n))
    assert data.samples_consumed == 8 * updates
    assert data.epoch == 8 * updates / n > 2


def test_the_state_is_plain_and_says_what_it_is_a_position_in(tmp_path):
    path = tmp_path / "a.ckpt"
    data = data_of(tmp_path)
    fit(data, 3, callbacks=[SaveAt(12, path)])
    state = torch.load(path, weights_only=True)["TextDataModule"]
    assert state["samples_consumed"] == 24
    assert state["fingerprint"] == data.fingerprint == TokenStore(data.store_path).fingerprint
    assert {type(v) for v in state.values()} <= {int, float, str, bool}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"context_length": 8}, "context_length was 16, is 8"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"packed": False}, "packed was True, is False"),
        ({"val_fraction": 0.3}, r"val_fraction was 0.05, is 0.3; samples_per_epoch was \d+, is \d+"),
        ({"corpus": TextCorpus([*MIXED, "more"])}, "fingerprint was '"),
        ({"limit_train_blocks": 9}, r"samples_per_epoch was \d+, is 9"),
    ],
)
def test_a_position_in_other_data_is_refused(tmp_path, changed, message):
    path = tmp_path / "a.ckpt"
    fit(data_of(tmp_path), 2, callbacks=[SaveAt(8, path)])
    with pytest.raises(ValueError, match=f"does not fit this data: .*{message}.*weights alone"):
        fit(data_of(tmp_path, **changed), 3, path)


def test_evaluating_a_checkpoint_on_other_data_is_allowed(tmp_path):
    path = tmp_path / "a.ckpt"
    fit(data_of(tmp_path), 2, callbacks=[SaveAt(8, path)])
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.validate(
        Recorder(), datamodule=data_of(tmp_path, context_length=8), ckpt_path=path, verbose=False
    )


def resumed(tmp_path, saved_at, steps, **changed):
    """Return (updates before the save's window ends, updates after a resume, trainer, data)."""
    path = tmp_path / "a.ckpt"
    fit(data_of(tmp_path), -(-saved_at // 4) + 1, callbacks=[SaveAt(saved_at, path)])
    data = data_of(tmp_path, **changed)
    module, trainer = fit(data, steps, path)
    return module, trainer, data


@pytest.mark.parametrize(
    "changed",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
        {"micro_batch_size": 8, "num_workers": 1},
        {"num_workers": 2},
    ],
    ids=str,
)
def test_another_micro_batch_size_continues_with_the_same_updates(tmp_path, changed):
    module, trainer, data = resumed(tmp_path, saved_at=12, steps=6, **changed)
    assert module.updates == stream_ids(data, 3, start=24)
    assert trainer.fit_loop.epoch_loop.batch_progress.current.ready == 6 * trainer.accumulate_grad_batches


def test_another_global_batch_continues_at_the_same_sample(tmp_path):
    module, _, data = resumed(tmp_path, saved_at=12, steps=5, global_batch_size=24, micro_batch_size=4)
    assert module.updates == stream_ids(data, 2, start=24)
    assert data.samples_consumed == 24 + 48


@pytest.mark.parametrize("saved_at", [5, 6, 7])
def test_a_save_in_the_middle_of_a_window_goes_back_to_its_start(tmp_path, saved_at):
    module, trainer, data = resumed(tmp_path, saved_at=saved_at, steps=3)
    assert module.updates == stream_ids(data, 2, start=8)
    assert trainer.global_step == 3


def test_validation_falls_on_the_same_updates_after_another_micro_batch_size(tmp_path):
    class Seen(pl.Callback):
        def __init__(self):
            self.at = []

        def on_validation_start(self, trainer, pl_module):
            self.at.append(trainer.global_step)

    path = tmp_path / "a.ckpt"
    whole, part = Seen(), Seen()
    fit(data_of(tmp_path), 9, val_check_interval=8, limit_val_batches=1, callbacks=[whole, SaveAt(20, path)])
    assert whole.at == [2, 4, 6, 8]
    fit(
        data_of(tmp_path, micro_batch_size=4),
        9,
        path,
        val_check_interval=4,
        limit_val_batches=1,
        callbacks=[part],
    )
    assert part.at == [6, 8]


def test_a_position_far_away_costs_nothing(tmp_path):
    data = ready(data_of(tmp_path))
    data.load_state_dict({**data.state_dict(), "samples_consumed": 10**15})
    started = time.perf_counter()
    batch = next(iter(data.train_dataloader()))
    assert time.perf_counter() - started < 1.0
    order = SampleOrder(data.samples_per_epoch, 0)
    assert batch["sample_ids"].tolist() == [order.sample_id(10**15), order.sample_id(10**15 + 1)]


def test_throughput_is_measured_in_input_tokens(tmp_path, monkeypatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("lit_gpt_loop.loaders.time.perf_counter", lambda: next(clock))
    assert measure_tokens_per_s(ready(data_of(tmp_path)).train_dataloader(), 5) == 5 * 2 * 16 / 2.0


def test_a_new_trainer_starts_at_the_first_sample_and_the_same_one_goes_on(tmp_path):
    path = tmp_path / "a.ckpt"
    data = data_of(tmp_path)
    _, trainer = fit(data, 2, callbacks=[SaveAt(8, path)])
    module, trainer = fit(data, 4, path)
    assert module.updates == stream_ids(data, 2, start=16)
    module, trainer = fit(data, 2)
    assert module.updates == stream_ids(data, 2)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(again := Recorder(), datamodule=data)
    assert again.updates == stream_ids(data, 2, start=16)


# ---- randomness


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_global_random_state_is_touched(tmp_path, num_workers):
    data = ready(data_of(tmp_path, num_workers=num_workers))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches = iter(data.train_dataloader())
    for _ in range(3):
        next(batches)
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_what_a_spawned_worker_gets_is_small_and_reads_the_same(tmp_path):
    data = ready(data_of(tmp_path))
    dataset = BlockDataset(data.splits.samples[0], SampleOrder(data.samples_per_epoch, 0), data.eot_id)
    wanted = dataset.__getitems__([3, 4, 5])
    sent = pickle.dumps(dataset)
    assert len(sent) < 10_000 < data.splits.store.num_tokens * 2
    for key, value in pickle.loads(sent).__getitems__([3, 4, 5]).items():
        assert torch.equal(value, wanted[key])


# ---- evaluation


@pytest.mark.parametrize(
    ("blocks", "size", "world_size"), [(10, 3, 1), (10, 2, 4), (1, 4, 8), (7, 1, 3), (0, 2, 2), (16, 2, 8)]
)
def test_every_evaluation_block_once_and_equally_many_batches_on_every_rank(
    tmp_path, blocks, size, world_size
):
    store = store_of(tmp_path, ["x" * 40, "y" * 40, "z" * 40])
    samples = PackedBlocks(split_tail(store, 0.0)[0], 4, pad_id=256, keep_tail=True)
    loaders = [
        EvalLoader(samples, range(blocks), size, r, world_size, LoaderOptions()) for r in range(world_size)
    ]
    seen, valid = [], 0
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == len(loader) == len(loaders[0])
        for batch in batches:
            assert batch["inputs"].shape == (size, 4)
            for i, targets in zip(batch["sample_ids"].tolist(), batch["targets"], strict=True):
                if i < 0:
                    assert (targets == -100).all()
                else:
                    seen.append(i)
                    valid += int((targets != -100).sum())
    assert sorted(seen) == list(range(blocks))
    assert valid == sum(b - a for a, b in map(samples.token_range, range(blocks)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_evaluation_that_was_left_early_starts_again_from_the_first_block(tmp_path, num_workers):
    data = ready(data_of(tmp_path, num_workers=num_workers))
    loader = data.val_dataloader()
    first = [b["sample_ids"].tolist() for b in loader]
    for _ in zip(loader, range(2), strict=False):
        pass
    assert [b["sample_ids"].tolist() for b in loader] == first
    assert [b["sample_ids"].tolist() for b in data.val_dataloader()] == first


def test_validation_reads_the_same_blocks_each_time_and_moves_no_position(tmp_path):
    data = data_of(tmp_path, val_fraction=0.3)
    module, _ = fit(data, 4, val_check_interval=8, limit_val_batches=1.0)
    half = len(module.val_ids) // 2
    assert half and module.val_ids[:half] == module.val_ids[half:]
    assert module.updates == stream_ids(data, 4)


# ---- ranks


def ddp_job(folder, resume_from):
    """Fit on DDP; return the ids of each update on this rank, those validated, and counters."""
    data = data_of(folder, val_fraction=0.3)
    path = f"{folder}/ddp.ckpt"
    module, trainer = fit(
        data,
        4,
        resume_from,
        devices=torch.distributed.get_world_size(),
        strategy="ddp",
        limit_val_batches=1.0,
        val_check_interval=4 // torch.distributed.get_world_size() * 4,
    )
    trainer.save_checkpoint(path)
    return module.updates, module.val_ids, data.samples_consumed, trainer.accumulate_grad_batches, path


def test_two_ranks_share_each_update_and_each_validation(tmp_path, ranks2):
    single = tmp_path / "single.ckpt"
    data = data_of(tmp_path, val_fraction=0.3)
    fit(data, 2, callbacks=[SaveAt(8, single)])
    for resume_from, first in ((None, 0), (single, 2)):
        results = ranks2.run(ddp_job, tmp_path, resume_from)
        wanted = stream_ids(data, 4)[first:]
        for u, ids in enumerate(wanted):
            assert sorted(i for r in results for i in r[0][u]) == sorted(ids)
            assert [len(r[0][u]) for r in results] == [4, 4]
        assert [(r[2], r[3]) for r in results] == [(32, 2), (32, 2)]
        validated = sorted(i for r in results for batch in r[1] for i in batch if i >= 0)
        assert validated == list(range(data.splits.samples[1].num_samples))
        assert len(results[0][1]) == len(results[1][1])
    # and back from two ranks to one
    module, _ = fit(data_of(tmp_path, val_fraction=0.3), 6, results[0][4])
    assert module.updates == stream_ids(data, 2, start=32)
