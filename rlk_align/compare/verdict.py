"""The verdict: one word, one exit status, and one sentence on what decided."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rlk_align.compare.metrics import Spread

LIMIT_NATS = 0.02
"""Default for the mean of abs(d): what healthy dense bf16 runs of other teams stay below, a median
of their reports and no theory (0.010 to 0.018)."""
LIMIT_MAX_NATS = 1.0
"""Default for one token: above the published maxima of healthy bf16 runs (0.37 to 0.66), below
what a fabricated or shifted value does."""


class Outcome(IntEnum):
    """The verdict as an exit status; 2 is unusable input, which has no numbers to judge."""

    ALIGNED = 0
    DRIFTED = 1
    INCONCLUSIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is still called aligned, in nats."""

    mean_nats: float = LIMIT_NATS
    max_nats: float = LIMIT_MAX_NATS


def limits_of(mean_nats: float | None, max_nats: float | None) -> Limits:
    """The limits that were given, and the defaults for the others.

    One token may always be as far off as all of them: the default of ``max_nats`` is never below
    ``mean_nats``.
    """
    mean = LIMIT_NATS if mean_nats is None else mean_nats
    return Limits(
        mean_nats=mean, max_nats=max(LIMIT_MAX_NATS, mean) if max_nats is None else max_nats
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome and reason."""

    outcome: Outcome
    sentence: str


def judge(
    *,
    num_compared: int,
    drift: Spread | None,
    worst_place: str,
    gaps: dict[str, int],
    limits: Limits,
) -> Verdict:
    """Drifted beats inconclusive, which beats aligned.

    Args:
        num_compared: Tokens that entered the statistics.
        drift: The spread of d over them, None where there are none.
        worst_place: Where the largest one is, for the sentence.
        gaps: What should have been compared and could not be, by name.
        limits: What is still aligned.
    """
    missing = ", ".join(f"{name} {count}" for name, count in gaps.items())
    if drift is None:
        return Verdict(
            outcome=Outcome.INCONCLUSIVE,
            sentence=f"no token could be compared ({missing or 'there are none'})",
        )
    mean_abs, max_abs = drift.logp_abs_diff_mean, drift.logp_abs_diff_max
    over = f"over {num_compared} tokens"
    if mean_abs > limits.mean_nats:
        return Verdict(
            outcome=Outcome.DRIFTED,
            sentence=f"mean |d| is {mean_abs:.4g} nats {over}, above the limit of "
            f"{limits.mean_nats:g}",
        )
    if max_abs > limits.max_nats:
        return Verdict(
            outcome=Outcome.DRIFTED,
            sentence=f"|d| is {max_abs:.4g} nats at {worst_place}, above the limit of "
            f"{limits.max_nats:g} for one token",
        )
    numbers = (
        f"mean |d| is {mean_abs:.4g} nats {over} (limit {limits.mean_nats:g}), the largest "
        f"{max_abs:.4g} (limit {limits.max_nats:g})"
    )
    if gaps:
        return Verdict(
            outcome=Outcome.INCONCLUSIVE, sentence=f"not all was observed ({missing}); {numbers}"
        )
    return Verdict(outcome=Outcome.ALIGNED, sentence=numbers)
