"""CheckpointRetention in a Trainer, one process: when it saves, what it keeps, and that training continues bit for bit."""

import json
import os
import signal

import lightning.pytorch as pl
import pytest
import torch

from callbacks.checkpoint_retention import (
    CheckpointRetention,
    CheckpointSaveError,
    DamagedCheckpointError,
    find_damage,
    list_saved,
    read_manifest,
)
from tests.chaos.toy import QUIET, Toy, assert_same, final_state, fit

resolve = CheckpointRetention.resolve


def index(folder):
    return json.loads((folder / "index.json").read_text())


def steps(folder):
    return [s.step for s in list_saved(folder)]


@pytest.mark.case("C26")
@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"stock": True}, id="stock"),
        pytest.param({"accumulate": 2, "validate": 3, "workers": 2}, id="ours-accumulate-validate-workers"),
        pytest.param(
            {"stock": True, "accumulate": 2, "validate": 2, "async_save": True},
            id="stock-accumulate-validate-async",
            marks=pytest.mark.slow,
        ),
        pytest.param({"validate": 1, "async_save": True}, id="ours-validate-async", marks=pytest.mark.slow),
    ],
)
def test_c26_stop_at_any_update_and_continue_bit_for_bit(tmp_path, kwargs):
    num_steps = 7  # 6 updates per epoch: stops fall before, at and after the end of one
    module, trainer, _ = fit(tmp_path / "whole", num_steps, every_n_steps=1, keep_latest=9, **kwargs)
    reference, losses = final_state(module, trainer), module.losses
    per_update = kwargs.get("accumulate", 1)
    stops = (1, 2, 5, 6) if not kwargs.get("workers") else (2, 6)
    for stop in stops:
        folder = tmp_path / f"stop{stop}"
        fit(folder, stop, every_n_steps=1, **kwargs)
        module, _, _ = fit(folder, stop + 1, ckpt_path=resolve(folder, "latest"), every_n_steps=1, **kwargs)
        assert module.losses == losses[stop * per_update : (stop + 1) * per_update]
        if stop + 1 == num_steps:
            continue
        module, trainer, _ = fit(
            folder, num_steps, ckpt_path=resolve(folder, "latest"), every_n_steps=1, **kwargs
        )
        assert module.losses == losses[(stop + 1) * per_update :]  # stopped twice in a row
        assert_same(final_state(module, trainer), reference)


@pytest.mark.case("C26")
@pytest.mark.parametrize("forgotten", ["python", "numpy", "torch"])
def test_c26_forgetting_one_generator_is_noticed(tmp_path, forgotten):
    module, _, _ = fit(tmp_path / "whole", 4, every_n_steps=1)
    fit(tmp_path / "a", 2, every_n_steps=1, verify="sizes", stock=True)
    path = resolve(tmp_path / "a", "latest")
    checkpoint = torch.load(path, weights_only=True)
    other = tmp_path / "other.ckpt"
    fit(tmp_path / "b", 1, every_n_steps=1, stock=True)
    wrong = torch.load(resolve(tmp_path / "b", "latest"), weights_only=True)
    mine, theirs = (c["callbacks"]["CheckpointRetention"]["rng"][0] for c in (checkpoint, wrong))
    mine[forgotten] = theirs[forgotten]
    torch.save(checkpoint, other)
    resumed, _, _ = fit(tmp_path / "c", 4, ckpt_path=other, stock=True)
    assert resumed.losses[0] != module.losses[2]


@pytest.mark.case("C24")
def test_c24_the_first_resumed_batch_is_the_next_one(tmp_path):
    fit(tmp_path / "a", 3, every_n_steps=3, stock=True)
    path = resolve(tmp_path / "a", "latest")
    progress = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    assert (progress["ready"], progress["completed"]) == (3, 2)  # Lightning's own way of writing it
    module, _, _ = fit(tmp_path / "a", 5, ckpt_path=path, stock=True)
    assert module.batches == [(3, 3), (4, 4)]


