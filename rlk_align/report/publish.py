"""Where a comparison goes: files first, then stdout."""

from __future__ import annotations

import sys
from pathlib import Path

from rlk_align.compare.comparison import Comparison
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json, write_atomically
from rlk_align.report.json_report import json_lines, report_json
from rlk_align.report.parquet import parquet_bytes
from rlk_align.report.tables import console_for
from rlk_align.report.terminal import print_report

REPORT_FILE = "report.json"
TOKENS_FILE = "tokens.parquet"


def publish(comparison: Comparison, out: Path, *, as_json: bool, parquet: bool) -> None:
    """Write ``report.json`` and ``tokens.parquet`` to ``out``, then print to stdout.

    Raises:
        UnusableInput: If ``out`` cannot be written.
    """
    files = {REPORT_FILE: canonical_json(report_json(comparison), indent=1)}
    if parquet:
        files[TOKENS_FILE] = parquet_bytes(comparison.inputs.table, comparison.budget)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
    except OSError as error:
        raise UnusableInput(f"{out}: the report cannot be written ({error.strerror})") from None
    if as_json:
        for line in json_lines(comparison):
            sys.stdout.write(canonical_json(line).decode())
        return
    console = console_for(sys.stdout)
    print_report(comparison, console)
    console.print(f"written: {', '.join(str(out / name) for name in files)}", markup=False)
