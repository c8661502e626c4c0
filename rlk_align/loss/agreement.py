"""What all ranks agree on before a logit is read: settings, rows, sequences.

Letters: T rows of this rank, M sequences of this rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_align.errors import UnusableInput
from rlk_align.loss.batch import (
    CheckedRows,
    SequenceTable,
    TokenRows,
    checked_rows,
    checked_sequences,
    local_index,
)
from rlk_align.loss.contract import LossContract
from rlk_align.loss.exchange import LossGroups, exchange
from rlk_align.loss.roster import Roster, merged_roster, table_words

ALIKE = (
    "settings",
    "sequence_ids_T",
    "mask",
    "old_logprob_T",
    "ref_logprob_T",
    "SequenceTable",
)
"""What ranks with the same rows pass alike, in the order of `LocalBatch.digests`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """A rank's checked input, on the CPU."""

    contract: LossContract
    rows: CheckedRows
    table: SequenceTable
    index_T: Tensor
    """int64: where each row's sequence stands in the table."""

    @classmethod
    def checked(cls, contract: LossContract, rows: TokenRows, table: SequenceTable) -> LocalBatch:
        """The batch, or an UnusableInput on its first fault."""
        is_active_T = torch.tensor(contract.logprob.mask.active, dtype=torch.bool)
        own_rows = checked_rows(rows, is_active_T, needs_reference=contract.kl is not None)
        table = checked_sequences(table)
        return cls(
            contract=contract, rows=own_rows, table=table, index_T=local_index(own_rows, table)
        )

    def settings_digest(self) -> int:
        """Of what must be the same on every rank of the batch."""
        return _digest(self.contract.settings_fingerprint().encode())

    def words(self) -> Tensor:
        """What the other data ranks must know of this rank's settings and sequences."""
        here = torch.zeros_like(self.table.ids)
        here.index_add_(0, self.index_T, self.rows.is_active_T.long())
        return torch.cat([torch.tensor([self.settings_digest()]), table_words(self.table, here)])

    def digests(self) -> Tensor:
        """int64 [6]: of all that `ALIKE` names; the rest is compared with the logprobs."""
        rows = self.rows
        values = [
            rows.sequence_ids_T,
            rows.is_active_T,
            rows.old_logprob_T,
            torch.zeros(0, dtype=torch.uint8) if rows.ref_logprob_T is None else rows.ref_logprob_T,
            self.words(),
        ]
        own = [_digest(value.numpy().tobytes()) for value in values]
        return torch.tensor([self.settings_digest(), *own])


def agree(local: LocalBatch | None, failure: UnusableInput | None, groups: LossGroups) -> Roster:
    """The roster of all ranks' sequences, the same on every rank.

    A failure goes round the tensor-parallel group first and from there round every data group, and
    so reaches every rank.

    Args:
        local: This rank's input; None if it is wrong.
        failure: What is wrong with it, naming the rank.
        groups: This rank's groups.

    Raises:
        UnusableInput: The same on every rank.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    try:
        digests = exchange(nothing if local is None else local.digests(), failure, groups.tp)
        _check_alike(digests, groups.tp_ranks)
    except UnusableInput as told:
        local, failure = None, told
    messages = exchange(nothing if local is None else local.words(), failure, groups.data)
    for rank, message in zip(groups.data_ranks, messages, strict=True):
        if message[0] != messages[0][0]:
            raise UnusableInput(_differs("settings", rank, groups.data_ranks[0]))
    return merged_roster([message[1:] for message in messages], groups.data_ranks)


def _check_alike(digests: list[Tensor], ranks: list[int]) -> None:
    """Raise what a rank of a tensor-parallel group passes otherwise than its first one."""
    for rank, other in zip(ranks, digests, strict=True):
        if not torch.equal(other, digests[0]):
            at = int((other != digests[0]).nonzero()[0])
            raise UnusableInput(_differs(ALIKE[at], rank, ranks[0]))


def _differs(name: str, rank: int, first: int) -> str:
    return f"rank {rank} passes other {name} than rank {first}; pass the same on both"


def _digest(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
