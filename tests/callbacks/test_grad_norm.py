import math
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import callbacks.grad_norm as file
from callbacks.grad_norm import (
    Counts,
    GradNormMonitor,
    _part_of_dtensor,
    clip_coefficient,
    layer_of,
    plain_name,
    sum_of_squares,
)
from callbacks.token_weighted_loss import TokenWeightedLoss
from tests.distributed.norm_jobs import (
    VectorToy,
    count_reductions,
    halving,
    norm_of_copies,
    norm_of_everything,
    vectors_fit,
)
from tests.distributed.toys import STRATEGIES, Toy, fit, precision_arguments, sequences

ROW = torch.tensor([[3.0, 4.0]])

# -- pure functions


@pytest.mark.parametrize(
    ("norm", "clip", "coefficient"),
    [(5.0, 1.0, 0.2), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (5.0, None, 1.0), (0.0, 1.0, 1.0)],
)
def test_clip_coefficient(norm, clip, coefficient):
    assert clip_coefficient(norm, clip) == coefficient


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.blocks.3.attn.weight", "model.blocks.3"),
        ("model.embed.weight", "model.embed"),
        ("w", "w"),
        ("0.weight", "0"),
        ("layers.12.bias", "layers.12"),
    ],
)
def test_layer_of(name, layer):
    assert layer_of(name) == layer


