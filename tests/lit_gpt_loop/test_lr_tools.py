import json
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from callbacks.grad_norm import GradNormMonitor
from callbacks.loop_audit import LoopAudit
from callbacks.restart_equivalence import RestartEquivalence
from callbacks.token_weighted_loss import TokenWeightedLoss
from lit_gpt_loop.lr_range import LRRangeTest, RangeResult, range_test
from lit_gpt_loop.lr_scaling import (
    AdamSettings,
    NoiseEstimate,
    linear_scaled_lr,
    noise_estimate,
    scaled_adam,
    simple_noise_scale,
    sqrt_scaled_lr,
)
from lit_gpt_loop.module import LitGPT
from lit_gpt_loop.strategies import DDP, FSDP, FSDP2
from tests.distributed import range_jobs
from tests.distributed.toys import Toy, fit
from tests.lit_gpt_loop.small_data import data_of


def test_scaling_rules():
    assert linear_scaled_lr(0.1, 256, 8192) == pytest.approx(3.2)  # Goyal et al.'s own example
    assert sqrt_scaled_lr(3e-4, 512, 2048) == pytest.approx(6e-4)
    assert sqrt_scaled_lr(3e-4, 512, 128) == pytest.approx(1.5e-4)
    scaled = scaled_adam(AdamSettings(3e-4, (0.9, 0.95), 1e-8), 512, 2048)
    assert scaled.lr == pytest.approx(6e-4)
    assert scaled.betas == pytest.approx((0.6, 0.8))
    assert scaled.eps == pytest.approx(5e-9)
    back = scaled_adam(scaled, 2048, 512)
    assert (back.lr, back.eps) == pytest.approx((3e-4, 1e-8)) and back.betas == pytest.approx((0.9, 0.95))
    with pytest.raises(ValueError, match="reaches to batches below 5120"):
        scaled_adam(AdamSettings(3e-4, (0.9, 0.95), 1e-8), 512, 6000)
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="must be above 0"):
            linear_scaled_lr(*bad)


def test_noise_scale_of_a_known_distribution():
    """Per-sample gradients g ~ N(G, S): the estimate comes to tr(S) / |G|^2."""
    rng = np.random.default_rng(0)
    mean, deviation = np.array([3.0, 4.0, 0.0]), np.array([2.0, 1.0, 5.0])
    estimates = []
    for _ in range(4000):
        samples = mean + deviation * rng.normal(size=(32, 3))
        small, big = samples[:4].mean(0), samples.mean(0)
        estimates.append(noise_estimate(small @ small, big @ big, 4, 32))
    assert simple_noise_scale(estimates) == pytest.approx(30.0 / 25.0, rel=0.05)


def test_noise_scale_by_hand_and_its_limits():
    assert noise_estimate(9.0, 5.0, 1, 2) == NoiseEstimate(1.0, 8.0)
    assert simple_noise_scale([NoiseEstimate(1.0, 8.0)]) == 8.0
    assert simple_noise_scale([NoiseEstimate(4.0, 0.0)]) == 0.0
    assert simple_noise_scale([NoiseEstimate(-1.0, 8.0)]) is None
    assert simple_noise_scale([]) is None
    with pytest.raises(ValueError, match="accumulate at least two"):
        noise_estimate(1.0, 1.0, 8, 8)
    with pytest.raises(ValueError, match="must not be negative"):
        noise_estimate(-1.0, 1.0, 1, 8)


# --- range test --------------------------------------------------------------------------------------------------------


def quadratic():
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 0.5}])

    def update() -> float:
        loss = 0.5 * 2.0 * net.weight.square().sum()  # curvature 2: diverges above a rate of 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return net, optimizer, update


def test_range_test_finds_where_a_quadratic_diverges():
    net, optimizer, update = quadratic()
    result = range_test(update, optimizer, [net], 1e-4, 10.0, 60)
    assert result.stopped_early
    assert result.rates[0] == pytest.approx(1e-4)
    ratios = [b / a for a, b in zip(result.rates, result.rates[1:], strict=False)]
    assert min(ratios) == pytest.approx(max(ratios)) == pytest.approx(1e5 ** (1 / 59))
    assert 1.0 < result.rates[-1] < 10.0
    assert 1e-2 < result.suggestion < result.lr_at_minimum < 10.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(net.weight, torch.ones(1, 4))


def test_groups_keep_their_ratio_of_rates():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1}])
    seen = []
    range_test(
        lambda: seen.append([g["lr"] for g in optimizer.param_groups]) or 1.0, optimizer, [], 1e-3, 1.0, 3
    )
    assert np.allclose(seen, [[1e-3, 2.5e-4], [10**-1.5, 10**-1.5 / 4], [1.0, 0.25]])
    assert [g["lr"] for g in optimizer.param_groups] == [0.4, 0.1]


