"""Learning-rate schedules: update index -> multiplier of the peak rate (layer P, standard library only).

Every schedule is a closed form of the update index n = 0, 1, 2, ... (the n-th successful update applies `peak *
schedule(n)`). Nothing needs restoring after a restart, and a run that is extended keeps each rate before its new decay
bit for bit, because warmup and the stable phase never look at the length of the run.

    multiplier
      1.0         ________________________________
                 /                                \\        warmup:  (n + 1) / warmup_steps
                /                                  \\       stable:  1
               /                                    \\      decay:   final + (1 - final) * shape((k + 1) / decay_steps),
      0.0     /                                      \\              k = n - (total_steps - decay_steps)
              0    warmup_steps     total_steps - decay_steps   total_steps

Consequences of counting from n + 1: the first rate applied is above 0, the update number `warmup_steps` (counted from 1)
is the first at peak, the first decayed update is below peak and the last update of the run uses exactly `final_ratio`; with
`final_ratio` 0 that last update changes nothing.

Sources: warmup-stable-decay, Hu et al. 2024 (MiniCPM, arXiv:2404.06395); decay shapes and the 1-sqrt cooldown, Hagele et
al. 2024 (arXiv:2405.18392); cosine, Loshchilov and Hutter 2017 (arXiv:1608.03983), floor of peak / 10, Hoffmann et al. 2022.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["wsd", "cosine", "constant"]
DecayShape = Literal["1-sqrt", "linear", "cosine", "exponential"]

# Shape functions map progress p in (0, 1] to the share of the way down that is still left: f(0) = 1, f(1) = 0.
# Exponential falls by exp(-5 p), shifted and scaled to meet both ends.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda p: 1.0 - math.sqrt(p),
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "exponential": lambda p: (math.exp(-5.0 * p) - math.exp(-5.0)) / (1.0 - math.exp(-5.0)),
}


@dataclass(frozen=True)
class Schedule:
    """A resolved schedule; call it with an update index (from 0) for the multiplier of the peak rate.

    Attributes:
        kind: "wsd" and "cosine" decay at the end of `total_steps`; "constant" stays at peak after warmup.
        warmup_steps: updates of linear warmup; 0 starts at peak.
        decay_steps: updates of decay, the last ones of the run. Cosine decays from the end of warmup.
        total_steps: updates in the run, or None for a run without an end (then nothing decays).
        decay_shape: one of `DECAY_SHAPES`.
        final_ratio: last rate / peak.
    """

    kind: Kind
    warmup_steps: int
    decay_steps: int
    total_steps: int | None
    decay_shape: DecayShape
    final_ratio: float

    @property
    def decay_start(self) -> int | None:
        """Index of the first update that decays; None when none does."""
        if self.total_steps is None or self.decay_steps == 0:
            return None
        return self.total_steps - self.decay_steps

    def __call__(self, update: int) -> float:
        """Return rate / peak for the update with this index; past the end it stays at the last rate."""
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        start = self.decay_start
        if start is None or update < start:
            return 1.0
        progress = min(1.0, (update - start + 1) / self.decay_steps)
        return self.final_ratio + (1.0 - self.final_ratio) * DECAY_SHAPES[self.decay_shape](progress)


@dataclass(frozen=True)
class ScheduleConfig:
    """What a user writes; `resolve` turns it into a `Schedule` for a run's length.

    Attributes:
        kind: "wsd" (warmup-stable-decay), "cosine" (warmup, then cosine to the end) or "constant".
        warmup_steps: updates of linear warmup; a number below 1 is a share of the run.
        decay_steps: updates of decay at the end ("wsd" only; cosine decays from the end of warmup); a number below 1 is a
            share of the run. 0 makes a trunk that never decays.
        decay_shape: "1-sqrt", "linear", "cosine" or "exponential" ("wsd" only).
        final_ratio: last rate / peak; None means 0 for wsd and 0.1 for cosine.
        skipped_updates: updates of the run that were skipped before this schedule was written (recipes.cooldown sets it). They
            count in the run's length and not in the schedule, which would else end that many updates after the run.
    """

    kind: Kind = "wsd"
    warmup_steps: int | float = 0.02
    decay_steps: int | float = 0.2
    decay_shape: DecayShape = "1-sqrt"
    final_ratio: float | None = None
    skipped_updates: int = 0

    def resolve(self, total_steps: int | None) -> Schedule:
        """Return the schedule of a run of `total_steps` updates (None: a run without an end).

        Raises:
            ValueError: a phase is negative, phases overlap, a share is asked of a run without an end, or a name is unknown.
        """
        if self.kind not in ("wsd", "cosine", "constant"):
            raise ValueError(f"schedule kind {self.kind!r} is unknown: use 'wsd', 'cosine' or 'constant'")
        if self.decay_shape not in DECAY_SHAPES:
            raise ValueError(
                f"decay_shape {self.decay_shape!r} is unknown: use one of {sorted(DECAY_SHAPES)}"
            )
        if self.skipped_updates < 0:
            raise ValueError(
                f"skipped_updates={self.skipped_updates} must not be negative: it counts updates"
            )
        if total_steps is not None:
            total_steps -= self.skipped_updates
            if total_steps < 1:
                raise ValueError(
                    f"total_steps={total_steps + self.skipped_updates} with skipped_updates={self.skipped_updates}: a run needs at "
                    "least one update that happens"
                )
        final = self.final_ratio if self.final_ratio is not None else (0.1 if self.kind == "cosine" else 0.0)
        if not 0.0 <= final <= 1.0:
            raise ValueError(
                f"final_ratio={final} must lie in [0, 1]: it is the last rate divided by the peak"
            )
        warmup = _steps("warmup_steps", self.warmup_steps, total_steps)
        if self.kind == "constant":
            _no_overlap(warmup, 0, total_steps)
            return Schedule("constant", warmup, 0, total_steps, self.decay_shape, 1.0)
        if self.kind == "cosine":
            if total_steps is None:
                raise ValueError(
                    "a cosine schedule needs the run's length: set trainer.max_steps or max_tokens"
                )
            decay = max(total_steps - warmup, 0)
        else:
            decay = _steps("decay_steps", self.decay_steps, total_steps)
            if decay and total_steps is None:
                raise ValueError(
                    f"decay_steps={self.decay_steps} needs the run's length: set trainer.max_steps or max_tokens, "
                    "or decay_steps: 0 for a trunk without an end"
                )
        _no_overlap(warmup, decay, total_steps)
        if (
            total_steps is not None
            and warmup == 0
            and decay == total_steps
            and final == 0
            and total_steps == 1
        ):
            raise ValueError(
                "a run of one update that decays to 0 trains nothing: set decay_steps: 0 or a final_ratio above 0"
            )
        shape: DecayShape = "cosine" if self.kind == "cosine" else self.decay_shape
        return Schedule(self.kind, warmup, decay, total_steps, shape, final)


def _no_overlap(warmup: int, decay: int, total_steps: int | None) -> None:
    if total_steps is not None and warmup + decay > total_steps:
        raise ValueError(
            f"warmup ({warmup} updates) and decay ({decay}) overlap in a run of {total_steps} updates: their sum must not "
            "exceed the run; shorten one of them or lengthen the run"
        )


def _steps(name: str, value: int | float, total_steps: int | None) -> int:
    if value < 0:
        raise ValueError(
            f"{name}={value} must not be negative: give updates (>= 1), a share of the run (< 1) or 0"
        )
    if 0 < value < 1:
        if total_steps is None:
            raise ValueError(
                f"{name}={value} is a share of the run, whose length is not known: set trainer.max_steps or max_tokens, "
                "or give updates"
            )
        return round(value * total_steps)
    if value != int(value):
        raise ValueError(
            f"{name}={value} must be a whole number of updates, or below 1 for a share of the run"
        )
    return int(value)


@dataclass(frozen=True)
class ScheduleSummary:
    """What a schedule amounts to over a run.

    Attributes:
        total_steps: updates.
        warmup_share: share of the updates in warmup, 0 to 1.
        stable_share: the same for the stable phase.
        decay_share: the same for the decay.
        updates_at_peak: updates whose rate is the peak.
        mean_ratio: mean rate / peak over all updates.
        final_ratio: rate / peak of the last update.
    """

    total_steps: int
    warmup_share: float
    stable_share: float
    decay_share: float
    updates_at_peak: int
    mean_ratio: float
    final_ratio: float

    def __str__(self) -> str:
        updates, at_peak = (f"{n:,} update{'s' * (n != 1)}" for n in (self.total_steps, self.updates_at_peak))
        return (
            f"{updates}: warmup {self.warmup_share:.1%}, stable {self.stable_share:.1%}, "
            f"decay {self.decay_share:.1%}; {at_peak} at peak, mean rate / peak {self.mean_ratio:.3f}, "
            f"final / peak {self.final_ratio:.3g}"
        )


def summarize(schedule: Schedule) -> ScheduleSummary:
    """Return the summary of a schedule with an end, by summing over its updates.

    Raises:
        ValueError: the schedule has no end.
    """
    n = schedule.total_steps
    if n is None:
        raise ValueError("a schedule without an end has no summary: set the run's length")
    ratios = [schedule(i) for i in range(n)]
    return ScheduleSummary(
        total_steps=n,
        warmup_share=schedule.warmup_steps / n,
        stable_share=(n - schedule.warmup_steps - schedule.decay_steps) / n,
        decay_share=schedule.decay_steps / n,
        updates_at_peak=sum(r == 1.0 for r in ratios),
        mean_ratio=math.fsum(ratios) / n,
        final_ratio=ratios[-1],
    )


def first_difference(old: Schedule, new: Schedule, num_updates: int) -> int | None:
    """Return the first of the updates 0 .. num_updates - 1 whose rate differs between two schedules, or None.

    A run may change its schedule at a restart only when this is None for the updates it has made.
    """
    return next((n for n in range(num_updates) if old(n) != new(n)), None)
