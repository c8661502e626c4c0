"""How far values are from the truth, and where most."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch
from torch import Tensor

RELATIVE_FLOOR_NATS = 1e-3
"""A relative difference is of at least this: nothing is gained by relating to almost zero."""
CLAIM_FLOOR_NATS = 2.0**-30
"""The kernel claims nothing below it (docs/numerics.md)."""


class DifferenceStatus(StrEnum):
    """Whether there was anything to compare."""

    COMPARED = "compared"
    NO_ACTIVE_TOKENS = "no_active_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """The token with the largest absolute difference."""

    token: int
    """Global index."""
    target_id: int
    owner_rank: int
    """TP rank that holds the target's column."""
    value: float | str
    expected: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Absolute differences in nats. What is no finite number is told as text, "nan" or "inf"."""

    status: DifferenceStatus
    num_tokens: int
    max_abs: float | str | None = None
    mean_abs: float | str | None = None
    p95_abs: float | str | None = None
    """Percentiles are linear between order statistics."""
    p99_abs: float | str | None = None
    max_relative: float | str | None = None
    max_ulp: float | str | None = None
    """In float32 steps at the expected value."""
    worst: WorstToken | None = None

    def to_dict(self) -> dict[str, object]:
        """Strict JSON."""
        return asdict(self)


def differences(
    value: Tensor, expected: Tensor, *, tokens: list[int], targets: list[int], owners: list[int]
) -> Differences:
    """Float32 values against float64 truth; the lists name each token."""
    if len(tokens) == 0:
        return Differences(status=DifferenceStatus.NO_ACTIVE_TOKENS, num_tokens=0)
    size = (value.double() - expected).abs()
    # a difference that is no number is the worst of all
    worst = int(torch.where(size.isnan(), torch.inf, size).argmax())
    p95, p99 = torch.quantile(size, size.new_tensor([0.95, 0.99])).tolist()
    step = torch.exp2(expected.abs().clamp(min=CLAIM_FLOOR_NATS).log2().floor() - 23)
    is_claimed = (expected.abs() >= CLAIM_FLOOR_NATS) | ~(size < CLAIM_FLOOR_NATS)
    return Differences(
        status=DifferenceStatus.COMPARED,
        num_tokens=len(tokens),
        max_abs=_number(size.max()),
        mean_abs=_number(size.mean()),
        p95_abs=_number(p95),
        p99_abs=_number(p99),
        max_relative=_number((size / expected.abs().clamp(min=RELATIVE_FLOOR_NATS)).max()),
        max_ulp=_number(torch.where(is_claimed, size / step, 0.0).max()),
        worst=WorstToken(
            token=tokens[worst],
            target_id=targets[worst],
            owner_rank=owners[worst],
            value=_number(value[worst]),
            expected=_number(expected[worst]),
        ),
    )


def is_within(size: float | str | None, limit: float) -> bool:
    """Whether a difference is at most the limit; what is no number is not."""
    return isinstance(size, (int, float)) and size <= limit


def _number(value: Tensor | float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)
