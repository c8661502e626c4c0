"""Holds a capture against what the driver received: the same tokens, the same logprob bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlk_adapters.rollout_engine import CaptureFailed, Sampled
from rlk_align.capture import Capture, ReportedStatus, TokenRows, open_capture


def audit(directory: Path, received: Sequence[Sampled]) -> Capture:
    """Check every token of a sealed capture; returns the capture.

    Raises:
        CaptureFailed: Naming the first sequence that is not what the driver received.
    """
    capture = open_capture(directory)
    if capture.incomplete:
        hole = capture.incomplete[0]
        raise CaptureFailed(f"sequence {hole['label']!r} was not captured whole: {hole['reason']}")
    rows = capture.tokens()
    labels = capture.sequences.labels
    expected = {sampled.label: sampled for sampled in received if sampled.token_ids}
    if set(labels) != set(expected):
        different = min(set(labels) ^ set(expected))
        side = "captured" if different in labels else "received"
        raise CaptureFailed(f"sequence {different!r} was {side} only")
    for index, label in enumerate(labels):
        _audit_sequence(capture, rows, index, expected[label])
    return capture


def _audit_sequence(capture: Capture, rows: TokenRows, index: int, received: Sampled) -> None:
    place = f"sequence {received.label!r}"
    if capture.sequences.token_ids[index] != received.prompt_token_ids + received.token_ids:
        raise CaptureFailed(f"{place}: the captured token ids are not the ones received")
    ours = rows.sequence == index
    first = len(received.prompt_token_ids)
    positions = torch.arange(first, first + len(received.token_ids))
    if not torch.equal(rows.position[ours], positions):
        raise CaptureFailed(f"{place}: {int(ours.sum())} rows for {len(positions)} sampled tokens")
    if not rows.all_ranks[ours].all():
        raise CaptureFailed(f"{place}: a tensor-parallel rank has no row for one of its tokens")
    logprobs = torch.tensor(received.logprobs, dtype=torch.float32)
    valid = rows.reported_status[ours] == ReportedStatus.VALID
    different = ~valid | (rows.reported[ours].view(torch.int32) != logprobs.view(torch.int32))
    if different.any():
        token = int(different.nonzero()[0, 0])
        raise CaptureFailed(
            f"{place}, position {first + token}: the captured logprob is "
            f"{float(rows.reported[ours][token])}, the received one {float(logprobs[token])}"
        )
