import math
from types import SimpleNamespace

import pytest
import torch

from callbacks.grad_norm import GradNormMonitor
from callbacks.token_weighted_loss import TokenWeightedLoss
from lit_gpt_loop.grad_squares import _copies, sum_of_squares
from lit_gpt_loop.noise_scale import NoiseScale, _exchanges_every_micro_batch
from lit_gpt_loop.strategies import FSDP2
from tests.distributed import noise_jobs
from tests.distributed.toys import Toy, fit

MASKS = ("none", "half", "random", "empty")


def watchers():
    return [TokenWeightedLoss(), GradNormMonitor()]


def check(answer, rel=1e-5):
    """Both unknowns agree with the reference; `rel` is of the squared norms that they are differences of."""
    (grad, noise), (expected_grad, expected_noise) = answer["measured"], answer["expected"]
    assert grad == pytest.approx(expected_grad, rel=rel)
    assert noise == pytest.approx(expected_noise, abs=rel * 20 * expected_grad)  # 24 tokens per micro-batch
    if expected_noise > 0:
        assert answer["logged"][-1] == pytest.approx(noise / grad)


@pytest.mark.parametrize("masks", MASKS)
def test_it_is_what_the_gradients_of_the_micro_batches_say(masks):
    answer = noise_jobs.measure(masks=masks)
    check(answer)
    assert len(answer["logged"]) == (2 if masks == "empty" else 3)  # a part without a token says nothing


def test_the_loss_scale_is_divided_out():
    check(noise_jobs.measure(precision="16-mixed", masks="half"), rel=2e-3)  # fp16 has 11 bits


def test_a_short_window_counts_unless_it_has_one_micro_batch():
    answer = noise_jobs.measure(drop=2)
    check(answer)
    assert len(answer["logged"]) == 3
    answer = noise_jobs.measure(drop=3)
    check(answer)
    assert len(answer["logged"]) == 2


def test_a_skipped_update_says_nothing():
    class NanLoss(Toy):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 3 else 1.0)

    scale = NoiseScale(warmup=1)
    parts = noise_jobs.micro_batches(1, 2, 3, "none")
    monitor = GradNormMonitor()
    fit(NanLoss(lr=0.0), parts, callbacks=[TokenWeightedLoss(), monitor, scale], accumulate=2)
    assert (monitor.counts.skipped, scale.num_updates) == (1, 2)
    plain = NoiseScale(warmup=1)
    fit(Toy(lr=0.0), parts[:2] + parts[4:], callbacks=[*watchers(), plain], accumulate=2)
    assert scale.average == plain.average


def test_averages_survive_a_restart_and_nothing_is_logged_before_the_warmup():
    scale = NoiseScale(warmup=50)
    trainer, logger, _ = fit(
        Toy(lr=0.0),
        noise_jobs.micro_batches(1, 2, 5, "none"),
        callbacks=[*watchers(), scale],
        accumulate=2,
    )
    assert "optim/noise_scale" not in trainer.callback_metrics
    assert logger.series("optim/noise_scale") == []
    again = NoiseScale()
    again.load_state_dict(scale.state_dict())
    assert (again.average, again.num_updates) == (scale.average, 5)


@pytest.mark.parametrize(
    ("callbacks", "accumulate", "message"),
    [
        ([TokenWeightedLoss(), NoiseScale(), GradNormMonitor()], 4, "list GradNormMonitor before it"),
        ([TokenWeightedLoss(), NoiseScale()], 4, "list GradNormMonitor before it"),
        ([GradNormMonitor(), NoiseScale()], 4, "list TokenWeightedLoss before it"),
        ([*watchers(), NoiseScale()], 1, "one micro-batch per update"),
    ],
)
def test_what_it_cannot_measure_is_refused(callbacks, accumulate, message):
    with pytest.raises(ValueError, match=message):
        fit(
            Toy(),
            noise_jobs.micro_batches(1, accumulate, 1, "none"),
            callbacks=callbacks,
            accumulate=accumulate,
        )
    with pytest.raises(ValueError, match="at least 1"):
        NoiseScale(memory=0)


