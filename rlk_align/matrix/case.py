"""One case of the matrix: everything that fixes its inputs and how they are split."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields

from rlk_align.contract import (
    LogitsDtype,
    LogprobContract,
    MaskContract,
    Role,
    ShardingContract,
    VocabLayout,
)
from rlk_align.contract.fields import checked_integer, checked_member
from rlk_align.dispatch import Platform
from rlk_align.dispatch.capability import checked_backend_id
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json
from rlk_align.matrix.inputs import SeededInputs
from rlk_align.matrix.layouts import LayoutName, named_layout

ID_LENGTH = 16
INPUT_FIELDS = tuple(field.name for field in fields(SeededInputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCase:
    """A topology, a layout, a backend and seeded rows. Enums take their strings.

    Raises:
        UnusableInput: If a field is out of range or the layout cannot be cut so.
    """

    tp: int = 1
    cp: int = 1
    layout: LayoutName = LayoutName.EVEN
    backend: str = "expsum-cpu"
    """An exact id: a matrix that chose for itself would not say what it proves."""
    platform: Platform = Platform.CPU
    dtype: LogitsDtype = LogitsDtype.BF16
    vocab_size: int = 151936
    padded_size: int | None = None
    """None is what the layout makes of it."""
    table: tuple[tuple[int, int], ...] | None = None
    """Bounds of every TP rank; for the explicit layout, and only there."""
    batch: int = 2
    sequence: int = 16
    prompt_tokens: int = 8
    """The first ones of each sequence, which do not count."""
    seed: int = 123

    def __post_init__(self) -> None:
        for name, enum in (("layout", LayoutName), ("dtype", LogitsDtype), ("platform", Platform)):
            object.__setattr__(self, name, checked_member(name, enum, getattr(self, name)))
        for name in ("tp", "cp", "vocab_size", "batch", "sequence"):
            checked_integer(name, getattr(self, name), low=1)
        for name in ("prompt_tokens", "seed"):
            checked_integer(name, getattr(self, name), low=0)
        object.__setattr__(self, "backend", checked_backend_id(self.backend))
        if self.prompt_tokens > self.sequence:
            raise UnusableInput(
                f"prompt_tokens should be at most the sequence of {self.sequence} tokens, "
                f"got {self.prompt_tokens}"
            )
        if (self.table is not None) != (self.layout == LayoutName.EXPLICIT):
            raise UnusableInput(f"a table belongs to layout explicit, got layout {self.layout}")
        self._check_layout()

    def _check_layout(self) -> None:
        layout = self.vocab_layout
        if layout.tp_size != self.tp:
            raise UnusableInput(f"the table has {layout.tp_size} shards, TP is {self.tp}")
        if self.padded_size not in (None, layout.padded_size):
            raise UnusableInput(
                f"the table ends at column {layout.padded_size}, the padded size is "
                f"{self.padded_size}; leave it out"
            )

    @property
    def vocab_layout(self) -> VocabLayout:
        """The bounds of every TP rank."""
        if self.table is not None:
            return VocabLayout(vocab_size=self.vocab_size, bounds=self.table)
        return named_layout(self.layout, self.vocab_size, self.tp, padded_size=self.padded_size)

    @property
    def inputs(self) -> SeededInputs:
        """What its rows are made from, whatever the topology."""
        return SeededInputs(**{name: getattr(self, name) for name in INPUT_FIELDS})

    @property
    def num_tokens(self) -> int:
        """Rows of all sequences."""
        return self.batch * self.sequence

    @property
    def num_ranks(self) -> int:
        """Processes of the launch."""
        return self.tp * self.cp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(TP rank, CP rank) of a global rank."""
        return rank % self.tp, rank // self.tp

    def token_range(self, cp_rank: int) -> tuple[int, int]:
        """``[start, end)`` of one CP rank's tokens: contiguous, of sizes within one."""
        start, end = (self.num_tokens * cut // self.cp for cut in (cp_rank, cp_rank + 1))
        return start, end

    def active(self, start: int, end: int) -> tuple[bool, ...]:
        """Which of the tokens ``[start, end)`` lie behind their prompt."""
        return tuple(token % self.sequence >= self.prompt_tokens for token in range(start, end))

    def contract(self, rank: int) -> LogprobContract:
        """What one global rank promises."""
        tp_rank, cp_rank = self.coordinates(rank)
        start, end = self.token_range(cp_rank)
        return LogprobContract(
            role=Role.TRAIN,
            logits_dtype=self.dtype,
            sharding=ShardingContract(
                layout=self.vocab_layout, tp_rank=tp_rank, cp_rank=cp_rank, cp_world=self.cp
            ),
            mask=MaskContract(num_tokens=end - start, active=self.active(start, end)),
        )

    def to_dict(self) -> dict[str, object]:
        """Strict JSON, with the bounds that the layout comes to."""
        return {**asdict(self), **self.vocab_layout.to_json()}

    @property
    def case_id(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the canonical case."""
        return hashlib.sha256(canonical_json(self.to_dict())).hexdigest()[:ID_LENGTH]

    @property
    def name(self) -> str:
        """For a person, and for the artifact's file."""
        return f"tp{self.tp}-cp{self.cp}-{self.layout}-{self.dtype}-{self.backend}"
