"""Processes to be killed: forked by a server that has imported everything once, so that each costs a fraction of a second.

A child trains the toy, counts what it does to the file system, and kills itself (SIGKILL) at the event that it is told.
"""

import json
import os
import signal
import time
import warnings
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

from callbacks.checkpoint_retention import CheckpointRetention
from tests.chaos.toy import final_state, fit
from tests.distributed.ranks import free_port

NUM_STEPS, EVERY = 9, 2
FILE_EVENTS = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open")


def count_file_events(die_at, after):
    """Count calls that touch the disk; at number `die_at` die before the call or, with `after`, right after it."""
    count = [0]

    def counted(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == die_at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if count[0] == die_at and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in FILE_EVENTS:
        setattr(os, name, counted(getattr(os, name)))
    return count


def train(folder, strategy, async_save, rank, num_ranks, port, die_at=None, after=False, die_in_batch=None):
    """What a child does. `die_at` counts file events, `die_in_batch` micro-batches of this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if num_ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
            GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="chaos",
            TORCHELASTIC_USE_AGENT_STORE="False",
        )  # fmt: skip
        torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    progress = os.open(folder / f"progress-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write
    count = count_file_events(die_at, after)
    batches = [0]

    def on_step(module, i):
        batches[0] += 1
        if module.trainer.global_step and i % 2 == 0:
            write(progress, f"{module.trainer.global_step}\n".encode())  # that many updates are finished
        if batches[0] == die_in_batch:
            os.kill(os.getpid(), signal.SIGKILL)

    module, trainer, _ = fit(
        folder / "checkpoints", NUM_STEPS, ckpt_path=CheckpointRetention.resolve(folder / "checkpoints", "auto"),
        strategy=strategy, num_ranks=num_ranks, async_save=async_save, accumulate=2, validate=3, every_n_steps=EVERY,
        archive_every_n_steps=4, keep_latest=1, on_step=on_step,
    )  # fmt: skip
    state = final_state(module, trainer)
    if rank == 0:
        torch.save(state, folder / "final.pt")
    (folder / f"events-{rank}.json").write_text(json.dumps({"files": count[0], "batches": batches[0]}))
    if num_ranks > 1:
        torch.distributed.barrier()
    os._exit(0)  # what torch leaves running at exit is not under test


@contextmanager
def _importable():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *([before] if before else [])]
    )
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def start(folder, strategy, async_save, num_ranks, victim=0, **death):
    """Start the ranks of one training; only `victim` dies of itself. Returns the processes."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.children"])
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    with _importable():
        for rank in range(num_ranks):
            args = (folder, strategy, async_save, rank, num_ranks, port)
            process = context.Process(
                target=train, args=args, kwargs=death if rank == victim else {}, daemon=True
            )
            process.start()
            processes.append(process)
    return processes


def wait(processes, timeout_s=90.0, grace_s=1.5):
    """Wait for all; once one is gone in an unnatural way the others get `grace_s`, as a scheduler would give them."""
    end = time.monotonic() + timeout_s
    while any(p.is_alive() for p in processes) and time.monotonic() < end:
        if any(p.exitcode not in (None, 0) for p in processes):
            end = min(end, time.monotonic() + grace_s)
            grace_s = 0.0 if grace_s == 0.0 else grace_s
            for p in processes:
                p.join(max(0.0, end - time.monotonic()))
            break
        time.sleep(0.01)
    for p in processes:
        if p.is_alive():
            p.kill()
        p.join()
    return [p.exitcode for p in processes]
