"""From a row's integers to its logprob and log-sum-exp, in float64 with + - * / only.

No libm: its last bits differ between machines. Letters: T tokens, B bins.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_kernels.eager import eager
from rlk_kernels.expsum import BIN_WIDTH, LIMIT, MANTISSA_BITS, NUM_BINS, State
from rlk_kernels.reference import exponential

LN2_D_HI = float.fromhex("0x1.62e42fee00000p-1")
LN2_D_LO = float.fromhex("0x1.a39ef35793c76p-33")
SQRT_HALF = 0.70710678118654757
SQRT2_MINUS_1 = 0.41421356237309515
ATANH_TERMS = 11
"""1 + q/3 + ... + q^10/21."""


class RowStatus(IntEnum):
    """Why a row has a logprob, or none."""

    OK = 0
    INVALID_LOGIT = 1
    """A logit is NaN, +inf or above 8192."""
    NO_LIVE_COLUMN = 2
    """Every column is masked."""
    TARGET_NOT_SEEN = 3
    """No merged state holds the target's column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedLogprob:
    """Log-probability of each row's target, and the row's log-sum-exp."""

    logprob: Tensor
    """float32 [T], in nats; never above 0, -inf for a masked target."""
    lse: Tensor
    """float32 [T], in nats."""


class RowSum(NamedTuple):
    """A row's sum of exponentials as ``mantissa * 2**exponent``."""

    mantissa: Tensor
    """float64 [T] in [sqrt(1/2), sqrt(2))."""
    exponent: Tensor
    """float64 [T], an integer."""


@eager
def finish(state: State) -> SelectedLogprob:
    """Logprob and LSE of every row of a state that has seen the whole vocabulary.

    Raises:
        ValueError: Naming the row and the column, if a row holds an invalid logit, has no live
            column, or has a target that nobody owned.
    """
    return finish_active(state, None)[0]


def finish_active(state: State, active: Tensor | None) -> tuple[SelectedLogprob, RowSum]:
    """The same with the rows' sums; rows where ``active`` is false are 0, whatever they hold."""
    is_active = torch.ones_like(state.has_target) if active is None else active
    status = torch.where(is_active, row_status(state), RowStatus.OK)
    error = _first_bad_row(state, status)
    if error is not None:
        raise ValueError(error)
    total = row_sum(state)
    return _values(state, total, is_active), total


@eager
def finish_where_valid(state: State) -> tuple[SelectedLogprob, Tensor]:
    """Logprob and LSE of the rows that have one, and a `RowStatus` int8 [T] for every row.

    Where the status is not ``RowStatus.OK`` both values are 0 and mean nothing.
    """
    status = row_status(state)
    return _values(state, row_sum(state), status == RowStatus.OK), status


def row_status(state: State) -> Tensor:
    """A `RowStatus` int8 [T] for every row; of several faults the first in the enum's order."""
    status = torch.where(state.has_target, RowStatus.OK, RowStatus.TARGET_NOT_SEEN)
    # the largest live column stands in the first bin, so an empty one means no live column
    status = torch.where(state.bins[:, 0] == 0, RowStatus.NO_LIVE_COLUMN, status)
    return torch.where(state.invalid_column >= 0, RowStatus.INVALID_LOGIT, status).to(torch.int8)


def _first_bad_row(state: State, status: Tensor) -> str | None:
    """A sentence on the first row that has no logprob; None if all have one."""
    bad = (status != RowStatus.OK).nonzero()
    if not len(bad):
        return None
    row = int(bad[0])
    if status[row] == RowStatus.INVALID_LOGIT:
        return invalid_logit_message(row, int(state.invalid_column[row]))
    if status[row] == RowStatus.NO_LIVE_COLUMN:
        return f"row {row}: every logit is masked (at or below -{LIMIT:.0f}); leave one column live"
    return f"row {row}: no state holds the target's column; merge the states of all shards"


def invalid_logit_message(row: int, token_id: int) -> str:
    """The sentence on a logit that no logprob can be computed from."""
    return (
        f"row {row}: logit of token id {token_id} is NaN, +inf or above {LIMIT:.0f}; "
        "mask columns with -inf and repair what computes the logits"
    )


