"""What a run costs, before it starts: tokens, updates, FLOPs, hours, money, disk, failures (layer P, standard library only).

Pure arithmetic, in the order in which a plan needs it:

    batch        micro-batch x accumulation x devices = sequences per update, x context = tokens per update (whether a global
                 batch divides is `sample_order.accumulation`'s business)
    length       tokens in all -> updates; updates -> epochs over the corpus
    compute      6 N per token -> FLOPs; FLOPs / (devices x peak x MFU) -> seconds -> GPU-hours -> money
    what is best FLOPs -> the parameters and tokens that spend them best
    what is lost checkpoint bytes -> disk, seconds a save blocks; failures -> how often to save

Memory is in `memory.py`, parameters and FLOPs per token in `flops.py`.

Sources: 6 N FLOPs per token, Kaplan et al. 2020 (arXiv:2001.08361); 20 tokens per parameter, Hoffmann et al. 2022
("Chinchilla", arXiv:2203.15556); save interval, Young 1974 (CACM 17:530) and Daly 2006 (FGCS 22:303).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

CHINCHILLA_TOKENS_PER_PARAM = 20.0
BYTES_FP32 = 4
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365 * SECONDS_PER_DAY


# --- batch -------------------------------------------------------------------------------------------------------------


def sequences_per_update(micro_batch: int, accumulation: int, num_devices: int) -> int:
    """Return the global batch in sequences: micro-batch x accumulation x devices."""
    return micro_batch * accumulation * num_devices


# --- length ------------------------------------------------------------------------------------------------------------


def updates_for_tokens(max_tokens: int, tokens_per_update: int) -> int:
    """Return the whole updates that a budget of `max_tokens` pays for; the rest of less than one update is not spent.

    Raises:
        ValueError: the budget does not pay for one update.
    """
    if tokens_per_update < 1 or max_tokens < tokens_per_update:
        raise ValueError(
            f"max_tokens={max_tokens} is less than one update's {tokens_per_update} tokens: raise it or shrink the batch"
        )
    return max_tokens // tokens_per_update


def updates_per_epoch(num_samples: int, global_batch: int, keep_partial: bool) -> int:
    """Return the updates of one pass over `num_samples`, the short last one kept or dropped.

    Our own recipe has no short last update (its stream is endless), so this is for loops that end with the epoch.
    """
    if num_samples < 1 or global_batch < 1:
        raise ValueError(f"num_samples={num_samples} and global_batch={global_batch} must be at least 1")
    return -(-num_samples // global_batch) if keep_partial else num_samples // global_batch


def epochs(num_tokens: float, corpus_tokens: float) -> float:
    """Return how often `num_tokens` of training pass over a corpus.

    Raises:
        ValueError: `corpus_tokens` is not above 0.
    """
    if corpus_tokens <= 0:
        raise ValueError(f"corpus_tokens={corpus_tokens} must be above 0")
    return num_tokens / corpus_tokens


# --- compute -----------------------------------------------------------------------------------------------------------


def training_flops(num_params: float, num_tokens: float) -> float:
    """Return 6 N D: forward 2 N per token, backward twice that. Attention's T-dependent part is left out, as in MFU.

    Args:
        num_params: N, the weights that multiply activations (`flops.num_matmul_params`).
        num_tokens: D.
    """
    return 6.0 * num_params * num_tokens


def training_seconds(flops: float, peak_flops_per_device: float, mfu: float, num_devices: int) -> float:
    """Return wall seconds to spend `flops` at a utilisation of `mfu`.

    Raises:
        ValueError: `mfu` is not in (0, 1], or another number is not above 0.
    """
    _check_mfu(mfu)
    if peak_flops_per_device <= 0 or num_devices < 1:
        raise ValueError(
            f"peak_flops_per_device={peak_flops_per_device} and num_devices={num_devices} must be above 0"
        )
    return flops / (peak_flops_per_device * mfu * num_devices)


def flops_of_gpu_hours(gpu_hours: float, peak_flops_per_device: float, mfu: float) -> float:
    """Return the FLOPs that `gpu_hours` buy at a utilisation of `mfu`.

    Raises:
        ValueError: `mfu` is not in (0, 1], or another number is not above 0.
    """
    _check_mfu(mfu)
    if gpu_hours <= 0 or peak_flops_per_device <= 0:
        raise ValueError(
            f"gpu_hours={gpu_hours} and peak_flops_per_device={peak_flops_per_device} must be above 0"
        )
    return gpu_hours * SECONDS_PER_HOUR * peak_flops_per_device * mfu


def price(gpu_hours: float, price_per_gpu_hour: float) -> float:
    """Return what `gpu_hours` cost, in the currency of the price.

    Raises:
        ValueError: the price is below 0.
    """
    if price_per_gpu_hour < 0:
        raise ValueError(f"price_per_gpu_hour={price_per_gpu_hour} must be at least 0, in any currency")
    return gpu_hours * price_per_gpu_hour


def _check_mfu(mfu: float) -> None:
    if not 0.0 < mfu <= 1.0:
        raise ValueError(
            f"mfu={mfu} must lie in (0, 1]: the share of peak that training reaches, 0.3 to 0.5 on GPUs"
        )


# --- what is best ------------------------------------------------------------------------------------------------------


def chinchilla_tokens(num_params: float) -> float:
    """Return 20 tokens per parameter, Hoffmann et al.'s compute-optimal ratio."""
    return CHINCHILLA_TOKENS_PER_PARAM * num_params


