"""The network on two ranks: same first weights on every layout, same loss and gradients as one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from lit_gpt_loop.model import GPT, Block, GPTConfig

SHAPES = {
    # Odd sizes do not divide by two ranks; checkpointing recomputes inside of the sharded blocks.
    "gpt2-tied": GPTConfig.preset("tiny", n_embd=34, activation_checkpointing=1, vocab_multiple=64),
    "llama-untied": GPTConfig.preset("tiny-llama", qk_norm=True),
}


def _batch(config):
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.vocab_size, (4, 25), generator=g)
    return tokens[:, :-1], tokens[
        :, 1:
    ]  # two rows a rank: more tokens than channels, so the loss is the chunked one


def _whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()


def _sharded_by_fsdp2(config, mesh):
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(11)
    model.init_weights()
    return model


def _run(layout, shape, autocast):
    """Return this rank's view: loss over all ranks, whole first weights and whole gradients, by name."""
    config = SHAPES[shape]
    inputs, targets = _batch(config)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
    first, names = {}, [n for n, _ in GPT(config).named_parameters()]
    if layout == "fsdp2":
        model = _sharded_by_fsdp2(config, init_device_mesh("cpu", (size,)))
        first = {n: _whole(p.detach()) for n, p in model.named_parameters()}
    else:
        torch.manual_seed(11)
        model = GPT(config)
        if layout == "ddp":
            model = DistributedDataParallel(model)
        else:
            model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_sum, num_tokens = model(inputs[rows], targets[rows])
    (loss_sum * size / targets.numel()).backward()  # the wrappers average over ranks
    total = loss_sum.detach().clone()
    dist.all_reduce(total)
    assert num_tokens == targets.numel() // size
    if layout == "fsdp":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            gradients = {n: p.grad.clone() for n, p in zip(names, model.parameters(), strict=True)}
    else:
        gradients = {n: _whole(p.grad) for n, p in zip(names, model.parameters(), strict=True)}
    return total, first, gradients


def _everything():
    return {
        (layout, shape, autocast): _run(layout, shape, autocast)
        for layout in ("ddp", "fsdp", "fsdp2")
        for shape in SHAPES
        for autocast in (False, True)
    }


@pytest.fixture(scope="module")
def results(ranks2):
    return ranks2.run(_everything)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_equal_one_process(results, layout, shape, autocast):
    config = SHAPES[shape]
    torch.manual_seed(11)
    model = GPT(config)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    inputs, targets = _batch(config)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_sum, num_tokens = model(inputs, targets)
    (loss_sum / num_tokens).backward()
    for rank in results:
        total, first, gradients = rank[layout, shape, autocast]
        assert total.item() == pytest.approx(loss_sum.item(), rel=1e-6 if not autocast else 1e-4)
        assert not first or first.keys() == weights.keys()
        for name, whole in first.items():
            assert torch.equal(whole, weights[name]), f"first weights differ: {name}"
        for name, p in model.named_parameters():
            error = (gradients[name] - p.grad).norm() / p.grad.norm().clamp(min=1e-12)
            assert error < (1e-5 if not autocast else 2e-2), f"{name}: {error}"
