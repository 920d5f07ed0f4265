import inspect

import pytest

from callbacks.checkpoint_retention import CheckpointRetention
from lit_gpt_loop.data import TextDataModule
from lit_gpt_loop.module import LitGPT
from lit_gpt_loop.plan_config import DATA, MODULE, RETENTION, read_run_spec
from lit_gpt_loop.run_plan import plan_run
from lit_gpt_loop.signatures import accepts, constructor_arguments, constructor_types, trainer_arguments
from tests.recipes.test_plan_config import with_args


def test_types_are_those_of_the_annotations():
    for cls, path in ((TextDataModule, DATA), (LitGPT, MODULE), (CheckpointRetention, RETENTION)):
        types = constructor_types(path, cls.__name__)
        parameters = inspect.signature(cls).parameters
        assert list(types) == list(parameters)
        for name, parameter in parameters.items():
            assert accepts(types[name], parameter.default), name


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("int", [3, -1], [1.5, "3", True, None, [3]]),
        ("float | None", [3, 0.5, None], ["0.5", False]),
        ("bool", [True], [1, "yes", None]),
        ("str | list[str]", ["a", ["a", "b"], []], [3, ["a", 3], {"a": "b"}]),
        ("Literal['document', 'tail']", ["tail"], [3, None, ["tail"]]),
        ("tuple[float, float]", [[0.9, 0.95]], [0.9]),
        ("GPTConfig | dict[str, Any] | str", ["tiny", {"n_layer": 2}], [3, None, ["tiny"]]),
        ("SomethingElse", [3, None, {}], []),
    ],
)
def test_what_an_annotation_accepts(annotation, good, bad):
    assert [v for v in good if not accepts(annotation, v)] == []
    assert [v for v in bad if accepts(annotation, v)] == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"val_fraction": "x"}}, r"data.val_fraction 'x' must be of type float"),
        ({"data": {"corpus": [1]}}, r"data.corpus \[1\] must be of type str \| list\[str\]"),
        (
            {"data": {"limit_train_blocks": "all"}},
            r"data.limit_train_blocks 'all' must be of type int \| None",
        ),
        ({"model": {"config": 3}}, "unknown preset '3'"),
        (
            {"model": {"schedule": {"warmup_steps": None}}},
            r"model.schedule.warmup_steps null must be of type int \| float",
        ),
        (
            {"trainer": {"strategy": {"name": "ddp"}}},
            "trainer.strategy {'name': 'ddp'} names no class: give class_path",
        ),
        (
            {"trainer": {"callbacks": with_args("callbacks.CheckpointRetention", keep_lates=3)}},
            "CheckpointRetention has no field keep_lates; did you mean keep_latest",
        ),
        (
            {"trainer": {"callbacks": with_args("callbacks.CheckpointRetention", keep_latest=0)}},
            "CheckpointRetention.keep_latest 0 must be a whole number of at least 1",
        ),
        (
            {"trainer": {"callbacks": with_args("callbacks.CheckpointRetention", archive_every_n_steps=[0])}},
            "CheckpointRetention.archive_every_n_steps 0 must be",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        read_run_spec({"data": {"tokenizer": "bytes"}} | sections, "x", [])


def test_no_bad_value_ends_in_a_traceback():
    fields = {
        "data": constructor_arguments(DATA, "TextDataModule"),
        "model": constructor_arguments(MODULE, "LitGPT"),
        "trainer": trainer_arguments(),
    }
    base = {
        "data": {"corpus": "nothing/*.txt", "tokenizer": "bytes"},
        "model": {"config": "tiny"},
        "trainer": {"max_steps": 100},
    }
    refused = []
    for section, names in fields.items():
        for name in names:
            for value in ("abc", [1], {"a": 1}, -3, 1.5):
                try:
                    plan_run(read_run_spec(base | {section: base[section] | {name: value}}, "x", []))
                except (ValueError, FileNotFoundError) as e:
                    refused.append(str(e))
    assert len(refused) > 100
