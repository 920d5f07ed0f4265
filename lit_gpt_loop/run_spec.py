"""The question that `run_plan.py` answers: a run, as far as its cost depends on it (layer P, standard library only).

`plan_config.py` reads it from a configuration.
"""

from dataclasses import dataclass, field
from typing import Literal

from lit_gpt_loop import budget
from lit_gpt_loop.config import GPTConfig
from lit_gpt_loop.devices import Device
from lit_gpt_loop.memory import Strategy
from lit_gpt_loop.schedules import ScheduleConfig


@dataclass(frozen=True)
class Retention:
    """The arguments of CheckpointRetention that decide how much is kept."""

    every_n_steps: int | None = None
    keep_best: int = 1
    keep_latest: int = 2
    archive_every_n_steps: int | list[int] | None = None
    async_save: bool = False
    keeps_verified: bool = (
        False  # RestartEquivalence is there: the last checkpoint that it verified is kept as well
    )

    def num_kept(self, total_steps: int) -> int:
        """Return the most checkpoints at the end of a run; one may serve for several."""
        return self.keep_best + self.keep_latest + self.num_archives(total_steps) + int(self.keeps_verified)

    def num_archives(self, total_steps: int) -> int:
        """Return the archives at the end of a run."""
        every = self.archive_every_n_steps
        if isinstance(every, list):
            return sum(0 < step <= total_steps for step in every)
        return total_steps // every if every else 0


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
        corpus_tokens: tokens of the training split; None leaves out epochs.
        retention: which checkpoints are kept.
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
    retention: Retention | None = None
    write_bytes_per_s: float = 1e9
    copy_bytes_per_s: float = 10e9
    node_mtbf_s: float = budget.SECONDS_PER_YEAR
    restart_s: float = 300.0
