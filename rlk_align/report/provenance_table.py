"""What differs between the sides' provenance, short enough for a terminal."""

from __future__ import annotations

from rich.console import Console

from rlk_align.compare.side_by_side import ABSENT, FieldPair
from rlk_align.report.tables import add_row, print_table, table_of


def print_provenance(pairs: list[FieldPair], console: Console) -> None:
    """One row for each field that differs, one for each group that only one side has."""
    differing = [pair for pair in pairs if pair.differs]
    table = table_of("field", "rollout", "trainer", left=3, long=True)
    for pair in differing:
        if ABSENT not in (pair.rollout, pair.trainer):
            add_row(table, (pair.field, pair.rollout, pair.trainer))
    for group, sides in _one_sided(differing).items():
        add_row(table, (f"{group}, on one side", *map(", ".join, sides)))
    same = len(pairs) - len(differing)
    title = f"Provenance: what differs ({same} more fields are the same, see report.json)"
    print_table(console, title, table)


def _one_sided(pairs: list[FieldPair]) -> dict[str, tuple[list[str], list[str]]]:
    """``group -> (rollout's fields, trainer's fields)`` with values, where one side is absent."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for pair in pairs:
        group, _, name = pair.field.partition(".")
        if pair.trainer == ABSENT:
            groups.setdefault(group, ([], []))[0].append(f"{name or group}={pair.rollout}")
        elif pair.rollout == ABSENT:
            groups.setdefault(group, ([], []))[1].append(f"{name or group}={pair.trainer}")
    return groups
