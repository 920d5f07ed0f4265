import subprocess
import sys

import pytest
import yaml

from recipes import plan as recipe
from tests.recipes.test_plan import CONFIG, ROOT, run


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "rtx9090"], "not in the table"),
        (["--devices", "3"], "does not divide"),
        (["--model.config", "gpt3-124m"], "did you mean gpt2-124m"),
        (["--mfu", "40"], "--mfu 40 must be above 0 and at most 1"),
        (["--mfu", "-1", "--gpu", "h100"], "--mfu -1 must be above 0 and at most 1"),
        (["--trainer.max_steps", "110"], "overlap"),
        (["--trainer.strategy", "deepspeed"], "no memory model for strategy 'deepspeed'"),
        (["--data.global_batch_tokens", "1000"], "no multiple of data.context_length=1024: use 1024"),
        (["--trainer.precision", "bf16-mixed", "--gpu", "t4"], "has no bf16 units"),
        (
            ["--max_tokens", "1000000"],
            "one budget.*add --trainer.max_steps -1 for the tokens, or --max_tokens null for the updates",
        ),
        # `fit` does not take null here either.
        (
            ["--max_tokens", "1000000", "--trainer.max_steps", "null"],
            "max_steps null must be .*, or -1 where",
        ),
        (["--trainer.max_steps", "abc"], "trainer.max_steps 'abc' must be a whole number"),
        (["--trainer.max_steps", "0"], "trainer.max_steps 0 must be a whole number of at least 1"),
        (["--max_tokens", "abc"], "--max_tokens 'abc' must be a whole number"),
        (["--trainer.devices", "x"], "trainer.devices 'x' must be a whole number of at least 1"),
        (["--trainer.devices", "0"], "trainer.devices 0 must be a whole number of at least 1"),
        (["--trainer.num_nodes", "0"], "trainer.num_nodes 0 must be"),
        (["--trainer.accumulate_grad_batches", "1.5"], "trainer.accumulate_grad_batches 1.5 must be"),
        (["--data.micro_batch_size", "0"], "data.micro_batch_size 0 must be"),
        (["--data.context_length", "null"], "data.context_length null must be of type int"),
        (
            ["--data.global_batch_size", "8"],
            "data.global_batch_size 8 and data.global_batch_tokens 262144: give one",
        ),
        (["--devices", "0"], "--devices 0 must be at least 1: devices in all"),
        (["--gpus_per_node", "0"], "--gpus_per_node 0 must be at least 1"),
        (["--node_mtbf_hours", "-3"], "--node_mtbf_hours -3 must be above 0: hours between failures"),
        (["--disk_gb_per_s", "0"], "--disk_gb_per_s 0 must be above 0"),
        (["--restart_s", "-1"], "--restart_s -1 must be at least 0"),
        (["--budget_flops", "-1"], "--budget_flops -1 must be above 0"),
        (
            ["--budget_flops", "1"],
            "1 FLOPs trains no preset: one sequence of the smallest, nanogpt-char, takes",
        ),
        (["--budget_gpu_hours", "-5", "--gpu", "h100"], "--budget_gpu_hours -5 must be above 0"),
        (["--trainer.callbacks", "[a"], r"--trainer.callbacks \[a, line 1, column 3: this is no YAML"),
        (
            ["--data.x", "1", "--data.x.y", "2"],
            "--data.x.y sets a part of what another argument sets as a whole",
        ),
        (
            ["--model.schedule", "wsd"],
            r"model.schedule 'wsd' must be of type ScheduleConfig \| dict",
        ),
        (
            ["--max_tokens", "1000", "--trainer.max_steps", "-1"],
            "max_tokens=1000 is less than one update's 262144 tokens",
        ),
        (["--price_per_gpu_hour", "-2"], "--price_per_gpu_hour -2 must be at least 0"),
        (["--device_memory_gib", "0"], "--device_memory_gib 0 must be above 0"),
        (["--peak_tflops", "-5"], "--peak_tflops -5 must be above 0"),
        (["--corpus_tokens", "0"], "--corpus_tokens 0 must be at least 1"),
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
    for name, text, message in (
        (
            "list.yaml",
            b"trainer: [1,2\n",
            r"list.yaml, line 2, column 1: this is no YAML: expected ',' or '\]'",
        ),
        ("read.md", b"# a\n\nto: use: it\n", r"read.md, line 3, column 8: this is no YAML: mapping values"),
        ("nul.yaml", b"a: \0", "nul.yaml: this is no YAML: "),
        ("binary.yaml", b"\xff\xfe\xfa", "binary.yaml is no text"),
        ("word.yaml", b"trainer\n", "word.yaml holds no configuration"),
        ("number.yaml", b"trainer: 3\n", "trainer is 3: it must hold fields"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ValueError, match=message) as error:
            recipe.main(["--config", str(tmp_path / name), "--out", "none"])
        assert "\n" not in str(error.value)


def test_budgets_propose_a_preset(capsys):
    _, text = run(capsys, "--budget_gpu_hours", 500, "--gpu", "h100", "--mfu", 0.4)
    assert "gpt2-1.5b" in text and "proposed: --model.config gpt2-1.5b --max_tokens" in text
    _, again = run(capsys, "--budget_flops", 500 * 3600 * 989.4e12 * 0.4, "--gpu", "h100")
    assert again == text
    # 500 GPU-hours on one device are 20.8 days.
    assert "to spend it: 20.8 days on 1 device (h100 at MFU 0.4), 500.0 GPU-hours" in text
    _, text = run(
        capsys, "--budget_gpu_hours", 500, "--gpu", "h100", "--devices", 8, "--price_per_gpu_hour", 2.5
    )
    assert "2.6 days on 8 devices (h100 at MFU 0.4), 500.0 GPU-hours, 1,250.00 at the given price" in text
    _, text = run(capsys, "--budget_flops", 1e21)
    assert "its time and price: add --gpu NAME" in text
    with pytest.raises(ValueError, match="--gpu h100"):
        recipe.main(["--budget_gpu_hours", "5"])
    with pytest.raises(ValueError, match="give one of them"):
        recipe.main(["--budget_gpu_hours", "5", "--budget_flops", "1e18"])
    # A share of peak is no percentage: 40 would propose a hundred times the tokens.
    with pytest.raises(ValueError, match=r"--mfu 40 must be above 0 and at most 1"):
        recipe.main(["--budget_gpu_hours", "500", "--gpu", "h100", "--mfu", "40"])


def test_a_budget_beside_a_configuration_says_how_long_it_trains_that(config_file, capsys):
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
    _, text = run(capsys, *common, "--budget_flops", 1e19)
    # 6N FLOPs per token, 262,144 tokens per update.
    per_update = 6 * (12 * 12 * 768 * 768 + 50_257 * 768) * 262_144
    steps = int(1e19 / per_update)
    assert f"for {steps:,} updates" in text and f"--trainer.max_steps {steps}" in text
    assert f"{steps * 262_144 / 124_439_808:.3g} per parameter" in text
    _, text = run(capsys, *common, "--budget_flops", 1e13)
    assert f"do not pay for one update of this configuration, which takes {per_update:.3g}" in text
    # The peak is that of the configuration's precision: 500 hours of an h100 buy less in fp32.
    _, text = run(
        capsys, *common, "--budget_gpu_hours", 500, "--gpu", "h100", "--trainer.precision", "32-true"
    )
    assert f"presets for {500 * 3600 * 66.9e12 * 0.4:.3e} FLOPs" in text


def test_a_budget_that_no_preset_suits_is_said(capsys):
    _, text = run(capsys, "--budget_flops", 1e26)
    words = " ".join(text.split())
    # sqrt(1e26 / 120) parameters; the nearest preset has 8 G and would see 2.8e5 tokens for each of them.
    assert "no preset suits this budget: it trains 912.9 G parameters best" in words
    assert "2.77e+05 tokens per parameter" in words and "proposed:" not in words


def test_the_plan_goes_into_the_runs_directory(config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args, folder in (
        (["--runs_dir", "elsewhere"], "elsewhere/mine/plan"),
        (["--runs_dir=elsewhere", "--run", "b", "--seed_everything", "3"], "elsewhere/b/plan"),
        (["--trainer.default_root_dir", "root"], "root/plan"),
    ):
        run(capsys, "--config", config_file, *args)
        assert (tmp_path / folder / "plan.json").is_file()


def test_words_and_small_numbers(config_file, capsys):
    args = ("--config", config_file, "--gpu", "h100", "--price_per_gpu_hour", 2, "--out", "none")
    plan, text = run(
        capsys, *args, "--trainer.max_steps", 1, "--model.schedule", "{kind: cosine, warmup_steps: 0}"
    )
    words = " ".join(text.split())
    assert "kind cosine phases 1 update:" in words
    assert f"{plan.gpu_hours:.3g} GPU-hours" in words and 0 < plan.gpu_hours < 0.05
    _, text = run(capsys, *args, "--model.schedule", "{warmup_steps: 1000, decay_steps: 0}")
    assert "kind wsd, no decay phases 1,000 updates:" in " ".join(text.split())
    assert "; 1 update at peak" in text
    with pytest.raises(ValueError, match=r"did you mean nanogpt-char .*\? Presets:"):
        run(capsys, *args, "--model.config", "nanogpt-chr")
    _, text = run(capsys, "--config", config_file, "--price_per_gpu_hour", 2, "--out", "none")
    assert "price: unknown without the time; add --gpu NAME" in text


def test_a_float_without_a_point_is_a_float(config_file, capsys):
    plan, _ = run(capsys, "--config", config_file, "--model.schedule.warmup_steps", "1e-2", "--out", "none")
    assert plan.schedule.warmup_steps == 10


def test_help_is_for_newcomers():
    result = subprocess.run(
        [sys.executable, "-m", "recipes.plan", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    for example in recipe.__doc__.split("examples:")[1].split("\n\n")[0].strip("\n").splitlines():
        assert example in result.stdout.splitlines()  # lines as they were written
    for word in ("examples:", "--price_per_gpu_hour", "--node_mtbf_hours", "perf/mfu"):
        assert word in result.stdout
