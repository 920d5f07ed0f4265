"""Devices that a run can be planned for: how people call them, what they can hold (layer P, standard library only).

Peak FLOP/s are in `callbacks/mfu.py`, one table for plan and measurement; this one names its entries and adds memory, as the
driver reports it (a "24 GB" card has 22.5 GiB).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

# name -> (entry of callbacks.mfu.PEAK_FLOPS, GiB)
DEVICES: dict[str, tuple[str, float]] = {
    "v100": ("V100 SXM", 31.7),
    "v100-16gb": ("V100 SXM", 15.8),
    "v100-pcie": ("V100 PCIE", 31.7),
    "v100s": ("V100S", 31.7),
    "t4": ("T4", 15.0),
    "a10": ("A10", 22.5),
    "a100": ("A100", 79.3),
    "a100-40gb": ("A100", 39.6),
    "l4": ("L4", 22.5),
    "l40s": ("L40S", 45.0),
    "h100": ("H100 SXM", 79.6),
    "h100-pcie": ("H100 PCIE", 79.6),
    "h100-nvl": ("H100 NVL", 93.6),
    "h200": ("H200 SXM", 140.4),
    "h200-nvl": ("H200 NVL", 140.4),
    "b200": ("B200", 179.0),
    "gb200": ("GB200", 185.0),
    "mi250x": ("MI250X", 64.0),  # one of its two dies, as PyTorch sees it
    "mi300x": ("MI300X", 192.0),
}


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of one device.

    Attributes:
        name: for messages.
        memory_bytes: as the driver reports it; None if unknown.
        peak_flops: dense FLOP/s in the type of the matmuls; None if unknown.

    Raises:
        ValueError: a number is not above 0.
    """

    name: str
    memory_bytes: float | None
    peak_flops: float | None

    def __post_init__(self) -> None:
        for what, value in (("memory", self.memory_bytes), ("peak", self.peak_flops)):
            if value is not None and value <= 0:
                raise ValueError(f"the {what} of {self.name} is {value:g}: it must be above 0")


def find_device(
    name: str,
    peaks: Mapping[str, Mapping[str, float]],
    dtype: str,
    peak_tflops: float | None = None,
    memory_gib: float | None = None,
) -> Device:
    """Return a device of the table, or one that is described by numbers.

    Args:
        name: a key of `DEVICES`, in any case; spaces and underscores count as hyphens.
        peaks: callbacks.mfu.PEAK_FLOPS.
        dtype: in which matmuls run: "bf16", "fp16" or "fp32".
        peak_tflops: overrides the table, in 1e12 FLOP/s.
        memory_gib: overrides the table.

    Raises:
        ValueError: not in the table and not described by numbers, or a device without units for this dtype.
    """
    key = name.lower().removeprefix("nvidia ").removeprefix("amd ").replace(" ", "-").replace("_", "-")
    peak = peak_tflops * 1e12 if peak_tflops is not None else None
    memory = memory_gib * 2**30 if memory_gib is not None else None
    if key not in DEVICES:
        if peak is not None and memory is not None:
            return Device(name, memory, peak)
        close = difflib.get_close_matches(key, DEVICES, n=3, cutoff=0.4)
        raise ValueError(
            f"gpu {name!r} is not in the table{'; did you mean ' + ' or '.join(close) + '?' if close else '.'} Known: "
            f"{', '.join(DEVICES)}. For another device give both --peak_tflops (dense, for {dtype}) and --device_memory_gib."
        )
    entry, gib = DEVICES[key]
    if peak is None:
        peak = peaks[entry].get(dtype)
        if peak is None:
            raise ValueError(
                f"{key} has no {dtype} units: set trainer.precision to one of {', '.join(peaks[entry])}, or give --peak_tflops"
            )
    return Device(key, memory if memory is not None else gib * 2**30, peak)
