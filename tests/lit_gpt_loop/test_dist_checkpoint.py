"""Any layout saves, any other loads: weights, moments and steps bit for bit, by parameter name."""

import os
import pickle
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from lit_gpt_loop.checkpoint_files import (
    SafeReader,
    UnsafeCheckpointError,
    clean_name,
    open_checkpoint,
    read_weights,
    to_lightning_ckpt,
)
from lit_gpt_loop.strategies import DDP, FSDP, FSDP2, OneDevice, shard_fsdp2

VOCABULARY, WIDTH = 257, 34  # uneven over 2 and over 4 ranks
LAYOUTS = {"one": OneDevice, "ddp": DDP, "fsdp": FSDP, "fsdp2": FSDP2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, y):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Lit(pl.LightningModule):
    def __init__(self, compiled=False, recompute=False, optimizer="adamw"):
        super().__init__()
        torch.manual_seed(5)
        self.net, self.kind, self.state = Net(), optimizer, {}
        if recompute:
            self.net.blocks[0] = checkpoint_wrapper(self.net.blocks[0])
        if compiled:  # what torch.compile returns; nothing is compiled before the first call
            self.net.blocks[1] = torch.compile(self.net.blocks[1], backend="eager")
        self.losses = []

    def configure_model(self):
        if isinstance(self.trainer.strategy, FSDP2):
            blocks = list(self.net.blocks)
            for b in blocks:
                shard_fsdp2(b, self.device_mesh["data_parallel"], block_types=["Linear"])
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, i):
        loss = self.net(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        if isinstance(self.trainer.strategy, FSDP):
            others = [p for n, p in self.named_parameters() if n.endswith("bias") or "norm" in n]
            ids = {id(p) for p in others}
            decayed = [p for p in self.parameters() if id(p) not in ids]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 3e-3},
        ]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=1e-2)
        return torch.optim.AdamW(groups, lr=1e-2)


class Watch(pl.Callback):
    """Takes the state, whole, as loaded and at the end: of FSDP2 by `full_tensor`, of FSDP1 by summoning."""

    def __init__(self):
        self.start, self.end, self.groups = None, None, None

    def take(self, trainer, module):
        self.groups = [
            {k: v for k, v in g.items() if k != "params"} for g in trainer.optimizers[0].param_groups
        ]

        def whole(t):
            return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone()

        out = {}
        if isinstance(trainer.strategy, FSDP):
            with FullyShardedDataParallel.summon_full_params(trainer.strategy.model, writeback=False):
                return {f"w/{clean_name(n)}": p.detach().clone() for n, p in module.named_parameters()}
        for n, p in module.named_parameters():
            out[f"w/{clean_name(n)}"] = whole(p)
            for k, v in trainer.optimizers[0].state.get(p, {}).items():
                out[f"m/{clean_name(n)}/{k}"] = whole(v) if isinstance(v, torch.Tensor) else v
        return out

    def on_train_start(self, trainer, module):
        self.start = self.take(trainer, module)

    def on_train_end(self, trainer, module):
        self.end = self.take(trainer, module)


