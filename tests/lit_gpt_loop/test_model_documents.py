"""In-document attention: a packed row gives what its documents give one by one; the GPU kernel's layout is right."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from lit_gpt_loop import model as model_file
from lit_gpt_loop.attention import document_borders, document_mask, document_runs
from lit_gpt_loop.model import GPT, GPTConfig

SEGMENTS = torch.tensor([[3, 3, 3, 4, 4, 5, 5, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]])  # ids may come back
DOCUMENTS = [(0, 0, 3), (0, 3, 5), (0, 5, 10), (1, 0, 1), (1, 1, 7), (1, 7, 10)]
SHAPES = {
    "gpt2": GPTConfig.preset("tiny", init_std=0.3, in_document_attention=True),
    "llama-gqa": GPTConfig.preset(
        "tiny-llama", init_std=0.3, in_document_attention=True, activation_checkpointing=1
    ),
}


def test_runs_borders_and_mask_by_hand():
    starts, positions = document_runs(SEGMENTS)
    assert starts.int().tolist() == [[1, 0, 0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 1, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0, 1, 2]]
    borders = document_borders(starts)
    assert borders.tolist() == [0, 3, 5, 10, 11, 17, 20] and borders.dtype == torch.int32
    mask = document_mask(starts)
    assert mask.shape == (2, 1, 10, 10)
    expected = torch.zeros_like(mask)
    for row, first, end in DOCUMENTS:
        for query in range(first, end):
            expected[row, 0, query, first : query + 1] = True
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_row_gives_what_its_documents_give_one_by_one(shape):
    model = GPT(SHAPES[shape])
    inputs, targets = torch.randint(257, (2, 2, 10))
    packed = model(inputs, segment_ids=SEGMENTS)
    loss, count = model(inputs, targets, SEGMENTS)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for row, first, end in DOCUMENTS:
        alone = slice(row, row + 1), slice(first, end)
        torch.testing.assert_close(packed[alone], model(inputs[alone]), rtol=1e-5, atol=1e-5)
        part, _ = model(inputs[alone], targets[alone])
        part.backward()
        total += part.item()
    assert count == 20 and loss.item() == pytest.approx(total, rel=1e-6)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-4)


def test_without_segment_ids_each_row_is_one_document():
    model = GPT(SHAPES["gpt2"])
    inputs = torch.randint(257, (2, 10))
    one = torch.zeros_like(inputs)
    torch.testing.assert_close(model(inputs), model(inputs, segment_ids=one), rtol=1e-5, atol=1e-5)


def test_segment_ids_that_would_be_ignored_are_refused():
    inputs = torch.randint(257, (2, 10))
    with pytest.raises(ValueError, match="in_document_attention is off"):
        GPT(GPTConfig.preset("tiny"))(inputs, segment_ids=SEGMENTS)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_kernels_call_gives_the_masks_result(shape, monkeypatch):
    """The kernel needs a GPU; its documented contract, written out with plain attention per document, stands in for it."""

    def documented(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
        assert torch.equal(cu_q, cu_k) and window_size == (-1, 0) and q.dim() == 3
        assert max_q == max_k >= (cu_q[1:] - cu_q[:-1]).max() and cu_q[-1] == q.size(0)
        out = []
        for a, b in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
            one = [t[a:b].transpose(0, 1)[None] for t in (q, k, v)]
            out.append(
                F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=enable_gqa)[0].transpose(0, 1)
            )
        return torch.cat(out)

    model = GPT(SHAPES[shape])
    inputs, targets = torch.randint(257, (2, 2, 10))
    by_mask, _ = model(inputs, targets, SEGMENTS)
    by_mask.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(varlen, "varlen_attn", documented)
    monkeypatch.setattr(model_file, "has_varlen_kernel", lambda *_: True)
    by_kernel, _ = model(inputs, targets, SEGMENTS)
    by_kernel.backward()
    torch.testing.assert_close(by_kernel, by_mask, rtol=1e-6, atol=0)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the kernel needs an NVIDIA GPU of compute capability 8"
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_kernel_agrees_with_the_cpu(shape):
    model = GPT(SHAPES[shape])
    inputs, targets = torch.randint(257, (2, 2, 10))
    want, _ = model(inputs, targets, SEGMENTS)
    model.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        got, _ = model(inputs.cuda(), targets.cuda(), SEGMENTS.cuda())
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=2e-2)
