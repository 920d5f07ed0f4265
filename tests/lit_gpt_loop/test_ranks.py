"""Ranks of a launcher: who is who, and one answer for all of them (processes forked here)."""

import multiprocessing
import threading

import pytest

from lit_gpt_loop.ranks import ask, rank_and_world_size, tell, topic


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            (0, 1),
        ),  # what Lightning leaves in a process that started others
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "bash"}, (0, 1)),
        # torchrun inside of srun
        ({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (5, 8)),
    ],
)
def test_who_is_who(environment, expected):
    assert rank_and_world_size(environment) == expected


def test_the_topic_is_that_of_the_question_and_the_job():
    job = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
    }
    assert topic("q", {"k": 1}, environment=job) == topic("q", {"k": 1}, environment=job | {"RANK": "1"})
    others = [topic("q", {"k": 2}, environment=job)]
    others += [topic("q", {"k": 1}, environment=job | {"MASTER_PORT": "29501"})]
    others += [topic("q", {"k": 1}, environment=job | {"TORCHELASTIC_RESTART_COUNT": "1"})]
    others += [topic("q", {"k": 1}, environment={"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"})]
    others += [topic("q", {"k": 1}, environment={"SLURM_PROCID": "0", "SLURM_JOB_ID": "2"})]
    assert len({topic("q", {"k": 1}, environment=job), *others}) == 6


def _asking(folder, rank, queue):
    queue.put((rank, ask(folder, "t", rank, timeout_s=20)))


@pytest.mark.parametrize("is_first", [True, False])
def test_every_rank_hears_it_and_nothing_is_left(tmp_path, is_first):
    """Also beside what a job that was killed left: a question of a rank that is gone, and an answer to it."""
    left = tmp_path / ".ranks-t"
    left.mkdir()
    (left / "1-dead.ask").touch()
    (left / "1-dead.answer").write_text('"old"')
    (left / "2-dead.ask").touch()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_asking, args=(tmp_path, rank, queue), daemon=True) for rank in (1, 2)
    ]
    teller = threading.Thread(target=tell, args=(tmp_path, "t", {"now": 7}, 3, 20.0))
    for thing in [teller, *processes] if is_first else [*processes, teller]:
        thing.start()
    assert sorted(queue.get(timeout=20) for _ in processes) == [(1, {"now": 7}), (2, {"now": 7})]
    teller.join(timeout=20)
    assert not teller.is_alive() and not left.exists()


def test_who_does_not_come_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] of 3 did not ask rank 0 within 0 s"):
        tell(tmp_path, "t", 1, 3, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="rank 0 did not answer rank 2 within 0 s"):
        ask(tmp_path, "t", 2, timeout_s=0.2)
    tell(tmp_path, "t", 1, 1, timeout_s=0.0)  # one process has nobody to tell
