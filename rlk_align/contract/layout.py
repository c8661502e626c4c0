"""Which rank owns which columns of the vocabulary."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rlk_align.contract.fields import checked_integer
from rlk_align.errors import UnusableInput
from rlk_kernels import MAX_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabLayout:
    """Half-open column bounds of every tensor-parallel rank, the same table on every rank.

    Example: Qwen3 in Megatron at TP 2 is ``VocabLayout(vocab_size=151936,
    bounds=((0, 76032), (76032, 152064)))``: the last 128 columns are padding.

    Raises:
        UnusableInput: If the bounds are no pairs, have a gap or an overlap, or end before the
            vocabulary does, or if it has more columns than the kernel can add.
    """

    vocab_size: int
    """Real columns; ids at or beyond it are padding and are never read."""
    bounds: tuple[tuple[int, int], ...]
    """``(start, end)`` of each rank in rank order; contiguous from 0; a shard may be empty."""

    def __post_init__(self) -> None:
        checked_integer("vocab_size", self.vocab_size, low=1)
        if self.vocab_size > MAX_COLUMNS:
            raise UnusableInput(
                f"vocab_size should be at most {MAX_COLUMNS}, the columns that the kernel can add, "
                f"got {self.vocab_size}"
            )
        object.__setattr__(self, "bounds", _pairs(self.bounds))
        expected = 0
        for rank, (start, end) in enumerate(self.bounds):
            checked_integer(f"start of rank {rank}", start)
            checked_integer(f"end of rank {rank}", end)
            if start != expected or end < start:
                raise UnusableInput(
                    f"rank {rank} holds columns [{start}, {end}), but rank {rank}'s shard must "
                    f"start at {expected}; shards are contiguous from 0, without gap or overlap"
                )
            expected = end
        if expected < self.vocab_size:
            raise UnusableInput(
                f"the shards end at column {expected}, but the vocabulary has "
                f"{self.vocab_size} columns; give the bounds of all ranks"
            )

    @property
    def padded_size(self) -> int:
        """All columns, padding included."""
        return self.bounds[-1][1]

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(self.bounds)

    def real_bounds(self, tp_rank: int) -> tuple[int, int]:
        """``[start, end)`` of the real columns of one rank; empty where all is padding."""
        start, end = self.bounds[tp_rank]
        return min(start, self.vocab_size), min(end, self.vocab_size)

    def owner_rank(self, token_id: int) -> int:
        """The rank whose shard holds ``token_id``.

        Raises:
            UnusableInput: If the id lies outside the real vocabulary.
        """
        if not 0 <= checked_integer("token_id", token_id) < self.vocab_size:
            raise UnusableInput(
                f"token id {token_id} is outside the vocabulary [0, {self.vocab_size})"
            )
        # the first rank whose end lies beyond the id: empty shards end where they start
        return bisect_right([end for _, end in self.bounds], token_id)

    def to_json(self) -> dict[str, object]:
        """The layout as it stands in a capture."""
        return {
            "vocab_size": self.vocab_size,
            "padded_size": self.padded_size,
            "bounds": [list(bound) for bound in self.bounds],
        }


def equal_shards(vocab_size: int, tp_size: int, *, padded_size: int | None = None) -> VocabLayout:
    """The layout of engines that cut the padded vocabulary into ``tp_size`` equal shards.

    Without ``padded_size`` the vocabulary is cut like ``torch.chunk``: the last shards may be
    smaller, or empty.

    Raises:
        UnusableInput: If a number is no integer or too small.
    """
    checked_integer("tp_size", tp_size, low=1)
    total = checked_integer("vocab_size", vocab_size)
    if padded_size is not None:
        total = checked_integer("padded_size", padded_size, low=vocab_size)
    width = -(-total // tp_size)
    edges = [min(rank * width, total) for rank in range(tp_size + 1)]
    return VocabLayout(vocab_size=vocab_size, bounds=tuple(itertools.pairwise(edges)))


def layout_from_bounds(vocab_size: int, bounds: Sequence[Sequence[int]]) -> VocabLayout:
    """A layout from plain lists, as read from JSON."""
    return VocabLayout(vocab_size=vocab_size, bounds=_pairs(bounds))


def _pairs(bounds: object) -> tuple[tuple[int, int], ...]:
    """Tuples, so that a layout is frozen and can be hashed; what they hold is not looked at."""
    if not isinstance(bounds, (tuple, list)):
        raise UnusableInput(f"bounds should be a (start, end) for each rank, got {bounds!r}")
    for rank, pair in enumerate(bounds):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UnusableInput(f"bounds of rank {rank} should be (start, end), got {pair!r}")
    return tuple((start, end) for start, end in bounds)
