"""The shape of a GPT: presets match published counts, wrong shapes get one error that names the way out."""

import pytest

from lit_gpt_loop.config import PRESETS, GPTConfig
from lit_gpt_loop.flops import count_parameters


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-350m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_100_048_384),  # TinyLlama-1.1B
        ("llama-3-8b", 8_030_261_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, published):
    assert count_parameters(GPTConfig.preset(preset)).total == published


def test_defaults_are_gpt2_124m_and_every_preset_is_valid():
    assert GPTConfig() == GPTConfig.preset("gpt2-124m")
    for name in PRESETS:
        GPTConfig.preset(name)


def test_derived_sizes():
    llama = GPTConfig.preset(
        "llama-150m", mlp_hidden=None, n_kv_head=None, vocab_multiple=64, vocab_size=50257
    )
    assert (llama.head_dim, llama.num_kv_heads, llama.hidden_size, llama.padded_vocab_size) == (
        64,
        12,
        2048,
        50304,
    )
    gpt2 = GPTConfig()
    assert (gpt2.head_dim, gpt2.num_kv_heads, gpt2.hidden_size, gpt2.padded_vocab_size) == (
        64,
        12,
        3072,
        50257,
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"n_head": 5, "n_embd": 32}, ["n_head=5", "n_embd=32", "n_head=4 or 8", "multiple of 5"]),
        ({"n_head": 12, "n_kv_head": 5}, ["n_kv_head=5", "n_head=12", "n_kv_head=4 or 6"]),
        (
            {"n_head": 4, "n_embd": 12, "position": "rope"},
            ["n_embd / n_head = 3 is odd", "position: learned"],
        ),
        ({"vocab_size": 0}, ["vocab_size=0", "at least 1"]),
        ({"n_layer": 2.0}, ["n_layer=2.0", "whole number"]),
        ({"n_embd": True}, ["n_embd=True", "whole number"]),
        ({"activation_checkpointing": -1}, ["activation_checkpointing=-1", "at least 0"]),
        ({"mlp": "relu"}, ["mlp='relu'", "gelu_tanh, gelu, swiglu"]),
        ({"dropout": 1.0}, ["dropout=1.0", "below 1"]),
        ({"rope_theta": float("inf")}, ["rope_theta=inf", "finite"]),
        ({"norm": "batch", "norm_eps": 0.0}, ["norm='batch'", "norm_eps=0.0"]),  # all problems at once
    ],
)
def test_wrong_shapes_are_one_error_that_names_value_rule_and_remedy(overrides, told):
    with pytest.raises(ValueError) as error:
        GPTConfig(**overrides)
    for words in told:
        assert words in str(error.value)


def test_unknown_preset_names_the_close_ones():
    with pytest.raises(ValueError, match=r"unknown preset 'gpt2-125m'; did you mean gpt2-124m"):
        GPTConfig.preset("gpt2-125m")
    with pytest.raises(ValueError, match=r"no such field; did you mean n_layer"):
        GPTConfig.preset("tiny", n_layers=3)


def test_builds_from_a_yaml_mapping_by_jsonargparse():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", type=GPTConfig)
    parsed = parser.parse_object(
        {"config": {"n_layer": 3, "mlp": "swiglu", "n_kv_head": None, "norm_eps": 1e-6}}
    )
    assert parser.instantiate(parsed).config == GPTConfig(n_layer=3, mlp="swiglu", norm_eps=1e-6)
