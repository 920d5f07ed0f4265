"""From a run's YAML to the question that `run_plan.py` answers, without importing torch (layer L by what it knows).

Defaults and the names of arguments are those of the constructors, read from their source (`signatures.py`). What the
configuration says and the plan does not model is refused where it would change the numbers much, else noted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.devices import Device
from lit_gpt_loop.memory import Strategy
from lit_gpt_loop.plan_data import describe_data
from lit_gpt_loop.plan_values import (
    constructor_values,
    field_names,
    field_types,
    known_fields,
    typed_fields,
    whole_number,
)
from lit_gpt_loop.run_spec import Retention, RunSpec
from lit_gpt_loop.schedules import ScheduleConfig
from lit_gpt_loop.signatures import constant, trainer_arguments

ROOT = Path(__file__).resolve().parent.parent
DATA, MODULE = ROOT / "lit_gpt_loop" / "data.py", ROOT / "lit_gpt_loop" / "module.py"
RETENTION, MFU = ROOT / "callbacks" / "checkpoint_retention.py", ROOT / "callbacks" / "mfu.py"
# What a configuration of `recipes.pretrain fit` holds.
SECTIONS = (
    "trainer", "model", "data", "run", "runs_dir", "max_tokens", "seed_everything", "ckpt_path", "weights_only", "config",
)  # fmt: skip
DEFAULT_NODE = 8  # devices of a node, where the configuration has one device and so says nothing of nodes


def peak_flops_table() -> dict[str, dict[str, float]]:
    """Return `callbacks.mfu.PEAK_FLOPS`."""
    return dict(constant(MFU, "PEAK_FLOPS"))


def matmul_dtype(precision: str) -> str:
    """Return in which type matmuls run: "bf16", "fp16" or "fp32"."""
    return {"bf16": "bf16", "16": "fp16"}.get(precision.split("-")[0], "fp32")


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over`, nested ones too; a dict with `class_path` replaces as a whole.

    A key that ends in + appends to a list (`--trainer.callbacks+=...`).
    """
    merged = dict(base)
    for key, value in over.items():
        if key.endswith("+"):
            added, old = value if isinstance(value, list) else [value], merged.get(key[:-1])
            merged[key[:-1]] = [*(old if isinstance(old, list) else [] if old is None else [old]), *added]
            continue
        old = merged.get(key)
        is_nested = isinstance(value, Mapping) and isinstance(old, Mapping) and "class_path" not in value
        merged[key] = merge(dict(old), value) if is_nested and old is not None else value
    return merged


def read_run_spec(
    config: Mapping[str, Any],
    name: str,
    notes: list[str],
    num_devices: int | None = None,
    devices_per_node: int | None = None,
    device: Device | None = None,
    **settings: Any,
) -> RunSpec:
    """Return what a configuration of `recipes.pretrain` asks for.

    Args:
        config: the YAML's content.
        name: the run's, if the configuration names none.
        notes: gets a line for each thing that had to be assumed.
        num_devices: all devices, instead of the configuration's.
        devices_per_node: instead of the configuration's `trainer.devices`.
        device: what it would run on.
        **settings: further fields of `RunSpec`.

    Raises:
        ValueError: an unknown preset, strategy or argument, a strategy that the plan does not model, a shape that is
            impossible; see each message.
    """
    known_fields(config, SECTIONS, "the configuration")
    trainer = known_fields(config.get("trainer") or {}, trainer_arguments(), "trainer")
    data = constructor_values(config.get("data") or {}, DATA, "TextDataModule", "data")
    model = constructor_values(config.get("model") or {}, MODULE, "LitGPT", "model")
    for field in ("context_length", "micro_batch_size", "global_batch_size", "global_batch_tokens"):
        whole_number(data, field, "data.")
    facts = describe_data(data, notes)
    vocab_size = facts.vocab_size
    if facts.epoch_tokens is None and "corpus_tokens" not in settings:
        notes.append(
            "epochs: unknown until the corpus is prepared (`python -m recipes.prepare`), or give --corpus_tokens"
        )
    overrides = dict(model["overrides"] or {}) | {
        "context_length": data["context_length"],
        "in_document_attention": data["in_document_attention"],
    }
    if vocab_size is not None:
        overrides["vocab_size"] = vocab_size
    shape = _shape(model["config"], overrides)
    if isinstance(model["config"], str):
        _note_preset(model["config"], shape, notes)
    if vocab_size is None:
        notes.append(
            f"vocabulary: {shape.vocab_size}, the model's own (the tokenizer's is not known before `recipes.prepare`)"
        )
    num_devices, devices_per_node = _devices(trainer, num_devices, devices_per_node, notes)
    strategy, strategy_args = _strategy(trainer.get("strategy") or "auto", num_devices, notes)
    if model["compile"]:
        notes.append(
            "memory: counted in eager mode; model.compile fuses operations, which keeps other (usually fewer) tensors"
        )
    precision = trainer.get("precision")
    if precision is None:
        precision = "bf16-mixed"
        notes.append("precision: bf16-mixed (the run picks bf16 where the hardware is fast at it)")
    global_batch = data["global_batch_size"]
    if global_batch is not None and data["global_batch_tokens"] is not None:
        raise ValueError(
            f"data.global_batch_size {global_batch} and data.global_batch_tokens {data['global_batch_tokens']}: give one of them"
        )
    if data["global_batch_tokens"] is not None:
        global_batch, rest = divmod(data["global_batch_tokens"], data["context_length"])
        if rest or not global_batch:
            raise ValueError(
                f"data.global_batch_tokens={data['global_batch_tokens']} is no multiple of data.context_length="
                f"{data['context_length']}: use {max(1, round(data['global_batch_tokens'] / data['context_length'])) * data['context_length']}"
            )
    schedule = known_fields(model["schedule"] or {}, field_names(ScheduleConfig), "model.schedule")
    return RunSpec(
        name=str(config.get("run") or name),
        config=shape,
        micro_batch=data["micro_batch_size"],
        global_batch=global_batch,
        accumulation=whole_number(trainer, "accumulate_grad_batches", "trainer.") or 1,
        max_steps=_max_steps(trainer),
        max_tokens=whole_number(config, "max_tokens", "--"),
        schedule=ScheduleConfig(**typed_fields(schedule, field_types(ScheduleConfig), "model.schedule")),
        strategy=strategy,
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        precision=str(precision),
        syncs_every_micro_batch=bool(strategy_args.get("sync_every_micro_batch", False)),
        gathers_low=strategy_args.get("param_dtype") in ("bf16", "fp16"),
        keeps_gathered=_sharding(strategy_args) in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"),
        device=device,
        device_type=_device_type(trainer, device),
        retention=_retention(trainer.get("callbacks"), trainer.get("val_check_interval")),
        **{"corpus_tokens": facts.epoch_tokens, "is_corpus_estimated": facts.is_estimate, **settings},
    )


