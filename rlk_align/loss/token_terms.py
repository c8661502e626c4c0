"""A token's part of the GRPO loss and its derivative, elementwise.

The inputs are the same on every layout (logprobs by the kernel, advantages by exact sums) and every
float64 operation rounds once, so the outputs are too. Letters: T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlk_align.errors import UnusableInput
from rlk_align.loss.batch import CheckedRows
from rlk_align.loss.contract import KlEstimator, LossContract
from rlk_align.loss.exponential import exponential

MAX_LOG_RATIO = 64.0
"""Nats; a ratio of 6e27. Times the largest weight, 2**32, it still is a float32."""


class TokenTerms(NamedTuple):
    """What each row adds; 0 and false in inactive rows."""

    policy_T: Tensor
    """float32: -min(ratio * advantage, clipped ratio * advantage)."""
    kl_T: Tensor
    """float32: the estimate of the KL in nats; 0 without a reference."""
    slope_T: Tensor
    """float64: derivative of policy + kl_weight * kl by the logprob."""
    is_clipped_low_T: Tensor
    """bool: ratio below 1 - clip_low at a negative advantage, so that it has no gradient."""
    is_clipped_high_T: Tensor
    """bool: ratio above 1 + clip_high at a positive advantage."""


def token_terms(
    logprob_T: Tensor, rows: CheckedRows, advantage_T: Tensor, contract: LossContract
) -> TokenTerms:
    """The clipped surrogate and the KL of each row, and their derivative.

    The surrogate is equation 7 of Schulman et al., 2017 (arXiv 1707.06347) with two clip bounds; k1
    and k3 are those of http://joschu.net/blog/kl-approx.html for KL(policy | reference). At a ratio
    of exactly 1 - clip_low or 1 + clip_high the gradient passes, as it does in torch.clamp.

    Args:
        logprob_T: float32 [T] on the CPU.
        rows: Its logprobs.
        advantage_T: float64 [T], of each row's sequence.
        contract: For the clip bounds and the KL.

    Raises:
        UnusableInput: Naming row and sequence, if an active token's logit is masked or a logprob
            lies further above another than `MAX_LOG_RATIO`.
    """
    active = rows.is_active_T
    log_ratio = _difference(logprob_T, rows.old_logprob_T, rows)
    _check_at_most("logprob", log_ratio, "old_logprob", rows)
    ratio = exponential(log_ratio).value
    is_low = active & (ratio < 1.0 - contract.clip_low) & (advantage_T < 0)
    is_high = active & (ratio > 1.0 + contract.clip_high) & (advantage_T > 0)
    clipped = torch.where(is_low, 1.0 - contract.clip_low, ratio)
    clipped = torch.where(is_high, 1.0 + contract.clip_high, clipped)
    kl, kl_slope = _kl(logprob_T, rows, contract)
    slope = torch.where(is_low | is_high, 0.0, -(ratio * advantage_T))
    slope = slope + contract.kl_weight * kl_slope
    return TokenTerms(
        policy_T=torch.where(active, -(clipped * advantage_T), 0.0).float(),
        kl_T=torch.where(active, kl, 0.0).float(),
        slope_T=torch.where(active, slope, 0.0),
        is_clipped_low_T=is_low,
        is_clipped_high_T=is_high,
    )


def _kl(logprob_T: Tensor, rows: CheckedRows, contract: LossContract) -> tuple[Tensor, Tensor]:
    """The estimate and its derivative by the logprob, float64."""
    if contract.kl is None or rows.ref_logprob_T is None:
        zero = torch.zeros(len(logprob_T), dtype=torch.float64)
        return zero, zero
    x = _difference(rows.ref_logprob_T, logprob_T, rows)
    if contract.kl == KlEstimator.K1:
        return -x, torch.ones_like(x)
    _check_at_most("ref_logprob", x, "logprob", rows)
    exp = exponential(x)
    # exp(x) - 1, with the digits that a subtraction would cancel
    return exp.above_tangent, -(exp.above_tangent + x)


def _difference(a_T: Tensor, b_T: Tensor, rows: CheckedRows) -> Tensor:
    """a - b in float64 where active, 0 elsewhere."""
    return torch.where(rows.is_active_T, a_T.double() - b_T.double(), 0.0)


def _check_at_most(name: str, difference_T: Tensor, other: str, rows: CheckedRows) -> None:
    bad = (~(difference_T <= MAX_LOG_RATIO) | difference_T.isinf()).nonzero()
    if not len(bad):
        return
    row = int(bad[0])
    raise UnusableInput(
        f"row {row}, of sequence {int(rows.sequence_ids_T[row])}: {name} - {other} is "
        f"{float(difference_T[row]):.4g} nats, expected a finite number up to {MAX_LOG_RATIO:g}; "
        "check that both are of this token and that its logit is not masked"
    )
