"""LoopAudit on several ranks: faults that only ranks can have, and runs of 200 updates without a false alarm."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from callbacks.grad_norm import GradNormMonitor
from callbacks.loop_audit import LoopAudit
from callbacks.token_weighted_loss import TokenWeightedLoss
from tests.callbacks.test_loop_audit import SaveAt, Scheduled, Tiny, rows, trainer_for, val_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.*"),
]


class Clean(Scheduled):
    """Adam with moments, a schedule, groups by hand, evaluation."""

    def configure_optimizers(self) -> Any:
        names = {
            id(p): n for n, p in self.named_parameters()
        }  # FSDP1's pieces have one dimension: go by name
        decayed = [
            p for p in self.parameters() if names[id(p)].endswith("weight") and "norm" not in names[id(p)]
        ]
        rest = [p for p in self.parameters() if all(p is not q for q in decayed)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sharded(Clean):
    def configure_model(self) -> None:
        from lit_gpt_loop.strategies import shard_fsdp2

        if not isinstance(self.head.weight, torch.distributed.tensor.DTensor):
            shard_fsdp2(self, self.device_mesh)


class Deals(torch.utils.data.Sampler):
    """Deals the rows out to the ranks in turn, another order in each epoch."""

    def __init__(self, num: int, rank: int, num_ranks: int) -> None:
        self.num, self.rank, self.num_ranks, self.epoch = num, rank, num_ranks, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.num, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.rank :: self.num_ranks])

    def __len__(self) -> int:
        return self.num // self.num_ranks


def strategy_of(kind: str) -> Any:
    from lit_gpt_loop import strategies

    if kind == "stock-fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return {"ddp": strategies.DDP, "fsdp": strategies.FSDP, "fsdp2": strategies.FSDP2}.get(
        kind, lambda: kind
    )()


def clean_job(
    kind: str, root: str, updates: int, accumulate: int, ours: bool, stock_sampler: bool = False
) -> list[str]:
    """Run a faultless loop on this rank and return what the audit says of it."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    callback = LoopAudit(on_violation="mark")
    others: list[pl.Callback] = [TokenWeightedLoss(), GradNormMonitor(clip_norm=0.5)] if ours else []
    module = (Sharded if "fsdp2" in kind else Clean)()
    num = 64
    if stock_sampler:
        loader = DataLoader(
            rows(num - 1), batch_size=2, shuffle=True
        )  # does not divide: the stock sampler pads by one row
    else:
        loader = DataLoader(rows(num), batch_size=2, sampler=Deals(num, rank, num_ranks))
    trainer = trainer_for(
        root,
        [callback, *others],
        strategy=strategy_of(kind),
        devices=2,
        max_epochs=-1,
        max_steps=updates,
        accumulate_grad_batches=accumulate,
        val_check_interval=8,
        limit_val_batches=2,
        use_distributed_sampler=stock_sampler,
        gradient_clip_val=0.5 if not ours and "fsdp" not in kind else None,
    )
    trainer.fit(module, loader, val_loader())
    assert trainer.global_step == updates
    return [str(v) for v in callback.violations]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_a_few_clean_updates_on_two_ranks(ranks2, tmp_path, kind):
    assert ranks2.run(clean_job, kind, str(tmp_path), 12, 2, ours=True) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "accumulate", "ours", "stock_sampler"),
    [
        ("ddp", 1, True, False),
        ("ddp", 2, True, False),
        ("ddp_find_unused_parameters_false", 1, False, True),
        ("fsdp", 2, True, False),
        ("fsdp2", 2, True, False),
        ("stock-fsdp2", 1, False, False),
    ],
)
def test_two_hundred_clean_updates_on_two_ranks(ranks2, tmp_path, kind, accumulate, ours, stock_sampler):
    assert ranks2.run(clean_job, kind, str(tmp_path), 200, accumulate, ours, stock_sampler) == [[], []]


@pytest.mark.parametrize("updates", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("accumulate", "precision", "is_compiled", "ours"),
    [
        (1, "32-true", False, False),
        (2, "32-true", False, True),
        (2, "bf16-mixed", False, True),
        (1, "32-true", True, True),
    ],
)
def test_clean_updates_on_one_process(tmp_path, updates, accumulate, precision, is_compiled, ours):
    callback = LoopAudit()  # raises
    module = Clean()
    if is_compiled:
        module.compile(backend="aot_eager")
    others: list[pl.Callback] = [TokenWeightedLoss(), GradNormMonitor(clip_norm=0.5)] if ours else []
    trainer = trainer_for(
        tmp_path,
        [callback, *others],
        max_epochs=-1,
        max_steps=updates,
        accumulate_grad_batches=accumulate,
        precision=precision,
        val_check_interval=8,
        gradient_clip_val=None if ours else 0.5,
    )
    trainer.fit(module, DataLoader(rows(64), batch_size=2, shuffle=True), val_loader())
    assert trainer.global_step == updates
    assert callback.violations == []


# ---- faults of ranks ----


def same_data_job(root: str) -> list[str]:
    callback = LoopAudit(on_violation="mark")
    trainer = trainer_for(
        root, [callback], strategy=strategy_of("ddp"), devices=2, use_distributed_sampler=False
    )
    trainer.fit(Tiny(), DataLoader(rows(8)))
    return sorted({v.check for v in callback.violations})


