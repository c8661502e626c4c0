"""Exact sums per sequence, whatever the cut of its tokens over ranks.

Letters: T rows of this rank, M sequences of this rank, C columns of one sequence's values,
S sequences of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_align.loss.agreement import LocalBatch
from rlk_align.loss.roster import Roster
from rlk_align.loss.token_terms import TokenTerms
from rlk_kernels.sum_state import SUM_BINS, SumState, finish_sum, sum_state

WIDTHS = (SUM_BINS, SUM_BINS, 1, 1)
"""Words of a sequence: sums of the policy terms and of the KL, counts of both kinds of clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the active tokens of each sequence, the same on every rank."""

    policy_S: Tensor
    """float64: the exact sum, rounded once."""
    kl_S: Tensor | None
    """float64, in nats: likewise; None without a reference."""
    num_clipped_low_S: Tensor
    """int64."""
    num_clipped_high_S: Tensor
    """int64."""


def local_words(terms: TokenTerms, local: LocalBatch) -> Tensor:
    """int64 [M * 66]: what this rank's rows add to each of its sequences."""
    num_sequences = len(local.table.ids)
    active = local.rows.is_active_T
    index = local.index_T[active]
    columns = [
        sum_state(_by_sequence(values[active], index, num_sequences), 1).bins
        for values in (terms.policy_T, terms.kl_T)
    ]
    for flags in (terms.is_clipped_low_T, terms.is_clipped_high_T):
        count = torch.zeros(num_sequences, dtype=torch.int64)
        columns.append(count.index_add_(0, index, flags[active].long())[:, None])
    return torch.cat(columns, dim=1).flatten()


def merged_totals(messages: list[Tensor], roster: Roster, *, has_kl: bool) -> Totals:
    """The totals from every data rank's `local_words`."""
    words = torch.zeros(len(roster.ids_S), sum(WIDTHS), dtype=torch.int64)
    for message, part in zip(messages, roster.parts, strict=True):
        words.index_add_(0, part, message.view(len(part), sum(WIDTHS)))
    policy, kl, low, high = words.split(WIDTHS, dim=1)
    longest = int(roster.num_active_S.max())
    return Totals(
        policy_S=_finished(policy, longest),
        kl_S=_finished(kl, longest) if has_kl else None,
        num_clipped_low_S=low[:, 0],
        num_clipped_high_S=high[:, 0],
    )


def _finished(bins: Tensor, num_values: int) -> Tensor:
    return finish_sum(SumState(bins=bins.contiguous(), num_values=num_values), torch.float64)


def _by_sequence(values_T: Tensor, index_T: Tensor, num_sequences: int) -> Tensor:
    """[M, C]: each sequence's values in a row of its own, 0 behind them."""
    counts = index_T.bincount(minlength=num_sequences)
    starts = counts.cumsum(0) - counts
    index, order = index_T.sort()
    longest = int(counts.max()) if num_sequences else 0
    values_MC = torch.zeros(num_sequences, longest, dtype=torch.float32)
    values_MC[index, torch.arange(len(index)) - starts[index]] = values_T[order]
    return values_MC
