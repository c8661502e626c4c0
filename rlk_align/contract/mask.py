"""Which of the rows count."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from rlk_align.contract.fields import checked_integer
from rlk_align.errors import UnusableInput


class MaskMode(StrEnum):
    """How a row that does not count is told."""

    EXPLICIT_ACTIVE_MASK = "explicit_active_mask"
    """By the mask alone; its token id is a real one."""
    IGNORE_INDEX = "ignore_index"
    """By the mask, and by a token id that is no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskContract:
    """The active rows of one CP shard, the same on every rank of its TP group.

    Raises:
        UnusableInput: If the mask is not one bool for each row.
    """

    num_tokens: int
    """Rows, active or not."""
    active: tuple[bool, ...]
    ignore_index: int | None = None
    """The id that inactive rows carry, and only they; outside the real vocabulary, such as -100."""

    def __post_init__(self) -> None:
        checked_integer("num_tokens", self.num_tokens, low=0)
        if not isinstance(self.active, (tuple, list)):
            raise UnusableInput(f"active should be a tuple of bools, got {self.active!r}")
        object.__setattr__(self, "active", tuple(self.active))
        if len(self.active) != self.num_tokens:
            raise UnusableInput(
                f"active should hold one bool for each of {self.num_tokens} tokens, "
                f"got {len(self.active)}"
            )
        for row, value in enumerate(self.active):
            if type(value) is not bool:
                raise UnusableInput(f"active[{row}] should be True or False, got {value!r}")
        if self.ignore_index is not None:
            checked_integer("ignore_index", self.ignore_index)

    @property
    def mode(self) -> MaskMode:
        """Which of the two ways this is."""
        has_index = self.ignore_index is not None
        return MaskMode.IGNORE_INDEX if has_index else MaskMode.EXPLICIT_ACTIVE_MASK

    @property
    def num_active(self) -> int:
        """Rows that count."""
        return sum(self.active)

    def to_dict(self) -> dict[str, object]:
        """Strict JSON: the mask's SHA-256 (one byte a row, 0 or 1), not its booleans."""
        return {
            "mode": self.mode,
            "num_tokens": self.num_tokens,
            "num_active": self.num_active,
            "active_sha256": hashlib.sha256(bytes(self.active)).hexdigest(),
            "ignore_index": self.ignore_index,
        }
