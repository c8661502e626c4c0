"""The GRPO loss on logits that are split over ranks, with the same bits on every layout.

Letters: T rows (tokens) of this rank, L vocabulary columns of this rank, S sequences of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_align.contract_logprob import ContractLogprob, contract_logprob
from rlk_align.dispatch import Dispatch
from rlk_align.errors import UnusableInput
from rlk_align.loss.advantage import group_advantages
from rlk_align.loss.agreement import LocalBatch, agree
from rlk_align.loss.batch import SequenceTable, TokenRows
from rlk_align.loss.contract import LossContract, Normalizer
from rlk_align.loss.exchange import LossGroups, attempt, exchange_over_data
from rlk_align.loss.roster import Roster
from rlk_align.loss.token_terms import TokenTerms, token_terms
from rlk_align.loss.totals import Totals, local_words, merged_totals


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoLoss:
    """A batch's loss and what it is made of; the same on every rank but for the first rows."""

    loss: Tensor
    """float32 scalar, differentiable: of the whole batch, not of this rank's part."""
    logprob_T: Tensor
    """float32 [T], without gradient: of this rank's rows, +0 in inactive ones."""
    dispatch: Dispatch
    """Which backend computed them."""
    sequence_ids_S: Tensor
    """int64 [S], rising; the order of everything below."""
    advantage_S: Tensor
    """float64 [S]."""
    num_active_S: Tensor
    """int64 [S]: active tokens."""
    totals: Totals
    """Sums over the active tokens of each sequence."""


def grpo_loss(
    make_contract: Callable[[], LossContract],
    logits_TL: Tensor,
    token_ids_T: Tensor,
    rows: TokenRows,
    sequences: SequenceTable,
    *,
    backend: str,
    tp_group: dist.ProcessGroup | None = None,
    data_group: dist.ProcessGroup | None = None,
) -> GrpoLoss:
    """Clipped surrogate with group-relative advantages, and a KL (Shao et al., arXiv 2402.03300).

    Loss, totals and the gradient of the logits have the same bits however the columns are split
    over ``tp_group`` and the rows over ``data_group``: docs/loss.md. Collective: every rank of both
    groups calls it, also one without rows.

    The gradient is that of the whole batch's loss by this rank's logits. Parameter gradients are
    therefore to be *added* over the data ranks; where a trainer averages them, multiply the loss by
    the number of data ranks.

    Args:
        make_contract: Builds this rank's contract. It is called here, so that what it raises
            reaches the other ranks instead of leaving them waiting.
        logits_TL: ``[T, L]`` this rank's rows and columns, as `contract_logprob`.
        token_ids_T: ``[T]`` int64 or int32, as `contract_logprob`.
        rows: What belongs to each row.
        sequences: What belongs to each sequence that has a row here.
        backend: As `contract_logprob`.
        tp_group: Ranks with the same rows and other columns; None if this rank has them all.
        data_group: Ranks with the same columns and other rows, data and context parallel, that is
            one rank of each tensor-parallel group; None if this rank has all rows.

    Raises:
        UnusableInput: On every rank of both groups, naming the ranks at fault, if anything passed
            breaks its contract, or no token is active on any rank.
    """
    groups = LossGroups(tp=tp_group, data=data_group)
    local, failure = attempt(
        lambda: LocalBatch.checked(make_contract(), rows, sequences), groups.own_name
    )
    roster = agree(local, failure, groups)
    assert local is not None  # agree has raised if there is none
    contract = local.contract
    advantage_S = group_advantages(roster.rewards_S, roster.group_ids_S, contract)
    place_T = roster.parts[groups.data_rank][local.index_T]

    def own_terms() -> tuple[ContractLogprob, TokenTerms]:
        values = contract_logprob(
            lambda: contract.logprob, logits_TL, token_ids_T, backend=backend, group=tp_group
        )
        logprob_T = values.logprob.detach().cpu()
        return values, token_terms(logprob_T, local.rows, advantage_S[place_T], contract)

    own, failure = attempt(own_terms, groups.logprob_name)
    words = local_words(own[1], local) if own else torch.zeros(0, dtype=torch.int64)
    messages = exchange_over_data(words, failure, groups)
    assert own is not None  # the exchange has raised if there is none
    values, terms = own
    totals = merged_totals(messages, roster, has_kl=contract.kl is not None)
    divisor_S = _divisors(roster, contract)
    gradient_T = (terms.slope_T / divisor_S[place_T]).float().to(values.logprob.device)
    value = _loss_value(totals, divisor_S, contract)
    return GrpoLoss(
        loss=_WithGradient.apply(values.logprob, gradient_T, value),  # type: ignore[no-untyped-call]
        logprob_T=values.logprob.detach(),
        dispatch=values.dispatch,
        sequence_ids_S=roster.ids_S,
        advantage_S=advantage_S,
        num_active_S=roster.num_active_S,
        totals=totals,
    )


def _divisors(roster: Roster, contract: LossContract) -> Tensor:
    """float64 [S]: what the terms of each sequence are divided by, at least 1."""
    if contract.normalizer == Normalizer.SEQUENCE_MEAN:
        # an empty sequence has no terms, and any divisor
        return (roster.num_active_S * roster.num_trained).clamp(min=1).double()
    # the contract has a constant if, and only if, that is its normalizer
    divisor = roster.num_active if contract.constant is None else contract.constant
    return torch.full(roster.ids_S.shape, float(divisor), dtype=torch.float64)


def _loss_value(totals: Totals, divisor_S: Tensor, contract: LossContract) -> float:
    """The loss, from sums that are exact until here; a float32."""
    total_S = totals.policy_S
    if totals.kl_S is not None:
        total_S = total_S + contract.kl_weight * totals.kl_S
    value = math.fsum((total_S / divisor_S).tolist())
    loss = torch.tensor(value, dtype=torch.float64).float()
    if loss.isinf():
        raise UnusableInput(
            "the loss is beyond float32; pass a larger constant or scale the rewards down"
        )
    return float(loss)


class _WithGradient(torch.autograd.Function):
    """Ties the loss to the logprobs that it came from."""

    @staticmethod
    def forward(ctx: Any, logprob_T: Tensor, gradient_T: Tensor, loss: float) -> Tensor:
        ctx.save_for_backward(gradient_T)
        return torch.tensor(loss, dtype=torch.float32, device=logprob_T.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_T,) = ctx.saved_tensors
        return gradients[0] * gradient_T, None, None
