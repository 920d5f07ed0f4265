"""The network: initial weights, meta construction, causality, checkpointing, precision, compile, parameter names."""

import copy
import math

import pytest
import torch
from torch import nn

from lit_gpt_loop.model import GPT, Block, GPTConfig

STYLES = ["tiny", "tiny-llama"]


def _tokens(config, rows=2, length=None):
    return torch.randint(config.vocab_size, (rows, length or config.context_length))


def _loss_and_gradients(model, inputs, targets, **more):
    model.zero_grad()
    loss_sum, num_tokens = model(inputs, targets, **more)
    (loss_sum / num_tokens).backward()
    return loss_sum.detach(), {name: p.grad for name, p in model.named_parameters()}


# Initial weights


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("tiny", {}),
        ("tiny-llama", {}),
        ("nanogpt-char", {}),
        ("quickstart", {"n_layer": 2}),
        (
            "llama-1b",
            {"n_layer": 1, "vocab_size": 2000, "n_head": 4},
        ),  # wide: the preset's own init_std keeps it near
    ],
)
def test_first_loss_is_near_ln_vocabulary(preset, overrides):
    config = GPTConfig.preset(preset, **overrides)
    tokens = _tokens(config, rows=4, length=64)
    with torch.no_grad():
        loss_sum, num_tokens = GPT(config)(tokens[:, :-1], tokens[:, 1:])
    assert (loss_sum / num_tokens).item() == pytest.approx(math.log(config.vocab_size), rel=0.05)


def test_weights_start_normal_and_residual_projections_smaller_by_depth():
    config = GPTConfig.preset(
        "tiny", n_embd=128, n_layer=8, init_std=0.03, vocab_multiple=64, tie_embeddings=False
    )
    parameters = dict(GPT(config).named_parameters())
    for name, p in parameters.items():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            std = 0.03 / math.sqrt(2 * 8) if name.endswith("proj.weight") else 0.03
            assert p[:257].std().item() == pytest.approx(std, rel=0.05), name
    assert not parameters["tok_embedding.weight"][257:].any() and not parameters["head.weight"][257:].any()
    assert sum(name.endswith("proj.weight") for name in parameters) == 16


def test_weights_follow_the_seed_and_differ_between_models():
    config = GPTConfig.preset("tiny")

    def weight(model):
        return model.blocks[1].mlp.fc.weight

    torch.manual_seed(7)
    first, second = GPT(config), GPT(config)
    torch.manual_seed(7)
    again = GPT(config)
    assert torch.equal(weight(first), weight(again)) and not torch.equal(weight(first), weight(second))
    torch.manual_seed(7)
    second.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("preset", STYLES)
def test_meta_construction_then_init_equals_direct_construction(preset):
    config = GPTConfig.preset(preset, dropout=0.0)
    with torch.device("meta"):
        late = GPT(config)
    assert all(t.is_meta for t in [*late.parameters(), *late.buffers()])
    torch.manual_seed(3)
    late.to_empty(device="cpu")
    late.init_weights()
    torch.manual_seed(3)
    direct = GPT(config)
    assert late.state_dict().keys() == direct.state_dict().keys()
    tokens = _tokens(config)
    assert torch.equal(late(tokens), direct(tokens))  # RoPE tables included, which no state dict holds


def test_meta_construction_then_load_needs_no_init():
    config = GPTConfig.preset("tiny-llama")
    direct = GPT(config)
    with torch.device("meta"):
        late = GPT(config)
    late.load_state_dict(direct.state_dict(), assign=True)
    tokens = _tokens(config)
    assert torch.equal(late(tokens), direct(tokens))


def test_8b_is_built_on_meta_without_memory():
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("llama-3-8b"))
        assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
        assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 128256)


# What forward promises


@pytest.mark.parametrize("preset", STYLES)
def test_no_token_sees_a_later_one(preset):
    model = GPT(GPTConfig.preset(preset, init_std=0.3)).eval()
    tokens = torch.randint(257, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 257
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(before[:, 12:], after[:, 12:])


def test_padded_vocabulary_changes_nothing():
    plain = GPT(GPTConfig.preset("tiny-llama"))
    padded = GPT(GPTConfig.preset("tiny-llama", vocab_multiple=64))
    state = plain.state_dict()
    for name in ("tok_embedding.weight", "head.weight"):
        state[name] = torch.cat([state[name], torch.full((320 - 257, 32), 9.0)])
    padded.load_state_dict(state)
    tokens = torch.randint(257, (2, 33))
    assert padded(tokens).shape == (2, 33, 257)
    torch.testing.assert_close(padded(tokens), plain(tokens), rtol=1e-6, atol=1e-6)
    loss, gradients = _loss_and_gradients(padded, tokens[:, :-1], tokens[:, 1:])
    expected, expected_gradients = _loss_and_gradients(plain, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected)
    for name, g in gradients.items():
        torch.testing.assert_close(g[: len(expected_gradients[name])], expected_gradients[name], msg=name)
        assert not g[len(expected_gradients[name]) :].any()


def test_only_ignored_targets_give_zero_loss_and_zero_gradients():
    model = GPT(GPTConfig.preset("tiny"))
    tokens = torch.randint(257, (2, 20))
    loss_sum, num_tokens = model(tokens, torch.full_like(tokens, -100))
    loss_sum.backward()
    assert loss_sum.item() == 0 and num_tokens.item() == 0 and num_tokens.dtype == torch.int64
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="65 tokens does not fit context_length=64"):
        GPT(GPTConfig.preset("tiny"))(torch.zeros(1, 65, dtype=torch.long))


