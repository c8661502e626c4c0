"""Ranks tell each other their numbers and their errors in one go, so that they fail together.

A rank whose input is wrong must not leave before the others know: they would wait for it. Every
rank therefore sends a header whatever has happened to it; all read the same headers, and raise the
same error or go on. A call waits for a missing rank as long as the group's own timeout says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_align.errors import UnusableInput
from rlk_kernels.collective import all_gather_words

T = TypeVar("T")
ERROR_BYTES = 480


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGroups:
    """The two groups of a rank: who shares its rows, and who shares its columns.

    Raises:
        UnusableInput: If another rank is in both.
    """

    tp: dist.ProcessGroup | None
    """Ranks that hold the other columns of the same rows."""
    data: dist.ProcessGroup | None
    """Ranks that hold the same columns of other rows: data and context parallel together."""

    def __post_init__(self) -> None:
        both = set(self.tp_ranks) & set(self.data_ranks) - {_own_rank()}
        if both:
            raise UnusableInput(
                f"rank {min(both)} is in tp_group and in data_group of rank {_own_rank()}; "
                "tp_group shares rows, data_group has one rank of each tensor-parallel group"
            )

    @property
    def tp_ranks(self) -> list[int]:
        """Global ranks of the tensor-parallel group."""
        return _ranks(self.tp)

    @property
    def data_ranks(self) -> list[int]:
        """Global ranks of the data group."""
        return _ranks(self.data)

    @property
    def data_rank(self) -> int:
        """This rank's place in the data group."""
        return self.data_ranks.index(_own_rank())

    @property
    def own_name(self) -> str:
        """How an error of this rank alone begins."""
        return "" if self.tp is None and self.data is None else f"rank {_own_rank()}: "

    @property
    def logprob_name(self) -> str:
        """How an error begins that all tensor-parallel ranks raise alike."""
        if len(self.tp_ranks) == 1:
            return self.own_name
        # where logprobs are computed only that group is known, and counted from 0
        return f"tensor-parallel ranks {self.tp_ranks}, counted from 0: "


def attempt(work: Callable[[], T], name: str) -> tuple[T | None, UnusableInput | None]:
    """What ``work`` gives, or the failure to tell the others of, which begins with ``name``."""
    try:
        return work(), None
    except Exception as error:
        failure = UnusableInput(f"{name}{str(error) or type(error).__name__}")
        failure.__cause__ = error
        return None, failure


def exchange(
    words: Tensor, failure: UnusableInput | None, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Every rank's int64 words, of any number, rank by rank.

    Args:
        words: int64 [any number], on the CPU; not read if there is a failure.
        failure: What is wrong on this rank, naming it.
        group: None if this process is alone.

    Raises:
        UnusableInput: The same on every rank, with the first failure in rank order.
    """
    if group is None:
        if failure is not None:
            raise failure
        return [words]
    headers = all_gather_words(_header(len(words), failure), group)
    for header in headers:
        text = header[1:].contiguous().numpy().tobytes().rstrip(b"\0").decode("ascii")
        if text:
            raise UnusableInput(text) from failure
    counts = [int(header[0]) for header in headers]
    padded = torch.zeros(max(counts), dtype=torch.int64)
    padded[: len(words)] = words
    received = all_gather_words(padded, group) if len(padded) else [padded] * len(counts)
    return [part[:count] for part, count in zip(received, counts, strict=True)]


def exchange_over_data(
    words: Tensor, failure: UnusableInput | None, groups: LossGroups
) -> list[Tensor]:
    """`exchange` in the data group; a failure goes round the tensor-parallel group before."""
    try:
        exchange(torch.zeros(0, dtype=torch.int64), failure, groups.tp)
    except UnusableInput as told:
        failure = told
    return exchange(words, failure, groups.data)


def _header(count: int, failure: UnusableInput | None) -> Tensor:
    """int64: the number of words, then the error; a long error is cut."""
    error = "" if failure is None else str(failure)
    text = error.encode("ascii", "replace")[:ERROR_BYTES].ljust(ERROR_BYTES, b"\0")
    return torch.cat(
        [torch.tensor([count]), torch.from_numpy(np.frombuffer(text, np.int64).copy())]
    )


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [_own_rank()] if group is None else list(dist.get_process_group_ranks(group))
