"""`recipes.checkpoints` on a run that the toy made, and the SLURM script with stand-ins for srun and scontrol."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from callbacks.checkpoint_retention import CheckpointRetention, list_saved
from recipes.checkpoints import main
from tests.chaos.toy import fit

SCRIPT = Path(__file__).parents[2] / "configs" / "slurm" / "pretrain.sbatch"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    folder = tmp_path / "runs" / "mine" / "checkpoints"
    losses = {1: 3.0, 2: 1.5, 3: 2.0, 4: 2.5, 5: 2.6}
    fit(
        folder,
        5,
        every_n_steps=1,
        validate=1,
        val_losses=losses,
        archive_every_n_steps=3,
        keep_latest=2,
        batches=20,
    )
    return tmp_path / "runs"


def test_ls_shows_steps_roles_metric_size_and_whether_it_is_whole(runs, capsys):
    assert main(["ls", "--run", "mine", "--runs_dir", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "restart" in line)
    rows = [line for line in lines if "sizes ok" in line]
    assert header.split() == ["step", "roles", "val/loss", "size", "saved", "files", "restart"]
    assert len(rows) == 4
    for row, (step, roles, metric) in zip(
        rows, [(2, "best", 1.5), (3, "archive", 2), (4, "latest", 2.5), (5, "latest", 2.6)], strict=True
    ):
        cells = re.split(r"  +", row.strip())
        assert cells[:3] == [str(step), roles, f"{metric:g}"]
        assert "KiB" in cells[3] and cells[5:] == ["sizes ok", "not tried"]


def test_verify_names_the_damaged_file_and_ends_with_1(runs, capsys):
    assert main(["verify", "--run", str(runs / "mine")]) == 0
    assert "hashes ok" in capsys.readouterr().out
    victim = runs / "mine" / "checkpoints" / "step-00000005" / "state" / "rest.pt"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    (runs / "mine" / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    assert main(["ls", "--run", str(runs / "mine")]) == 0
    with pytest.warns(UserWarning, match="Step 5 is damaged"):
        assert main(["verify", "--run", str(runs / "mine")]) == 1
    out = capsys.readouterr().out
    assert (
        f"damaged: {victim} was altered" in out and "step-00000004/manifest.json is missing or cannot" in out
    )
    assert f"latest that is whole: {runs}/mine/checkpoints/step-00000003/state" in out


def test_prune_says_then_deletes_what_no_role_keeps(runs, capsys):
    folder = runs / "mine" / "checkpoints"
    arguments = ["prune", "--run", "mine", "--runs_dir", str(runs)]
    assert main(arguments) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert main([*arguments, "--keep_latest", "1", "--dry_run", "true"]) == 0
    assert "would delete" in capsys.readouterr().out
    assert [s.step for s in list_saved(folder)] == [2, 3, 4, 5]
    main([*arguments, "--keep_latest", "1"])
    assert [s.step for s in list_saved(folder)] == [2, 3, 5]
    (folder / "step-00000005" / "state" / "rest.pt").unlink()  # a damaged one does not count as the latest
    main([*arguments, "--keep_latest", "1", "--keep_best", "0"])
    assert [s.step for s in list_saved(folder)] == [3, 5]
    with pytest.warns(UserWarning, match="Step 5 is damaged"):
        assert CheckpointRetention.resolve(folder, "latest").parent.name == "step-00000003"
    with pytest.raises(ValueError, match="at least 1"):
        main([*arguments, "--keep_latest", "0"])


def test_a_run_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="No checkpoints of run 'nobody'"):
        main(["ls", "--run", "nobody", "--runs_dir", str(tmp_path)])


@pytest.mark.case("C53")
@pytest.mark.parametrize(
    ("code", "is_requeued"), [(138, True), (143, True), (0, False), (1, False), (130, False)]
)
def test_slurm_script_requeues_after_a_signal_only(tmp_path, code, is_requeued):
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    for name, body in (
        ("srun", f'echo "$@" >> {tmp_path}/srun.log; exit {code}'),
        ("scontrol", f'echo "$@" >> {tmp_path}/scontrol.log'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS_PER_NODE": "4",
    }
    done = subprocess.run([SCRIPT, "--run", "a"], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == (0 if is_requeued else code), done.stderr
    command = (tmp_path / "srun.log").read_text()
    assert "-m recipes.pretrain fit --config configs/gpt2_124m.yaml" in command
    assert "--trainer.devices 4 --ckpt_path auto --run a" in command
    requeued = (tmp_path / "scontrol.log").read_text() if (tmp_path / "scontrol.log").exists() else ""
    assert requeued == ("requeue 77\n" if is_requeued else "")
    if is_requeued:
        env["SLURM_RESTART_COUNT"] = "100"
        assert subprocess.run([SCRIPT], env=env, capture_output=True, cwd=tmp_path).returncode == code