@pytest.mark.case("C25")
def test_c25_saves_fall_on_update_boundaries_only(tmp_path):
    """Validation after micro-batch 6 of windows of 4 must not save inside the second window."""
    seen = []

    class Look(pl.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            seen.append((trainer.global_step, trainer.fit_loop.total_batch_idx + 1))

    module = Toy()
    trainer = pl.Trainer(
        max_steps=4, accumulate_grad_batches=4, val_check_interval=6, check_val_every_n_epoch=None,
        callbacks=[Look(), CheckpointRetention(tmp_path / "c", every_n_steps=1)], default_root_dir=tmp_path, **QUIET,
    )  # fmt: skip
    rows = torch.utils.data.DataLoader(torch.randn(40, 6), batch_size=2)
    trainer.fit(module, rows, rows)
    assert seen and all(batches == 4 * step for step, batches in seen)
    whole, whole_trainer, _ = fit(tmp_path / "w", 4, accumulate=4)
    fit(tmp_path / "s", 2, accumulate=4, every_n_steps=1)
    module, trainer, _ = fit(tmp_path / "s", 4, accumulate=4, ckpt_path=resolve(tmp_path / "s", "latest"))
    assert_same(final_state(module, trainer), final_state(whole, whole_trainer))
    with pytest.raises(ValueError, match="accumulate_grad_batches=4; with 3 the first window would be short"):
        fit(tmp_path / "s", 5, accumulate=3, batches=8, ckpt_path=resolve(tmp_path / "s", "step:4"))


@pytest.mark.case("C33")
def test_c33_best_is_judged_on_the_validation_of_the_same_weights(tmp_path):
    fit(tmp_path, 6, validate=2, val_losses={2: 9.0, 4: 3.0, 6: 8.0}, every_n_steps=2, keep_latest=1)
    best = resolve(tmp_path, "best").parent
    assert best.name == "step-00000004"
    assert {k: read_manifest(best)["metric"][k] for k in ("name", "value", "step")} == {
        "name": "val/loss", "value": 3.0, "step": 4}  # fmt: skip
    assert index(tmp_path) == {"latest": [6], "best": [4], "archive": []}


@pytest.mark.case("C34")
def test_c34_best_and_latest_stay_apart_and_load(tmp_path):
    loaded = []

    class Check(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, i):
            if trainer.global_step:
                for role in ("best", "latest"):
                    path = resolve(tmp_path / "c", role)
                    loaded.append(
                        (trainer.global_step, role, torch.load(path, weights_only=True)["global_step"])
                    )

    fit(tmp_path / "c", 4, validate=1, val_losses={1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, keep_latest=1, stock=True,
        callbacks=[Check()])  # fmt: skip
    assert loaded == [(s, role, 1 if role == "best" else s) for s in (1, 2, 3) for role in ("best", "latest")]
    assert steps(tmp_path / "c") == [1, 4]


@pytest.mark.case("C35")
def test_c35_resuming_deletes_nobody_elses_files(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    options = {
        "every_n_steps": 1,
        "archive_every_n_steps": 4,
        "batches": 20,
        "validate": 1,
        "verify": "sizes",
    }
    losses = {step: 1.0 if step == 1 else 2.0 for step in range(1, 17)}
    fit(a, 8, val_losses=losses, **options)
    assert steps(a) == [1, 4, 7, 8]
    fit(a, 16, val_losses=losses, ckpt_path=resolve(a, "latest"), **options)
    assert index(a) == {"latest": [16, 15], "best": [1], "archive": [4, 8, 12, 16]}
    assert steps(a) == [1, 4, 8, 12, 15, 16]

    before = {p: p.read_bytes() for p in a.rglob("*") if p.is_file()}
    (b).mkdir()
    (b / "notes.txt").write_text("mine")
    (b / "step-00000003").mkdir()  # no manifest: nobody knows what this is
    fit(b, 18, val_losses={17: 5.0, 18: 5.0}, ckpt_path=resolve(a, "latest"), **options)
    assert {p: p.read_bytes() for p in a.rglob("*") if p.is_file()} == before
    assert (b / "notes.txt").exists() and (b / "step-00000003").exists()
    lineage = read_manifest(resolve(b, "latest").parent)["lineage"]
    assert lineage["parent_step"] == 16
    assert lineage["parent_manifest_sha256"] == read_manifest(a / "step-00000016")["sha256"]

    # A fresh run in a folder that another run uses: both stay whole, also at the same steps.
    fit(a, 4, val_losses=losses, **options)
    assert {p: p.read_bytes() for p in before if p.name != "index.json"} == {
        p: c for p, c in before.items() if p.name != "index.json"}  # fmt: skip
    assert len(list(a.glob("step-00000004*"))) == 2
    assert resolve(a, "latest").parent.name.startswith("step-00000004-")  # the run that saved last


@pytest.mark.case("C35")
def test_c35_a_checkpoint_deleted_by_hand_is_a_warning(tmp_path):
    import shutil

    fit(tmp_path, 4, every_n_steps=1, keep_latest=3)
    shutil.rmtree(tmp_path / "step-00000003")
    (tmp_path / "index.json").unlink()
    fit(tmp_path, 5, every_n_steps=1, keep_latest=3, ckpt_path=resolve(tmp_path, "latest"))
    assert index(tmp_path)["latest"] == [5, 4, 2]  # rebuilt from the manifests
    shutil.rmtree(tmp_path / "step-00000004")
    with pytest.warns(UserWarning, match=r"steps \[4\] were removed"):
        fit(tmp_path, 6, every_n_steps=1, keep_latest=3, ckpt_path=resolve(tmp_path, "latest"))
    assert index(tmp_path)["latest"] == [6, 5, 2]


@pytest.mark.case("C36")
def test_c36_a_nan_metric_never_becomes_best(tmp_path):
    nan = float("nan")
    fit(tmp_path, 4, validate=1, val_losses={1: nan, 2: 5.0, 3: 5.0, 4: nan}, keep_latest=1, batches=20)
    assert index(tmp_path) == {"latest": [4], "best": [2], "archive": []}
    assert read_manifest(tmp_path / "step-00000004")["metric"]["value"] == "nan"


@pytest.mark.case("W11")
def test_w11_in_a_run(tmp_path):
    curve = dict(zip(range(1, 7), [0.71, 0.52, 0.43, 0.39, 0.42, 0.48], strict=True))
    fit(tmp_path, 6, validate=1, val_losses=curve, keep_latest=1, archive_every_n_steps=[2, 6], batches=20)
    assert index(tmp_path) == {"latest": [6], "best": [4], "archive": [2, 6]}
    assert steps(tmp_path) == [2, 4, 6]


@pytest.mark.case("W07")
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.08, momentum=0.85), lambda p: torch.optim.AdamW(p, lr=0.08, weight_decay=0.0),
])  # fmt: skip
def test_w07_momentum_is_restored(tmp_path, make):
    class Valley(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.ab = torch.nn.Parameter(torch.tensor([-3.0, 1.4], dtype=torch.float64))
            self.path = []

        def training_step(self, batch, i):
            self.path.append(self.ab.detach().clone())
            return 0.5 * (self.ab[0] ** 2 + 8 * self.ab[1] ** 2)

        def configure_optimizers(self):
            return make(self.parameters())

    def go(num_steps, ckpt_path=None):
        module = Valley()
        callbacks = [CheckpointRetention(tmp_path / "c", every_n_steps=20, keep_latest=9)]
        trainer = pl.Trainer(max_steps=num_steps, callbacks=callbacks, default_root_dir=tmp_path, **QUIET)
        trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(100, 1)), ckpt_path=ckpt_path)
        return module.path

    # By hand, from the formulas.
    reference = torch.nn.Parameter(torch.tensor([-3.0, 1.4], dtype=torch.float64))
    optimizer, path = make([reference]), []
    for _ in range(40):
        path.append(reference.detach().clone())
        optimizer.zero_grad()
        reference.grad = torch.tensor([1.0, 8.0], dtype=torch.float64) * reference.detach()
        optimizer.step()
    assert torch.equal(torch.stack(go(20)), torch.stack(path[:20]))
    saved = resolve(tmp_path / "c", "step:20")
    assert torch.equal(torch.stack(go(40, saved)), torch.stack(path[20:]))
    forgotten = torch.load(saved, weights_only=True)
    forgotten["optimizer_states"][0]["state"] = {}
    torch.save(forgotten, tmp_path / "zeroed.ckpt")
    assert not torch.equal(go(22, tmp_path / "zeroed.ckpt")[1], path[21])


