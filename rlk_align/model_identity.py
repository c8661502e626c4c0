"""Digests of a checkpoint that do not depend on the engine, the file split or the TP degree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlk_align.errors import UnusableInput
from rlk_align.files import read_json, sha256_of_file
from rlk_align.provenance import NOT_OBSERVED, ModelIdentity

# how a config was saved, not what the model computes
CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
HASH_BYTES = 1 << 24


def identify_model(
    directory: Path, *, progress: Callable[[Iterable[str]], Iterable[str]] = iter
) -> ModelIdentity:
    """Identity of the Hugging Face checkpoint in ``directory``.

    ``progress`` may wrap the iteration over tensor names, to show how far the hashing is.

    Raises:
        UnusableInput: If ``directory`` holds no ``config.json``.
    """
    config = read_json(directory / "config.json")
    tokenizer = directory / "tokenizer.json"
    return ModelIdentity(
        name=directory.name,
        architecture={key: value for key, value in config.items() if key not in CONFIG_NOISE},
        weights_digest=checkpoint_digest(directory, progress=progress),
        tokenizer_digest=sha256_of_file(tokenizer) if tokenizer.is_file() else NOT_OBSERVED,
    )


def checkpoint_digest(
    directory: Path, *, progress: Callable[[Iterable[str]], Iterable[str]] = iter
) -> str:
    """SHA-256 over (name, dtype, shape, SHA-256 of the bytes) of every tensor, names sorted.

    How the tensors are spread over files does not matter.

    Raises:
        UnusableInput: If there are no safetensors files, or one name stands in two of them.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnusableInput(f"{directory}: no *.safetensors file; save the model as safetensors")
    place: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 (not a dict)
                if name in place:
                    raise UnusableInput(f"{path}: tensor {name} stands in {place[name].name} too")
                place[name] = path
    whole = hashlib.sha256()
    for name in progress(sorted(place)):
        with safe_open(place[name], framework="pt") as checkpoint:
            whole.update(tensor_line(name, checkpoint.get_tensor(name)))
    return whole.hexdigest()


def tensor_line(name: str, tensor: torch.Tensor) -> bytes:
    """One line of the digest: what identifies a full tensor, wherever it lives."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    digest = hashlib.sha256()
    for start in range(0, flat.size, HASH_BYTES):
        digest.update(flat[start : start + HASH_BYTES].data)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (json.dumps([name, dtype, list(tensor.shape), digest.hexdigest()]) + "\n").encode()


def architecture_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first config field, in alphabetical order, in which two models differ."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return key
    return None
