"""The arithmetic of expsum-1: exponentials become integers, and integers merge in any order.

Letters: T tokens (rows), B bins. docs/numerics.md says why every number here is what it is.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor


def _float32(hex_bits: str) -> float:
    """The float32 with these bits, as a Python float."""
    return float(struct.unpack(">f", bytes.fromhex(hex_bits))[0])


KERNEL_SPEC = "expsum-1"

LIMIT = 8192.0
"""Logits at or below -LIMIT are masked; above LIMIT, or NaN, they make the row invalid."""
NUM_BINS = 3
BIN_WIDTH = 21
"""Powers of two that one bin spans."""
MAX_COLUMNS = 370_000
"""A bin of int64 holds this many columns of the largest value, 2**44.5."""
EMPTY_TOP = -(1 << 20)
"""``State.top`` where no live column was seen; far below the bin of any logit, about -563."""

MANTISSA_BITS = 24
MAGIC = 12582912.0
"""1.5 * 2**23: adding it and taking it away rounds a small float32 to the nearest integer."""
LOG2E = _float32("3fb8aa3b")
LN2_HI = 0.693359375
LN2_LO = _float32("b95e8083")
POLYNOMIAL = tuple(map(_float32, ("3efffffe", "3e2aaa48", "3d2aac7c", "3c091d62", "3ab51108")))
"""C0 to C4: exp(r) is about ((C0 + C1 r + C2 r^2 + C3 r^3 + C4 r^4) r) r + r + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What some columns of T rows add up to; states of disjoint columns are joined by `merge`."""

    top: Tensor
    """int32 [T]: bin of the largest live logit, EMPTY_TOP where no live column was seen."""
    bins: Tensor
    """int64 [T, 3]: bins[:, b] sums exp over the columns in bin top - b, in units of
    2**(21 * (top - b) - 24)."""
    target_logit: Tensor
    """float32 [T]: the target's logit, divided by the temperature; 0 where has_target is false."""
    has_target: Tensor
    """bool [T]: the target lies in the columns seen, be it masked or not."""
    invalid_column: Tensor
    """int32 [T]: smallest token id whose logit is NaN, +inf or above LIMIT; -1 if none."""

    def __post_init__(self) -> None:
        rows = self.top.shape[:1]
        for name, dtype, shape in (
            ("top", torch.int32, rows),
            ("bins", torch.int64, (*rows, NUM_BINS)),
            ("target_logit", torch.float32, rows),
            ("has_target", torch.bool, rows),
            ("invalid_column", torch.int32, rows),
        ):
            value = getattr(self, name)
            if value.dtype != dtype or value.shape != shape or value.device != self.top.device:
                raise ValueError(
                    f"State.{name} should be {dtype} {list(shape)} on {self.top.device}, got "
                    f"{value.dtype} {list(value.shape)} on {value.device}"
                )

    @property
    def num_tokens(self) -> int:
        """Number of rows."""
        return self.top.shape[0]


def empty_state(num_tokens: int, device: torch.device | str = "cpu") -> State:
    """The state of no columns at all, which `merge` leaves out."""
    return State(
        top=torch.full((num_tokens,), EMPTY_TOP, dtype=torch.int32, device=device),
        bins=torch.zeros(num_tokens, NUM_BINS, dtype=torch.int64, device=device),
        target_logit=torch.zeros(num_tokens, dtype=torch.float32, device=device),
        has_target=torch.zeros(num_tokens, dtype=torch.bool, device=device),
        invalid_column=torch.full((num_tokens,), -1, dtype=torch.int32, device=device),
    )


def merge(a: State, b: State) -> State:
    """The state of the columns of ``a`` and ``b`` together, row by row.

    Exact, commutative and associative, with `empty_state` as its neutral element.

    Raises:
        ValueError: If the token counts differ, or both hold a row's target, which means that
            their columns overlap.
    """
    if a.num_tokens != b.num_tokens:
        raise ValueError(
            f"only states of the same rows merge; got {a.num_tokens} and {b.num_tokens} tokens"
        )
    both = a.has_target & b.has_target
    if both.any():
        raise ValueError(
            f"row {_first(both)}: both states hold the target, so their columns overlap; "
            "merge states of disjoint columns"
        )
    top = torch.maximum(a.top, b.top)
    invalid = torch.minimum(a.invalid_column, b.invalid_column)
    return State(
        top=top,
        bins=_lowered(a, top) + _lowered(b, top),
        target_logit=torch.where(a.has_target, a.target_logit, b.target_logit),
        has_target=a.has_target | b.has_target,
        # the smaller one counts, unless it is the -1 of "none"
        invalid_column=torch.where(
            invalid < 0, torch.maximum(a.invalid_column, b.invalid_column), invalid
        ),
    )


def _lowered(state: State, top: Tensor) -> Tensor:
    """The bins of ``state`` seen from a higher ``top``; what leaves the third bin is dropped."""
    shift_T = (top - state.top).long()
    source_TB = torch.arange(NUM_BINS, device=top.device) - shift_T[:, None]
    moved_TB = state.bins.gather(1, source_TB.clamp(min=0))
    return torch.where(source_TB >= 0, moved_TB, 0)


def _first(flags: Tensor) -> int:
    """Index of the first true flag."""
    return int(flags.nonzero()[0])
