"""What the processes of a job know of each other before they form a group (layer P, standard library only).

torchrun and srun start every rank with the same command. Where that command has to decide something that may not be decided
twice (`recipes.cooldown`: which checkpoint is the latest), rank 0 decides and tells the others through the run's file system:

    RUNS/.ranks-TOPIC/3-NONCE.ask       rank 3 asks; removed once it has read
    RUNS/.ranks-TOPIC/3-NONCE.answer    rank 0 answers this question

Each question carries a nonce, so what an earlier job left behind is never taken for an answer to this one.
"""

import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POLL_S = 0.1
_TELL_S, _ASK_S = 600.0, 3600.0  # rank 0 compares a checkpoint's hashes first, which may take long


def rank_and_world_size(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this process's rank and how many its launcher (torchrun, srun) started; (0, 1) where none did.

    Processes that Lightning starts itself count as none: they come from rank 0, with what it decided in their environment.
    """
    if "RANK" in environment:
        return int(environment["RANK"]), int(environment.get("WORLD_SIZE", 1))
    # In an interactive allocation the command is typed once (Lightning's rule, too).
    if "SLURM_PROCID" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1
        return int(environment["SLURM_PROCID"]), int(size)
    return 0, 1


def topic(*question: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Return a name for this question (anything that JSON holds) of this job; the same on each of its ranks."""
    keys = ["SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    if "RANK" in environment:
        keys = [
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "MASTER_ADDR",
            "MASTER_PORT",
            "WORLD_SIZE",
        ]
    job = [environment.get(key) for key in keys]
    if "RANK" in environment and environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        job.append(socket.gethostname())  # MASTER_ADDR is then the same on each machine: localhost
    return hashlib.sha256(json.dumps([job, *question]).encode()).hexdigest()[:16]


def tell(runs_dir: Path, topic: str, answer: Any, world_size: int, timeout_s: float = _TELL_S) -> None:
    """On rank 0: answer each of the other ranks.

    Args:
        runs_dir: a folder that all ranks see.
        topic: of the question.
        answer: anything that JSON holds.
        world_size: ranks in all.
        timeout_s: how long to wait for them.

    Raises:
        RuntimeError: a rank has not asked in time.
    """
    folder, end = runs_dir / f".ranks-{topic}", time.monotonic() + timeout_s
    missing = set(range(1, world_size))
    answered: set[Path] = set()
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        while missing:
            for ask in folder.glob("*.ask"):
                if ask not in answered:
                    temporary = ask.with_suffix(".tmp")
                    temporary.write_text(json.dumps(answer))
                    os.replace(temporary, ask.with_suffix(".answer"))
                    answered.add(ask)
            # A question that nobody takes back is one of a process that is gone.
            missing -= {int(ask.name.split("-")[0]) for ask in answered if not ask.exists()}
            if missing and time.monotonic() > end:
                raise RuntimeError(
                    f"ranks {sorted(missing)} of {world_size} did not ask rank 0 within {timeout_s:.0f} s: all of them have to run the "
                    f"same command and see {runs_dir}; look at their output, and start them with torchrun or srun"
                )
            time.sleep(_POLL_S if missing else 0.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ask(runs_dir: Path, topic: str, rank: int, timeout_s: float = _ASK_S) -> Any:
    """On any other rank: return rank 0's answer.

    Raises:
        RuntimeError: rank 0 has not answered in time.
    """
    folder, end = runs_dir / f".ranks-{topic}", time.monotonic() + timeout_s
    question = folder / f"{rank}-{uuid.uuid4().hex}.ask"
    answer = question.with_suffix(".answer")
    while time.monotonic() < end:
        if answer.is_file():
            text = answer.read_text()
            question.unlink(missing_ok=True)
            return json.loads(text)
        if not question.exists():  # not asked yet, or cleared away with what an earlier job left
            folder.mkdir(parents=True, exist_ok=True)
            try:
                question.touch()
            except FileNotFoundError:
                continue
        time.sleep(_POLL_S)
    question.unlink(missing_ok=True)
    raise RuntimeError(
        f"rank 0 did not answer rank {rank} within {timeout_s:.0f} s (through {folder}): look at rank 0's output; all ranks have "
        "to run the same command and see the same files"
    )
