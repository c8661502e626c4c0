"""The matrix as a person reads it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from rlk_align.matrix.verdict import MatrixOutcome, MatrixVerdict
from rlk_align.report.tables import add_row, nats, print_table, table_of

COLOURS = {
    MatrixOutcome.PASSED: "green",
    MatrixOutcome.FAILED: "red",
    MatrixOutcome.INCONCLUSIVE: "yellow",
}
DIGEST_SHOWN = 10


def print_verdict(verdict: MatrixVerdict, console: Console) -> None:
    """A line for each case, what failed, and one verdict."""
    table = table_of(
        "TP", "CP", "layout", "backend", "dlogp ulp", "LSE ulp", "storage nats", "logprob", "LSE",
        "checks", left=4,
    )  # fmt: skip
    for artifact in verdict.artifacts:
        add_row(table, _cells(artifact), "" if artifact["passed"] else "red")
    print_table(console, "The same rows on every topology and layout", table)
    for artifact in verdict.artifacts:
        for check in artifact["checks"]:
            if not check["passed"]:
                line = f"{artifact['case_id']} {check['name']}: {check['detail']}"
                console.print(Text(line, style="red"))
    for name in verdict.missing:
        console.print(Text(f"not run: {name}", style="yellow"))
    word = verdict.outcome.name.lower()
    console.print(
        Text.assemble((word, f"bold {COLOURS[verdict.outcome]}"), f": {verdict.sentence}")
    )


def _cells(artifact: dict[str, Any]) -> tuple[object, ...]:
    case, aggregate, prints = artifact["case"], artifact["aggregate"], artifact["fingerprints"]
    passed = sum(check["passed"] for check in artifact["checks"])
    return (
        case["tp"],
        case["cp"],
        case["layout"],
        case["backend"],
        _statistic(aggregate, "dlogp", "max_ulp"),
        _statistic(aggregate, "lse", "max_ulp"),
        _statistic(aggregate, "storage_dlogp", "max_abs"),
        (prints["logprob_sha256"] or "none")[:DIGEST_SHOWN],
        (prints["lse_sha256"] or "none")[:DIGEST_SHOWN],
        f"{passed}/{len(artifact['checks'])}",
    )


def _statistic(aggregate: dict[str, Any] | None, of: str, name: str) -> str:
    """A number, the status that stands in its place, or that no rank gave any."""
    if aggregate is None:
        return "not observed"
    value = aggregate[of][name]
    if value is None:
        return str(aggregate[of]["status"]).replace("_", " ")
    if isinstance(value, str):
        return value
    return nats(value) if name == "max_abs" else f"{value:.3f}"
