"""The question that `run_plan.py` answers: a run, as far as its cost depends on it (layer P, standard library only).

`plan_config.py` reads it from a configuration.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from lit_gpt_loop import budget
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.devices import Device
from lit_gpt_loop.memory import Strategy
from lit_gpt_loop.schedules import ScheduleConfig


@dataclass(frozen=True)
class Kept:
    """Checkpoints of an uninterrupted run.

    Attributes:
        num_kept: the most that are kept after a save.
        num_on_disk: the most at any moment; a new one is written before an old one is pruned.
        is_exact: whether both are counts; else they are upper bounds.
    """

    num_kept: int
    num_on_disk: int
    is_exact: bool


@dataclass(frozen=True)
class Retention:
    """What decides when CheckpointRetention saves and how much it keeps.

    Attributes:
        every_n_steps: updates between saves; None saves at validations, unless `every_n_minutes` is given.
        every_n_minutes: minutes between saves, which come at updates that cannot be known before.
        keep_best: how many best ones are kept.
        keep_latest: how many recent ones.
        archive_every_n_steps: updates between those that are kept for good, or a list of updates.
        async_save: training waits for a copy only.
        save_on_exit: the last update is saved.
        keeps_verified: RestartEquivalence is there: the last checkpoint that it verified is kept as well.
        validates_every: updates between validations; 0 is never; None is at updates that cannot be known before.
    """

    every_n_steps: int | None = None
    every_n_minutes: float | None = None
    keep_best: int = 1
    keep_latest: int = 2
    archive_every_n_steps: int | list[int] | None = None
    async_save: bool = False
    save_on_exit: bool = True
    keeps_verified: bool = False
    validates_every: int | None = 0

    def replay(self, total_steps: int) -> Kept:
        """Return how many checkpoints a run of so many updates has on disk, by going through its saves.

        Latest and archive follow from the steps alone. Which validation is best and which checkpoint is verified does not, so
        those are taken to fall on others than these, as long as there are others, and any validation may be saved as best.
        """
        archives = set(_steps(self.archive_every_n_steps, total_steps))
        certain = archives | set(_steps(self.every_n_steps, total_steps))
        if self.save_on_exit and total_steps > 0:
            certain.add(total_steps)
        validations = set(_steps(self.validates_every, total_steps))
        if self.every_n_steps is None and self.every_n_minutes is None:
            certain |= validations
        others = self.keep_best + self.keeps_verified
        if self.every_n_minutes is not None or self.validates_every is None:  # a save at any update
            num_kept = min(total_steps, len(archives) + self.keep_latest + others)
            return Kept(num_kept, min(total_steps, num_kept + 1), is_exact=False)
        least = self._count(certain, archives, 0)
        most = self._count(certain | validations if self.keep_best else certain, archives, others)
        return Kept(*most, is_exact=least == most)

    def _count(self, saves: set[int], archives: set[int], others: int) -> tuple[int, int]:
        """Return (the most kept after a save, the most on disk) if `others` are kept beside latest and archive."""
        latest: deque[int] = deque(maxlen=self.keep_latest)
        num_archived = kept = num_kept = num_on_disk = 0
        for number, step in enumerate(sorted(saves), 1):
            num_on_disk = max(num_on_disk, kept + 1)
            num_archived += step in archives
            latest.append(step)
            kept = min(number, num_archived + sum(s not in archives for s in latest) + others)
            num_kept = max(num_kept, kept)
        return num_kept, num_on_disk


def _steps(every: int | list[int] | None, total_steps: int) -> list[int]:
    """Return the updates of an interval or a list that lie in the run."""
    if isinstance(every, list):
        return [step for step in every if 0 < step <= total_steps]
    return list(range(every, total_steps + 1, every)) if every else []


@dataclass(frozen=True)
class RunSpec:
    """What is asked.

    Attributes:
        name: of the run.
        config: the model's shape.
        micro_batch: sequences per device at a time.
        global_batch: sequences per update over all devices; None is `accumulation` micro-batches on each device.
        accumulation: micro-batches per update and device where `global_batch` is None.
        max_steps: updates; None needs `max_tokens`.
        max_tokens: a budget instead of `max_steps`.
        schedule: of the learning rate.
        strategy: how the state is spread over `num_devices`.
        num_devices: all devices.
        devices_per_node: what hybrid sharding shards over and what fails as a whole.
        precision: Lightning's name.
        syncs_every_micro_batch: of the strategy.
        gathers_low: the strategy gathers parameters in low precision.
        keeps_gathered: FSDP1 keeps parameters whole from forward to backward.
        device_type: whose kernels run, "cuda" or "cpu".
        device: None leaves out time, money and what fits.
        mfu: the share of peak that is assumed.
        price_per_gpu_hour: in any currency.
        corpus_tokens: tokens of one pass over the training split; None leaves out epochs.
        is_corpus_estimated: that number is no count.
        retention: which checkpoints are kept; None where no CheckpointRetention is.
        write_bytes_per_s: of one rank, hashing included.
        copy_bytes_per_s: device to host memory, which is all that blocks in an asynchronous save.
        node_mtbf_s: mean time between failures of one node.
        restart_s: from a failure to the first new update.
    """

    name: str
    config: GPTConfig
    micro_batch: int
    global_batch: int | None = None
    accumulation: int = 1
    max_steps: int | None = None
    max_tokens: int | None = None
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    strategy: Strategy = "single"
    num_devices: int = 1
    devices_per_node: int = 8
    precision: str = "bf16-mixed"
    syncs_every_micro_batch: bool = False
    gathers_low: bool = False
    keeps_gathered: bool = False
    device_type: Literal["cuda", "cpu"] = "cuda"
    device: Device | None = None
    mfu: float = 0.4
    price_per_gpu_hour: float | None = None
    corpus_tokens: int | None = None
    is_corpus_estimated: bool = False
    retention: Retention | None = None
    write_bytes_per_s: float = 1e9
    copy_bytes_per_s: float = 10e9
    node_mtbf_s: float = budget.SECONDS_PER_YEAR
    restart_s: float = 300.0