def test_by_default_it_saves_after_each_validation_and_epoch(tmp_path):
    fit(tmp_path / "v", 4, validate=2, val_losses={2: 1.0, 4: 2.0}, batches=20)
    assert steps(tmp_path / "v") == [2, 4]
    fit(tmp_path / "e", 12, batches=5, keep_latest=9)
    assert steps(tmp_path / "e") == [5, 10, 12]


def test_by_minutes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("callbacks.checkpoint_retention.time.monotonic", lambda: now[0])

    def tick(module, i):
        now[0] += 20.0

    fit(tmp_path, 7, every_n_minutes=1, keep_latest=9, on_step=tick, save_on_exit=False, batches=20)
    assert steps(tmp_path) == [3, 6]


@pytest.mark.case("C16")
def test_c16_weights_that_are_not_finite_are_never_saved(tmp_path):
    def spoil(module, i):
        if module.global_step == 2:
            module.net[0].weight.data[0, 0] = float("nan")

    with pytest.warns(UserWarning, match=r"Update 3 is not saved: its weights are not finite"):
        _, _, callback = fit(tmp_path, 5, every_n_steps=1, on_step=spoil, stock=True)
    assert callback.num_refused == 3 and steps(tmp_path) == [1, 2]
    weights = torch.load(resolve(tmp_path, "latest"), weights_only=True)["state_dict"]
    assert all(w.isfinite().all() for w in weights.values())