def test_first_forward_in_inference_mode_does_not_poison_training():
    model = GPT(GPTConfig.preset("tiny-llama"))
    model._rope = None
    tokens = torch.randint(257, (2, 20))
    with torch.inference_mode():
        model(tokens, tokens)
    model(tokens, tokens)[0].backward()


# Activation checkpointing


@pytest.mark.parametrize("preset", STYLES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_changes_memory_but_no_bit_of_the_gradient(preset, dropout):
    saved_bytes, gradients, losses = [], [], []
    tokens = torch.randint(257, (2, 33))
    for every in (0, 1, 2, 3):
        config = GPTConfig.preset(preset, n_layer=4, dropout=dropout, activation_checkpointing=every)
        torch.manual_seed(1)
        model = GPT(config)
        assert [b.is_checkpointed for b in model.blocks] == [
            every > 0 and i % max(every, 1) == 0 for i in range(4)
        ]
        saved: dict[int, int] = {}

        def note(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss, _ = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
        saved_bytes.append(sum(saved.values()))
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    assert len(set(losses)) == 1
    assert (
        saved_bytes[1] < saved_bytes[2] == saved_bytes[3] < saved_bytes[0]
    )  # of 4 blocks: 4, 2, 2 (0 and 3), none


# Precision


@pytest.mark.parametrize("preset", STYLES)
@pytest.mark.parametrize("way", ["autocast", "parameters"])
def test_bf16_stays_close_to_fp32(preset, way):
    model = GPT(GPTConfig.preset(preset, init_std=0.1))
    tokens = torch.randint(257, (4, 65))
    want, want_gradients = _loss_and_gradients(model, tokens[:, :-1], tokens[:, 1:])
    if way == "parameters":
        model = copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        loss, gradients = _loss_and_gradients(model, tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=2e-3)
    for name, g in gradients.items():
        assert ((g.float() - want_gradients[name]).norm() / want_gradients[name].norm()).item() < 0.06, name


@pytest.mark.parametrize("context", [1024])
def test_softmax_sums_in_fp32_under_bf16(context):
    config = GPTConfig(vocab_size=8, context_length=context, n_layer=1, n_head=2, n_embd=32)
    attention = GPT(config).blocks[0].attention.bfloat16()
    with torch.no_grad():
        for p in attention.parameters():
            p.zero_()
        attention.qkv.bias[64:] = 1.0  # all scores equal, all values one: attention must return one
        attention.proj.weight.copy_(torch.eye(32))
        from lit_gpt_loop.attention import Shared

        out = attention(torch.zeros(1, context, 32, dtype=torch.bfloat16), Shared())
    assert out.float().max().item() == out.float().min().item() == 1.0  # a bf16 sum of ones stops at 256


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_reduce_in_fp32_under_bf16(norm):
    module = GPT(
        GPTConfig(
            vocab_size=8,
            n_embd=4096,
            n_head=64,
            n_kv_head=1,
            mlp_hidden=1,
            n_layer=1,
            norm=norm,
            context_length=8,
        )
    ).norm_f
    x = (torch.randn(4, 4096) + 8).bfloat16()
    want = module(x.float())
    got = copy.deepcopy(module).bfloat16()(x)
    torch.testing.assert_close(
        got.float(), want, rtol=2**-8, atol=2**-8
    )  # one rounding of the result, no more


def test_bf16_conversion_leaves_rope_tables_alone():
    config = GPTConfig.preset("tiny-llama")
    model = GPT(config).to(torch.bfloat16)
    assert not list(model.buffers())
    assert model._rope[0].dtype == torch.float32


# Parameter names: what optimizers group by and checkpoints hold


@pytest.mark.case("C50")
@pytest.mark.parametrize("preset", STYLES)
def test_c50_every_parameter_is_a_matrix_a_norm_a_bias_or_an_embedding_by_its_module(preset):
    model = GPT(GPTConfig.preset(preset, qk_norm=True, bias=True))
    seen = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            assert "norm" in name
        elif isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
        elif not isinstance(module, nn.Embedding):
            assert not own, f"{name} holds parameters outside of Linear, Embedding and norms: {list(own)}"
        seen += [f"{name}.{n}" for n in own]
    assert sorted(seen) == sorted(model.state_dict()) == sorted(n for n, _ in model.named_parameters())


def test_tied_head_is_one_parameter_under_one_name():
    tied, untied = GPT(GPTConfig.preset("tiny")), GPT(GPTConfig.preset("tiny", tie_embeddings=False))
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    assert tied.head_weight is tied.tok_embedding.weight and untied.head_weight is untied.head.weight


@pytest.mark.case("C52")
@pytest.mark.parametrize("preset", STYLES)
def test_c52_compiled_in_place_keeps_names_and_numbers(preset):
    config = GPTConfig.preset(preset, activation_checkpointing=1)
    model = GPT(config)
    names = list(model.state_dict())
    tokens = torch.randint(257, (2, 33))
    want, want_gradients = _loss_and_gradients(model, tokens[:, :-1], tokens[:, 1:])
    model.compile(backend="aot_eager")
    loss, gradients = _loss_and_gradients(model, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for name, g in gradients.items():
        torch.testing.assert_close(g, want_gradients[name], rtol=1e-5, atol=1e-6, msg=name)
    assert list(model.state_dict()) == names
    plain = GPT(config)
    plain.load_state_dict(model.state_dict())
    torch._dynamo.reset()


def test_blocks_are_what_fsdp_wraps():
    model = GPT(GPTConfig.preset("tiny"))
    assert isinstance(model.blocks, nn.ModuleList) and all(type(b) is Block for b in model.blocks)
