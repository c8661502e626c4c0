"""Captures on disk: what every worker writes, the seal, the reader. See docs/capture-format.md."""

from rlk_align.capture.reader import Capture, TokenRows, open_capture
from rlk_align.capture.rows import ReportedStatus, Rows
from rlk_align.capture.seal import seal_capture
from rlk_align.capture.sequences import SequenceTable, sequence_digest
from rlk_align.capture.writer import CaptureWriter, WorkerIdentity

__all__ = [
    "Capture",
    "CaptureWriter",
    "ReportedStatus",
    "Rows",
    "SequenceTable",
    "TokenRows",
    "WorkerIdentity",
    "open_capture",
    "seal_capture",
    "sequence_digest",
]
