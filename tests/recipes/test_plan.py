import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from lit_gpt_loop.journal import read_journal
from lit_gpt_loop.model import GPT
from lit_gpt_loop.module import LitGPT
from lit_gpt_loop.plan_check import compare_plan
from lit_gpt_loop.plan_config import (
    read_run_spec,
)
from lit_gpt_loop.run_spec import Kept
from recipes import plan as recipe
from recipes.pretrain import main as pretrain
from tests.lit_gpt_loop.test_memory import measured_peak

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "trainer": {
        "max_steps": 1000,
        "devices": 4,
        "strategy": "fsdp2",
        "precision": "bf16-mixed",
        "callbacks": [
            {
                "class_path": "callbacks.CheckpointRetention",
                "init_args": {"archive_every_n_steps": 250, "keep_latest": 3},
            }
        ],
    },
    "model": {
        "config": "llama-150m",
        "overrides": {"n_layer": 8},
        "schedule": {"kind": "wsd", "warmup_steps": 100, "decay_steps": 0.2, "decay_shape": "linear"},
    },
    "data": {
        "tokenizer": "gpt2",
        "context_length": 1024,
        "micro_batch_size": 8,
        "global_batch_tokens": 262_144,
    },
}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def run(capsys, *args):
    plan = recipe.main([str(a) for a in args])
    return plan, capsys.readouterr().out


def test_what_the_configuration_says_is_what_is_planned(config_file, tmp_path, capsys):
    plan, text = run(
        capsys,
        "--config",
        config_file,
        "--gpu",
        "h100",
        "--mfu",
        0.5,
        "--price_per_gpu_hour",
        3,
        "--out",
        tmp_path / "out",
    )
    assert (plan.strategy, plan.num_devices, plan.accumulation) == ("fsdp2", 4, 8)
    assert plan.tokens_per_update == 262_144
    assert plan.total_tokens == 262_144_000
    with torch.device("meta"):
        model = GPT(
            LitGPT(
                config="llama-150m",
                overrides={"n_layer": 8},
                vocab_size=50257,
                context_length=1024,
                init_device="meta",
            ).config
        )
    assert plan.num_params == sum(p.numel() for p in model.parameters())
    assert plan.checkpoint.kept == Kept(4, 4, is_exact=True)  # archives at 250, 500, 750 and the end
    assert plan.schedule_summary.warmup_share == 0.1
    assert plan.schedule_summary.updates_at_peak == 1000 - 100 - 200 + 1
    assert plan.price == pytest.approx(3 * plan.gpu_hours)
    for part in (
        "tokens per parameter",
        "fsdp2 *",
        "hybrid",
        "GPU-hours",
        "Young-Daly",
        ": 4 kept",
        "updates at peak",
    ):
        assert part in text, part
    assert "at most" not in text
    saved = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert saved["num_params"] == plan.num_params
    one_device = saved["memory"][0]["plain"]
    assert one_device["maxima"]["parameters"] == 4 * plan.num_params
    assert one_device["peak_bytes"] == sum(v for k, v in one_device["at_peak"].items() if k != "moment")
    assert one_device["fit"]["micro_batch"] * one_device["fit"]["accumulation"] == 256
    assert (tmp_path / "out" / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_overrides_the_file(config_file, capsys):
    plan, text = run(
        capsys, "--config", config_file, "--trainer.max_steps=50", "--data.micro_batch_size", 4, "--devices", 2,
        "--model.schedule.warmup_steps", 10, "--run", "other", "--out", "none",
    )  # fmt: skip
    assert (plan.name, plan.total_steps, plan.micro_batch, plan.num_devices) == ("other", 50, 4, 2)
    assert plan.schedule.warmup_steps == 10
    assert "wrote" not in text


def test_two_files_are_merged(config_file, tmp_path, capsys):
    second = tmp_path / "second.yaml"
    second.write_text("model: {config: gpt2-124m, overrides: null}\ntrainer: {max_steps: 7, strategy: ddp}\n")
    plan, _ = run(
        capsys,
        "--config",
        config_file,
        "--config",
        second,
        "--model.schedule",
        "{kind: cosine, warmup_steps: 2}",
        "--out",
        "none",
    )
    assert plan.num_params == 124_439_808
    assert (plan.total_steps, plan.strategy, plan.schedule.kind) == (7, "ddp", "cosine")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "rtx9090"], "not in the table"),
        (["--devices", "3"], "does not divide"),
        (["--model.config", "gpt3-124m"], "did you mean gpt2-124m"),
        (["--mfu", "40", "--gpu", "h100"], r"must lie in \(0, 1\]"),
        (["--trainer.max_steps", "110"], "overlap"),
        (["--trainer.strategy", "deepspeed"], "no memory model for strategy 'deepspeed'"),
        (["--data.global_batch_tokens", "1000"], "no multiple of data.context_length=1024: use 1024"),
        (["--trainer.precision", "bf16-mixed", "--gpu", "t4"], "has no bf16 units"),
        (["--max_tokens", "1000000"], "one budget; set the other to null .*--trainer.max_steps -1"),
        (
            ["--max_tokens", "1000", "--trainer.max_steps", "-1"],
            "max_tokens=1000 is less than one update's 262144 tokens",
        ),
        (["--gpu", "h100", "--price_per_gpu_hour", "-2"], "price_per_gpu_hour=-2.0 must be at least 0"),
        (["--device_memory_gib", "0"], "the memory of device is 0: it must be above 0"),
        (["--peak_tflops", "-5"], "the peak of device is -5e"),
        (["--corpus_tokens", "0"], "corpus_tokens=0 must be above 0"),
        (
            ["--data.micro_batch_sise", "3"],
            "data has no field micro_batch_sise; did you mean micro_batch_size",
        ),
        (["--trainer.max_step", "3"], "trainer has no field max_step; did you mean max_steps"),
        (["--model.schedule.warmup", "3"], "model.schedule has no field warmup"),
    ],
)
def test_bad_input_gets_one_clear_error(config_file, args, message):
    with pytest.raises(ValueError, match=message):
        recipe.main(["--config", str(config_file), "--out", "none", *args])


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no configuration at"):
        recipe.main(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="nothing to plan"):
        recipe.main([])


