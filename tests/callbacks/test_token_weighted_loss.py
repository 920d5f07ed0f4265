import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

import callbacks.token_weighted_loss as file
from callbacks.token_weighted_loss import (
    TokenWeightedLoss,
    block_gradients,
    describe,
    find_targets,
    keys_differ,
    remaining_factor,
)
from tests.distributed.token_jobs import (
    count_collectives,
    sweep,
    trainer_clip,
    untouched,
    values_fit,
)
from tests.distributed.toys import (
    STRATEGIES,
    CountingToy,
    Toy,
    fit,
    precision_arguments,
    sequences,
    whole,
)

KINDS = ("Toy", "CountingToy", "DividingToy")


def assert_exact(rows, tolerance=1e-6):
    for row in rows:
        assert row["gradient"] < tolerance and row["loss"] < tolerance, row
        assert row["tokens"] == 0 and row["updates"] == 1, row


# -- pure functions


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": torch.ones(2, 3).long()},
        {"targets": torch.ones(2, 3).int()},
        (torch.ones(2), torch.ones(2).long()),
    ],
)
def test_find_targets_understands(batch):
    assert find_targets(batch) is (batch[1] if isinstance(batch, tuple) else next(iter(batch.values())))


@pytest.mark.parametrize("batch", [{"x": 1}, torch.ones(2), (torch.ones(2), torch.ones(2)), [1, 2, 3], None])
def test_find_targets_does_not_guess(batch):
    assert find_targets(batch) is None


def test_describe_tells_the_structure():
    batch = {"x": torch.zeros(2, 3), "more": [torch.zeros(1).long(), "a"]}
    assert (
        describe(batch)
        == "{'x': Tensor(float32, shape (2, 3)), 'more': list(Tensor(int64, shape (1,)), str)}"
    )


@pytest.mark.parametrize(("nominal", "tokens", "factor"), [(64, 64, 1.0), (64, 32, 2.0), (8, 3, 8 / 3)])
def test_remaining_factor(nominal, tokens, factor):
    assert remaining_factor(nominal, tokens) == factor


@pytest.mark.parametrize(
    ("hashes", "differ"),
    [
        ([5, 5], False),
        ([5, 6], True),
        ([0xFFFFF] * 4096, False),
        ([0xFFFFF] * 4095 + [0xFFFFE], True),
        ([0, 0], False),
    ],
)
def test_keys_differ(hashes, differ):
    assert keys_differ(float(sum(hashes)), float(sum(h * h for h in hashes)), len(hashes)) is differ


def test_block_gradients_stops_nan_at_every_parameter_for_one_backward():
    w = torch.ones(2, requires_grad=True)
    loss = (w * w).sum() * (torch.zeros(()) / torch.zeros(()))
    handles = block_gradients(loss)
    loss.backward()
    assert w.grad.tolist() == [0.0, 0.0]
    for handle in handles:
        handle.remove()
    (w * w).sum().backward()
    assert w.grad.tolist() == [2.0, 2.0]


# -- the sweep: one set of sequences, every split


def test_sweep_one_process():
    assert_exact(sweep(None, KINDS))
    assert_exact(
        sweep(None, ("DividingToy",), splits=(32,))
    )  # a micro-batch of its own for the one without a target


def test_sweep_with_the_arithmetic_that_a_gpu_does(monkeypatch):
    monkeypatch.setattr(file._Count, "weigh", file._Count.weigh_on_device)
    assert_exact(sweep(None, KINDS))
    assert_exact(sweep(None, ("DividingToy",), splits=(32,)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sweep_two_ranks(ranks2, strategy):
    first, second = ranks2.run(sweep, strategy, KINDS)
    assert_exact(first)
    assert [r["seen"] for r in first] == [r["seen"] for r in second]
    assert [r["points"] for r in first] == [1] * len(first)
    assert_exact(ranks2.run(sweep, strategy, ("DividingToy",), splits=(16,))[0])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sweep_four_ranks(ranks4, strategy):
    answers = ranks4.run(sweep, strategy, KINDS)
    assert_exact(answers[0])
    assert all([r["seen"] for r in a] == [r["seen"] for r in answers[0]] for a in answers)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-2), ("16-mixed", 2e-3)])
