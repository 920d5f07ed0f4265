"""Tokenize a corpus ahead of time: python -m recipes.prepare [--config configs/C.yaml] [--data.corpus ...]

A fit prepares by itself what is not prepared yet. Ahead of time is better for a large corpus: on a machine without GPUs, with
many processes, or as the jobs of an array, each of which writes one part (`--part 3/64`).
"""

import difflib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_gpt_loop.data import TextDataModule
from lit_gpt_loop.token_store import complete_parts, find_parts
from recipes.help import Help

_DESCRIPTION = """Tokenize a corpus into a token store, once.

The store is found again by every run with the same corpus and tokenizer: nothing is done twice. Any context length, batch
size and validation split reads from the same store.

  python -m recipes.prepare                                     # the World Factbook, BPE of 4,096 tokens
  python -m recipes.prepare --config configs/gpt2_124m.yaml     # what a run with this file will read
  python -m recipes.prepare --data.corpus 'books/*.txt' --data.tokenizer bpe:8192 --num_processes 8
  python -m recipes.prepare --config C --part 3/64              # one job of an array; together the same bytes as one job
"""


def parse_part(text: str) -> tuple[int, int]:
    """Return (I, N) of "I/N".

    Raises:
        ValueError: not of that form, or I outside of 1..N.
    """
    try:
        part, num_parts = (int(x) for x in text.split("/"))
    except ValueError:
        raise ValueError(f"--part {text!r}: write I/N, for example 3/64") from None
    if not 1 <= part <= num_parts:
        raise ValueError(f"--part {text}: parts are counted from 1/{num_parts} to {num_parts}/{num_parts}")
    return part, num_parts


def data_section(path: str, required: bool = True) -> dict[str, Any] | None:
    """Return the `data:` section of a run's YAML file; its other sections are no business of preparing.

    Args:
        path: the file.
        required: whether a file without the section is an error; else the result is None.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it has no such section.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config: there is no file {path}")
    content = yaml.safe_load(Path(path).read_text())
    section = content.get("data") if isinstance(content, dict) else None
    if isinstance(section, dict):
        return section.get("init_args", section)
    if required:
        raise ValueError(f"--config {path} has no `data:` section")
    return None


def build_parser(defaults: dict[str, Any]) -> ArgumentParser:
    """Return the parser whose defaults are those of TextDataModule, overridden by `defaults`.

    Raises:
        ValueError: a name in `defaults` is no argument; names the closest.
    """
    known = list(inspect.signature(TextDataModule).parameters)
    for name in defaults:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"--config: data.{name} is no argument" + (f"; did you mean {close[0]}?" if close else "")
            )
    parser = ArgumentParser(prog="python -m recipes.prepare", description=_DESCRIPTION, formatter_class=Help)
    parser.add_argument(
        "--config", type=str | None, default=None, help="YAML file of a run; its `data:` section is read"
    )
    parser.add_argument("--part", type=str, default="1/1", help="I/N: prepare the I-th of N parts")
    parser.add_argument(
        "--num_processes",
        type=int | None,
        default=None,
        help="processes that tokenize; default data.prepare_processes",
    )
    parser.add_class_arguments(TextDataModule, "data")
    parser.set_defaults({f"data.{key}": value for key, value in defaults.items()})
    return parser


def _config_of(argv: list[str]) -> str | None:
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None


def next_command(config: str | None, store: Path) -> str:
    """Return what to type once the data is there."""
    if config is not None:
        return f"python -m recipes.pretrain fit --config {config}"
    return f"python -m recipes.pretrain fit --config configs/quickstart.yaml --data.store {store}"


def main(argv: list[str] | None = None) -> Path:
    """Prepare what the arguments say, print what came out, and return the store's folder."""
    argv = sys.argv[1:] if argv is None else argv
    config = _config_of(argv)
    parser = build_parser((data_section(config) or {}) if config is not None else {})
    arguments = parser.parse_args(argv)
    part = parse_part(arguments.part)
    data = parser.instantiate(arguments).data
    store = data.prepare(part, arguments.num_processes)
    if complete_parts(store) is None:
        have = len(find_parts(store).get(part[1], set()))
        print(f"{store}: {have} of {part[1]} parts are there. A run can start when all of them are.")
        return store
    print(data.summary())
    print(f"next: {next_command(config, store)}")
    return store


def run() -> int:
    """Run `main` for a shell: what a user can mend is said in one line, anything else with its traceback."""
    try:
        main()
    except (ValueError, OSError, RuntimeError) as e:
        frames = list(traceback.walk_tb(e.__traceback__))
        if (
            not frames[-1][0]
            .f_globals.get("__name__", "")
            .startswith(("lit_gpt_loop", "recipes", "__main__"))
        ):
            raise
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
