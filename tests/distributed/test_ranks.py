"""The staying ranks themselves: answers in order, errors with their traceback, a hang ended in time."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, Ranks


def _sum_of_ranks(offset):
    t = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(t)
    return dist.get_rank(), t.item()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("planted")


def _hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(300)


def test_results_come_in_rank_order(ranks2):
    assert ranks2.run(_sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_an_error_on_one_rank_is_raised_and_the_ranks_stay_usable(ranks2):
    with pytest.raises(RankError, match="rank 1: ValueError: planted"):
        ranks2.run(_fail_on, 1)
    assert ranks2.run(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


@pytest.mark.slow
def test_a_hang_is_ended_in_time():
    ranks = Ranks(2)
    ranks.run(_sum_of_ranks, 0)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 gave no answer"):
        ranks.run(_hang_on, 1, timeout_s=2)
    ranks.stop(force=True)
