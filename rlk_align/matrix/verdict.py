"""One verdict over many artifacts: each passed by itself, and all have the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rlk_align.errors import UnusableInput
from rlk_align.matrix.artifact import inputs_key, read_artifact
from rlk_align.matrix.evaluation import Check


class MatrixOutcome(IntEnum):
    """How a matrix came out; its value is the command's exit status."""

    PASSED = 0
    FAILED = 1
    INCONCLUSIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixVerdict:
    """Of all artifacts together."""

    checks: tuple[Check, ...]
    artifacts: tuple[dict[str, Any], ...]
    missing: tuple[str, ...]
    """Artifacts that the plan asks for and nobody has written."""

    @property
    def outcome(self) -> MatrixOutcome:
        """Failed if anything failed; inconclusive if anything is missing."""
        if not all(check.passed for check in self.checks):
            return MatrixOutcome.FAILED
        return MatrixOutcome.INCONCLUSIVE if self.missing else MatrixOutcome.PASSED

    @property
    def sentence(self) -> str:
        """What it comes to."""
        failed = next((check for check in self.checks if not check.passed), None)
        if failed is not None:
            return f"{failed.name}: {failed.detail}"
        if self.missing:
            return f"{len(self.missing)} cases have not run, such as {self.missing[0]}"
        return "; ".join(check.detail for check in self.checks)


def judge(paths: Sequence[Path]) -> MatrixVerdict:
    """The verdict over the artifacts at these paths; one that is absent has not run.

    Raises:
        UnusableInput: If a file is no artifact, or there is nothing to judge.
    """
    if not paths:
        raise UnusableInput("no artifact is asked for, so nothing is proved; plan or run a case")
    artifacts = tuple(read_artifact(path) for path in paths if path.exists())
    missing = tuple(path.stem for path in paths if not path.exists())
    checks = (_cases_check(artifacts), _same_bits_check(artifacts)) if artifacts else ()
    return MatrixVerdict(checks=checks, artifacts=artifacts, missing=missing)


def case_name(artifact: dict[str, Any]) -> str:
    """A case in a few words."""
    case = artifact["case"]
    return f"TP {case['tp']} x CP {case['cp']} {case['layout']} {case['backend']}"


def _cases_check(artifacts: Sequence[dict[str, Any]]) -> Check:
    """Every case passed its own checks."""
    for artifact in artifacts:
        failed = next((check for check in artifact["checks"] if not check["passed"]), None)
        if failed is not None:
            return Check(
                "cases", False, f"{case_name(artifact)}: {failed['name']}: {failed['detail']}"
            )
    return Check("cases", True, f"{len(artifacts)} of {len(artifacts)} cases passed")


def _same_bits_check(artifacts: Sequence[dict[str, Any]]) -> Check:
    """Equal inputs have equal fingerprints, whatever the topology, layout and backend."""
    firsts: dict[str, dict[str, Any]] = {}
    for artifact in artifacts:
        first = firsts.setdefault(inputs_key(artifact), artifact)
        for name in ("logprob_sha256", "lse_sha256"):
            ours, theirs = artifact["fingerprints"][name], first["fingerprints"][name]
            if ours is None or ours != theirs:
                return Check(
                    "same_bits",
                    False,
                    f"{case_name(artifact)} has {name} {_short(ours)}, "
                    f"{case_name(first)} {_short(theirs)}",
                )
    sets = "" if len(firsts) == 1 else f" for each of {len(firsts)} sets of rows"
    return Check("same_bits", True, f"one fingerprint of the logprobs and one of the LSEs{sets}")


def _short(digest: str | None) -> str:
    return "none" if digest is None else f"{digest[:12]}..."
