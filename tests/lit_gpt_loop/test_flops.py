"""FLOPs and parameters from the shape alone against torch's own counter, the real model's tensors and worked values."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lit_gpt_loop import flops
from lit_gpt_loop.model import GPT, GPTConfig

SHAPES = {
    "gpt2": GPTConfig.preset("tiny", n_layer=3),
    "gpt2-untied-padded": GPTConfig.preset("tiny", tie_embeddings=False, vocab_multiple=64),
    "gpt2-no-bias": GPTConfig.preset("tiny", bias=False),
    "llama-gqa": GPTConfig.preset("tiny-llama", n_layer=3),
    "llama-qk-norm-bias": GPTConfig.preset("tiny-llama", qk_norm=True, bias=True, tie_embeddings=True),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_by_part_equal_the_models_tensors(shape):
    config = SHAPES[shape]
    with torch.device("meta"):
        model = GPT(config)

    def numel(*words):
        return sum(p.numel() for n, p in model.named_parameters() if any(w in n for w in words))

    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    count = flops.count_parameters(config)
    assert count.token_embedding == numel("tok_embedding") - padding
    assert count.position_embedding == numel("pos_embedding")
    assert count.attention == numel("qkv", "attention.proj")
    assert count.mlp == numel("mlp")
    assert count.norms == numel("norm")
    assert count.head == (0 if config.tie_embeddings else numel("head") - padding)
    assert count.total == numel("") - padding * (1 if config.tie_embeddings else 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_matmul_flops_equal_torchs_counter_exactly(shape):
    config = SHAPES[shape]
    model = GPT(config)
    tokens = torch.randint(
        config.vocab_size, (1, 24)
    )  # fewer tokens than channels: the loss is a plain matmul
    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused kernel
        with FlopCounterMode(display=False) as forward:
            loss, _ = model(tokens, tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    expected = flops.matmul_flops(config, batch_size=1, sequence_length=24)
    assert (forward.get_total_flops(), backward.get_total_flops()) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_6n_and_the_attention_term_add_up_to_the_exact_count(shape):
    config = SHAPES[shape]
    forward, backward = flops.matmul_flops(config, batch_size=2, sequence_length=64)
    padding = 6 * (config.padded_vocab_size - config.vocab_size) * config.n_embd
    per_token = flops.flops_per_token(config) + flops.attention_flops_per_token(config, 64) + padding
    assert (forward + backward) / (2 * 64) == per_token
    assert flops.attention_flops_per_token(config) == flops.attention_flops_per_token(
        config, config.context_length
    )


@pytest.mark.case("C44")
def test_c44_n_counts_a_tied_matrix_once_and_neither_tables_nor_padding():
    tied = GPTConfig.preset("tiny", tie_embeddings=True)
    untied = GPTConfig.preset("tiny", tie_embeddings=False)
    assert flops.num_matmul_params(tied) == flops.num_matmul_params(untied) == 2 * 12 * 32**2 + 257 * 32
    assert flops.num_matmul_params(GPTConfig.preset("tiny", vocab_multiple=512)) == flops.num_matmul_params(
        tied
    )
    assert flops.num_matmul_params(GPTConfig.preset("tiny", context_length=9)) == flops.num_matmul_params(
        tied
    )
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("tiny", vocab_size=10, n_embd=4, n_head=2))
    assert [n for n, p in model.state_dict().items() if p.shape == (10, 4)] == ["tok_embedding.weight"]


def test_6n_of_the_benchmarks_model():
    config = GPTConfig.preset("nanogpt-char-10m")
    assert flops.flops_per_token(config) * 3072 == 6.0 * (6 * 12 * 384**2 + 65 * 384) * 3072


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("preset", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_flops_equal_what_checkpointing_adds_to_backward(preset, every, dropout):
    config = GPTConfig.preset(preset, n_layer=3, activation_checkpointing=every, dropout=dropout)
    tokens = torch.randint(257, (1, 24))
    loss, _ = GPT(config)(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    matrices = {str(op): n for op, n in backward.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
    plain = 24 * flops.flops_per_token(config) * 2 / 3
    assert sum(matrices.values()) - plain == 24 * flops.recomputed_flops_per_token(config)
    assert (every == 0) == (flops.recomputed_flops_per_token(config) == 0.0)
