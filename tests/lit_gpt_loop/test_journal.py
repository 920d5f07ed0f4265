"""The journal: one line per update, merged from pieces, readable after a kill; W&B rows read back from an offline run."""

import json
import math

import pytest
import torch

from lit_gpt_loop.journal import JournalLogger, kind_of, read_journal


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pieces_of_one_step_become_one_line(tmp_path):
    j = JournalLogger(tmp_path / "run")
    j.log_metrics({"train/loss": 2.0}, step=1)
    j.log_metrics({"optim/grad_norm": torch.tensor(5.0), "progress/tokens": 64}, step=1)
    j.log_metrics({"train/loss": 1.5, "progress/tokens": 128}, step=2)
    j.log_metrics({"val/loss": 1.75, "progress/update": 2, "epoch": 0}, step=1)
    j.log_metrics({"ckpt/step": 2}, step=2)
    j.finalize("success")
    rows = lines(j.path)
    assert [(r["kind"], r["step"]) for r in rows] == [
        ("update", 1),
        ("update", 2),
        ("validation", 2),
        ("save", 2),
    ]
    assert rows[0]["optim/grad_norm"] == 5.0
    assert rows[2]["progress/tokens"] == 128
    assert "epoch" not in rows[2]


def test_a_save_logged_between_two_pieces_of_an_update_does_not_split_it(tmp_path):
    j = JournalLogger(tmp_path)
    j.log_metrics({"train/loss": 2.0}, step=1)
    j.log_metrics({"ckpt/step": 1}, step=1)
    j.log_metrics({"progress/update": 1}, step=1)
    j.save()
    assert [(r["kind"], r["step"]) for r in lines(j.path)] == [("update", 1), ("save", 1)]


def test_save_flushes_so_that_a_kill_loses_nothing(tmp_path):
    j = JournalLogger(tmp_path)
    j.log_metrics({"train/loss": 2.0}, step=1)
    assert not j.path.exists()
    j.save()
    assert lines(j.path)[0]["train/loss"] == 2.0


def test_torn_line_is_left_out_and_the_next_starts_afresh(tmp_path):
    j = JournalLogger(tmp_path)
    j.log_metrics({"train/loss": 2.0}, step=1)
    j.finalize("")
    with open(j.path, "a") as f:
        f.write('{"kind": "update", "step": 2, "tra')
    assert [r["step"] for r in read_journal(tmp_path)] == [1]
    j = JournalLogger(tmp_path)
    j.log_metrics({"train/loss": 1.0}, step=2)
    j.finalize("")
    assert [(r["step"], r["train/loss"]) for r in read_journal(tmp_path)] == [(1, 2.0), (2, 1.0)]


@pytest.mark.case("C45")
def test_c45_after_a_crash_each_update_is_read_once_and_the_last_value_wins(tmp_path):
    j = JournalLogger(tmp_path)
    for step in range(195, 213):
        j.log_metrics({"train/loss": float(step)}, step=step)
    j.finalize("")
    j = JournalLogger(tmp_path)
    for step in range(201, 221):
        j.log_metrics({"train/loss": step + 0.5}, step=step)
    j.finalize("")
    rows = read_journal(tmp_path, kind="update")
    assert [r["step"] for r in rows] == list(range(195, 221))
    assert rows[-1]["train/loss"] == 220.5
    assert next(r for r in rows if r["step"] == 201)["train/loss"] == 201.5


def test_numbers_that_json_lacks_come_back(tmp_path):
    j = JournalLogger(tmp_path)
    j.log_metrics({"a/nan": math.nan, "a/inf": math.inf, "a/neg": -math.inf}, step=1)
    j.finalize("")
    text = j.path.read_text()
    assert json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    row = read_journal(tmp_path)[0]
    assert math.isnan(float(row["a/nan"]))
    assert float(row["a/inf"]) == math.inf
    assert float(row["a/neg"]) == -math.inf


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "journal.jsonl").write_text(
        '{"kind": "update", "step": 1}\nnonsense\n{"kind": "update", "step": 2}\n'
    )
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_journal(tmp_path)


@pytest.mark.parametrize(
    ("metrics", "kind"),
    [
        ({"train/loss": 1}, "update"),
        ({"perf/mfu": 1, "progress/update": 2}, "update"),
        ({"progress/update": 2, "val/loss": 1}, "validation"),
        ({"test/loss": 1}, "test"),
        ({"ckpt/step": 1}, "save"),
    ],
)
def test_kinds(metrics, kind):
    assert kind_of(metrics) == kind


def test_a_save_logged_before_its_updates_last_part_does_not_split_the_row(tmp_path):
    logger = JournalLogger(tmp_path)
    logger.log_metrics({"train/loss": 2.0}, step=4)
    logger.log_metrics({"ckpt/step": 4.0}, step=4)
    logger.log_metrics({"optim/lr": 0.1, "progress/update": 4}, step=4)
    logger.log_metrics({"train/loss": 1.0}, step=5)
    logger.log_metrics({"ckpt/step": 5.0}, step=5)
    logger.log_metrics({"optim/lr": 0.2, "progress/update": 5}, step=5)
    logger.finalize("success")
    rows = read_journal(tmp_path, "update")
    assert [(r["step"], r["train/loss"], r["optim/lr"]) for r in rows] == [(4, 2.0, 0.1), (5, 1.0, 0.2)]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 4


def test_a_wandb_id_that_is_still_held_is_waited_for_and_then_done_without(tmp_path, monkeypatch):
    import wandb

    from lit_gpt_loop import journal

    waited, asked = [], []

    def init(**arguments):
        asked.append(arguments["id"])
        if arguments["id"] == "held":
            raise RuntimeError("run ID held is in use")
        return f"run {arguments['id']}"

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(journal.time, "sleep", waited.append)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/run_id").write_text("held")
    logger = journal.RunWandbLogger(tmp_path, offline=True)
    with pytest.warns(UserWarning, match="still held by another process after a minute"):
        run = logger.experiment
    assert waited == [1, 2, 4, 8, 16, 32]
    assert asked[:-1] == ["held"] * 7
    assert run.startswith("run held-")