def compute_optimal_size(flops: float) -> tuple[float, float]:
    """Return (parameters, tokens) that spend `flops` best: C = 6 N D with D = 20 N, so N = sqrt(C / 120).

    Raises:
        ValueError: `flops` is not above 0.
    """
    if flops <= 0:
        raise ValueError(f"flops={flops} must be above 0")
    n = math.sqrt(flops / (6.0 * CHINCHILLA_TOKENS_PER_PARAM))
    return n, CHINCHILLA_TOKENS_PER_PARAM * n


@dataclass(frozen=True)
class Proposal:
    """A preset that a compute budget could train.

    Attributes:
        preset: its name.
        num_params: all parameters.
        num_tokens: tokens that spend the whole budget on it.
        tokens_per_param: the ratio of both; 20 is compute-optimal, more trains past it, fewer falls short.
    """

    preset: str
    num_params: int
    num_tokens: float
    tokens_per_param: float


def propose(flops: float, presets: Mapping[str, tuple[int, float]]) -> list[Proposal]:
    """Return what each preset could be trained on, that nearest to 20 tokens per parameter (by ratio) first.

    Args:
        flops: the budget.
        presets: name -> (all parameters, FLOPs per token).

    Raises:
        ValueError: the budget is not above 0, or there are no presets.
    """
    if flops <= 0:
        raise ValueError(f"a budget of {flops} FLOPs must be above 0")
    if not presets:
        raise ValueError("there must be presets to choose from")
    proposals = [Proposal(name, n, flops / f, flops / f / n) for name, (n, f) in presets.items()]
    return sorted(proposals, key=lambda p: abs(math.log(p.tokens_per_param / CHINCHILLA_TOKENS_PER_PARAM)))


# --- what is lost ------------------------------------------------------------------------------------------------------


def adamw_state_bytes(
    num_params: float, param_bytes: int = BYTES_FP32, moment_bytes: int = BYTES_FP32
) -> float:
    """Return bytes of the parameters and AdamW's two moments, which is what a checkpoint holds beside a few kilobytes."""
    return num_params * (param_bytes + 2 * moment_bytes)


def save_blocks_s(
    checkpoint_bytes: float,
    num_writers: int,
    write_bytes_per_s: float,
    copy_bytes_per_s: float | None = None,
) -> float:
    """Return seconds for which a save blocks training.

    Args:
        checkpoint_bytes: size of the whole checkpoint.
        num_writers: ranks that each write their share; 1 when one rank writes all (one device, DDP).
        write_bytes_per_s: what one writer reaches, hashing included.
        copy_bytes_per_s: with asynchronous saves, device to (pinned) host memory; only this copy blocks.
    """
    rate = copy_bytes_per_s if copy_bytes_per_s is not None else write_bytes_per_s
    if rate <= 0 or num_writers < 1:
        raise ValueError(f"a rate of {rate} bytes/s and num_writers={num_writers} must be above 0")
    return checkpoint_bytes / num_writers / rate


def system_mtbf_s(node_mtbf_s: float, num_nodes: int) -> float:
    """Return the mean time between failures of a job that any one of its nodes' failures ends."""
    if node_mtbf_s <= 0 or num_nodes < 1:
        raise ValueError(f"node_mtbf_s={node_mtbf_s} and num_nodes={num_nodes} must be above 0")
    return node_mtbf_s / num_nodes


def failures_per_day(node_mtbf_s: float, num_nodes: int) -> float:
    """Return expected failures of the job in a day."""
    return SECONDS_PER_DAY / system_mtbf_s(node_mtbf_s, num_nodes)


def save_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the time between saves that loses least, Daly's higher-order form of Young's sqrt(2 C M).

    With C the seconds a save blocks and M the mean time between failures: sqrt(2 C M) (1 + x / 3 + x^2 / 9) - C, where
    x = sqrt(C / 2 M), counted from the end of one save to the start of the next; M where C >= 2 M.

    Raises:
        ValueError: a time is not above 0.
    """
    if save_s <= 0 or mtbf_s <= 0:
        raise ValueError(f"save_s={save_s} and mtbf_s={mtbf_s} must be above 0")
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    x = math.sqrt(save_s / (2.0 * mtbf_s))
    return math.sqrt(2.0 * save_s * mtbf_s) * (1.0 + x / 3.0 + x * x / 9.0) - save_s


def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the expected share of wall time lost to saving, to work done again and to restarting, to first order."""
    return save_s / (interval_s + save_s) + ((interval_s + save_s) / 2.0 + restart_s) / mtbf_s