def test_strategies_that_show_no_micro_batch_are_refused():
    class Mesh:
        mesh_dim_names = ("data_parallel", "tensor_parallel")

        def __getitem__(self, name):
            return self

        def size(self):
            return 2

    class Tensorwise(FSDP2):
        device_mesh = Mesh()

    with pytest.raises(ValueError, match="2 ranks share theirs by tensor parallelism"):
        _exchanges_every_micro_batch(Tensorwise(sync_every_micro_batch=True))
    with pytest.raises(ValueError, match="does not know when object exchanges gradients"):
        _exchanges_every_micro_batch(object())


def test_the_norm_of_a_part_is_as_exact_as_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in (1, 1000, 5000, 3 * 2**20 + 7)]
    exact = sum(float(t.double().square().sum()) for t in tensors)
    assert float(sum_of_squares(tensors)) == pytest.approx(exact, rel=1e-7)
    assert float(sum_of_squares([t.double() for t in tensors])) == pytest.approx(exact, rel=1e-12)
    assert float(sum_of_squares([])) == 0.0


def test_how_many_of_8_ranks_hold_a_value():
    def dtensor(*replicated):
        placements = [SimpleNamespace(is_replicate=lambda r=r: r) for r in replicated]
        mesh = SimpleNamespace(size=lambda i: (2, 4)[i])
        return SimpleNamespace(placements=placements, device_mesh=mesh)

    assert _copies(dtensor(True, False), 8, 1.0) == 2  # 2 groups of 4 shards
    assert _copies(dtensor(False, False), 8, 1.0) == 1
    assert _copies(dtensor(True, True), 8, 1.0) == 8
    assert _copies(SimpleNamespace(), 8, 1.0) == 8
    assert _copies(SimpleNamespace(_fsdp_flattened=True), 8, 2.0) == 2  # FSDP1 over 4 of 8 ranks


SYNCED = {"sync_every_micro_batch": True}
CASES = [
    {"strategy": "DDP", "masks": "random"},
    {"strategy": "DDP", "masks": "random", **SYNCED},
    {"strategy": "FSDP", "masks": "random"},
    {"strategy": "FSDP", "masks": "random", **SYNCED},
    {"strategy": "FSDP2", "masks": "random", **SYNCED},
]
MORE_CASES = [
    {"strategy": "DDP", "masks": "empty"},
    {"strategy": "DDP", "masks": "empty", **SYNCED},
    {"strategy": "DDP", "masks": "half"},
    {"strategy": "DDP", "masks": "half", **SYNCED},
    {"strategy": "FSDP", "masks": "empty", "sharding_strategy": "NO_SHARD", **SYNCED},
    {"strategy": "DDP", "drop": 3},
    {"strategy": "FSDP", "drop": 3},
    {"strategy": "FSDP2", "drop": 3, **SYNCED},
    {"strategy": "DDP", "precision": "16-mixed"},
    {"strategy": "FSDP", "precision": "16-mixed"},
    {"strategy": "FSDP2", "precision": "16-mixed", **SYNCED},
    {"strategy": "FSDP", "param_dtype": "bf16"},
]


def on_ranks(cases):
    return [noise_jobs.measure(**case) for case in cases]


def refused_on_ranks():
    messages = []
    for case in ({"strategy": "FSDP2"}, {"strategy": "FSDP", "use_orig_params": False}):
        with pytest.raises(ValueError) as error:
            noise_jobs.measure(**case)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)])
def test_on_two_ranks(ranks2, cases):
    first, second = ranks2.run(on_ranks, cases)
    assert first == second
    for case, answer in zip(cases, first, strict=True):
        low = 2e-3 if "precision" in case else 2e-2 if "param_dtype" in case else 1e-5
        try:
            check(answer, low)
        except AssertionError as error:
            raise AssertionError(f"{case}: {answer}") from error
        assert len(answer["logged"]) == (2 if "drop" in case else 3)


def test_on_two_ranks_what_it_cannot_measure_is_refused(ranks2):
    first, second = ranks2.run(refused_on_ranks)
    assert first == second
    assert "FSDP2(sync_every_micro_batch=True)" in first[0]
    assert "leave use_orig_params out" in first[1]
