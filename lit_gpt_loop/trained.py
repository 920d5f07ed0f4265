"""A trained model read back from its run directory, for sampling, evaluation and export (step 10 of 10)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_gpt_loop.checkpoint_files import open_checkpoint, read_weights
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.model import GPT
from lit_gpt_loop.tokenizer import TextTokenizer, load_tokenizer

TOKENIZER_FILE = "tokenizer.json"


@dataclass
class Trained:
    """What a checkpoint of a run holds for those who use the model.

    Attributes:
        model: the network in eval mode, fp32, on the CPU.
        tokenizer: the one it was trained with.
        hyper_parameters: LitGPT's, as saved.
        updates: updates that the weights have seen.
    """

    model: GPT
    tokenizer: TextTokenizer
    hyper_parameters: dict[str, Any]
    updates: int


def read_run(run_dir: str | Path, checkpoint: str | Path) -> Trained:
    """Build the model of a checkpoint and load its weights.

    Args:
        run_dir: the run's directory, which holds the tokenizer.
        checkpoint: path of a checkpoint's state (what `Trainer.fit(ckpt_path=)` takes).

    Raises:
        FileNotFoundError: the run has no tokenizer.json, or there is no checkpoint.
        ValueError: the checkpoint is not LitGPT's, or its weights do not fit its configuration.
    """
    _, rest = open_checkpoint(checkpoint)
    hyper_parameters = rest.get("hyper_parameters", {})
    if "config" not in hyper_parameters:
        raise ValueError(f"{checkpoint} holds no GPTConfig: it is no checkpoint of LitGPT")
    model = GPT(GPTConfig(**hyper_parameters["config"]))
    weights = {
        k.removeprefix("model."): v for k, v in read_weights(checkpoint).items() if k.startswith("model.")
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"{checkpoint} does not fit its own configuration: missing {missing}, unexpected {unexpected}"
        )
    tokenizer = load_tokenizer(Path(run_dir) / TOKENIZER_FILE)
    return Trained(model.eval(), tokenizer, hyper_parameters, int(rest.get("lit_gpt", {}).get("updates", 0)))


@torch.no_grad()
def score(model: GPT, tokens: list[int], batch_size: int = 8, device: str = "cpu") -> tuple[float, int]:
    """Return (sum of losses in nats, number of targets) of a token stream, in blocks of the context length.

    Blocks overlap by one token, so that every token but the first is a target once.
    """
    from torch.nn.utils.rnn import pad_sequence

    size = model.config.context_length
    rows = [torch.tensor(tokens[i : i + size + 1]) for i in range(0, len(tokens) - 1, size)]
    loss_sum, num_tokens = 0.0, 0
    for i in range(0, len(rows), batch_size):
        some = rows[i : i + batch_size]
        inputs = pad_sequence([r[:-1] for r in some], batch_first=True)
        targets = pad_sequence([r[1:] for r in some], batch_first=True, padding_value=-100)
        s, n = model(inputs.to(device), targets.to(device))
        loss_sum, num_tokens = loss_sum + float(s), num_tokens + int(n)
    return loss_sum, num_tokens
