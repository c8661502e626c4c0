"""What one worker writes: self-contained parts, and an index of them that is always whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from rlk_align.capture.rows import SCHEMA, Rows
from rlk_align.contract import VocabLayout
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json, metadata_entry, write_atomically
from rlk_align.provenance import Provenance

PART_BYTES = 64 << 20
WORKER_FILE = "worker.json"
Role = Literal["rollout", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Which worker of the topology; its folder is named after it."""

    tp_rank: int
    dp_rank: int = 0

    @property
    def name(self) -> str:
        """Such as ``dp0-tp1``."""
        return f"dp{self.dp_rank}-tp{self.tp_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A sequence as the engine began it."""

    token_ids: list[int]
    sampling: dict[str, Any]


class CaptureWriter:
    """Collects rows and writes them in parts of about ``part_bytes``.

    One thread at a time. Every part appears whole or not at all, and ``worker.json`` lists the
    parts with their SHA-256 after each. Nothing is a capture until `seal_capture` has run.

    Raises:
        UnusableInput: If the worker's folder exists already.
    """

    def __init__(
        self,
        directory: Path,
        *,
        role: Role,
        layout: VocabLayout,
        worker: WorkerIdentity,
        provenance: Provenance,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._folder = directory / worker.name
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:
            raise UnusableInput(
                f"{self._folder} exists already; give every capture a directory of its own"
            ) from None
        self._layout, self._worker, self._part_bytes = layout, worker, part_bytes
        self._index: dict[str, Any] = {
            "schema": SCHEMA,
            "role": role,
            "worker": asdict(worker),
            "layout": layout.to_json(),
            "provenance": provenance.to_json(),
            "weights": [],
            "parts": [],
            "lost": {},
            "closed": False,
        }
        self._new_prompts: dict[str, Prompt] = {}
        self._labels: set[str] = set()
        self._pending: list[Rows] = []
        self._pending_bytes = 0
        self._write_index()

    def register(
        self, label: str, prompt_token_ids: Sequence[int], sampling: dict[str, Any] | None = None
    ) -> None:
        """Announce a sequence before its first row.

        Raises:
            ValueError: If the label is taken.
        """
        if label in self._labels:
            raise ValueError(f"sequence {label!r} is registered already; labels are unique")
        self._labels.add(label)
        self._new_prompts[label] = Prompt(token_ids=list(prompt_token_ids), sampling=sampling or {})

    def note_weights(self, epoch: int, *, digest: str) -> None:
        """Record which weights an epoch stands for."""
        self._index["weights"].append({"epoch": epoch, "digest": digest})

    def note_lost(self, reason: str, rows: int) -> None:
        """Count rows that could not be kept; the comparator reports them as not observed."""
        self._index["lost"][reason] = self._index["lost"].get(reason, 0) + rows

    def append(self, rows: Rows) -> None:
        """Take rows; writes a part once enough have come together.

        Raises:
            ValueError: If a label is not registered, a token id is outside the vocabulary, or
                the logits are not as wide as this rank's real columns.
        """
        self._check(rows)
        if self._pending and (self._pending[0].logits is None) != (rows.logits is None):
            self.flush()
        self._pending.append(rows)
        self._pending_bytes += sum(t.numel() * t.element_size() for t in rows.tensors().values())
        if self._pending_bytes >= self._part_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one part."""
        if self._pending or self._new_prompts:
            pending, prompts = self._pending, self._new_prompts
            self._pending, self._new_prompts, self._pending_bytes = [], {}, 0
            content = _part(pending, prompts)
            path = self._folder / f"part-{len(self._index['parts']):05d}.safetensors"
            write_atomically(path, content)
            self._index["parts"].append(
                {
                    "path": f"{self._folder.name}/{path.name}",
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "bytes": len(content),
                    "rows": sum(len(rows.labels) for rows in pending),
                }
            )
        self._write_index()

    def close(self) -> None:
        """Write the rest and mark this worker as complete."""
        self._index["closed"] = True
        self.flush()

    def _write_index(self) -> None:
        write_atomically(self._folder / WORKER_FILE, canonical_json(self._index, indent=1))

    def _check(self, rows: Rows) -> None:
        unknown = set(rows.labels) - self._labels
        if unknown:
            raise ValueError(f"sequence {min(unknown)!r} has rows but was never registered")
        outside = (rows.token_id < 0) | (rows.token_id >= self._layout.vocab_size)
        if outside.any():
            row = int(outside.nonzero()[0, 0])
            raise ValueError(
                f"sequence {rows.labels[row]!r}, position {int(rows.position[row])}: token id "
                f"{int(rows.token_id[row])} is outside the vocabulary "
                f"[0, {self._layout.vocab_size})"
            )
        start, end = self._layout.real_bounds(self._worker.tp_rank)
        if rows.logits is not None and rows.logits.shape != (len(rows.labels), end - start):
            raise ValueError(
                f"the logits have shape {tuple(rows.logits.shape)}, but this rank's real columns "
                f"are [{start}, {end}); cut padding off, pass [{len(rows.labels)}, {end - start}]"
            )


def _part(pending: list[Rows], prompts: dict[str, Prompt]) -> bytes:
    """The bytes of a part: rows, and the prompts of the sequences first met in it."""
    labels = list(dict.fromkeys(label for rows in pending for label in rows.labels))
    index = {label: i for i, label in enumerate(labels)}
    sequence = [index[label] for rows in pending for label in rows.labels]
    columns = [rows.tensors() for rows in pending]
    tensors = {
        name: torch.cat([c[name] for c in columns]) for name in (columns[0] if columns else ())
    }
    tensors["sequence"] = torch.tensor(sequence, dtype=torch.int32)
    flat = [i for prompt in prompts.values() for i in prompt.token_ids]
    tensors["prompt_token_ids"] = torch.tensor(flat, dtype=torch.int32)
    new = [
        {"label": label, "tokens": len(prompt.token_ids), "sampling": prompt.sampling}
        for label, prompt in prompts.items()
    ]
    metadata = {
        "schema": SCHEMA,
        "labels": labels,
        "prompts": new,
    }
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    content: bytes = save(contiguous, metadata_entry(metadata))
    return content
