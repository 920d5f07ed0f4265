"""What ranks run for the checks of GradNormMonitor; each function gives back plain numbers."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from callbacks.checkpoint_retention import CheckpointRetention
from callbacks.grad_norm import GradNormMonitor
from callbacks.token_weighted_loss import TokenWeightedLoss
from lit_gpt_loop import LitGPT, strategies
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.schedules import ScheduleConfig
from tests.distributed.token_jobs import rank_and_world, split
from tests.distributed.toys import Net, Toy, distance, fit, full_batch, precision_arguments, sequences, whole


class Linear2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.w


class VectorToy(Toy):
    """Loss = mean of rows @ w, so that the gradient is the mean of the rows it is fed."""

    def __init__(
        self, sharded: bool = False, lr: float = 1.0, adam: bool = False, scheduler: Any = None
    ) -> None:
        super().__init__(net=Linear2(), sharded=sharded, lr=lr)
        self.adam, self.scheduler, self.rates = adam, scheduler, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch["rows"] if isinstance(batch, dict) else batch
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.net(rows).float().mean()

    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.adam else torch.optim.SGD
        optimizer = kind(self.parameters(), lr=self.lr)
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"},
        }


def vectors_fit(
    strategy: str | None,
    rows_of_rank: list[list[Any]],
    accumulate: int = 1,
    precision: str = "32-true",
    clip_norm: float | None = 1.0,
    **arguments: Any,
) -> dict[str, Any]:
    """Train on one row of gradient per micro-batch and rank; return what was logged, applied and left."""
    sharded = strategy == "FSDP2"
    module = VectorToy(sharded=sharded)
    rows = [torch.tensor([row]) for row in rows_of_rank[rank_and_world()[0]]]
    monitor = GradNormMonitor(clip_norm=clip_norm)
    _, logger, record = fit(
        module,
        rows,
        strategy=strategy,
        callbacks=[monitor],
        accumulate=accumulate,
        **precision_arguments(precision, strategy),
        **arguments,
    )
    return {
        "norm": [m.get("optim/grad_norm") for m in record.metrics],
        "points": [m["optim/grad_norm"] for _, m in logger.points if "optim/grad_norm" in m],
        "metrics": record.metrics,
        "applied": [g["net.w"].tolist() for g in record.gradients],
        "weight": whole(module, "data")["net.w"].tolist(),
    }


def frozen_net() -> Net:
    """Return a Net with tied weights, a frozen bias, a parameter that takes no part, and one that no rank fills."""
    torch.manual_seed(3)
    net = Net()
    net.blocks[1].bias.requires_grad_(False)
    net.unused = nn.Parameter(torch.ones(3, 3))
    return net


def norm_of_everything(strategy: str | None, precision: str = "32-true") -> dict[str, Any]:
    """Return logged norms (of gradient, layers, weights), for both orders of the list, and plain PyTorch's."""
    inputs, targets = sequences()
    reference = frozen_net()
    weights = sum(float(p.detach().double().square().sum()) for p in reference.parameters()) ** 0.5
    _, gradient, _ = full_batch(reference, inputs, targets)
    norm = sum(float(g.square().sum()) for g in gradient.values()) ** 0.5
    block = sum(float(g.square().sum()) for n, g in gradient.items() if ".blocks.0." in n) ** 0.5
    clip = {n: g * (0.25 / norm) for n, g in gradient.items()}
    answers = []
    for is_first in (True, False):
        monitor = GradNormMonitor(clip_norm=0.25, per_layer=True)
        callbacks: list[pl.Callback] = [TokenWeightedLoss()]
        callbacks.insert(0 if is_first else 1, monitor)
        module = Toy(net=frozen_net(), sharded=strategy == "FSDP2")
        _, _, record = fit(
            module,
            split(inputs, targets, 4),
            strategy=strategy,
            callbacks=callbacks,
            accumulate=4,
            **precision_arguments(precision, strategy),
            **unused_parameters(strategy),
        )
        seen = record.metrics[0]
        answers.append(
            {
                "norm": seen["optim/grad_norm"],
                "block": seen["optim/grad_norm/net.blocks.0"],
                "weights": seen["optim/weight_norm"],
                "applied": distance(record.gradients[0], clip),
            }
        )
    return {"answers": answers, "norm": norm, "block": block, "weights": weights}


