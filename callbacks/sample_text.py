"""Fixed prompts sampled during training, disturbing nothing (beside the data flow: Trainer + *callbacks* -> dashboards).

Drop it into a Lightning project:

    from sample_text import SampleText
    trainer = pl.Trainer(callbacks=[SampleText(["Once upon a time"], every_n_steps=500, encode=tok.encode, decode=tok.decode)])

The LightningModule's forward must map tokens (B, T) to logits (B, T, V), or `forward=` says how to. Tokens are drawn from a
generator of the callback's own with the same seed every time, so that two samples of one prompt differ by the weights alone;
the global RNG of torch, the mode of every submodule and the gradients stay as they were. Every rank runs the same forward
passes, because under FSDP each of them gathers weights; rank 0 logs.

| where | key | what |
|---|---|---|
| loggers with `log_text` (W&B, our journal) | `samples/text` | table: update, prompt, continuation |
| loggers with an `add_text` experiment (TensorBoard) | `samples/text` | the same as text |
| terminal | | the first prompt's continuation, with `print_samples=True` |
"""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def pick_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Return one token drawn from `softmax(logits / temperature)` over the `top_k` largest logits; temperature 0 is argmax.

    Args:
        logits: (V,), on any device.
        temperature: at least 0.
        top_k: None for all tokens.
        generator: a CPU generator; it alone decides the draw.
    """
    logits = logits.detach().float().cpu()
    if temperature == 0.0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


class SampleText(pl.Callback):
    """Sample a continuation of each prompt after every n-th update, and at the end.

    Args:
        prompts: texts to continue.
        every_n_steps: updates between two samples.
        max_new_tokens: length of a continuation; shorter when the end token is drawn.
        temperature: 0 takes the likeliest token each time.
        top_k: draw among this many; None for all.
        seed: of the callback's own generator.
        context_length: tokens that the model can see; None reads `context_length` from the datamodule or the module's `config`.
        encode: text to token ids; None takes `trainer.datamodule.tokenizer.encode`.
        decode: token ids to text; None takes `trainer.datamodule.tokenizer.decode`.
        forward: `(model, tokens (1, T)) -> logits (1, T, V)`, e.g. `lambda model, x: model(input_ids=x).logits`; `model` is the
            LightningModule as the strategy wrapped it, so that FSDP gathers its weights. None calls `model(tokens)`.
        eot_id: token that ends a text; None takes `trainer.datamodule.eot_id` if there is one.
        print_samples: also print to the terminal.

    Raises:
        ValueError: at construction, for a number out of range; at the start of a fit, when no tokenizer is given and the
            datamodule has none.
    """

    def __init__(
        self,
        prompts: Sequence[str] = ("The",),
        *,
        every_n_steps: int = 500,
        max_new_tokens: int = 48,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
        context_length: int | None = None,
        encode: Callable[[str], list[int]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
        forward: Callable[[Any, Tensor], Tensor] | None = None,
        eot_id: int | None = None,
        print_samples: bool = True,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("max_new_tokens", max_new_tokens, 1),
            ("temperature", temperature, 0),
            ("top_k", 1 if top_k is None else top_k, 1),
        ):
            if value < least:
                raise ValueError(f"SampleText: {name}={value} must be at least {least}")
        if isinstance(prompts, str) or not prompts or not all(prompts):
            raise ValueError(f"SampleText: prompts={prompts!r} must be a list of texts, none of them empty")
        self.prompts = list(prompts)
        self.every_n_steps, self.max_new_tokens = every_n_steps, max_new_tokens
        self.temperature, self.top_k, self.seed = temperature, top_k, seed
        self.context_length, self.eot_id, self.print_samples = context_length, eot_id, print_samples
        self._encode, self._decode, self._forward = encode, decode, forward
        self._last_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the tokenizer and the context length, or say what is missing."""
        data = getattr(trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer", None)
        self._encode = self._encode or getattr(tokenizer, "encode", None)
        self._decode = self._decode or getattr(tokenizer, "decode", None)
        if self._encode is None or self._decode is None:
            raise ValueError(
                "SampleText needs a tokenizer: give encode= and decode=, or a datamodule with a `tokenizer` that has both"
            )
        if self.eot_id is None:
            self.eot_id = getattr(data, "eot_id", None)
        if self.context_length is None:
            self.context_length = getattr(data, "context_length", None) or getattr(
                getattr(pl_module, "config", None), "context_length", None
            )
        if self.context_length is None:
            raise ValueError(
                "SampleText needs the number of tokens that the model can see: give context_length=, or a datamodule or a "
                "module config with a `context_length`"
            )
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sample after every n-th update."""
        step = trainer.global_step
        if step != self._last_step and step % self.every_n_steps == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample the final weights, if the last update was not sampled."""
        if trainer.global_step != self._last_step:
            self._sample(trainer, pl_module)

    def _sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        texts = self.sample(pl_module)
        if not trainer.is_global_zero:
            return
        rows = [[str(trainer.global_step), p, t] for p, t in zip(self.prompts, texts, strict=True)]
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):
                logger.log_text(
                    "samples/text", ["update", "prompt", "continuation"], rows, step=trainer.global_step
                )
            elif hasattr(getattr(logger, "experiment", None), "add_text"):
                text = "\n\n".join(f"**{p}**{t}" for _, p, t in rows)
                logger.experiment.add_text("samples/text", text, trainer.global_step)  # type: ignore[attr-defined]
        if self.print_samples:
            bar = trainer.progress_bar_callback
            (bar.print if bar is not None else print)(
                f"update {trainer.global_step}: {self.prompts[0]}{texts[0]}"
            )

    @torch.no_grad()
    def sample(self, pl_module: pl.LightningModule) -> list[str]:
        """Return a continuation of each prompt; call it on every rank."""
        assert self._encode is not None and self._decode is not None and self.context_length is not None
        modes = {m: m.training for m in pl_module.modules()}
        pl_module.eval()
        # Kernels of the forward pass may draw from the global generators (dropout does not in eval mode, others might).
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), pl_module.trainer.precision_plugin.forward_context():
                return [self._continue(pl_module, prompt) for prompt in self.prompts]
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _continue(self, pl_module: pl.LightningModule, prompt: str) -> str:
        assert self._encode is not None and self._decode is not None and self.context_length is not None
        generator = torch.Generator().manual_seed(self.seed)
        tokens = list(self._encode(prompt))
        start = len(tokens)
        for _ in range(self.max_new_tokens):
            window = torch.tensor([tokens[-self.context_length :]], device=pl_module.device)
            model: Any = pl_module.trainer.strategy.model
            logits = self._forward(model, window) if self._forward else model(window)
            token = pick_token(logits[0, -1], self.temperature, self.top_k, generator)
            # With several ranks all run the full length: their logits may differ in the last bit and so the tokens drawn, and
            # a rank that stopped early would leave the others alone in FSDP's collectives.
            if token == self.eot_id and pl_module.trainer.world_size == 1:
                break
            tokens.append(token)
        end = next((i for i in range(start, len(tokens)) if tokens[i] == self.eot_id), len(tokens))
        return self._decode(tokens[start:end])
