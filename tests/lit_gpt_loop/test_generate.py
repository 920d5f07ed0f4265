"""Sampling: rules as tables, cached equals uncached, nothing of the caller's changes."""

import pytest
import torch

from lit_gpt_loop.generate import filter_logits, generate, generate_stream, window_start
from lit_gpt_loop.model import GPT, GPTConfig, KVCache

CONFIGS = {
    "gpt2": GPTConfig.preset("tiny", context_length=16, init_std=0.3),
    "llama": GPTConfig.preset("tiny-llama", context_length=16, init_std=0.3, qk_norm=True),
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((1.0, None, None), [0.5, 0.25, 0.15, 0.1]),
        ((0, None, None), [1.0, 0.0, 0.0, 0.0]),
        ((1.0, 2, None), [2 / 3, 1 / 3, 0.0, 0.0]),
        ((1.0, 9, None), [0.5, 0.25, 0.15, 0.1]),
        ((1.0, None, 0.49), [1.0, 0.0, 0.0, 0.0]),  # the first token reaches p
        ((1.0, None, 0.51), [2 / 3, 1 / 3, 0.0, 0.0]),
        ((1.0, None, 0.01), [1.0, 0.0, 0.0, 0.0]),  # at least one
        ((1.0, 3, 0.6), [2 / 3, 1 / 3, 0.0, 0.0]),  # p of what k left: 0.5 / 0.9 = 0.56 < 0.6
        ((0.5, None, None), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
    ],
)
def test_probabilities_after_temperature_top_k_and_top_p(settings, expected):
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log() + 3.0
    torch.testing.assert_close(filter_logits(logits, *settings), torch.tensor(expected, dtype=torch.float64))


def test_top_k_keeps_exactly_k_of_equals():
    assert filter_logits(torch.zeros(6), 1.0, 2, None).count_nonzero() == 2


def test_window_moves_by_half_a_context():
    assert [window_start(n, 8) for n in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]
    assert [window_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]
    for context in (1, 2, 5, 8):
        for n in range(1, 40):
            assert 1 <= n - window_start(n, context) <= context


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_uncached(name):
    model = GPT(CONFIGS[name]).eval()
    tokens = torch.randint(257, (2, 16))
    with torch.no_grad():
        full = model(tokens)
        cache, start = KVCache(16), 0
        for size in (5, 1, 1, 4, 1, 3, 1):  # a prompt, single tokens, and several at once behind cached ones
            logits = model.forward_cached(tokens[:, start : start + size], cache)
            start += size
            torch.testing.assert_close(logits, full[:, start - 1], rtol=1e-5, atol=1e-5)
    assert cache.length == 16
    with pytest.raises(ValueError, match="17 tokens does not fit context_length=16"):
        model.forward_cached(tokens[:, :1], cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_text_past_the_context_is_the_same_with_and_without_cache(name):
    model = GPT(CONFIGS[name])
    settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 3}
    for prompt in ([1, 2, 3], list(range(40))):  # the second is longer than the context itself
        cached = generate(model, prompt, 45, **settings)
        assert cached == generate(model, prompt, 45, **settings, use_cache=False)
        assert len(cached) == 45
    assert cached != generate(model, prompt, 45, **{**settings, "seed": 4})


def test_greedy_follows_the_largest_logit():
    model = GPT(CONFIGS["gpt2"])
    tokens = [7]
    for _ in range(10):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, [7], 10, temperature=0) == tokens[1:]


def test_stops_after_the_end_token_and_streams():
    model = GPT(CONFIGS["gpt2"])
    free = generate(model, [7], 12, temperature=0)
    eot = free[4]
    assert generate(model, [7], 12, temperature=0, eot_id=eot) == free[: free.index(eot) + 1]
    stream = generate_stream(model, [7], 12, temperature=0)
    assert [next(stream), next(stream)] == free[:2]


def test_padding_rows_are_never_drawn():
    config = GPTConfig.preset("tiny", vocab_size=3, vocab_multiple=64)
    model = GPT(config)
    with torch.no_grad():
        model.tok_embedding.weight[3:] = 9.0
    assert max(generate(model, [0], 200)) < 3


def test_nothing_of_the_callers_changes():
    model = GPT(GPTConfig.preset("tiny", dropout=0.5)).train()
    model.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    stream = generate_stream(model, [1], 5)
    next(stream)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # also while the stream is open
    assert {name: module.training for name, module in model.named_modules()} == modes
    first = list(stream)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert generate(model, [1], 5)[1:] == first  # no dropout, and no global generator either


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"prompt": []}, "holds no token"),
        ({"prompt": [257]}, "257 is not in the model's vocabulary of 257"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_bad_settings_are_refused_at_the_call(arguments, told):
    with pytest.raises(ValueError, match=told):
        generate_stream(GPT(CONFIGS["gpt2"]), **{"prompt": [0], "max_new_tokens": 1, **arguments})
