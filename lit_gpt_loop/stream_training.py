"""Lightning's Trainer on an endless training stream: what has to be set, refused and realigned."""

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def set_accumulation(trainer: pl.Trainer, needed: int, set_before: int | None, batch: str) -> None:
    """Set `trainer.accumulate_grad_batches`, unless the module optimizes by itself.

    Args:
        trainer: its value must be 1 (not given), `needed`, or what an earlier call set.
        needed: micro-batches per update.
        set_before: what an earlier call set.
        batch: the global batch in words, for the error.

    Raises:
        ValueError: the user gave the Trainer another number, or a callback that changes it.
    """
    if any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError("GradientAccumulationScheduler changes the global batch during a run: leave it out.")
    if trainer.accumulate_grad_batches not in (1, needed, set_before):
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), but {batch} takes {needed}: leave out "
            f"accumulate_grad_batches, or leave out the global batch."
        )
    if trainer.lightning_module is None or trainer.lightning_module.automatic_optimization:
        trainer.accumulate_grad_batches = needed


def check_limits(trainer: pl.Trainer, accumulation: int, updates_per_epoch: float) -> None:
    """Refuse Trainer arguments that would end or cut an endless stream in a way that the user does not mean.

    Raises:
        ValueError: says what to give instead.
    """
    limit = trainer.limit_train_batches
    if (overfit := getattr(trainer, "overfit_batches", 0)) > 0:  # the Trainer does not declare it
        raise ValueError(
            f"Trainer(overfit_batches={overfit}): use `--data.limit_train_blocks N` to train on the same N blocks again and again."
        )
    if isinstance(limit, float) and limit not in (0.0, 1.0):
        raise ValueError(
            f"Trainer(limit_train_batches={limit}) is a share of an endless stream: use max_steps, or limit_train_blocks."
        )
    is_dry_run = bool(getattr(trainer, "fast_dev_run", False))
    if isinstance(limit, int) and limit % accumulation and not is_dry_run:
        raise ValueError(
            f"Trainer(limit_train_batches={limit}) cuts a window of {accumulation} micro-batches: take a multiple of it, for "
            f"example {math.ceil(limit / accumulation) * accumulation}."
        )
    if trainer.max_steps == -1 and trainer.max_epochs != -1 and not isinstance(limit, int):
        epochs = trainer.max_epochs or 1
        raise ValueError(
            f"the training stream is endless, so max_epochs does not end it: give Trainer(max_steps=...). One epoch of this corpus "
            f"is {updates_per_epoch:.1f} updates, {epochs} are {math.ceil(updates_per_epoch * epochs)}; max_epochs=-1 without "
            f"max_steps runs until it is stopped."
        )


def realign_micro_batches(trainer: pl.Trainer, saved_accumulation: int) -> None:
    """Set Lightning's micro-batch counters to the start of a window, after a checkpoint was loaded.

    Lightning steps when `accumulate_grad_batches` divides the number of micro-batches so far. That number is in the checkpoint;
    one saved in the middle of a window, or under another accumulation, would make the next window too short.
    """
    # `epoch_loop.batch_progress` has no public setter; tests fail if Lightning changes it.
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.current, progress.total):
        shift = counts.ready // saved_accumulation * trainer.accumulate_grad_batches - counts.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + shift)