def test_budgets_propose_a_preset(capsys):
    _, text = run(capsys, "--budget_gpu_hours", 500, "--gpu", "h100", "--mfu", 0.4)
    assert "gpt2-1.5b" in text and "proposed: --model.config gpt2-1.5b --max_tokens" in text
    _, again = run(capsys, "--budget_flops", 500 * 3600 * 989.4e12 * 0.4)
    assert again == text
    with pytest.raises(ValueError, match="--gpu h100"):
        recipe.main(["--budget_gpu_hours", "5"])
    with pytest.raises(ValueError, match="give one of them"):
        recipe.main(["--budget_gpu_hours", "5", "--budget_flops", "1e18"])
    # A share of peak is no percentage: 40 would propose a hundred times the tokens.
    with pytest.raises(ValueError, match=r"mfu=40.0 must lie in \(0, 1\]"):
        recipe.main(["--budget_gpu_hours", "500", "--gpu", "h100", "--mfu", "40"])
    with pytest.raises(ValueError, match=r"gpu_hours=-5.0 .* must be above 0"):
        recipe.main(["--budget_gpu_hours", "-5", "--gpu", "h100"])
    with pytest.raises(ValueError, match=r"a budget of 0.0 FLOPs must be above 0"):
        recipe.main(["--budget_flops", "0"])


def test_a_budget_that_no_preset_suits_is_said(capsys):
    _, text = run(capsys, "--budget_flops", 1e26)
    words = " ".join(text.split())
    # sqrt(1e26 / 120) parameters; the nearest preset has 8 G and would see 2.8e5 tokens for each of them.
    assert "no preset suits this budget: it trains 912.9 G parameters best" in words
    assert "2.77e+05 tokens per parameter" in words and "proposed:" not in words