def test_plain_name():
    assert (
        plain_name("_fsdp_wrapped_module.net._orig_mod.blocks.0._checkpoint_wrapped_module.w")
        == "net.blocks.0.w"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sum_of_squares_against_float64(dtype):
    tensors = [
        torch.randn(300, 70).to(dtype),
        torch.randn(70, 300).to(dtype).t(),
        torch.randn(7).to(dtype),
        torch.zeros(0, dtype=dtype),
    ]
    assert float(sum_of_squares(tensors)) == pytest.approx(
        float(sum(t.double().square().sum() for t in tensors)), rel=1e-6
    )
    assert float(sum_of_squares([])) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_of_many_values_keeps_six_digits(dtype):
    t = torch.randn(3_000_001).to(dtype)  # torch.linalg.vector_norm is off by 6e-5 here
    assert float(sum_of_squares([t])) == pytest.approx(float(t.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_shows_what_is_not_finite(bad, dtype):
    assert not math.isfinite(float(sum_of_squares([torch.tensor([1.0, bad], dtype=dtype)])))


# -- the norm


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_norm_of_everything_in_any_order_of_the_list(ranks2, strategy):
    """Tied weights once, frozen and unused parameters, layers, weights, clipping; with TokenWeightedLoss on either side."""
    results = [norm_of_everything(None)] if strategy is None else ranks2.run(norm_of_everything, strategy)
    for got in results:
        for answer in got["answers"]:
            assert answer["norm"] == pytest.approx(got["norm"], rel=1e-6)
            assert answer["block"] == pytest.approx(got["block"], rel=1e-6)
            assert answer["weights"] == pytest.approx(got["weights"], rel=1e-6)
            assert answer["applied"] < 1e-6
    assert len({str(got["answers"]) for got in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norm_of_everything_on_four_ranks(ranks4, strategy):
    for got in ranks4.run(norm_of_everything, strategy):  # blocks of 5 rows and a parameter of 1 on 4 ranks
        assert got["answers"][0]["norm"] == pytest.approx(got["norm"], rel=1e-6)
        assert got["answers"][1]["weights"] == pytest.approx(got["weights"], rel=1e-6)
        assert got["answers"][1]["applied"] < 1e-6


@pytest.mark.parametrize(("strategy", "weights"), [("FSDP", 5.0), ("FSDP2", math.hypot(5.0, 10.0))])
def test_values_that_every_rank_holds_count_once(ranks2, strategy, weights):
    for got in ranks2.run(norm_of_copies, strategy):
        assert got["norm"] == pytest.approx(5.0, rel=1e-6)
        assert got["weights"] == pytest.approx(weights, rel=1e-6)


def test_part_of_a_parameter_that_a_mesh_replicates():
    class Placement(str):
        def is_replicate(self):
            return self == "replicate"

    class Mesh:
        def size(self, dimension):
            return (2, 4)[dimension]

    class Parameter:
        device_mesh = Mesh()
        placements = (Placement("replicate"), Placement("shard"))

    assert _part_of_dtensor(Parameter(), 8) == 0.5
    assert _part_of_dtensor(torch.ones(1), 8) == 0.125


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-2), ("16-mixed", 2e-3)])
def test_norm_in_mixed_precision(ranks2, precision, tolerance):
    for strategy in STRATEGIES:
        got = ranks2.run(norm_of_everything, strategy, precision)[0]
        assert got["answers"][0]["norm"] == pytest.approx(got["norm"], rel=tolerance)


@pytest.mark.parametrize(("strategy", "per_update"), [("DDP", 0), ("FSDP", 1), ("FSDP2", 1)])
def test_one_reduction_per_update_and_none_where_nothing_is_sharded(ranks2, strategy, per_update):
    reductions, updates = ranks2.run(count_reductions, strategy)[0]
    assert updates == 2 and reductions == per_update * updates


def test_nothing_is_touched_below_the_threshold():
    got = vectors_fit(None, [[(0.3, 0.4)]])
    assert got["metrics"][0]["optim/clip_coefficient"] == 1.0
    assert torch.tensor(got["applied"][0]).equal(torch.tensor([0.3, 0.4]))


def test_trainer_clipping_by_value_is_not_taken_for_clipping_by_norm():
    got = vectors_fit(
        None, [[(3.0, 4.0)]], clip_norm=None, gradient_clip_val=1.0, gradient_clip_algorithm="value"
    )
    assert got["metrics"][0]["optim/clipped"] == 0.0 and got["norm"] == [5.0]


def test_clip_fraction_runs_on_after_a_restart(tmp_path):
    monitor = GradNormMonitor(clip_norm=1.0)
    trainer, _, record = fit(VectorToy(), [ROW, ROW * 0.1, ROW * 0.1], callbacks=[monitor])
    assert [m["optim/clip_fraction"] for m in record.metrics] == [1.0, 0.5, pytest.approx(1 / 3)]
    trainer.save_checkpoint(tmp_path / "three")
    _, _, record = fit(
        VectorToy(),
        [ROW] * 4,
        callbacks=[GradNormMonitor(clip_norm=1.0)],
        ckpt_path=str(tmp_path / "three"),
        max_epochs=-1,
        max_steps=4,
    )
    assert record.metrics[-1]["optim/clip_fraction"] == 0.5


def test_log_every_n_steps_thins_points_but_not_clipping():
    module = VectorToy()
    _, logger, _ = fit(module, [ROW] * 5, callbacks=[GradNormMonitor(clip_norm=1.0, log_every_n_steps=2)])
    assert [step for step, _ in logger.points] == [2, 4]
    assert module.net.w.tolist() == pytest.approx([-3.0, -4.0], rel=1e-5)


def test_weight_norm_is_measured_at_the_first_ten_updates_and_then_at_multiples():
    _, logger, _ = fit(VectorToy(), [ROW] * 31, callbacks=[GradNormMonitor(weight_norm_every_n_steps=15)])
    assert [step for step, m in logger.points if "optim/weight_norm" in m] == [*range(1, 11), 15, 30]


def test_weight_norm_keeps_to_logged_updates():
    _, logger, _ = fit(VectorToy(), [ROW] * 60, callbacks=[GradNormMonitor(log_every_n_steps=7)])
    assert [step for step, m in logger.points if "optim/grad_norm" in m] == [7, 14, 21, 28, 35, 42, 49, 56]
    # 7 is among the first ten updates; then the first that is logged from 10, 20, 30, 40, 50 on
    assert [step for step, m in logger.points if "optim/weight_norm" in m] == [7, 14, 21, 35, 42, 56]


@pytest.mark.parametrize(
    ("update", "log_every", "measure_every", "is_measured"),
    [
        (1, 1, 10, True), (10, 1, 10, True), (11, 1, 10, False), (20, 1, 10, True), (15, 1, 15, True),
        (1, 7, 10, False), (10, 7, 10, False), (70, 7, 10, True), (63, 7, 10, True), (49, 7, 10, False),
        (21, 7, 3, True), (50, 50, 10, True), (500, 50, 10, True), (150, 50, 100, False), (200, 50, 100, True),
    ],
)  # fmt: skip
def test_when_the_weight_norm_is_measured(update, log_every, measure_every, is_measured):
    assert file.is_weight_norm_due(update, log_every, measure_every) == is_measured


# -- skips


@pytest.mark.parametrize(
    "scheduler",
    [
        halving,
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
            ],
            [2],
        ),
    ],
)
def test_any_stock_schedule_stands_still_in_a_skip(scheduler):
    bad = ROW * float("nan")
    with_skips, without = VectorToy(scheduler=scheduler), VectorToy(scheduler=scheduler)
    fit(with_skips, [ROW, bad, ROW, bad, bad, ROW, ROW], callbacks=[GradNormMonitor()])
    fit(without, [ROW] * 4, callbacks=[GradNormMonitor()])
    assert [with_skips.rates[i] for i in (0, 2, 5, 6)] == without.rates
    assert torch.equal(with_skips.net.w, without.net.w)


