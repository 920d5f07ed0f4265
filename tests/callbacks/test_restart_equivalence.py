"""RestartEquivalence on one process: no false alarm, and every planted fault named."""

import json
import shutil

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from callbacks import restart_equivalence as re
from callbacks.restart_equivalence import RestartEquivalence, RestartMismatchError
from tests.callbacks.restart_modules import KeepRng, Net, Positioned, plain_loader, run


class Count(pl.Callback):
    """State that has to survive."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def saving(root, every=3, **kwargs):
    return ModelCheckpoint(
        dirpath=root / "c", every_n_train_steps=every, save_top_k=-1, filename="{step}", **kwargs
    )


def record(root, updates=8, every=3, **kwargs):
    torch.manual_seed(1)
    callbacks = [RestartEquivalence(updates=kwargs.pop("traced", 2)), KeepRng(), Count(), saving(root, every)]
    run(root, updates, callbacks=callbacks, **kwargs)
    return root / "c" / f"step={every}.ckpt"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("run"))


def copy_of(checkpoint, tmp_path, edit=None):
    """The checkpoint and its trace in another folder, the checkpoint changed."""
    copy = tmp_path / checkpoint.name
    shutil.copy(re.trace_file_of(checkpoint), re.trace_file_of(copy))
    state = torch.load(checkpoint, weights_only=True)
    if edit is not None:
        edit(state)
    torch.save(state, copy)
    return copy


def resume(checkpoint, tmp_path, *, extra=(), keep=(KeepRng, Count), updates=6, checker=None, **kwargs):
    torch.manual_seed(2)
    checker = checker or RestartEquivalence(on_mismatch="mark")
    run(tmp_path, updates, callbacks=[checker, *[k() for k in keep], *extra], ckpt=checkpoint, **kwargs)
    return checker.report


def first(report):
    assert report["verdict"] == "failed", report
    return report["differences"][0]


def test_an_exact_restart_holds_and_says_so(recorded, tmp_path, caplog):
    checkpoint = copy_of(recorded, tmp_path)
    checker = RestartEquivalence()
    with caplog.at_level("INFO"):
        report = resume(checkpoint, tmp_path, checker=checker)
    assert report["verdict"] == "exact" and report["updates_compared"] == 2 and not report["differences"]
    assert set(report["components"].values()) == {"holds"}
    assert checker.verified_updates == 2 and checker.mismatches == 0
    assert "Promise: exact (same layout and versions)" in caplog.text
    verified = json.loads(re.trace_file_of(checkpoint).read_text())["verified"]
    assert (verified["promise"], verified["updates"], verified["by"]) == ("exact", 2, "RestartEquivalence")


@pytest.mark.parametrize("place", range(3))
def test_the_order_of_callbacks_does_not_matter(recorded, tmp_path, place):
    torch.manual_seed(2)
    checker = RestartEquivalence()
    callbacks = [KeepRng(), Count()]
    callbacks.insert(place, checker)
    run(tmp_path, 6, callbacks=callbacks, ckpt=copy_of(recorded, tmp_path))
    assert checker.report["verdict"] == "exact"


# -- each planted fault is named ---------------------------------------------------------------------------------------


class Plant(pl.Callback):
    def __init__(self, plant):
        self.plant = plant

    def on_train_start(self, trainer, module):
        self.plant(trainer, module)


def test_optimizer_state_dropped(recorded, tmp_path):
    drop = Plant(lambda trainer, module: trainer.optimizers[0].state.clear())
    d = first(resume(copy_of(recorded, tmp_path), tmp_path, extra=[drop]))
    assert (
        d["component"] == "optimizer at load" and d["name"] == "net.0.weight.step" and d["found"] == "absent"
    )


def test_moments_of_two_parameters_swapped(recorded, tmp_path):
    def swap(state):
        moments = state["optimizer_states"][0]["state"]
        moments[1]["exp_avg"], moments[3]["exp_avg"] = moments[3]["exp_avg"], moments[1]["exp_avg"]

    d = first(resume(copy_of(recorded, tmp_path, swap), tmp_path))
    assert d["component"] == "optimizer at load" and d["name"] == "net.0.bias.exp_avg"
    assert "it holds what was recorded for net.3.bias.exp_avg; 2 of 18 tensors differ" in d["detail"]


def test_schedule_off_by_one(recorded, tmp_path):
    def shift(state):
        state["lr_schedulers"][0]["last_epoch"] += 1

    d = first(resume(copy_of(recorded, tmp_path, shift), tmp_path))
    assert (d["component"], d["name"]) == ("schedule", "scheduler0.last_epoch")
    assert (d["recorded"], d["found"]) == ("3", "4")


def test_data_position_off_by_one_sample(recorded, tmp_path):
    def shift(state):
        state["Positioned"]["samples_consumed"] += 1

    d = first(resume(copy_of(recorded, tmp_path, shift), tmp_path))
    assert (d["component"], d["recorded"], d["found"]) == ("data position", "12", "13")


def test_dropout_mask_that_differs(tmp_path):
    class OwnMask(Net):
        def __init__(self):
            super().__init__()
            self.mask = torch.Generator().manual_seed(0)

        def forward(self, x):
            return super().forward(x * (torch.rand(x.shape, generator=self.mask) > 0.3))

    checkpoint = record(tmp_path, module=OwnMask())
    d = first(resume(checkpoint, tmp_path, module=OwnMask()))
    assert d["component"] == "loss" and d["update"] == 4 and "own generator" in d["text"]


def test_scaler_dropped(tmp_path):
    def plugin():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return [MixedPrecision("16-mixed", "cpu", scaler)]

    checkpoint = record(tmp_path, plugins=plugin())
    good = resume(copy_of(checkpoint, tmp_path), tmp_path, plugins=plugin())
    assert good["verdict"] == "exact", good
    bad = copy_of(checkpoint, tmp_path, lambda state: state.pop("MixedPrecision"))
    d = first(resume(bad, tmp_path, plugins=plugin()))
    assert (d["component"], d["name"], d["recorded"], d["found"]) == ("scaler", "scale", "2048.0", "1024.0")


def test_state_of_a_callback_dropped(recorded, tmp_path):
    bad = copy_of(recorded, tmp_path, lambda state: state["callbacks"].pop("Count"))
    d = first(resume(bad, tmp_path))
    assert d["component"] == "callbacks" and d["name"].startswith("Count: batches")
    d = first(resume(copy_of(recorded, tmp_path), tmp_path, keep=(KeepRng,)))
    assert d["component"] == "callbacks" and d["name"] == "Count" and d["found"] == "absent"


def test_a_weight_changed_by_one_ulp(recorded, tmp_path):
    def nudge(state):
        w = state["state_dict"]["net.3.weight"]
        w[4, 5] = w[4, 5].nextafter(torch.tensor(10.0))

    d = first(resume(copy_of(recorded, tmp_path, nudge), tmp_path))
    assert (d["component"], d["name"]) == ("parameters at load", "net.3.weight")
    assert "norms agree to 6 digits: few bits, or the order; 1 of 6 tensors differ" in d["detail"]


def test_size_of_a_difference_comes_from_the_norms(recorded, tmp_path):
    d = first(resume(copy_of(recorded, tmp_path, lambda s: s["state_dict"]["net.4.bias"].mul_(2)), tmp_path))
    assert d["name"] == "net.4.bias" and ", 1 of it;" in d["detail"]


@pytest.mark.case("C26")
@pytest.mark.parametrize("which", ["python", "numpy", "torch"])
def test_c26_each_random_state_that_is_dropped_is_found(recorded, tmp_path, which):
    import random

    import numpy as np

    class Disturb(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}[which]()

    d = first(resume(copy_of(recorded, tmp_path), tmp_path, extra=[Disturb()]))
    assert (d["component"], d["name"]) == ("RNG", f"rank 0: {which}")


@pytest.mark.case("C26")
def test_c26_stock_lightning_restores_no_rng(tmp_path):
    torch.manual_seed(1)
    run(tmp_path, 6, callbacks=[RestartEquivalence(), saving(tmp_path)])
    torch.manual_seed(2)
    with pytest.raises(
        RestartMismatchError,
        match=r"RNG differs when the checkpoint was loaded: rank 0: torch: .*Lightning saves none",
    ):
        run(
            tmp_path,
            6,
            callbacks=[RestartEquivalence(), saving(tmp_path)],
            ckpt=tmp_path / "c" / "step=3.ckpt",
        )


@pytest.mark.case("C17")
def test_c17_stock_loader_starts_again_in_the_middle_of_an_epoch(tmp_path):
    checkpoint = record(tmp_path, loader=plain_loader())
    d = first(resume(checkpoint, tmp_path, loader=plain_loader()))
    assert d["component"] == "samples" and d["update"] == 4 and "starts the epoch again" in d["text"]


@pytest.mark.case("W07")
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_w07_momentum_restored_gives_the_same_path_and_zeroed_does_not(tmp_path, rule):
    class Bowl(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor([-3.0, 1.4], dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            return 0.5 * (self.p[0] ** 2 + 8 * self.p[1] ** 2)

        def configure_optimizers(self):
            if rule == "sgd":
                return torch.optim.SGD(self.parameters(), lr=0.08, momentum=0.85)
            return torch.optim.AdamW(self.parameters(), lr=0.08, weight_decay=0.0)

    path = []  # in plain Python, Polyak's heavy ball as torch.optim.SGD writes it
    p, v = [-3.0, 1.4], [0.0, 0.0]
    for _ in range(40):
        g = [p[0], 8 * p[1]]
        v = [0.85 * v[i] + g[i] for i in range(2)]
        p = [p[i] - 0.08 * v[i] for i in range(2)]
        path.append(p)

    loader = plain_loader(n=400)
    whole = Bowl()
    run(
        tmp_path,
        40,
        callbacks=[RestartEquivalence(updates=20), KeepRng(), saving(tmp_path, 20)],
        module=whole,
        loader=loader,
    )
    if rule == "sgd":
        assert whole.p.tolist() == pytest.approx(path[-1], rel=1e-12)
    checkpoint = tmp_path / "c" / "step=20.ckpt"
    checker = RestartEquivalence(on_mismatch="mark")
    resumed = Bowl()
    resumed_from = {"ckpt": checkpoint, "module": resumed, "loader": loader}
    run(tmp_path, 40, callbacks=[checker, KeepRng()], **resumed_from)
    assert torch.equal(resumed.p, whole.p)
    # The plain loader starts again (C17); this module reads no batch, so only `samples` may differ.
    assert {d["component"] for d in checker.report["differences"]} == {"samples"}

    def zero(trainer, module):
        for state in trainer.optimizers[0].state.values():
            for moment in state.values():
                moment.zero_()

    checker = RestartEquivalence(on_mismatch="mark")
    resumed_from["module"] = other = Bowl()
    run(tmp_path, 21, callbacks=[checker, KeepRng(), Plant(zero)], **resumed_from)
    components = [d["component"] for d in checker.report["differences"]]
    assert "optimizer at load" in components and "parameters after" in components
    assert not torch.allclose(other.p, torch.tensor(path[20], dtype=torch.float64), rtol=1e-3)


# -- runs without a fault ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "accumulation", "bf16", "clipping"])
def test_no_false_alarm_over_200_updates(tmp_path, kind):
    options = {
        "plain": {},
        "accumulation": {"accumulate_grad_batches": 2},
        "bf16": {"precision": "bf16-mixed"},
        "clipping": {"gradient_clip_val": 0.1},
    }[kind]
    checkpoint = record(tmp_path, updates=200, every=100, traced=100, **options)
    report = resume(checkpoint, tmp_path, updates=200, **options)
    assert report["verdict"] == "exact" and report["updates_compared"] == 100


@pytest.mark.slow
def test_no_false_alarm_when_compiled(tmp_path):
    checkpoint = record(
        tmp_path, module=torch.compile(Net(), backend="aot_eager"), updates=200, every=100, traced=100
    )
    report = resume(checkpoint, tmp_path, updates=200, module=torch.compile(Net(), backend="aot_eager"))
    assert report["verdict"] == "exact" and report["updates_compared"] == 100
    # and uncompiled, by the same names; an eager kernel may round differently
    uncompiled = resume(checkpoint, tmp_path, updates=102, checker=RestartEquivalence(promise="tolerance"))
    assert uncompiled["verdict"] == "tolerance"


def test_manual_optimization_with_two_optimizers(tmp_path):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.net[0].parameters(), 0.1, momentum=0.9), torch.optim.AdamW(
                self.net[3:].parameters()
            )

    torch.manual_seed(1)
    options = {"loader": plain_loader(n=400)}
    run(
        tmp_path,
        16,
        callbacks=[RestartEquivalence(), KeepRng(), saving(tmp_path, 6)],
        module=Manual(),
        **options,
    )
    checkpoint = next((tmp_path / "c").glob("step=6.ckpt"))
    trace = json.loads(re.trace_file_of(checkpoint).read_text())
    assert "optimizer1.net.3.weight.exp_avg" in trace["snapshot"]["optimizer"]
    assert len(trace["updates"][0]["gradient"]) == 6
    report = resume(checkpoint, tmp_path, module=Manual(), keep=(KeepRng,), updates=16, **options)
    assert {d["component"] for d in report["differences"]} <= {
        "samples",
        "loss",
        "gradient",
        "parameters after",
        "optimizer after",
    }
    assert first(report)["component"] == "samples"  # C17 again; what was loaded holds


def test_stock_callbacks_with_state_raise_no_alarm(tmp_path):
    def callbacks():
        stopping = EarlyStopping("loss", patience=100, check_on_train_epoch_end=True)
        return [
            RestartEquivalence(),
            KeepRng(),
            stopping,
            saving(tmp_path, monitor="loss", mode="max", save_last=True),
        ]

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    run(tmp_path, 8, callbacks=callbacks(), module=Logs())
    for name in ("step=3.ckpt", "last.ckpt"):
        used = callbacks()
        run(tmp_path, 12, callbacks=used, module=Logs(), ckpt=tmp_path / "c" / name)
        assert used[0].report["verdict"] in ("exact", "loaded") and not used[0].report["differences"]


# -- traces ------------------------------------------------------------------------------------------------------------


def test_killed_before_the_trace_was_complete(recorded, tmp_path, caplog):
    checkpoint = copy_of(recorded, tmp_path)
    re.trace_file_of(checkpoint).unlink()
    with caplog.at_level("INFO"):
        report = resume(checkpoint, tmp_path)
    assert report["verdict"] == "loaded" and report["updates_compared"] == 0
    assert (
        report["components"]["parameters at load"] == "holds"
        and report["components"]["loss"] == "not compared"
    )
    assert "What follows cannot be judged: no update after the save was recorded." in caplog.text
    # What that resume did is recorded: the next one is compared with it.
    assert resume(checkpoint, tmp_path)["origin"] == "resume"
    # And what was loaded is still compared with what was saved.
    re.trace_file_of(checkpoint).unlink()
    bad = torch.load(checkpoint, weights_only=True)
    bad["state_dict"]["net.0.bias"][0] += 1
    torch.save(bad, checkpoint)
    assert first(resume(checkpoint, tmp_path))["component"] == "parameters at load"


def test_half_a_trace_is_compared_as_far_as_it_goes(recorded, tmp_path):
    checkpoint = copy_of(recorded, tmp_path)
    file = re.trace_file_of(checkpoint)
    trace = json.loads(file.read_text())
    trace["updates"] = trace["updates"][:1]
    file.write_text(json.dumps(trace))
    report = resume(checkpoint, tmp_path)
    assert report["verdict"] == "exact" and report["updates_compared"] == 1


def test_a_trace_of_another_save_is_not_taken(recorded, tmp_path):
    checkpoint = copy_of(recorded, tmp_path)
    shutil.copy(recorded.with_name("step=6.ckpt.trace.json"), re.trace_file_of(checkpoint))
    assert resume(checkpoint, tmp_path)["verdict"] == "loaded"


def test_a_checkpoint_saved_without_it_cannot_be_judged(tmp_path):
    torch.manual_seed(1)
    run(tmp_path, 4, callbacks=[KeepRng(), saving(tmp_path)])
    checkpoint = tmp_path / "c" / "step=3.ckpt"
    with pytest.warns(UserWarning, match="cannot judge this restart: .* was saved without it"):
        report = resume(checkpoint, tmp_path)
    assert report["verdict"] == "cannot be judged"
    report = resume(checkpoint, tmp_path)  # against the first resume
    assert report["verdict"] == "exact" and report["updates_compared"] == 2


def test_a_checkpoint_that_is_written_elsewhere_and_renamed(tmp_path):
    class Renames(pl.Callback):
        """Saves as CheckpointRetention does: hidden folder, manifest, rename."""

        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 3:
                hidden, final = tmp_path / "c" / ".tmp-1", tmp_path / "c" / "step-00000003"
                trainer.save_checkpoint(hidden / "state.ckpt")
                (hidden / "manifest.json").write_text('{"schema": 1, "step": 3, "verified": null}')
                hidden.rename(final)

    torch.manual_seed(1)
    run(tmp_path, 6, callbacks=[Renames(), RestartEquivalence(), KeepRng(), Count()])
    folder = tmp_path / "c" / "step-00000003"
    assert (folder / "trace.json").is_file()
    assert resume(folder / "state.ckpt", tmp_path / "other")["verdict"] == "exact"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema"] == 1 and manifest["verified"]["promise"] == "exact"
    state = torch.load(folder / "state.ckpt", weights_only=True)
    state["state_dict"]["net.0.bias"][0] += 1
    torch.save(state, folder / "state.ckpt")
    resume(folder / "state.ckpt", tmp_path / "other")
    verified = json.loads((folder / "manifest.json").read_text())["verified"]
    assert verified["promise"] == "failed" and "parameters at load differs" in verified["first_difference"]


def test_another_runs_checkpoint_stays_as_it_is(recorded, tmp_path):
    class Saver(Checkpoint):
        """Tells where this run saves, as ModelCheckpoint and CheckpointRetention do."""

        def __init__(self, dirpath):
            self.dirpath = dirpath

    folder = tmp_path / "parent" / "step-00000003"
    folder.mkdir(parents=True)
    shutil.copy(recorded, folder / "state.ckpt")
    shutil.copy(re.trace_file_of(recorded), folder / "trace.json")
    (folder / "manifest.json").write_text('{"schema": 1, "step": 3, "verified": null}')
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for dirpath, is_own in ((None, False), (tmp_path / "child", False), (tmp_path / "parent", True)):
        torch.manual_seed(2)
        checker = RestartEquivalence(on_mismatch="mark")
        run(
            tmp_path / "child",
            6,
            callbacks=[checker, KeepRng(), Count(), Saver(dirpath)],
            ckpt=folder / "state.ckpt",
        )
        assert checker.report["verdict"] == "exact"
        assert ({p.name: p.read_bytes() for p in folder.iterdir()} != before) == is_own


def test_traces_of_pruned_checkpoints_go_with_them(tmp_path):
    checkpoint = ModelCheckpoint(
        dirpath=tmp_path / "c",
        every_n_train_steps=3,
        save_top_k=1,
        monitor="step",
        mode="max",
        filename="{step}",
    )
    run(tmp_path, 12, callbacks=[RestartEquivalence(), checkpoint])
    assert {p.name for p in (tmp_path / "c").iterdir()} <= {"step=12.ckpt", "step=9.ckpt.trace.json"}


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_save_in_the_middle_of_a_window_is_found(tmp_path, is_traced):
    class SaveMidWindow(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 3 and is_traced:  # a boundary: the window is then recorded for this one, too
                trainer.save_checkpoint(tmp_path / "early.ckpt")
            if batch_idx == 6:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    def micro_batches(name):
        trace = json.loads((tmp_path / f"{name}.ckpt.trace.json").read_text())
        return [len(u["ranks"][0]["micro_batches"]) for u in trace["updates"]]

    torch.manual_seed(1)
    options = {"accumulate_grad_batches": 4, "loader": plain_loader(n=400), "module": None}
    run(tmp_path, 4, callbacks=[RestartEquivalence(), KeepRng(), SaveMidWindow()], **options)
    assert micro_batches("mid") == [1, 4]  # what a resume from there would train
    if is_traced:
        assert micro_batches("early") == [4, 4]


# -- promises ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        ({}, "exact"),
        ({"world_size": 4}, "tolerance"),
        ({"strategy": "FSDP"}, "tolerance"),
        ({"accumulate_grad_batches": 8}, "tolerance"),
        ({"device": "NVIDIA H200"}, "tolerance"),
        ({"torch": "2.14"}, "tolerance"),
        ({"threads": 7}, "tolerance"),
        ({"precision": "bf16-mixed"}, "samples"),
        ({"model": "another"}, "samples"),
        ({"model": "another", "world_size": 4}, "samples"),
    ],
)
def test_the_promise_follows_from_the_layouts(changed, promise):
    keys = (
        "world_size",
        "strategy",
        "accumulate_grad_batches",
        "device",
        "threads",
        "torch",
        "precision",
        "model",
    )
    then = dict.fromkeys(keys, "same") | {"repeatable": True}
    derived, reasons = re.derive_promise(then, then | changed)
    assert derived == promise and len(reasons) == len(changed)


class Bigger(Positioned):
    """The same rows in batches of 8 instead of two of 4."""

    def train_dataloader(self):
        small = super().train_dataloader()

        class Pairs(torch.utils.data.IterableDataset):
            def __iter__(self):
                rows = iter(small)
                while True:
                    a, b = next(rows), next(rows)
                    yield {k: torch.cat([a[k], b[k]]) for k in a}

        return torch.utils.data.DataLoader(Pairs(), batch_size=None)

    def state_dict(self):
        return {"samples_consumed": 8 * self.trainer.global_step}


Bigger.__qualname__ = "Positioned"  # under which Lightning keeps the state


def no_dropout():
    module = Net()
    module.net[2].p = 0.0
    return module


def test_another_accumulation_is_held_to_the_tolerance(tmp_path, caplog):
    checkpoint = record(tmp_path, accumulate_grad_batches=2, module=no_dropout())
    with caplog.at_level("INFO"):
        report = resume(checkpoint, tmp_path, data=Bigger(), module=no_dropout())
    assert report["verdict"] == "tolerance", report
    assert "Promise: tolerance (accumulate_grad_batches 2 -> 1)" in caplog.text
    assert report["components"]["gradient"] == "not compared" and report["components"]["loss"] == "holds"
    scaled = no_dropout()
    step = scaled.training_step
    scaled.training_step = lambda batch, batch_idx: 1.01 * step(batch, batch_idx)
    d = first(resume(checkpoint, tmp_path, data=Bigger(), module=scaled))
    assert d["component"] == "loss" and "0.01 apart, 0.0001 is allowed" in d["detail"]


def test_losses_under_dropout_are_not_compared_on_another_layout(tmp_path):
    checkpoint = record(tmp_path, accumulate_grad_batches=2)
    report = resume(checkpoint, tmp_path, data=Bigger())
    assert report["verdict"] == "tolerance" and report["components"]["loss"] == "not compared"
    assert report["components"]["samples"] == report["components"]["parameters at load"] == "holds"
    assert "draw random numbers, which fall otherwise here" in report["why"]


def test_precision_leaves_the_samples_only(recorded, tmp_path):
    report = resume(copy_of(recorded, tmp_path), tmp_path, precision="bf16-mixed")
    assert report["verdict"] == "samples"
    assert {c for c, s in report["components"].items() if s == "holds"} == {"data position", "samples"}


def test_a_user_may_ask_for_less(recorded, tmp_path):
    checker = RestartEquivalence(promise="samples")
    report = resume(copy_of(recorded, tmp_path), tmp_path, keep=(Count,), checker=checker)
    assert report["verdict"] == "samples" and "narrowed by the promise asked for" in report["why"]


def test_kernels_that_are_not_repeatable(tmp_path, monkeypatch):
    monkeypatch.setattr(re, "kernels_repeatable", lambda device: False)

    class Noisy(Net):
        """As with atomics on a GPU: every pass rounds otherwise; here 1e-3, to be seen in the test."""

        noise = torch.Generator().manual_seed(0)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + 1e-3 * torch.rand((), generator=self.noise))

    checkpoint = record(tmp_path, module=Noisy())
    module = Noisy()
    report = resume(checkpoint, tmp_path, module=module)
    assert report["verdict"] == "exact" and 1e-4 < report["rtol"] < 2e-2
    assert "kernels are not repeatable" in report["why"]
    assert not any(n in module.__dict__ for n in ("log", "log_dict", "training_step"))
    drop = Plant(lambda trainer, module: trainer.optimizers[0].state.clear())
    assert (
        first(resume(checkpoint, tmp_path, module=Noisy(), extra=[drop]))["component"] == "optimizer at load"
    )


# -- what it logs, costs and leaves behind -----------------------------------------------------------------------------


class Keep(pl.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows += [(step, k, v) for k, v in metrics.items() if k.startswith("restart/")]


def test_metrics(recorded, tmp_path):
    logger = Keep()
    resume(copy_of(recorded, tmp_path), tmp_path, logger=logger)
    assert [(s, v) for s, k, v in logger.rows if k == "restart/verified_updates"] == [(4, 1.0), (5, 2.0)]
    assert {v for _, k, v in logger.rows if k == "restart/mismatches"} == {0.0}


def test_counts_are_kept_across_restarts(tmp_path):
    record(tmp_path)
    run(
        tmp_path,
        10,
        callbacks=[RestartEquivalence(), KeepRng(), Count(), saving(tmp_path)],
        ckpt=tmp_path / "c" / "step=3.ckpt",
    )
    checker = RestartEquivalence()
    report = resume(tmp_path / "c" / "step=9.ckpt", tmp_path, checker=checker, updates=12)
    assert report["updates_compared"] == 1 and checker.verified_updates == 3


@pytest.mark.parametrize("mode", ["raise", "warn", "mark"])
def test_on_mismatch(recorded, tmp_path, mode):
    bad = copy_of(recorded, tmp_path, lambda s: s["state_dict"]["net.4.bias"].mul_(2))
    checker = RestartEquivalence(on_mismatch=mode)
    if mode == "raise":
        with pytest.raises(
            RestartMismatchError, match=r"parameters at load differs .* net.4.bias: recorded .* Usual cause: "
        ):
            resume(bad, tmp_path, checker=checker)
    elif mode == "warn":
        with pytest.warns(UserWarning, match="parameters at load differs"):
            resume(bad, tmp_path, checker=checker)
    else:
        resume(bad, tmp_path, checker=checker)
    assert checker.mismatches == 1
    assert json.loads(re.trace_file_of(bad).read_text())["verified"]["promise"] == "failed"


def test_a_mismatch_stops_before_the_next_save(recorded, tmp_path):
    bad = copy_of(recorded, tmp_path, lambda s: s["state_dict"]["net.4.bias"].mul_(2))
    with pytest.raises(RestartMismatchError):
        run(
            tmp_path,
            6,
            callbacks=[RestartEquivalence(), KeepRng(), Count(), saving(tmp_path, every=1)],
            ckpt=bad,
        )
    assert not list((tmp_path / "c").glob("*.ckpt"))


def test_nothing_happens_between_traces(tmp_path, monkeypatch):
    calls = []
    measure_all = re.measure_all
    monkeypatch.setattr(re, "measure_all", lambda leaves: calls.append(1) or measure_all(leaves))
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            hooks = trainer.optimizers[0]._optimizer_step_post_hooks
            seen.append(("training_step" in module.__dict__, bool(hooks)))

    run(tmp_path, 12, callbacks=[RestartEquivalence(), Look(), saving(tmp_path, every=6)])
    assert [i for i, (wrapped, hooked) in enumerate(seen) if wrapped or hooked] == [6, 7]
    assert len(calls) == 2 * 2 + 2 * 3  # two saves; two updates with gradient, parameters and optimizer


def test_what_another_callback_logs_is_recorded_wherever_it_stands(tmp_path):
    class Weighs(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            trainer.callback_metrics["train/loss"] = torch.tensor(float(trainer.global_step))

    for order in ([Weighs(), RestartEquivalence()], [RestartEquivalence(), Weighs()]):
        run(tmp_path, 6, callbacks=[*order, saving(tmp_path)])
        file = max((tmp_path / "c").glob("step=3*.trace.json"), key=lambda p: p.stat().st_mtime)
        trace = json.loads(file.read_text())
        assert [float.fromhex(u["bus"]["train/loss"]) for u in trace["updates"]] == [4.0, 5.0]


def test_it_leaves_module_and_trainer_as_they_were(recorded, tmp_path):
    module, checker = Net(), RestartEquivalence()
    trainer = run(
        tmp_path, 5, callbacks=[checker, KeepRng(), Count()], ckpt=copy_of(recorded, tmp_path), module=module
    )
    assert "training_step" not in module.__dict__ and "save_checkpoint" not in trainer.__dict__
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_results_are_the_same_with_and_without_it(tmp_path):
    weights = []
    for checker in ([], [RestartEquivalence()]):
        torch.manual_seed(5)
        module = Net()
        run(tmp_path, 8, callbacks=[*checker, saving(tmp_path)], module=module)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    "wrong", [{"promise": "bitwise"}, {"on_mismatch": "stop"}, {"updates": 0}, {"rtol": -1.0}]
)
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        RestartEquivalence(**wrong)


def test_rows_of_any_batch_are_told_apart():
    a, b = torch.arange(6.0).view(3, 2), torch.arange(3)
    ids = re.sample_ids((a, b))
    assert len(set(ids)) == 3
    assert re.sample_ids((a.flip(0), b.flip(0))) == ids[::-1]
    assert (
        re.sample_ids({"y": b, "x": [a]}) == ids != re.sample_ids({"x": b, "y": a})
    )  # keys in order, nested
    assert re.sample_ids({"sample_ids": b + 7, "x": a}) == [7, 8, 9]
    assert len(re.sample_ids((a, torch.tensor(1.0)))) == 1
    assert re.sample_ids("text") == re.sample_ids("text") != re.sample_ids("test")
