import itertools
import re
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_gpt_loop.lr_range import LRRangeTest
from lit_gpt_loop.read_aside import ReadAside, is_same
from tests.distributed.token_jobs import rank_and_world

ROOT = Path(__file__).parents[2]


def readme_batches():
    """README's own loader, from its text."""
    code = re.search(r"```python\n(class Batches:.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    scope = {"torch": torch}
    exec(code[1], scope)
    return scope["Batches"]


def rows(num=40):
    """`num` rows of data, shared out over ranks."""
    rank, world = rank_and_world()
    x = torch.randn(num * world, 3, generator=torch.Generator().manual_seed(5))
    y = torch.arange(num * world).float()
    return x[rank::world], y[rank::world]


class Regression(pl.LightningModule):
    """Notes the rows that it trains on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(y.tolist())
        return (self.net(x).squeeze(1) - y / 40).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(make_loader, callbacks, folder, updates=9, devices=1, strategy="auto", datamodule=None):
    """Fit; return the rows of the run itself (without those of a test), the weights, the loader and its state at the end."""
    torch.manual_seed(2)
    loader = make_loader()
    module = Regression()

    class Start(pl.Callback):
        def on_train_start(self, trainer, module):
            module.seen.clear()

    trainer = pl.Trainer(
        max_steps=updates, accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, default_root_dir=str(folder),
        accumulate_grad_batches=2, callbacks=[*callbacks, Start()],
    )  # fmt: skip
    if datamodule is None:
        trainer.fit(module, loader)
    else:
        trainer.fit(module, datamodule=datamodule(loader))
    state = loader.state_dict() if hasattr(loader, "state_dict") else None
    return module.seen, [p.detach().clone() for p in module.parameters()], state


def same_with_and_without(make_loader, folder, **kwargs):
    test = LRRangeTest(min_lr=1e-5, max_lr=1.0, num_updates=7)
    answers = []
    for updates in (3, 9):  # in the first epoch and in the second, which has 5 updates
        rows_plain, plain, state_plain = train(make_loader, [], folder, updates, **kwargs)
        rows_tested, tested, state_tested = train(make_loader, [test], folder, updates, **kwargs)
        assert len(test.result.rates) >= 3
        same_weights = all(torch.equal(a, b) for a, b in zip(plain, tested, strict=True))
        answers.append((rows_plain == rows_tested, same_weights, is_same(state_plain, state_tested)))
    return all(all(answer) for answer in answers)


def batches():
    return readme_batches()(*rows(), 4)


class Remembering:
    """A loader whose state is that of the last iterator it made, as torchdata's StatefulDataLoader's."""

    def __init__(self):
        self.start, self.last = 0, None

    def __len__(self):
        return 10

    def __iter__(self):
        self.last = iter(RowsFrom(self.start))
        self.start = 0
        return self.last

    def state_dict(self):
        return {"at": self.last.at if self.last else self.start}

    def load_state_dict(self, state):
        self.start, self.last = state["at"], None


class RowsFrom:
    def __init__(self, at):
        self.at = at

    def __iter__(self):
        return self

    def __next__(self):
        x, y = rows()
        if self.at == len(x) // 4:
            raise StopIteration
        self.at += 1
        return x[self.at * 4 - 4 : self.at * 4], y[self.at * 4 - 4 : self.at * 4]


class Stream:
    """A loader of unknown length over a data set that holds the position."""

    def __init__(self):
        self.inner = readme_batches()(*rows(), 4)

    def __iter__(self):
        for _ in range(10):
            yield from itertools.islice(self.inner, 1)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


def shuffled(**kwargs):
    return DataLoader(TensorDataset(*rows()), batch_size=4, shuffle=True, **kwargs)


LOADERS = {
    "README's": batches,
    "remembers its iterator": Remembering,
    "unknown length": Stream,
    "torch, shuffled": shuffled,
    "torch, with a generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "torch, workers that stay": lambda: shuffled(num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS.keys())
def test_a_run_trains_on_the_same_rows_after_a_range_test(make_loader, tmp_path):
    assert same_with_and_without(make_loader, tmp_path)


class Data(pl.LightningDataModule):
    """Counts what is read from it."""

    def __init__(self, loader):
        super().__init__()
        self.loader, self.position = loader, 0

    def train_dataloader(self):
        return Counting(self)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Counting:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 10

    def __iter__(self):
        x, y = rows()
        for _ in range(10):
            at = self.data.position % 10
            self.data.position += 1
            yield x[at * 4 : at * 4 + 4], y[at * 4 : at * 4 + 4]


def test_a_datamodule_that_holds_the_position(tmp_path):
    assert same_with_and_without(lambda: None, tmp_path, datamodule=Data)


def on_ranks(folder):
    return [
        same_with_and_without(make, folder, devices=2, strategy="ddp")
        for make in (batches, Remembering, Stream)
    ]


def test_on_two_ranks(ranks2, tmp_path):
    assert ranks2.run(on_ranks, str(tmp_path)) == [[True] * 3] * 2


def test_what_cannot_be_put_back_is_refused(tmp_path):
    loader = shuffled()
    with pytest.raises(ValueError, match="a dict of 2 loaders"):
        train(lambda: {"a": loader, "b": loader}, [LRRangeTest()], tmp_path)
    with pytest.raises(ValueError, match="is an iterator, and what is read"):
        ReadAside(x for x in range(3))
    with ReadAside(Empty()) as aside, pytest.raises(ValueError, match="gave no batch"):
        next(aside.batches)

    class Forgetful(Stream):
        def load_state_dict(self, state):
            pass

    with pytest.raises(RuntimeError, match=r"Forgetful\.load_state_dict did not bring back"):
        with ReadAside(Forgetful()) as aside:
            next(aside.batches)


class Empty:
    def __iter__(self):
        return iter(())


def test_the_copy_is_read_again_and_again_and_closed_first():
    events = []

    class Loader:
        def __iter__(self):
            try:
                yield from range(3)
            finally:
                events.append("closed")

        def state_dict(self):
            events.append("state")
            return {}

        def load_state_dict(self, state):
            raise AssertionError

    with ReadAside(Loader()) as aside:
        assert list(itertools.islice(aside.batches, 7)) == [0, 1, 2, 0, 1, 2, 0]
    assert events == ["state", "closed", "closed", "closed", "state"]


def test_states_are_compared_by_value():
    state = {"a": [1, torch.arange(3)], "b": (np.arange(2), None)}
    assert is_same(state, {"a": [1, torch.arange(3)], "b": (np.arange(2), None)})
    for other in (
        {"a": [1, torch.arange(3)]},
        {"a": [1, torch.arange(4)], "b": (np.arange(2), None)},
        {"a": [1, torch.arange(3)], "b": (np.arange(2) + 1, None)},
        {"a": [1.0, torch.arange(3)], "b": (np.arange(2), None)},
    ):
        assert not is_same(state, other)
