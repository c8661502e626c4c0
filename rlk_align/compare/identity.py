"""Identity before numbers: what must be the same on both sides, checked field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlk_align.capture import Capture
from rlk_align.compare.sequence_identity import check_sequences
from rlk_align.errors import UnusableInput
from rlk_align.model_identity import architecture_difference
from rlk_align.provenance import NOT_OBSERVED
from rlk_kernels import KERNEL_SPEC

Architecture = dict[str, Any] | Literal["not observed"]
Outcome = Literal["same", "differs", "not observed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityLine:
    """One thing that was held side against side."""

    what: str
    rollout: str
    trainer: str
    outcome: Outcome
    """``differs`` stands only where a difference is allowed; any other one is an error."""


def check_identity(
    rollout: Capture, trainer: Capture, *, allow_different_weights: bool
) -> list[IdentityLine]:
    """Everything that was checked, if the two captures are of the same thing.

    Raises:
        UnusableInput: With the first difference that makes numbers meaningless.
    """
    check_roles(rollout, trainer)
    ours, theirs = rollout.provenance, trainer.provenance
    _check_kernel(rollout, trainer)
    lines = [
        identity_line("role", rollout.role, trainer.role),
        _equal("vocabulary size", rollout.layout.vocab_size, trainer.layout.vocab_size),
        identity_line("padded vocabulary", rollout.layout.padded_size, trainer.layout.padded_size),
        identity_line("columns of each rank", _bounds(rollout), _bounds(trainer)),
        _architecture(ours.model.architecture, theirs.model.architecture),
        _weights(rollout, trainer, allow_different_weights),
        _equal("tokenizer", ours.model.tokenizer_digest, theirs.model.tokenizer_digest),
        _equal("stage of the logits", ours.logits.stage, theirs.logits.stage),
        identity_line("dtype of the logits", ours.logits.dtype, theirs.logits.dtype),
        _equal("kernel", ours.kernel["spec"], theirs.kernel["spec"]),
        identity_line(
            "reported distribution", ours.reported.distribution, theirs.reported.distribution
        ),
    ]  # fmt: skip
    check_sequences(rollout, trainer)
    return [*lines, identity_line("sequences", len(rollout.sequences), len(trainer.sequences))]


def check_roles(rollout: Capture, trainer: Capture) -> None:
    """Two captures of one role may be compared; of two roles the rollout comes first."""
    if (rollout.role, trainer.role) == ("trainer", "rollout"):
        raise UnusableInput(
            f"{rollout.directory} is the trainer's capture and {trainer.directory} the rollout's; "
            "swap them, the rollout comes first"
        )


def epoch_weights(capture: Capture) -> dict[int, str]:
    """Digest of the weights that each epoch stands for; one epoch, 0, where none was noted."""
    noted = {int(entry["epoch"]): str(entry["digest"]) for entry in capture.weights}
    return noted or {0: capture.provenance.model.weights_digest}


def _check_kernel(*captures: Capture) -> None:
    for capture in captures:
        spec = capture.provenance.kernel.get("spec")
        if spec != KERNEL_SPEC:
            raise UnusableInput(
                f"{capture.directory}: its states are of kernel {spec!r}, but this version "
                f"finishes {KERNEL_SPEC!r}; capture again with this version"
            )


def identity_line(what: str, rollout: object, trainer: object) -> IdentityLine:
    """A difference that is shown and allowed."""
    outcome: Outcome = "same" if rollout == trainer else "differs"
    if any(NOT_OBSERVED in str(side) for side in (rollout, trainer)):
        outcome = "not observed"
    return IdentityLine(what=what, rollout=str(rollout), trainer=str(trainer), outcome=outcome)


def _equal(what: str, rollout: object, trainer: object) -> IdentityLine:
    """A difference that ends the comparison, where both sides were observed."""
    line = identity_line(what, rollout, trainer)
    if line.outcome == "differs":
        raise UnusableInput(
            f"the {what} differs: rollout has {line.rollout}, trainer has {line.trainer}; "
            "compare captures of the same model"
        )
    return line


def _architecture(ours: Architecture, theirs: Architecture) -> IdentityLine:
    if isinstance(ours, str) or isinstance(theirs, str):
        return identity_line("architecture", _fields(ours), _fields(theirs))
    field = architecture_difference(ours, theirs)
    if field is not None:
        raise UnusableInput(
            f"the models differ: config field {field} is {ours.get(field, 'absent')!r} in rollout "
            f"and {theirs.get(field, 'absent')!r} in trainer; compare captures of the same model"
        )
    return identity_line("architecture", _fields(ours), _fields(theirs))


def _fields(architecture: Architecture) -> str:
    known = architecture and not isinstance(architecture, str)
    return f"{len(architecture)} config fields" if known else NOT_OBSERVED


def _weights(rollout: Capture, trainer: Capture, allowed: bool) -> IdentityLine:
    ours, theirs = (sorted(set(epoch_weights(c).values())) for c in (rollout, trainer))
    line = identity_line("weights", " | ".join(ours), " | ".join(theirs))
    # several epochs that overlap are judged token by token
    if line.outcome == "differs" and not set(ours) & set(theirs) and not allowed:
        raise UnusableInput(
            f"the weights differ: rollout has {_short(ours)}, trainer has {_short(theirs)}; load "
            "the same checkpoint on both sides, or pass --allow-different-weights"
        )
    return line


def _bounds(capture: Capture) -> str:
    return " ".join(f"[{start}, {end})" for start, end in capture.layout.bounds)


def _short(digests: list[str]) -> str:
    return " | ".join(digest[:12] for digest in digests)
