import inspect
import json
from io import StringIO

import pytest
from lightning.pytorch import Trainer
from rich.console import Console

from callbacks.checkpoint_retention import CheckpointRetention
from callbacks.mfu import PEAK_FLOPS
from callbacks.restart_equivalence import RestartEquivalence
from lit_gpt_loop.data import TextDataModule
from lit_gpt_loop.module import LitGPT
from lit_gpt_loop.plan_config import (
    DATA,
    MFU,
    MODULE,
    RETENTION,
    merge,
    peak_flops_table,
    read_run_spec,
)
from lit_gpt_loop.plan_data import DEFAULT_TOKENIZER
from lit_gpt_loop.plan_tables import render
from lit_gpt_loop.run_plan import plan_run
from lit_gpt_loop.run_spec import Kept, Retention
from lit_gpt_loop.signatures import constant, constructor_arguments, constructor_defaults, trainer_arguments
from recipes.pretrain import default_callbacks

FSDP, FSDP2, DDP = (f"lit_gpt_loop.strategies.{name}" for name in ("FSDP", "FSDP2", "DDP"))


def read(trainer, data=None, **sections):
    """Return (the spec of a small configuration, the notes on it)."""
    options = {k: sections.pop(k) for k in ("num_devices", "devices_per_node") if k in sections}
    config = {
        "trainer": {"max_steps": 100, **trainer},
        "model": {"config": "tiny"},
        "data": data or {"tokenizer": "bytes"},
        **sections,
    }
    notes = []
    return read_run_spec(config, "x", notes, **options), notes


def with_args(class_path, **init_args):
    return {"class_path": class_path, "init_args": init_args}


def test_a_prepared_store_gives_epochs(tmp_path):
    (tmp_path / "text.txt").write_text("the robot picks up the red box. " * 200)
    data = TextDataModule(
        corpus=str(tmp_path / "text.txt"),
        tokenizer="bytes",
        data_dir=str(tmp_path / "data"),
        val_split="tail",
        val_fraction=0.1,
    )
    data.prepare_data()
    values = {
        "corpus": str(tmp_path / "text.txt"),
        "tokenizer": "bytes",
        "data_dir": str(tmp_path / "data"),
        "val_split": "tail",
        "val_fraction": 0.1,
    }
    spec, notes = read(
        {"max_steps": 10, "devices": 1}, data={**values, "context_length": 64, "micro_batch_size": 9}
    )
    assert notes == ["precision: bf16-mixed (the run picks bf16 where the hardware is fast at it)"]
    # 6,401 tokens (an end token closes the document). 640 of them are the tail; 5,761 make 90 blocks of 64 targets.
    assert spec.corpus_tokens == 90 * 64
    assert plan_run(spec).epochs == 9 * 10 / 90
    limited, _ = read(
        {"max_steps": 10, "devices": 1}, data={**values, "context_length": 64, "limit_train_blocks": 45}
    )
    assert plan_run(limited).epochs == 8 * 10 / 45


def test_epochs_are_those_of_the_split_by_document(tmp_path):
    # Documents of very different lengths: a share of the tokens is no measure of what is held out.
    (tmp_path / "text.txt").write_text("\n\n".join("ab " * (10 + 90 * (i % 7)) for i in range(60)))
    values = {"corpus": str(tmp_path / "text.txt"), "tokenizer": "bytes", "data_dir": str(tmp_path / "data")}
    values |= {"document_separator": "\n\n", "context_length": 32, "micro_batch_size": 4, "val_fraction": 0.2}
    data = TextDataModule(**values)
    data.prepare_data()
    data.setup("validate")
    spec, _ = read({"max_steps": 7, "devices": 1}, data=values)
    plan = plan_run(spec)
    assert plan.epochs == 7 * 4 / data.samples_per_epoch  # progress/epoch of the run's last update
    assert abs(spec.corpus_tokens / (0.8 * data.splits.store.num_tokens) - 1) > 0.02
    rows = TextDataModule(**values, packed=False)
    rows.setup("validate")
    spec, _ = read({"max_steps": 7, "devices": 1}, data=values | {"packed": False})
    assert plan_run(spec).epochs == 7 * 4 / rows.samples_per_epoch


