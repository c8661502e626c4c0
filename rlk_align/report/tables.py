"""The look that all tables on the terminal share: 100 columns, plain in a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100
NOT_OBSERVED_MARK = "n.o."
DIGEST_LENGTH = 64


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with status 1, which is a verdict of ours
        raise BrokenPipeError


def console_for(file: IO[str]) -> Console:
    """A console as wide as the terminal, or 100 columns where the output is no terminal."""
    is_piped = not file.isatty() and "COLUMNS" not in os.environ
    return _Console(file=file, width=WIDTH if is_piped else None, highlight=False)


def table_of(*headers: str, left: int = 1, long: bool = False) -> Table:
    """An empty table; the first ``left`` columns are text, which folds where it is ``long``."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for index, header in enumerate(headers):
        table.add_column(
            header,
            justify="left" if index < left else "right",
            overflow="fold" if long else "ellipsis",
            no_wrap=not long,
        )
    return table


def add_row(table: Table, cells: Iterable[object], style: str = "") -> None:
    """Add a row of plain text: nothing in a label or a token is markup."""
    table.add_row(*(Text(str(cell)) for cell in cells), style=style)


def print_table(console: Console, title: str, table: Table) -> None:
    """The title, the table and an empty line."""
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def nats(value: float) -> str:
    """A size in nats; zero, which is exact, looks like nothing else."""
    return f"{value:.2e}" if value else "0"


def signed_nats(value: float | None) -> str:
    """A difference in nats with its sign."""
    if value is None:
        return NOT_OBSERVED_MARK
    return f"{value:+.2e}" if value else "0"


def logprob(value: float | None) -> str:
    """A logprob in nats; the files hold every digit."""
    return NOT_OBSERVED_MARK if value is None else f"{value:.5f}"


def short_digest(value: str) -> str:
    """The beginning of a SHA-256; anything else as it is."""
    is_digest = len(value) == DIGEST_LENGTH and set(value) <= set("0123456789abcdef")
    return f"{value[:12]}..." if is_digest else value
