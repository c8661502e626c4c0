"""Which token ids have been fed: each exactly once, in any order and any cut."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ColumnRanges:
    """Half-open ranges of token ids that do not overlap."""

    vocab_size: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Sorted; ranges that touch are joined."""

    def add(self, start: int, end: int) -> None:
        """Note that [start, end) has been fed.

        Raises:
            ValueError: If part of it had been fed before.
        """
        if start >= end:
            return
        for before, after in self.ranges:
            if start < after and before < end:
                raise ValueError(
                    f"token ids [{max(start, before)}, {min(end, after)}) were fed twice; "
                    "feed each column once, at its shard's own vocab_start"
                )
        joined: list[tuple[int, int]] = []
        for before, after in sorted([*self.ranges, (start, end)]):
            if joined and joined[-1][1] == before:
                joined[-1] = (joined[-1][0], after)
            else:
                joined.append((before, after))
        self.ranges = joined

    def check_complete(self) -> None:
        """Raise a ValueError that names the first token ids missing."""
        first = self.ranges[0] if self.ranges else (self.vocab_size, self.vocab_size)
        start, end = (0, first[0]) if first[0] > 0 else (first[1], self.vocab_size)
        if len(self.ranges) > 1 and first[0] == 0:
            end = self.ranges[1][0]
        if start < end:
            raise ValueError(
                f"token ids [{start}, {end}) were not fed; feed all {self.vocab_size} columns"
            )
