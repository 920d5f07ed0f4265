"""CheckpointRetention on two ranks: one decision, shards saved in the background, signals to any one rank."""

import os
import signal
import warnings

import lightning.pytorch as pl
import pytest
import torch

from callbacks.checkpoint_retention import CheckpointRetention, find_damage, list_saved, read_manifest
from tests.chaos.toy import assert_same, final_state, fit

resolve = CheckpointRetention.resolve
LAYOUTS = ["ddp", "fsdp2"]


def bitwise(folder, strategy, async_save):
    options = {
        "strategy": strategy, "num_ranks": 2, "every_n_steps": 1, "async_save": async_save, "accumulate": 2, "validate": 2,
    }  # fmt: skip
    module, trainer, _ = fit(folder / "whole", 5, **options)
    reference, losses = final_state(module, trainer), module.losses
    for stop in (2, 3):
        fit(folder / f"s{stop}", stop, **options)
        fit(folder / f"s{stop}", stop + 1, ckpt_path=resolve(folder / f"s{stop}", "latest"), **options)
        module, trainer, _ = fit(
            folder / f"s{stop}", 5, ckpt_path=resolve(folder / f"s{stop}", "auto"), **options
        )
        assert module.losses == losses[2 * (stop + 1) :]
        assert_same(final_state(module, trainer), reference)
    return [[s.step for s in list_saved(folder / "s2")], losses]


@pytest.mark.case("C26")
@pytest.mark.parametrize(
    ("strategy", "async_save"),
    [
        ("fsdp2", True),
        pytest.param("ddp", False, marks=pytest.mark.slow),
        pytest.param("ddp", True, marks=pytest.mark.slow),
        pytest.param("fsdp2", False, marks=pytest.mark.slow),
    ],
)
def test_c26_two_ranks_stop_and_continue_bit_for_bit(ranks2, tmp_path, strategy, async_save):
    (steps, losses), (_, losses_1) = ranks2.run(bitwise, tmp_path, strategy, async_save)
    assert set(steps) >= {4, 5} and len(steps) <= 3
    assert (
        losses != losses_1
    )  # ranks draw different dropout: that both continue shows that each has its own state
    manifest = read_manifest(resolve(tmp_path / "s2", "latest").parent)
    assert manifest["layout"]["world_size"] == 2
    assert set(manifest["files"]) >= {"state/.metadata", "state/rest.pt", "state/__0_0.distcp"}
    assert ("state/__1_0.distcp" in manifest["files"]) or strategy == "ddp"


def stock_folder(folder, strategy):
    """A stock sharded strategy writes its folder itself; another stock one a single file."""
    from tests.chaos.toy import QUIET, Positioned, Toy

    class Sharding(Toy):
        def configure_model(self):
            if strategy == "fsdp2":
                from lit_gpt_loop.strategies import shard_fsdp2

                shard_fsdp2(self.net, self.device_mesh["data_parallel"], block_types=["Linear"])

    def go(num_steps, ckpt_path=None):
        made = {
            "fsdp2": lambda: pl.strategies.ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1
            ),
            "ddp": lambda: pl.strategies.DDPStrategy(process_group_backend="gloo"),
        }[strategy]()
        torch.manual_seed(13)
        module = Sharding()
        trainer = pl.Trainer(
            strategy=made, devices=2, max_steps=num_steps, default_root_dir=folder,
            callbacks=[CheckpointRetention(folder / "c", every_n_steps=2, async_save=True)], **QUIET,
        )  # fmt: skip
        trainer.fit(module, Positioned(), ckpt_path=ckpt_path)
        return final_state(module, trainer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = go(4)
    path = resolve(folder / "c", "step:2")
    assert_same(go(4, path), whole)
    return path.name, [str(w.message) for w in caught]


@pytest.mark.parametrize(("strategy", "name"), [("ddp", "state.ckpt"), ("fsdp2", "state")])
def test_stock_strategies_file_or_folder(ranks2, tmp_path, strategy, name):
    (found, messages), _ = ranks2.run(stock_folder, tmp_path, strategy)
    assert found == name
    assert find_damage(resolve(tmp_path / "c", "latest").parent) is None
    assert any("writes checkpoints itself" in m for m in messages) == (strategy == "fsdp2")


def signalled(folder, strategy, number, when, async_save):
    rank = int(os.environ["RANK"])

    class Send(pl.Callback):
        def send(self, *_):
            if rank == 1:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)

        def on_train_batch_start(self, trainer, module, batch, i):
            if when == "window" and i == 5:  # second micro-batch of update 3
                self.send()

        def on_validation_batch_start(self, *args):
            if when == "validation":
                self.send()

        def on_save_checkpoint(self, trainer, module, checkpoint):
            if when == "save" and trainer.global_step == 2:
                self.send()

    options = {
        "strategy": strategy, "num_ranks": 2, "accumulate": 2, "validate": 3, "every_n_steps": 2, "async_save": async_save,
    }  # fmt: skip
    code = None
    try:
        fit(folder / "c", 5, callbacks=[Send()], **options)
    except SystemExit as e:
        code = e.code
    module, trainer, _ = fit(folder / "c", 5, ckpt_path=resolve(folder / "c", "auto"), **options)
    resumed = final_state(module, trainer)
    module, trainer, _ = fit(folder / "w", 5, **options)
    assert_same(resumed, final_state(module, trainer))
    return code, signal.getsignal(number) == signal.SIG_DFL or number == signal.SIGINT


