"""A plain safetensors file with ``logits`` and ``token_ids``, checked, then read block by block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlk_align.compare.states import concatenated
from rlk_align.errors import UnusableInput
from rlk_align.progress import Progress
from rlk_kernels import State, expsum_state

BLOCK_ROWS = 64
LOGITS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """What a file holds beside its logits."""

    path: Path
    token_ids: torch.Tensor
    """``[B, S]`` int64: the token that the logits at the same place predicted."""
    logprobs: torch.Tensor | None
    """``[B, S]`` float32 in nats, or None where the file has none."""
    shape: tuple[int, ...]
    """Of the logits."""
    dtype: str
    """Of the logits."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.shape[-1]


def open_plain_file(path: Path) -> PlainFile:
    """Everything of a file but its logits.

    Raises:
        UnusableInput: If a tensor is missing, of another shape or dtype, or an id is outside.
    """
    if not path.is_file():
        raise UnusableInput(f"{path}: no such file; give a safetensors file with logits")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := sorted({"logits", "token_ids"} - names):
                raise UnusableInput(f"{path}: no tensor {missing[0]!r}")
            logits = file.get_slice("logits")
            shape, dtype = list(logits.get_shape()), str(logits.get_dtype())
            token_ids = file.get_tensor("token_ids")
            logprobs = file.get_tensor("logprobs") if "logprobs" in names else None
    except SafetensorError as error:
        raise UnusableInput(f"{path}: not a whole safetensors file ({error})") from None
    if len(shape) not in (2, 3) or dtype not in LOGITS_DTYPES:
        raise UnusableInput(
            f"{path}: logits are {dtype} {shape}; [T, V] or [B, S, V] in float32, bfloat16 or "
            "float16 is expected"
        )
    _check_per_token(path, "token_ids", token_ids, shape[:-1], (torch.int64, torch.int32))
    if logprobs is not None:
        _check_per_token(path, "logprobs", logprobs, shape[:-1], (torch.float32,))
    lengths = (1, shape[0]) if len(shape) == 2 else (shape[0], shape[1])
    plain = PlainFile(
        path=path,
        token_ids=token_ids.long().reshape(lengths),
        logprobs=None if logprobs is None else logprobs.reshape(lengths),
        shape=tuple(shape),
        dtype=LOGITS_DTYPES[dtype],
    )
    _check_ids(plain)
    return plain


def _check_per_token(
    path: Path, name: str, tensor: torch.Tensor, shape: list[int], dtypes: tuple[torch.dtype, ...]
) -> None:
    if list(tensor.shape) != shape or tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnusableInput(
            f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
            f"but {names} {shape} is expected, one for each row of logits"
        )


def _check_ids(plain: PlainFile) -> None:
    outside = (plain.token_ids < 0) | (plain.token_ids >= plain.vocab_size)
    if outside.any():
        sequence, position = outside.nonzero()[0].tolist()
        raise UnusableInput(
            f"{plain.path}: sequence {sequence}, token {position}: id "
            f"{int(plain.token_ids[sequence, position])} is outside the vocabulary "
            f"[0, {plain.vocab_size})"
        )


def whole_state(plain: PlainFile, progress: Progress) -> State:
    """The states of all rows, read block by block: the logits are never in memory whole."""
    num_sequences, length = plain.token_ids.shape
    starts = [(b, s) for b in range(num_sequences) for s in range(0, length, BLOCK_ROWS)]
    with safe_open(plain.path, framework="pt") as file:
        logits = file.get_slice("logits")
        is_batched = len(logits.get_shape()) == 3
        states = []
        for sequence, start in progress(starts):
            end = start + BLOCK_ROWS
            block = logits[sequence, start:end] if is_batched else logits[start:end]
            states.append(
                expsum_state(
                    block,
                    token_ids=plain.token_ids[sequence, start:end],
                    vocab_size=plain.vocab_size,
                )
            )
    return concatenated(states)
