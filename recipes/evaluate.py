"""Loss, perplexity and bits per byte of a trained model: `python -m recipes.evaluate --run runs/quickstart --checkpoint best`.

Without --text on the run's own validation documents, the same blocks as during training; with --text on any text files.
"""

import json
import math
from pathlib import Path

from jsonargparse import auto_cli

from lit_gpt_loop.trained import read_run, score
from recipes.help import Help
from recipes.pretrain import find_checkpoint, find_run, main, newest_config, run_command


def evaluate(
    run: Path,
    checkpoint: str = "latest",
    text: list[Path] | None = None,
    output: Path | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """Evaluate a checkpoint and print (and return) the result.

    Args:
        run: the run's directory, or its name in runs/.
        checkpoint: latest, best, archive:STEP, a step directory or a path.
        text: files to evaluate on instead of the run's validation documents; each file is one document.
        output: also write the result as JSON to this file.
        device: cpu or cuda, for --text; the run's own settings decide without.
    """
    run = find_run(run)
    if text is None:
        config = newest_config(run)
        where = ["--runs_dir", str(run.parent), "--run", run.name]
        cli = main(
            ["validate", "--config", str(config), *where, "--ckpt_path", checkpoint, "--verbose", "false"]
        )
        values = {
            k.removeprefix("val/"): float(v)
            for k, v in cli.trainer.callback_metrics.items()
            if k.startswith("val/")
        }
    else:
        values = _on_files(run, checkpoint, text, device)
    for key, value in values.items():
        print(f"{key:14} {value:,.6g}")
    if output is not None:
        output.write_text(json.dumps(values, indent=2) + "\n")
    return values


def _on_files(run: Path, checkpoint: str, files: list[Path], device: str) -> dict[str, float]:
    trained = read_run(run, find_checkpoint(checkpoint, run))
    model, tokenizer = trained.model.to(device), trained.tokenizer
    loss_sum, num_tokens, num_bytes = 0.0, 0, 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        # The end token in front: then every token of the text is a target, as it is in the middle of a packed stream.
        s, n = score(model, [tokenizer.eot_id, *tokenizer.encode(text)], device=device)
        loss_sum, num_tokens, num_bytes = loss_sum + s, num_tokens + n, num_bytes + len(text.encode())
    if num_tokens == 0:
        raise ValueError(f"{[str(f) for f in files]} hold no text to evaluate")
    loss = loss_sum / num_tokens
    return {
        "loss": loss,
        "ppl": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss_sum / math.log(2) / num_bytes,
        "tokens": num_tokens,
    }


if __name__ == "__main__":
    run_command(
        lambda: auto_cli(
            evaluate,
            as_positional=False,
            prog="python -m recipes.evaluate",
            description=__doc__,
            formatter_class=Help,
        )
    )
