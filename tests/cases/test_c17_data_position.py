"""C17, C19, C21, C22, C23: a resumed run reads on where updates happened, whatever prefetched, restored first, or has changed.

Each starts from a public report: Lightning-AI/pytorch-lightning#19764, #20550, #21938, torchdata#1520, torchtitan#811.
"""

import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_gpt_loop.corpus import TextCorpus
from lit_gpt_loop.sample_order import SampleOrder
from tests.lit_gpt_loop.small_data import SaveAt, data_of, fit


def blocks_of(folder, number, **kwargs):
    """Return a DataModule with exactly `number` training blocks of 4 tokens, batches of 1."""
    defaults = {
        "corpus": TextCorpus(["x" * (4 * number)]),
        "context_length": 4,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "val_fraction": 0.0,
        "val_split": "tail",
        "shuffle": False,
    }
    return data_of(folder, **{**defaults, **kwargs})


def flat(module):
    return [i for ids in module.micro_batches for i in ids]


class SaveAll(pl.Callback):
    """Saves after each update."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.case("C17")
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_c17_a_resume_at_any_update_reads_what_the_uninterrupted_run_reads(tmp_path, num_workers, shuffle):
    data = blocks_of(tmp_path, 10, num_workers=num_workers, shuffle=shuffle)
    module, _ = fit(data, 12, callbacks=[SaveAll(tmp_path)])
    assert data.samples_per_epoch == 10
    whole = flat(module)
    if not shuffle:
        assert whole == list(range(12))
    for kill in range(1, 10) if num_workers == 0 else (1, 3, 9):
        module, _ = fit(
            blocks_of(tmp_path, 10, num_workers=num_workers, shuffle=shuffle), 12, tmp_path / f"{kill}.ckpt"
        )
        assert flat(module) == whole[kill:]


class RestoresLate(SingleDeviceStrategy):
    """Restores after the optimizers are set up, as the FSDP strategies do."""

    @property
    def restore_checkpoint_after_setup(self):
        return True


@pytest.mark.case("C19")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("late", [False, True])
def test_c19_a_schedule_that_asks_for_the_step_count_does_not_freeze_the_position(
    tmp_path, num_workers, late
):
    arguments = {"estimate": True, "max_epochs": 5}  # with max_epochs Lightning builds the loaders to count
    make = lambda: blocks_of(tmp_path, 10, num_workers=num_workers, shuffle=True)  # noqa: E731
    module, _ = fit(make(), 8, callbacks=[SaveAll(tmp_path)], **arguments)
    strategy = {"strategy": RestoresLate(device=torch.device("cpu"))} if late else {}
    again, _ = fit(make(), 8, tmp_path / "3.ckpt", **arguments, **strategy)
    assert flat(again) == flat(module)[3:]


@pytest.mark.case("C21")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 4])
def test_c21_what_two_workers_prefetched_does_not_count_and_their_number_may_change(tmp_path, num_workers):
    data = blocks_of(tmp_path, 50, num_workers=2)  # torch prefetches 2 batches for each worker
    module, _ = fit(data, 3, callbacks=[SaveAt(3, tmp_path / "a.ckpt")])
    assert flat(module) == [0, 1, 2]
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["TextDataModule"]["samples_consumed"] == 3
    module, _ = fit(blocks_of(tmp_path, 50, num_workers=num_workers), 7, tmp_path / "a.ckpt")
    assert flat(module) == [3, 4, 5, 6]


@pytest.mark.case("C22")
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_c22_the_epoch_after_a_resume_at_an_epochs_end_is_the_next_one(tmp_path, num_workers):
    def make(**kwargs):
        sizes = {"micro_batch_size": 10, "global_batch_size": 10}
        return blocks_of(tmp_path, 100, num_workers=num_workers, **sizes, **kwargs)

    fit(make(), 20, callbacks=[SaveAt(20, tmp_path / "a.ckpt")])
    module, _ = fit(make(), 31, tmp_path / "a.ckpt")
    assert flat(module) == list(range(200, 310))
    fit(make(shuffle=True), 20, callbacks=[SaveAt(20, tmp_path / "b.ckpt")])
    module, _ = fit(make(shuffle=True), 31, tmp_path / "b.ckpt")
    order = SampleOrder(100, seed=0)
    assert flat(module) == [order.sample_id(p) for p in range(200, 310)]
    assert flat(module)[100:] != [i + 100 for i in flat(module)[:10]]


@pytest.mark.case("C23")
@pytest.mark.parametrize(
    "batch", [{"global_batch_size": 4}, {"global_batch_size": 10, "micro_batch_size": 5}], ids=json.dumps
)
def test_c23_two_ranks_go_on_where_four_stopped(tmp_path, monkeypatch, batch):
    ids = []
    for rank in range(4):
        data = blocks_of(tmp_path, 100, global_batch_size=4)
        data.prepare_data()
        data.setup()
        monkeypatch.setattr(data, "_layout", lambda rank=rank: (rank, 4))
        ids.append(
            [
                i
                for b, _ in zip(data.train_dataloader(), range(5), strict=False)
                for i in b["sample_ids"].tolist()
            ]
        )
    assert sorted(i for rank in ids for i in rank) == list(range(20))
    state = {**data.state_dict(), "samples_consumed": 20, "global_step": 5}
    ids = []
    for rank in range(2):
        data = blocks_of(tmp_path, 100, **batch)
        data.setup()
        monkeypatch.setattr(data, "_layout", lambda rank=rank: (rank, 2))
        data.load_state_dict(state)
        size = data.micro_batch_size
        ids.append(
            [
                i
                for b, _ in zip(data.train_dataloader(), range(10 // size), strict=False)
                for i in b["sample_ids"].tolist()
            ]
        )
    assert sorted(i for rank in ids for i in rank) == list(range(20, 40))


def ranks_job(folder, steps, resume_from):
    data = blocks_of(folder, 100, global_batch_size=4)
    module, trainer = fit(
        data, steps, resume_from, devices=torch.distributed.get_world_size(), strategy="ddp"
    )
    trainer.save_checkpoint(folder / "ranks.ckpt")
    return flat(module)


@pytest.mark.slow
@pytest.mark.case("C23")
def test_c23_two_real_ranks_go_on_where_four_stopped(tmp_path, ranks2, ranks4):
    first = ranks4.run(ranks_job, tmp_path, 5, None)
    assert sorted(i for rank in first for i in rank) == list(range(20))
    second = ranks2.run(ranks_job, tmp_path, 10, tmp_path / "ranks.ckpt")
    assert sorted(i for rank in second for i in rank) == list(range(20, 40))
    last = ranks4.run(ranks_job, tmp_path, 12, tmp_path / "ranks.ckpt")
    assert sorted(i for rank in last for i in rank) == list(range(40, 48))
