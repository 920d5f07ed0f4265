"""LitGPT: the network with its loss, evaluation, optimizer and schedule (step 7 of 10: GPT -> *LitGPT* -> Trainer).

Users think in updates (optimizer steps), Lightning's hooks see micro-batches. Everything here that counts, logs or schedules
does so at an update's last micro-batch, and only for updates that happened: one that the fp16 scaler skipped, or whose gradient
a callback dropped (all `p.grad` set to None), advances neither the schedule nor `progress/update`.

| key | unit | definition |
|---|---|---|
| `progress/update` | updates | updates that happened |
| `progress/tokens` | tokens | targets trained on in them, all ranks, ignored targets left out |
| `progress/samples`, `progress/epoch` | sequences, epochs | read from the data (its position), epoch fractional |
| `optim/lr` | 1 | the rate that this update used |
| `train/loss`, `train/loss_sum`, `train/tokens` | nats/token, nats, tokens | logged here only without a `TokenWeightedLoss` callback |
| `val/loss`, `val/ppl`, `val/bits_per_byte`, `val/tokens`, `val/loss_stderr` | | see `lit_gpt_loop.metrics.TokenLoss` |
"""

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from lit_gpt_loop import flops
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.metrics import TokenLoss
from lit_gpt_loop.model import GPT
from lit_gpt_loop.optim import build_adamw
from lit_gpt_loop.resume import check_architecture, check_schedule, differences
from lit_gpt_loop.schedules import Schedule, ScheduleConfig
from lit_gpt_loop.strategies import shard_fsdp2

Batch = dict[str, Tensor]  # inputs (B, T), targets (B, T), sample_ids (B,), perhaps segment_ids (B, T)


