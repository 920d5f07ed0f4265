"""Names of branches: different branches never collide, the same one is found again, and a failed start leaves no name taken."""

import json
import shutil
from pathlib import Path

import pytest

from lit_gpt_loop.branch import Request
from recipes import cooldown, cooldown_start
from tests.recipes.trunk import cut, rates


@pytest.fixture
def trunk(shared):
    """A trunk that was stopped after 10 of 20 updates, and no branch; no test changes it."""
    yield shared / "runs" / "trunk"
    for run in Path("runs").iterdir():
        if run.name != "trunk":
            shutil.rmtree(run)


def branches():
    return sorted(p.name for p in Path("runs").iterdir() if p.name != "trunk")


def settled(checkpoint="latest", decay_steps=2.0, final_ratio=0.0, name=None, shape="linear"):
    """Begin a branch without training it; return its name."""
    request = Request("trunk", checkpoint, decay_steps, shape, final_ratio)
    branch, lock = cooldown_start.settle(Path("runs/trunk"), request, name)
    lock.close()
    return branch.name


def trained(name):
    Path("runs", name, "config.yaml").write_text("")  # as KeepConfig does when training starts


def test_lengths_and_final_ratios_of_one_cut_are_branches_of_their_own(trunk):
    for decay_steps, final_ratio, name in [
        (2, 0.0, "trunk-cooldown-10-linear"),
        (3, 0.0, "trunk-cooldown-10-linear-3"),
        (3, 0.5, "trunk-cooldown-10-linear-3-to-0.5"),
        (2, 1.0, "trunk-cooldown-10-linear-2"),
    ]:
        assert settled("latest", decay_steps, final_ratio) == name
        trained(name)
    assert settled("latest", 3, 0.0) == "trunk-cooldown-10-linear-3"
    with pytest.raises(
        ValueError,
        match=r"trunk-cooldown-10-linear holds another branch \(cut from trunk at update 10: linear decay over 2 updates to "
        r"0 x peak\): give this one another --name$",
    ):
        settled("latest", 4, 0.0, "trunk-cooldown-10-linear")


def test_the_same_branch_is_found_however_it_is_asked_for(trunk):
    """A sixth of all updates after 10 is 2; the latest checkpoint is that of update 10."""
    cut("--from", "latest", "--decay_steps", 1 / 6, "--shape", "linear")
    assert list(rates("trunk-cooldown-10-linear")) == [11, 12]
    cli = cut("--from", "archive:10", "--decay_steps", 2, "--shape", "linear")
    assert (cli.run_dir.name, cli.model.updates_at_start) == ("trunk-cooldown-10-linear", 12)
    assert settled("archive:10", 2, name="trunk-cooldown-10-linear") == "trunk-cooldown-10-linear"
    assert branches() == ["trunk-cooldown-10-linear"]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (("--trainer.nonsense", "3"), SystemExit),
        (("--data.global_batch_size", "9"), ValueError),
        (("--data.corpus", "missing.txt"), FileNotFoundError),
    ],
)
def test_a_command_that_fails_before_training_leaves_nothing(trunk, override, error):
    loggers = json.dumps([{"class_path": "lit_gpt_loop.journal.RunWandbLogger", "init_args": {"save_dir": "runs/f", "offline": True}}])  # fmt: skip
    args = ("--from", "latest", "--shape", "linear", "--name", "f")
    with pytest.raises(error):
        cut(*args, "--decay_steps", 2, "--trainer.logger", loggers, *override)
    assert branches() == []
    cut(*args, "--decay_steps", 1)
    assert list(rates("f")) == [11]


def test_a_branch_that_was_killed_before_training_does_not_hold_its_name(trunk):
    settled("latest", 2, name="f")
    Path("runs/f/wandb").mkdir()
    assert settled("archive:5", 3, name="f") == "f"
    kept = cooldown_start.read_branch(Path("runs/f"))
    assert (kept.parent_step, kept.decay_steps) == (5, 3) and not Path("runs/f/wandb").exists()
    trained("f")
    with pytest.raises(ValueError, match=r"another branch .* another --name"):
        settled("latest", 2, name="f")


def test_a_share_above_half_asks_for_the_number(trunk):
    with pytest.raises(ValueError, match=r"9,990 updates of decay after 10: .* --decay_steps 9990$"):
        settled("latest", 0.999)
    assert branches() == []
    assert settled("latest", 0.5) == "trunk-cooldown-10-linear"


def test_help_keeps_its_lines(capsys):
    with pytest.raises(SystemExit):
        cooldown.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("  python -m recipes.cooldown --run runs/trunk --from latest --decay_steps 0.2 ")
        for line in lines
    )


def test_an_unknown_argument_names_a_command_that_exists(trunk, capsys):
    with pytest.raises(SystemExit):
        cut("--decay_steps", 2, "--trainer.nonsense", "3")
    assert "python -m recipes.pretrain fit --help" in capsys.readouterr().err.replace("\n", " ")
