"""Both sides' provenance as flat fields next to each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlk_align.capture import Capture

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPair:
    """One field of the provenance on both sides, as text."""

    field: str
    """Dotted, such as ``software.torch``."""
    rollout: str
    trainer: str

    @property
    def differs(self) -> bool:
        """Whether the two sides say different things."""
        return self.rollout != self.trainer


def capture_facts(capture: Capture) -> dict[str, Any]:
    """Everything a capture says of where its numbers come from."""
    return {
        **capture.provenance.to_json(),
        "command": " ".join(capture.provenance.command),
        "role": capture.role,
        "layout": capture.layout.to_json(),
        "sampling": _sampling(capture),
        "weights": capture.weights,
    }


def side_by_side(rollout: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[FieldPair]:
    """Every field that either side has, those that differ first, then by name."""
    ours, theirs = dict(_flat(rollout)), dict(_flat(trainer))
    pairs = [
        FieldPair(field=name, rollout=ours.get(name, ABSENT), trainer=theirs.get(name, ABSENT))
        for name in sorted(ours.keys() | theirs.keys())
    ]
    return sorted(pairs, key=lambda pair: not pair.differs)


def _sampling(capture: Capture) -> dict[str, str]:
    """Each sampling parameter's values over the sequences, every one that occurs."""
    values: dict[str, dict[str, None]] = {}
    for parameters in capture.sequences.sampling:
        for name, value in parameters.items():
            values.setdefault(name, {})[_text(value)] = None
    return {name: " | ".join(found) for name, found in values.items()}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(inner)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
