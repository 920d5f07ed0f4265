"""Callbacks that add to Lightning what a pretraining loop lacks. Each file stands alone: import it from here, or copy it."""

from callbacks.checkpoint_retention import CheckpointRetention
from callbacks.grad_norm import GradNormMonitor
from callbacks.loop_audit import LoopAudit
from callbacks.mfu import MFUMonitor
from callbacks.restart_equivalence import RestartEquivalence
from callbacks.sample_text import SampleText
from callbacks.token_weighted_loss import TokenWeightedLoss

__all__ = [
    "CheckpointRetention",
    "GradNormMonitor",
    "LoopAudit",
    "MFUMonitor",
    "RestartEquivalence",
    "SampleText",
    "TokenWeightedLoss",
]
