"""What a GRPO loss is made of, stated once and compared between ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum

from rlk_align.contract import DeterminismScope, LogprobContract, Role
from rlk_align.contract.fields import checked_integer, checked_member
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json

SCHEMA = "grpo-loss-contract-1"

MAX_WEIGHT = float(2**32)
"""Largest advantage and weight of the KL: with `MAX_LOG_RATIO` all fits float32."""


class AdvantageScale(StrEnum):
    """What a sequence's reward is measured by."""

    MEAN_AND_STD = "mean_and_std"
    """(reward - mean of its group) / (population std of its group + std_epsilon)."""
    MEAN = "mean"
    """reward - mean of its group, as in Dr. GRPO."""


class KlEstimator(StrEnum):
    """How the KL divergence from the reference is estimated at a sampled token."""

    K3 = "k3"
    """exp(x) - 1 - x with x = ref_logprob - logprob."""
    K1 = "k1"
    """logprob - ref_logprob."""


class Normalizer(StrEnum):
    """What the sum over tokens is divided by."""

    ACTIVE_TOKENS = "active_tokens"
    """All active tokens of the batch."""
    SEQUENCE_MEAN = "sequence_mean"
    """Each sequence's active tokens; then the mean over the sequences that have any."""
    CONSTANT = "constant"
    """`LossContract.constant`, for example sequences * longest completion as in Dr. GRPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContract:
    """What a rank's loss is made of: the contract of its logprobs, and the settings of the loss.

    The settings are the same on every rank. Enums take their strings.

    Raises:
        UnusableInput: If a field lies outside its range or contradicts another.
    """

    logprob: LogprobContract
    """Of this rank's rows and columns; its mask says which rows the loss is made of. Its role is
    train and its determinism cross-layout, as the loss promises no less."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low; 0 to 1."""
    clip_high: float = 0.2
    """And above 1 + clip_high; 0 or more."""
    advantage: AdvantageScale = AdvantageScale.MEAN_AND_STD
    std_epsilon: float = 1e-6
    """Added to a group's standard deviation."""
    group_size: int | None = None
    """Sequences that every group must have; None for any number."""
    kl: KlEstimator | None = None
    """None for a loss without reference."""
    kl_weight: float = 0.0
    """Weight of the KL in the loss (beta); 0 reports the KL and leaves it out of the loss."""
    normalizer: Normalizer = Normalizer.ACTIVE_TOKENS
    constant: float | None = None
    """The divisor of Normalizer.CONSTANT, 1 or more; None otherwise."""

    def __post_init__(self) -> None:
        self._check_logprob()
        object.__setattr__(
            self, "advantage", checked_member("advantage", AdvantageScale, self.advantage)
        )
        object.__setattr__(
            self, "normalizer", checked_member("normalizer", Normalizer, self.normalizer)
        )
        if self.kl is not None:
            object.__setattr__(self, "kl", checked_member("kl", KlEstimator, self.kl))
        elif self.kl_weight:
            raise UnusableInput(
                f"kl_weight is {self.kl_weight}, but kl is None; choose an estimator, k3 or k1"
            )
        _check_number("clip_low", self.clip_low, 0, 1)
        _check_number("clip_high", self.clip_high, 0, MAX_WEIGHT)
        _check_number("std_epsilon", self.std_epsilon, 0, MAX_WEIGHT)
        _check_number("kl_weight", self.kl_weight, 0, MAX_WEIGHT)
        if self.group_size is not None:
            checked_integer("group_size", self.group_size, low=1)
        self._check_constant()

    def _check_logprob(self) -> None:
        if not isinstance(self.logprob, LogprobContract):
            raise UnusableInput(f"logprob should be a LogprobContract, got {self.logprob!r}")
        if self.logprob.role != Role.TRAIN:
            raise UnusableInput(
                f"the logprobs of a loss have role train, got {self.logprob.role}; "
                "make a contract for training"
            )
        if self.logprob.determinism_scope != DeterminismScope.CROSS_LAYOUT_BITWISE:
            raise UnusableInput(
                "a loss has the same bits on every layout, but its logprobs are promised for "
                f"{self.logprob.determinism_scope}; pass {DeterminismScope.CROSS_LAYOUT_BITWISE}"
            )

    def _check_constant(self) -> None:
        if self.normalizer == Normalizer.CONSTANT:
            _check_number("constant", self.constant, 1, 2.0**53)
        elif self.constant is not None:
            raise UnusableInput(
                f"constant is {self.constant}, but the normalizer is {self.normalizer}; "
                "leave constant out, or pass normalizer='constant'"
            )

    def settings(self) -> dict[str, object]:
        """All that is the same on every rank of the batch, as strict JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "logprob"}
        return {**own, "vocab_size": self.logprob.sharding.layout.vocab_size}

    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings as canonical JSON."""
        return hashlib.sha256(canonical_json(self.settings())).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """Everything as strict JSON, for provenance."""
        return {"schema": SCHEMA, **self.settings(), "logprob": self.logprob.to_dict()}


def _check_number(name: str, value: float | None, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # false of NaN, too
    if not is_number or value is None or not low <= value <= high:
        raise UnusableInput(f"{name} should be a number from {low:g} to {high:g}, got {value!r}")
