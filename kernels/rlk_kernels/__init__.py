"""Selected-token logprobs whose bits depend on nothing but the row's logits."""

from rlk_kernels.backends import backend_id
from rlk_kernels.divergence import Divergences, DivergenceSum, PairStatus, divergence
from rlk_kernels.entropy import entropy
from rlk_kernels.exact_sum import exact_mean, exact_sum
from rlk_kernels.expsum import (
    EMPTY_TOP,
    KERNEL_SPEC,
    LIMIT,
    MAX_COLUMNS,
    State,
    empty_state,
    merge,
)
from rlk_kernels.finish import RowStatus, SelectedLogprob, finish, finish_where_valid
from rlk_kernels.row_statistics import RowStatistics, RowStatisticsSum, row_statistics
from rlk_kernels.selected_logprob import expsum_state, selected_logprob
from rlk_kernels.trainer_logits import batch_logprob, dtensor_logprob, megatron_logprob

__all__ = [
    "EMPTY_TOP",
    "KERNEL_SPEC",
    "LIMIT",
    "MAX_COLUMNS",
    "DivergenceSum",
    "Divergences",
    "PairStatus",
    "RowStatistics",
    "RowStatisticsSum",
    "RowStatus",
    "SelectedLogprob",
    "State",
    "backend_id",
    "batch_logprob",
    "divergence",
    "dtensor_logprob",
    "empty_state",
    "entropy",
    "exact_mean",
    "exact_sum",
    "expsum_state",
    "finish",
    "finish_where_valid",
    "megatron_logprob",
    "merge",
    "row_statistics",
    "selected_logprob",
]