def _shape(config: Any, overrides: dict[str, Any]) -> GPTConfig:
    if isinstance(config, str):
        return GPTConfig.preset(config, **overrides)
    return GPTConfig(**known_fields({**(config or {}), **overrides}, field_names(GPTConfig), "model.config"))


def _note_preset(name: str, shape: GPTConfig, notes: list[str]) -> None:
    """Say which sizes of a preset the data replaces."""
    preset = GPTConfig.preset(name)
    for field, label, decides in (
        ("vocab_size", "vocabulary", "the tokenizer's"),
        ("context_length", "context", "data.context_length"),
    ):
        own, used = getattr(preset, field), getattr(shape, field)
        if own != used:
            notes.append(f"{label}: {used:,} ({decides}), not the {own:,} of the preset {name}")


def _max_steps(trainer: Mapping[str, Any]) -> int | None:
    """Return the run's end in updates, None for -1 or none given."""
    value = trainer.get("max_steps", -1)
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"trainer.max_steps {'null' if value is None else repr(value)} must be a whole number of at least 1, or -1 where "
            "--max_tokens is the budget"
        )
    return value


def _devices(
    trainer: Mapping[str, Any], num_devices: int | None, devices_per_node: int | None, notes: list[str]
) -> tuple[int, int]:
    """Return (all devices, devices per node); what is given goes before the configuration."""
    devices = trainer.get("devices")
    devices = "auto" if devices is None else devices
    if isinstance(devices, str) and "," in devices:
        devices = [d for d in devices.split(",") if d.strip()]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        devices = len(devices)
    is_auto = devices in ("auto", -1, "-1")
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    per_node = 1 if is_auto else whole_number({"devices": devices}, "devices", "trainer.") or 1
    num_nodes = whole_number(trainer, "num_nodes", "trainer.") or 1
    if num_devices is None:
        num_devices = per_node * num_nodes
        if is_auto:
            notes.append(
                "devices: 1 per node (trainer.devices says auto; --devices N plans for another number)"
            )
    if devices_per_node is None:
        devices_per_node = per_node if per_node * num_nodes > 1 else DEFAULT_NODE
        if num_devices > max(devices_per_node, per_node * num_nodes):
            notes.append(f"nodes: of {devices_per_node} devices; --gpus_per_node N plans for others")
    return num_devices, devices_per_node


def _device_type(trainer: Mapping[str, Any], device: Device | None) -> Literal["cuda", "cpu"]:
    """Return whose kernels will run: what is planned for, what is configured, else what this machine has."""
    if device is not None:
        return "cuda"
    accelerator = str(trainer.get("accelerator") or "auto")
    if accelerator in ("gpu", "cuda"):
        return "cuda"
    has_gpu = any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/kfd"))
    return "cuda" if accelerator == "auto" and has_gpu else "cpu"


_STRATEGIES: dict[str, Strategy] = {
    "one_device": "single",
    "onedevice": "single",
    "singledevicestrategy": "single",
    "ddp": "ddp",
    "ddpstrategy": "ddp",
    "fsdp": "fsdp",
    "fsdpstrategy": "fsdp",
    "fsdp2": "fsdp2",
    "modelparallelstrategy": "fsdp2",
}


