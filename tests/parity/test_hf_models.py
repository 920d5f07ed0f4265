"""Logits, loss and gradients equal transformers' GPT-2, Llama and Qwen3 on random weights, in fp32 to 1e-5."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lit_gpt_loop.hf import (
    from_hf_config,
    from_hf_state_dict,
    hf_model_type,
    to_hf_config,
    to_hf_state_dict,
)
from lit_gpt_loop.model import GPT, GPTConfig
from recipes.export import export_hf

SHAPES = {
    "gpt2-tied": GPTConfig.preset("tiny", init_std=0.2),
    "gpt2-untied-exact-gelu": GPTConfig.preset("tiny", init_std=0.2, tie_embeddings=False, mlp="gelu"),
    "gpt2-no-bias-padded": GPTConfig.preset("tiny", init_std=0.2, bias=False, vocab_multiple=64),
    "llama-gqa-untied": GPTConfig.preset("tiny-llama", init_std=0.2),
    "llama-gqa-tied-padded": GPTConfig.preset(
        "tiny-llama", init_std=0.2, tie_embeddings=True, vocab_multiple=64
    ),
    "llama-mha-bias-theta": GPTConfig.preset(
        "tiny-llama", init_std=0.2, n_kv_head=None, bias=True, rope_theta=5e5
    ),
    "qwen3": GPTConfig.preset("tiny-llama", init_std=0.2, qk_norm=True, n_kv_head=1),
}


def _randomised(config):
    """A GPT whose norms and biases are random as well: ones and zeros would hide a swapped or forgotten one."""
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _theirs(config):
    hf_config = transformers.AutoConfig.for_model(**to_hf_config(config), attn_implementation="sdpa")
    return transformers.AutoModelForCausalLM.from_config(hf_config).float()


@pytest.mark.parametrize("length", [7, 32])  # fewer tokens than channels: plain loss; more: the chunked one
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_equal_transformers(shape, length):
    config = SHAPES[shape]
    ours, theirs = _randomised(config).eval(), _theirs(config).eval()
    # strict, but for the tied head, which transformers lists twice
    loaded = theirs.load_state_dict(to_hf_state_dict(ours.state_dict(), config), strict=False)
    assert loaded.unexpected_keys == [] and set(loaded.missing_keys) <= {"lm_head.weight"}
    assert (loaded.missing_keys == []) == (not config.tie_embeddings)

    tokens = torch.randint(config.vocab_size, (3, length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -100
    logits = theirs(inputs).logits
    torch.testing.assert_close(ours(inputs), logits, rtol=1e-5, atol=1e-5)

    their_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    their_loss.backward()
    loss_sum, num_tokens = ours(inputs, targets)
    assert loss_sum.dtype == torch.float32 and num_tokens == 3 * length - 5
    torch.testing.assert_close(loss_sum / num_tokens, their_loss, rtol=1e-5, atol=1e-5)

    (loss_sum / num_tokens).backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    if not config.bias:  # GPT-2 there has biases always; ours then holds none
        expected = {n: torch.zeros_like(g) if n.endswith("bias") else g for n, g in expected.items()}
    expected = from_hf_state_dict(expected, config)
    assert expected.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_config_survive_the_round_trip(shape):
    config = SHAPES[shape]
    state = _randomised(config).state_dict()
    back = from_hf_state_dict(to_hf_state_dict(state, config), config)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)

    read = from_hf_config(json.loads(json.dumps(to_hf_config(config))))
    same = {
        "vocab_size",
        "context_length",
        "n_layer",
        "n_head",
        "num_kv_heads",
        "n_embd",
        "hidden_size",
        "norm",
    }
    same |= {"norm_eps", "position", "rope_theta", "mlp", "tie_embeddings", "qk_norm"}
    assert {n: getattr(read, n) for n in same} == {n: getattr(config, n) for n in same}


def test_transformers_weights_load_into_ours():
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=40,
        )
    ).eval()
    config = from_hf_config(theirs.config.to_dict())
    ours = GPT(config).eval()
    ours.load_state_dict(from_hf_state_dict(theirs.state_dict(), config))
    tokens = torch.randint(97, (2, 40))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"mlp": "swiglu"}, "mlp='swiglu'"),
        ({"norm": "rmsnorm"}, "norm='rmsnorm'"),
        ({"n_kv_head": 1}, "n_kv_head=1"),
        ({"qk_norm": True}, "qk_norm=True"),
    ],
)
def test_a_mix_that_transformers_cannot_hold_is_refused_by_field(overrides, named):
    with pytest.raises(ValueError, match=named):
        hf_model_type(GPTConfig.preset("tiny", **overrides))


def test_features_that_gpt_lacks_are_refused_by_name():
    llama = to_hf_config(GPTConfig.preset("tiny-llama"))
    with pytest.raises(ValueError, match="rope_type='llama3'"):
        from_hf_config({**llama, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}})
    with pytest.raises(ValueError, match="head_dim=128"):
        from_hf_config({**llama, "head_dim": 128})
    with pytest.raises(ValueError, match="mixtral"):
        from_hf_config({**llama, "model_type": "mixtral"})


def _tokenizer_file(folder, vocab_size):
    words = {"<|endoftext|>": 0, **{chr(c): c - 32 for c in range(33, 33 + vocab_size - 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("shape", ["gpt2-no-bias-padded", "llama-gqa-untied", "qwen3"])
def test_exported_folder_loads_offline_and_gives_the_same_logits(tmp_path, shape):
    config = SHAPES[shape]
    ours = _randomised(config).eval()
    file = _tokenizer_file(tmp_path, 90)
    out = export_hf(ours.state_dict(), config, file, tmp_path / "model", eot_token="<|endoftext|>")
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.randint(config.vocab_size, (2, 64))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == 0
    assert tokenizer("abc")["input_ids"] == Tokenizer.from_file(str(file)).encode("abc").ids
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"


def test_export_leaves_nothing_behind_when_it_cannot_finish(tmp_path):
    config = SHAPES["llama-gqa-untied"]
    state = GPT(config).state_dict()
    file = _tokenizer_file(tmp_path, 90)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no token '<eos>'"):
        export_hf(state, config, file, tmp_path / "a", eot_token="<eos>")
    with pytest.raises(ValueError, match="does not fit the config"):
        export_hf({f"model.{n}": t for n, t in state.items()}, config, file, tmp_path / "b")
    with pytest.raises(ValueError, match="has 90 tokens, but the model predicts 50"):
        export_hf(state, GPTConfig.preset("tiny-llama", vocab_size=50), file, tmp_path / "c")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        export_hf(state, config, file, tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_no_half_written_folder(tmp_path, monkeypatch):
    config = SHAPES["llama-gqa-untied"]
    written = []

    def half(weights, path, metadata):
        path.write_bytes(b"half")
        written.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recipes.export.save_file", half)
    with pytest.raises(OSError, match="No space left"):
        export_hf(GPT(config).state_dict(), config, None, tmp_path / "model")
    assert written and list(tmp_path.iterdir()) == []