def test_an_estimated_length_is_marked(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the robot picks up the red box. " * 200)
    values = {"corpus": str(tmp_path / "text.txt"), "tokenizer": "bytes", "data_dir": str(tmp_path / "data")}
    TextDataModule(**values, val_split="tail").prepare_data()
    monkeypatch.setattr("lit_gpt_loop.plan_data.MAX_DOCUMENTS", 0)
    spec, notes = read({"devices": 1}, data=values)
    assert spec.corpus_tokens == round(6401 * 0.95)
    console = Console(width=132, record=True, file=StringIO())
    render(console, plan_run(spec), None, notes)
    assert "epochs about 33.7 over the training split, its length an estimate" in " ".join(
        console.export_text().split()
    )


def test_a_split_that_the_run_refuses_is_refused():
    with pytest.raises(ValueError, match="together below 1"):
        read({}, data={"tokenizer": "bytes", "val_fraction": 2})


def test_a_data_set_of_the_hub_is_not_opened(tmp_path, monkeypatch):
    def download(*args, **kwargs):
        raise AssertionError("load_dataset downloads")

    monkeypatch.setattr("datasets.load_dataset", download)
    values = {
        "corpus": "hf:allenai/c4",
        "tokenizer": "bytes",
        "data_dir": str(tmp_path / "data"),
        "val_split": "tail",
        "val_fraction": 0.1,
    }
    spec, notes = read({"devices": 1}, data=values)
    assert spec.corpus_tokens is None
    assert any("hf:allenai/c4 is not opened" in n and "--corpus_tokens" in n for n in notes)
    # A prepared store is known by the names of data set and tokenizer.
    (tmp_path / "text.txt").write_text("the robot picks up the red box. " * 200)
    local = {"corpus": str(tmp_path / "text.txt"), "tokenizer": "bytes", "data_dir": str(tmp_path / "data")}
    TextDataModule(**local, val_split="tail", val_fraction=0.1).prepare_data()
    (path,) = (tmp_path / "data").glob("*/part-*/meta.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus": "c4"}))
    spec, notes = read({"devices": 1}, data=values)
    assert spec.corpus_tokens == (6401 - 640) // 256 * 256
    assert any("taken to be the store" in n and path.parent.parent.name in n for n in notes)
    spec, _ = read({"devices": 1}, data=values | {"tokenizer": "char"})
    assert spec.corpus_tokens is None


def test_defaults_are_read_from_the_constructors():
    assert constructor_arguments(DATA, "TextDataModule") == list(inspect.signature(TextDataModule).parameters)
    assert trainer_arguments() == list(inspect.signature(Trainer).parameters)
    for path, cls in ((DATA, TextDataModule), (MODULE, LitGPT), (RETENTION, CheckpointRetention)):
        signature = inspect.signature(cls.__init__).parameters
        read = constructor_defaults(path, cls.__name__)
        actual = {k: p.default for k, p in signature.items() if p.default is not inspect.Parameter.empty}
        assert read == actual
    assert peak_flops_table() == PEAK_FLOPS
    assert f"bpe:{TextDataModule().vocab_size}" == DEFAULT_TOKENIZER
    assert constant(MFU, "IGNORE_INDEX") == -100
    with pytest.raises(ValueError, match="no constant NOTHING"):
        constant(MFU, "NOTHING")
    with pytest.raises(ValueError, match="no class Nobody"):
        constructor_defaults(DATA, "Nobody")


def test_merge_replaces_what_has_a_class_path():
    old = {"trainer": {"strategy": {"class_path": "a", "init_args": {"x": 1}}, "max_steps": 1}}
    new = merge(old, {"trainer": {"strategy": {"class_path": "b"}}})
    assert new == {"trainer": {"strategy": {"class_path": "b"}, "max_steps": 1}}
    assert old["trainer"]["strategy"]["class_path"] == "a"