def test_update_without_a_token_counts_as_skipped_and_not_as_nonfinite():
    x, y = sequences(4)
    empty = (x, torch.full_like(y, -100))
    _, _, record = fit(Toy(), [(x, y), empty, (x, y)], callbacks=[GradNormMonitor(), TokenWeightedLoss()])
    assert [m["optim/skipped_updates"] for m in record.metrics] == [0, 1, 1]
    assert record.metrics[-1]["optim/nonfinite_updates"] == 0
    assert "optim/grad_norm" not in record.metrics[1]


def test_only_faults_in_a_row_stop_the_run():
    bad = ROW * float("inf")
    monitor = GradNormMonitor(max_consecutive_skips=3)
    fit(VectorToy(), [bad, bad, ROW, bad, bad], callbacks=[monitor])
    assert monitor.counts == Counts(measured=1, clipped=0, nonfinite=4, skipped=4)
    with pytest.raises(RuntimeError, match=r"3 updates in a row.*net\.w.*batch_idx 2"):
        fit(VectorToy(), [bad, bad, bad, ROW], callbacks=[GradNormMonitor(max_consecutive_skips=3)])


def test_first_parameter_with_a_fault_is_named():
    class Two(Toy):
        def __init__(self):
            super().__init__(net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))

        def training_step(self, batch, batch_idx):
            self.net[1].bias.register_hook(lambda g: g * float("inf"))
            return self.net(batch).sum()

    monitor = GradNormMonitor()
    fit(Two(), [ROW], callbacks=[monitor])
    assert "First parameter with inf or NaN: net.1.bias." in monitor._fault
    assert "each loss was finite" in monitor._fault


def test_weights_that_are_not_finite_stop_the_run_at_once():
    module = VectorToy()
    module.net.w.data[0] = float("nan")
    with pytest.raises(RuntimeError, match="hold inf or NaN before update 1"):
        fit(module, [ROW], callbacks=[GradNormMonitor()])


# -- bad input


@pytest.mark.parametrize("clip", [0, -1.0, float("nan")])
def test_clip_norm_must_be_positive(clip):
    with pytest.raises(ValueError, match="number > 0"):
        GradNormMonitor(clip_norm=clip)


@pytest.mark.parametrize("name", ["log_every_n_steps", "weight_norm_every_n_steps", "max_consecutive_skips"])
def test_intervals_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        GradNormMonitor(**{name: 0})


def test_clipping_twice_is_refused():
    with pytest.raises(ValueError, match="Remove gradient_clip_val from the Trainer, or clip_norm"):
        fit(VectorToy(), [ROW], callbacks=[GradNormMonitor(clip_norm=1.0)], gradient_clip_val=1.0)


def test_fused_optimizer_with_a_scaler_is_refused():
    class Fused(VectorToy):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    with pytest.raises(RuntimeError, match="fused=False"):
        fit(Fused(), [ROW], callbacks=[GradNormMonitor()], **precision_arguments("16-mixed", None))


def test_manual_optimization_is_refused():
    class Manual(VectorToy):
        automatic_optimization = False

    with pytest.raises(RuntimeError, match="automatic_optimization"):
        fit(Manual(), [ROW], callbacks=[GradNormMonitor()])


# -- alone


@pytest.mark.slow
def test_copied_alone_in_a_process_that_knows_nothing_else(tmp_path):
    shutil.copy(file.__file__, tmp_path / "grad_norm.py")
    script = """
        import sys
        sys.path.insert(0, FOLDER)
        import lightning.pytorch as pl, torch
        from torch.utils.data import DataLoader
        from grad_norm import GradNormMonitor

        class Mine(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.zeros(2))
            def training_step(self, batch, i):
                return (batch @ self.w).mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1.0)

        mine = Mine()
        trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, callbacks=[GradNormMonitor(clip_norm=1.0)])
        trainer.fit(mine, DataLoader([torch.tensor([[3.0, 4.0]])], batch_size=None))
        assert not {"callbacks", "lit_gpt_loop", "recipes"} & set(sys.modules)
        print("norm", trainer.callback_metrics["optim/grad_norm"].item(), "weight", -mine.w[0].item())
    """
    script = textwrap.dedent(script).replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "norm 5.0 weight 0.6" in done.stdout, done.stderr[-2000:]
