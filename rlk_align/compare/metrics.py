"""Numbers about many tokens: spreads of a term, divergence estimates, ratios.

d is drift, trainer minus rollout in nats, over the compared tokens; every mean is a token mean
unless its name says otherwise. Sums are exact (`math.fsum`), so no order of tokens moves a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlk_align.compare.budget import Float64s, basis_values
from rlk_align.compare.token_table import TokenTable

LN2 = math.log(2.0)
THRESHOLDS = (1e-6, 1e-3, math.log(1.1), LN2, 2.0)
THRESHOLD_NAMES = ("1e-6", "1e-3", "ln1.1", "ln2", "2")
CONFIDENT_NATS = -LN2
DISAGREEMENT_NATS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How large one term is over the compared tokens, in nats."""

    logp_diff_mean: float
    """Signed."""
    logp_diff_rms: float
    logp_abs_diff_mean: float
    logp_abs_diff_p50: float
    """Percentiles are linear between order statistics."""
    logp_abs_diff_p95: float
    logp_abs_diff_p99: float
    logp_abs_diff_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftMetrics:
    """Estimates from d of the sampled tokens; None where exp(d) is beyond float64."""

    logp_abs_diff_sample_mean: float
    """Mean over sequences of each one's token mean of abs(d)."""
    ratio_mean: float | None
    """Mean of exp(d), the importance ratio trainer / rollout; expected 1 on full support."""
    kl_k1: float
    """Mean of -d: estimates KL(rollout || trainer)."""
    kl_k3: float | None
    """Mean of exp(d) - d - 1: the same, never negative (Schulman, Approximating KL)."""
    confident_disagreement_count: int
    """Tokens with rollout >= ln 0.5 and trainer < rollout - 2."""
    diff_frac_gt: dict[str, float]
    """Share of tokens with abs(d) above each threshold in nats."""


def spread(values: Float64s) -> Spread:
    """The spread of at least one value."""
    size = np.abs(values)
    p50, p95, p99 = np.percentile(size, (50, 95, 99)).tolist()
    return Spread(
        logp_diff_mean=mean(values.tolist()),
        logp_diff_rms=math.sqrt(mean((values * values).tolist())),
        logp_abs_diff_mean=mean(size.tolist()),
        logp_abs_diff_p50=p50,
        logp_abs_diff_p95=p95,
        logp_abs_diff_p99=p99,
        logp_abs_diff_max=float(size.max()),
    )


def drift_metrics(table: TokenTable, drift: Float64s) -> DriftMetrics:
    """The estimates of at least one compared token."""
    rollout, trainer = basis_values(table)
    size = np.abs(drift)
    confident = (rollout >= CONFIDENT_NATS) & (trainer < rollout - DISAGREEMENT_NATS)
    return DriftMetrics(
        logp_abs_diff_sample_mean=_sample_mean(size, table),
        ratio_mean=_mean_of(math.exp, drift),
        kl_k1=mean((-drift).tolist()),
        # expm1 keeps the digits that exp(d) - 1 would lose near 0
        kl_k3=_mean_of(lambda d: math.expm1(d) - d, drift),
        confident_disagreement_count=int(confident.sum()),
        diff_frac_gt={
            name: float((size > threshold).sum() / len(size))
            for name, threshold in zip(THRESHOLD_NAMES, THRESHOLDS, strict=True)
        },
    )


def mean(values: list[float]) -> float:
    """The exact sum, rounded once, divided once."""
    return math.fsum(values) / len(values)


def _mean_of(function: Callable[[float], float], drift: Float64s) -> float | None:
    try:
        return mean([function(d) for d in drift.tolist()])
    except OverflowError:
        return None


def _sample_mean(size: Float64s, table: TokenTable) -> float:
    sequence = table.sequence[table.compared]
    # the table is sorted by sequence
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    return mean([mean(part.tolist()) for part in np.split(size, starts[1:])])
