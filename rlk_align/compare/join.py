"""Two captures become one token table, joined on (sequence, position); the rest is counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlk_align.capture import Capture, TokenRows
from rlk_align.capture.rows import ReportedStatus
from rlk_align.compare.identity import epoch_weights
from rlk_align.compare.side_columns import side_columns
from rlk_align.compare.states import state_rows
from rlk_align.compare.token_table import Basis, Flags, Side, TokenTable, classify
from rlk_align.progress import Track
from rlk_align.provenance import NOT_OBSERVED

POSITION_BITS = 32
UNLISTED = "not listed"
Int64s = npt.NDArray[np.int64]
Digests = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What should have been compared and what was there to compare."""

    num_sequences: int
    """That both sides hold."""
    expected_tokens: int
    """Sampled tokens of those sequences."""
    only_rollout: int
    """Of the expected tokens, those with a row in the rollout only."""
    only_trainer: int
    on_neither: int
    prompt_rows_on_one_side: int
    """Rows of prompt tokens that the other side did not record; nobody expected them."""
    incomplete_sequences: dict[str, int]
    """Sequences that a side left out because rows of theirs are missing, by side."""
    lost_rows: dict[str, int]
    """Rows that could not be kept, by side and reason."""

    def gaps(self) -> dict[str, int]:
        """Everything that should have been there and is not, by name; empty where all was."""
        named = {
            "tokens with a row in rollout only": self.only_rollout,
            "tokens with a row in trainer only": self.only_trainer,
            "tokens without a row on either side": self.on_neither,
            **{f"incomplete sequences in {k}": n for k, n in self.incomplete_sequences.items()},
            **{f"rows lost in {name}": n for name, n in self.lost_rows.items()},
        }
        return {name: n for name, n in named.items() if n}


def join_captures(
    rollout: Capture, trainer: Capture, *, allow_different_weights: bool, track: Track
) -> tuple[TokenTable, Coverage]:
    """One row for each token that both captures have; no logits are read.

    Raises:
        UnusableInput: If a part is altered or inconsistent.
    """
    ours = rollout.tokens(progress=track("reading rollout"))
    theirs = trainer.tokens(progress=track("reading trainer"))
    our_keys, our_rows = _keys(rollout, ours, rollout)
    their_keys, their_rows = _keys(trainer, theirs, rollout)
    common, at, their_at = np.intersect1d(
        our_keys, their_keys, assume_unique=True, return_indices=True
    )
    our_rows, their_rows = our_rows[at], their_rows[their_at]
    # sequences are the same by digest and every row's token was held against its sequence
    assert np.array_equal(ours.token_id.numpy()[our_rows], theirs.token_id.numpy()[their_rows])
    sides = capture_side(rollout, ours, our_rows), capture_side(trainer, theirs, their_rows)
    sequence, position = common >> POSITION_BITS, common & ((1 << POSITION_BITS) - 1)
    is_prompt = position < np.array(rollout.sequences.prompt_lengths, dtype=np.int64)[sequence]
    basis = _basis(sides, ~is_prompt)
    digests = _digests(rollout, sides[0]), _digests(trainer, sides[1])
    table = TokenTable(
        labels=rollout.sequences.labels,
        sample_indices=[index for _, index in rollout.sequences.keys()],  # noqa: SIM118 (no dict)
        token_texts={**trainer.sequences.token_texts, **rollout.sequences.token_texts},
        sequence=sequence,
        position=position,
        token_id=ours.token_id.numpy()[our_rows],
        rollout=sides[0],
        trainer=sides[1],
        basis=basis,
        token_class=classify(
            *sides,
            basis=basis,
            is_prompt=is_prompt,
            weights_differ=_known_to_differ(*digests) & (not allow_different_weights),
            epoch_unlisted=(digests[0] == UNLISTED) | (digests[1] == UNLISTED),
        ),
    )
    return table, _coverage(rollout, trainer, our_keys, their_keys)


