"""Check that splits give one gradient: `python -m recipes.verify_gradients --config configs/quickstart.yaml`.

Takes one global batch and trains one update with it in several ways: at once, in micro-batches of several sizes, over
ranks. What reaches the optimizer has to be the same each time; the table says how far it lies apart at most, and in which
parameter. Sequences get different numbers of targets (--mask), as padding or masking gives them, so that averaging the
means of micro-batches shows. Everything else of the configuration is as it is: leave TokenWeightedLoss out of it and see.

Exits with 0 if all splits agree, 1 if one does not, 2 if one did not run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser

from callbacks.restart_equivalence import gradient_leaves, local_part
from callbacks.token_weighted_loss import TokenWeightedLoss
from lit_gpt_loop.cli import PretrainCLI
from lit_gpt_loop.gradient_splits import Split, find_splits, largest_difference, mask_targets
from recipes.help import Help
from recipes.pretrain import resolve, run_command


class Capture(pl.Callback):
    """Trains one update without dropout and keeps its gradients, whole, as the optimizer used them."""

    def __init__(self, mask: float) -> None:
        self.mask = mask
        self.sample_ids: list[int] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Switch dropout off, whose masks no two splits share; leave targets out."""
        pl_module.eval()
        self.sample_ids += batch["sample_ids"].tolist()
        mask_targets(batch["targets"], batch["sample_ids"].cpu(), self.mask)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the first update's end: gather and leave."""
        if trainer.global_step == 0:
            return
        mine = {
            name: local_part(grad, shard) for name, grad, shard in gradient_leaves(pl_module, trainer.model)
        }
        everybodys: list[Any] = [mine if any(s for _, s in mine.values()) or trainer.is_global_zero else {}]
        ids = [self.sample_ids]
        if trainer.world_size > 1:
            everybodys = [None] * trainer.world_size
            ids = [[] for _ in range(trainer.world_size)]
            dist.all_gather_object(everybodys, {n: (g.cpu(), s) for n, (g, s) in mine.items()})
            dist.all_gather_object(ids, self.sample_ids)
        self.sample_ids = sorted(i for own in ids for i in own)
        for parts in everybodys:
            for name, (grad, shard) in parts.items():
                if shard is None:
                    self.gradients.setdefault(name, grad.cpu())
                    continue
                whole = self.gradients.setdefault(name, torch.zeros(shard.shape, dtype=grad.dtype))
                flat = grad.reshape(-1)
                whole.view(-1)[shard.first : shard.first + len(flat)] += flat
        raise SystemExit(0)


class OneUpdateCLI(PretrainCLI):
    """The run's own command, which makes one update and keeps nothing but the gradient."""

    mask: ClassVar[float] = 0.0
    captured: ClassVar[list[Capture]] = []  # of the class: SystemExit leaves no instance behind

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the run's Trainer with nothing in it that measures, clips or saves."""
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        capture = Capture(self.mask)
        self.captured.append(capture)
        callbacks[:] = [*(c for c in callbacks if isinstance(c, TokenWeightedLoss)), capture]
        return trainer


def one_update(
    config: Path, split: Split, strategy: str, mask: float, precision: str, folder: Path
) -> dict[str, Any]:
    """Train one update in this process; returns {"gradients", "sample_ids"}."""
    args = [
        "fit",
        "--config",
        str(config),
        "--trainer.default_root_dir",
        str(folder / "run"),
        "--ckpt_path",
        "none",
    ]
    args += [
        "--trainer.logger",
        "false",
        "--trainer.enable_progress_bar",
        "false",
        "--trainer.precision",
        precision,
    ]
    args += ["--trainer.devices", str(split.world_size), "--trainer.accumulate_grad_batches", "1"]
    args += ["--trainer.strategy", strategy if split.world_size > 1 else "one_device"]
    args += ["--data.micro_batch_size", str(split.micro_batch_size), "--data.global_batch_tokens", "null"]
    batch_size = split.world_size * split.accumulation * split.micro_batch_size
    args += ["--data.global_batch_size", str(batch_size)]
    OneUpdateCLI.mask = mask
    try:
        OneUpdateCLI(resolve, args=args)
    except SystemExit as e:
        if e.code:
            raise
    capture = OneUpdateCLI.captured[-1]
    return {"gradients": capture.gradients, "sample_ids": capture.sample_ids}


