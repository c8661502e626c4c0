"""The same sequences on both sides, or the first place where they are not."""

from __future__ import annotations

from rlk_align.capture import Capture, SequenceTable
from rlk_align.errors import UnusableInput


def check_sequences(rollout: Capture, trainer: Capture) -> None:
    """Both sides must hold the same sequences, but for those that a side lists as incomplete.

    Raises:
        UnusableInput: With the first difference: sequence, token, and what each side has there.
    """
    ours, theirs = rollout.sequences.keys(), trainer.sequences.keys()
    in_both = set(ours) & set(theirs)
    only_ours = [i for i, key in enumerate(ours) if key not in in_both]
    only_theirs = [i for i, key in enumerate(theirs) if key not in in_both]
    if len(only_ours) > len(trainer.incomplete) or len(only_theirs) > len(rollout.incomplete):
        raise UnusableInput(
            f"{_first_difference(rollout.sequences, trainer.sequences, only_ours, only_theirs)}; "
            "have the trainer replay this rollout's token ids"
        )


def _first_difference(
    rollout: SequenceTable, trainer: SequenceTable, only_ours: list[int], only_theirs: list[int]
) -> str:
    """A sentence on the first sequence that one side has and the other has not."""
    partner = {label: i for i, label in enumerate(trainer.labels)}
    for i in only_ours:
        # the same label, or else the same place, is where a reader looks first
        j = partner.get(rollout.labels[i], i if i < len(trainer) else -1)
        if j in only_theirs:
            return sequence_difference(
                rollout.labels[i], rollout.token_ids[i], trainer.token_ids[j]
            )
    side, other = ("rollout", "trainer") if only_ours else ("trainer", "rollout")
    label = rollout.labels[only_ours[0]] if only_ours else trainer.labels[only_theirs[0]]
    return (
        f"only {side} has the token ids of its sequence {label} ({side} holds "
        f"{len(rollout if only_ours else trainer)} sequences, {other} "
        f"{len(trainer if only_ours else rollout)})"
    )


def sequence_difference(label: str, rollout: list[int], trainer: list[int]) -> str:
    """Where two lists of token ids that are not equal differ first.

    Example:
        ``sequence 17 differs at token 1: rollout has 785, trainer has 12``.
    """
    for index, (ours, theirs) in enumerate(zip(rollout, trainer, strict=False)):
        if ours != theirs:
            return (
                f"sequence {label} differs at token {index}: rollout has {ours}, "
                f"trainer has {theirs}"
            )
    return (
        f"sequence {label} has {len(rollout)} tokens in rollout and {len(trainer)} in trainer, "
        f"the first {min(len(rollout), len(trainer))} are equal"
    )
