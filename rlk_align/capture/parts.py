"""Reading one part: verified, then its small columns or some rows of its logits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlk_align.capture.rows import SCHEMA, SMALL_COLUMNS, ReportedStatus
from rlk_align.capture.writer import Prompt
from rlk_align.errors import UnusableInput
from rlk_align.files import METADATA_KEY, parse_json, sha256_of_file
from rlk_align.json_fields import checked

PART_PATH = re.compile(r"dp(\d+)-tp(\d+)/[^/]+")

# the name in a safetensors file -> the name in the provenance
LOGITS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """A part as the index of its worker lists it.

    Raises:
        UnusableInput: If the path is not that of a file in a worker's folder.
    """

    path: str
    """Relative to the capture, such as ``dp0-tp1/part-00000.safetensors``."""
    sha256: str
    bytes: int
    rows: int

    def __post_init__(self) -> None:
        if not PART_PATH.fullmatch(self.path):
            raise UnusableInput(
                f"part {self.path!r}: a path like dp0-tp1/part-00000.safetensors is expected"
            )

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank in the folder's name."""
        return self._ranks()[0]

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank in the folder's name."""
        return self._ranks()[1]

    def _ranks(self) -> tuple[int, int]:
        folder = PART_PATH.fullmatch(self.path)
        assert folder is not None
        return int(folder[1]), int(folder[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartColumns:
    """Everything of a part but the logits."""

    labels: list[str]
    """Names that the ``sequence`` column counts into."""
    columns: dict[str, torch.Tensor]
    prompts: dict[str, Prompt]


def verify_part(directory: Path, entry: PartEntry) -> None:
    """Read the file once and hold its SHA-256 against the index.

    Raises:
        UnusableInput: If the file is absent, cut short or altered.
    """
    path = directory / entry.path
    if not path.is_file():
        raise UnusableInput(f"{entry.path}: listed in the capture but absent; copy it whole")
    size = path.stat().st_size
    if size != entry.bytes:
        raise UnusableInput(
            f"{entry.path}: {size} bytes, but {entry.bytes} were written; the file was cut short "
            "or altered, capture it again"
        )
    if sha256_of_file(path) != entry.sha256:
        raise UnusableInput(
            f"{entry.path}: its SHA-256 is not the recorded one; the file was altered, capture "
            "it again"
        )


def read_columns(directory: Path, entry: PartEntry) -> PartColumns:
    """The small columns of a verified part.

    Raises:
        UnusableInput: If the part is no safetensors file, or a column is missing or has another
            dtype, length or range than it should.
    """
    try:
        metadata, tensors = _metadata_and_columns(directory, entry)
        labels = checked(metadata["labels"], list[str], f"{entry.path}: labels")
        prompts = _prompts(metadata["prompts"], tensors.pop("prompt_token_ids"), entry)
    except UnusableInput:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableInput(
            f"{entry.path}: not a part ({error}); docs/capture-format.md says what it must hold"
        ) from None
    _check_columns(tensors, entry, len(labels))
    return PartColumns(labels=labels, columns=tensors, prompts=prompts)


def _metadata_and_columns(
    directory: Path, entry: PartEntry
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(directory / entry.path, framework="pt") as part:
        metadata: dict[str, Any] = parse_json((part.metadata() or {}).get(METADATA_KEY, "{}"))
        if metadata.get("schema") != SCHEMA:
            raise UnusableInput(
                f"{entry.path}: schema {metadata.get('schema')!r}; this version reads {SCHEMA!r}"
            )
        present = set(part.keys())
        needed = {*SMALL_COLUMNS, "prompt_token_ids"} if entry.rows else {"prompt_token_ids"}
        if missing := sorted(needed - present):
            raise UnusableInput(f"{entry.path}: no tensor {missing[0]!r}")
        return metadata, {name: part.get_tensor(name) for name in needed}


def _check_columns(tensors: dict[str, torch.Tensor], entry: PartEntry, num_labels: int) -> None:
    for name, tensor in tensors.items():
        dtype, tail = SMALL_COLUMNS[name]
        if tensor.dtype != dtype or tensor.shape != (entry.rows, *tail):
            raise UnusableInput(
                f"{entry.path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, but {dtype} "
                f"{(entry.rows, *tail)} is expected"
            )
    if not entry.rows:
        return
    for name, end in (
        ("sequence", num_labels),
        ("position", torch.iinfo(torch.int32).max),
        ("step", torch.iinfo(torch.int64).max),
        ("weights_epoch", torch.iinfo(torch.int32).max),
        ("reported_status", len(ReportedStatus)),
    ):
        outside = (tensors[name] < 0) | (tensors[name] >= end)
        if outside.any():
            row = int(outside.nonzero()[0, 0])
            raise UnusableInput(
                f"{entry.path}, row {row}: {name} {int(tensors[name][row])} is not in [0, {end})"
            )


def check_token_ids(entry: PartEntry, part: PartColumns, vocab_size: int) -> None:
    """Every row's token must be in the vocabulary, also where its sequence is in no table.

    Raises:
        UnusableInput: Naming the first row whose token is not.
    """
    if not entry.rows:
        return
    ids = part.columns["token_id"]
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        row = int(outside.nonzero()[0, 0])
        raise UnusableInput(
            f"{entry.path}, row {row}: token id {int(ids[row])} is outside the vocabulary "
            f"[0, {vocab_size})"
        )


def read_logits(
    directory: Path, entry: PartEntry, start: int, end: int, *, width: int, dtype: str
) -> torch.Tensor | None:
    """Rows ``[start, end)`` of a part's logits, or None where the part keeps states only.

    Raises:
        UnusableInput: If the logits are not ``[rows, width]``, or not of ``dtype``, which the
            provenance says.
    """
    with safe_open(directory / entry.path, framework="pt") as part:
        if "logits" not in part.keys():  # noqa: SIM118 (not a dict)
            return None
        rows = part.get_slice("logits")
        if tuple(rows.get_shape()) != (entry.rows, width):
            raise UnusableInput(
                f"{entry.path}: logits have shape {tuple(rows.get_shape())}, but the layout says "
                f"{(entry.rows, width)}"
            )
        found = LOGITS_DTYPES.get(rows.get_dtype())
        if found is None or found != dtype:
            raise UnusableInput(
                f"{entry.path}: logits are {found or rows.get_dtype()}, but the provenance says "
                f"{dtype}; write one of {', '.join(LOGITS_DTYPES.values())}, and say which"
            )
        block: torch.Tensor = rows[start:end]
        return block


def _prompts(
    entries: list[dict[str, Any]], flat: torch.Tensor, part: PartEntry
) -> dict[str, Prompt]:
    ids, prompts, start = flat.tolist(), {}, 0
    for entry in entries:
        end = start + checked(entry["tokens"], int, f"{part.path}: a prompt's tokens")
        label = checked(entry["label"], str, f"{part.path}: a prompt's label")
        sampling = checked(entry["sampling"], dict[str, Any], f"{part.path}: a prompt's sampling")
        prompts[label] = Prompt(token_ids=ids[start:end], sampling=sampling)
        start = end
    return prompts
