"""Reading a sealed capture: small columns merged over ranks, logits block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk_align.capture.header import header_from_json
from rlk_align.capture.merge_ranks import TokenRows, merge_ranks
from rlk_align.capture.parts import (
    PartColumns,
    PartEntry,
    check_token_ids,
    read_columns,
    read_logits,
    verify_part,
)
from rlk_align.capture.rows import SCHEMA, state_from_tensors
from rlk_align.capture.seal import MANIFEST_FILE, Progress, manifest_digest
from rlk_align.capture.sequences import SequenceTable, read_sequences
from rlk_align.contract import VocabLayout
from rlk_align.errors import UnusableInput
from rlk_align.files import read_json, sha256_of_file
from rlk_align.json_fields import checked
from rlk_align.provenance import Provenance
from rlk_kernels import State

__all__ = ["Capture", "LogitsBlock", "TokenRows", "open_capture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsBlock:
    """Some rows of one rank's logits, with the state that was recorded for them."""

    path: str
    """The part, relative to the capture."""
    first_row: int
    """Row of the part that the block begins with."""
    tp_rank: int
    vocab_start: int
    token_id: torch.Tensor
    """``[R]`` int32."""
    logits: torch.Tensor
    """``[R, L]`` this rank's real columns in the engine's dtype."""
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A sealed capture. Opening reads no rows; `tokens` and `logits_blocks` do."""

    directory: Path
    role: str
    layout: VocabLayout
    provenance: Provenance
    weights: list[dict[str, Any]]
    parts: list[PartEntry]
    sequences: SequenceTable
    incomplete: list[dict[str, str]]
    """Sequences that were left out because rows of theirs are missing: label and reason."""
    lost: dict[str, int]
    """Rows that workers could not keep, by reason."""

    def tokens(self, *, progress: Progress = iter) -> TokenRows:
        """One row a token, states merged over the tensor-parallel ranks; no logits are read.

        Raises:
            UnusableInput: If a part is altered or inconsistent, or ranks disagree on a token.
        """
        ranks: list[list[PartColumns]] = [[] for _ in range(self.layout.tp_size)]
        for entry in progress(self.parts):
            verify_part(self.directory, entry)
            part = self._columns(entry)
            if entry.rows:
                ranks[entry.tp_rank].append(part)
        return merge_ranks(ranks, self.sequences, self.layout)

    def logits_blocks(
        self, parts: Sequence[PartEntry] | None = None, *, rows: int = 64
    ) -> Iterator[LogitsBlock]:
        """Stream the captured logits of ``parts`` (default: all), at most ``rows`` rows at once.

        Raises:
            UnusableInput: If a part is inconsistent; `tokens` is what verifies the bytes.
        """
        for entry in self.parts if parts is None else parts:
            if not entry.rows:
                continue
            start, end = self.layout.real_bounds(entry.tp_rank)
            columns = self._columns(entry).columns
            for first in range(0, entry.rows, rows):
                last = min(first + rows, entry.rows)
                logits = read_logits(
                    self.directory,
                    entry,
                    first,
                    last,
                    width=end - start,
                    dtype=self.provenance.logits.dtype,
                )
                if logits is None:
                    break
                yield LogitsBlock(
                    path=entry.path,
                    first_row=first,
                    tp_rank=entry.tp_rank,
                    vocab_start=start,
                    token_id=columns["token_id"][first:last],
                    logits=logits,
                    state=state_from_tensors({k: v[first:last] for k, v in columns.items()}),
                )

    def _columns(self, entry: PartEntry) -> PartColumns:
        part = read_columns(self.directory, entry)
        check_token_ids(entry, part, self.layout.vocab_size)
        return part


def open_capture(directory: Path) -> Capture:
    """Open a sealed capture.

    Raises:
        UnusableInput: If it is not sealed, is of another schema, or its manifest or sequence
            table is inconsistent.
    """
    if not directory.is_dir():
        raise UnusableInput(f"{directory}: no such directory; give the directory of a capture")
    if not (directory / MANIFEST_FILE).is_file():
        raise UnusableInput(
            f"{directory} is not a sealed capture (no {MANIFEST_FILE}); finish the run, or seal it "
            f"with: rlk-align seal {directory}"
        )
    manifest: dict[str, Any] = read_json(directory / MANIFEST_FILE)
    try:
        _check_seal(directory, manifest)
        capture = _capture(directory, manifest)
    except UnusableInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableInput(
            f"{directory / MANIFEST_FILE}: incomplete manifest ({error!r})"
        ) from None
    _check_vocabulary(capture)
    return capture


def _check_seal(directory: Path, manifest: dict[str, Any]) -> None:
    if manifest.get("schema") != SCHEMA:
        raise UnusableInput(
            f"{directory}: schema {manifest.get('schema')!r}, but this version reads {SCHEMA!r}"
        )
    if manifest.get("seal") != manifest_digest(manifest):
        raise UnusableInput(
            f"{directory / MANIFEST_FILE}: its content does not match its seal; it was altered "
            "after sealing, capture again"
        )


def _capture(directory: Path, manifest: dict[str, Any]) -> Capture:
    listed = checked(manifest["sequences"], dict[str, Any], f"{MANIFEST_FILE}: sequences")
    path = checked(listed["path"], str, f"{MANIFEST_FILE}: sequences.path")
    sequences_file = directory / path
    if not sequences_file.is_file():
        raise UnusableInput(f"{sequences_file.name}: listed in the capture but absent")
    if sha256_of_file(sequences_file) != listed["sha256"]:
        raise UnusableInput(
            f"{sequences_file.name}: its SHA-256 is not the recorded one; the file was altered "
            "or cut short, capture it again"
        )
    header = header_from_json(manifest, MANIFEST_FILE)
    incomplete = checked(
        manifest["incomplete"], list[dict[str, str]], f"{MANIFEST_FILE}: incomplete"
    )
    return Capture(
        directory=directory,
        role=header.role,
        layout=header.layout,
        provenance=header.provenance,
        weights=header.weights,
        parts=header.parts,
        sequences=read_sequences(sequences_file),
        incomplete=incomplete,
        lost=header.lost,
    )


def _check_vocabulary(capture: Capture) -> None:
    """What a hand-written capture may get wrong and a sealed one of ours cannot."""
    for label, ids in zip(capture.sequences.labels, capture.sequences.token_ids, strict=True):
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < capture.layout.vocab_size:
                raise UnusableInput(
                    f"sequence {label!r}, position {position}: token id {token_id} is outside the "
                    f"vocabulary [0, {capture.layout.vocab_size})"
                )