def _keys(capture: Capture, rows: TokenRows, reference: Capture) -> tuple[Int64s, Int64s]:
    """``(sequence of the reference, position)`` as one integer, and the row that it stands for.

    Rows of sequences that the reference does not hold are left out.
    """
    index = {key: i for i, key in enumerate(reference.sequences.keys())}
    ours = capture.sequences.keys()
    mapped = np.array([index.get(key, -1) for key in ours], dtype=np.int64)[rows.sequence.numpy()]
    kept = (mapped >= 0).nonzero()[0]
    return (mapped[kept] << POSITION_BITS) | rows.position.numpy()[kept], kept


def capture_side(capture: Capture, rows: TokenRows, at: Int64s | None = None) -> Side:
    """One side's columns for the rows ``at``, or for all of them.

    Raises:
        UnusableInput: If a recorded state is no sum of exponentials.
    """
    at = np.arange(len(rows)) if at is None else at
    return side_columns(
        state=state_rows(rows.state, at),
        reported=rows.reported[at],
        reported_status=rows.reported_status[at],
        owner_rank=rows.owner_rank[at],
        weights_epoch=rows.weights_epoch[at],
        all_ranks=rows.all_ranks[at],
        where=str(capture.directory),
    )


def _basis(sides: tuple[Side, Side], sampled: Flags) -> Basis:
    """K where a side was asked for no logprob of any sampled token."""
    asked = [(side.reported_status != ReportedStatus.NOT_REQUESTED)[sampled] for side in sides]
    return "kernel" if any(len(side) and not side.any() for side in asked) else "reported"


def _digests(capture: Capture, side: Side) -> Digests:
    """``[N]`` digest of the weights of each token, `UNLISTED` where nobody says which they were."""
    of_epoch = epoch_weights(capture)
    values, inverse = np.unique(side.weights_epoch, return_inverse=True)
    return np.array([of_epoch.get(int(e), UNLISTED) for e in values] or [""])[inverse]


def _known_to_differ(ours: Digests, theirs: Digests) -> Flags:
    """``[N]`` true where both sides know their weights and they are not the same."""
    unknown = np.isin(ours, (NOT_OBSERVED, UNLISTED)) | np.isin(theirs, (NOT_OBSERVED, UNLISTED))
    return np.asarray((ours != theirs) & ~unknown)


def _coverage(rollout: Capture, trainer: Capture, ours: Int64s, theirs: Int64s) -> Coverage:
    table = rollout.sequences
    in_both = set(table.keys()) & set(trainer.sequences.keys())
    shared = np.array([key in in_both for key in table.keys()], dtype=bool)  # noqa: SIM118
    prompts = np.array(table.prompt_lengths, dtype=np.int64)
    lengths = np.array([len(ids) for ids in table.token_ids], dtype=np.int64)

    def split(keys: Int64s) -> tuple[Int64s, Int64s]:
        """Sampled and prompt tokens of the sequences that both sides hold."""
        keys = keys[shared[keys >> POSITION_BITS]]
        is_prompt = (keys & ((1 << POSITION_BITS) - 1)) < prompts[keys >> POSITION_BITS]
        return keys[~is_prompt], keys[is_prompt]

    (our_tokens, our_prompts), (their_tokens, their_prompts) = split(ours), split(theirs)
    both = len(np.intersect1d(our_tokens, their_tokens))
    expected = int((lengths - prompts)[shared].sum())
    sides = {"rollout": rollout, "trainer": trainer}
    return Coverage(
        num_sequences=len(in_both),
        expected_tokens=expected,
        only_rollout=len(our_tokens) - both,
        only_trainer=len(their_tokens) - both,
        on_neither=expected - len(our_tokens) - len(their_tokens) + both,
        prompt_rows_on_one_side=len(np.setxor1d(our_prompts, their_prompts)),
        incomplete_sequences={name: len(c.incomplete) for name, c in sides.items()},
        lost_rows={
            f"{name}: {reason}": n for name, c in sides.items() for reason, n in c.lost.items()
        },
    )
