"""A trained model for others: `python -m recipes.export --run runs/quickstart --checkpoint best --out exported`.

`--format hf` (the default) writes a folder that Hugging Face transformers loads: safetensors, config.json, tokenizer files;
`--format lightning` one plain Lightning .ckpt with optimizer and all, which any Lightning project loads.

Only tensors and JSON are written, so nothing in the folder can run code when it is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import auto_cli
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from lit_gpt_loop.checkpoint_files import to_lightning_ckpt
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.hf import to_hf_config, to_hf_state_dict
from lit_gpt_loop.tokenizer import LibraryTokenizer
from lit_gpt_loop.trained import TOKENIZER_FILE, read_run
from recipes.help import Help
from recipes.pretrain import find_checkpoint, find_run, run_command


def export_hf(
    state_dict: Mapping[str, Tensor],
    config: GPTConfig,
    tokenizer_file: str | os.PathLike[str] | None,
    out_dir: str | os.PathLike[str],
    *,
    eot_token: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a model folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Args:
        state_dict: GPT's own state dict, without prefix.
        config: the shape that it was built with.
        tokenizer_file: a `tokenizer.json`; None writes no tokenizer (a byte tokenizer has no file).
        out_dir: must not exist, or be empty.
        eot_token: the tokenizer's end-of-text token; becomes begin and end token.
        dtype: of the weights in the file.

    Returns:
        The folder.

    Raises:
        ValueError: transformers has no architecture for the model, or the tokenizer does not know `eot_token` or has more
            tokens than the model.
        FileExistsError: `out_dir` holds files already.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"{out} exists and is not an empty folder: give another --out, or remove it first"
        )
    eot_id = None
    if tokenizer_file is not None:
        eot_id = _eot_id(tokenizer_file, eot_token, config.vocab_size)
    weights = {name: tensor.to("cpu", dtype) for name, tensor in to_hf_state_dict(state_dict, config).items()}
    hf_config = {**to_hf_config(config, eot_id), "dtype": str(dtype).removeprefix("torch.")}
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        save_file(weights, beside / "model.safetensors", metadata={"format": "pt"})
        _write_json(beside / "config.json", hf_config)
        _write_json(
            beside / "generation_config.json",
            {"bos_token_id": eot_id, "eos_token_id": eot_id, "max_length": config.context_length},
        )
        if tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, beside / "tokenizer.json")
            special = {} if eot_token is None else {"bos_token": eot_token, "eos_token": eot_token}
            _write_json(
                beside / "tokenizer_config.json",
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": config.context_length,
                    "clean_up_tokenization_spaces": False,
                    **special,
                },
            )
        os.chmod(beside, 0o755)  # mkdtemp makes it private
        if out.exists():
            out.rmdir()
        os.replace(beside, out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return out


def _eot_id(tokenizer_file: str | os.PathLike[str], eot_token: str | None, vocab_size: int) -> int | None:
    tokenizer = Tokenizer.from_file(os.fspath(tokenizer_file))
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"{tokenizer_file} has {tokenizer.get_vocab_size()} tokens, but the model predicts {vocab_size}: "
            "it is not the tokenizer that the model was trained with"
        )
    if eot_token is None:
        return None
    eot_id = tokenizer.token_to_id(eot_token)
    if eot_id is None:
        raise ValueError(
            f"{tokenizer_file} has no token {eot_token!r}: name the end-of-text token that it was made with"
        )
    return int(eot_id)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(
    run: Path,
    out: Path,
    checkpoint: str = "latest",
    format: Literal["hf", "lightning"] = "hf",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> None:
    """Export a checkpoint of a run.

    Args:
        run: the run's directory, or its name in runs/.
        out: the folder (hf) or file (lightning) to write; must not exist.
        checkpoint: latest, best, archive:STEP, a step directory or a path.
        format: hf for transformers, lightning for a single-file .ckpt.
        dtype: of the weights, for hf.
    """
    run = find_run(run)
    path = find_checkpoint(checkpoint, run)
    if out.exists():
        raise FileExistsError(f"{out} exists: give another --out, or remove it first")
    if format == "lightning":
        to_lightning_ckpt(path, out)
    else:
        trained = read_run(run, path)
        tokenizer = trained.tokenizer
        is_library = isinstance(
            tokenizer, LibraryTokenizer
        )  # transformers reads these; bytes and characters it cannot
        export_hf(
            trained.model.state_dict(),
            trained.model.config,
            run / TOKENIZER_FILE if is_library else None,
            out,
            eot_token=tokenizer.end_token if isinstance(tokenizer, LibraryTokenizer) else None,
            dtype=getattr(torch, dtype),
        )
    print(f"wrote {out}")


if __name__ == "__main__":
    run_command(
        lambda: auto_cli(
            export,
            as_positional=False,
            prog="python -m recipes.export",
            description=__doc__,
            formatter_class=Help,
        )
    )
