"""What ranks run for the checks of TokenWeightedLoss; each function gives back plain numbers."""

import importlib.util
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from callbacks.token_weighted_loss import TokenWeightedLoss
from tests.distributed.toys import (
    CountingToy,
    DividingToy,
    Net,
    Toy,
    distance,
    fit,
    full_batch,
    precision_arguments,
    sequences,
    whole,
)


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def split(inputs: Tensor, targets: Tensor, num_micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's micro-batches of one update."""
    rank, world = rank_and_world()
    parts = list(
        zip(inputs.chunk(world * num_micro_batches), targets.chunk(world * num_micro_batches), strict=True)
    )
    return parts[rank::world]


def load_alone(path: str) -> type[pl.Callback]:
    """Return TokenWeightedLoss of a copy of its file, imported by path."""
    spec = importlib.util.spec_from_file_location("copied_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TokenWeightedLoss


def sweep(
    strategy: str | None,
    kinds: tuple[str, ...] = ("Toy",),
    precision: str = "32-true",
    path: str | None = None,
    splits: tuple[int, ...] = (1, 2, 4, 8),
) -> list[dict[str, Any]]:
    """Return, for each number of micro-batches and each module, distances from the full batch."""
    inputs, targets = sequences()
    torch.manual_seed(0)
    loss, gradient, tokens = full_batch(Net(), inputs, targets)
    rows = []
    for kind in kinds:
        for k in splits:
            batches: list[Any] = split(inputs, targets, k)
            toy = {"Toy": Toy, "CountingToy": CountingToy, "DividingToy": DividingToy}[kind]
            module = toy(sharded=strategy == "FSDP2")
            if kind == "CountingToy":
                batches = [{"x": x, "y": y} for x, y in batches]
            weighted = (load_alone(path) if path else TokenWeightedLoss)()
            _, logger, record = fit(
                module,
                batches,
                strategy=strategy,
                callbacks=[weighted],
                accumulate=k,
                **precision_arguments(precision, strategy),
            )
            rows.append(
                {
                    "case": (strategy, kind, k),
                    "gradient": distance(record.gradients[0], gradient),
                    "loss": abs(record.metrics[0]["train/loss"] / loss - 1.0),
                    "tokens": record.metrics[0]["train/tokens"] - tokens,
                    "points": len(logger.series("train/loss")),
                    "updates": len(record.gradients),
                    "seen": record.metrics[0]["train/loss"],
                }
            )
    return rows


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.w


class ValueToy(Toy):
    """The mean of the batch's values times a weight of 1: loss and gradient are that mean."""

    def __init__(self, sharded: bool = False, lr: float = 0.0) -> None:
        super().__init__(net=Scale(), sharded=sharded, lr=lr)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, targets = batch
        return self.net(values)[targets != -100].mean()


def micro_batch(num_tokens: int, mean: float, room: int = 32) -> tuple[Tensor, Tensor]:
    """Return a batch of `num_tokens` counted tokens whose values have this mean, and others that do not count."""
    values, targets = torch.full((room,), 99.0), torch.full((room,), -100)
    values[:num_tokens] = mean + torch.linspace(-0.5, 0.5, num_tokens) if num_tokens > 1 else mean
    targets[:num_tokens] = 1
    return values, targets


def values_fit(
    strategy: str | None, batches_of_rank: list[list[tuple[int, float]]], accumulate: int = 1, lr: float = 0.0
) -> dict[str, Any]:
    """Train on (tokens, mean) micro-batches given per rank; return the losses, gradients and points of each update."""
    mine = [micro_batch(n, mean) for n, mean in batches_of_rank[rank_and_world()[0]]]
    module = ValueToy(sharded=strategy == "FSDP2", lr=lr)
    callback = TokenWeightedLoss()
    trainer, logger, record = fit(
        module, mine, strategy=strategy, callbacks=[callback], accumulate=accumulate
    )
    return {
        "loss": [m.get("train/loss") for m in record.metrics],
        "tokens": [m["train/tokens"] for m in record.metrics],
        "loss_sum": [m["train/loss_sum"] for m in record.metrics],
        "gradient": [float(g["net.w"].sum()) if g["net.w"].numel() else None for g in record.gradients],
        "points": [(step, m["train/loss"]) for step, m in logger.points if "train/loss" in m],
        "weight": float(whole(module, "data")["net.w"].sum()),
        "empty": callback.empty_updates,
        "updates": trainer.global_step,
    }


def untouched(strategy: str | None) -> float:
    """Return the largest difference that the callback makes when every micro-batch is full (bitwise: 0.0)."""
    inputs, targets = sequences()
    targets = targets.clamp(min=0)
    weights = []
    for callbacks in ([], [TokenWeightedLoss()]):
        module = Toy(sharded=strategy == "FSDP2")
        fit(module, split(inputs, targets, 8), strategy=strategy, callbacks=callbacks, accumulate=4)
        weights.append(whole(module, "data"))
    return max(float((weights[0][n] - weights[1][n]).abs().max()) for n in weights[0])


def count_collectives(strategy: str) -> tuple[int, int, int]:
    """Return the collectives that Python code called with the callback, without it, and the number of updates."""
    inputs, targets = sequences()
    counts = []
    for callbacks in ([TokenWeightedLoss()], []):
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
    return counts[0], counts[1], trainer.global_step


class LogsSomewhere(ValueToy):
    how: dict[str, Any] = {}
    everywhere = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.everywhere or self.trainer.is_global_zero:
            self.log("only_here", float(rank_and_world()[0]), **self.how)
        return loss


def key_on_one_rank(strategy: str, how: dict[str, Any]) -> str:
    """Return the error that a metric logged on rank 0 alone ends in, on this rank."""
    module = LogsSomewhere(sharded=strategy == "FSDP2")
    module.how = how
    try:
        fit(module, [micro_batch(4, 1.0)] * 3, strategy=strategy, callbacks=[TokenWeightedLoss()])
    except RuntimeError as error:
        return str(error)
    return ""


def synced_everywhere(strategy: str) -> float:
    """Return the mean of the ranks' numbers, as `log(sync_dist=True)` gives it."""
    module = LogsSomewhere(sharded=strategy == "FSDP2")
    module.how, module.everywhere = {"sync_dist": True}, True
    _, _, record = fit(module, [micro_batch(4, 1.0)] * 2, strategy=strategy, callbacks=[TokenWeightedLoss()])
    return record.metrics[0]["only_here"]


def best_checkpoint(folder: str) -> tuple[float, str, float]:
    """Return train/loss, the path of the best checkpoint and its score, as this rank sees them."""
    tokens, mean = ((10, 1.0), (30, 3.0))[rank_and_world()[0]]
    checkpoint = ModelCheckpoint(folder, monitor="train/loss", every_n_train_steps=1, filename="{step}")
    _, _, record = fit(
        ValueToy(),
        [micro_batch(tokens, mean), micro_batch(tokens, mean + 1)],
        strategy="DDP",
        callbacks=[TokenWeightedLoss(), checkpoint],
        enable_checkpointing=True,
    )
    assert checkpoint.best_model_score is not None
    return record.metrics[0]["train/loss"], checkpoint.best_model_path, float(checkpoint.best_model_score)


def trainer_clip(strategy: str | None) -> tuple[float, float]:
    """Return the norm that reaches the optimizer under Trainer(gradient_clip_val=0.5), and |gradient| / 0.5 wanted."""
    inputs, targets = sequences()
    torch.manual_seed(0)
    _, gradient, _ = full_batch(Net(), inputs, targets)
    module = Toy(sharded=strategy == "FSDP2", lr=1.0)
    before = whole(module, "data")
    fit(
        module,
        split(inputs, targets, 4),
        strategy=strategy,
        callbacks=[TokenWeightedLoss()],
        accumulate=4,
        gradient_clip_val=0.5,
    )
    after = whole(module, "data")
    norm = sum(float(g.square().sum()) for g in gradient.values()) ** 0.5
    wanted = {n: g * (0.5 / norm) for n, g in gradient.items()}
    return distance({n: before[n].double() - after[n].double() for n in wanted}, wanted), norm
