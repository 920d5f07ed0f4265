"""Our weights under the names that Hugging Face transformers uses, and back.

A GPT-2 style model becomes `GPT2LMHeadModel`, a Llama style one `LlamaForCausalLM`, with QK-norm `Qwen3ForCausalLM`. Plain
dicts in and out: transformers itself is not needed. What differs between the two:

- transformers keeps queries, keys and values apart (Llama, Qwen3), as well as gate and up; ours are fused, in that order;
- GPT-2 there stores matrices as (in, out) and always has biases: ours without biases get zeros, which is the same function;
- the padded vocabulary's rows are dropped.

A mix that no architecture there can express (say learned positions with SwiGLU) is refused, naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.model import GPT

_GPT2 = {"mlp": ("gelu_tanh", "gelu"), "norm": ("layernorm",), "position": ("learned",)}
_LLAMA = {"mlp": ("swiglu",), "norm": ("rmsnorm",), "position": ("rope",)}


def hf_model_type(config: GPTConfig) -> str:
    """Return "gpt2", "llama" or "qwen3".

    Raises:
        ValueError: transformers has no architecture for this mix; names the fields in the way.
    """
    family, style = ("gpt2", _GPT2) if config.position == "learned" else ("llama", _LLAMA)
    problems = [
        f"{name}={getattr(config, name)!r} (needs {' or '.join(map(repr, wanted))})"
        for name, wanted in style.items()
        if getattr(config, name) not in wanted
    ]
    if family == "gpt2":
        if config.num_kv_heads != config.n_head:
            problems.append(f"n_kv_head={config.n_kv_head} (needs n_head={config.n_head})")
        if config.qk_norm:
            problems.append("qk_norm=True (needs False)")
    elif config.qk_norm:
        family = "qwen3"
        if config.bias:
            problems.append("bias=True (needs False)")
    if problems:
        raise ValueError(
            f"transformers' {family} architecture cannot hold this model: {', '.join(problems)}. Models of pure GPT-2 style "
            "or Llama style (see the presets) can be exported; this one can be used from its checkpoint"
        )
    return family


def to_hf_config(config: GPTConfig, eot_id: int | None = None) -> dict[str, Any]:
    """Return the content of `config.json`; `eot_id` becomes its begin and end token."""
    kind = hf_model_type(config)
    common: dict[str, Any] = {
        "architectures": [
            {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
    }
    if kind == "gpt2":
        return {
            **common,
            "n_positions": config.context_length,
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_inner": config.hidden_size,
            "activation_function": "gelu" if config.mlp == "gelu" else "gelu_new",
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
        }
    return {
        **common,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.n_embd,
        "intermediate_size": config.hidden_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        "attention_bias": config.bias,
        **({"mlp_bias": config.bias} if kind == "llama" else {}),
        # transformers 5 reads rope_parameters, 4 read rope_theta.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def from_hf_config(hf: Mapping[str, Any]) -> GPTConfig:
    """Return the `GPTConfig` of a `config.json`, for the same three architectures.

    Raises:
        ValueError: another architecture, or a feature that `GPT` does not have; names it.
    """
    kind = hf.get("model_type")
    if kind == "gpt2":
        _refuse_unless(
            hf,
            {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
        )
        return GPTConfig(
            vocab_size=hf.get("vocab_size", 50257),
            context_length=hf.get("n_positions", 1024),
            n_layer=hf.get("n_layer", 12),
            n_head=hf.get("n_head", 12),
            n_embd=hf.get("n_embd", 768),
            mlp="gelu" if hf.get("activation_function") == "gelu" else "gelu_tanh",
            mlp_hidden=hf.get("n_inner"),
            norm_eps=hf.get("layer_norm_epsilon", 1e-5),
            tie_embeddings=hf.get("tie_word_embeddings", True),
            init_std=hf.get("initializer_range", 0.02),
        )
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model_type={kind!r} cannot be read: gpt2, llama and qwen3 can")
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    _refuse_unless(
        rope, {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1.0, None)}
    )
    bias = bool(hf.get("attention_bias", False))
    _refuse_unless(
        hf,
        {
            "hidden_act": ("silu",),
            "mlp_bias": (bias,),
            "attention_bias": (False,) if kind == "qwen3" else (bias,),
            "use_sliding_window": (False,),
            "head_dim": (width // heads, None),
        },
    )
    return GPTConfig(
        vocab_size=hf["vocab_size"],
        context_length=hf["max_position_embeddings"],
        n_layer=hf["num_hidden_layers"],
        n_head=heads,
        n_kv_head=hf.get("num_key_value_heads"),
        n_embd=width,
        mlp="swiglu",
        mlp_hidden=hf["intermediate_size"],
        norm="rmsnorm",
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        position="rope",
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        bias=bias,
        tie_embeddings=hf.get("tie_word_embeddings", False),
        qk_norm=kind == "qwen3",
        init_std=hf.get("initializer_range", 0.02),
    )


def to_hf_state_dict(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our weights under transformers' names; tensors are contiguous, and copies only where a layout differs.

    Raises:
        ValueError: the mix cannot be expressed (see `hf_model_type`), or the state dict does not fit the config.
    """
    kind = hf_model_type(config)
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in GPT(config).named_parameters()}
    _check_names(state, wanted)
    V = config.vocab_size
    if kind == "gpt2":
        out = {
            "transformer.wte.weight": state["tok_embedding.weight"][:V],
            "transformer.wpe.weight": state["pos_embedding.weight"],
        }
        for ours, theirs, transpose in _gpt2_names(config.n_layer):
            weight = state[f"{ours}.weight"]
            bias = state.get(f"{ours}.bias")
            out[f"{theirs}.weight"] = weight.t() if transpose else weight
            out[f"{theirs}.bias"] = weight.new_zeros(weight.size(0)) if bias is None else bias
    else:
        out = {"model.embed_tokens.weight": state["tok_embedding.weight"][:V]}
        for ours, parts, sizes in _llama_names(config):
            for suffix in ("weight", "bias"):
                if (fused := state.get(f"{ours}.{suffix}")) is not None:
                    for name, piece in zip(parts, fused.split(sizes) if sizes else [fused], strict=True):
                        out[f"{name}.{suffix}"] = piece
    if not config.tie_embeddings:
        out["lm_head.weight"] = state["head.weight"][:V]
    return {name: tensor.detach().contiguous() for name, tensor in out.items()}


