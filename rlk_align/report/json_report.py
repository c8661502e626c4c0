"""The comparison as strict JSON: the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from rlk_align.capture.rows import ReportedStatus
from rlk_align.compare.bits import BitComparison
from rlk_align.compare.comparison import Comparison
from rlk_align.compare.token_table import KernelStatus, Side, TokenTable, status_counts

REPORT_SCHEMA = "rlk-report/1"


def report_json(comparison: Comparison) -> dict[str, Any]:
    """The whole report; what was not observed is null, never a number."""
    inputs = comparison.inputs
    return {
        **summary_json(comparison),
        "identity": [asdict(line) for line in inputs.identity],
        "provenance": [{**asdict(pair), "differs": pair.differs} for pair in inputs.provenance],
        "terms": terms_json(comparison),
        "worst": [asdict(token) for token in comparison.worst],
    }


def summary_json(comparison: Comparison) -> dict[str, Any]:
    """Verdict, counts, metrics and bits: all but the long lists."""
    inputs, verdict = comparison.inputs, comparison.verdict
    table = inputs.table
    return {
        "schema": REPORT_SCHEMA,
        "rollout": inputs.names[0],
        "trainer": inputs.names[1],
        "verdict": verdict.outcome.name.lower(),
        "exit_status": int(verdict.outcome),
        "reason": verdict.sentence,
        "limits": asdict(comparison.limits),
        "notes": inputs.notes,
        "audit": asdict(inputs.audit),
        "basis": table.basis,
        "mean": "token",
        "num_tokens": len(comparison.budget.drift),
        "num_sequences": inputs.coverage.num_sequences,
        "token_classes": table.class_counts(),
        "coverage": {**asdict(inputs.coverage), "gaps": inputs.coverage.gaps()},
        "statuses": {"rollout": _statuses(table.rollout), "trainer": _statuses(table.trainer)},
        "metrics": asdict(comparison.metrics) if comparison.metrics else None,
        "bits": {name: _bits(bits, table) for name, bits in comparison.bits.items()},
    }


def terms_json(comparison: Comparison) -> dict[str, dict[str, float] | None]:
    """The spread of drift and of its three terms, by name."""
    return {name: asdict(spread) if spread else None for name, spread in comparison.spreads.items()}


def json_lines(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """The report as one object a line, each with its ``kind``: summary, term or token."""
    yield {"kind": "summary", **summary_json(comparison)}
    for name, values in terms_json(comparison).items():
        yield {"kind": "term", "name": name, "observed": values is not None, **(values or {})}
    for token in comparison.worst:
        yield {"kind": "token", **asdict(token)}


def _statuses(side: Side) -> dict[str, dict[str, int]]:
    return {
        "reported": status_counts(side.reported_status, ReportedStatus),
        "kernel": status_counts(side.kernel_status, KernelStatus),
    }


def _bits(bits: BitComparison, table: TokenTable) -> dict[str, Any]:
    first = bits.first_mismatch
    return {
        **asdict(bits),
        "equal_count": bits.equal_count,
        "first_mismatch": None if first is None else _place(table, first),
    }


def _place(table: TokenTable, at: int) -> dict[str, Any]:
    """Where the compared token ``at`` stands."""
    row = int(np.flatnonzero(table.compared)[at])
    return {
        "sequence": table.labels[int(table.sequence[row])],
        "position": int(table.position[row]),
        "token_id": int(table.token_id[row]),
        "rollout_rank": int(table.rollout.owner_rank[row]),
        "trainer_rank": int(table.trainer.owner_rank[row]),
    }
