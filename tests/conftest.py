"""Fixtures for every test: quiet libraries, one thread, and ranks that stay."""

import logging
import os

# Before torch is imported by any test: no network, no wandb account, no tokenizer threads.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before rich, whose Union[float, int] typing would hand to Lightning's Union[int, float]: the command line would then read
# `--trainer.limit_val_batches 1` as 1.0, all of them. The recipes that train import Lightning first.
import lightning.pytorch  # noqa: F401
import pytest
import torch

from tests.distributed.ranks import Ranks


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _messages_can_be_captured():
    """Levels that an earlier test set would keep messages from this one's caplog."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.INFO)


@pytest.fixture(scope="session")
def ranks2():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks4():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
