import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from callbacks.checkpoint_retention import Policy, Saved, decide
from lit_gpt_loop import budget
from lit_gpt_loop.config import PRESETS, GPTConfig
from lit_gpt_loop.devices import DEVICES, find_device
from lit_gpt_loop.flops import count_parameters
from lit_gpt_loop.plan_config import peak_flops_table
from lit_gpt_loop.run_plan import plan_run, propose_preset
from lit_gpt_loop.run_spec import Kept, Retention, RunSpec
from lit_gpt_loop.schedules import ScheduleConfig, summarize

YEAR = 365 * 86_400.0


@pytest.mark.case("W02")
@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "devices", "sequences"), [(16, 4, 8, 512), (16, 4, 1, 64)]
)
def test_w02_sequences_per_update(micro_batch, accumulation, devices, sequences):
    assert budget.sequences_per_update(micro_batch, accumulation, devices) == sequences
    assert sequences * 512 * 1000 == (262_144_000 if devices == 8 else 32_768_000)


@pytest.mark.case("W03")
def test_w03_updates_per_epoch_and_epochs():
    assert budget.updates_per_epoch(10_000, 128, keep_partial=True) == 79
    assert budget.updates_per_epoch(10_000, 128, keep_partial=False) == 78
    assert budget.sequences_per_update(32, 1, 1) * 64 * 400 == 819_200
    assert round(budget.epochs(819_200, 34_869), 2) == 23.49


@pytest.mark.case("W04")
def test_w04_flops_tokens_and_state():
    assert budget.training_flops(106_624, 2_048) == pytest.approx(1.310e9, rel=1e-3)
    assert budget.chinchilla_tokens(10e9) == 200e9
    assert budget.chinchilla_tokens(70e9) == 1.4e12
    assert budget.adamw_state_bytes(175e9) == 2.1e12


@pytest.mark.case("W08")
def test_w08_the_plan_of_a_cosine_and_of_a_wsd_schedule():
    cosine = ScheduleConfig(kind="cosine", warmup_steps=100).resolve(1100)
    assert cosine(100 + 499) == pytest.approx(
        (1.0 + 0.1) / 2
    )  # the middle of the decay: the mean of peak and floor
    assert cosine(1099) == pytest.approx(0.1)
    wsd = summarize(ScheduleConfig(warmup_steps=0.02, decay_steps=0.2, decay_shape="linear").resolve(10_000))
    assert (wsd.warmup_share, wsd.decay_share) == (0.02, 0.2)
    assert wsd.updates_at_peak / 10_000 == pytest.approx(0.78, abs=2e-4)
    assert wsd.mean_ratio == pytest.approx(0.89, abs=2e-4)


@pytest.mark.case("W09")
def test_w09_failures_and_the_interval_that_follows():
    assert budget.failures_per_day(YEAR, 10_000) == pytest.approx(27.4, abs=0.05)
    mtbf = budget.system_mtbf_s(YEAR, 10_000)
    assert mtbf == pytest.approx(3153.6)
    # Young: sqrt(2 x 10 x 3153.6) = 251.1 s from save to save. Daly's exact cost of an interval t with saves of C, for each
    # second of work, is proportional to (exp((t + C) / M) - 1) / t; it is searched here, the formula approximates its minimum.
    assert budget.save_interval_s(10, mtbf) == pytest.approx(244.52, abs=0.01)
    for save_s in (10, 120):
        costs = {t: math.expm1((t + save_s) / mtbf) / t for t in (n / 100 for n in range(10_000, 100_000))}
        assert budget.save_interval_s(save_s, mtbf) == pytest.approx(
            min(costs, key=costs.__getitem__), rel=1e-3
        )


def test_the_interval_loses_least():
    for save_s, mtbf_s in ((10.0, 3_000.0), (60.0, 86_400.0), (1.0, 1e6)):
        best = budget.save_interval_s(save_s, mtbf_s)
        losses = {f: budget.lost_share(best * f, save_s, mtbf_s) for f in (0.5, 0.9, 1.0, 1.1, 2.0)}
        assert losses[1.0] < min(losses[0.5], losses[2.0])
        assert losses[1.0] == pytest.approx(min(losses.values()), rel=0.01)


def test_more_failures_than_saves_can_follow():
    assert budget.save_interval_s(100.0, 40.0) == 40.0


def test_a_budget_in_tokens_pays_for_whole_updates():
    assert budget.updates_for_tokens(1000, 300) == 3
    with pytest.raises(ValueError, match="less than one update's 300"):
        budget.updates_for_tokens(299, 300)


def test_time_and_money():
    # 6e18 FLOPs at half of 1e15 FLOP/s on 2 devices: 6000 s.
    assert budget.training_seconds(6e18, 1e15, 0.5, 2) == pytest.approx(6000.0)
    assert budget.flops_of_gpu_hours(2 * 6000 / 3600, 1e15, 0.5) == pytest.approx(6e18)
    assert budget.price(40.0, 2.5) == 100.0 and budget.price(40.0, 0.0) == 0.0
    for mfu in (0.0, 1.1, 40):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
            budget.training_seconds(1.0, 1.0, mfu, 1)
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
            budget.flops_of_gpu_hours(1.0, 1.0, mfu)
    with pytest.raises(ValueError, match="must be at least 0"):
        budget.price(1.0, -2.0)


