"""The command line of a run: LightningCLI with a run directory, linked values and batches that users think in (layer L).

What it adds to LightningCLI, and why:

- **Linked values.** Vocabulary, context length and end token stand once, in `data`, and reach the model from there.
- **Updates.** `trainer.max_steps`, `trainer.val_check_interval` and every callback's interval count updates. Lightning counts
  validation intervals in micro-batches; they are converted once the accumulation is known. `--max_tokens` is a budget in
  tokens instead.
- **Run directory.** `runs/NAME` with config.yaml (config-2.yaml ... when run again), journal.jsonl, checkpoints/, wandb/. One
  process trains there at a time. A configuration is written once training starts, so one that was refused leaves none; every
  checkpoint names the one that trained it (`run_config`).
- **Restarts.** `--ckpt_path auto` (also the default of fit) means the run's latest checkpoint if there is one, else the one of
  another run that it began from (`run_origin`); config.yaml names none. A checkpoint's hyper-parameters never override the
  configuration: LightningCLI's own merge is switched off, LitGPT prints what differs.
- **Strategies by name.** "auto", "ddp", "fsdp" and "fsdp2" mean ours (`lit_gpt_loop.strategies`).
- **Precision.** Not given means bf16 where the hardware is fast at it, chosen with one printed line.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_gpt_loop.branch import Branch, read_branch
from lit_gpt_loop.budget import updates_for_tokens
from lit_gpt_loop.checkpoint_files import open_checkpoint
from lit_gpt_loop.data import TextDataModule
from lit_gpt_loop.journal import JournalLogger, RunWandbLogger
from lit_gpt_loop.module import LitGPT
from lit_gpt_loop.next_steps import after_the_end, next_commands
from lit_gpt_loop.progress import UpdateProgressBar
from lit_gpt_loop.resume import check_architecture, check_schedule
from lit_gpt_loop.run_files import KeepConfig, KeepTokenizer, WritePredictions, config_files
from lit_gpt_loop.run_lock import run_lock
from lit_gpt_loop.run_origin import (
    check_branch,
    find_start,
    group_of,
    later_steps,
    lineage_of,
    write_origin,
)
from lit_gpt_loop.schedules import Schedule, summarize
from lit_gpt_loop.strategies import DDP, FSDP, FSDP2, OneDevice

# A checkpoint that the user names -> what Trainer takes; None when the run has none yet and "auto" was asked.
# Arguments: its name, the folder of checkpoints, the URL of their copies.
Resolve = Callable[[str, Path, str | None], Path | None]

TRAINER_DEFAULTS: dict[str, Any] = {
    "log_every_n_steps": 1,  # one line per update; callbacks that cost something have their own interval
    "check_val_every_n_epoch": None,  # val_check_interval counts over the whole run, not within an epoch
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # the data module shares samples out itself
    "gradient_clip_val": None,
}


class PretrainCLI(LightningCLI):
    """See the module docstring. Built and run by `recipes.pretrain`."""

    branch: Branch | None = None  # that this command trains (recipes.cooldown)
    _begins = False  # without a checkpoint of its own
    _origin: Path | None = None  # then: the checkpoint of another run that it begins from
    _lineage: dict[str, Any] | None = None  # what W&B is told of where the run comes from

    def __init__(
        self, resolve: Resolve, default_callbacks: Callable[[], list[pl.Callback]] = list, **kwargs: Any
    ) -> None:
        self._resolve, self._default_callbacks = resolve, default_callbacks
        super().__init__(
            LitGPT,
            TextDataModule,
            save_config_callback=None,  # aborts the second run into a directory; see _write_config
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=1234,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            **kwargs,
        )

    # ------------------------------------------------------------------ arguments

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name, the token budget and the links between data and model."""
        parser.add_argument(
            "--run", type=str | None, default=None, help="Name of the run; default: the config file's."
        )
        parser.add_argument("--runs_dir", type=str, default="runs", help="Where run directories stand.")
        parser.add_argument(
            "--max_tokens",
            type=int | None,
            default=None,
            help="Budget in tokens, instead of trainer.max_steps.",
        )
        parser.link_arguments("data.context_length", "model.context_length")
        parser.link_arguments("data.in_document_attention", "model.in_document_attention")
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")
        parser.link_arguments("data.eot_id", "model.eot_id", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        # Private in Lightning, switched off for a promise: it lets hyper-parameters of the checkpoint override the command
        # line. tests/recipes/test_pretrain.py (C46) notices if Lightning renames it.
        return

    def before_instantiate_classes(self) -> None:
        """Settle the run directory, the precision and the budget, before anything is built."""
        config = self.config[self.subcommand]
        name = config.run or _stem(config) or "default"
        check_run_name(name)
        config.run = name
        self.run_dir = Path(config.trainer.default_root_dir or Path(config.runs_dir) / name)
        if config.trainer.precision is None and not config.trainer.plugins:
            config.trainer.precision, why = choose_precision(config.trainer.accelerator)
            rank_zero_info(f"precision: {config.trainer.precision} ({why})")
        if config.max_tokens is not None and config.trainer.max_steps not in (-1, None):
            raise ValueError(
                f"both --max_tokens={config.max_tokens} and trainer.max_steps={config.trainer.max_steps} are given: "
                "a run has one budget; take the other one back with --trainer.max_steps -1 or --max_tokens null"
            )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the Trainer with our loggers, strategy and bar where the configuration names none."""
        config = self.config[self.subcommand]
        trainer = config.trainer
        if self.subcommand != "fit":
            kwargs["logger"] = False  # the journal and W&B tell of training
        elif trainer.logger is None or trainer.logger is True:
            kwargs["logger"] = [JournalLogger(self.run_dir), RunWandbLogger(self.run_dir)]
        if isinstance(trainer.strategy, str):
            kwargs["strategy"] = _strategy(trainer)
        if config.max_tokens is not None:
            kwargs["max_steps"] = self._steps_for(config.max_tokens)
            trainer.max_steps = kwargs["max_steps"]
        callbacks = self._get(self.config_init, "trainer")["callbacks"]
        if callbacks is None:
            callbacks = self._default_callbacks()
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if (
            not any(isinstance(c, ProgressBar) for c in callbacks)
            and trainer.enable_progress_bar is not False
        ):
            callbacks = [*callbacks, UpdateProgressBar()]
        if self.subcommand == "fit":
            callbacks = [*callbacks, KeepTokenizer(), KeepConfig(self._write_config)]
        if self.subcommand == "predict":
            callbacks = [*callbacks, WritePredictions("batch")]
        kwargs["callbacks"] = callbacks
        kwargs["default_root_dir"] = str(self.run_dir)
        if trainer.enable_checkpointing is None:  # Lightning would add a ModelCheckpoint of its own
            kwargs["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in callbacks)
        return super().instantiate_trainer(**kwargs)

    def _batch(self, world_size: int) -> tuple[int, int]:
        """Return (micro-batches per update and device, sequences per update)."""
        data = self.datamodule
        if data.global_batch_size is None:
            accumulate = self.config[self.subcommand].trainer.accumulate_grad_batches
        else:
            accumulate = data.accumulation(world_size)
        return accumulate, accumulate * data.micro_batch_size * world_size

    def _steps_for(self, max_tokens: int) -> int:
        trainer = self.config[self.subcommand].trainer
        _, sequences = self._batch(_num_devices(trainer) * trainer.num_nodes)
        return updates_for_tokens(max_tokens, sequences * self.datamodule.context_length)

    # ------------------------------------------------------------------ subcommands

    def fit(self, model: LitGPT, datamodule: TextDataModule, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Train from the given checkpoint, by default from the run's latest."""
        trainer = self.trainer
        if trainer.max_steps <= 0 and self.config[self.subcommand].trainer.max_time is None:
            raise ValueError("the run has no end: set trainer.max_steps, --max_tokens or trainer.max_time")
        # Fails here, before data is read, if phases overlap.
        total = trainer.max_steps if trainer.max_steps > 0 else None
        schedule = model.schedule_config.resolve(total)
        with run_lock(self.run_dir) if trainer.is_global_zero else nullcontext():
            self._train(model, datamodule, ckpt_path, schedule)

    def _train(self, model: LitGPT, datamodule: TextDataModule, ckpt_path: Any, schedule: Schedule) -> None:
        trainer = self.trainer
        total = trainer.max_steps if trainer.max_steps > 0 else None
        branch = self.branch or read_branch(self.run_dir)
        if branch is not None:
            check_branch(branch, self.run_dir, schedule, total)
        path, self._begins = find_start(
            str(ckpt_path or "auto"), self.run_dir, self._folder, self._checkpoint, branch, bool(self.branch)
        )
        if path is not None and (later := later_steps(path, self._folder)):
            rank_zero_warn(
                f"--ckpt_path {ckpt_path} goes back in this run: its checkpoints of updates {', '.join(map(str, later))} are of what was "
                "trained after that and stay until they are saved again or pruned. The same command will go back again. To continue, "
                "leave --ckpt_path out; to keep both, give another --run."
            )
        self._origin = path
        self._lineage = (
            asdict(branch) if branch else lineage_of(path, self.run_dir, self._folder) if path else None
        )
        for logger in trainer.loggers:
            if isinstance(logger, RunWandbLogger):
                logger.join(branch.group if branch else group_of(self.run_dir.name, self._lineage))
        if path is not None:
            # Here as well as in LitGPT: strategies read tensors, and W&B begins a run, before the module sees the checkpoint.
            _, rest = open_checkpoint(path)
            check_architecture(rest.get("hyper_parameters", {}).get("config", {}), model.hparams["config"])
            state = rest.get("lit_gpt") or {}
            if state.get("schedule") is not None:
                check_schedule(Schedule(**state["schedule"]), schedule, state["updates"], path)
        accumulate, sequences = self._batch(trainer.world_size)
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval *= accumulate  # Lightning counts micro-batches
        if not trainer.checkpoint_callbacks:
            rank_zero_warn(
                "No callback of this run saves checkpoints: its weights will be lost at the end. Add callbacks.CheckpointRetention "
                "to trainer.callbacks, or leave trainer.callbacks out for the default ones."
            )
        rank_zero_info(f"run: {self.run_dir}" + (f", continuing from {path}" if path else ""))
        rank_zero_info(
            f"batch: {sequences} sequences x {datamodule.context_length} tokens = "
            f"{sequences * datamodule.context_length:,} tokens per update ({accumulate} micro-batches of "
            f"{datamodule.micro_batch_size} on each of {trainer.world_size} devices)"
        )
        rank_zero_info(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")
        if total:
            rank_zero_info(f"schedule: {schedule.kind}, {summarize(schedule)}")
        trainer.fit(model, datamodule=datamodule, ckpt_path=path, weights_only=True)
        if total and trainer.global_step == model.updates_at_start == total:
            rank_zero_info(
                f"The run was complete at {total} updates: nothing was trained. {after_the_end(schedule, branch, self.run_dir)}"
            )

    def after_fit(self) -> None:
        """Validate the final weights if the last update was not validated, and say what to do next."""
        trainer = self.trainer
        if trainer.interrupted:
            return
        metrics = trainer.callback_metrics
        if self.model.validated_at != self.model.updates:
            trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
            metrics = trainer.callback_metrics
        self._report({k: float(v) for k, v in metrics.items() if k.startswith("val/")})

    @rank_zero_only
    def _report(self, val: dict[str, float]) -> None:
        parts = [
            f"{label} {val[key]:.4g}{unit}"
            for key, label, unit in (
                ("val/loss", "validation loss", " nats/token"),
                ("val/ppl", "perplexity", ""),
                ("val/bits_per_byte", "bits per byte", ""),
            )
            if key in val
        ]
        print(f"\nupdate {self.model.updates:,}, {self.model.tokens:,} tokens: " + ", ".join(parts))
        files = sorted(p.name + "/" * p.is_dir() for p in self.run_dir.glob("[!.]*"))
        print(f"run directory: {self.run_dir}  ({', '.join(files)})")
        if not (self.run_dir / "checkpoints").is_dir():
            return
        print("next:")
        budget = "--trainer.max_steps" if self.config[self.subcommand].max_tokens is None else "--max_tokens"
        newest = config_files(self.run_dir)[0]
        for command in next_commands(self.run_dir, newest, self.model.schedule, self.model.updates, budget):
            print(f"  {command}")

    def _evaluate(
        self, verb: str, model: LitGPT, datamodule: TextDataModule, ckpt_path: Any, **kwargs: Any
    ) -> Any:
        path = self._checkpoint(ckpt_path or "auto")
        if path is None:
            raise ValueError(
                f"{verb} found no checkpoint in {self.run_dir}: train first, name another --run, or give --ckpt_path PATH"
            )
        rank_zero_info(f"checkpoint: {path}")
        return getattr(self.trainer, verb)(
            model, datamodule=datamodule, ckpt_path=path, weights_only=True, **kwargs
        )

    def validate(
        self, model: LitGPT, datamodule: TextDataModule, ckpt_path: Any = None, **kwargs: Any
    ) -> Any:
        """Evaluate a checkpoint (default: the run's latest) on the validation set."""
        return self._evaluate("validate", model, datamodule, ckpt_path, verbose=kwargs.get("verbose", True))

    def test(self, model: LitGPT, datamodule: TextDataModule, ckpt_path: Any = None, **kwargs: Any) -> Any:
        """Evaluate a checkpoint (default: the run's latest) on the test set."""
        if datamodule.spec.test_fraction == 0:
            rank_zero_info("data.test_fraction is 0: the test set is the validation set")
        return self._evaluate("test", model, datamodule, ckpt_path, verbose=kwargs.get("verbose", True))

    def predict(self, model: LitGPT, datamodule: TextDataModule, ckpt_path: Any = None, **kwargs: Any) -> Any:
        """Score sequences with a checkpoint (default: the run's latest)."""
        return self._evaluate("predict", model, datamodule, ckpt_path, return_predictions=False)

    def _checkpoint(self, spec: Any) -> Path | None:
        if str(spec).lower() == "none":
            return None
        saver = next(iter(self.trainer.checkpoint_callbacks), None)
        return self._resolve(str(spec), self._folder, getattr(saver, "copy_to", None))

    @property
    def _folder(self) -> Path:
        """Where CheckpointRetention was told to save, if it was."""
        saver = next(iter(self.trainer.checkpoint_callbacks), None)
        return Path(getattr(saver, "dirpath", None) or self.run_dir / "checkpoints")

    def _write_config(self) -> dict[str, Any]:
        """Write what this command ran with, linked values included, beside what earlier commands ran with.

        It names no checkpoint: run again, it continues the run. A budget in tokens stays one, so that it can be raised.

        Returns:
            What checkpoints say about it: the file's name, its SHA-256, and the global batch in sequences.
        """
        config = self.config[self.subcommand].clone()
        config.pop("config", None)
        config.ckpt_path = None
        if config.max_tokens is not None:
            config.trainer.max_steps = -1  # as given; the updates that it pays for would be a second budget
        for key in ("vocab_size", "eot_id"):  # linked at instantiation; parsing left them null
            config.model[key] = getattr(self.datamodule, key)
        text = self._parser(self.subcommand).dump(config, skip_unset=False, skip_link_targets=False)
        path = config_files(self.run_dir)[1]
        if self.trainer.is_global_zero:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if self._begins and self.branch is None:
                write_origin(self.run_dir, self._origin)
        for logger in self.trainer.loggers:  # now that training starts: a refused command leaves no W&B run
            if isinstance(logger, WandbLogger) and self._lineage is not None:
                logger.log_hyperparams({"lineage": self._lineage})
        return {
            "file": path.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "sequences_per_update": self._batch(self.trainer.world_size)[1],
        }


def check_run_name(name: str) -> None:
    """Refuse a run's name that is no directory's.

    Raises:
        ValueError: it holds other characters, or dots alone.
    """
    if not re.fullmatch(r"[\w.+-]+", name) or not name.strip("."):
        raise ValueError(f"run name {name!r} may hold letters, digits and . + - _ only: it names a directory")


def choose_precision(accelerator: Any) -> tuple[str, str]:
    """Return (precision, reason): bf16 where matrix units have it, else fp32; the same on every start of a machine."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed", f"{torch.cuda.get_device_name()} has bf16 units"
        return "32-true", f"{torch.cuda.get_device_name()} has no bf16 units"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    for flag in ("amx_bf16", "avx512_bf16"):
        if re.search(rf"\b{flag}\b", flags):
            return "bf16-mixed", f"this CPU multiplies bf16 in hardware: {flag}"
    return "32-true", "no bf16 instructions found on this CPU"


def _stem(config: Any) -> str | None:
    files = config.get("config") or []
    return Path(str(files[-1])).stem if files else None


def _strategy(trainer: Any) -> Any:
    """Return our strategy for a name; names that we do not have go to Lightning as they are."""
    name = trainer.strategy
    if name == "auto":
        name = "one_device" if _num_devices(trainer) * trainer.num_nodes == 1 else "ddp"
    ours = {"one_device": OneDevice, "ddp": DDP, "fsdp": FSDP, "fsdp2": FSDP2}
    return ours[name]() if name in ours else name


def _num_devices(trainer: Any) -> int:
    has_gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    devices = trainer.devices
    if isinstance(devices, list):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        return torch.cuda.device_count() if has_gpu else 1
    if isinstance(devices, str) and "," in devices:
        return len([d for d in devices.split(",") if d.strip()])
    return int(devices)