def run_split(
    config: Path, split: Split, strategy: str, mask: float, precision: str, folder: Path
) -> dict[str, Any]:
    """Train one update in fresh processes and return what `one_update` does.

    Raises:
        RuntimeError: they failed; the message holds their last lines.
    """
    own = folder / str(split).replace(" ", "-")
    own.mkdir()
    numbers = [str(n) for n in (split.world_size, split.micro_batch_size, split.accumulation)]
    spec = [str(config), *numbers, strategy, str(mask), precision, str(own)]
    with open(own / "log", "w") as log:
        command = [sys.executable, "-m", "recipes.verify_gradients", "--one-update", *spec]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code or not (own / "result.pt").is_file():
        tail = "\n".join((own / "log").read_text().splitlines()[-15:])
        raise RuntimeError(f"{split} ended with exit code {code}; its last lines:\n{tail}")
    return torch.load(own / "result.pt", weights_only=True)


def _one_update_from_command_line(spec: list[str]) -> None:
    config, world_size, micro, accumulation, strategy, mask, precision, folder = spec
    split = Split(int(world_size), int(micro), int(accumulation))
    result = one_update(Path(config), split, strategy, float(mask), precision, Path(folder))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        torch.save(result, Path(folder) / "result.pt")


def verify(
    config: Path,
    devices: int = 2,
    strategy: str = "ddp",
    batch_size: int = 8,
    mask: float = 0.5,
    precision: str = "32-true",
    tolerance: float = 1e-5,
) -> int:
    """Train one update with the same global batch split in several ways, and compare the gradients.

    Exit codes: 0 all splits agree, 1 one does not, 2 one did not run.

    Args:
        config: a configuration of recipes.pretrain.
        devices: the most ranks to split over; 1 splits over micro-batches alone.
        strategy: for splits over ranks: ddp, fsdp or fsdp2.
        batch_size: sequences of the global batch; all of them have to fit on one device.
        mask: up to this share of each sequence's targets is left out, a different one for each; 0 leaves all in.
        precision: of the comparison; in bf16 rounding alone moves gradients by about 1e-2.
        tolerance: largest relative difference of a parameter's gradient that counts as the same.

    Returns:
        0, 1 or 2.
    """
    splits = find_splits(batch_size, devices)
    print(
        f"one update on {batch_size} sequences, up to {mask:.0%} of each one's targets left out, {precision}\n"
    )
    print(f"{'split':<42} {'largest difference':<20} parameter")
    code = 0
    with tempfile.TemporaryDirectory(prefix="verify-gradients-") as folder:
        reference: dict[str, Any] | None = None
        for split in splits:
            try:
                found = run_split(config, split, strategy, mask, precision, Path(folder))
            except RuntimeError as e:
                print(f"\ncannot be judged: {e}")
                return 2
            if reference is None:
                reference = found
                norm = float(torch.stack([g.double().norm() for g in found["gradients"].values()]).norm())
                print(
                    f"{split!s:<42} {'reference':<20} norm {norm:.6g} of {len(found['gradients'])} gradients"
                )
                continue
            if found["sample_ids"] != reference["sample_ids"]:
                print(f"{split!s:<42} other samples: {found['sample_ids']}, not {reference['sample_ids']}")
                code = 1
                continue
            apart, name = largest_difference(reference["gradients"], found["gradients"])
            is_same = apart <= tolerance
            code = code if is_same else 1
            print(f"{split!s:<42} {apart:<20.2e} {name}{'' if is_same else '   <- differs'}")
    if code:
        print(
            f"\nGradients differ by more than {tolerance:g}. Usual cause: losses are averaged over micro-batches or ranks by "
            "their means, so that a token's weight depends on its neighbours. callbacks.TokenWeightedLoss mends it."
        )
    else:
        print(f"\nAll splits give the same gradient (within {tolerance:g}).")
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one-update"]:  # our own fresh process, or a rank that it started
        _one_update_from_command_line(sys.argv[2:])
    else:
        parser = ArgumentParser(
            prog="python -m recipes.verify_gradients", description=__doc__, formatter_class=Help
        )
        parser.add_function_arguments(verify, as_positional=False)
        arguments = parser.parse_args().as_dict()
        run_command(lambda: sys.exit(verify(**arguments)))
