"""Real processes killed with SIGKILL at random points, each resumed to the end: bit for bit what no kill would have given."""

import json
import os
import random
import signal
import time

import pytest
import torch

from callbacks.checkpoint_retention import CheckpointRetention, find_damage, list_saved
from tests.chaos.children import EVERY, NUM_STEPS, start, wait
from tests.chaos.toy import assert_same

LAYOUTS = [("one", False, 1), ("one", True, 1), ("fsdp2", False, 2), ("fsdp2", True, 2), ("ddp", True, 2)]


def seeds(config):
    number = config.getoption("--kills", default=None) or int(os.environ.get("CHAOS_KILLS", 10))
    first = config.getoption("--chaos-seed", default=None)
    first = int(time.time()) // 86400 * 1000 if first is None else first
    return range(first, first + number)


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(metafunc.config))


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """Per layout: final state and what each rank did, from a run that nobody killed; made at first use."""
    made = {}

    def of(layout):
        if layout not in made:
            strategy, async_save, num_ranks = layout
            folder = tmp_path_factory.mktemp("whole")
            assert wait(start(folder, strategy, async_save, num_ranks)) == [0] * num_ranks
            events = [json.loads((folder / f"events-{r}.json").read_text()) for r in range(num_ranks)]
            made[layout] = torch.load(folder / "final.pt", weights_only=True), events
        return made[layout]

    return of


@pytest.mark.slow
@pytest.mark.case("C37")
def test_c37_killed_anywhere_it_continues_bit_for_bit(seed, tmp_path, uninterrupted):
    generator, folder = random.Random(seed), tmp_path / "run"
    layout = LAYOUTS[seed % len(LAYOUTS)]
    strategy, async_save, num_ranks = layout
    final, events = uninterrupted(layout)
    victim = generator.randrange(num_ranks)
    if generator.random() < 0.75:
        death = {"die_at": generator.randint(1, events[victim]["files"]), "after": generator.random() < 0.5}
    else:
        death = {"die_in_batch": generator.randint(1, events[victim]["batches"])}
    # Shown when it fails; --chaos-seed repeats it.
    print(f"seed {seed}: {layout}, rank {victim} dies at {death}")

    codes = wait(start(folder, strategy, async_save, num_ranks, victim, **death))
    while codes[victim] == 0 and death.get("die_at", 0) > 1:  # in the background the number of events varies
        folder, death["die_at"] = tmp_path / f"at{death['die_at'] // 2}", death["die_at"] // 2
        codes = wait(start(folder, strategy, async_save, num_ranks, victim, **death))
    assert codes[victim] == -signal.SIGKILL
    progress = (folder / f"progress-{victim}").read_text().split() or ["0"]
    path = CheckpointRetention.resolve(folder / "checkpoints", "auto")
    at = 0 if path is None else int(path.parent.name.split("-")[1])
    # A save in the background may be under way; the one before it is there.
    assert int(progress[-1]) - at <= (2 * EVERY if async_save else EVERY), (progress[-1], at)
    for saved in list_saved(folder / "checkpoints"):
        assert find_damage(folder / "checkpoints" / saved.name) is None
    assert wait(start(folder, strategy, async_save, num_ranks)) == [0] * num_ranks
    assert_same(torch.load(folder / "final.pt", weights_only=True), final)
    left = [n for n in os.listdir(folder / "checkpoints") if n.startswith(".")]
    assert left == []  # cleaned up after the dead
    roles = json.loads((folder / "checkpoints" / "index.json").read_text())
    assert roles["latest"] == [NUM_STEPS] and roles["archive"] == [4, 8]
