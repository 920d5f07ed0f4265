"""recipes.verify_gradients: one gradient from every split with TokenWeightedLoss, a difference named without."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_gpt_loop.gradient_splits import find_splits
from recipes import verify_gradients


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("A farmer had a field, and in the field there was a well. " * 100)
    content = {
        "trainer": {
            "max_steps": 8,
            "callbacks": [
                {"class_path": "callbacks.GradNormMonitor", "init_args": {"clip_norm": 0.1}},
                {"class_path": "callbacks.TokenWeightedLoss"},
                {"class_path": "callbacks.CheckpointRetention"},
            ],
        },
        "model": {"config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "dropout": 0.1}},
        "data": {
            "corpus": str(tmp_path / "text.txt"),
            "data_dir": str(tmp_path / "data"),
            "tokenizer": "bytes",
            "context_length": 32,
            "val_split": "tail",
            "val_fraction": 0.1,
        },
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def without_weighting(config):
    content = yaml.safe_load(config.read_text())
    del content["trainer"]["callbacks"][1]
    path = config.with_name("unweighted.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def here(monkeypatch):
    """In this process, for speed; one test below does it as users do."""

    def run_split(config, split, strategy, mask, precision, folder):
        own = folder / str(split).replace(" ", "-")
        own.mkdir()
        return verify_gradients.one_update(config, split, strategy, mask, precision, own)

    monkeypatch.setattr(verify_gradients, "run_split", run_split)


def test_micro_batches_give_one_gradient(config, here, capsys):
    assert verify_gradients.verify(config, devices=1, batch_size=4) == 0
    out = capsys.readouterr().out
    assert "All splits give the same gradient" in out and "differs" not in out
    assert sorted(p.name for p in config.parent.iterdir()) == ["data", "small.yaml", "text.txt"]


@pytest.mark.slow
def test_means_of_means_are_found_and_the_parameter_named(config, here, capsys):
    assert verify_gradients.verify(without_weighting(config), devices=1, batch_size=4) == 1
    out = capsys.readouterr().out
    assert out.count("model.") == 2 and out.count("<- differs") == 2 and "TokenWeightedLoss mends it" in out
    # Full sequences weigh alike, and nothing shows: that is what the mask is for.
    assert verify_gradients.verify(without_weighting(config), devices=1, batch_size=4, mask=0.0) == 0


def test_the_captured_gradient_is_that_of_plain_pytorch(config, here, tmp_path, monkeypatch):
    """All targets of the batch in one mean cross-entropy of the logits, with the weights before the update."""
    batches, models = [], []
    begin = verify_gradients.Capture.on_train_batch_start

    def keep(self, trainer, module, batch, batch_idx):
        begin(self, trainer, module, batch, batch_idx)
        batches.append(batch)
        models.append(copy.deepcopy(module.model))

    monkeypatch.setattr(verify_gradients.Capture, "on_train_batch_start", keep)
    found = verify_gradients.one_update(config, find_splits(4, 1)[-1], "ddp", 0.5, "32-true", tmp_path)
    assert len(batches) == 4
    assert found["sample_ids"] == sorted(int(i) for b in batches for i in b["sample_ids"])
    targets = torch.cat([b["targets"] for b in batches])
    assert len({int((row == -100).sum()) for row in targets}) > 1
    logits = models[0](torch.cat([b["inputs"] for b in batches]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    names, parameters = zip(*models[0].named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        apart = float((gradient - found["gradients"][f"model.{name}"]).norm())
        assert apart <= 1e-5 * float(gradient.norm()), name


def test_what_does_not_run_cannot_be_judged(config, capsys, monkeypatch):
    def fails(*_):
        raise RuntimeError("2 ranks ended with exit code 1; its last lines:\nout of memory")

    monkeypatch.setattr(verify_gradients, "run_split", fails)
    assert verify_gradients.verify(config) == 2
    assert "cannot be judged: 2 ranks ended" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_over_two_ranks(config):
    command = [sys.executable, "-m", "recipes.verify_gradients", "--config", str(config), "--batch_size", "2"]
    found = subprocess.run(
        [*command, "--strategy", "fsdp2"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=280,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 ranks x 1 micro-batches of 1" in found.stdout
