"""SampleText: the same words from the same weights, and nothing else changed."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from callbacks.sample_text import SampleText, pick_token
from lit_gpt_loop.journal import JournalLogger, read_journal
from lit_gpt_loop.strategies import DDP, FSDP

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def encode(text):
    return [LETTERS.index(c) for c in text]


def decode(ids):
    return "".join(LETTERS[i] for i in ids)


class Bigram(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(len(LETTERS), len(LETTERS))
        self.dropout = nn.Dropout(0.1)
        self.frozen_mode = nn.BatchNorm1d(4, affine=False).eval()
        self.losses = []

    def forward(self, x):
        return self.dropout(self.table(x))

    def training_step(self, batch, i):
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.table.parameters(), 1.0)


def fit(callbacks, tmp_path, strategy="auto", devices=1, steps=6):
    torch.manual_seed(5)
    data = torch.tensor([encode("the quick fox")] * 32)
    module = Bigram()
    pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, callbacks=callbacks, logger=JournalLogger(tmp_path),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        use_distributed_sampler=False,
    ).fit(module, DataLoader(data, batch_size=4))  # fmt: skip
    return module


def sampler(**kwargs):
    return SampleText(
        ["the "], every_n_steps=2, max_new_tokens=12, encode=encode, decode=decode, context_length=8, **kwargs
    )


def test_training_is_bitwise_the_same_with_and_without(tmp_path):
    without = fit([], tmp_path / "a")
    with_samples = fit([sampler(print_samples=False)], tmp_path / "b")
    assert without.losses == with_samples.losses
    assert torch.equal(without.table.weight, with_samples.table.weight)
    assert not with_samples.frozen_mode.training
    assert with_samples.dropout.training


def test_samples_are_logged_every_n_updates_and_at_the_end(tmp_path, capsys):
    fit([sampler()], tmp_path, steps=5)
    rows = [r for r in read_journal(tmp_path) if r["kind"] == "text"]
    assert [r["step"] for r in rows] == [2, 4, 5]
    assert len(rows[0]["samples/text"][0]["continuation"]) == 12
    assert "update 2: the " in capsys.readouterr().out


def test_the_same_weights_give_the_same_words(tmp_path):
    callback = sampler(print_samples=False)
    module = fit([callback], tmp_path)
    assert callback.sample(module) == callback.sample(module)


def test_the_end_token_ends_a_text(tmp_path):
    callback = sampler(print_samples=False, eot_id=LETTERS.index(" "), temperature=0)
    module = fit([callback], tmp_path)
    with torch.no_grad():
        module.table.weight.zero_()
        module.table.weight[LETTERS.index(" "), 0] = 9.0
        module.table.weight[0, LETTERS.index(" ")] = 9.0
    assert callback.sample(module) == ["a"]


def _on_ranks(tmp_path):
    out = []
    for strategy in (DDP(), FSDP()):
        callback = sampler(print_samples=False)
        fit([callback], f"{tmp_path}/{type(strategy).__name__}", strategy, devices=2)
        out.append(callback._last_step)
    return out


def test_ranks_sample_together_under_ddp_and_fsdp(ranks2, tmp_path):
    assert ranks2.run(_on_ranks, str(tmp_path)) == [[6, 6], [6, 6]]
    for name in ("DDP", "FSDP"):
        rows = [r for r in read_journal(tmp_path / name) if r["kind"] == "text"]
        assert [r["step"] for r in rows] == [2, 4, 6]


def test_pick_token_follows_the_distribution():
    g = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = torch.tensor([pick_token(logits, 1.0, None, g) for _ in range(8000)])
    share = torch.bincount(draws, minlength=4) / 8000
    torch.testing.assert_close(share, torch.softmax(logits, 0), atol=0.02, rtol=0)
    assert {pick_token(logits, 1.0, 2, g) for _ in range(200)} == {1, 2}
    assert pick_token(logits, 0.0, None, g) == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompts": "abc"}, "must be a list of texts"),
        ({"prompts": [""]}, "none of them empty"),
        ({"every_n_steps": 0}, "every_n_steps=0 must be at least 1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_bad_input(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SampleText(**kwargs)


def test_without_a_tokenizer_one_error_names_both_remedies(tmp_path):
    with pytest.raises(ValueError, match="give encode= and decode=, or a datamodule"):
        fit([SampleText(["a"], context_length=8)], tmp_path)