def test_a_plus_appends_to_a_list():
    assert merge({"trainer": {"callbacks": ["a"]}}, {"trainer": {"callbacks+": "b"}}) == {
        "trainer": {"callbacks": ["a", "b"]}
    }
    assert merge({"trainer": {}}, {"trainer": {"callbacks+": ["b"]}}) == {"trainer": {"callbacks": ["b"]}}


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"devices": 1, "strategy": "fsdp2"}, ("single", 1)),
        ({"devices": 2}, ("ddp", 2)),
        ({"devices": [0, 1, 2], "num_nodes": 2, "strategy": "fsdp"}, ("fsdp", 6)),
        ({"devices": "0,1", "strategy": {"class_path": "lit_gpt_loop.strategies.DDP"}}, ("ddp", 2)),
        (
            {
                "devices": 8,
                "num_nodes": 2,
                "strategy": {
                    "class_path": "lit_gpt_loop.strategies.FSDP",
                    "init_args": {"sharding_strategy": "HYBRID_SHARD"},
                },
            },
            ("hybrid", 16),
        ),
        ({"devices": "auto"}, ("single", 1)),
    ],
)
def test_strategies_and_devices(trainer, expected):
    spec, _ = read(trainer)
    assert (spec.strategy, spec.num_devices) == expected


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"micro_batch_sise": 3}},
            "data has no field micro_batch_sise; did you mean micro_batch_size",
        ),
        ({"model": {"overides": {}}}, "model has no field overides; did you mean overrides"),
        ({"trainer": {"max_step": 3}}, "trainer has no field max_step; did you mean max_steps"),
        ({"trianer": {}}, "the configuration has no field trianer; did you mean trainer"),
        ({"model": {"config": {"n_layr": 3}}}, "model.config has no field n_layr; did you mean n_layer"),
    ],
)
def test_a_typo_is_no_other_run(sections, message):
    with pytest.raises(ValueError, match=message):
        read_run_spec(sections, "x", [])


def test_the_node_is_the_configurations():
    hybrid = with_args(FSDP, sharding_strategy="HYBRID_SHARD")
    spec, _ = read({"devices": 4, "num_nodes": 4, "strategy": hybrid})
    assert (spec.strategy, spec.num_devices, spec.devices_per_node) == ("hybrid", 16, 4)
    plan = plan_run(spec)
    row = next(r for r in plan.memory if r.as_configured)
    # 4 shards: a quarter of the fp32 parameters; 4 nodes of one failure a year each.
    assert row.plain.maxima["parameters"] == 4 * plan.num_params / 4
    assert plan.checkpoint.mtbf_s == 365 * 86_400 / 4
    # One node is one group of shards.
    plan = plan_run(read({"devices": 4, "strategy": hybrid})[0])
    row = next(r for r in plan.memory if r.as_configured)
    assert (row.strategy, row.num_devices) == ("hybrid", 4)
    assert row.plain.maxima["parameters"] == 4 * plan.num_params / 4
    assert plan.checkpoint.mtbf_s == 365 * 86_400
    with pytest.raises(ValueError, match=r"12 devices are no nodes of 8.*--gpus_per_node"):
        plan_run(read({"devices": 8, "strategy": hybrid}, num_devices=12)[0])
    part_of_a_node = plan_run(read({"devices": 8, "strategy": hybrid}, num_devices=4)[0])
    assert (
        next(r for r in part_of_a_node.memory if r.as_configured).plain.maxima["parameters"]
        == plan.num_params
    )
    assert read({"devices": 8}, num_devices=64)[0].devices_per_node == 8
    assert read({"devices": 1}, num_devices=64)[0].devices_per_node == 8
    assert read({"devices": 4}, devices_per_node=2)[0].devices_per_node == 2
    _, notes = read({"devices": 4}, num_devices=8)
    assert any("nodes: of 4 devices; --gpus_per_node" in n for n in notes)