def from_hf_state_dict(hf_state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return transformers' weights under our names, for `GPT(config).load_state_dict`.

    Padding rows, if `config` has them, are zero. GPT-2's causal-mask buffers and a tied `lm_head.weight` are dropped.

    Raises:
        ValueError: a weight is missing, or GPT-2's biases are not zero while `config.bias` is False.
    """
    kind = hf_model_type(config)
    missing: list[str] = []

    def take(name: str) -> Tensor:
        if name not in hf_state:
            missing.append(name)
            return torch.empty(0)
        return hf_state[name].detach()

    def padded(weight: Tensor) -> Tensor:
        extra = config.padded_vocab_size - weight.size(0)
        return (
            torch.cat([weight, weight.new_zeros(extra, *weight.shape[1:])])
            if weight.numel() and extra > 0
            else weight
        )

    out: dict[str, Tensor] = {}
    if kind == "gpt2":
        out["tok_embedding.weight"] = padded(take("transformer.wte.weight"))
        out["pos_embedding.weight"] = take("transformer.wpe.weight")
        for ours, theirs, transpose in _gpt2_names(config.n_layer):
            weight, bias = take(f"{theirs}.weight"), take(f"{theirs}.bias")
            out[f"{ours}.weight"] = weight.t().contiguous() if transpose and weight.dim() == 2 else weight
            if config.bias:
                out[f"{ours}.bias"] = bias
            elif bias.any():
                raise ValueError(
                    f"{theirs}.bias is not zero, but the config has no biases: build it with bias=True"
                )
    else:
        out["tok_embedding.weight"] = padded(take("model.embed_tokens.weight"))
        for ours, parts, sizes in _llama_names(config):
            for suffix in ("weight", "bias") if config.bias and "norm" not in ours else ("weight",):
                pieces = [take(f"{name}.{suffix}") for name in parts]
                out[f"{ours}.{suffix}"] = torch.cat(pieces) if sizes else pieces[0]
    if not config.tie_embeddings:
        out["head.weight"] = padded(take("lm_head.weight"))
    if missing:
        raise ValueError(
            f"{len(missing)} weights that this config needs are missing, the first is {missing[0]}: "
            "take the config from the same model's config.json (`from_hf_config`)"
        )
    return out


def _gpt2_names(n_layer: int) -> list[tuple[str, str, bool]]:
    """Return (our module, their module, whether the matrix is transposed)."""
    names = [("norm_f", "transformer.ln_f", False)]
    for i in range(n_layer):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        names += [
            (f"{ours}.norm_1", f"{theirs}.ln_1", False),
            (f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", True),
            (f"{ours}.attention.proj", f"{theirs}.attn.c_proj", True),
            (f"{ours}.norm_2", f"{theirs}.ln_2", False),
            (f"{ours}.mlp.fc", f"{theirs}.mlp.c_fc", True),
            (f"{ours}.mlp.proj", f"{theirs}.mlp.c_proj", True),
        ]
    return names


def _llama_names(config: GPTConfig) -> list[tuple[str, list[str], list[int]]]:
    """Return (our module, their modules, rows of each if ours fuses several)."""
    q, kv, hidden = config.n_head * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    names: list[tuple[str, list[str], list[int]]] = [("norm_f", ["model.norm"], [])]
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attention = f"{theirs}.self_attn"
        names += [
            (f"{ours}.norm_1", [f"{theirs}.input_layernorm"], []),
            (f"{ours}.attention.qkv", [f"{attention}.{n}_proj" for n in "qkv"], [q, kv, kv]),
            (f"{ours}.attention.proj", [f"{attention}.o_proj"], []),
            (f"{ours}.norm_2", [f"{theirs}.post_attention_layernorm"], []),
            (f"{ours}.mlp.fc", [f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"], [hidden, hidden]),
            (f"{ours}.mlp.proj", [f"{theirs}.mlp.down_proj"], []),
        ]
        if config.qk_norm:
            names += [(f"{ours}.attention.{n}_norm", [f"{attention}.{n}_norm"], []) for n in "qk"]
    return names


def _refuse_unless(hf: Mapping[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    for name, values in allowed.items():
        if name in hf and hf[name] not in values:
            raise ValueError(
                f"{name}={hf[name]!r} cannot be read: GPT has only {' or '.join(map(repr, values))}"
            )


def _check_names(state: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the config: missing {missing[:3] or 'nothing'}, not expected {extra[:3] or 'nothing'}. "
            "Pass GPT's own state dict (no prefix) and the config that it was built with"
        )
    for name, shape in wanted.items():
        if state[name].shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)}, but the config gives {tuple(shape)}: "
                "pass the config that the model was built with"
            )