def test_compute_optimal():
    n, tokens = budget.compute_optimal_size(5.76e23)  # Chinchilla's own budget: 70 B parameters, 1.4 T tokens
    assert n == pytest.approx(70e9, rel=0.02)
    assert tokens == pytest.approx(1.4e12, rel=0.02)
    config = GPTConfig.preset("gpt2-124m")
    exact = 6.0 * (count_parameters(config).total - 1024 * 768) * 20 * count_parameters(config).total
    best = propose_preset(exact)[0]
    assert best.preset == "gpt2-124m"
    assert best.tokens_per_param == pytest.approx(20, rel=0.01)
    assert not any(p.preset.startswith("tiny") for p in propose_preset(1e15))


# From the papers and model cards: GPT-2 small 124M (its state dict has 124,439,808), medium 354,823,168, large 774,030,080,
# XL 1,557,611,200; Meta-Llama-3-8B 8,030,261,248.
@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-350m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-3-8b", 8_030_261_248),
    ],
)
def test_parameters_of_the_plan_are_the_published_ones(preset, published):
    plan = plan_run(RunSpec("p", GPTConfig.preset(preset), micro_batch=1, max_steps=1000))
    assert plan.num_params == published == sum(plan.parameters.values())


def test_the_numbers_of_a_plan_add_up():
    device = find_device("h100", peak_flops_table(), "bf16")
    spec = RunSpec(
        "p",
        GPTConfig.preset("gpt2-124m"),
        micro_batch=16,
        global_batch=512,
        max_tokens=10_000_000_000,
        strategy="ddp",
        num_devices=8,
        device=device,
        mfu=0.5,
        price_per_gpu_hour=2.0,
        corpus_tokens=5_000_000_000,
        retention=Retention(keep_best=1, keep_latest=2, archive_every_n_steps=5000),
    )
    plan = plan_run(spec)
    assert plan.accumulation == 4
    assert plan.tokens_per_update == 512 * 1024
    assert plan.total_steps == 10_000_000_000 // (512 * 1024) == 19_073
    assert plan.total_tokens == 19_073 * 512 * 1024
    assert plan.epochs == pytest.approx(2.0, rel=1e-4)
    assert plan.tokens_per_param == pytest.approx(plan.total_tokens / 124_439_808)
    # N: all weights of matrices, the tied head included, biases, norms and positions not.
    matrices = 12 * (4 * 768 * 768 + 8 * 768 * 768) + 50_257 * 768
    assert plan.flops_per_token == 6 * matrices
    assert plan.seconds == pytest.approx(6 * matrices * plan.total_tokens / (8 * 989.4e12 * 0.5))
    assert plan.gpu_hours == pytest.approx(plan.seconds * 8 / 3600)
    assert plan.price == pytest.approx(2 * plan.gpu_hours)
    assert plan.checkpoint.bytes == 12 * 124_439_808
    # Saves at 5,000, 10,000, 15,000 (archives) and the end; the end is no archive, and no other save could be best.
    assert plan.checkpoint.kept == Kept(4, 4, is_exact=True)
    assert plan.checkpoint.disk_bytes == 4 * plan.checkpoint.bytes
    assert plan.checkpoint.blocked_s == pytest.approx(12 * 124_439_808 / 1e9)  # one rank of DDP writes all
    assert [(r.strategy, r.num_devices) for r in plan.memory if r.as_configured] == [("ddp", 8)]


def test_sharded_saves_are_written_by_all_ranks_and_asynchronous_ones_block_for_a_copy():
    config = GPTConfig.preset("gpt2-124m")
    common = {
        "micro_batch": 1,
        "max_steps": 10,
        "num_devices": 8,
        "write_bytes_per_s": 1e9,
        "copy_bytes_per_s": 1e10,
    }
    plain = plan_run(RunSpec("p", config, strategy="fsdp2", **common)).checkpoint
    assert plain.blocked_s == pytest.approx(plain.bytes / 8 / 1e9)
    later = plan_run(
        RunSpec("p", config, strategy="fsdp2", retention=Retention(async_save=True), **common)
    ).checkpoint
    assert later.blocked_s == pytest.approx(plain.bytes / 8 / 1e10)


