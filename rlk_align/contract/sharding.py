"""Where this rank stands: its place in the TP x CP grid and everyone's columns."""

from __future__ import annotations

from dataclasses import dataclass

from rlk_align.contract.fields import checked_integer
from rlk_align.contract.layout import VocabLayout
from rlk_align.errors import UnusableInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContract:
    """A rank's coordinates and the table of all ranks' columns, the same table on every rank.

    Raises:
        UnusableInput: If a rank lies outside its world.
    """

    layout: VocabLayout
    """Columns are split over the tensor-parallel (TP) ranks."""
    tp_rank: int = 0
    cp_rank: int = 0
    """Place among the context-parallel (CP) ranks, which split the tokens."""
    cp_world: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.layout, VocabLayout):
            raise UnusableInput(f"layout should be a VocabLayout, got {self.layout!r}")
        checked_integer("cp_world", self.cp_world, low=1)
        for name, world in (("tp", self.tp_world), ("cp", self.cp_world)):
            rank = checked_integer(f"{name}_rank", getattr(self, f"{name}_rank"), low=0)
            if rank >= world:
                raise UnusableInput(
                    f"{name}_rank should be below the {world} ranks of its world, got {rank}"
                )

    @property
    def tp_world(self) -> int:
        """Number of tensor-parallel ranks: one for each row of the table."""
        return self.layout.tp_size

    @property
    def bounds(self) -> tuple[int, int]:
        """``[start, end)`` of this rank's columns, padding included."""
        return self.layout.bounds[self.tp_rank]

    def owner_rank(self, token_id: int) -> int:
        """The TP rank that holds ``token_id``; `UnusableInput` outside the real vocabulary."""
        return self.layout.owner_rank(token_id)

    def to_dict(self) -> dict[str, object]:
        """Strict JSON."""
        return {
            "tp_rank": self.tp_rank,
            "tp_world": self.tp_world,
            "cp_rank": self.cp_rank,
            "cp_world": self.cp_world,
            **self.layout.to_json(),
        }
