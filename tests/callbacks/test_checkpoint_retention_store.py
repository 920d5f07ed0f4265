"""Copies on another store: in the background, complete or not there, retried, pruned, and found again on resume."""

import shutil
import time
import uuid

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

import callbacks.checkpoint_retention as module_under_test
from callbacks.checkpoint_retention import CheckpointRetention, find_damage
from tests.chaos.toy import assert_same, final_state, fit

resolve = CheckpointRetention.resolve


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return (
        f"memory://bucket-{uuid.uuid4().hex}/run"
        if request.param == "memory"
        else f"file://{tmp_path}/store/run"
    )


def names(url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return (
        sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in fs.ls(root, detail=False)) if fs.exists(root) else []
    )


def test_copies_follow_the_policy_and_bring_a_lost_disk_back(tmp_path, url):
    options = {"archive_every_n_steps": 3, "keep_latest": 1, "batches": 20}
    whole, whole_trainer, _ = fit(tmp_path / "w", 7, **options)
    fit(tmp_path / "c", 5, every_n_steps=1, copy_to=url, **options)
    assert set(names(url)) >= {"step-00000003", "step-00000005"}
    assert "step-00000001" not in names(url)
    shutil.rmtree(tmp_path / "c")  # the node's disk is gone
    path = resolve(tmp_path / "c", "auto", copy_to=url)
    assert path.parent.name == "step-00000005" and find_damage(path.parent) is None
    assert resolve(tmp_path / "c", "archive:3", copy_to=url).parent.name == "step-00000003"
    module, trainer, _ = fit(tmp_path / "c", 7, ckpt_path=path, **options)
    assert_same(final_state(module, trainer), final_state(whole, whole_trainer))


def test_what_is_newer_decides_wherever_it_is(tmp_path, url):
    fit(tmp_path / "c", 4, every_n_steps=2, copy_to=url, keep_latest=3, batches=20)
    shutil.rmtree(tmp_path / "c" / "step-00000004")
    assert resolve(tmp_path / "c", "latest", copy_to=url).parent.name == "step-00000004"  # fetched
    fit(tmp_path / "c", 6, ckpt_path=resolve(tmp_path / "c", "latest"), batches=20)
    assert resolve(tmp_path / "c", "latest", copy_to=url).parent.name == "step-00000006"  # never uploaded


def test_an_upload_that_was_cut_off_is_no_checkpoint(tmp_path, url):
    fit(tmp_path / "c", 4, every_n_steps=2, copy_to=url, keep_latest=3, batches=20)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/step-00000004/manifest.json")
    shutil.rmtree(tmp_path / "c")
    assert resolve(tmp_path / "c", "latest", copy_to=url).parent.name == "step-00000002"
    fs.rm_file(f"{root}/step-00000002/state/rest.pt")
    fs.pipe_file(f"{root}/step-00000002/state/rest.pt", b"altered")
    shutil.rmtree(tmp_path / "c")
    with (
        pytest.warns(UserWarning, match="Step 2 is damaged"),
        pytest.raises(RuntimeError, match="No whole checkpoint"),
    ):
        resolve(tmp_path / "c", "latest", copy_to=url)


def test_a_store_that_fails_is_retried_and_never_stops_training(tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test._Uploader, "first_wait_s", 0.01)
    failures = {"left": 3, "seen": 0}
    put_file = LocalFileSystem.put_file

    def flaky(self, *args, **kwargs):
        if failures["left"]:
            failures["left"] -= 1
            failures["seen"] += 1
            raise OSError("the network is down")
        return put_file(self, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "put_file", flaky)
    url = f"file://{tmp_path}/store"
    with pytest.warns(UserWarning, match=r"Copying step-00000002 .* failed \(try 1\): the network is down"):
        fit(tmp_path / "c", 2, every_n_steps=2, copy_to=url)
    assert failures["seen"] == 3 and names(url) == ["step-00000002"]
    failures["left"] = 1 << 30  # for good
    with pytest.warns(UserWarning, match=r"try 5"):
        _, trainer, _ = fit(
            tmp_path / "c", 4, every_n_steps=2, copy_to=url, ckpt_path=resolve(tmp_path / "c", "latest")
        )
    assert trainer.global_step == 4
    assert not (tmp_path / "store" / "step-00000004" / "manifest.json").exists()


@pytest.mark.slow
def test_a_slow_store_does_not_hold_training_up(tmp_path, monkeypatch):
    put_file, ends = LocalFileSystem.put_file, []

    def slow(self, *args, **kwargs):
        time.sleep(0.3)
        ends.append(time.monotonic())
        return put_file(self, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "put_file", slow)
    finished = []
    fit(tmp_path / "c", 6, every_n_steps=1, copy_to=f"file://{tmp_path}/store", batches=20, verify="sizes",
        on_step=lambda module, i: finished.append(time.monotonic()))  # fmt: skip
    assert finished[-1] < ends[-1]
    assert "step-00000006" in names(f"file://{tmp_path}/store")
