"""Ranks that stay: processes that form one gloo group once and then run job after job.

A fresh process spends 7 s on imports before its first Trainer; a staying rank spends 0.1 s. A job is a function that can
be imported by name, called on every rank with the same arguments; it may build a Trainer with any strategy on
`devices=world_size, accelerator="cpu"`. `run` gives the results in rank order, or raises the first rank's error with
its traceback. A job that outlives its time limit ends the ranks; the next call starts new ones.
"""

import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    """Return a TCP port on the loopback interface that nobody listens to at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(rank: int, world_size: int, port: int, jobs: Any, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    while (job := jobs.get()) is not None:
        number, fn, args, kwargs = job
        try:
            results.put((number, rank, True, fn(*args, **kwargs)))
        except BaseException as e:
            results.put((number, rank, False, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))
    torch.distributed.barrier()  # gloo ranks can abort in destroy_process_group when one leaves early
    torch.distributed.destroy_process_group()


class RankError(RuntimeError):
    """A job failed on at least one rank; the message holds that rank's traceback."""


class Ranks:
    """A pool of `world_size` staying ranks, started at the first job."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._number = 0

    def _start(self) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self._jobs = [context.Queue() for _ in range(self.world_size)]
        self._results = context.Queue()
        self._processes = [
            context.Process(
                target=_serve, args=(r, self.world_size, port, self._jobs[r], self._results), daemon=True
            )
            for r in range(self.world_size)
        ]
        for p in self._processes:
            p.start()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Raises:
            RankError: the function raised on a rank. The other ranks get 15 s to come to their own end; ranks that
                then still wait (in a collective that the failed one left) are ended.
            TimeoutError: not all ranks answered within `timeout_s`.
        """
        if not self._processes:
            self._start()
            timeout_s += 60.0  # imports
        self._number += 1
        for q in self._jobs:
            q.put((self._number, fn, args, kwargs))
        answers: dict[int, Any] = {}
        error = ""
        while len(answers) < self.world_size:
            try:
                number, rank, ok, value = self._results.get(timeout=15.0 if error else timeout_s)
            except queue.Empty:
                self.stop(force=True)
                if error:
                    break
                missing = sorted(set(range(self.world_size)) - set(answers))
                raise TimeoutError(
                    f"ranks {missing} of {self.world_size} gave no answer in {timeout_s:.0f} s"
                ) from None
            if number != self._number:
                continue
            answers[rank] = value
            if not ok and not error:
                error = f"rank {rank}: {value}"
        if error:
            raise RankError(error)
        return [answers[r] for r in range(self.world_size)]

    def stop(self, force: bool = False) -> None:
        """End the ranks; with `force` without waiting for their jobs."""
        if not force:
            for q in self._jobs if self._processes else []:
                q.put(None)
            for p in self._processes:
                p.join(timeout=10)
        for p in self._processes:
            if p.is_alive():
                p.kill()
                p.join(timeout=10)
        self._processes = []
