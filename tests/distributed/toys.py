"""Small networks and modules that know nothing of our callbacks, and what runs them under any strategy.

Used by the checks of the loss, norm and strategy files; everything here can be imported on a staying rank.
"""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

from lit_gpt_loop import strategies

VOCABULARY = 11
STRATEGIES = ("DDP", "FSDP", "FSDP2")


class Net(nn.Module):
    """Tied embedding and head, two blocks of odd sizes, a scalar-sized parameter, a frozen and an unused one."""

    def __init__(self, width: int = 5, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.gain = nn.Parameter(torch.ones(1))  # fewer rows than ranks
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.embed(inputs)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h * self.gain)


class Toy(pl.LightningModule):
    """A mean cross-entropy and an SGD: what a first Lightning module looks like."""

    def __init__(self, net: nn.Module | None = None, sharded: bool = False, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net if net is not None else Net()
        self.is_sharded, self.lr = sharded, lr

    def configure_model(self) -> None:
        if self.is_sharded:
            strategies.shard_fsdp2(self.net, self.device_mesh)
            self.is_sharded = False

    def token_losses(self, batch: Any) -> Tensor:
        inputs, targets = batch
        logits = self.net(inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs).flatten(0, 1).float(), targets.flatten(), ignore_index=-100)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr)


class CountingToy(Toy):
    """Returns its count, under keys of its own batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.token_losses((batch["x"], batch["y"]))
        num_tokens = (batch["y"] != -100).sum()
        return {"loss": losses.sum() / num_tokens, "num_tokens": num_tokens}


class DividingToy(Toy):
    """Masks and divides by hand: 0 / 0 without a token, and NaN x 0 in every gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        mask = (targets != -100).float()
        return (self.token_losses((inputs, targets.clamp(min=0))) * mask.flatten()).sum() / mask.sum()


class MemoryLogger(Logger):
    """Keeps what it is given: `points` is a list of (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append((int(step or 0), dict(metrics)))

    def series(self, key: str) -> list[float]:
        return [m[key] for _, m in self.points if key in m]


class Record(pl.Callback):
    """Keeps the whole gradients that reach the optimizer, and what every rank sees in `callback_metrics`."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        self.gradients.append(whole(pl_module, "grad"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if len(self.metrics) < trainer.global_step:
            self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def whole(module: nn.Module, what: str) -> dict[str, Tensor]:
    """Return the unsharded parameters (`what="data"`) or gradients ("grad") by name, zeros where there is none."""
    found = {}
    for name, p in module.named_parameters():
        t = p.detach() if what == "data" else p.grad
        if hasattr(p, "full_tensor"):
            t = None if t is None else t.full_tensor()
        elif hasattr(
            p, "_fsdp_flattened"
        ):  # FSDP1: rank after rank holds the next piece of the flattened parameter
            pieces: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(pieces, torch.empty(0) if t is None else t.detach().flatten())
            t = torch.cat(pieces)
        name = name.replace("_fsdp_wrapped_module.", "")
        found[name] = torch.zeros(0) if t is None else t.detach().clone().flatten()
    return found


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return |a - b| / |b| over all tensors; a missing gradient counts as zero."""
    top = bottom = 0.0
    for name, right in b.items():
        left = a[name].double() if a[name].numel() else torch.zeros(right.numel(), dtype=torch.float64)
        top += float((left - right.double().flatten()).square().sum())
        bottom += float(right.double().square().sum())
    return (top / bottom) ** 0.5


def precision_arguments(precision: str, strategy: str | None) -> dict[str, Any]:
    """Return the Trainer's arguments for a precision; "16-mixed" is real fp16 autocast with a loss scaler, on CPU.

    `Trainer(accelerator="cpu", precision="16-mixed")` turns itself into bf16, so that the plugin is given instead.
    """
    if precision != "16-mixed":
        return {"precision": precision}
    if strategy == "FSDP":
        scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        return {"plugins": [strategies.AnyDeviceFSDPPrecision("16-mixed", "cpu", scaler)]}
    return {
        "plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))]
    }


def fit(
    module: pl.LightningModule,
    batches: list[Any],
    *,
    strategy: str | None = None,
    callbacks: list[pl.Callback] | tuple[pl.Callback, ...] = (),
    accumulate: int = 1,
    strategy_object: Any = None,
    ckpt_path: str | None = None,
    **trainer_arguments: Any,
) -> tuple[pl.Trainer, MemoryLogger, Record]:
    """Train on `batches`, this rank's own; `strategy` names a class of lit_gpt_loop.strategies, None is one process."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logger, record = MemoryLogger(), Record()
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if strategy is None else dist.get_world_size(),
        "strategy": strategy_object
        or (strategies.OneDevice if strategy is None else getattr(strategies, strategy))(),
        "max_epochs": 1,
        "logger": logger,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        **trainer_arguments,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(callbacks=[*callbacks, record], accumulate_grad_batches=accumulate, **arguments)
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return trainer, logger, record


def sequences(num: int = 32, length: int = 6, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (num, length), with random masks; the third sequence has no target at all."""
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, VOCABULARY, (num, length), generator=g)
    targets = torch.randint(0, VOCABULARY, (num, length), generator=g)
    targets[torch.rand(num, length, generator=g) < torch.rand(num, 1, generator=g)] = -100
    targets[2:3] = -100
    return inputs, targets


def full_batch(net: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor], int]:
    """Return loss, gradients by name and tokens of one batch of everything: plain PyTorch in float64."""
    net = net.double()
    net.zero_grad()
    logits = net(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100)
    loss.backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return (
        float(loss.detach()),
        {f"net.{n}": g.clone() for n, g in grads.items()},
        int((targets != -100).sum()),
    )