@pytest.mark.parametrize(
    ("retention", "total_steps", "kept"),
    [
        # Saves at 120, 240, 360, 480; the last is latest and archive at once.
        (Retention(120, keep_best=0, keep_latest=1, archive_every_n_steps=[480]), 480, Kept(1, 2, True)),
        # After 16: archives 4, 8, 12, 16 and 14; after 18 (the end): 4 archives and 18; 5 are there when 18 is written.
        (Retention(2, keep_best=0, keep_latest=2, archive_every_n_steps=4), 18, Kept(5, 6, True)),
        # All roles fall on the three saves that there are.
        (Retention(8, keep_best=1, keep_latest=2, keeps_verified=True, validates_every=8), 24, Kept(3, 3, False)),
        (Retention(8, keep_best=1, keep_latest=2, keeps_verified=True, validates_every=8), 80, Kept(4, 5, False)),
        # One save, whatever the policy would keep.
        (Retention(100, keep_best=3, keep_latest=5), 20, Kept(1, 1, True)),
        (Retention(100, save_on_exit=False), 20, Kept(0, 0, True)),
        # Without an interval, at validations and the end: 30, 60, 90, 100.
        (Retention(keep_best=0, keep_latest=3, validates_every=30), 100, Kept(3, 4, True)),
        # By the clock: any update.
        (Retention(every_n_minutes=5.0, keep_best=0), 100, Kept(2, 3, False)),
        (Retention(10, keep_best=1, validates_every=None), 100, Kept(3, 4, False)),
    ],
)  # fmt: skip
def test_checkpoints_on_disk_by_hand(retention, total_steps, kept):
    assert retention.replay(total_steps) == kept


def test_checkpoints_on_disk_are_those_that_the_callback_keeps():
    """The saves of random policies, judged by random losses, pruned by `decide` itself."""
    random = Random(0)
    is_exact_seen = Counter()
    for _ in range(400):
        archives = random.choice([None, 3, 7, [5, 11]])
        every, validates_every = random.choice([2, 3, 5, None]), random.choice([0, 1, 3, 4])
        retention = Retention(
            every, None, random.randint(0, 2), random.randint(1, 3), archives, keeps_verified=random.random() < 0.5,
            validates_every=validates_every,
        )  # fmt: skip
        total = random.randint(1, 25)
        policy = Policy(
            keep_best=retention.keep_best, keep_latest=retention.keep_latest,
            archive=tuple(archives) if isinstance(archives, list) else archives,
        )  # fmt: skip
        on_disk, num_kept, num_on_disk, verified = [], 0, 0, None
        for step in range(1, total + 1):
            validates = validates_every > 0 and step % validates_every == 0
            new = Saved(step, random.random() if validates else None, step)
            saves = every is not None and step % every == 0
            saves |= policy.archives(step) or step == total or (every is None and validates)
            saves |= validates and new in decide([*on_disk, new], policy)[0]["best"]
            if saves:
                on_disk.append(new)
                num_on_disk = max(num_on_disk, len(on_disk))
                if retention.keeps_verified and (verified is None or random.random() < 0.3):
                    verified = step
                on_disk = [replace(s, is_verified=s.step == verified) for s in on_disk]
                pruned = decide(on_disk, policy)[1]
                on_disk = [s for s in on_disk if s not in pruned]
                num_kept = max(num_kept, len(on_disk))
        kept = retention.replay(total)
        is_exact_seen[kept.is_exact] += 1
        assert num_kept <= kept.num_kept and num_on_disk <= kept.num_on_disk, (retention, total)
        if kept.is_exact:
            assert (num_kept, num_on_disk) == (kept.num_kept, kept.num_on_disk), (retention, total)
    assert min(is_exact_seen[True], is_exact_seen[False]) > 50


def test_errors_name_the_remedy():
    config = GPTConfig.preset("tiny")
    with pytest.raises(ValueError, match="Take global_batch_size=9 or 12"):
        plan_run(
            RunSpec("p", config, micro_batch=1, global_batch=10, num_devices=3, strategy="ddp", max_steps=1)
        )
    with pytest.raises(ValueError, match="one budget"):
        plan_run(RunSpec("p", config, micro_batch=1, max_steps=1, max_tokens=10_000))
    with pytest.raises(ValueError, match="overlap"):
        plan_run(
            RunSpec(
                "p",
                config,
                micro_batch=1,
                max_steps=5,
                schedule=ScheduleConfig(warmup_steps=4, decay_steps=3),
            )
        )


def test_every_device_has_a_peak_and_unknown_ones_are_refused():
    peaks = peak_flops_table()
    for name, (entry, gib) in DEVICES.items():
        assert entry in peaks, name
        assert 10 < gib < 300
    assert {entry for entry, _ in DEVICES.values()} == set(peaks), (
        "a device of the table cannot be planned for"
    )
    assert find_device("NVIDIA H200", peaks, "bf16").peak_flops == pytest.approx(9.894e14)
    with pytest.raises(ValueError, match=r"did you mean h100.*--peak_tflops .* and --device_memory_gib"):
        find_device("h1000", peaks, "bf16")
    with pytest.raises(ValueError, match=r"t4 has no bf16 units: set trainer.precision"):
        find_device("t4", peaks, "bf16")
    assert find_device("mine", peaks, "bf16", peak_tflops=100, memory_gib=10).memory_bytes == 10 * 2**30


def test_presets_all_plan():
    for name in PRESETS:
        assert (
            plan_run(RunSpec(name, GPTConfig.preset(name), micro_batch=1, max_steps=100)).peak_memory_bytes
            > 0
        )
