"""The ranks of one torchrun: they meet, fail together, and part. Without torchrun there is one."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlk_align.errors import UnusableInput

T = TypeVar("T")

# hashing or sealing a terabyte takes less; a rank 0 that died is noticed at once
PATIENCE = timedelta(hours=12)


class RanksFailed(RuntimeError):
    """Something other than unusable input stopped a rank; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What stopped one rank."""

    at_s: float
    """When, in seconds since the epoch: what a rank waits for fails before its waiting does."""
    sentence: str
    is_unusable_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the ranks of its launch."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    timeout: timedelta = timedelta(0)
    """The longest that a rank waits for another."""
    talk: dist.ProcessGroup | None = None
    """For what ranks tell each other; the model's own collectives go through other groups."""
    patient_talk: dist.ProcessGroup | None = None
    """The same, for what the others wait for while rank 0 alone works: `PATIENCE`."""

    def attempt(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, once it has succeeded on every rank.

        Collective. ``work`` may hold collectives of its own: where one rank leaves them early,
        the others' time runs out, and all meet here.

        Raises:
            UnusableInput: On every rank, if that is what stopped the first rank that stopped.
            RanksFailed: On every rank, if the first was stopped by anything else.
        """
        return self._attempt(work, self.gather)

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on rank 0, told to every rank; fails like `attempt`.

        ``work`` may take longer than ranks otherwise wait for one another.
        """
        value = self._attempt(lambda: work() if self.rank == 0 else None, self._gather_patiently)
        return self.gather(value)[0]  # type: ignore[return-value]

    def _attempt(
        self, work: Callable[[], T], gather: Callable[[Failure | None], list[Failure | None]]
    ) -> T:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            if not isinstance(error, UnusableInput):
                traceback.print_exc()
            failure = Failure(
                at_s=time.time(),
                sentence=str(error) or type(error).__name__,
                is_unusable_input=isinstance(error, UnusableInput),
            )
        self._raise_first(gather(failure))
        return result  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, rank by rank.

        Raises:
            RanksFailed: If a rank does not take part in time.
        """
        return self._gather(value, self.talk, 2 * self.timeout)

    def _gather_patiently(self, value: T) -> list[T]:
        return self._gather(value, self.patient_talk, PATIENCE)

    def _gather(self, value: T, group: dist.ProcessGroup | None, timeout: timedelta) -> list[T]:
        if group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=group)
        except RuntimeError as error:
            raise RanksFailed(
                f"a rank died or did not answer within {timeout.total_seconds():g} s; if it only "
                "needs longer, raise --timeout"
            ) from error
        return values

    def require_same(self, what: str, value: object) -> None:
        """Hold a value against that of rank 0.

        Raises:
            UnusableInput: On every rank, naming the first rank that differs.
        """
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UnusableInput(
                    f"rank {rank} has {what} {other}, but rank 0 has {values[0]}; "
                    "give every rank the same"
                )

    def _raise_first(self, failures: list[Failure | None]) -> None:
        found = [(f.at_s, rank, f) for rank, f in enumerate(failures) if f is not None]
        if not found:
            return
        _, rank, first = min(found, key=lambda item: item[:2])
        everywhere = all(f is not None and f.sentence == first.sentence for f in failures)
        sentence = first.sentence if everywhere else f"rank {rank}: {first.sentence}"
        raise (UnusableInput if first.is_unusable_input else RanksFailed)(sentence)


@contextmanager
def open_ranks(timeout: timedelta) -> Iterator[Ranks]:
    """The ranks that torchrun started, connected for as long as the block lasts.

    Raises:
        UnusableInput: If torchrun's variables are incomplete.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks(timeout=timeout)
        return
    try:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    except KeyError as error:
        raise UnusableInput(
            f"WORLD_SIZE is {size}, but {error} is not set; start with torchrun"
        ) from None
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(timeout=timeout)
        # twice: whoever waits for a rank that has failed gets here one timeout later
        talk = dist.new_group(backend="gloo", timeout=2 * timeout)
        patient_talk = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield Ranks(
            rank=rank, size=size, local_rank=local_rank, timeout=timeout, talk=talk,
            patient_talk=patient_talk,
        )  # fmt: skip
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