# Arguments of strategies that leave memory as it is.
_WITHOUT_EFFECT = {
    "timeout_s", "timeout", "find_unused_parameters", "static_graph", "bucket_cap_mb", "process_group_backend", "start_method",
    "state_dict_type", "save_distributed_checkpoint", "accelerator", "cluster_environment", "checkpoint_io",
}  # fmt: skip
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _sharding(args: Mapping[str, Any]) -> str:
    """Return FSDP1's sharding strategy."""
    return str(args.get("sharding_strategy") or "FULL_SHARD").rsplit(".", 1)[-1].upper()


def _strategy(value: Any, num_devices: int, notes: list[str]) -> tuple[Strategy, dict[str, Any]]:
    """Return the strategy and its arguments; one device needs none, several need one that spreads."""
    args: dict[str, Any] = {}
    if isinstance(value, Mapping):
        if "class_path" not in value:
            raise ValueError(f"trainer.strategy {dict(value)} names no class: give class_path and init_args")
        args, value = dict(value.get("init_args") or {}), value["class_path"]
    word = str(value).split(".")[-1].lower()
    if word != "auto" and word not in _STRATEGIES:
        raise ValueError(
            f"no memory model for strategy {value!r}: plan with one of one_device, ddp, fsdp, fsdp2"
        )
    strategy: Strategy = _STRATEGIES.get(word, "ddp")
    _check_strategy_args(strategy, args, notes)
    if num_devices == 1:
        return "single", args
    if strategy == "fsdp" and "HYBRID" in _sharding(args):
        return "hybrid", args
    return ("ddp" if strategy == "single" else strategy), args


def _check_strategy_args(strategy: Strategy, args: Mapping[str, Any], notes: list[str]) -> None:
    """Refuse arguments under which the memory model would be wrong; note those that it does not know."""
    modelled = {"sync_every_micro_batch"}
    plain = f"plan without it: --trainer.strategy {strategy}"
    if strategy == "ddp" and args.get("gradient_as_bucket_view", True) is True:
        modelled.add("gradient_as_bucket_view")
    if strategy == "fsdp":
        modelled |= {"sharding_strategy", "param_dtype", "cpu_offload"}
        if args.get("cpu_offload"):
            raise ValueError(f"no memory model for cpu_offload, which keeps the state on the host: {plain}")
        if _sharding(args) == "NO_SHARD":
            raise ValueError(
                "no memory model for sharding_strategy NO_SHARD, which torch has deprecated: use ddp"
            )
        if _sharding(args) not in _SHARDINGS:
            raise ValueError(
                f"sharding_strategy {args['sharding_strategy']!r} is unknown: use one of {', '.join(_SHARDINGS)}"
            )
    if strategy == "fsdp2":
        modelled.add("tensor_parallel_size")
        if args.get("tensor_parallel_size") not in (None, "auto", 1):
            raise ValueError(
                f"no memory model for tensor_parallel_size={args['tensor_parallel_size']}: {plain}"
            )
    ignored = [k for k, v in args.items() if v is not None and k not in modelled | _WITHOUT_EFFECT]
    if ignored:
        notes.append(f"memory: the strategy's {', '.join(ignored)} is not in the memory model")


def _retention(callbacks: Any, val_check_interval: Any) -> Retention | None:
    """Return what CheckpointRetention keeps; None where the callbacks are named and it is not among them."""
    if (
        callbacks is None
    ):  # recipes.pretrain.default_callbacks: CheckpointRetention() and RestartEquivalence()
        callbacks = ["CheckpointRetention", "RestartEquivalence"]
    found: dict[str, dict[str, Any]] = {}
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = callback.get("class_path", "") if isinstance(callback, Mapping) else str(callback)
        args = dict(callback.get("init_args") or {}) if isinstance(callback, Mapping) else {}
        found[path.split(".")[-1]] = args
    if "CheckpointRetention" not in found:
        return None
    name = "CheckpointRetention"
    values = constructor_values(found[name], RETENTION, name, name)
    for field, least in (("every_n_steps", 1), ("keep_latest", 1), ("keep_best", 0)):
        whole_number(values, field, f"{name}.", least)
    archive = values["archive_every_n_steps"]
    for step in archive if isinstance(archive, list) else [archive]:
        whole_number({"archive_every_n_steps": step}, "archive_every_n_steps", f"{name}.")
    if not values["monitor"]:
        values["keep_best"] = 0
    values["keeps_verified"] = "RestartEquivalence" in found
    # The training stream is endless: no interval, or one in epochs, never validates while it trains. Others are in time.
    in_time = isinstance(val_check_interval, str | Mapping)
    values["validates_every"] = (
        None if in_time else val_check_interval if isinstance(val_check_interval, int) else 0
    )
    return Retention(**{f.name: values[f.name] for f in fields(Retention)})