@pytest.mark.case("C53")
@pytest.mark.parametrize(
    ("strategy", "number", "async_save", "when"),
    [
        ("ddp", signal.SIGTERM, False, "window"),
        ("fsdp2", signal.SIGUSR1, True, "save"),
        ("fsdp2", signal.SIGTERM, False, "validation"),
        pytest.param("fsdp2", signal.SIGUSR1, True, "window", marks=pytest.mark.slow),
        pytest.param("ddp", signal.SIGTERM, True, "save", marks=pytest.mark.slow),
        pytest.param("ddp", signal.SIGINT, False, "validation", marks=pytest.mark.slow),
    ],
)
def test_c53_a_signal_to_one_rank_ends_both_together(ranks2, tmp_path, strategy, number, when, async_save):
    for code, is_given_back in ranks2.run(
        signalled, tmp_path, strategy, number, when, async_save, timeout_s=60
    ):
        assert code == 128 + number and is_given_back
    for saved in list_saved(tmp_path / "c"):
        assert find_damage(tmp_path / "c" / saved.name) is None


def spoiled(folder, strategy):
    rank = int(os.environ["RANK"])

    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, i):
            if i == 2 and rank == 1:
                p = module.net[0].weight
                getattr(p, "_local_tensor", p).data.view(-1)[0] = float("nan")

    _, _, callback = fit(
        folder, 4, strategy=strategy, num_ranks=2, every_n_steps=1, callbacks=[Spoil()], batches=20
    )
    return callback.num_refused


@pytest.mark.case("C16")
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_c16_one_ranks_nan_keeps_all_from_saving(ranks2, tmp_path, strategy):
    assert ranks2.run(spoiled, tmp_path, strategy, timeout_s=60) == [2, 2]
    assert [s.step for s in list_saved(tmp_path)] == [1, 2]
    assert resolve(tmp_path, "latest").parent.name == "step-00000002"


def judged(folder, key_on_both):
    rank = int(os.environ["RANK"])

    class Judge(pl.Callback):
        def on_validation_epoch_end(self, trainer, module):
            if key_on_both or rank == 0:
                trainer.callback_metrics["mine"] = torch.tensor(1.0 + rank)

    error, best = None, None
    try:
        _, _, callback = fit(
            folder, 2, strategy="ddp", num_ranks=2, validate=1, monitor="mine", callbacks=[Judge()]
        )
        best = callback.best_model_path
    except RuntimeError as e:
        error = str(e)
    return error, best


@pytest.mark.case("C08")
def test_c08_ranks_agree_on_best_or_say_why_not(ranks2, tmp_path):
    (error, best), (error_1, _) = ranks2.run(judged, tmp_path / "a", True, timeout_s=60)
    assert error is None and error_1 is None and best
    assert read_manifest(resolve(tmp_path / "a", "best").parent)["metric"]["value"] == 1.0
    for error, _ in ranks2.run(judged, tmp_path / "b", False, timeout_s=60):
        assert "'mine' was logged on ranks [0] of 2 only" in error


def failing(folder, strategy, async_save, rank_that_fails):
    import errno

    rank, write = int(os.environ["RANK"]), os.write

    def full(fd, data):
        is_state = "step-00000004" in os.readlink(f"/proc/self/fd/{fd}")
        if rank == rank_that_fails and is_state and len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    os.write = full
    try:
        fit(folder, 8, strategy=strategy, num_ranks=2, every_n_steps=2, async_save=async_save)
    except RuntimeError as e:
        return str(e)
    finally:
        os.write = write


@pytest.mark.case("C37")
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("rank_that_fails", [0, 1])
def test_c37_one_ranks_full_disk_stops_both_with_the_reason(ranks2, tmp_path, async_save, rank_that_fails):
    for error in ranks2.run(failing, tmp_path, "fsdp2", async_save, rank_that_fails, timeout_s=60):
        assert "Saving update 4" in error and "No space left on device" in error
    assert os.listdir(tmp_path) and sorted(os.listdir(tmp_path)) == ["index.json", "step-00000002"]
    assert resolve(tmp_path, "auto").parent.name == "step-00000002"


def elsewhere(folder, strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, trainer, _ = fit(
            folder, 4, strategy=strategy, num_ranks=2, ckpt_path=resolve(folder, "latest")
        )
    return (
        [str(w.message) for w in caught if "RNG states" in str(w.message)],
        trainer.global_step,
        module.losses,
    )


def test_another_world_size_gets_derived_seeds_and_says_so(ranks2, tmp_path):
    fit(tmp_path, 2)
    answers = ranks2.run(elsewhere, tmp_path, "fsdp2")
    assert "RNG states of 1 ranks cannot continue on 2" in answers[0][0][0]
    assert [a[1] for a in answers] == [4, 4]
    assert answers[0][2] != answers[1][2]
    again = tmp_path / "again"
    fit(again, 2)
    assert [a[2] for a in ranks2.run(elsewhere, again, "fsdp2")] == [
        a[2] for a in answers
    ]  # derived, not random
