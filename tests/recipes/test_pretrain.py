"""The command line as its users meet it: in this process for speed, in real ones for the quickstart."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lit_gpt_loop.journal import read_journal
from lit_gpt_loop.trained import read_run
from recipes.pretrain import find_checkpoint, find_run, main, newest_config, quiet, run_command

ROOT = Path(__file__).parents[2]
CONFIG = {
    "trainer": {
        "max_steps": 4,
        "val_check_interval": 2,
        "precision": "32-true",
        "enable_progress_bar": False,
        "callbacks": [
            {"class_path": "callbacks.TokenWeightedLoss"},
            {"class_path": "callbacks.CheckpointRetention", "init_args": {"every_n_steps": 2}},
        ],
    },
    "model": {"config": "tiny", "lr": 0.01, "schedule": {"warmup_steps": 1, "decay_steps": 0}},
    "data": {
        "tokenizer": "bytes",
        "context_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "limit_val_blocks": 4,
    },
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A farmer had a field, and in the field there was a well. " * 100)
    journal = {"class_path": "lit_gpt_loop.journal.JournalLogger", "init_args": {"save_dir": "runs/small"}}
    config = CONFIG | {
        "trainer": CONFIG["trainer"] | {"logger": [journal]},
        "data": CONFIG["data"]
        | {"corpus": str(tmp_path / "text.txt"), "val_split": "tail", "val_fraction": 0.1},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def fit(*args):
    return main(["fit", "--config", "small.yaml", *args])


@pytest.mark.case("C46")
def test_c46_the_same_command_twice_continues_and_keeps_both_configs(place):
    fit()
    first = (place / "runs/small/config.yaml").read_bytes()
    cli = fit()
    assert cli.model.updates == 4
    assert cli.model.updates_at_start == 4
    assert (place / "runs/small/config.yaml").read_bytes() == first
    assert (place / "runs/small/config-2.yaml").is_file()
    assert newest_config(place / "runs/small").name == "config-2.yaml"
    assert [r["step"] for r in read_journal("runs/small", "update")] == [1, 2, 3, 4]


@pytest.mark.case("C46")
def test_c46_an_explicit_value_wins_over_the_checkpoints(place):
    fit("--model.lr", "0.1")
    fit("--model.lr", "0.001", "--trainer.max_steps", "6")
    rates = [r["optim/lr"] for r in read_journal("runs/small", "update")]
    assert rates == [0.1] * 4 + [0.001] * 2


@pytest.mark.case("C46")
def test_c46_an_appended_callback_keeps_the_base_list(place):
    cli = fit("--trainer.callbacks+=callbacks.MFUMonitor")
    names = [type(c).__name__ for c in cli.trainer.callbacks]
    assert {"TokenWeightedLoss", "CheckpointRetention", "MFUMonitor"} <= set(names)


@pytest.mark.case("C46")
def test_c46_linked_values_stand_in_config_and_checkpoint(place):
    fit()
    config = yaml.safe_load((place / "runs/small/config.yaml").read_text())
    assert config["model"]["vocab_size"] == 257
    assert config["model"]["context_length"] == 32
    trained = read_run("runs/small", find_checkpoint("latest", Path("runs/small")))
    assert trained.hyper_parameters["config"]["vocab_size"] == 257
    assert trained.updates == 4
    # and the saved configuration starts a run of another name
    main(["fit", "--config", "runs/small/config.yaml", "--run", "again"])
    assert (place / "runs/again/checkpoints").is_dir()


def test_a_stopped_run_continues_bitwise_as_if_it_had_not_stopped(place):
    fit("--run", "whole", "--trainer.max_steps", "7")
    fit("--trainer.max_steps", "3")
    fit("--trainer.max_steps", "7")
    a, b = (
        read_run(f"runs/{n}", find_checkpoint("latest", Path(f"runs/{n}"))).model.state_dict()
        for n in ("whole", "small")
    )
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.case("W02")
def test_w02_budget_in_tokens_and_batch_in_sequences(place, capsys):
    cli = fit("--trainer.max_steps", "-1", "--max_tokens", "700", "--data.micro_batch_size", "1")
    assert cli.trainer.accumulate_grad_batches == 4
    assert cli.trainer.max_steps == 700 // (4 * 32) == 5
    assert [r["step"] for r in read_journal("runs/small", "validation")] == [
        2,
        4,
        5,
    ]  # updates, and the last one


@pytest.mark.slow
def test_a_token_budget_can_be_run_again_from_the_saved_config(place):
    fit("--trainer.max_steps", "-1", "--max_tokens", "512")
    own = ["--config", "runs/small/config.yaml"]
    saved = yaml.safe_load((place / "runs/small/config.yaml").read_text())
    assert (saved["max_tokens"], saved["trainer"]["max_steps"]) == (512, -1)
    assert main(["fit", *own]).model.updates == 4
    main(["validate", *own])
    assert main(["fit", *own, "--max_tokens", "768"]).model.updates == 6
    # In updates instead: what the message names is what works.
    with pytest.raises(
        ValueError, match=r"--max_tokens=512 and trainer.max_steps=7 .* or --max_tokens null$"
    ):
        main(["fit", *own, "--trainer.max_steps", "7"])
    assert main(["fit", *own, "--trainer.max_steps", "7", "--max_tokens", "null"]).model.updates == 7
    with pytest.raises(ValueError, match=r"--trainer.max_steps -1 or"):
        fit("--max_tokens", "1024")
    assert fit("--max_tokens", "1024", "--trainer.max_steps", "-1").model.updates == 8


def test_bits_per_byte_is_left_out_where_it_is_not_known(place):
    fit()
    with pytest.warns(UserWarning, match="val/bits_per_byte is left out: 64 of the set's 128 tokens"):
        cli = main(["validate", "--config", "runs/small/config.yaml", "--trainer.limit_val_batches", "1"])
    assert "val/bits_per_byte" not in cli.trainer.callback_metrics
    assert "val/loss" in cli.trainer.callback_metrics
    # Evaluation alone restores no data position: none is told.
    assert "progress/update" in cli.trainer.callback_metrics
    assert "progress/samples" not in cli.trainer.callback_metrics


def test_without_callbacks_a_run_gets_the_default_ones_and_without_a_saver_a_warning(place):
    config = yaml.safe_load((place / "small.yaml").read_text())
    del config["trainer"]["callbacks"]
    (place / "small.yaml").write_text(yaml.safe_dump(config))
    fit("--run", "default")
    assert (place / "runs/default/checkpoints/index.json").is_file()
    with pytest.warns(UserWarning, match="its weights will be lost"):
        fit("--run", "lost", "--trainer.callbacks", "[]")


@pytest.mark.slow
def test_names_of_runs_and_what_is_there_instead(place):
    fit()
    assert find_run("small") == find_run("runs/small") == Path("runs/small")
    with pytest.raises(FileNotFoundError, match=r"There is no run runs/other; runs here: runs/small\."):
        find_run("other")
    with pytest.raises(
        FileNotFoundError, match=r"The run runs/small has saved step-00000002, step-00000004\."
    ):
        find_checkpoint("archive:3", Path("runs/small"))


def test_validate_test_and_predict_read_the_runs_checkpoint(place):
    fit()
    (out,) = [r for r in read_journal("runs/small", "validation") if r["step"] == 4]
    for verb in ("validate", "test"):
        metrics = main(
            [verb, "--config", "runs/small/config.yaml", "--verbose", "false"]
        ).trainer.callback_metrics
        assert float(metrics[f"{verb[:4].replace('vali', 'val')}/loss"]) == pytest.approx(
            out["val/loss"], rel=1e-12
        )
    main(["predict", "--config", "runs/small/config.yaml"])
    lines = [json.loads(i) for i in (place / "runs/small/predictions.jsonl").read_text().splitlines()]
    assert sorted(i["sample_id"] for i in lines) == sorted({i["sample_id"] for i in lines})
    loss = sum(i["loss_sum"] for i in lines) / sum(i["num_tokens"] for i in lines)
    assert loss == pytest.approx(out["val/loss"], rel=1e-5)


def test_the_end_names_the_run_directory_and_what_to_do_next(place, capsys):
    fit()
    text = capsys.readouterr().out
    assert re.search(r"validation loss [\d.]+ nats/token, perplexity [\d.]+, bits per byte [\d.]+", text)
    assert "run directory: runs/small" in text
    assert "python -m recipes.sample --run runs/small" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.global_batch_size", "5"], "5"),
        (["--model.schedule.warmup_steps", "9"], "overlap in a run of 4 updates"),
        (["--model.config", "gtp2-124m"], "did you mean gpt2-124m"),
        (["--model.overrides", "{n_head: 5}"], "n_head=5 does not divide n_embd=32"),
        (["--trainer.max_steps", "-1"], "the run has no end"),
        (["--max_tokens", "1000"], "a run has one budget"),
        (["--trainer.max_steps", "-1", "--max_tokens", "10"], "less than one update's 128 tokens"),
        (["--run", "a/b"], "run name 'a/b'"),
        (["--data.corpus", "missing.txt"], "missing.txt"),
        (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt"),
        (["--data.context_length", "20000"], "fewer than one block"),
        (["--data.tokenizer", "bpe:4096"], "4096"),
    ],
)
def test_bad_input_is_one_clear_error_before_time_is_spent(place, args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        fit(*args)
    assert not (place / "runs/small/checkpoints").exists()


def test_what_a_callbacks_constructor_refuses_is_the_message(place):
    callbacks = [{"class_path": "callbacks.CheckpointRetention", "init_args": {"keep_latest": 0}}]
    with pytest.raises(SystemExit) as refused:
        run_command(lambda: fit("--trainer.callbacks", json.dumps(callbacks)))
    assert str(refused.value).startswith("error: CheckpointRetention(keep_latest=0): it has to be 1 or more")


def test_an_error_that_is_not_ours_keeps_its_traceback():
    with pytest.raises(json.JSONDecodeError):
        run_command(lambda: json.loads("{"))


def test_a_fresh_start_over_checkpoints_is_refused(place):
    fit()
    with pytest.raises(ValueError, match="choose another --run"):
        fit("--ckpt_path", "none")


def test_an_extension_is_refused_before_anything_is_begun(place, monkeypatch):
    fit("--model.schedule.decay_steps", "2")
    monkeypatch.setattr(pl.Trainer, "fit", lambda *_, **__: pytest.fail("W&B would have begun a run"))
    with pytest.raises(ValueError, match="Its decay began after update 2"):
        fit("--model.schedule.decay_steps", "2", "--trainer.max_steps", "8")


def test_going_back_in_a_run_is_said(place):
    fit("--trainer.callbacks.init_args.keep_latest", "2")
    with pytest.warns(
        UserWarning, match=r"--ckpt_path .*step-00000002 goes back in this run: its .* updates 4 are"
    ):
        cli = fit("--ckpt_path", "runs/small/checkpoints/step-00000002")
    assert cli.trainer.global_step == 4


def test_a_mistyped_checkpoint_leaves_no_run_behind(place):
    with pytest.raises(FileNotFoundError, match=r"without --ckpt_path `fit` begins it"):
        fit("--run", "new", "--ckpt_path", "latest")
    assert not (place / "runs" / "new").exists()


def test_two_trainings_in_one_directory_are_refused_before_anything_is_written(place):
    hold = "import fcntl, time\nf = open('runs/small/.lock', 'a')\nfcntl.lockf(f, fcntl.LOCK_EX)\nprint('held', flush=True)\ntime.sleep(60)"
    (place / "runs" / "small").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            with pytest.raises(RuntimeError, match=r"runs/small is being trained by another process"):
                fit()
        finally:
            other.kill()
    assert [p.name for p in (place / "runs" / "small").iterdir()] == [".lock"]
    fit()


def test_another_architecture_is_refused_with_the_differences(place):
    fit()
    with pytest.raises(ValueError, match=r"holds another model \(n_layer: 2 in the checkpoint, 3 now\)"):
        fit("--model.overrides", "{n_layer: 3}", "--trainer.max_steps", "6")
    fit("--model.overrides", "{dropout: 0.1}", "--trainer.max_steps", "6")  # how it is trained may change


def test_evaluation_without_a_checkpoint_is_an_error(place):
    with pytest.raises(FileNotFoundError, match="No checkpoint"):
        main(["validate", "--config", "small.yaml", "--ckpt_path", "best"])
    with pytest.raises(ValueError, match="train first"):
        main(["validate", "--config", "small.yaml"])


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_parses(file, place, monkeypatch):
    """Parsed by the very parser of the command, without building anything."""
    import recipes.pretrain as pretrain

    class Parsed(Exception):
        pass

    def stop(self):
        raise Parsed

    monkeypatch.setattr(pretrain.PretrainCLI, "before_instantiate_classes", stop)
    with pytest.raises(Parsed):
        main(["fit", "--config", str(file)])
    assert file.read_text().startswith("#"), "a header comment: hardware, tokens, what to expect"


@pytest.mark.slow
def test_quickstart_end_to_end(tmp_path):
    command = [sys.executable, "-m", "recipes.pretrain", "fit", "--config", str(ROOT / "configs/quickstart.yaml"),
               "--trainer.max_steps", "8", "--trainer.val_check_interval", "4", "--data.limit_val_blocks", "16"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bits per byte" in done.stdout
    rows = read_journal(tmp_path / "runs/quickstart", "update")
    assert [r["progress/update"] for r in rows] == list(range(1, 9))
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5
    assert abs(rows[0]["train/loss"] - 8.32) < 0.3  # ln 4096
    text = subprocess.run(
        [sys.executable, "-m", "recipes.sample", "--run", "runs/quickstart", "--prompt", "The country", "--max_new_tokens", "8"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert text.returncode == 0, text.stderr[-3000:]
    assert text.stdout.startswith("The country")
    assert json.loads((tmp_path / "runs/quickstart/checkpoints/index.json").read_text())


def test_checkpoints_are_found_where_the_callback_was_told_to_save(place):
    fit("--trainer.callbacks.dirpath", "elsewhere")
    cli = fit("--trainer.callbacks.dirpath", "elsewhere", "--trainer.max_steps", "6")
    assert cli.model.updates_at_start == 4
    assert (place / "elsewhere/index.json").is_file()


@pytest.mark.slow
def test_another_micro_batch_continues_with_the_same_samples_and_intervals(place):
    config = yaml.safe_load((place / "small.yaml").read_text())
    config["trainer"]["logger"][0]["init_args"]["save_dir"] = "runs/whole"
    (place / "whole.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "whole.yaml", "--trainer.max_steps", "7"])
    fit("--trainer.max_steps", "3")
    fit("--trainer.max_steps", "7", "--data.micro_batch_size", "1")
    whole, small = read_journal("runs/whole", "update"), read_journal("runs/small", "update")
    assert [r["progress/samples"] for r in small] == [r["progress/samples"] for r in whole]
    assert [r["train/loss"] for r in small] == pytest.approx([r["train/loss"] for r in whole], rel=1e-5)
    assert [r["step"] for r in read_journal("runs/small", "validation")] == [2, 3, 4, 6, 7]


def test_a_warning_about_sums_over_ranks_is_left_out_where_they_are_summed_already():
    """Lightning's text, as it stands in its source: a user's own metric keeps the warning."""
    import inspect

    from lightning.pytorch.trainer.connectors.logger_connector import result

    assert (
        "It is recommended to use `self.log({result_metric.meta.name!r}, ..., sync_dist=True)`"
        in inspect.getsource(result)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet()
        for name in ("val/loss", "test/ppl", "progress/tokens", "mine/loss"):
            warnings.warn(
                f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)` when", stacklevel=1
            )
    assert [str(w.message).split("'")[1] for w in caught] == ["mine/loss"]
