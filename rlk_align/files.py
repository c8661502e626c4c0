"""Files that are whole or absent, and JSON without NaN."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlk_align.errors import UnusableInput

HASH_BLOCK = 1 << 22
METADATA_KEY = "rlk"
"""The one metadata entry of our safetensors files: safetensors writes several in random order."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name, sync, rename: a reader never meets half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    # the rename itself must survive a crash too
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def canonical_json(value: object, *, indent: int | None = None) -> bytes:
    """Strict JSON with sorted keys; NaN and infinity raise ValueError."""
    text = json.dumps(value, sort_keys=True, indent=indent, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode()


def read_json(path: Path) -> dict[str, object]:
    """One JSON object from a file.

    Raises:
        UnusableInput: If the file is absent, is not JSON or is not an object.
    """
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UnusableInput(f"{path}: no such file") from None
    except ValueError as error:
        raise UnusableInput(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UnusableInput(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def parse_json(content: bytes | str) -> Any:
    """A JSON value; NaN and infinity, which Python would take, raise ValueError."""
    return json.loads(content, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def metadata_entry(value: Mapping[str, object]) -> dict[str, str]:
    """Metadata for safetensors that is the same bytes in every process."""
    return {METADATA_KEY: canonical_json(value).decode()}


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read block by block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
