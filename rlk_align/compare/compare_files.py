"""The comparison of two plain files: the same table, budget and verdict, without a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.capture.rows import ReportedStatus
from rlk_align.compare.audit import NOTHING_RECORDED
from rlk_align.compare.comparison import NUM_WORST, Comparison, Inputs, compare_table
from rlk_align.compare.identity import IdentityLine, identity_line
from rlk_align.compare.join import Coverage
from rlk_align.compare.plain_files import PlainFile, open_plain_file, whole_state
from rlk_align.compare.sequence_identity import sequence_difference
from rlk_align.compare.side_by_side import side_by_side
from rlk_align.compare.side_columns import side_columns
from rlk_align.compare.token_table import Basis, Side, TokenTable, classify
from rlk_align.compare.verdict import Limits
from rlk_align.errors import UnusableInput
from rlk_align.progress import Progress, Track, silent
from rlk_align.provenance import NOT_OBSERVED
from rlk_kernels import KERNEL_SPEC


def compare_files(
    rollout: Path,
    trainer: Path,
    *,
    limits: Limits | None = None,
    num_worst: int = NUM_WORST,
    track: Track = silent,
) -> Comparison:
    """Compare two files; each holds ``logits`` and ``token_ids``, and may hold ``logprobs``.

    ``logits`` is ``[T, V]`` or ``[B, S, V]`` in float32, bfloat16 or float16, all columns real;
    ``token_ids`` and ``logprobs`` are ``[T]`` or ``[B, S]``. As in a capture, a row is a
    prediction: logits at a place predicted the token id at that place. d is the difference of the
    logprobs where both files hold them, else of K, and the function terms are not observed.

    Raises:
        UnusableInput: If a tensor is missing or malformed, or the files hold different tokens.
    """
    ours, theirs = open_plain_file(rollout), open_plain_file(trainer)
    identity = _identity(ours, theirs)
    has_both = ours.logprobs is not None and theirs.logprobs is not None
    basis: Basis = "reported" if has_both else "kernel"
    sides = (
        _side(ours, track(f"reading {rollout.name}")),
        _side(theirs, track(f"reading {trainer.name}")),
    )
    inputs = Inputs(
        names=(str(rollout), str(trainer)),
        notes=[] if has_both else ["not both files hold logprobs, so d is the difference of K"],
        identity=identity,
        audit=NOTHING_RECORDED,
        table=_table(ours, sides, basis),
        coverage=_coverage(ours),
        provenance=side_by_side(_facts(ours), _facts(theirs)),
    )
    return compare_table(inputs, limits=limits or Limits(), num_worst=num_worst)


def _identity(ours: PlainFile, theirs: PlainFile) -> list[IdentityLine]:
    if ours.vocab_size != theirs.vocab_size:
        raise UnusableInput(
            f"the vocabulary size differs: rollout has {ours.vocab_size} columns, trainer "
            f"{theirs.vocab_size}; cut padding columns off, and compare one model"
        )
    if len(ours.token_ids) != len(theirs.token_ids):
        raise UnusableInput(
            f"rollout holds {len(ours.token_ids)} sequences and trainer {len(theirs.token_ids)}; "
            "recompute the same token ids on both sides"
        )
    for index, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        if not torch.equal(*pair):
            difference = sequence_difference(str(index), pair[0].tolist(), pair[1].tolist())
            raise UnusableInput(f"{difference}; recompute the same token ids on both sides")
    return [
        identity_line("vocabulary size", ours.vocab_size, theirs.vocab_size),
        identity_line("sequences", len(ours.token_ids), len(theirs.token_ids)),
        identity_line("dtype of the logits", ours.dtype, theirs.dtype),
        identity_line("weights", NOT_OBSERVED, NOT_OBSERVED),
    ]


def _side(plain: PlainFile, progress: Progress) -> Side:
    count = plain.token_ids.numel()
    is_there = plain.logprobs is not None
    status = ReportedStatus.VALID if is_there else ReportedStatus.NOT_REQUESTED
    return side_columns(
        state=whole_state(plain, progress),
        reported=torch.zeros(count) if plain.logprobs is None else plain.logprobs.flatten(),
        reported_status=torch.full((count,), status, dtype=torch.uint8),
        owner_rank=torch.zeros(count, dtype=torch.int64),
        weights_epoch=torch.zeros(count, dtype=torch.int64),
        all_ranks=torch.ones(count, dtype=torch.bool),
        where=str(plain.path),
    )


def _table(plain: PlainFile, sides: tuple[Side, Side], basis: Basis) -> TokenTable:
    num_sequences, length = plain.token_ids.shape
    nowhere = np.zeros(num_sequences * length, dtype=bool)
    return TokenTable(
        labels=[str(index) for index in range(num_sequences)],
        sample_indices=[0] * num_sequences,
        token_texts={},
        sequence=np.repeat(np.arange(num_sequences), length),
        position=np.tile(np.arange(length), num_sequences),
        token_id=plain.token_ids.flatten().numpy(),
        rollout=sides[0],
        trainer=sides[1],
        basis=basis,
        token_class=classify(
            *sides,
            basis=basis,
            is_prompt=nowhere,
            weights_differ=nowhere,
            epoch_unlisted=nowhere,
        ),
    )


def _coverage(plain: PlainFile) -> Coverage:
    return Coverage(
        num_sequences=len(plain.token_ids),
        expected_tokens=plain.token_ids.numel(),
        only_rollout=0,
        only_trainer=0,
        on_neither=0,
        prompt_rows_on_one_side=0,
        incomplete_sequences={},
        lost_rows={},
    )


def _facts(plain: PlainFile) -> dict[str, Any]:
    return {
        "file": plain.path.name,
        "logits": {"dtype": plain.dtype, "shape": list(plain.shape)},
        "logprobs": "float32" if plain.logprobs is not None else "none in the file",
        "kernel": KERNEL_SPEC,
    }