def test_an_error_saves_the_last_whole_update(tmp_path):
    def fail(module, i):
        if i == 7:  # second micro-batch of update 4
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path / "c", 6, accumulate=2, batches=20, on_step=fail, every_n_steps=100)
    assert steps(tmp_path / "c") == [3]
    module, trainer, _ = fit(
        tmp_path / "c", 6, accumulate=2, batches=20, ckpt_path=resolve(tmp_path / "c", "latest")
    )
    assert module.batches[0] == (3, 6)
    assert trainer.global_step == 6  # (the toy's loader has handed two batches out that were not trained)


def test_an_error_inside_the_optimizer_saves_nothing(tmp_path):
    def fit_it():
        def fail(*args, **kwargs):
            raise RuntimeError("half way")

        module = Toy()
        original = module.configure_optimizers

        def configure():
            optimizers, schedules = original()
            optimizers[0].register_step_post_hook(lambda o, *_: fail() if module.global_step == 2 else None)
            return optimizers, schedules

        module.configure_optimizers = configure
        callbacks = [CheckpointRetention(tmp_path / "c", every_n_steps=100)]
        trainer = pl.Trainer(max_steps=5, callbacks=callbacks, default_root_dir=tmp_path, **QUIET)
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(40, 6), batch_size=2))

    with pytest.raises(RuntimeError, match="half way"):
        fit_it()
    assert steps(tmp_path / "c") == []


def test_what_is_written_in_the_background_is_what_was_asked_for(tmp_path, monkeypatch):
    """The write is held up until training is two updates on; the file still holds the weights of the request."""
    import threading

    import callbacks.checkpoint_retention as module_under_test

    go_on, seen = threading.Event(), {}
    save = torch.save

    def slow_save(state, f):
        assert go_on.wait(20)
        save(state, f)

    monkeypatch.setattr(module_under_test.torch, "save", slow_save)

    def watch(module, i):
        seen[module.global_step] = {k: v.clone() for k, v in module.state_dict().items()}
        if module.global_step == 3:  # updates 2 and 3 went on while update 1 was being written
            assert list(tmp_path.glob("c/step-*")) == []
            go_on.set()

    fit(
        tmp_path / "c",
        5,
        every_n_steps=4,
        archive_every_n_steps=[1],
        on_step=watch,
        async_save=True,
        stock=True,
    )
    state = torch.load(resolve(tmp_path / "c", "step:1"), weights_only=True)["state_dict"]
    for name, value in seen[1].items():
        assert torch.equal(state[name], value)
    assert steps(tmp_path / "c") == [1, 4, 5]


