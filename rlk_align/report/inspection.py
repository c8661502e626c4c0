"""What one capture holds, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlk_align.capture import Capture, TokenRows, open_capture
from rlk_align.capture.parts import PartEntry
from rlk_align.capture.rows import ReportedStatus
from rlk_align.compare.join import capture_side
from rlk_align.compare.side_by_side import capture_facts, side_by_side
from rlk_align.compare.token_table import KernelStatus, status_counts
from rlk_align.progress import Track
from rlk_align.report.tables import add_row, print_table, table_of

MEGABYTE = 1e6


def print_inspection(directory: Path, console: Console, *, track: Track) -> None:
    """Read and verify every row of a sealed capture, then print what it holds.

    Raises:
        UnusableInput: If the capture is unsealed, altered or inconsistent.
    """
    capture = open_capture(directory)
    rows = capture.tokens(progress=track("reading"))
    print_table(console, f"{directory}: sealed, every byte verified", _content(capture, rows))
    layout = capture.layout
    title = f"Ranks of vocabulary {layout.vocab_size}, padded {layout.padded_size}"
    print_table(console, title, _ranks(capture))
    print_table(console, "Provenance", _provenance(capture))
    for sequence in capture.incomplete:
        line = f"incomplete: sequence {sequence['label']}, {sequence['reason']}"
        console.print(Text(line, style="yellow"))
    for reason, count in capture.lost.items():
        console.print(Text(f"lost: {count} rows, {reason}", style="yellow"))


def _content(capture: Capture, rows: TokenRows) -> Table:
    provenance, sequences = capture.provenance, capture.sequences
    side = capture_side(capture, rows)
    sampled = sum(map(len, sequences.token_ids)) - sum(sequences.prompt_lengths)
    table = table_of("what", "", left=2, long=True)
    add_row(table, ("role", capture.role))
    add_row(table, ("engine", f"{provenance.engine} {provenance.engine_version}"))
    add_row(table, ("model", provenance.model.name))
    add_row(table, ("sequences", f"{len(sequences)}, {len(capture.incomplete)} incomplete"))
    add_row(table, ("tokens", f"{sampled} sampled, {sum(sequences.prompt_lengths)} of prompts"))
    add_row(table, ("rows of tokens", f"{len(rows)}, {int(rows.is_prompt.sum())} of prompts"))
    add_row(table, ("rows lost", sum(capture.lost.values())))
    add_row(table, ("reported", _counts(status_counts(side.reported_status, ReportedStatus))))
    add_row(table, ("K", _counts(status_counts(side.kernel_status, KernelStatus))))
    add_row(table, ("token texts", len(sequences.token_texts)))
    return table


def _ranks(capture: Capture) -> Table:
    layout = capture.layout
    table = table_of("rank", "columns", "real", "parts", "with logits", "rows", "MB")
    for rank, (start, end) in enumerate(layout.bounds):
        parts = list(_parts_of(capture, rank))
        first, last = layout.real_bounds(rank)
        kept = sum(next(capture.logits_blocks([p], rows=1), None) is not None for p in parts)
        size = sum(part.bytes for part in parts) / MEGABYTE
        cells = (len(parts), kept, sum(part.rows for part in parts), f"{size:.2f}")
        add_row(table, (rank, f"[{start}, {end})", last - first, *cells))
    return table


def _parts_of(capture: Capture, tp_rank: int) -> Iterator[PartEntry]:
    return (part for part in capture.parts if part.tp_rank == tp_rank)


def _provenance(capture: Capture) -> Table:
    facts = capture_facts(capture)
    table = table_of("field", "value", left=2, long=True)
    for pair in side_by_side(facts, facts):
        add_row(table, (pair.field, pair.rollout))
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no rows"
