"""Text from a GPT, token by token: temperature, top-k, top-p, a seed of its own, a KV cache, any length.

The rules are pure functions (`filter_logits`, `window_start`); `generate_stream` yields tokens as they are drawn and
`generate` collects them. Nothing of the caller changes: neither the global random generators nor the mode of any submodule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_gpt_loop.model import GPT, KVCache


def filter_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the probabilities (V,) that a token is drawn from.

    Args:
        logits: (V,) fp32.
        temperature: logits are divided by it; 0 puts everything on the largest (the first of equals).
        top_k: keep the k largest; None keeps all.
        top_p: then keep the smallest set of most likely tokens whose probabilities reach p (Holtzman et al. 2020; at least
            one token); None keeps all.
    """
    if temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    logits = logits / temperature
    if top_k is not None and top_k < logits.numel():
        kept = logits.topk(top_k).indices  # exactly k, also among equals
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, kept, logits[kept])
    probabilities = logits.softmax(dim=0)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        mass_before = ordered.cumsum(0) - ordered
        probabilities = probabilities.index_fill(0, order[mass_before >= top_p], 0.0)
        probabilities = probabilities / probabilities.sum()
    return probabilities


def window_start(num_tokens: int, context_length: int) -> int:
    """Return where the model's view of a sequence starts so that the view fits the context.

    Past the context the view moves by half a context at once rather than by one token, so that the KV cache (whose entries
    depend on everything before them) is rebuilt once per half context and not at each token.
    """
    if num_tokens <= context_length:
        return 0
    hop = max(1, context_length // 2)
    return -(-(num_tokens - context_length) // hop) * hop


def generate_stream(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eot_id: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield new tokens as they are drawn.

    Args:
        model: the network; its submodules' modes are as before whenever the caller has control.
        prompt: at least one token.
        max_new_tokens: at most so many are drawn.
        temperature: 0 is greedy.
        top_k: draw among the k most likely.
        top_p: draw among the most likely tokens that together reach p.
        seed: of a `torch.Generator` of this call's own on CPU, so the same on every device up to the logits.
        eot_id: stop after drawing this token (which is yielded); None never stops early.
        use_cache: keep keys and values of past tokens; without it each token costs a forward over the whole view, and the
            logits agree to rounding.

    Raises:
        ValueError: an empty prompt, a prompt token outside of the vocabulary, or a sampling setting out of range. Raised at
            the call, not at the first token.
    """
    _check(prompt, model.config.vocab_size, max_new_tokens, temperature, top_k, top_p)
    return _stream(model, list(prompt), max_new_tokens, temperature, top_k, top_p, seed, eot_id, use_cache)


def generate(model: GPT, prompt: Sequence[int], max_new_tokens: int, **settings: Any) -> list[int]:
    """Return the new tokens; see `generate_stream` for the settings."""
    return list(generate_stream(model, prompt, max_new_tokens, **settings))


def _stream(
    model: GPT,
    tokens: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    eot_id: int | None,
    use_cache: bool,
) -> Iterator[int]:
    generator = torch.Generator("cpu").manual_seed(seed)
    context = model.config.context_length
    cache: KVCache | None = None
    start = 0
    for _ in range(max_new_tokens):
        if (new_start := window_start(len(tokens), context)) != start or cache is None:
            start, cache = new_start, KVCache(context)
        seen = cache.length if use_cache else 0
        # Not around the yield: the caller would run without gradients and with our modes until the next token.
        with torch.no_grad(), _evaluating(model):
            inputs = torch.tensor([tokens[start + seen :]], device=model.head_weight.device)
            logits = model.forward_cached(inputs, cache) if use_cache else model(inputs)[:, -1]
        probabilities = filter_logits(logits[0].float().cpu(), temperature, top_k, top_p)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        tokens.append(token)
        yield token
        if token == eot_id:
            return


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check(
    prompt: Sequence[int],
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if len(prompt) == 0:
        raise ValueError(
            "the prompt holds no token: give at least one, e.g. the tokenizer's end-of-text token"
        )
    if bad := [t for t in prompt if not 0 <= t < vocab_size]:
        raise ValueError(
            f"the prompt's token {bad[0]} is not in the model's vocabulary of {vocab_size}: "
            "encode it with the tokenizer that the model was trained with"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be a finite number of at least 0 (0 is greedy)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1, or null for no limit")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1, or null for no limit")