def run(layout, num_steps, save_to=None, load_from=None, **kwargs):
    """Fit on the same 8 rows per update and rank whatever the layout; returns what the tests compare."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (8, 2, 7), generator=generator).repeat(
        8, 1, 1
    )  # every batch is the same
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if layout != "one" else 1
    module, watch = Lit(**kwargs), Watch()
    data = DataLoader([(r[0], r[1]) for r in rows], batch_size=8)
    trainer = pl.Trainer(
        strategy=LAYOUTS[layout](), accelerator="cpu", devices=world_size, max_steps=num_steps, callbacks=[watch],
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=load_from)
    if watch.start is None:  # nothing was left to train
        watch.start = watch.end = watch.take(trainer, module)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "start": watch.start, "end": watch.end, "losses": module.losses, "groups": watch.groups,
        "step": trainer.global_step,
    }  # fmt: skip


def run_many(jobs):
    """Several runs in one job of the staying ranks."""
    return [run(*args, **kwargs) for args, kwargs in jobs]


def same(a, b, keys=None):
    keys = set(a) & set(b) if keys is None else keys
    assert keys, "nothing in common"
    for k in keys:
        assert torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])), k


def through_dcp(folder: Path, out: Path) -> dict:
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=True)


@pytest.mark.case("C40")
@pytest.mark.slow
def test_c40_any_layout_loads_what_any_other_saved(ranks2, ranks4, tmp_path):
    one = run("one", 2, save_to=tmp_path / "one")
    assert {k.split("/")[0] for k in one["end"]} == {"w", "m"}
    # The file holds what the optimizer holds: read by torch's own converter.
    stored = through_dcp(tmp_path / "one", tmp_path / "plain.pt")
    for k, v in one["end"].items():
        kind, rest = k.split("/", 1)
        assert torch.equal(stored[f"model/{rest}" if kind == "w" else f"optimizer/{rest}"], v), k
    assert torch.equal(stored["model/net.head.weight"], stored["model/net.embed.weight"])

    def pairs(source, name):
        return [((layout, 2), {"load_from": tmp_path / source, "save_to": tmp_path / f"{source}-{name}-{layout}"})
                for layout in ("ddp", "fsdp", "fsdp2")]  # fmt: skip

    for ranks, name in ((ranks2, "2"), (ranks4, "4")):
        for rank, reports in enumerate(ranks.run(run_many, pairs("one", name))):
            for layout, report in zip(("ddp", "fsdp", "fsdp2"), reports, strict=True):
                assert report["step"] == 2 and report["losses"] == [], (layout, rank)
        for layout in ("ddp", "fsdp", "fsdp2"):
            again = through_dcp(tmp_path / f"one-{name}-{layout}", tmp_path / "again.pt")
            assert set(again) == set(stored), layout
            same(again, stored)
            back = run("one", 2, load_from=tmp_path / f"one-{name}-{layout}")
            assert back["step"] == 2


@pytest.mark.case("C40")
@pytest.mark.slow
def test_c40_what_ranks_trained_continues_elsewhere(ranks2, ranks4, tmp_path):
    jobs = [((layout, 2), {"save_to": tmp_path / f"{layout}-2"}) for layout in ("ddp", "fsdp", "fsdp2")]
    trained = dict(zip(("ddp", "fsdp", "fsdp2"), ranks2.run(run_many, jobs)[0], strict=True))
    on = [((layout, 3), {}) for layout in ("ddp", "fsdp", "fsdp2")]
    reference = dict(zip(("ddp", "fsdp", "fsdp2"), ranks2.run(run_many, on)[0], strict=True))
    for source in ("ddp", "fsdp", "fsdp2"):
        report = run("one", 3, load_from=tmp_path / f"{source}-2")
        same(report["start"], trained[source]["end"], set(trained[source]["end"]))
        assert [g["weight_decay"] for g in report["groups"]] == [0.1, 0.0]
        assert [g["lr"] for g in report["groups"]] == [1e-2, 3e-3]
        assert report["step"] == 3
        for k, v in reference[source]["end"].items():  # the next update, moments of FSDP1 through it
            torch.testing.assert_close(report["end"][k], v, rtol=1e-5, atol=1e-6)
    # 2 -> 4 ranks and across kinds: from FSDP to FSDP2 and back.
    jobs = [(("fsdp2", 2), {"load_from": tmp_path / "fsdp-2"}), (("ddp", 2), {"load_from": tmp_path / "fsdp2-2"}),
            (("fsdp", 2), {"load_from": tmp_path / "fsdp2-2"})]  # fmt: skip
    for ranks in (ranks2, ranks4):
        to_fsdp2, to_ddp, to_fsdp = ranks.run(run_many, jobs)[0]
        one = run("one", 2, load_from=tmp_path / "fsdp-2")
        same(to_fsdp2["start"], one["end"], set(one["end"]))
        same(to_ddp["start"], trained["fsdp2"]["end"], set(trained["fsdp2"]["end"]))
        same(to_fsdp["start"], trained["fsdp2"]["end"])


@pytest.mark.case("C52")
def test_c52_compiled_and_recomputing_models_exchange_checkpoints(ranks2, tmp_path):
    plain = run("one", 2, save_to=tmp_path / "plain")
    changed = run(
        "one", 2, load_from=tmp_path / "plain", compiled=True, recompute=True, save_to=tmp_path / "changed"
    )
    same(changed["start"], plain["end"], set(plain["end"]))
    assert not any(
        "_orig_mod" in k or "wrapped" in k for k in through_dcp(tmp_path / "changed", tmp_path / "x.pt")
    )
    back = run("one", 2, load_from=tmp_path / "changed")
    same(back["start"], plain["end"], set(plain["end"]))
    jobs = [((layout, 2), {"load_from": tmp_path / "plain", "compiled": True, "recompute": True,
                           "save_to": tmp_path / f"c-{layout}"}) for layout in ("ddp", "fsdp2")]  # fmt: skip
    for layout, report in zip(("ddp", "fsdp2"), ranks2.run(run_many, jobs)[0], strict=True):
        same(report["start"], plain["end"], set(plain["end"]))
        same(
            through_dcp(tmp_path / f"c-{layout}", tmp_path / "y.pt"),
            through_dcp(tmp_path / "plain", tmp_path / "z.pt"),
        )


def test_plain_lightning_ckpt_both_ways(ranks2, tmp_path):
    # Written by stock Lightning with its stock strategy.
    module, watch = Lit(), Watch()
    rows = torch.randint(0, VOCABULARY, (64, 2, 7))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, callbacks=[watch], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, strategy=pl.strategies.SingleDeviceStrategy("cpu"),
    )  # fmt: skip
    trainer.fit(module, DataLoader([(r[0], r[1]) for r in rows], batch_size=8))
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    report = run("one", 2, load_from=tmp_path / "stock.ckpt", save_to=tmp_path / "ours")
    same(report["start"], watch.end, set(watch.end))
    jobs = [((layout, 2), {"load_from": tmp_path / "stock.ckpt", "save_to": tmp_path / f"s-{layout}"})
            for layout in ("ddp", "fsdp", "fsdp2")]  # fmt: skip
    ranks2.run(run_many, jobs)
    ours = through_dcp(tmp_path / "ours", tmp_path / "a.pt")
    for layout in ("ddp", "fsdp", "fsdp2"):
        same(through_dcp(tmp_path / f"s-{layout}", tmp_path / "b.pt"), ours, set(ours))
    # And back: stock Lightning goes on from what we write.
    to_lightning_ckpt(tmp_path / "s-fsdp2", tmp_path / "back.ckpt")
    module, watch_back = Lit(), Watch()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, callbacks=[watch_back], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, strategy=pl.strategies.SingleDeviceStrategy("cpu"),
    )  # fmt: skip
    trainer.fit(
        module, DataLoader([(r[0], r[1]) for r in rows], batch_size=8), ckpt_path=tmp_path / "back.ckpt"
    )
    assert trainer.global_step == 2
    same(watch_back.take(trainer, module), watch.end, set(watch.end))
    weights = read_weights(tmp_path / "s-fsdp")
    assert set(weights) == set(module.state_dict())
    same(weights, module.state_dict())


def test_optimizer_without_state_and_one_that_never_stepped(ranks2, tmp_path):
    jobs = [
        ((layout, 2), {"optimizer": "sgd", "save_to": tmp_path / f"sgd-{layout}"})
        for layout in ("ddp", "fsdp", "fsdp2")
    ]
    jobs += [
        ((layout, 2), {"optimizer": "sgd", "load_from": tmp_path / "sgd-ddp"}) for layout in ("fsdp", "fsdp2")
    ]
    reports = ranks2.run(run_many, jobs)[0]
    same(reports[3]["start"], reports[0]["end"])
    same(reports[4]["start"], reports[0]["end"])
    one = run("one", 2, optimizer="sgd", load_from=tmp_path / "sgd-fsdp2")
    same(one["start"], reports[2]["end"])


class Wide(Lit):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(2, 2)


def test_errors_name_the_remedy(tmp_path, monkeypatch):
    run("one", 1, save_to=tmp_path / "ours")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="no checkpoint of these strategies"):
        open_checkpoint(tmp_path / "other")
    monkeypatch.setitem(globals(), "Lit", Wide)
    with pytest.raises(ValueError, match=r"knows no \['extra"):
        run("one", 1, load_from=tmp_path / "ours")


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_pickles_are_refused_and_not_run(tmp_path):
    run("one", 1, save_to=tmp_path / "ours")
    evil = tmp_path / "ran"
    metadata = tmp_path / "ours" / ".metadata"
    kept = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Payload(evil)))
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata is refused: .*posix.system|nt.system"):
        SafeReader(tmp_path / "ours").read_metadata()
    for name in (
        "torch.distributed.checkpoint.metadata\nos.system",
        "torch.distributed.checkpoint.filesystem\nos",
    ):
        metadata.write_bytes(b"c" + name.encode() + b"\n.")
        with pytest.raises(UnsafeCheckpointError):
            SafeReader(tmp_path / "ours").read_metadata()
    metadata.write_bytes(kept)
    torch.save({"x": Payload(evil)}, tmp_path / "ours" / "rest.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        open_checkpoint(tmp_path / "ours")
    torch.save({"state_dict": Payload(evil)}, tmp_path / "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run("one", 1, load_from=tmp_path / "evil.ckpt")
    assert not evil.exists()


def test_state_that_would_need_code_is_refused_at_save(tmp_path):
    class Odd(pl.Callback):
        def state_dict(self):
            return {"path": Path("x")}

    trainer = pl.Trainer(
        strategy=OneDevice(), accelerator="cpu", devices=1, max_steps=1, callbacks=[Odd()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    rows = torch.randint(0, VOCABULARY, (8, 2, 7))
    trainer.fit(Lit(), DataLoader([(r[0], r[1]) for r in rows], batch_size=8))
    with pytest.raises(TypeError, match=r"pathlib.*add_safe_globals"):
        trainer.save_checkpoint(tmp_path / "odd")


def test_several_files_at_a_time_hold_the_same_and_no_error_is_lost(tmp_path, monkeypatch):
    import errno
    import hashlib

    import lit_gpt_loop.checkpoint_files as module

    monkeypatch.setattr(module, "_BYTES_PER_FILE", 1 << 18)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    tensors = {f"model/{i}": torch.randn(200 + i, 300) for i in range(9)}
    staged = module.stage(tensors, {"x": 1})
    part = staged.write(tmp_path / "a")
    files = {**part["files"], **staged.finish(tmp_path / "a", [part])}
    assert len(part["files"]) == 4
    for name, record in files.items():
        content = (tmp_path / "a" / name).read_bytes()
        assert record == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    same(through_dcp(tmp_path / "a", tmp_path / "a.pt"), tensors, set(tensors))

    write = os.write

    def full(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("__0_2.distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        module.stage(tensors, {"x": 1}).write(tmp_path / "b")
