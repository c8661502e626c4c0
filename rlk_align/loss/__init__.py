"""The GRPO loss: the same bits on every layout (docs/loss.md)."""

from rlk_align.loss.batch import SequenceTable, TokenRows
from rlk_align.loss.contract import AdvantageScale, KlEstimator, LossContract, Normalizer
from rlk_align.loss.grpo import GrpoLoss, grpo_loss
from rlk_align.loss.totals import Totals

__all__ = [
    "AdvantageScale",
    "GrpoLoss",
    "KlEstimator",
    "LossContract",
    "Normalizer",
    "SequenceTable",
    "TokenRows",
    "Totals",
    "grpo_loss",
]