def test_a_model_that_does_not_fit_says_what_to_do(config_file, capsys):
    _, text = run(
        capsys,
        "--config",
        config_file,
        "--model.config",
        "llama-3-8b",
        "--devices",
        1,
        "--gpu",
        "l4",
        "--out",
        "none",
    )
    assert "does not fit" in text and "activation_checkpointing" in text


def test_what_fits_follows_the_update(config_file, capsys):
    common = (
        "--config",
        config_file,
        "--model.config",
        "gpt2-124m",
        "--model.overrides",
        "null",
        "--out",
        "none",
    )
    plan, text = run(
        capsys, *common, "--gpu", "a100", "--devices", 8, "--gpus_per_node", 8, "--trainer.strategy", "ddp",
        "--data.global_batch_tokens", 480 * 1024, "--data.micro_batch_size", 15,
    )  # fmt: skip
    fits = {(r.strategy, r.num_devices): r.plain.fit for r in plan.memory}
    assert (fits["ddp", 8].micro_batch, fits["ddp", 8].accumulation) == (
        60,
        1,
    )  # 480 / 8: an update has no more
    assert 480 % fits["single", 1].micro_batch == 0
    assert fits["fsdp2", 64].limit == "devices"  # 480 sequences do not divide over 64 devices
    assert "all 60" in text
    # Without a batch of its own, an update grows with the micro-batch and memory alone decides.
    plan, _ = run(
        capsys, *common, "--gpu", "a100", "--devices", 8, "--trainer.accumulate_grad_batches", 2,
        "--data.global_batch_tokens", "null",
    )  # fmt: skip
    row = next(r for r in plan.memory if r.as_configured)
    assert (row.plain.fit.limit, row.plain.fit.accumulation, row.accumulation) == ("memory", 2, 2)
    assert plan.global_batch == 8 * 8 * 2 and row.plain.fit.micro_batch > 60
    _, text = run(
        capsys, *common, "--gpu", "h200", "--model.config", "nanogpt-char", "--data.tokenizer", "bytes",
        "--data.context_length", 64, "--data.global_batch_tokens", "null",
    )  # fmt: skip
    assert ">4096" in text


def test_without_matplotlib_a_message_and_no_failure(config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    _, text = run(capsys, "--config", config_file, "--out", tmp_path / "out")
    assert "needs matplotlib: pip install" in text
    assert (tmp_path / "out" / "plan.json").is_file()


def test_every_config_of_the_project_plans(capsys):
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert files
    for path in files:
        if "data" in yaml.safe_load(path.read_text()):
            plan, _ = run(capsys, "--config", path, "--gpu", "h200", "--out", "none")
            assert plan.total_steps


def test_the_plan_of_a_run_is_what_its_first_updates_take():
    """Parameters and FLOPs counted by hand from the shape, memory by the allocator of real updates."""
    config = {
        "trainer": {"max_steps": 20, "precision": "32-true", "accelerator": "cpu"},
        "model": {"config": "tiny-llama"},
        "data": {"tokenizer": "bytes", "context_length": 32, "micro_batch_size": 3, "global_batch_size": 6},
    }
    spec = read_run_spec(config, "x", [])
    module = LitGPT(config="tiny-llama", vocab_size=257, context_length=32)
    assert spec.config == module.config
    plan = recipe.plan_run(spec)
    # Width 32, 4 heads of 8, 2 key-value heads, gate, up and down of 128, 2 blocks: qkv + output + MLP.
    block = 32 * (4 + 2 + 2) * 8 + 32 * 32 + 3 * 32 * 128
    assert block == 15_360
    # Two norms per block and one at the end, embedding and head of 257 words.
    assert plan.num_params == 2 * (block + 2 * 32) + 32 + 2 * 257 * 32 == 47_328
    assert plan.num_params == sum(p.numel() for p in module.parameters())
    assert plan.num_matmul_params == module.num_matmul_params == 2 * block + 257 * 32 == 38_944
    assert plan.flops_per_token == module.flops_per_token == 6 * 38_944
    assert plan.tokens_per_update == 6 * 32 and plan.total_flops == 6 * 38_944 * 20 * 192
    assert plan.peak_memory_bytes == pytest.approx(measured_peak(spec.config, 3, "32-true", 2), rel=0.1)


@pytest.mark.slow
def test_answers_in_three_seconds_without_torch(config_file):
    best = 99.0
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "recipes.plan", "--config", config_file, "--gpu", "h100", "--out", "none"],
            cwd=ROOT, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        best = min(best, time.perf_counter() - start)
    assert best < 3.0
    code = (
        "import sys; from recipes.plan import main; main(sys.argv[1:]); "
        "loaded = {'torch', 'lightning', 'datasets', 'transformers', 'matplotlib'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run(
        [sys.executable, "-c", code, "--config", str(config_file), "--out", "none"],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    )  # fmt: skip


