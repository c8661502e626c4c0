"""What a rank brings to a loss: its rows and what it knows of their sequences.

Letters: T rows (tokens) of this rank, M sequences of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_align.errors import UnusableInput


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """One row per token whose logits this rank computes, in any order.

    A row belongs to a sequence by its id, so any cut of sequences over data-parallel ranks, and of
    a sequence's tokens over context-parallel ranks, is only another list of rows. Of inactive rows
    (`LogprobContract.mask`) the logprobs are not read.
    """

    sequence_ids_T: Tensor
    """int64 [T]: the row's sequence, one of `SequenceTable.ids`."""
    old_logprob_T: Tensor
    """float32 [T], in nats: under the policy that sampled the token."""
    ref_logprob_T: Tensor | None = None
    """float32 [T], in nats: under the reference model; None without a KL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTable:
    """What this rank knows of the sequences that its rows belong to.

    Ranks that share a sequence list it alike, and it counts once. A sequence without any row still
    counts in its group: one rank lists it, with ``num_active`` 0.
    """

    ids: Tensor
    """int64 [M]: distinct numbers from 0, unique in the whole batch."""
    group_ids: Tensor
    """int64 [M]: sequences sampled from one prompt have one group id."""
    rewards: Tensor
    """float32 [M]."""
    num_active: Tensor
    """int64 [M]: active tokens of the whole sequence, on all ranks together; a token that is lost
    or fed twice shows in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """Rows on the CPU, with 0 for the logprobs that are not read."""

    sequence_ids_T: Tensor
    is_active_T: Tensor
    """bool."""
    old_logprob_T: Tensor
    ref_logprob_T: Tensor | None


def checked_rows(rows: TokenRows, is_active_T: Tensor, *, needs_reference: bool) -> CheckedRows:
    """The rows, or an error that names one.

    Raises:
        UnusableInput: If a tensor has another shape or dtype, or an active row's logprob is not a
            finite number.
    """
    has_reference = rows.ref_logprob_T is not None
    if has_reference != needs_reference:
        raise UnusableInput(
            "the contract has a KL, but ref_logprob_T is None; pass the reference's logprobs"
            if needs_reference
            else "ref_logprob_T is given, but the contract has no KL; pass kl='k3' or 'k1' there"
        )
    _check("sequence_ids_T", rows.sequence_ids_T, torch.int64, len(is_active_T))
    return CheckedRows(
        sequence_ids_T=rows.sequence_ids_T.cpu(),
        is_active_T=is_active_T,
        old_logprob_T=_checked_logprob("old_logprob_T", rows.old_logprob_T, is_active_T),
        ref_logprob_T=None
        if rows.ref_logprob_T is None
        else _checked_logprob("ref_logprob_T", rows.ref_logprob_T, is_active_T),
    )


def checked_sequences(table: SequenceTable) -> SequenceTable:
    """The table on the CPU, in the order of the ids, or an error that names the sequence.

    Raises:
        UnusableInput: If a tensor has another shape or dtype, an id is negative or listed twice,
            a reward is not finite or a count is negative.
    """
    ids = table.ids
    num_sequences = len(ids) if isinstance(ids, Tensor) and ids.dim() == 1 else 0
    for name in ("ids", "group_ids", "num_active"):
        _check(name, getattr(table, name), torch.int64, num_sequences)
    _check("rewards", table.rewards, torch.float32, num_sequences)
    ids, order = ids.cpu().sort()
    table = SequenceTable(
        ids=ids,
        group_ids=table.group_ids.cpu()[order],
        rewards=table.rewards.detach().cpu()[order],
        num_active=table.num_active.cpu()[order],
    )
    twice = torch.zeros(num_sequences, dtype=torch.bool)
    twice[1:] = ids[1:] == ids[:-1]
    for is_bad, fault, remedy in (
        (ids < 0, "has a negative id", "number sequences from 0"),
        (twice, "is listed twice", "list each sequence of this rank once"),
        (~table.rewards.isfinite(), "has a reward that is not finite", "leave its group out"),
        (table.num_active < 0, "has a negative num_active", "pass its count of active tokens"),
    ):
        if is_bad.any():
            raise UnusableInput(f"sequence {int(ids[is_bad][0])} {fault}; {remedy}")
    return table


def local_index(rows: CheckedRows, table: SequenceTable) -> Tensor:
    """int64 [T]: where each row's sequence stands in the sorted table.

    Raises:
        UnusableInput: Naming the row, if the table does not list its sequence.
    """
    index = torch.searchsorted(table.ids, rows.sequence_ids_T)
    found = torch.zeros_like(rows.is_active_T)
    inside = index < len(table.ids)
    found[inside] = table.ids[index[inside]] == rows.sequence_ids_T[inside]
    if not found.all():
        row = int((~found).nonzero()[0])
        raise UnusableInput(
            f"row {row} belongs to sequence {int(rows.sequence_ids_T[row])}, which the "
            "SequenceTable does not list; list every sequence that has a row here"
        )
    return index


def _check(name: str, values: object, dtype: torch.dtype, length: int) -> None:
    if not isinstance(values, Tensor) or values.dtype != dtype or list(values.shape) != [length]:
        got = (
            f"{values.dtype} {list(values.shape)}"
            if isinstance(values, Tensor)
            else type(values).__name__
        )
        raise UnusableInput(f"{name} should be {dtype} [{length}], got {got}")


def _checked_logprob(name: str, values: Tensor, is_active_T: Tensor) -> Tensor:
    """The values on the CPU, 0 in inactive rows."""
    _check(name, values, torch.float32, len(is_active_T))
    values = values.detach().cpu()
    bad = (is_active_T & ~values.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise UnusableInput(
            f"row {row}: {name} is {float(values[row])} at an active token; a token without "
            "logprob cannot be trained on, make it inactive"
        )
    return torch.where(is_active_T, values, 0.0)
