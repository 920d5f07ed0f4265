"""RestartEquivalence on two ranks: digests do not depend on the layout, restarts hold, a rank's lost RNG is found."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from callbacks import restart_equivalence as re
from callbacks.restart_equivalence import RestartEquivalence
from tests.callbacks.restart_modules import KeepRng, Net, run


def _strategy(kind):
    from lit_gpt_loop.strategies import DDP, FSDP, FSDP2

    ours = {"ddp": DDP, "fsdp": FSDP, "fsdp2": FSDP2}
    return (
        ours[kind]()
        if kind in ours
        else {"stock ddp": "ddp", "stock fsdp2": ModelParallelStrategy(2, 1)}[kind]
    )


class Uneven(Net):
    """Shapes that two ranks cannot halve; no dropout, so that every layout computes the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 9), nn.Linear(9, 1))

    def configure_model(self):
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Dropping(Uneven):
    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.25))


def _gathered():
    g = [None] * dist.get_world_size()
    return g


def _digests_of_dtensors():
    """Whole and sharded in every way: one digest."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    found = {}
    for shape in ((7, 5), (1, 3), (8, 6, 5), (5000, 3)):
        x = torch.randn(shape)
        for placement in [Replicate(), *(Shard(d) for d in range(len(shape)))]:
            t = distribute_tensor(x.clone(), mesh, [placement])
            parts = re.measure_all([("t", t, None)])
            gathered = _gathered()
            dist.all_gather_object(gathered, parts)
            tree = re.merge(gathered)
            found[f"{shape} {placement}"] = (
                tree["t"][0] == re.tensor_digest(x),
                tree["t"][1],
                float(x.norm()),
            )
    mesh2 = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    x = torch.randn(9, 4)
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(1)]):
        t = distribute_tensor(x.clone(), mesh2, placements)
        gathered = _gathered()
        dist.all_gather_object(gathered, re.measure_all([("t", t, None)]))
        tree = re.merge(gathered)
        found[f"2-D {placements}"] = (tree["t"][0] == re.tensor_digest(x), tree["t"][1], float(x.norm()))
    slice_of_mesh = distribute_tensor(x.clone(), mesh2["shards"], [Shard(0)])  # each rank holds a whole
    gathered = _gathered()
    dist.all_gather_object(gathered, re.measure_all([("t", slice_of_mesh, None)]))
    tree = re.merge(gathered)
    found["slice of a mesh"] = (tree["t"][0] == re.tensor_digest(x), tree["t"][1], float(x.norm()))
    return found


def test_sharded_tensors_have_the_digest_of_the_whole(ranks2):
    for found in ranks2.run(_digests_of_dtensors):
        for name, (same, norm, whole) in found.items():
            assert same, name
            assert norm == pytest.approx(whole, rel=1e-5), name


def _fit(root, kind, updates=6, module=Uneven, ckpt=None, drop_rank=None, traced=2, save=3, seed=1, **kwargs):
    """Fit with a save; return what RestartEquivalence found and the digests at the save."""
    from lightning.pytorch.callbacks import Callback

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == save and ckpt is None and not getattr(self, "is_done", False):
                self.is_done = True
                trainer.save_checkpoint(Path(root) / "saved.ckpt")

    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    checker = RestartEquivalence(updates=traced, on_mismatch="mark")
    options = {"devices": 2, "strategy": _strategy(kind)} if kind != "one" else {}
    m = module()
    trainer = run(
        root,
        updates,
        callbacks=[checker, KeepRng(drop_rank), Save()],
        ckpt=ckpt,
        module=m,
        **(options | kwargs),
    )
    return {"report": checker.report, "rank": trainer.global_rank}


def _check_restart(ranks2, tmp_path, kind, **options):
    ranks2.run(_fit, str(tmp_path), kind, module=Dropping, **options)
    ckpt = str(tmp_path / "saved.ckpt")
    for r in ranks2.run(_fit, str(tmp_path), kind, ckpt=ckpt, seed=7, module=Dropping, **options):
        assert r["report"]["verdict"] == "exact", r["report"]
        assert r["report"]["updates_compared"] == options["traced"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2", "stock ddp", "stock fsdp2"])
def test_an_exact_restart_on_two_ranks_and_one_ranks_lost_rng(ranks2, tmp_path, kind):
    _check_restart(ranks2, tmp_path, kind, updates=6, traced=2, save=3)
    trace = json.loads((tmp_path / "saved.ckpt.trace.json").read_text())
    assert len(trace["updates"][0]["ranks"]) == 2
    lost = ranks2.run(
        _fit, str(tmp_path), kind, ckpt=str(tmp_path / "saved.ckpt"), drop_rank=1, seed=7, module=Dropping
    )
    d = lost[0]["report"]["differences"][0]
    assert d == lost[1]["report"]["differences"][0]
    assert (d["component"], d["name"]) == ("RNG", "rank 1: torch")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_no_false_alarm_over_200_updates_on_two_ranks(ranks2, tmp_path, kind):
    _check_restart(ranks2, tmp_path, kind, updates=200, traced=100, save=100)


def test_the_same_state_has_the_same_digests_under_every_layout(ranks2, tmp_path):
    trees = {}
    for kind in ("ddp", "fsdp", "fsdp2"):
        (tmp_path / kind).mkdir()
        ranks2.run(_fit, str(tmp_path / kind), kind)
        trees[kind] = json.loads((tmp_path / kind / "saved.ckpt.trace.json").read_text())
    first = trees["ddp"]
    names = set(first["snapshot"]["parameters"])
    assert names == {f"net.{i}.{w}" for i in (0, 2, 3) for w in ("weight", "bias")}
    for kind in ("fsdp", "fsdp2"):
        other = trees[kind]
        assert set(other["snapshot"]["parameters"]) == names
        assert set(other["snapshot"]["optimizer"]) == set(first["snapshot"]["optimizer"])
        assert set(other["updates"][0]["gradient"]) == names
        assert other["snapshot"]["layout"]["model"] == first["snapshot"]["layout"]["model"]
        # Two ranks add two numbers in one way only, so these layouts agree bitwise here.
        for tree in ("parameters", "optimizer"):
            assert {n: d for n, (d, _) in other["snapshot"][tree].items()} == {
                n: d for n, (d, _) in first["snapshot"][tree].items()
            }, (kind, tree)
        for recorded, found in zip(first["updates"], other["updates"], strict=True):
            differences = re.compare_update(recorded, found, "exact", 0.0)
            assert not [d for d in differences if not d.name.startswith("replica")], (
                kind
            )  # shards are no replicas


def test_fsdp1_still_says_which_part_of_a_parameter_a_rank_holds(ranks2, tmp_path):
    """Private attributes of FSDP1: this fails when torch changes them."""
    whole = ranks2.run(_fsdp1_digests)
    for same in whole:
        assert same and all(same.values()), same


def test_fsdp1_without_original_parameters_is_refused(ranks2):
    for message in ranks2.run(_fsdp1_flat):
        assert "use_orig_params=True" in message


def _fsdp1_flat():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    wrapped = FSDP(nn.Linear(5, 7), device_id=torch.device("cpu"), use_orig_params=False)
    try:
        list(re.model_leaves(wrapped))
    except RuntimeError as e:
        return str(e)
    return "nothing raised"


def _fsdp1_digests():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 11, bias=False))
    expected = {n: re.tensor_digest(p) for n, p in plain.named_parameters()}
    plain[1] = FSDP(plain[1], device_id=torch.device("cpu"), use_orig_params=True)
    wrapped = FSDP(plain, device_id=torch.device("cpu"), use_orig_params=True)
    gathered = _gathered()
    dist.all_gather_object(gathered, re.measure_all(re.model_leaves(wrapped)))
    tree = re.merge(gathered)
    return {n: tree[n][0] == d for n, d in expected.items()} | {"names": set(tree) == set(expected)}


def test_another_layout_is_held_to_the_tolerance(ranks2, tmp_path):
    """Saved by DDP-2, resumed by FSDP-2 and FSDP2-2: what is loaded is still compared bit for bit."""
    ranks2.run(_fit, str(tmp_path), "ddp")
    for kind in ("fsdp", "fsdp2"):
        reports = [
            r["report"] for r in ranks2.run(_fit, str(tmp_path), kind, ckpt=str(tmp_path / "saved.ckpt"))
        ]
        assert all(r["verdict"] == "tolerance" and "strategy DDP -> " in r["why"] for r in reports), reports
        assert reports[0]["components"]["parameters at load"] == "holds"
        assert reports[0]["components"]["optimizer at load"] == "holds"
