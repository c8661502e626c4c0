"""The table that captures and plain files meet at: one row for each token that both sides have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlk_align.capture.rows import ReportedStatus

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.integer]
Float32s = npt.NDArray[np.float32]
Basis = Literal["reported", "kernel"]
SIDES = ("rollout", "trainer")


class KernelStatus(IntEnum):
    """Why K, the kernel's logprob of an engine's logits, is there or is not."""

    OK = 0
    INVALID_LOGIT = 1
    """A logit is NaN, +inf or above 8192."""
    NO_LIVE_COLUMN = 2
    """Every column is masked."""
    TARGET_NOT_SEEN = 3
    """No rank's columns held the token."""
    SHARD_MISSING = 4
    """A rank's row for the same computation is not there."""
    TARGET_MASKED = 5
    """The token's own logit is masked, so K is -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side says of N tokens."""

    owner_rank: Integers
    """``[N]`` tensor-parallel rank whose columns hold the token."""
    weights_epoch: Integers
    """``[N]``."""
    reported: Float32s
    """``[N]`` the engine's own logprob in nats; read only where the status is valid."""
    reported_status: Integers
    """``[N]`` `ReportedStatus`."""
    logprob: Float32s
    """``[N]`` K, the kernel's logprob of the engine's logits in nats; read only where OK."""
    lse: Float32s
    """``[N]`` the kernel's log-sum-exp in nats; read only where OK."""
    kernel_status: Integers
    """``[N]`` `KernelStatus`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """N tokens of S sequences, sorted by sequence and position."""

    labels: list[str]
    """``[S]`` the rollout's name of each sequence."""
    sample_indices: list[int]
    """``[S]`` place of each sequence among those with the same token ids."""
    token_texts: dict[int, str]
    """Printable text of token ids; may be empty."""
    sequence: Integers
    """``[N]`` index into the labels."""
    position: Integers
    """``[N]`` 0-based in the whole sequence."""
    token_id: Integers
    """``[N]``."""
    rollout: Side
    trainer: Side
    basis: Basis
    """What d is the difference of: the reported values, or K where nothing was reported."""
    token_class: Integers
    """``[N]`` index into `TOKEN_CLASSES`; no statistic reads a token that is not compared."""

    def __len__(self) -> int:
        return len(self.token_id)

    @property
    def compared(self) -> Flags:
        """``[N]`` true where the token enters the statistics."""
        return np.asarray(self.token_class == 0)

    def class_counts(self) -> dict[str, int]:
        """Number of tokens of each class that occurs; the compared ones always stand first."""
        counts = np.bincount(self.token_class, minlength=len(TOKEN_CLASSES)).tolist()
        named = dict(zip(TOKEN_CLASSES, counts, strict=True))
        return {name: n for name, n in named.items() if n or name == TOKEN_CLASSES[0]}


def _words(status: IntEnum) -> str:
    return status.name.lower().replace("_", " ")


PROMPT_CLASS = "prompt token"
WEIGHTS_CLASS = "weights differ between the sides"
UNLISTED_CLASS = "weights epoch not listed"
TOKEN_CLASSES: tuple[str, ...] = (
    "compared",
    PROMPT_CLASS,
    WEIGHTS_CLASS,
    UNLISTED_CLASS,
    *(f"{side} reported: {_words(s)}" for side in SIDES for s in ReportedStatus if s),
    *(f"{side} K: {_words(s)}" for side in SIDES for s in KernelStatus if s),
)
"""Compared, or why not; of several reasons the first in this order."""


def classify(
    rollout: Side,
    trainer: Side,
    *,
    basis: Basis,
    is_prompt: Flags,
    weights_differ: Flags,
    epoch_unlisted: Flags,
) -> Integers:
    """``[N]`` index into `TOKEN_CLASSES` of every token."""
    reasons = {
        PROMPT_CLASS: is_prompt,
        WEIGHTS_CLASS: weights_differ,
        UNLISTED_CLASS: epoch_unlisted,
    }
    sides = dict(zip(SIDES, (rollout, trainer), strict=True))
    for name, side in sides.items():
        for reported in ReportedStatus:
            if reported and basis == "reported":
                reasons[f"{name} reported: {_words(reported)}"] = side.reported_status == reported
        for kernel in KernelStatus:
            if kernel:
                reasons[f"{name} K: {_words(kernel)}"] = side.kernel_status == kernel
    classes = np.zeros(len(is_prompt), dtype=np.int8)
    # the first reason is written last, over the others
    for name in reversed(TOKEN_CLASSES):
        if name in reasons:
            classes[reasons[name]] = TOKEN_CLASSES.index(name)
    return classes


def status_counts(status: Integers, names: type[IntEnum]) -> dict[str, int]:
    """Number of tokens of each status that occurs, by its name in words."""
    return {_words(name): n for name in names if (n := int((status == name).sum()))}
