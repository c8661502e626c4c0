"""The sequences of a capture: token ids, identified by their SHA-256."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from rlk_align.errors import UnusableInput
from rlk_align.files import METADATA_KEY, metadata_entry, parse_json
from rlk_align.json_fields import checked

SEQUENCES_FILE = "sequences.safetensors"
Key = tuple[str, int]


def sequence_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 of the token ids as little-endian int64, in hexadecimal."""
    return hashlib.sha256(np.array(token_ids, dtype="<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTable:
    """Every sequence of a capture, prompt and response."""

    token_ids: list[list[int]]
    prompt_lengths: list[int]
    labels: list[str]
    """The engine's own name of each sequence; a label, not an identity."""
    sampling: list[dict[str, Any]]
    """Effective sampling parameters of each sequence; empty where there are none."""
    token_texts: Mapping[int, str]
    """Printable text of the ids that occur; empty where no tokenizer was at hand."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def keys(self) -> list[Key]:
        """``(digest, sample index)`` of each sequence: what two captures are joined on.

        The sample index counts sequences with the same token ids.
        """
        seen: dict[str, int] = {}
        keys = []
        for ids in self.token_ids:
            digest = sequence_digest(ids)
            keys.append((digest, seen.get(digest, 0)))
            seen[digest] = seen.get(digest, 0) + 1
        return keys

    def to_bytes(self) -> bytes:
        """The content of ``sequences.safetensors``."""
        lengths = [len(ids) for ids in self.token_ids]
        flat = [i for ids in self.token_ids for i in ids]
        tensors = {
            "token_ids": torch.tensor(flat, dtype=torch.int32),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
            "prompt_lengths": torch.tensor(self.prompt_lengths, dtype=torch.int64),
        }
        metadata = {
            "labels": self.labels,
            "sampling": self.sampling,
            "token_texts": {str(i): text for i, text in self.token_texts.items()},
        }
        content: bytes = save(tensors, metadata_entry(metadata))
        return content


def read_sequences(path: Path) -> SequenceTable:
    """The table in a ``sequences.safetensors``.

    Raises:
        UnusableInput: If a tensor or a metadata entry is missing, or their lengths disagree.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = parse_json(file.metadata()[METADATA_KEY])
            flat, lengths, prompts = (
                file.get_tensor(name).tolist()
                for name in ("token_ids", "lengths", "prompt_lengths")
            )
        labels = checked(metadata["labels"], list[str], "labels")
        sampling = checked(metadata["sampling"], list[dict[str, Any]], "sampling")
        texts = checked(metadata["token_texts"], dict[str, str], "token_texts")
        token_texts = {int(i): text for i, text in texts.items()}
    except Exception as error:
        raise UnusableInput(f"{path.name}: not a sequence table ({error})") from None
    if not len(lengths) == len(prompts) == len(labels) == len(sampling) or sum(lengths) != len(
        flat
    ):
        raise UnusableInput(f"{path.name}: lengths, prompts, labels and token ids disagree")
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return SequenceTable(
        token_ids=[flat[a:b] for a, b in itertools.pairwise(ends)],
        prompt_lengths=prompts,
        labels=labels,
        sampling=sampling,
        token_texts=token_texts,
    )


def natural_order(label: str) -> list[tuple[int, str]]:
    """Sort key that puts ``10`` after ``9``: numbers by value, the rest by text."""
    pieces = re.findall(r"\d+|\D+", label)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
