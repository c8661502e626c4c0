"""Captured logits against the states recorded with them: recomputed, held bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_align.capture import Capture
from rlk_align.capture.reader import LogitsBlock
from rlk_align.errors import UnusableInput
from rlk_align.progress import Track
from rlk_kernels import State, expsum_state

BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How many rows of each side were recomputed, and what the report says of it."""

    rollout_rows: int
    trainer_rows: int
    result: str


NOT_ASKED = Audit(rollout_rows=0, trainer_rows=0, result="not audited, as asked")
NOTHING_RECORDED = Audit(
    rollout_rows=0, trainer_rows=0, result="none recorded: K was computed from the files' logits"
)


def audit_captures(rollout: Capture, trainer: Capture, *, track: Track) -> Audit:
    """Recompute the states of both sides' captured logits.

    Raises:
        UnusableInput: Naming the part and row of the first state that is not the recorded one.
    """
    ours, theirs = _audited_rows(rollout, track), _audited_rows(trainer, track)
    result = (
        f"recomputed from the captured logits, bitwise equal: {ours} rows of rollout, {theirs} of "
        "trainer"
        if ours + theirs
        else "not audited: neither capture keeps logits"
    )
    return Audit(rollout_rows=ours, trainer_rows=theirs, result=result)


def _audited_rows(capture: Capture, track: Track) -> int:
    progress = track(f"auditing {capture.directory.name}")
    return sum(
        _audited_block(block, capture.layout.vocab_size)
        for entry in progress(capture.parts)
        for block in capture.logits_blocks([entry], rows=BLOCK_ROWS)
    )


def _audited_block(block: LogitsBlock, vocab_size: int) -> int:
    state = expsum_state(
        block.logits,
        token_ids=block.token_id,
        vocab_start=block.vocab_start,
        vocab_size=vocab_size,
    )
    same = same_rows(state, block.state)
    if not same.all():
        row = block.first_row + int((~same).nonzero()[0, 0])
        raise UnusableInput(
            f"{block.path}, row {row}: the recorded state is not the one of the logits beside it; "
            "the capture contradicts itself, capture again"
        )
    return len(same)


def same_rows(ours: State, theirs: State) -> torch.Tensor:
    """``[N]`` bool: every field of a row's two states has the same bits."""
    same = (ours.top == theirs.top) & (ours.bins == theirs.bins).all(dim=1)
    same &= ours.invalid_column == theirs.invalid_column
    same &= ours.has_target == theirs.has_target
    logits = ours.target_logit.view(torch.int32) == theirs.target_logit.view(torch.int32)
    # the target's logit is read only where the columns hold the target
    return same & (logits | ~ours.has_target)