def unused_parameters(strategy: str | None) -> dict[str, Any]:
    if strategy != "DDP":
        return {}
    return {"strategy_object": strategies.DDP(find_unused_parameters=True)}


def norm_of_copies(strategy: str) -> dict[str, Any]:
    """Return norms where some values are on every rank: FSDP1 that shards nothing, a parameter that FSDP2 was not given."""
    module = VectorToy(sharded=strategy == "FSDP2")
    arguments: dict[str, Any] = {}
    if strategy == "FSDP":
        arguments["strategy_object"] = strategies.FSDP(sharding_strategy="NO_SHARD")
    else:
        module.outside = nn.Parameter(torch.full((4,), 5.0), requires_grad=False)
    _, _, record = fit(
        module,
        [torch.tensor([[3.0, 4.0]])] * 2,
        strategy=strategy,
        callbacks=[GradNormMonitor()],
        **arguments,
    )
    return {"norm": record.metrics[1]["optim/grad_norm"], "weights": record.metrics[1]["optim/weight_norm"]}


def count_reductions(strategy: str) -> tuple[int, int]:
    """Return the collectives that GradNormMonitor adds to a fit, and the updates in it."""
    inputs, targets = sequences()
    counts = []
    for callbacks in ([GradNormMonitor(clip_norm=1.0)], []):
        calls, real = [0], dist.all_reduce

        def counting(*args: Any, _calls: list[int] = calls, _real: Any = real, **kwargs: Any) -> Any:
            _calls[0] += 1
            return _real(*args, **kwargs)

        dist.all_reduce = counting
        try:
            module = Toy(sharded=strategy == "FSDP2")
            trainer, _, _ = fit(
                module, split(inputs, targets, 8), strategy=strategy, callbacks=callbacks, accumulate=4
            )
        finally:
            dist.all_reduce = real
        counts.append(calls[0])
    return counts[0] - counts[1], trainer.global_step


def batches_with_nan(bad_updates: set[int], num_updates: int, bad_rank: int = 1) -> list[dict[str, Tensor]]:
    """Return one batch per update; those of `bad_updates` (1-based) are NaN on `bad_rank`. Ids are 100 * update + rank."""
    rank, _ = rank_and_world()
    batches = []
    for update in range(1, num_updates + 1):
        rows = torch.tensor([[0.3 * update, 0.4]])
        if update in bad_updates and rank == bad_rank:
            rows = rows * float("nan")
        batches.append({"rows": rows, "sample_ids": torch.tensor([100 * update + rank])})
    return batches


def nan_at(
    strategy: str | None, bad_updates: set[int], num_updates: int, bad_rank: int = 1
) -> dict[str, Any]:
    """Return weights with NaN at some updates, weights without those updates at all, and what was counted."""
    weights = []
    for chosen in (range(1, num_updates + 1), [u for u in range(1, num_updates + 1) if u not in bad_updates]):
        batches = [batches_with_nan(bad_updates, num_updates, bad_rank)[u - 1] for u in chosen]
        module = VectorToy(sharded=strategy == "FSDP2", lr=0.1, adam=True, scheduler=halving)
        monitor = GradNormMonitor()
        _, _, record = fit(module, batches, strategy=strategy, callbacks=[monitor])
        weights.append((whole(module, "data")["net.w"], module.rates, record.metrics, monitor))
    (skipping, rates, metrics, monitor), (without, rates_without, _, _) = weights
    return {
        "same": torch.equal(skipping, without),
        "rates": [r for u, r in enumerate(rates, 1) if u not in bad_updates] == rates_without,
        "all_rates": rates,
        "norms": [m.get("optim/grad_norm") for m in metrics],
        "last": metrics[-1],
        "fault": monitor._fault,
    }


