"""AdamW's two groups: who decays, by how much, and that wrapping changes nothing."""

import pytest
import torch
from torch import nn

from lit_gpt_loop.optim import build_adamw, split_parameters


class Net(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.rms = nn.RMSNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.rms(self.norm(self.fc(self.embed(x)))))


class AliasedLinear(nn.Linear):
    pass


@pytest.mark.case("C50")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_c50_zero_gradient_update_shrinks_matrices_only(tied, compiled):
    net = Net(tied)
    if compiled:
        net.compile(backend="eager")
    before = {k: v.clone() for k, v in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    build_adamw(net, lr=0.1, weight_decay=0.1).step()
    for name, p in net.named_parameters():
        decays = name == "fc.weight" or (name == "head.weight" and not tied)
        expected = before[name] * (1 - 0.1 * 0.1) if decays else before[name]
        assert torch.equal(p, expected), name


@pytest.mark.case("C50")
def test_c50_each_trainable_parameter_is_in_exactly_one_group():
    net = Net()
    net.fc.bias.requires_grad_(False)
    groups = build_adamw(net, lr=0.1).param_groups
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in net.parameters() if p.requires_grad}


def test_a_subclass_decays_like_its_base():
    decayed, kept = split_parameters(AliasedLinear(3, 3).named_modules())
    assert [tuple(p.shape) for p in decayed] == [(3, 3)]
    assert [tuple(p.shape) for p in kept] == [(3,)]


def test_a_parameter_without_a_rule_is_an_error():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 3))

    with pytest.raises(ValueError, match=r"scale of a Odd: no rule says whether it decays"):
        build_adamw(Odd(), lr=0.1)


def test_nothing_trainable_is_an_error():
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_adamw(nn.Linear(2, 2).requires_grad_(False), lr=0.1)
