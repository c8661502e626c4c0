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

    def attempt(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, once it has succeeded on every rank.

        Collective. ``work`` may hold collectives of its own: where one rank leaves them early,
        the others' time runs out, and all meet here.

        Raises:
            UnusableInput: On every rank, if that is what stopped the first rank that stopped.
            RanksFailed: On every rank, if the first was stopped by anything else.
        """
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
        self._raise_first(self.gather(failure))
        return result  # type: ignore[return-value]

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on rank 0, told to every rank; fails like `attempt`."""
        value = self.attempt(lambda: work() if self.rank == 0 else None)
        return self.gather(value)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, rank by rank."""
        if self.talk is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.talk)
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
        yield Ranks(rank=rank, size=size, local_rank=local_rank, timeout=timeout, talk=talk)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
