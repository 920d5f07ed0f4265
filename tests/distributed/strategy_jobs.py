"""What ranks run for the checks of the strategies; each function gives back plain numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lit_gpt_loop import strategies
from tests.distributed.token_jobs import split
from tests.distributed.toys import Net, Toy, distance, fit, sequences, whole

REDUCTIONS = (
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter",
    "all_reduce",
)


@contextmanager
def watching_reductions() -> Iterator[list[tuple[str, torch.dtype]]]:
    """Give a list that fills with (name, dtype) of each reduction called from Python."""
    seen: list[tuple[str, torch.dtype]] = []
    real = {name: getattr(dist, name) for name in REDUCTIONS if hasattr(dist, name)}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            seen.append((name, tensor.dtype))
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, watched(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


class RanksAgree(pl.Callback):
    """Notes after each micro-batch whether the ranks hold the same gradient of the first whole parameter."""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        mine = next(pl_module.parameters()).grad
        everywhere: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everywhere, None if mine is None else mine.detach().clone())
        self.same.append(all(torch.equal(everywhere[0], other) for other in everywhere))


def train(strategy: str, precision: str, every: bool) -> dict[str, Any]:
    """Train 6 micro-batches in windows of 4 and 2; return weights, reductions and whether DDP's ranks agreed."""
    inputs, targets = sequences()
    module = Toy(sharded=strategy == "FSDP2")
    agree = RanksAgree()
    with watching_reductions() as seen:
        trainer, _, record = fit(
            module,
            split(inputs, targets.clamp(min=0), 8)[:6],
            strategy_object=getattr(strategies, strategy)(sync_every_micro_batch=every),
            strategy=strategy,
            callbacks=[agree] if strategy == "DDP" else [],
            accumulate=4,
            precision=precision,
        )
    return {
        "weights": whole(module, "data"),
        "gradients": record.gradients,
        "scatters": sum("scatter" in name for name, _ in seen),
        "dtypes": {str(dtype) for name, dtype in seen if dtype.is_floating_point},
        "same": agree.same,
        "updates": trainer.global_step,
        "precision": type(trainer.precision_plugin).__name__,
    }


def compare(strategy: str, precision: str) -> dict[str, Any]:
    """Return what syncing once per window does, against syncing at every micro-batch."""
    once, every = train(strategy, precision, False), train(strategy, precision, True)
    weights = {n: w for n, w in every["weights"].items() if w.numel()}
    return {
        "difference": distance(once["weights"], weights),
        "digest": sum(float(w.double().square().sum()) for w in once["weights"].values()),
        **{f"once_{k}": once[k] for k in ("scatters", "dtypes", "same", "updates")},
        **{f"every_{k}": every[k] for k in ("scatters", "same")},
    }


def different_seeds(strategy: str) -> bool:
    """Return whether a run whose ranks were seeded differently starts from rank 0's weights."""
    torch.manual_seed(0)
    wanted = {f"net.{n}": p.detach().clone().flatten() for n, p in Net().named_parameters()}
    torch.manual_seed(dist.get_rank())
    net = Net()
    module = Toy(net=net, sharded=strategy == "FSDP2", lr=0.0)
    fit(module, [sequences(2)], strategy=strategy)
    return all(torch.equal(whole(module, "data")[n], w) for n, w in wanted.items())


def units(strategy: str, block_types: list[str] | None) -> int:
    """Return how many modules were sharded one by one, root included."""
    module = Toy()
    fit(module, [sequences(2)], strategy=strategy, strategy_object=strategies.FSDP(block_types=block_types))
    model = module.trainer.strategy.model
    assert model is not None
    return sum(isinstance(m, (FullyShardedDataParallel, FSDPModule)) for m in model.modules())


def error_of(strategy: str, **arguments: Any) -> str:
    """Return the error of a fit that must be refused."""
    try:
        fit(
            Toy(),
            [sequences(2)],
            strategy=strategy,
            strategy_object=getattr(strategies, strategy)(**arguments),
        )
    except (ValueError, TypeError) as error:
        return str(error)
    return ""