def test_everything_is_put_back_even_after_an_error():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()  # moments exist
    moments = {p: dict(s) for p, s in optimizer.state.items()}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)

    def everything():
        state = [
            t.clone()
            for t in (*net.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values()))
        ]
        grads = [p.grad.clone() for p in net.parameters()]
        return state + grads + [
            torch.get_rng_state(),
            torch.tensor(np.random.get_state()[1].astype("int64")),
        ], random.getstate()

    before, python_before = everything()
    calls = []

    def update() -> float:
        calls.append((random.random(), np.random.rand()))
        optimizer.zero_grad()
        loss = net(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if len(calls) == 4:
            raise RuntimeError("in the middle")
        return float(loss.detach())

    with pytest.raises(RuntimeError, match="in the middle"):
        range_test(update, optimizer, [net], 1e-3, 1.0, 10)
    after, python_after = everything()
    assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert python_before == python_after
    assert all(optimizer.state[p][k] is v for p, s in moments.items() for k, v in s.items())


def test_moments_that_were_not_there_are_gone_again():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())

    def update() -> float:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return 1.0

    range_test(update, optimizer, [net], 1e-3, 1.0, 3)
    assert not optimizer.state
    assert all(p.grad is None for p in net.parameters())


def test_nothing_to_suggest():
    assert RangeResult().suggestion is None and RangeResult().lr_at_minimum is None
    rising = RangeResult([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    assert rising.suggestion is None and rising.lr_at_minimum == 1.0
    _, optimizer, _ = quadratic()
    stopped = range_test(lambda: float("nan"), optimizer, [], 1e-3, 1.0, 5)
    assert stopped.stopped_early and stopped.rates == []
    with pytest.raises(ValueError, match="must be above 0 and below"):
        range_test(lambda: 1.0, optimizer, [], 1.0, 0.1)
    with pytest.raises(ValueError, match="at least 3"):
        range_test(lambda: 1.0, optimizer, [], 0.1, 1.0, 2)


def train(folder, callbacks, strategy="auto", devices=1, steps=4, workers=0, **kwargs):
    """Fit a tiny GPT with dropout; return its weights, moments and the samples and losses of its updates."""
    pl.seed_everything(3, verbose=False)
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((batch["sample_ids"].tolist(), float(outputs["loss"])))

    module = LitGPT(
        "tiny",
        {"dropout": 0.1},
        vocab_size=257,
        context_length=16,
        lr=1e-2,
        schedule={"warmup_steps": 0, "decay_steps": 0},
    )
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, default_root_dir=str(folder),
        use_distributed_sampler=False, callbacks=[*callbacks, Watch()], **kwargs,
    )  # fmt: skip
    trainer.fit(module, datamodule=data_of(folder, num_workers=workers))
    weights = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in module.named_parameters()
    }
    return weights, seen, module.updates


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_as_if_it_had_not_been_tested(tmp_path, workers):
    plain, samples, _ = train(tmp_path, [TokenWeightedLoss()], workers=workers)
    test = LRRangeTest(min_lr=1e-5, max_lr=10.0, num_updates=12)
    watchers = [
        LoopAudit(),
        RestartEquivalence(),
        GradNormMonitor(),
    ]  # none of them takes the test for training
    tested, samples_again, updates = train(tmp_path, [TokenWeightedLoss(), *watchers, test], workers=workers)
    assert samples == samples_again
    assert all(torch.equal(plain[n], tested[n]) for n in plain)
    assert updates == 4
    assert len(test.result.rates) >= 3
    saved = json.loads((tmp_path / "lr_range.json").read_text())
    assert saved["rates"] == test.result.rates


def test_it_can_end_the_run(tmp_path):
    _, samples, updates = train(tmp_path, [LRRangeTest(num_updates=3, stop_after=True)])
    assert (samples, updates) == ([], 0)


def test_no_clock_counts_the_test_and_it_tells_how_far_it_is(tmp_path, caplog, monkeypatch):
    class Starts(pl.Callback):
        def on_train_start(self, *_):
            self.is_tested = test.result is not None

    monkeypatch.setattr("lit_gpt_loop.lr_range._TELLS_EVERY_S", -1.0)
    before, after, test = Starts(), Starts(), LRRangeTest(min_lr=1e-5, max_lr=1e-3, num_updates=4)
    with caplog.at_level("INFO"):
        train(tmp_path, [before, test, after])
    assert before.is_tested and after.is_tested
    assert "update 3 of 4, rate 0.000215, loss 5." in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"min_lr": 1.0, "max_lr": 0.1}, "must be above 0 and below"), ({"num_updates": 2}, "at least 3")],
)
def test_arguments_are_checked_when_they_are_given(arguments, message):
    with pytest.raises(ValueError, match=message):
        LRRangeTest(**arguments)


