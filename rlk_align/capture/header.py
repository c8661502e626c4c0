"""What worker.json and capture.json have in common, with every type checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlk_align.capture.parts import PartEntry
from rlk_align.capture.writer import Role
from rlk_align.contract import VocabLayout, layout_from_bounds
from rlk_align.errors import UnusableInput
from rlk_align.json_fields import checked, from_json
from rlk_align.provenance import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Of one worker, or of a whole capture."""

    role: Role
    layout: VocabLayout
    provenance: Provenance
    weights: list[dict[str, Any]]
    parts: list[PartEntry]
    lost: dict[str, int]


def header_from_json(value: Mapping[str, Any], where: str) -> Header:
    """The header in ``value``, the content of the file ``where``.

    Raises:
        UnusableInput: If a field holds something else than docs/capture-format.md says.
        KeyError: If one is missing.
        TypeError: If ``parts`` is no list.
    """
    layout = _layout(value["layout"], where)
    parts = [from_json(PartEntry, part, f"{where}: part") for part in value["parts"]]
    for entry in parts:
        if entry.tp_rank >= layout.tp_size:
            raise UnusableInput(
                f"{entry.path}: rank {entry.tp_rank}, but the layout has {layout.tp_size} ranks"
            )
    return Header(
        role=checked(value["role"], Role, f"{where}: role"),
        layout=layout,
        provenance=from_json(Provenance, value["provenance"], f"{where}: provenance"),
        weights=_weights(value["weights"], where),
        parts=parts,
        lost=checked(value["lost"], dict[str, int], f"{where}: lost"),
    )


def _layout(value: Mapping[str, Any], where: str) -> VocabLayout:
    layout = layout_from_bounds(value["vocab_size"], value["bounds"])
    if value["padded_size"] != layout.padded_size:
        raise UnusableInput(
            f"{where}: padded_size is {value['padded_size']!r}, but the bounds end at column "
            f"{layout.padded_size}; write the end of the last rank's bounds"
        )
    return layout


def _weights(value: object, where: str) -> list[dict[str, Any]]:
    weights: list[dict[str, Any]] = checked(value, list[dict[str, Any]], f"{where}: weights")
    for entry in weights:
        checked(entry["digest"], str, f"{where}: a weights digest")
        if checked(entry["epoch"], int, f"{where}: a weights epoch") < 0:
            raise UnusableInput(f"{where}: weights epoch {entry['epoch']} should be 0 or more")
    return weights