def test_sweep_mixed_precision(ranks2, precision, tolerance):
    assert_exact(sweep(None, ("Toy",), precision, splits=(4,)), tolerance)
    for strategy in STRATEGIES:
        rows = ranks2.run(sweep, strategy, ("DividingToy",), precision, splits=(4, 16))[0]
        assert_exact(rows, tolerance)


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_clipping_by_the_trainer_clips_the_weighted_gradient(ranks2, strategy):
    error, norm = trainer_clip(None) if strategy is None else ranks2.run(trainer_clip, strategy)[0]
    assert norm > 0.5
    assert error < 2e-5  # the trainer divides by norm + 1e-6; weights round


# -- what it does not touch


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_full_micro_batches_are_left_alone_bitwise(ranks2, strategy):
    differences = [untouched(None)] if strategy is None else ranks2.run(untouched, strategy)
    assert set(differences) == {0.0}


def test_full_windows_cost_no_pass_over_the_gradients(monkeypatch):
    passes, multiply = [], torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *a: (passes.append(a[1]), multiply(*a)))
    inputs, targets = sequences(8)
    fit(Toy(), [(inputs, targets.clamp(min=0))] * 4, callbacks=[TokenWeightedLoss()], accumulate=2)
    assert passes == []
    fit(Toy(), [(inputs, targets)] * 4, callbacks=[TokenWeightedLoss()], accumulate=2)
    assert passes == [targets.numel() / (targets != -100).sum()] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_collective_per_update(ranks2, strategy):
    with_callback, without, updates = ranks2.run(count_collectives, strategy)[0]
    assert updates == 2
    assert (
        with_callback - without == updates + 1
    )  # one more when the fit begins, to agree on the nominal count


def test_module_is_as_before_after_the_fit_and_after_an_error():
    module = ValueErrorToy()
    batches = [sequences(2)]
    fit(module, batches, callbacks=[TokenWeightedLoss()])
    assert "training_step" not in vars(module)
    module.fails = True
    with pytest.raises(ZeroDivisionError):
        fit(module, batches, callbacks=[TokenWeightedLoss()])
    assert "training_step" not in vars(module)


class ValueErrorToy(Toy):
    fails = False

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


# -- windows without tokens


class Momentum(Toy):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)


def empty_window(strategy=None):
    inputs, targets = sequences(8)
    targets = targets.clamp(min=0)
    batches = [(inputs, targets), (inputs, torch.full_like(targets, -100)), (inputs, targets)]
    weights = []
    for chosen in (batches, [batches[0], batches[2]]):
        module = Momentum(sharded=strategy == "FSDP2")
        callback = TokenWeightedLoss()
        _, _, record = fit(module, chosen, strategy=strategy, callbacks=[callback])
        weights.append((whole(module, "data"), callback.empty_updates, record.metrics))
    (skipping, empty, metrics), (without, _, _) = weights
    same = all(torch.equal(skipping[n], without[n]) for n in without)
    return same, empty, [m.get("train/loss") for m in metrics], [m["train/tokens"] for m in metrics]


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_window_without_a_token_is_skipped_and_counted(ranks2, strategy):
    answers = [empty_window()] if strategy is None else ranks2.run(empty_window, strategy)
    for same, empty, losses, tokens in answers:
        assert same and empty == 1  # weights, moments and step counts as if the window had not been there
        assert losses[1] is None and tokens[1] == 0 and tokens[0] == tokens[2] > 0


def test_rank_without_a_token_contributes_nothing(ranks2):
    for got in ranks2.run(values_fit, "DDP", [[(0, 0.0)], [(4, 3.0)]]):
        assert got["loss"] == got["gradient"] == [pytest.approx(3.0, rel=1e-6)]


# -- restart


def test_restart_gives_the_same_weights_bitwise():
    inputs, targets = sequences(24)
    batches = [
        (inputs[i : i + n], targets[i : i + n])
        for i, n in ((0, 3), (3, 5), (8, 4), (12, 2), (14, 6), (20, 4))
    ]
    whole_run, half, resumed = Toy(), Toy(), Toy()
    before, after = TokenWeightedLoss(), TokenWeightedLoss()
    fit(whole_run, batches, callbacks=[TokenWeightedLoss()])
    fit(half, batches[:3], callbacks=[before])
    resumed.load_state_dict(half.state_dict())
    after.load_state_dict(before.state_dict())
    fit(resumed, batches[3:], callbacks=[after])
    for name, value in whole(whole_run, "data").items():
        assert torch.equal(value, whole(resumed, "data")[name]), name