def row_sum(state: State) -> RowSum:
    """The sum of the row's exponentials; rows without live column give 1."""
    folded = _fold(state.bins)
    folded = torch.where(folded > 0, folded, 1.0)
    unit = (state.top.double() - (NUM_BINS - 1)) * BIN_WIDTH - MANTISSA_BITS
    mantissa, exponent = split(folded)
    return RowSum(mantissa, exponent + torch.where(state.bins[:, 0] > 0, unit, 0.0))


def _values(state: State, total: RowSum, is_wanted: Tensor) -> SelectedLogprob:
    """Logprob from exact integers where target and top lie within three bins; 0 if unwanted."""
    is_masked = ~(state.target_logit > -LIMIT)
    # placeholder: masked targets are replaced below, and invalid ones are unwanted
    target = torch.where(is_masked | ~(state.target_logit <= LIMIT), 0.0, state.target_logit)
    mantissa, power = exponential(target)
    target_bin = torch.div(power, BIN_WIDTH, rounding_mode="floor")
    depth = state.top.long() - target_bin
    is_near = (depth >= 0) & (depth < NUM_BINS)
    value = mantissa << (power - BIN_WIDTH * target_bin)
    in_bin = torch.arange(NUM_BINS, device=depth.device) == depth[:, None]
    target_bins = torch.where(in_bin, value[:, None], 0)
    others = torch.where(is_near, _fold(state.bins - target_bins), 1.0)
    ratio = others / torch.where(is_near, _fold(target_bins), 1.0)
    # four series at once: small calls cost more than their arithmetic
    near_and_target = split(torch.stack([ratio + 1.0, mantissa.double()]))
    m = torch.cat([near_and_target.mantissa, total.mantissa[None]])
    e = torch.cat([near_and_target.exponent, total.exponent[None]])
    e[1] += power.double() - MANTISSA_BITS
    small_and_logs = atanh2(torch.cat([(ratio / (ratio + 2.0))[None], (m - 1.0) / (m + 1.0)]))
    small, series = small_and_logs[0], small_and_logs[1:]
    large, log_target, lse = e * LN2_D_HI + (series + e * LN2_D_LO)
    near = -torch.where(ratio < SQRT2_MINUS_1, small, large)
    logprob = torch.where(is_near, near, log_target - lse).float()
    logprob = torch.where(is_masked, -torch.inf, logprob)
    # adding 0 turns -0 into +0
    return SelectedLogprob(
        logprob=torch.where(is_wanted, logprob + 0.0, 0.0),
        lse=torch.where(is_wanted, lse.float() + 0.0, 0.0),
    )


def _fold(bins: Tensor) -> Tensor:
    """Three int64 bins as one float64, in units of the third."""
    width = float(1 << BIN_WIDTH)
    bins = bins.double()
    return (bins[:, 0] * width + bins[:, 1]) * width + bins[:, 2]


def split(x: Tensor) -> RowSum:
    """x as mantissa * 2**exponent with the mantissa in [sqrt(1/2), sqrt(2)); exact."""
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < SQRT_HALF
    return RowSum(
        torch.where(is_low, mantissa * 2.0, mantissa), exponent.double() - is_low.double()
    )


def natural_log(mantissa: Tensor, exponent: Tensor) -> Tensor:
    """Natural logarithm of mantissa * 2**exponent."""
    series = atanh2((mantissa - 1.0) / (mantissa + 1.0))
    return exponent * LN2_D_HI + (series + exponent * LN2_D_LO)


def atanh2(s: Tensor) -> Tensor:
    """2 * atanh(s) = log((1 + s) / (1 - s)), for abs(s) at most 0.1716."""
    q = s * s
    series = torch.full_like(s, 1.0 / (2 * ATANH_TERMS - 1))
    for k in range(ATANH_TERMS - 2, -1, -1):
        series.mul_(q).add_(1.0 / (2 * k + 1))
    return (2.0 * s) * series