def overflow_stock(strategy: str | None) -> dict[str, Any]:
    """Return what an fp16 run of 6 updates did, whose last rank's gradient of 300 overflows at scales above 218."""
    rank, world = rank_and_world() if strategy is not None else (0, 1)
    row = [300.0, 4.0] if rank == world - 1 else [3.0, 4.0]
    module = VectorToy(strategy == "FSDP2", scheduler=halving)
    _, _, record = fit(
        module,
        [torch.tensor([row])] * 6,
        strategy=strategy,
        callbacks=[GradNormMonitor()],
        **precision_arguments("16-mixed", strategy),
    )
    return {"metrics": record.metrics, "lr": module.rates, "weight": whole(module, "data")["net.w"].tolist()}


class OverflowGPT(LitGPT):
    """Its loss is 1e8 times itself where a sample id is negative: finite in fp32, not in the fp16 of its backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output | {"loss": output["loss"] * (1e8 if int(batch["sample_ids"].min()) < 0 else 1.0)}


def overflow_gpt(strategy: str | None, bad_updates: set[int], has_monitor: bool) -> dict[str, Any]:
    """Return what LitGPT logged in an fp16 run of 6 updates of which some overflow on the last rank."""
    rank, world = rank_and_world() if strategy is not None else (0, 1)
    torch.manual_seed(0)
    config = GPTConfig.preset("tiny", vocab_size=31, context_length=16)
    module = OverflowGPT(config, lr=1e-3, schedule=ScheduleConfig("constant", 4))
    batches = []
    for update in range(1, 7):
        ids = torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(10 * update + rank))
        sample = -1 if update in bad_updates and rank == world - 1 else update
        batches.append(
            {"inputs": ids[:, :-1], "targets": ids[:, 1:], "sample_ids": torch.tensor([sample, sample])}
        )
    _, logger, record = fit(
        module,
        batches,
        strategy=strategy,
        callbacks=[GradNormMonitor()] if has_monitor else [],
        **precision_arguments("16-mixed", strategy),
    )
    weights = whole(module, "data").values()
    return {
        "metrics": record.metrics,
        "lr": logger.series("optim/lr"),
        "update": logger.series("progress/update"),
        "tokens": logger.series("progress/tokens"),
        "weights": [float(w.double().sum()) for w in weights],
    }


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def stop_after_nan(strategy: str, folder: str, retention: bool = False) -> tuple[str, int]:
    """Return the error that NaN from update 3 on ends in, on this rank, and the update at which it came."""
    module = VectorToy(sharded=strategy == "FSDP2", lr=0.1)
    checkpoint: Any = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    if retention:
        checkpoint = CheckpointRetention(folder, every_n_steps=100)
    try:
        fit(
            module,
            batches_with_nan({3, 4, 5, 6, 7, 8}, 8),
            strategy=strategy,
            callbacks=[GradNormMonitor(max_consecutive_skips=4), checkpoint],
            enable_checkpointing=True,
        )
    except RuntimeError as error:
        return str(error), module.trainer.global_step
    return "", module.trainer.global_step


class WeightsAtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = whole(pl_module, "data")["net.w"].tolist()


def resume(strategy: str, path: str) -> list[float]:
    """Return the weights that a run resumed from this checkpoint starts with."""
    start = WeightsAtStart()
    fit(
        VectorToy(strategy == "FSDP2"),
        batches_with_nan(set(), 7),
        strategy=strategy,
        callbacks=[start],
        ckpt_path=path,
    )
    return start.weights


def files_in(folder: str) -> list[str]:
    return sorted(os.listdir(folder))