def test_count_of_skipped_updates_goes_on_after_a_restart():
    inputs, targets = sequences(2)
    empty = [(inputs, torch.full_like(targets, -100))]
    first, second = TokenWeightedLoss(), TokenWeightedLoss()
    fit(Toy(), empty * 2, callbacks=[first])
    second.load_state_dict(first.state_dict())
    _, _, record = fit(Toy(), empty, callbacks=[second])
    assert record.metrics[0]["train/empty_updates"] == 3
    assert "train/loss" not in record.metrics[0]


# -- bad input


def test_unknown_batch_shows_its_structure_and_the_argument():
    class OwnBatch(Toy):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    x, y = sequences(2)
    with pytest.raises(ValueError, match=r"'x': Tensor\(int64, shape \(2, 6\)\).*count_tokens="):
        fit(OwnBatch(), [{"x": x, "y": y}], callbacks=[TokenWeightedLoss()])
    counter = TokenWeightedLoss(count_tokens=lambda batch: (batch["y"] != -100).sum())
    _, _, record = fit(OwnBatch(), [{"x": x, "y": y}], callbacks=[counter])
    assert record.metrics[0]["train/tokens"] == (y != -100).sum()


def test_negative_count_is_an_error():
    with pytest.raises(ValueError, match=r"must be >= 0, got -1"):
        fit(Toy(), [sequences(2)], callbacks=[TokenWeightedLoss(count_tokens=lambda batch: -1)])


def test_manual_optimization_is_refused():
    class Manual(Toy):
        automatic_optimization = False

    with pytest.raises(RuntimeError, match="automatic_optimization"):
        fit(Manual(), [sequences(2)], callbacks=[TokenWeightedLoss()])


def test_fused_optimizer_with_a_scaler_is_refused():
    class Fused(Toy):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    with pytest.raises(RuntimeError, match="fused=False"):
        fit(Fused(), [sequences(2)], callbacks=[TokenWeightedLoss()], **precision_arguments("16-mixed", None))


def test_counter_given_by_hand_goes_before_the_modules_count():
    x, y = sequences(2)
    _, _, record = fit(
        CountingToy(), [{"x": x, "y": y}], callbacks=[TokenWeightedLoss(count_tokens=lambda batch: 5)]
    )
    assert record.metrics[0]["train/tokens"] == 5


def test_what_the_module_counts_goes_before_what_the_batch_seems_to_hold():
    class OwnMeaning(Toy):
        def training_step(self, batch, batch_idx):
            inputs, _ = batch
            return {"loss": self.net(inputs).square().mean(), "num_tokens": inputs.numel()}

    inputs, targets = sequences(2)
    batch = (inputs, torch.full_like(targets, -100))
    _, _, record = fit(OwnMeaning(), [batch], callbacks=[TokenWeightedLoss()])
    assert record.metrics[0]["train/tokens"] == inputs.numel()
    assert record.gradients[0]["net.embed.weight"].any()


# -- alone


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_copied_alone_the_sweep_is_as_exact(ranks2, tmp_path, strategy):
    path = str(shutil.copy(file.__file__, tmp_path / "token_weighted_loss.py"))
    rows = sweep(strategy, path=path) if strategy is None else ranks2.run(sweep, strategy, path=path)[0]
    assert_exact(rows)


@pytest.mark.slow
def test_copied_alone_in_a_process_that_knows_nothing_else(tmp_path):
    shutil.copy(file.__file__, tmp_path / "token_weighted_loss.py")
    script = """
        import sys
        sys.path.insert(0, FOLDER)
        import lightning.pytorch as pl, torch
        from torch.utils.data import DataLoader
        from token_weighted_loss import TokenWeightedLoss

        class Mine(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(1))
            def training_step(self, batch, i):
                return (batch[0] * self.w)[batch[1] != -100].mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.25)

        data = [(torch.tensor([1.0, 1, 1, 9]), torch.tensor([1, 1, 1, -100])),
                (torch.tensor([5.0, 9, 9, 9]), torch.tensor([1, -100, -100, -100]))]
        mine = Mine()
        pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
                   enable_progress_bar=False, callbacks=[TokenWeightedLoss()]).fit(mine, DataLoader(data, batch_size=None))
        assert not {"callbacks", "lit_gpt_loop", "recipes"} & set(sys.modules)
        print("weight", mine.w.item())
    """
    script = textwrap.dedent(script).replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "weight 0.5" in done.stdout, done.stderr[-2000:]