class Logged(pl.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


@pytest.mark.parametrize("async_save", [False, True])
def test_each_save_is_logged_once(tmp_path, async_save):
    logger = Logged()
    _, trainer, _ = fit(
        tmp_path / "c", 6, every_n_steps=2, async_save=async_save, trainer_kwargs={"logger": logger}
    )
    rows = [m for _, m in logger.rows if "ckpt/step" in m]
    assert [m["ckpt/step"] for m in rows] == [2.0, 4.0, 6.0]
    sizes = {s.step: s.num_bytes for s in list_saved(tmp_path / "c")}
    for m in rows:
        assert set(m) == {"ckpt/step", "ckpt/blocked_s", "ckpt/write_s", "ckpt/bytes"}
        assert 0 < m["ckpt/blocked_s"] < 60 and 0 < m["ckpt/write_s"] < 60
        assert m["ckpt/bytes"] == sizes.get(int(m["ckpt/step"]), m["ckpt/bytes"])
    assert trainer.callback_metrics["ckpt/step"] == 6


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.case("C37")
def test_c37_a_full_disk_stops_the_run_and_leaves_the_rest_whole(tmp_path, monkeypatch, async_save):
    import errno

    import callbacks.checkpoint_retention as module_under_test

    write, calls = os.write, []

    def full(fd, data):
        calls.append(len(data))
        if "step-00000004" in os.readlink(f"/proc/self/fd/{fd}") and len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(module_under_test.os, "write", full)
    with pytest.raises(
        CheckpointSaveError, match=r"Saving update 4 .* No space left on device.*resume from `latest`"
    ):
        fit(tmp_path / "c", 8, every_n_steps=2, async_save=async_save, stock=True)
    assert resolve(tmp_path / "c", "latest").parent.name == "step-00000002"
    assert sorted(os.listdir(tmp_path / "c")) == ["index.json", "step-00000002"]  # leftovers are cleaned


def test_verify_write_reads_back_and_stops_on_storage_that_lies(tmp_path, monkeypatch):
    import callbacks.checkpoint_retention as module_under_test

    original = module_under_test._hash_file

    def lying(path, from_disk):
        assert from_disk
        return original(path, from_disk) if "step-00000004" not in str(path) else "0" * 64

    monkeypatch.setattr(module_under_test, "_hash_file", lying)
    with pytest.raises(CheckpointSaveError, match=r"reads back otherwise than it was written.*step-00000004"):
        fit(tmp_path / "c", 8, every_n_steps=2, verify="write")
    monkeypatch.undo()
    assert resolve(tmp_path / "c", "latest").parent.name in ("step-00000002", "step-00000006")
    assert "step-00000004" not in os.listdir(tmp_path / "c")


def test_verify_load_checks_when_training_resumes(tmp_path):
    fit(tmp_path / "c", 2, every_n_steps=2, stock=True)
    path = resolve(tmp_path / "c", "latest")
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["tokens"] = 123
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json was altered"):
        fit(tmp_path / "c", 3, ckpt_path=path, verify="load", stock=True)
    fit(tmp_path / "c", 3, ckpt_path=path, verify="sizes", stock=True)


@pytest.mark.case("C37")
def test_c37_leftovers_of_killed_processes_are_ignored_and_cleaned(tmp_path):
    import socket

    fit(tmp_path, 2, every_n_steps=1)
    host = socket.gethostname()
    dead = [f".tmp-step-00000009.{host}.999999999", f".trash-step-00000001.{host}.999999999",
            f".tmp-step-00000003.{host}.{os.getpid()}"]  # fmt: skip
    kept = [f".tmp-step-00000009.{host}.1", ".tmp-step-00000009.otherhost.77", ".hidden"]
    for name in dead + kept:
        (tmp_path / name).mkdir()
    old = f".old-step-0000000{{}}.{host}.999999999"
    (tmp_path / old.format(1)).mkdir()  # was being replaced, the new one is in place
    os.rename(tmp_path / "step-00000002", tmp_path / old.format(2))  # killed between two renames
    assert resolve(tmp_path, "latest").parent.name == "step-00000001"
    fit(tmp_path, 3, every_n_steps=1, ckpt_path=resolve(tmp_path, "step:1"))
    names = set(os.listdir(tmp_path))
    assert set(kept) <= names and not set(dead) & names and not [n for n in names if n.startswith(".old")]
    assert steps(tmp_path) == [2, 3]


@pytest.mark.case("C53")
@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGTERM, "window"),
        (signal.SIGUSR1, "validation"),
        (signal.SIGTERM, "save"),
        (signal.SIGINT, "start"),
        pytest.param(signal.SIGINT, "window", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "save", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "validation", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "start", marks=pytest.mark.slow),
    ],
)
def test_c53_a_signal_saves_once_at_the_next_boundary_and_exits(tmp_path, number, when):
    whole, whole_trainer, _ = fit(tmp_path / "w", 6, accumulate=2, validate=3)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    class Send(pl.Callback):
        def send(self):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a second one changes nothing

        def on_train_start(self, trainer, module):
            if when == "start":
                self.send()

        def on_train_batch_start(self, trainer, module, batch, i):
            if when == "window" and i == 4:  # first of the two micro-batches of update 3
                self.send()

        def on_validation_batch_start(self, *args):
            if when == "validation":
                self.send()

        def on_save_checkpoint(self, trainer, module, checkpoint):
            if when == "save" and trainer.global_step == 2:
                self.send()

    options = {"accumulate": 2, "validate": 3, "every_n_steps": 2}
    with pytest.raises(SystemExit) as exit_:
        fit(tmp_path / "c", 6, callbacks=[Send()], **options)
    assert exit_.value.code == 128 + number
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    expected = {"start": [], "window": [2, 3], "validation": [2, 3], "save": [2, 3]}[when]
    assert steps(tmp_path / "c") == expected
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".tmp")]
    assert all(find_damage(tmp_path / "c" / f"step-{s:08d}") is None for s in expected)
    module, trainer, _ = fit(tmp_path / "c", 6, ckpt_path=resolve(tmp_path / "c", "auto"), **options)
    assert_same(final_state(module, trainer), final_state(whole, whole_trainer))


