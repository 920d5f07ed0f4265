"""A progress bar that counts updates and tokens, for runs whose data has no end (layer L)."""

import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm


class UpdateProgressBar(ProgressBar):
    """Shows updates done, loss, tokens/s and time left; on a terminal as one line, in a log file as a line now and then.

    Loss and tokens/s are those that `train/loss` and `perf/tokens_per_s` report, when the run has them.

    Args:
        refresh_s: seconds between two redraws; between them it costs two comparisons per micro-batch.
        log_every_s: seconds between two lines where the output is no terminal.
        clock: seconds, for tests.
    """

    def __init__(
        self, refresh_s: float = 0.5, log_every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.refresh_s, self.log_every_s, self._clock = refresh_s, log_every_s, clock
        self._enabled = True
        self._bar: Any = None
        self._last = 0.0
        self._start = (0.0, 0)  # time, update
        self._first_seen: tuple[float, int] | None = None  # time, tokens

    def disable(self) -> None:
        """Show nothing (Lightning calls this on all ranks but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar at the update that the run starts from."""
        if not self._enabled:
            return
        self._start = (self._clock(), trainer.global_step)
        self._last, self._first_seen = self._start[0], None
        if sys.stderr.isatty():
            total = trainer.max_steps if trainer.max_steps > 0 else None
            self._bar = tqdm(
                total=total,
                initial=trainer.global_step,
                unit="update",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Redraw, if it is time."""
        if not self._enabled:
            return
        now = self._clock()
        is_last = trainer.global_step == trainer.max_steps
        if now - self._last < (self.refresh_s if self._bar is not None else self.log_every_s) and not is_last:
            return
        self._last = now
        text = self.describe(trainer, now)
        if self._bar is None:
            print(
                f"update {trainer.global_step}/{trainer.max_steps if trainer.max_steps > 0 else '?'}  {text}",
                flush=True,
            )
        else:
            self._bar.n = trainer.global_step
            self._bar.set_postfix_str(text, refresh=True)

    def describe(self, trainer: pl.Trainer, now: float) -> str:
        """Return the text behind the count: loss, validation loss, tokens/s, time left, each only if known."""
        metrics, parts = trainer.callback_metrics, []
        for key, label in (("train/loss", "loss"), ("val/loss", "val")):
            if key in metrics:
                parts.append(f"{label} {float(metrics[key]):.3f}")
        start_s, start_update = self._start
        done = trainer.global_step - start_update
        if (rate := metrics.get("perf/tokens_per_s")) is not None:
            parts.append(f"{float(rate):,.0f} tokens/s")
        elif (tokens := metrics.get("progress/tokens")) is not None:
            first_s, first_tokens = self._first_seen = self._first_seen or (now, int(tokens))
            if now > first_s:
                parts.append(f"{(int(tokens) - first_tokens) / (now - first_s):,.0f} tokens/s")
        if trainer.max_steps > 0 and done:
            left_s = (now - start_s) / done * (trainer.max_steps - trainer.global_step)
            parts.append(f"{clock_time(left_s)} left")
        return "  ".join(parts)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the bar, so that the error starts on a line of its own."""
        self.on_train_end(trainer, pl_module)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._bar is not None:
            self._bar.write(" ".join(map(str, args)))
        elif self._enabled:
            print(*args, flush=True)


def clock_time(seconds: float) -> str:
    """Return seconds as m:ss, h:mm:ss or d days h:mm:ss."""
    s = max(0, round(seconds))
    days, s = divmod(s, 86400)
    hours, s = divmod(s, 3600)
    minutes, s = divmod(s, 60)
    text = f"{hours}:{minutes:02}:{s:02}" if hours or days else f"{minutes}:{s:02}"
    return f"{days} days {text}" if days else text
