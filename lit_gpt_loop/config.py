"""The shape of a GPT, as plain numbers and words: what `model.py` builds, what `flops.py` and `recipes.plan` count.

Standard library only, so that a plan can be made where torch is not installed. One class, `GPTConfig`, covers GPT-2 style
(learned positions, LayerNorm, GELU, biases, tied head) and Llama style (RoPE, RMSNorm, SwiGLU, grouped-query attention, no
biases); `PRESETS` names the sizes that people ask for.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class GPTConfig:
    """Everything that decides the shape of a GPT; the defaults are GPT-2 124M.

    Attributes:
        vocab_size: number of tokens that can be predicted.
        context_length: the longest sequence that the model sees, in tokens.
        n_layer: number of transformer blocks.
        n_head: attention (query) heads per block; each has `n_embd / n_head` channels.
        n_kv_head: key and value heads; fewer than `n_head` is grouped-query attention. None means `n_head`.
        n_embd: width of the residual stream.
        mlp: "gelu_tanh" (two matrices, GELU by GPT-2's tanh formula), "gelu" (the exact function, as in nanoGPT; on CPU 3 times
            faster than the formula) or "swiglu" (three matrices).
        mlp_hidden: width inside the MLP. None means `4 n_embd` for GELU and, for "swiglu", `8/3 n_embd` rounded up to a
            multiple of 64 (the same number of parameters as a GELU MLP).
        norm: "layernorm" or "rmsnorm", before each sub-layer and before the head.
        norm_eps: epsilon of every norm.
        position: "learned" (one vector per position, added to the embedding) or "rope" (rotation of queries and keys).
        rope_theta: base wavelength of RoPE.
        bias: biases in the linear layers and in LayerNorm.
        tie_embeddings: the head uses the embedding's matrix, as one parameter.
        qk_norm: RMSNorm over each head's queries and keys, before RoPE (as Qwen3 does).
        dropout: probability after the embedding, in attention and after each sub-layer.
        init_std: standard deviation of initial weights; the projections that write to the residual stream get
            `init_std / sqrt(2 n_layer)`.
        vocab_multiple: the embedding's rows are rounded up to a multiple of this (64 suits GPUs). The extra rows are never
            predicted, get no gradient, and are left out of every parameter and FLOP count.
        activation_checkpointing: 0 keeps all activations, 1 recomputes every block in backward, n every n-th block.
        in_document_attention: no token attends across a document border of a packed row; positions then start at 0 in
            each document, so that a packed row gives what its documents give one by one.
    """

    vocab_size: int = 50257
    context_length: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None
    n_embd: int = 768
    mlp: Literal["gelu_tanh", "gelu", "swiglu"] = "gelu_tanh"
    mlp_hidden: int | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    position: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    bias: bool = True
    tie_embeddings: bool = True
    qk_norm: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    vocab_multiple: int = 1
    activation_checkpointing: int = 0
    in_document_attention: bool = False

    def __post_init__(self) -> None:
        problems = [*self._range_problems(), *self._shape_problems()]
        if problems:
            raise ValueError("GPTConfig: " + "; ".join(problems))

    def _range_problems(self) -> list[str]:
        problems = []
        minimum = {
            "vocab_size": 1,
            "context_length": 1,
            "n_layer": 1,
            "n_head": 1,
            "n_kv_head": 1,
            "n_embd": 1,
            "mlp_hidden": 1,
            "vocab_multiple": 1,
            "activation_checkpointing": 0,
        }
        for name, least in minimum.items():
            value = getattr(self, name)
            if value is None and name in ("n_kv_head", "mlp_hidden"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                problems.append(f"{name}={value!r} must be a whole number of at least {least}")
        for name, choices in {
            "mlp": ("gelu_tanh", "gelu", "swiglu"),
            "norm": ("layernorm", "rmsnorm"),
            "position": ("learned", "rope"),
        }.items():
            if getattr(self, name) not in choices:
                problems.append(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout={self.dropout!r} must be at least 0 and below 1")
        for name in ("norm_eps", "rope_theta", "init_std"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                problems.append(f"{name}={value!r} must be a finite number above 0")
        return problems

    def _shape_problems(self) -> list[str]:
        heads, width, kv = self.n_head, self.n_embd, self.n_kv_head
        if not all(isinstance(n, int) and n > 0 for n in (heads, width)):
            return []
        if width % heads:
            near = _nearest_divisors(width, heads)
            return [
                f"n_head={heads} does not divide n_embd={width} (each head gets n_embd / n_head channels): "
                f"use n_head={near} or an n_embd that is a multiple of {heads}"
            ]
        problems = []
        if isinstance(kv, int) and kv > 0 and heads % kv:
            problems.append(
                f"n_kv_head={kv} does not divide n_head={heads} (each key-value head serves n_head / n_kv_head queries): "
                f"use n_kv_head={_nearest_divisors(heads, kv)}, or null for one per query head"
            )
        if self.position == "rope" and (width // heads) % 2:
            problems.append(
                f"n_embd / n_head = {width // heads} is odd, but RoPE rotates channels in pairs: "
                "choose n_head so that n_embd / n_head is even, or position: learned"
            )
        return problems

    @property
    def head_dim(self) -> int:
        """Channels per attention head."""
        return self.n_embd // self.n_head

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden_size(self) -> int:
        """Width inside the MLP, with the default resolved."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        if self.mlp != "swiglu":
            return 4 * self.n_embd
        return 64 * math.ceil(8 * self.n_embd / (3 * 64))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`."""
        return self.vocab_multiple * math.ceil(self.vocab_size / self.vocab_multiple)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """Return the named preset with some fields replaced.

        Args:
            name: a key of `PRESETS`.
            **overrides: fields of this class, e.g. `vocab_size=4096`.

        Raises:
            ValueError: no such preset or field (names the close ones), or the result is not a valid shape.
        """
        if name not in PRESETS:
            raise ValueError(
                f"unknown preset {name!r}{_did_you_mean(name, list(PRESETS))} Presets: {', '.join(PRESETS)}"
            )
        known = [f.name for f in fields(cls)]
        for key in overrides:
            if key not in known:
                raise ValueError(
                    f"preset {name!r} cannot take {key!r}: GPTConfig has no such field"
                    f"{_did_you_mean(key, known)} Fields: {', '.join(known)}"
                )
        return cls(**{**PRESETS[name], **overrides})


def _did_you_mean(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(close)}?" if close else "."


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = max((d for d in divisors if d < wanted), default=1)
    above = min((d for d in divisors if d > wanted), default=number)
    return " or ".join(str(d) for d in sorted({below, above}))


_LLAMA: dict[str, Any] = {
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tie_embeddings": False,
}

# GPT-2 sizes: Radford et al. 2019 (their 1.5B is 48 layers, 25 heads, width 1600). Llama-3-8B: Meta's published config.
# The wider Llama shapes start from std sqrt(2 / (5 n_embd)) (Nguyen & Salazar 2019), which keeps the first loss near
# ln(vocab_size): with 0.02 at width 4096 the first logits would have a standard deviation of 1.3.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {},
    "gpt2-350m": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-774m": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-1.5b": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "llama-150m": {
        **_LLAMA,
        "vocab_size": 32000,
        "context_length": 2048,
        "n_layer": 16,
        "n_head": 12,
        "n_kv_head": 4,
        "n_embd": 768,
        "mlp_hidden": 2048,
    },
    "llama-1b": {
        **_LLAMA,
        "vocab_size": 32000,
        "context_length": 4096,
        "n_layer": 22,
        "n_head": 32,
        "n_kv_head": 4,
        "n_embd": 2048,
        "mlp_hidden": 5632,
        "init_std": 0.014,
    },
    "llama-3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "context_length": 8192,
        "n_layer": 32,
        "n_head": 32,
        "n_kv_head": 8,
        "n_embd": 4096,
        "mlp_hidden": 14336,
        "rope_theta": 500000.0,
        "init_std": 0.0099,
    },
    # For tests: as small as every part still allows.
    "tiny": {"vocab_size": 257, "context_length": 64, "n_layer": 2, "n_head": 2, "n_embd": 32},
    "tiny-llama": {
        **_LLAMA,
        "vocab_size": 257,
        "context_length": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_kv_head": 2,
        "n_embd": 32,
    },
    # For minutes on two CPU cores, with a byte-level BPE vocabulary trained at prepare time.
    "quickstart": {
        **_LLAMA,
        "vocab_size": 4096,
        "context_length": 256,
        "n_layer": 6,
        "n_head": 4,
        "n_embd": 256,
        "tie_embeddings": True,
    },
    "quickstart-gpt2": {
        "mlp": "gelu",
        "vocab_size": 4096,
        "context_length": 256,
        "n_layer": 6,
        "n_head": 4,
        "n_embd": 256,
    },
    # nanoGPT's small CPU recipe on characters, and its GPU recipe's model (10.65 M parameters), which recipes.bench times.
    "nanogpt-char": {
        "mlp": "gelu",
        "vocab_size": 65,
        "context_length": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "bias": False,
    },
    "nanogpt-char-10m": {
        "mlp": "gelu",
        "vocab_size": 65,
        "context_length": 256,
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "bias": False,
    },
}