class LitGPT(pl.LightningModule):
    """A GPT with AdamW and a schedule, for any Lightning strategy.

    Attributes (documented for callbacks):
        model: the network.
        num_matmul_params: N of the 6N rule, parameters that multiply activations.
        flops_per_token: 6N.
        recomputed_flops_per_token: forward FLOPs done again by activation checkpointing, 0.0 without it.
        rates_change_at: after a restart of a run that was lengthened, the first update (`trainer.global_step` before it) whose
            rate is not the one that the checkpoint's run used or would have used; else None.

    Args:
        config: a `GPTConfig`, its fields as a dict, or a preset's name such as "gpt2-124m".
        overrides: fields of GPTConfig that differ from the preset.
        vocab_size: number of tokens; None keeps the config's. The command line links it from the data.
        context_length: longest sequence in tokens; None keeps the config's. Linked from the data.
        in_document_attention: no attention across document borders; None keeps the config's. Linked from the data.
        eot_id: the end token, at which generation stops. Linked from the data.
        lr: peak learning rate.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        weight_decay: decay of matrices; norms, biases and embeddings never decay.
        schedule: warmup, stable and decay phases; see `ScheduleConfig`.
        compile: compile the network in place; checkpoints are the same as without.
        init_device: "cpu" builds the network when the module is built. "meta" builds it without memory and fills it after
            sharding, for models larger than a host's memory (FSDP2).
    """

    def __init__(
        self,
        config: GPTConfig | dict[str, Any] | str = "tiny",
        overrides: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        context_length: int | None = None,
        in_document_attention: bool | None = None,
        eot_id: int | None = None,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        schedule: ScheduleConfig | dict[str, Any] | None = None,
        compile: bool = False,
        init_device: str = "cpu",
    ) -> None:
        super().__init__()
        if lr <= 0:
            raise ValueError(f"lr={lr} must be above 0: it is the peak rate of the schedule")
        if init_device not in ("cpu", "meta"):
            raise ValueError(f"init_device={init_device!r} must be 'cpu' or 'meta'")
        linked = {
            "vocab_size": vocab_size,
            "context_length": context_length,
            "in_document_attention": in_document_attention,
        }
        self.config = _resolve(config, overrides or {}, {k: v for k, v in linked.items() if v is not None})
        self.eot_id = eot_id
        self.lr, self.betas, self.eps, self.weight_decay = lr, (betas[0], betas[1]), eps, weight_decay
        self.schedule_config = (
            ScheduleConfig(**schedule) if isinstance(schedule, dict) else schedule or ScheduleConfig()
        )
        self.should_compile = compile
        # Plain numbers and words only: checkpoints are read with weights_only=True.
        self.save_hyperparameters(
            {
                "config": asdict(self.config),
                "eot_id": eot_id,
                "lr": lr,
                "betas": list(self.betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "schedule": asdict(self.schedule_config),
                "compile": compile,
            },
            logger=False,
        )
        self.num_matmul_params = flops.num_matmul_params(self.config)
        self.flops_per_token = flops.flops_per_token(self.config)
        self.recomputed_flops_per_token = flops.recomputed_flops_per_token(self.config)
        if init_device == "meta":
            with torch.device("meta"):
                self.model = GPT(self.config)
        else:
            self.model = GPT(self.config)
        self.val_metric, self.test_metric = TokenLoss(), TokenLoss()
        self.schedule: Schedule | None = None
        self.updates, self.tokens = 0, 0  # that happened / trained on, over the life of the run
        self.updates_at_start = 0  # of this process
        self.rates_change_at: int | None = (
            None  # `global_step` of the first update with another rate than the checkpoint's run
        )
        self.validated_at = -1  # updates that the last validated weights had seen
        self._update_happened = False
        self._rate_used = 0.0
        self._last_global_step = 0
        self._not_logged: dict[str, Any] | None = None  # metrics of an update that is counted
        self._window: list[Tensor] = []  # [loss sum, tokens] per micro-batch, only without TokenWeightedLoss
        self._has_weigher = False

    # ------------------------------------------------------------------ network

    def setup(self, stage: str) -> None:
        """Check that the data fits the network, before anything is computed.

        Raises:
            ValueError: tokens or rows of the datamodule that the network does not have room for.
        """
        data = getattr(self.trainer, "datamodule", None)
        for name, what in (("vocab_size", "tokens"), ("context_length", "tokens per row")):
            theirs, ours = getattr(data, name, None), getattr(self.config, name)
            if theirs is not None and theirs > ours:
                raise ValueError(
                    f"the data has {theirs} {what}, the model's {name} is {ours}: build LitGPT with {name}={theirs} "
                    f"(the command line links it), or prepare data with fewer"
                )

    def configure_model(self) -> None:
        """Shard under FSDP2, materialise a network built on the meta device, compile."""
        if getattr(self, "_is_configured", False):  # Lightning calls this again for validate after fit
            return
        self._is_configured = True
        mesh = self.device_mesh
        is_meta = any(p.is_meta for p in self.model.parameters())
        if mesh is not None:
            shard_fsdp2(self.model, mesh)
        if is_meta:
            self.model.to_empty(device=self.trainer.strategy.root_device)
            self.model.init_weights()
        if self.should_compile:
            self.model.compile()  # in place: no `_orig_mod.` in any key

    def forward(self, inputs: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) for tokens (B, T)."""
        return self.model(inputs, None, segment_ids)

    # ------------------------------------------------------------------ training

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the micro-batch's mean loss with its numerator and denominator (`loss_sum`, `num_tokens`)."""
        loss_sum, num_tokens = self.model(batch["inputs"], batch["targets"], batch.get("segment_ids"))
        if not self._has_weigher:
            self._window.append(torch.stack([loss_sum.detach().double(), num_tokens.double()]))
        return {
            "loss": loss_sum / num_tokens.clamp(min=1),
            "loss_sum": loss_sum.detach(),
            "num_tokens": num_tokens,
        }

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW with the schedule resolved for the run's length."""
        total = self.trainer.max_steps
        self.schedule = self.schedule_config.resolve(total if total > 0 else None)
        # A fused step unscales inside itself, after norms were taken: not with a scaler.
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        optimizer = build_adamw(
            self.model, self.lr, self.betas, self.eps, self.weight_decay, fused=not has_scaler
        )
        optimizer.register_step_post_hook(self._note_update)
        schedule = self.schedule
        # A plain function: LambdaLR would store a callable object's attributes and load the old run's over them.
        scheduler = LambdaLR(optimizer, lambda n: schedule(n))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Take optimizer settings from this run's configuration, also after a restart."""
        names = {type(c).__name__ for c in self.trainer.callbacks}  # type: ignore[attr-defined]
        self._has_weigher = "TokenWeightedLoss" in names
        self._window.clear()
        self._last_global_step = self.trainer.global_step
        optimizer = self.optimizers(use_pl_optimizer=False)
        scheduler = self.lr_schedulers()
        assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(scheduler, LambdaLR)
        # A checkpoint's optimizer state holds the old run's settings. Rates are a closed form of the update index.
        scheduler.last_epoch = self.updates
        scheduler.base_lrs = [self.lr] * len(optimizer.param_groups)
        rate = self.lr * self._rate(self.updates)
        scheduler._last_lr = [rate] * len(optimizer.param_groups)
        for group in optimizer.param_groups:
            group.update(lr=rate, initial_lr=self.lr, betas=self.betas, eps=self.eps)
            if group["weight_decay"] != 0.0:
                group["weight_decay"] = self.weight_decay

    def _rate(self, update: int) -> float:
        assert self.schedule is not None
        return self.schedule(update)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the rate that this update uses."""
        self._update_happened = False
        self._rate_used = optimizer.param_groups[0]["lr"]

    def _note_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Not reached when the scaler skips the step; reached without a gradient when a callback dropped them.
        self._update_happened = any(p.grad is not None for g in optimizer.param_groups for p in g["params"])

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance the schedule, unless the update was skipped."""
        if self._update_happened:
            scheduler.step()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Count and log, at the last micro-batch of an update."""
        self._count_update()
        metrics, self._not_logged = self._not_logged, None
        if metrics is not None:
            self._log(metrics | {"optim/lr": self._rate_used} | self.progress())

    def _count_update(self) -> None:
        # Lightning calls callbacks before the module: one that saves at this update comes here through on_save_checkpoint.
        trainer = self.trainer
        if trainer.global_step == self._last_global_step:
            return
        self._last_global_step = trainer.global_step
        metrics: dict[str, Any] = {} if self._has_weigher else self._own_loss()
        num_tokens = metrics.get("train/tokens", trainer.callback_metrics.get("train/tokens", 0))
        if self._update_happened:
            self.updates += 1
            self.tokens += int(num_tokens)
        self._not_logged = metrics
        trainer.callback_metrics.update({k: torch.as_tensor(v) for k, v in self.progress().items()})

    def progress(self) -> dict[str, Any]:
        """Return `progress/*`: updates and tokens of this run, samples and epoch of its data where those know their position."""
        progress: dict[str, Any] = {"progress/update": self.updates, "progress/tokens": self.tokens}
        data = getattr(self.trainer, "datamodule", None)
        if self.updates and not getattr(
            data, "samples_consumed", 1
        ):  # evaluation alone restores no data position
            return progress
        for key, name in (("progress/samples", "samples_consumed"), ("progress/epoch", "epoch")):
            if (value := getattr(data, name, None)) is not None:
                progress[key] = value
        return progress

    def _own_loss(self) -> dict[str, Any]:
        total = torch.stack(self._window).sum(0)
        self._window.clear()
        total = self.trainer.strategy.reduce(total, reduce_op="sum")
        loss_sum, num_tokens = float(total[0]), int(total[1])
        metrics: dict[str, Any] = {"train/loss_sum": loss_sum, "train/tokens": num_tokens}
        if num_tokens:
            metrics["train/loss"] = loss_sum / num_tokens
        return metrics

    def _log(self, metrics: dict[str, Any]) -> None:
        # Straight to the loggers: `self.log` costs 280 us for each key (measured), this 1 us.
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)
        self.trainer.callback_metrics.update({k: torch.as_tensor(v) for k, v in metrics.items()})

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the validation loss."""
        self.val_metric.update(*self.model(batch["inputs"], batch["targets"], batch.get("segment_ids")))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the test loss."""
        self.test_metric.update(*self.model(batch["inputs"], batch["targets"], batch.get("segment_ids")))

    def on_validation_epoch_end(self) -> None:
        """Log `val/*`."""
        self.validated_at = self.updates
        self._log_evaluation("val", self.val_metric)

    def on_test_epoch_end(self) -> None:
        """Log `test/*`."""
        self._log_evaluation("test", self.test_metric)

    def _log_evaluation(self, prefix: str, metric: TokenLoss) -> None:
        values = metric.compute()
        metric.reset()
        data = getattr(self.trainer, "datamodule", None)
        bytes_per_token = getattr(data, f"{prefix}_bytes_per_token", None)
        evaluation = getattr(data, f"{prefix}_evaluation", None)
        if "loss" in values and bytes_per_token:
            if evaluation is None or evaluation.tokens == values["tokens"]:
                values["bits_per_byte"] = values["loss"] / math.log(2) / bytes_per_token
            elif not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
                rank_zero_warn(
                    f"{prefix}/bits_per_byte is left out: {values['tokens']} of the set's {evaluation.tokens} tokens were "
                    f"evaluated, and the bytes behind them are not known. Use data.limit_{prefix}_blocks instead of "
                    f"trainer.limit_{prefix}_batches."
                )
        metrics = {f"{prefix}/{key}": value for key, value in values.items()} | self.progress()
        # float64 tensors: Lightning turns plain numbers into fp32, which cannot count tokens past 2^24.
        self.log_dict({key: torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()})

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return each sequence's `loss_sum` (nats), `num_tokens` and `sample_ids`, all (B,)."""
        logits = self.model(batch["inputs"], None, batch.get("segment_ids"))
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="none"
        )
        return {
            "loss_sum": losses.view_as(batch["targets"]).sum(1),
            "num_tokens": (batch["targets"] != -100).sum(1),
            "sample_ids": batch["sample_ids"],
        }

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what this run has done, and the schedule that it followed."""
        if self.trainer.training:
            self._count_update()
        checkpoint["lit_gpt"] = {
            "updates": self.updates,
            "tokens": self.tokens,
            "schedule": asdict(self.schedule) if self.schedule is not None else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the counts over; refuse a schedule that would have given other rates so far; say what else differs.

        Raises:
            ValueError: the checkpoint holds a model of another shape, or the schedule of this run disagrees with a rate that
                the checkpoint's run has used already.
        """
        state = checkpoint.get("lit_gpt")
        if state is None:
            return
        self.updates, self.tokens = state["updates"], state["tokens"]
        self.updates_at_start = self.updates
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        old, new = checkpoint.get("hyper_parameters", {}), dict(self.hparams)
        check_architecture(old.get("config", {}), new["config"])
        for line in differences(old, new):
            rank_zero_info(f"Resuming with another setting, this run's wins: {line}")
        if state["schedule"] is not None:
            total = self.trainer.max_steps
            change = check_schedule(
                Schedule(**state["schedule"]),
                self.schedule_config.resolve(total if total > 0 else None),
                self.updates,
                Path(str(self.trainer.ckpt_path)) if self.trainer.ckpt_path else None,
            )
            step = int(checkpoint.get("global_step", self.updates))
            self.rates_change_at = None if change is None else change - self.updates + step


def _resolve(
    config: GPTConfig | dict[str, Any] | str, overrides: dict[str, Any], linked: dict[str, Any]
) -> GPTConfig:
    for name in overrides.keys() & linked.keys():
        if overrides[name] != linked[name]:
            raise ValueError(
                f"overrides say {name}={overrides[name]}, but the module is given {name}={linked[name]}: it has one value; on the "
                f"command line set data.{name}, from which the model's is linked"
            )
    if isinstance(config, str):
        return GPTConfig.preset(config, **(overrides | linked))
    if isinstance(config, dict):
        config = GPTConfig(**config)
    known = {f.name for f in fields(config)}
    if unknown := sorted(overrides.keys() - known):
        raise ValueError(f"overrides {unknown} are no fields of GPTConfig: use {sorted(known)}")
    return replace(config, **(overrides | linked))
