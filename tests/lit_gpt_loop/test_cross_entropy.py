"""The loss against plain fp32 cross-entropy: all three paths, padded vocabulary, ignored targets, low precision, memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lit_gpt_loop import cross_entropy
from lit_gpt_loop.activations import chunk_tokens
from lit_gpt_loop.cross_entropy import linear_cross_entropy_sum

N, D, V, P = 96, 16, 200, 256


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Chunks of 25 tokens, so that the last one is short: the real ones would hold all of a test's tokens."""
    monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda *_: 25)


def _case(tokens=N, dtype=torch.float32, padded=True, ignored=10):
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, D, generator=g).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(P if padded else V, D, generator=g)).to(dtype).requires_grad_()
    targets = torch.randint(V, (tokens,), generator=g)
    targets[torch.randperm(tokens, generator=g)[:ignored]] = -100
    return hidden, weight, targets


def _plain(hidden, weight, targets):
    """Loss and gradients in fp64, from materialised logits of the true vocabulary."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(h @ w[:V].T, targets, reduction="sum")
    return loss, *torch.autograd.grad(loss, (h, w))


def _error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [D - 1, N])  # below the width the plain path, above it the chunked one
def test_fp32_equals_plain_cross_entropy(tokens, padded):
    hidden, weight, targets = _case(tokens, padded=padded, ignored=3)
    want, want_h, want_w = _plain(hidden, weight, targets)
    loss = linear_cross_entropy_sum(hidden, weight, targets, V)
    assert loss.dtype == torch.float32 and loss.shape == ()
    loss.backward()
    assert (
        _error(loss, want) < 1e-6
        and _error(hidden.grad, want_h) < 1e-6
        and _error(weight.grad, want_w) < 1e-6
    )
    assert not weight.grad[V:].any()
    assert not hidden.grad[targets == -100].any()


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_loss_is_fp32_and_as_exact_as_materialised_logits(autocast):
    hidden, weight, targets = _case(dtype=torch.float32 if autocast else torch.bfloat16)
    _, want_h, want_w = _plain(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy_sum(hidden, weight, targets, V)
        plain = F.cross_entropy(F.linear(hidden, weight)[:, :V].float(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (hidden, weight))
    plain_grads = torch.autograd.grad(plain, (hidden, weight))
    assert [g.dtype for g in grads] == [hidden.dtype, weight.dtype]
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for got, usual, exact in zip(grads, plain_grads, (want_h, want_w), strict=True):
        assert _error(got, exact) < max(1.2 * _error(usual, exact), 1e-6) < 0.02
    assert not grads[1][V:].any()


def test_bf16_loss_of_many_tokens_is_not_rounded_to_8_bits():
    hidden, weight, targets = _case(4000, dtype=torch.bfloat16, ignored=0)
    want, *_ = _plain(hidden, weight, targets)
    got = [linear_cross_entropy_sum(hidden, weight, targets, V)]
    targets = targets.clone()
    targets[0] = -100  # one token of 4,000 fewer must show
    got.append(linear_cross_entropy_sum(hidden, weight, targets, V))
    token = F.cross_entropy(F.linear(hidden[:1], weight)[:, :V].double(), _case(4000, ignored=0)[2][:1])
    assert _error(got[0], want) < 1e-4
    assert (got[0] - got[1]).item() == pytest.approx(token.item(), abs=0.01)


def test_fp16_gradients_survive_although_they_are_made_before_the_loss_scale():
    hidden, weight, targets = _case(dtype=torch.float16)
    want, want_h, want_w = _plain(hidden, weight, targets)
    loss = linear_cross_entropy_sum(hidden, weight, targets, V)
    loss.backward()
    assert loss.dtype == torch.float32
    assert (
        _error(loss, want) < 1e-3
        and _error(hidden.grad, want_h) < 2e-3
        and _error(weight.grad, want_w) < 2e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [D - 1, N])
def test_a_batch_of_ignored_targets_gives_zero_and_no_nan(tokens, dtype):
    hidden, weight, _ = _case(tokens, dtype=dtype)
    loss = linear_cross_entropy_sum(hidden, weight, torch.full((tokens,), -100), V)
    loss.backward()
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    assert not hidden.grad.any() and not weight.grad.any()
    assert not hidden.grad.isnan().any() and not weight.grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_take_no_part_whatever_they_hold(dtype):
    hidden, weight, targets = _case(dtype=dtype)
    clean = linear_cross_entropy_sum(hidden, weight, targets, V)
    with torch.no_grad():
        weight[V:] = 50.0
    assert torch.equal(linear_cross_entropy_sum(hidden, weight, targets, V), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_gives_the_same_loss_without_gradients(dtype):
    hidden, weight, targets = _case(dtype=dtype)
    train = linear_cross_entropy_sum(hidden, weight, targets, V)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy_sum(hidden, weight, targets, V), train.detach())
    with torch.inference_mode():
        assert not linear_cross_entropy_sum(hidden, weight, targets, V).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_scales_by_the_incoming_gradient(dtype):
    hidden, weight, targets = _case(dtype=dtype)
    whole = torch.autograd.grad(linear_cross_entropy_sum(hidden, weight, targets, V), (hidden, weight))
    mean = torch.autograd.grad(linear_cross_entropy_sum(hidden, weight, targets, V) / 64, (hidden, weight))
    for a, b in zip(whole, mean, strict=True):
        torch.testing.assert_close(a / 64, b)


def test_a_scale_does_not_round_bf16_gradients_again_on_their_way_to_fp32_leaves():
    hidden, weight, targets = _case()
    third = torch.tensor(1 / 3)
    grads = []
    for scale in (torch.tensor(1.0), third):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy_sum(hidden, weight, targets, V)
        grads.append(torch.autograd.grad(loss, (hidden, weight), scale))
    for whole, scaled in zip(*grads, strict=True):
        assert scaled.dtype == torch.float32
        assert torch.equal(scaled, whole * third)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_bf16_never_holds_all_logits():
    hidden, weight, targets = _case(1000, dtype=torch.bfloat16)
    with _Largest() as largest:
        linear_cross_entropy_sum(hidden, weight, targets, V).backward()
    assert largest.numel == 1000 * D  # no logits larger than the hidden states; a chunk's are 25 * 256


def test_chunks_fit_a_cpus_cache_and_fill_a_gpu():
    assert chunk_tokens(3072, 4096, "cpu") == 512
    assert chunk_tokens(3072, 50257, "cpu") == 256
    assert chunk_tokens(100, 50257, "cpu") == 100
    assert chunk_tokens(8192, 50304, "cuda") == 2668
    assert chunk_tokens(10, 2**28, "cuda") == 1


def test_uniform_logits_cost_ln_of_the_true_vocabulary():
    hidden, weight = torch.zeros(N, D), torch.zeros(P, D)
    loss = linear_cross_entropy_sum(hidden, weight, torch.randint(V, (N,)), V)
    assert loss.item() / N == pytest.approx(math.log(V), rel=1e-6)
