"""Disks that are full, or become read-only, in the middle of a save: real ones where mounting is permitted."""

import os
import resource
import subprocess

import pytest
import torch

from callbacks.checkpoint_retention import CheckpointRetention, CheckpointSaveError, find_damage, list_saved
from tests.chaos.toy import fit

resolve = CheckpointRetention.resolve


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


def check_what_is_left(checkpoints, steps):
    assert [s.step for s in list_saved(checkpoints)] == steps
    for saved in list_saved(checkpoints):
        assert find_damage(checkpoints / saved.name) is None
    assert not [n for n in os.listdir(checkpoints) if n.startswith(".")]
    path = resolve(checkpoints, "latest")
    if path.is_file():
        assert torch.load(path, weights_only=True)["global_step"] == steps[-1]


@pytest.mark.case("C37")
@pytest.mark.parametrize("stock", [True, False])
def test_c37_a_disk_that_is_full_at_each_page_of_a_save(small_disk, stock):
    """The disk is filled so that a save fails at its first page, at its second, ... until one fits."""
    checkpoints, ballast = small_disk / "c", small_disk / "ballast"
    outcomes = []
    for free_pages in range(0, 40, 3):
        ballast.unlink(missing_ok=True)

        def fill(module, i, free_pages=free_pages):
            if module.global_step == 1:
                free = os.statvfs(small_disk)
                size = free.f_bavail * free.f_bsize - free_pages * 4096
                with open(ballast, "wb") as f:
                    f.write(b"x" * max(0, size))

        path = resolve(checkpoints, "auto")
        assert path is None
        error = ""
        try:
            fit(checkpoints, 2, every_n_steps=1, on_step=fill, stock=stock, keep_latest=1)
        except CheckpointSaveError as e:
            error = str(e)
        outcomes.append(not error)
        if error:
            assert "Saving update 2" in error and "No space left on device" in error
            # Committed or not, if only the index did not fit any more.
            check_what_is_left(checkpoints, [1] if len(list_saved(checkpoints)) == 1 else [1, 2])
        else:
            check_what_is_left(checkpoints, [2])
        ballast.unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", checkpoints], check=True)
    assert outcomes[0] is False and outcomes[-1] is True
    assert outcomes == sorted(outcomes)


@pytest.mark.case("C37")
def test_c37_a_disk_that_becomes_read_only(small_disk):
    def remount(module, i):
        if module.global_step == 2:
            subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

    with pytest.raises(CheckpointSaveError, match=r"Saving update 3 .* Read-only file system"):
        fit(small_disk / "c", 5, every_n_steps=1, on_step=remount)
    assert resolve(small_disk / "c", "latest").parent.name == "step-00000002"
    with pytest.raises(
        CheckpointSaveError, match=r"Nothing can be saved under .*Read-only file system.*another dirpath"
    ):
        fit(small_disk / "c", 5)  # said at the start, not hours later


@pytest.mark.case("C37")
def test_c37_a_limit_on_file_sizes(tmp_path):
    """Fails inside the kernel without a mount: files may not grow past 8 KiB from update 2 on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(module, i):
        if module.global_step == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))

    try:
        with pytest.raises(CheckpointSaveError, match=r"Saving update 2 .* File too large"):
            fit(tmp_path / "c", 5, every_n_steps=1, on_step=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_what_is_left(tmp_path / "c", [1])


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "c").write_text("in the way")
    with pytest.raises(CheckpointSaveError, match="Nothing can be saved under"):
        fit(tmp_path / "c", 2)
    assert (tmp_path / "c").read_text() == "in the way"
