"""Continue a prompt with a trained model: `python -m recipes.sample --run runs/quickstart --prompt "The country"`."""

import sys
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from lit_gpt_loop.generate import generate_stream
from lit_gpt_loop.trained import read_run
from recipes.help import Help
from recipes.pretrain import find_checkpoint, find_run, run_command


def sample(
    run: Path,
    prompt: str = "The",
    checkpoint: str = "latest",
    num_samples: int = 1,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Print continuations of a prompt as they are drawn.

    Args:
        run: the run's directory, or its name in runs/.
        prompt: text to continue.
        checkpoint: latest, best, archive:STEP, a step directory or a path.
        num_samples: how many continuations; the i-th uses seed + i.
        max_new_tokens: length of each in tokens; shorter when the model ends the text.
        temperature: below 1 sharpens the distribution; 0 takes the likeliest token each time.
        top_k: draw among the k likeliest tokens; null for all.
        top_p: then draw among the likeliest tokens that together have this probability.
        seed: the same seed gives the same text.
        device: cpu or cuda.
    """
    run = find_run(run)
    trained = read_run(run, find_checkpoint(checkpoint, run))
    model, tokenizer = trained.model.to(device), trained.tokenizer
    tokens = tokenizer.encode(prompt)
    for i in range(num_samples):
        settings: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed + i,
        }
        drawn: list[int] = []
        shown = ""
        sys.stdout.write(prompt)
        for token in generate_stream(model, tokens, max_new_tokens, eot_id=tokenizer.eot_id, **settings):
            if token == tokenizer.eot_id:
                break
            drawn.append(token)
            text = tokenizer.decode(drawn)
            # The bytes of one character can arrive in several tokens; until then it decodes to a replacement character.
            if text.startswith(shown) and not text.endswith("\ufffd"):
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        sys.stdout.write(
            tokenizer.decode(drawn)[len(shown) :] + "\n" + ("---\n" if i + 1 < num_samples else "")
        )


if __name__ == "__main__":
    run_command(
        lambda: auto_cli(
            sample,
            as_positional=False,
            prog="python -m recipes.sample",
            description=__doc__,
            formatter_class=Help,
        )
    )
