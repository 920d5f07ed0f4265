"""What a user gives to `recipes.plan`: files of YAML, values that override them, options that are numbers (layer T)."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

SECTIONS = ("--model.", "--data.", "--trainer.")
# Arguments of `recipes.pretrain fit` beside those; all are taken, so that a command of it can be planned as it is.
FIT_ARGUMENTS = ("--run", "--runs_dir", "--max_tokens", "--seed_everything", "--ckpt_path", "--weights_only")
# Option -> (least, whether that itself is allowed, most, what the number is).
_RULES: dict[str, tuple[float, bool, float, str]] = {
    "devices": (1, True, math.inf, "devices in all"),
    "gpus_per_node": (1, True, math.inf, "devices of one node"),
    "peak_tflops": (0, False, math.inf, "the device's dense peak in 1e12 FLOP/s, e.g. 312 for an a100 in bf16"),
    "device_memory_gib": (0, False, math.inf, "the device's memory, e.g. 79.3 for an 80 GB card"),
    "mfu": (0, False, 1, "the share of peak that training reaches, 0.3 to 0.5 on GPUs"),
    "price_per_gpu_hour": (0, True, math.inf, "the price of one device for an hour, in any currency"),
    "corpus_tokens": (1, True, math.inf, "tokens of the training split"),
    "disk_gb_per_s": (0, False, math.inf, "what one rank writes, 1e9 bytes per second"),
    "node_mtbf_hours": (0, False, math.inf, "hours between failures of one node, 8760 for one a year"),
    "restart_s": (0, True, math.inf, "seconds from a failure to the first new update"),
    "budget_flops": (0, False, math.inf, "FLOPs to spend, e.g. 1e20"),
    "budget_gpu_hours": (0, False, math.inf, "hours of one device to spend"),
}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """YAML with floats as `recipes.pretrain` reads them: 1e-3 too."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse numbers that make no sense.

    Args:
        options: option -> value; None is not given, and options without a rule are not looked at.

    Raises:
        ValueError: names the option, the value and the rule.
    """
    for name, (least, has_least, most, meaning) in _RULES.items():
        value = options.get(name)
        if value is None:
            continue
        if not (value > least or (has_least and value == least)) or value > most or math.isinf(value):
            rule = f"{'at least' if has_least else 'above'} {least:g}" + (
                f" and at most {most:g}" if most < math.inf else ""
            )
            raise ValueError(f"--{name} {value:g} must be {rule}: {meaning}")


def parse_yaml(text: str, where: str) -> Any:
    """Return what a text of YAML says.

    Raises:
        ValueError: it is none; names the place, `where` first.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{where}{place}: this is no YAML: {problem or str(e).splitlines()[0]}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a configuration.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no configuration.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no configuration at {path}: give a YAML file such as configs/quickstart.yaml"
        )
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: give a YAML file such as configs/quickstart.yaml") from None
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no configuration: expected keys such as trainer, model and data")
    return content


def split_arguments(args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the plan's own arguments, and those that override the configuration as a nested dict.

    Raises:
        ValueError: an override without a value, or one that is no YAML.
    """
    own, items, nested = [], list(args), dict[str, Any]()
    while items:
        word = items.pop(0)
        key, has_value, value = word.partition("=")
        if not (key.startswith(SECTIONS) or key in FIT_ARGUMENTS):
            # A repeated --config adds a file.
            own.append(word.replace("--config", "--config+", 1) if key == "--config" else word)
            continue
        if not has_value:
            if not items:
                raise ValueError(f"{word} needs a value")
            value = items.pop(0)
        *path, last = key[2:].split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(
                    f"{word} sets a part of what another argument sets as a whole: give one of them"
                )
        place[last] = parse_yaml(value, f"{key} {value}")
    return own, nested


def newest_config(run_dir: Path) -> Path | None:
    """Return the configuration that a run was last trained with, None where it has none."""
    numbered = {int(re.sub(r"\D", "", p.stem) or 1): p for p in run_dir.glob("config*.yaml")}
    return numbered[max(numbered)] if numbered else None