def test_ranks_that_see_the_same_samples(ranks2, tmp_path):
    assert ranks2.run(same_data_job, str(tmp_path)) == [["ranks_differ"]] * 2


class Diverges(Tiny):
    """Rank 1 changes one weight by one unit in the last place in update 4, after the optimizer's step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.trainer.global_step == 3 and self.global_rank == 1:
            w = self.head.weight.data
            w[0, 0] = torch.nextafter(w[0, 0], torch.tensor(9.0))


def diverging_job(root: str, on_violation: str) -> Any:
    callback = LoopAudit(on_violation=on_violation, checks=["replicas_identical", "finite"])
    trainer = trainer_for(
        root, [callback], strategy=strategy_of("ddp"), devices=2, use_distributed_sampler=False
    )
    try:
        trainer.fit(Diverges(), DataLoader(rows(8)))
    except RuntimeError as e:
        return str(e)
    return [(v.check, v.update, v.found, v.rank) for v in callback.violations][:2]


def test_replicas_that_differ_by_one_ulp(ranks2, tmp_path):
    first, second = ranks2.run(diverging_job, str(tmp_path), "mark")
    assert first == second  # what one rank finds, all know
    assert first == [("replicas_identical", 4, "they differ in head.weight", rank) for rank in (0, 1)]
    first, second = ranks2.run(diverging_job, str(tmp_path), "raise")
    assert "replicas_identical does not hold at update 4" in first
    assert first == second


class FaultOnRankOne(Tiny):
    def on_validation_start(self) -> None:
        if self.global_rank == 1:
            torch.rand(1)


def fault_on_one_rank_job(root: str) -> str:
    trainer = trainer_for(
        root,
        [LoopAudit()],
        strategy=strategy_of("ddp"),
        devices=2,
        use_distributed_sampler=True,
        val_check_interval=2,
    )
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(FaultOnRankOne(), DataLoader(rows(8)), val_loader())
    return str(caught.value)


def test_a_fault_on_one_rank_stops_all(ranks2, tmp_path):
    first, second = ranks2.run(fault_on_one_rank_job, str(tmp_path))
    assert first == second
    assert "evaluation_changes_nothing" in first
    assert "(rank 1)" in first


class ClipsShards(Sharded):
    """Clips what this rank holds by the norm of what this rank holds."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.to_local() for p in self.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_(min(1.0, 0.05 / float(norm)))


def clips_shards_job(root: str) -> list[str]:
    callback = LoopAudit(on_violation="mark", clip_norm=0.05, checks=["clipping_global"])
    trainer = trainer_for(root, [callback], strategy=strategy_of("fsdp2"), devices=2)
    trainer.fit(ClipsShards(), DataLoader(rows(8)))
    return [v.found for v in callback.violations]


def test_clipping_per_shard(ranks2, tmp_path):
    first, second = ranks2.run(clips_shards_job, str(tmp_path))
    assert first
    assert first == second


def short_window_job(kind: str, root: str, ours: bool) -> list[str]:
    callback = LoopAudit(on_violation="mark")
    others: list[pl.Callback] = [TokenWeightedLoss()] if ours else []
    rank = torch.distributed.get_rank()
    trainer = trainer_for(
        root,
        [callback, *others],
        strategy=strategy_of(kind),
        devices=2,
        accumulate_grad_batches=4,
        use_distributed_sampler=False,
    )
    module = Sharded() if kind == "fsdp2" else Clean()
    trainer.fit(module, DataLoader(rows(12), sampler=Deals(12, rank, 2)))
    return [(v.check, v.found) for v in callback.violations if v.rank == rank]


@pytest.mark.case("C04")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_c04_short_window_on_two_ranks(ranks2, tmp_path, kind):
    assert ranks2.run(short_window_job, kind, str(tmp_path), False) == [[("window_weights", "0.5")]] * 2
    assert ranks2.run(short_window_job, kind, str(tmp_path), True) == [[], []]


def resumed_job(root: str, n: int) -> list[list[Any]]:
    """C17 on two ranks: a plain loader resumed after 3 of 8 updates."""
    rank = torch.distributed.get_rank()
    path, found = f"{root}/mid-{n}.ckpt", []
    for ckpt_path in (None, path):
        callback = LoopAudit(on_violation="mark", every_n_steps=n, checks=["samples_once", "ranks_differ"])
        others = [SaveAt(3, path)] if ckpt_path is None else []
        trainer = trainer_for(
            root, [callback, *others], strategy="ddp", devices=2, use_distributed_sampler=False
        )
        trainer.fit(Tiny(), DataLoader(rows(16), sampler=Deals(16, rank, 2)), ckpt_path=ckpt_path)
        found.append([(v.check, v.update) for v in callback.violations])
    return found


@pytest.mark.case("C17")
def test_c17_on_two_ranks(ranks2, tmp_path):
    first, second = ranks2.run(resumed_job, str(tmp_path), 1)
    assert first == second
    assert first[0] == []
    assert first[1][0] == ("samples_once", 4)
