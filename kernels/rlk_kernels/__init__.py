"""Selected-token logprobs whose bits depend on nothing but the row's logits."""

from rlk_kernels.backends import backend_id
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
from rlk_kernels.selected_logprob import expsum_state, selected_logprob

__all__ = [
    "EMPTY_TOP",
    "KERNEL_SPEC",
    "LIMIT",
    "MAX_COLUMNS",
    "RowStatus",
    "SelectedLogprob",
    "State",
    "backend_id",
    "empty_state",
    "expsum_state",
    "finish",
    "finish_where_valid",
    "merge",
    "selected_logprob",
]