def test_it_refuses_what_would_hide_divergence(tmp_path):
    class Scaled(pl.plugins.MixedPrecision):
        def __init__(self):
            super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

    with pytest.raises(ValueError, match="fp16 scaler"):
        train(tmp_path, [LRRangeTest()], plugins=[Scaled()])


def on_ranks(folder):
    results = []
    for make in (DDP, FSDP, FSDP2):
        plain, samples, _ = train(folder, [], strategy=make(), devices=2)
        test = LRRangeTest(min_lr=1e-5, max_lr=1.0, num_updates=5)
        tested, again, _ = train(folder, [test], strategy=make(), devices=2)
        results.append(
            (
                make.__name__,
                samples == again,
                all(torch.equal(plain[n], tested[n]) for n in plain),
                test.result.losses,
            )
        )
    return results


@pytest.mark.slow
def test_on_two_ranks_everything_is_put_back(ranks2, tmp_path):
    first, second = ranks2.run(on_ranks, str(tmp_path))
    for (name, same_samples, same_weights, losses), other in zip(first, second, strict=True):
        assert same_samples and same_weights, name
        assert losses == other[3], name
        assert losses == pytest.approx(first[0][3], rel=1e-4), name


# --- its updates are those of the run ------------------------------------------------------------------------------------

CLIPPED = [
    (False, None, False),
    (True, None, False),
    (False, 0.2, False),
    (True, 0.2, False),
    (True, 0.2, True),
]


@pytest.mark.parametrize("case", CLIPPED)
def test_only_the_rate_differs_from_a_run(case):
    losses, expected = range_jobs.losses_of_test(None, *case)
    assert losses == pytest.approx(expected, rel=1e-6)


def clipped_on_ranks():
    cases = [("DDP", *case) for case in CLIPPED] + [
        (name, *case) for name in ("FSDP", "FSDP2") for case in CLIPPED[-2:]
    ]
    cases = [case for case in cases if case[0] != "FSDP2" or not case[-1]] + [("FSDP2", True, 0.2, True)]
    return [(case, *range_jobs.losses_of_test(*case)) for case in cases]


@pytest.mark.slow
def test_only_the_rate_differs_on_two_ranks(ranks2):
    first, second = ranks2.run(clipped_on_ranks)
    assert first == second
    for case, losses, expected in first:
        assert losses == pytest.approx(expected, rel=1e-5), case


def test_callbacks_are_as_they_were_before(tmp_path):
    weigher, monitor = TokenWeightedLoss(), GradNormMonitor(clip_norm=0.1)
    seen = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            seen.append(
                ({**vars(weigher)}, {**vars(monitor)}, repr(monitor.counts), dict(trainer.callback_metrics))
            )

    test = LRRangeTest(num_updates=5, stop_after=True)
    fit(
        Toy(),
        range_jobs.micro_batches(1),
        callbacks=[weigher, monitor, Watch(), test, Watch()],
        accumulate=2,
        default_root_dir=tmp_path,
    )
    assert len(seen) == 2 and seen[0] == seen[1]


class Edge(Toy):
    """The gradient of the first update is infinite, its loss is not; the third window holds no token."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        w = self.net.gain
        value = (w - 1.0).abs().sqrt().sum() + x.float().mean()
        self.log("train/mine", value, on_step=True)
        self.log_dict({"train/x": x.float().mean(), "train/y": value})
        return {"loss": value, "num_tokens": (y != -100).sum()}

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1, batch[1]


def test_infinite_gradients_and_windows_without_a_token_are_left_out_as_in_a_run(tmp_path):
    x, y = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    batches = [(x, y), (x, y), (x, y - 101), (x, y)]
    test = LRRangeTest(min_lr=0.1, max_lr=1.6, num_updates=5, stop_after=True)
    fit(Edge(), batches, callbacks=[TokenWeightedLoss(), GradNormMonitor(), test], default_root_dir=tmp_path)
    assert test.result.losses == [1.0] * 4  # 1 of the hook before the transfer; nothing moves
    assert test.result.rates == pytest.approx([0.1, 0.2, 0.8, 1.6]) and not test.result.stopped_early
    without = LRRangeTest(min_lr=0.1, max_lr=1.6, num_updates=5, stop_after=True)
    fit(Edge(), batches, callbacks=[TokenWeightedLoss(), without], default_root_dir=tmp_path)
    assert without.result.stopped_early and without.result.losses == [1.0]


def test_an_update_that_says_nothing_leaves_no_point():
    losses = iter([None, 4.0, None, 2.0])
    result = range_test(
        lambda: next(losses), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), [], 1.0, 8.0, 4
    )
    assert result.rates == pytest.approx([2.0, 8.0]) and result.losses == [4.0, 2.0]
    assert result.smoothed == pytest.approx([4.0, (0.9 * 0.1 * 4.0 + 0.1 * 2.0) / (1 - 0.9**2)])
