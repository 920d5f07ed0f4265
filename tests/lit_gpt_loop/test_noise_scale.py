import os

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from callbacks.grad_norm import GradNormMonitor
from lit_gpt_loop.lr_scaling import noise_estimate, simple_noise_scale
from lit_gpt_loop.noise_scale import NoiseScale
from lit_gpt_loop.strategies import DDP

NOISE = 2.0


class Noisy(pl.LightningModule):
    """The gradient of a sample is the sample itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(callbacks, accumulate=4, steps=300, strategy="auto", devices=1, module=None, **kwargs):
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor([3.0, 4.0, 0.0, 0.0]) + NOISE * torch.randn(
        8 * accumulate * steps * devices, 4, generator=generator
    )
    if devices > 1:
        data = data[int(os.environ["RANK"]) :: devices]
    trainer = pl.Trainer(
        use_distributed_sampler=False, max_steps=steps, accumulate_grad_batches=accumulate, accelerator="cpu", devices=devices, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **kwargs,
    )  # fmt: skip
    trainer.fit(module or Noisy(), DataLoader(data, batch_size=8))
    return trainer


def test_it_is_the_formula_on_micro_batches():
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor([3.0, 4.0, 0.0, 0.0]) + NOISE * torch.randn(8 * 4 * 2, 4, generator=generator)
    estimates = []
    for update in data.split(32):
        small, big = update[:8].mean(0), update.mean(0)
        estimates.append(noise_estimate(float(small @ small), float(big @ big), 1, 4))
    trainer = fit([GradNormMonitor(), NoiseScale(memory=100, warmup=2)], steps=2)
    assert float(trainer.callback_metrics["optim/noise_scale"]) == pytest.approx(
        simple_noise_scale(estimates), rel=1e-5
    )


def test_averages_survive_a_restart_and_nothing_is_logged_before_the_warmup():
    scale = NoiseScale(warmup=50)
    trainer = fit([GradNormMonitor(), scale], steps=5)
    assert "optim/noise_scale" not in trainer.callback_metrics
    again = NoiseScale()
    again.load_state_dict(scale.state_dict())
    assert (again.average, again.num_updates) == (scale.average, 5)


@pytest.mark.parametrize(
    ("callbacks", "accumulate", "message"),
    [
        ([NoiseScale(), GradNormMonitor()], 4, "list GradNormMonitor before it"),
        ([NoiseScale()], 4, "list GradNormMonitor before it"),
        ([GradNormMonitor(), NoiseScale()], 1, "one micro-batch per update"),
    ],
)
def test_what_it_cannot_measure_is_refused(callbacks, accumulate, message):
    with pytest.raises(ValueError, match=message):
        fit(callbacks, accumulate, steps=1)
    with pytest.raises(ValueError, match="at least 1"):
        NoiseScale(memory=0)


def on_ranks():
    trainer = fit([GradNormMonitor(), NoiseScale(warmup=2)], strategy=DDP(), devices=2, steps=2)
    return float(trainer.callback_metrics["optim/noise_scale"])


def test_on_two_ranks_the_small_batch_is_each_ranks_first_one(ranks2):
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor([3.0, 4.0, 0.0, 0.0]) + NOISE * torch.randn(8 * 4 * 2 * 2, 4, generator=generator)
    estimates = []
    for update in data.split(64):
        firsts = [update[rank::2][:8].mean(0) for rank in range(2)]
        big = update.mean(0)
        estimates.append(noise_estimate(float(sum(g @ g for g in firsts)) / 2, float(big @ big), 1, 8))
    first, second = ranks2.run(on_ranks)
    assert first == second == pytest.approx(simple_noise_scale(estimates), rel=1e-5)
