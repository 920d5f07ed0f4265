"""From a run's YAML to the question that `run_plan.py` answers, without importing torch (layer L by what it knows).

A default stands in one place, the constructor's signature; `constructor_defaults` reads it there from the source text, since
importing the DataModule or the callback would take longer than the plan may.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.devices import Device
from lit_gpt_loop.memory import Strategy
from lit_gpt_loop.run_plan import Retention, RunSpec
from lit_gpt_loop.schedules import ScheduleConfig

ROOT = Path(__file__).resolve().parent.parent
DATA, MODULE = ROOT / "lit_gpt_loop" / "data.py", ROOT / "lit_gpt_loop" / "module.py"
DEFAULT_TOKENIZER = "bpe:4096"  # TextDataModule's, which its signature does not show; compared in a test
RETENTION, MFU = ROOT / "callbacks" / "checkpoint_retention.py", ROOT / "callbacks" / "mfu.py"


def constructor_defaults(path: Path, class_name: str) -> dict[str, Any]:
    """Return argument -> default of a class' `__init__`, for defaults that are literals.

    Raises:
        ValueError: the file has no such class with an `__init__`.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return _literals(item.args)
    raise ValueError(f"{path} has no class {class_name} with a constructor")


def _literals(arguments: ast.arguments) -> dict[str, Any]:
    plain = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(plain, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = {}
    for argument, default in pairs:
        if default is not None:
            try:
                found[argument.arg] = ast.literal_eval(default)
            except ValueError:
                continue
    return found


def constant(path: Path, name: str) -> Any:
    """Return the value of a module's constant, read from the source.

    Raises:
        ValueError: the file assigns no literal to that name.
    """
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise ValueError(f"{path} has no constant {name}")


def peak_flops_table() -> dict[str, dict[str, float]]:
    """Return `callbacks.mfu.PEAK_FLOPS`."""
    return dict(constant(MFU, "PEAK_FLOPS"))


def matmul_dtype(precision: str) -> str:
    """Return in which type matmuls run: "bf16", "fp16" or "fp32"."""
    return {"bf16": "bf16", "16": "fp16"}.get(precision.split("-")[0], "fp32")


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over`, nested ones too; a dict with `class_path` replaces as a whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_nested = isinstance(value, Mapping) and isinstance(old, Mapping) and "class_path" not in value
        merged[key] = merge(dict(old), value) if is_nested and old is not None else value
    return merged


def read_run_spec(
    config: Mapping[str, Any],
    name: str,
    notes: list[str],
    num_devices: int | None = None,
    device: Device | None = None,
    **settings: Any,
) -> RunSpec:
    """Return what a configuration of `recipes.pretrain` asks for.

    Args:
        config: the YAML's content.
        name: the run's, if the configuration names none.
        notes: gets a line for each thing that had to be assumed.
        num_devices: instead of the configuration's.
        device: what it would run on.
        **settings: further fields of `RunSpec`.

    Raises:
        ValueError: an unknown preset, strategy or field, a shape that is impossible; see each message.
    """
    trainer = dict(config.get("trainer") or {})
    data = constructor_defaults(DATA, "TextDataModule") | dict(config.get("data") or {})
    model = constructor_defaults(MODULE, "LitGPT") | dict(config.get("model") or {})
    vocab_size, corpus_tokens = describe_data(data, notes)
    if corpus_tokens is None and "corpus_tokens" not in settings:
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
    if vocab_size is None:
        notes.append(
            f"vocabulary: {shape.vocab_size}, the model's own (the tokenizer's is not known before `recipes.prepare`)"
        )
    if num_devices is None:
        num_devices = _num_devices(trainer, notes)
    strategy, strategy_args = _strategy(trainer.get("strategy") or "auto", num_devices)
    precision = trainer.get("precision")
    if precision is None:
        precision = "bf16-mixed"
        notes.append("precision: bf16-mixed (the run picks bf16 where the hardware is fast at it)")
    max_steps = trainer.get("max_steps")
    global_batch = data["global_batch_size"]
    if global_batch is None and data["global_batch_tokens"] is not None:
        global_batch, rest = divmod(data["global_batch_tokens"], data["context_length"])
        if rest or not global_batch:
            raise ValueError(
                f"data.global_batch_tokens={data['global_batch_tokens']} is no multiple of data.context_length="
                f"{data['context_length']}: use {max(1, round(data['global_batch_tokens'] / data['context_length'])) * data['context_length']}"
            )
    schedule = model["schedule"] or {}
    return RunSpec(
        name=str(config.get("run") or name),
        config=shape,
        micro_batch=data["micro_batch_size"],
        global_batch=global_batch,
        accumulation=trainer.get("accumulate_grad_batches") or 1,
        max_steps=None if max_steps in (None, -1) else int(max_steps),
        max_tokens=config.get("max_tokens"),
        schedule=ScheduleConfig(**_known(schedule, ScheduleConfig, "model.schedule")),
        strategy=strategy,
        num_devices=num_devices,
        precision=str(precision),
        syncs_every_micro_batch=bool(strategy_args.get("sync_every_micro_batch", False)),
        gathers_low=strategy_args.get("param_dtype") in ("bf16", "fp16"),
        device=device,
        device_type=_device_type(trainer, device),
        retention=_retention(trainer.get("callbacks")),
        **{"corpus_tokens": corpus_tokens, **settings},
    )


def _shape(config: Any, overrides: dict[str, Any]) -> GPTConfig:
    if isinstance(config, str):
        return GPTConfig.preset(config, **overrides)
    return GPTConfig(**_known({**(config or {}), **overrides}, GPTConfig, "model.config"))


def _known(values: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - names):
        raise ValueError(f"{where} has no field {', '.join(unknown)}: use {', '.join(sorted(names))}")
    return dict(values)


def _num_devices(trainer: Mapping[str, Any], notes: list[str]) -> int:
    devices = trainer.get("devices") or "auto"
    if isinstance(devices, str) and "," in devices:
        devices = [d for d in devices.split(",") if d.strip()]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        devices = len(devices)
    if devices in ("auto", -1, "-1"):
        notes.append("devices: 1 per node (trainer.devices says auto; --devices N plans for another number)")
        devices = 1
    return int(devices) * int(trainer.get("num_nodes") or 1)


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


def _strategy(value: Any, num_devices: int) -> tuple[Strategy, dict[str, Any]]:
    """Return the strategy and its arguments; one device needs none, several need one that spreads."""
    args: dict[str, Any] = {}
    if isinstance(value, Mapping):
        args, value = dict(value.get("init_args") or {}), value["class_path"]
    word = str(value).split(".")[-1].lower()
    if word != "auto" and word not in _STRATEGIES:
        raise ValueError(
            f"no memory model for strategy {value!r}: plan with one of one_device, ddp, fsdp, fsdp2"
        )
    if num_devices == 1:
        return "single", args
    strategy: Strategy = _STRATEGIES.get(word, "ddp")
    if strategy == "fsdp" and "HYBRID" in str(args.get("sharding_strategy", "")).upper():
        return "hybrid", args
    return ("ddp" if strategy == "single" else strategy), args


def _retention(callbacks: Any) -> Retention | None:
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = callback.get("class_path", "") if isinstance(callback, Mapping) else str(callback or "")
        if path.split(".")[-1] == "CheckpointRetention":
            args = dict(callback.get("init_args") or {}) if isinstance(callback, Mapping) else {}
            values = constructor_defaults(RETENTION, "CheckpointRetention") | args
            return Retention(**{f.name: values[f.name] for f in fields(Retention)})
    return None


def describe_data(data: Mapping[str, Any], notes: list[str]) -> tuple[int | None, int | None]:
    """Return (vocabulary, tokens of the training split) as far as they are known without reading the corpus."""
    # numpy and tokenizers: half a second that only this needs
    from lit_gpt_loop.corpus import open_corpus
    from lit_gpt_loop.store_build import make_tokenizer, store_path
    from lit_gpt_loop.token_store import TokenStore
    from lit_gpt_loop.tokenizer import bpe_vocab_size

    word, end_token = data["tokenizer"], data["end_token"]
    store = None
    try:
        if data["store"] is not None:
            store = TokenStore(data["store"])
        else:
            word = word or DEFAULT_TOKENIZER
            corpus = open_corpus(
                data["corpus"], data["text_field"], data["document_separator"], data["corpus_options"]
            )
            folder = store_path(data["data_dir"], corpus, word, end_token)
            store = TokenStore(folder) if folder.is_dir() else None
    except (FileNotFoundError, ModuleNotFoundError, RuntimeError, ValueError) as e:
        notes.append(f"corpus: not looked at ({str(e).splitlines()[0]})")
    if store is not None:
        share = 1.0 - data["val_fraction"] - data["test_fraction"]
        return store.vocab_size, round(store.num_tokens * share)
    if word == "gpt2":
        return 50257, None
    if word is None or word == "char":
        return None, None
    size = bpe_vocab_size(word)
    return (size if size is not None else make_tokenizer(word, None, end_token).vocab_size), None
