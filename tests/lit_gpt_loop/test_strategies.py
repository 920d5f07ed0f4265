import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lit_gpt_loop.strategies import DDP, FSDP, FSDP2, OneDevice, find_blocks, shard_fsdp2
from tests.distributed.strategy_jobs import compare, different_seeds, error_of, units
from tests.distributed.toys import STRATEGIES, Net, Toy, fit, sequences

UNITS, WINDOWS, MICRO_BATCHES = 3, 2, 6  # two blocks and the root


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_exchanged_once_per_window(ranks2, strategy, precision):
    for got in ranks2.run(compare, strategy, precision):
        assert got["once_updates"] == WINDOWS  # of four micro-batches and of two
        assert got["difference"] < 1e-6
        if strategy == "DDP":
            assert got["once_same"] == [False, False, False, True, False, True]
            assert got["every_same"] == [True] * MICRO_BATCHES
        else:
            assert got["once_scatters"] == UNITS * WINDOWS
            assert got["every_scatters"] == UNITS * MICRO_BATCHES


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_gradients_are_summed_in_fp32(ranks2, strategy, precision):
    dtypes = ranks2.run(compare, strategy, precision)[0]["once_dtypes"]
    assert dtypes <= {"torch.float32"}
    assert dtypes or (strategy, precision) != (
        "DDP",
        "bf16-true",
    )  # DDP's own reduction does not show in Python


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_same_numbers_under_every_strategy(ranks2, precision):
    digests = [ranks2.run(compare, strategy, precision)[0]["digest"] for strategy in STRATEGIES]
    assert digests == pytest.approx([digests[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_of_different_seeds_start_from_rank_0s_weights(ranks2, strategy):
    assert ranks2.run(different_seeds, strategy) == [True, True]


def test_one_device_takes_the_trainers_device_and_only_one():
    trainer, _, _ = fit(Toy(), [sequences(2)])
    assert isinstance(trainer.strategy, OneDevice) and trainer.strategy.root_device == torch.device("cpu")
    with pytest.raises(ValueError, match="devices=1, or strategy=DDP"):
        fit(Toy(), [sequences(2)], devices=2)


# -- what is sharded


def test_find_blocks():
    net = Net()
    assert find_blocks(net) == list(net.blocks)
    assert find_blocks(net, ["Embedding"]) == [net.embed] == find_blocks(net, [nn.Embedding])
    assert find_blocks(nn.Linear(1, 1)) == []
    assert find_blocks(nn.ModuleList([nn.ReLU(), net.head])) == [net.head]  # nothing to shard in a ReLU
    with pytest.raises(ValueError, match=r"No module of types \['Block'\].*'Embedding', 'Linear'"):
        find_blocks(net, ["Block"])


@pytest.mark.parametrize(("block_types", "number"), [(None, 3), (["Net"], 2)])
def test_fsdp_shards_the_modules_it_is_told_and_the_root(ranks2, block_types, number):
    assert ranks2.run(units, "FSDP", block_types) == [number, number]


def test_shard_fsdp2_wants_a_data_parallel_dimension():
    class Mesh:
        ndim, mesh_dim_names = 2, ("a", "b")

    with pytest.raises(ValueError, match=r"none named 'data_parallel'"):
        shard_fsdp2(Net(), Mesh())  # type: ignore[arg-type]


# -- bad input


def test_fsdp2_wants_a_module_that_shards_itself(ranks2):
    for message in ranks2.run(error_of, "FSDP2"):
        assert "shard_fsdp2(self.model, self.device_mesh)" in message and "strategy=FSDP()" in message


def test_fsdp_names_the_classes_that_there_are(ranks2):
    for message in ranks2.run(error_of, "FSDP", block_types=["Block"]):
        assert "['Block']" in message and "'Linear'" in message


@pytest.mark.parametrize("strategy", [DDP, FSDP, FSDP2])
def test_a_timeout_must_be_positive(strategy):
    with pytest.raises(ValueError, match="timeout_s=0"):
        strategy(timeout_s=0)


def test_fsdp_arguments():
    with pytest.raises(ValueError, match="param_dtype='int8'"):
        FSDP(param_dtype="int8")
    with pytest.raises(ValueError, match="both block_types and auto_wrap_policy"):
        FSDP(block_types=["Block"], auto_wrap_policy={nn.Linear})
    with pytest.raises(TypeError, match="AnyDeviceFSDPPrecision"):
        FSDP().precision_plugin = MixedPrecision("bf16-mixed", "cpu")
