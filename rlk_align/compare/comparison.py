"""The whole comparison: identity, then the audit, then numbers, then the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlk_align.capture import open_capture
from rlk_align.compare.audit import NOT_ASKED, Audit, audit_captures
from rlk_align.compare.bits import BitComparison, compare_bits
from rlk_align.compare.budget import Budget, drift_budget
from rlk_align.compare.identity import IdentityLine, check_identity
from rlk_align.compare.join import Coverage, join_captures
from rlk_align.compare.metrics import DriftMetrics, Spread, drift_metrics, spread
from rlk_align.compare.side_by_side import FieldPair, capture_facts, side_by_side
from rlk_align.compare.token_table import PROMPT_CLASS, TOKEN_CLASSES, Basis, TokenTable
from rlk_align.compare.verdict import Limits, Verdict, judge
from rlk_align.compare.worst_tokens import WorstToken, worst_tokens
from rlk_align.progress import Track, silent

NUM_WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Two sides brought to one table: what `compare_table` needs, from whatever files."""

    names: tuple[str, str]
    """Rollout and trainer as the caller named them."""
    notes: list[str]
    """What a reader must know before any number."""
    identity: list[IdentityLine]
    audit: Audit
    table: TokenTable
    coverage: Coverage
    provenance: list[FieldPair]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything a report shows; statistics are None where no token could be compared."""

    inputs: Inputs
    limits: Limits
    budget: Budget
    spreads: dict[str, Spread | None]
    """Of drift and of each term, by name; None where the term was not observed."""
    metrics: DriftMetrics | None
    bits: dict[str, BitComparison]
    """``reported`` (where both sides have it), ``kernel`` and ``lse``."""
    worst: list[WorstToken]
    verdict: Verdict


def compare_captures(
    rollout: Path,
    trainer: Path,
    *,
    limits: Limits | None = None,
    num_worst: int = NUM_WORST,
    allow_different_weights: bool = False,
    audit: bool = True,
    track: Track = silent,
) -> Comparison:
    """Compare two sealed captures of the same sequences, token by token.

    Args:
        rollout: Directory of the rollout's capture; or the first of two with one role.
        trainer: Directory of the trainer's capture.
        limits: What is still called aligned; None for the defaults.
        num_worst: How many of the worst tokens are kept.
        allow_different_weights: Compare although the weights' digests differ.
        audit: Recompute every state from the captured logits first.
        track: May show progress.

    Raises:
        UnusableInput: If the captures are not of the same thing, or one is altered or
            inconsistent; with the first difference.
    """
    ours, theirs = open_capture(rollout), open_capture(trainer)
    identity = check_identity(ours, theirs, allow_different_weights=allow_different_weights)
    table, coverage = join_captures(
        ours, theirs, allow_different_weights=allow_different_weights, track=track
    )
    inputs = Inputs(
        names=(str(rollout), str(trainer)),
        notes=_notes(ours.role, theirs.role, identity, table.basis),
        identity=identity,
        audit=audit_captures(ours, theirs, track=track) if audit else NOT_ASKED,
        table=table,
        coverage=coverage,
        provenance=side_by_side(capture_facts(ours), capture_facts(theirs)),
    )
    return compare_table(inputs, limits=limits or Limits(), num_worst=num_worst)


def compare_table(inputs: Inputs, *, limits: Limits, num_worst: int) -> Comparison:
    """Budget, statistics and verdict of one table."""
    table = inputs.table
    budget = drift_budget(table)
    some = bool(table.compared.any())
    spreads = {
        name: spread(values) if some and values is not None else None
        for name, values in budget.terms()
    }
    worst = worst_tokens(table, budget, max(num_worst, 1))
    return Comparison(
        inputs=inputs,
        limits=limits,
        budget=budget,
        spreads=spreads,
        metrics=drift_metrics(table, budget.drift) if some else None,
        bits=_bits(table),
        worst=worst[:num_worst],
        verdict=judge(
            num_compared=len(budget.drift),
            drift=spreads["drift"],
            worst_place=worst[0].place() if worst else "",
            gaps=_gaps(inputs),
            limits=limits,
        ),
    )


def _gaps(inputs: Inputs) -> dict[str, int]:
    """What should have been compared and was not, by reason; prompt tokens are not expected."""
    excluded = inputs.table.class_counts()
    for expected_out in (TOKEN_CLASSES[0], PROMPT_CLASS):
        excluded.pop(expected_out, None)
    return {**excluded, **inputs.coverage.gaps()}


def _bits(table: TokenTable) -> dict[str, BitComparison]:
    columns = {"kernel": "logprob", "lse": "lse"}
    if table.basis == "reported":
        columns = {"reported": "reported", **columns}
    at = table.compared
    return {
        name: compare_bits(getattr(table.rollout, column)[at], getattr(table.trainer, column)[at])
        for name, column in columns.items()
    }


def _notes(
    rollout_role: str, trainer_role: str, identity: list[IdentityLine], basis: Basis
) -> list[str]:
    notes = []
    if basis == "kernel":
        notes.append("not both captures hold logprobs, so d is the difference of K")
    if rollout_role == trainer_role:
        notes.append(
            f"both captures are of role {rollout_role}: the first stands as rollout, the second "
            "as trainer, so d = second - first"
        )
    lines = {line.what: line for line in identity}
    distribution, weights = lines["reported distribution"], lines["weights"]
    if distribution.outcome == "differs":
        notes.append(
            f"the rollout reports {distribution.rollout} logprobs and the trainer "
            f"{distribution.trainer} ones: the difference stands in the function terms"
        )
    if weights.outcome == "differs":
        notes.append("the weights differ, which was allowed: drift is expected")
    if weights.outcome == "not observed":
        notes.append("the weights of a side were not observed: nobody knows that they are the same")
    return notes