def test_three_ctrl_c_break_off_and_the_handlers_go_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)

    def press(module, i):
        if module.global_step == 1:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(tmp_path, 4, on_step=press)
    signal.signal(signal.SIGINT, before)


def test_private_parts_of_lightning_that_are_relied_on():
    """Fails when Lightning changes what the callback could not find a public way for."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer.connectors import signal_connector

    assert callable(_TrainingEpochLoop._should_check_val_fx)
    trainer = pl.Trainer(**QUIET)
    assert hasattr(trainer.fit_loop, "_data_fetcher")
    called = []
    trainer._signal_connector._sigterm_notifier_fn = lambda *_: called.append(1)
    try:
        trainer._signal_connector.register_signal_handlers()
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [1] and not trainer.received_sigterm
    finally:
        trainer._signal_connector.teardown()
    assert hasattr(signal_connector._SignalConnector, "_sigterm_notifier_fn")


def test_lightnings_async_plugin_is_refused(tmp_path):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    with pytest.raises(ValueError, match="leave that plugin out"):
        fit(tmp_path, 2, stock=True, trainer_kwargs={"plugins": [AsyncCheckpointIO()]})


def test_trainer_test_finds_the_best(tmp_path):
    _, _, callback = fit(tmp_path, 3, validate=1, val_losses={1: 2.0, 2: 1.0, 3: 3.0}, stock=True)
    assert callback.best_model_path == str(resolve(tmp_path, "best"))