def test_what_a_strategy_is_told_counts():
    model = {"config": "tiny", "overrides": {"n_layer": 4}}

    def peak(strategy):
        spec, notes = read(
            {"devices": 2, "strategy": strategy, "precision": "32-true"},
            {"tokenizer": "bytes", "global_batch_size": 32, "micro_batch_size": 8},
            model=model,
        )
        return plan_run(spec).peak_memory_bytes, [n for n in notes if n.startswith("memory")]

    full, none = peak(with_args(FSDP))
    kept, _ = peak(with_args(FSDP, sharding_strategy="SHARD_GRAD_OP"))
    assert kept > full and none == []
    twice, _ = peak(with_args(DDP))
    once, _ = peak(with_args(DDP, sync_every_micro_batch=True))
    num_params = plan_run(read({}, model=model)[0]).num_params
    assert twice - once == 4 * num_params  # one copy of the gradients in fp32
    _, notes = peak(with_args(DDP, gradient_as_bucket_view=False, timeout_s=60))
    assert notes == ["memory: the strategy's gradient_as_bucket_view is not in the memory model"]
    for strategy, message in (
        (with_args(FSDP, sharding_strategy="NO_SHARD"), "NO_SHARD.*use ddp"),
        (with_args(FSDP, sharding_strategy="SHARD"), "'SHARD' is unknown: use one of FULL_SHARD"),
        (with_args(FSDP, cpu_offload=True), "cpu_offload.*--trainer.strategy fsdp"),
        (with_args(FSDP2, tensor_parallel_size=2), "tensor_parallel_size=2.*--trainer.strategy fsdp2"),
    ):
        with pytest.raises(ValueError, match=message):
            peak(strategy)


def test_compiled_models_are_counted_in_eager_mode_with_a_note():
    _, notes = read({}, model={"config": "tiny", "compile": True})
    assert any("eager mode" in n for n in notes)
    assert not any("eager mode" in n for n in read({})[1])


def test_without_callbacks_the_default_ones_keep_checkpoints():
    default = {type(c): c for c in default_callbacks()}
    assert {CheckpointRetention, RestartEquivalence} <= set(default)
    saver = default[CheckpointRetention]
    spec, _ = read({})
    assert spec.retention == Retention(
        keep_best=saver.policy.keep_best,
        keep_latest=saver.policy.keep_latest,
        async_save=saver.async_save,
        save_on_exit=saver.save_on_exit,
        keeps_verified=True,
    )
    # No interval and no validation: one save, at the end.
    assert plan_run(spec).checkpoint.kept == Kept(1, 1, is_exact=True)
    # Saves at ten validations: the best, the two latest and the last that was verified (`decide` keeps it); one being written.
    plan = plan_run(read({"val_check_interval": 10})[0])
    assert plan.checkpoint.kept == Kept(1 + 2 + 1, 5, is_exact=False)
    assert plan.checkpoint.disk_bytes == 5 * plan.checkpoint.bytes

    def kept(**init_args):
        saver = with_args("callbacks.CheckpointRetention", **init_args)
        return plan_run(read({"callbacks": saver, "val_check_interval": 10})[0]).checkpoint.kept

    assert kept(keep_latest=3) == Kept(1 + 3, 5, is_exact=False)
    assert kept(monitor=None) == Kept(2, 3, is_exact=True)  # nothing to be best by
    assert kept(monitor=None, save_on_exit=False, every_n_steps=70) == Kept(1, 1, is_exact=True)
    by_clock = plan_run(read({"val_check_interval": "00:00:10:00"})[0]).checkpoint.kept
    assert by_clock == Kept(1 + 2 + 1, 5, is_exact=False)
    for callbacks in ([], [with_args("callbacks.GradNormMonitor", clip_norm=1.0)]):
        assert plan_run(read({"callbacks": callbacks})[0]).checkpoint.kept is None