def test_help_is_for_newcomers():
    result = subprocess.run(
        [sys.executable, "-m", "recipes.plan", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    for word in ("examples:", "--price_per_gpu_hour", "--node_mtbf_hours", "perf/mfu"):
        assert word in result.stdout


def test_predicted_against_measured(config_file, tmp_path, capsys):
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    rows = [
        {
            "kind": "update",
            "step": n,
            "train/tokens": 262_144,
            "progress/update": n,
            "progress/tokens": 262_144 * n,
            "perf/step_s": s,
        }
        for n, s in ((1, 9.0), (2, 2.0), (3, 2.0))
    ]
    (run_dir / "journal.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"torn')
    plan, text = run(capsys, "--config", config_file, "--gpu", "h100", "--against", run_dir, "--out", "none")
    compared = {c.name: c for c in compare_plan(plan.to_dict(), rows)}
    assert compared["tokens per update"].ratio == 1.0
    assert compared["updates"].ratio == 3 / 1000
    assert compared["time per update"].measured == 2.0
    assert compared["time per update"].ratio == pytest.approx(2.0 / plan.step_s)
    assert compared["peak memory"].measured is None and compared["peak memory"].ratio is None
    assert compared["epochs"].predicted is None
    assert "predicted against measured" in text and "time per update" in text and "peak memory " not in text
    with pytest.raises(FileNotFoundError, match="--against takes a run's directory"):
        recipe.main(["--config", str(config_file), "--against", str(tmp_path), "--out", "none"])


def test_predictions_hold_in_a_real_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the robot picks up the red box. " * 400)
    journal = {"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": "runs/real"}}
    config = {
        "trainer": {
            "max_steps": 3, "precision": "32-true", "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": [journal],
            "callbacks": [{"class_path": "callbacks.CheckpointRetention", "init_args": {"every_n_steps": 3}}],
        },
        "model": {"config": "nanogpt-char", "schedule": {"warmup_steps": 1, "decay_steps": 1}},
        "data": {"corpus": "text.txt", "tokenizer": "bytes", "context_length": 32, "micro_batch_size": 2, "global_batch_size": 6, "val_split": "tail", "val_fraction": 0.1},
    }  # fmt: skip
    (tmp_path / "real.yaml").write_text(yaml.safe_dump(config))
    pretrain(["fit", "--config", "real.yaml"])
    printed = capsys.readouterr().out
    command = next(line for line in printed.splitlines() if "recipes.plan" in line)
    assert "-m recipes.plan --config runs/real/config.yaml --against runs/real " in command
    _, text = run(capsys, *command.split()[3:7], "--out", "none")
    assert "predicted against measured" in text
    plan, _ = run(capsys, "--config", "runs/real/config.yaml", "--out", "none")
    compared = {c.name: c for c in compare_plan(plan.to_dict(), read_journal("runs/real"))}
    for name in ("tokens per update", "updates", "tokens", "epochs"):
        assert compared[name].ratio == 1.0, name
    assert compared["checkpoint"].ratio == pytest.approx(1.0, rel=0.1)
    # The configuration that a run writes down plans as the one it was started with.
    again, _ = run(capsys, "--config", "real.yaml", "--out", "none")
    assert again.to_dict() == plan.to_dict() | {"name": "real"}
