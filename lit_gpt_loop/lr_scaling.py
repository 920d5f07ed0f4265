"""How the learning rate follows the batch, and how large a batch is worth it (layer P, standard library only).

Rules of thumb with their sources. They carry a rate that was tuned at one batch size to another; they do not find one (that is
`lr_range.py`), and both break down past the critical batch, which the gradient noise scale estimates.

| rule | for | source |
|---|---|---|
| linear: k times the batch, k times the rate | SGD, with warmup, up to some thousands of images | Goyal et al. 2017, arXiv:1706.02677 |
| square root: k times the batch, sqrt(k) times the rate | SGD, keeps the variance of the update | Krizhevsky 2014, arXiv:1404.5997 |
| square root with betas and epsilon | Adam and AdamW, when noise dominates the gradient | Malladi et al. 2022, arXiv:2205.10287 |
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


def linear_scaled_lr(lr: float, batch: float, new_batch: float) -> float:
    """Return `lr` times `new_batch / batch` (Goyal et al. 2017), for SGD."""
    return lr * _ratio(lr, batch, new_batch)


def sqrt_scaled_lr(lr: float, batch: float, new_batch: float) -> float:
    """Return `lr` times the root of `new_batch / batch` (Krizhevsky 2014; Malladi et al. 2022 for Adam)."""
    return lr * math.sqrt(_ratio(lr, batch, new_batch))


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's settings that depend on the batch."""

    lr: float
    betas: tuple[float, float]
    eps: float


def scaled_adam(settings: AdamSettings, batch: float, new_batch: float) -> AdamSettings:
    """Return Adam's settings for another batch, by Malladi et al. 2022's square-root rule.

    For k times the batch: sqrt(k) times the rate, 1 - beta times k, epsilon divided by sqrt(k). The moments then average over
    as many samples as before. Theirs has no weight decay; decoupled decay acts through the rate.

    Raises:
        ValueError: k is so large that a beta would not be positive.
    """
    k = _ratio(settings.lr, batch, new_batch)
    betas = tuple(1.0 - k * (1.0 - beta) for beta in settings.betas)
    if min(betas) <= 0.0:
        largest = batch / max(1.0 - beta for beta in settings.betas)
        raise ValueError(
            f"a batch of {new_batch:g} is {k:g} times {batch:g}: betas {settings.betas} would become {betas}, not above 0. The rule "
            f"reaches to batches below {largest:g}; past it use sqrt_scaled_lr and keep the betas"
        )
    return AdamSettings(settings.lr * math.sqrt(k), (betas[0], betas[1]), settings.eps / math.sqrt(k))


def _ratio(lr: float, batch: float, new_batch: float) -> float:
    if lr <= 0 or batch <= 0 or new_batch <= 0:
        raise ValueError(f"lr={lr}, batch={batch} and new_batch={new_batch} must be above 0")
    return new_batch / batch


# --- gradient noise scale ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates from one update: the squared norm of the true gradient, and the trace of its covariance per sample.

    Either can come out negative in one update; average both over many, then divide (`simple_noise_scale`).
    """

    grad_norm_squared: float
    noise: float


def noise_estimate(
    small_norm_squared: float, big_norm_squared: float, small_batch: float, big_batch: float
) -> NoiseEstimate:
    """Return McCandlish et al. 2018's estimates (arXiv:1812.06162, appendix A.1) from two norms of one update.

    E |g_B|^2 = |G|^2 + tr(S) / B for a mean over B samples; two batch sizes give both unknowns.

    Args:
        small_norm_squared: |g|^2 of the mean gradient over a small batch: a micro-batch, or the mean over several.
        big_norm_squared: |g|^2 of the mean gradient over the whole update that the small batch is part of.
        small_batch: samples (or tokens) of the small batch.
        big_batch: of the update, in the same unit.

    Raises:
        ValueError: `big_batch` is not above `small_batch`, or a number is negative.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(
            f"small_batch={small_batch} must be above 0 and below big_batch={big_batch}: with one micro-batch per update on one "
            "device there is nothing to compare, so accumulate at least two"
        )
    if small_norm_squared < 0 or big_norm_squared < 0:
        raise ValueError(f"squared norms {small_norm_squared} and {big_norm_squared} must not be negative")
    grad = (big_batch * big_norm_squared - small_batch * small_norm_squared) / (big_batch - small_batch)
    noise = (small_norm_squared - big_norm_squared) / (1.0 / small_batch - 1.0 / big_batch)
    return NoiseEstimate(grad, noise)


def simple_noise_scale(estimates: Iterable[NoiseEstimate]) -> float | None:
    """Return tr(S) / |G|^2, the batch at which noise and signal are equal, in the unit of the batches.

    Below it, twice the batch nearly halves the updates needed; far above it, nothing is gained. The mean of the ratio would be
    biased, so both are averaged first.

    Returns:
        None while the mean of |G|^2 is not above 0, or without estimates: then there is too little to say anything.
    """
    found = list(estimates)
    grad = math.fsum(e.grad_norm_squared for e in found)
    noise = math.fsum(e.noise for e in found)
    return max(0.0, noise / grad) if grad > 0 else None
