"""All sequences of the batch, merged from what every rank knows of its own.

Letters: S sequences of the batch, M sequences of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_align.errors import UnusableInput
from rlk_align.loss.batch import SequenceTable

WORDS = ("id", "group_id", "reward", "num_active", "here")
SHARED = {1: "group id", 2: "reward", 3: "num_active"}
"""Words that ranks which list one sequence must agree on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The batch's sequences in the order of their ids, the same on every rank."""

    ids_S: Tensor
    """int64."""
    group_ids_S: Tensor
    """int64."""
    rewards_S: Tensor
    """float32."""
    num_active_S: Tensor
    """int64: active tokens of the whole sequence."""
    parts: list[Tensor]
    """For each rank of the data group, int64 [M]: where its sequences stand in S."""

    @property
    def num_active(self) -> int:
        """Active tokens of the batch."""
        return int(self.num_active_S.sum())

    @property
    def num_trained(self) -> int:
        """Sequences with an active token."""
        return int((self.num_active_S > 0).sum())


def table_words(table: SequenceTable, num_active_here: Tensor) -> Tensor:
    """int64 [M * 5]: a checked table as it travels, with the active tokens of this rank."""
    # adding 0 turns -0 into +0: they are one reward
    rewards = (table.rewards + 0.0).view(torch.int32).long()
    columns = (table.ids, table.group_ids, rewards, table.num_active, num_active_here)
    return torch.stack(columns, dim=1).flatten()


def merged_roster(messages: list[Tensor], ranks: list[int]) -> Roster:
    """The roster from every data rank's `table_words`.

    Raises:
        UnusableInput: If ranks contradict each other on a sequence, the active tokens of a
            sequence are not as many as it should have, or the batch has none.
    """
    tables = [words.view(len(words) // len(WORDS), len(WORDS)) for words in messages]
    lines = torch.cat(tables)
    owner = torch.cat([torch.full((len(t),), r) for t, r in zip(tables, ranks, strict=True)])
    ids, index = lines[:, 0].unique(return_inverse=True)
    first = torch.full_like(ids, len(lines)).scatter_reduce(
        0, index, torch.arange(len(lines)), "amin"
    )
    _check_shared(lines, lines[first][index], owner, owner[first][index])
    merged, here = lines[first], torch.zeros_like(ids).index_add(0, index, lines[:, 4])
    _check_counts(ids, here, merged[:, 3])
    return Roster(
        ids_S=ids,
        group_ids_S=merged[:, 1],
        rewards_S=merged[:, 2].int().view(torch.float32),
        num_active_S=here,
        parts=list(index.split([len(table) for table in tables])),
    )


def _check_shared(lines: Tensor, firsts: Tensor, owner: Tensor, first_owner: Tensor) -> None:
    for word, name in SHARED.items():
        differs = (lines[:, word] != firsts[:, word]).nonzero()
        if len(differs):
            line = int(differs[0])
            raise UnusableInput(
                f"rank {int(owner[line])} has another {name} of sequence {int(lines[line, 0])} "
                f"than rank {int(first_owner[line])}; ranks that share a sequence list it alike"
            )


def _check_counts(ids: Tensor, here: Tensor, expected: Tensor) -> None:
    differs = (here != expected).nonzero()
    if len(differs):
        at = int(differs[0])
        raise UnusableInput(
            f"sequence {int(ids[at])} has {int(here[at])} active tokens on all ranks together, "
            f"but its num_active is {int(expected[at])}; pass each token on one data rank"
        )
    if not int(here.sum()):
        raise UnusableInput(
            "no token of the batch is active on any rank, so there is no loss; skip the step"
        )
