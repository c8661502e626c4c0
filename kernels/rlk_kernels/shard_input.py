"""What a caller passes, checked: everything that would otherwise be wrong in silence.

Letters: T tokens (rows), L this shard's columns.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels.backends import backend_id
from rlk_kernels.expsum import MAX_COLUMNS

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKEN_ID_DTYPES = (torch.int64, torch.int32)
IGNORE_INDEX = -100
"""What torch's own losses take for a row without a target."""
INT64_END = 1 << 63
MAX_VOCAB_START = (1 << 31) - 1
"""Token ids are int32 in a state."""
FLOAT32_ABOVE_ZERO = 2.0**-150
"""What is larger does not become 0 as a float32."""
FLOAT32_INFINITE = 2.0**128 - 2.0**103
"""What is smaller does not become infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInput:
    """One rank's columns and the rows' targets."""

    logits_TL: Tensor
    """[T, L], padding columns included."""
    token_ids: Tensor
    """int64 [T] on the logits' device, each in [0, vocab_size)."""
    active: Tensor | None
    """bool [T]: the rows that count, whatever the others hold; None if all do."""
    vocab_start: int
    vocab_size: int
    temperature: float
    """A float32 above 0."""
    backend: str
    """Name of the backend that runs."""

    @property
    def num_real_columns(self) -> int:
        """Columns before ``vocab_size``; those behind are padding and never read."""
        return min(self.logits_TL.shape[1], max(0, self.vocab_size - self.vocab_start))

    @property
    def real_logits_TL(self) -> Tensor:
        """The columns before ``vocab_size``."""
        return self.logits_TL[:, : self.num_real_columns]


def checked_input(
    logits_TL: Tensor,
    token_ids: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    backend: str,
    active_mask: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> ShardInput:
    """The caller's arguments, or a ValueError that says which one is wrong and where."""
    _check_logits(logits_TL)
    complaint = setting_complaint(vocab_size, vocab_start, ignore_index, temperature, backend)
    if complaint:
        raise ValueError(complaint)
    name = backend_id(backend, logits_TL.device)
    if name == "cpu" and logits_TL.shape[1] > 1 and logits_TL.stride(1) != 1:
        raise ValueError(
            "the columns of a row should lie next to each other, got a column stride of "
            f"{logits_TL.stride(1)}; pass logits.contiguous()"
        )
    if active_mask is not None:
        _check_active_mask(active_mask, logits_TL)
    _check_token_ids(token_ids, logits_TL)
    return ShardInput(
        logits_TL=logits_TL,
        token_ids=_real_token_ids(token_ids, active_mask, vocab_size, ignore_index),
        active=active_mask,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        # logits are divided by a float32
        temperature=float(torch.tensor(temperature, dtype=torch.float32)),
        backend=name,
    )


def setting_complaint(
    vocab_size: int, vocab_start: int, ignore_index: int, temperature: float, backend: str
) -> str:
    """What is wrong with the arguments that are no tensors; empty if nothing."""
    integers = {
        "vocab_size": vocab_size,
        "vocab_start": vocab_start,
        "ignore_index": ignore_index,
    }
    for name, value in integers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{name} should be an integer, got {value!r}"
    if isinstance(temperature, bool) or not isinstance(temperature, (float, int)):
        return f"temperature should be a number, got {temperature!r}"
    if not isinstance(backend, str):
        return f"backend should be a name, got {backend!r}"
    if not 0 < vocab_size <= MAX_COLUMNS:
        return (
            f"vocab_size should be 1 to {MAX_COLUMNS}, the columns that an int64 bin holds, "
            f"got {_shown(vocab_size)}"
        )
    if not 0 <= vocab_start <= MAX_VOCAB_START:
        return (
            f"vocab_start should be 0 or above and at most {MAX_VOCAB_START}, "
            f"got {_shown(vocab_start)}"
        )
    if 0 <= ignore_index < vocab_size or not -INT64_END <= ignore_index < INT64_END:
        return (
            f"ignore_index should be an int64 outside the vocabulary [0, {vocab_size}), "
            f"got {_shown(ignore_index)}"
        )
    if not FLOAT32_ABOVE_ZERO < temperature < FLOAT32_INFINITE:
        return f"temperature should be a finite float32 above 0, got {_shown(temperature)}"
    return ""


def _shown(number: float) -> str:
    # Python refuses to print an integer of more than 4300 digits
    is_long = isinstance(number, int) and not -INT64_END <= number < INT64_END
    return "an integer beyond int64" if is_long else str(number)


def check_top_k(top_k: int, vocab_size: int) -> None:
    """Raise a ValueError unless a row has that many logits."""
    is_integer = isinstance(top_k, int) and not isinstance(top_k, bool)
    if not is_integer or not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k should be 1 to {vocab_size}, the vocabulary, got {top_k!r}")


def _check_logits(logits_TL: Tensor) -> None:
    if not isinstance(logits_TL, Tensor) or logits_TL.dim() != 2:
        got = list(logits_TL.shape) if isinstance(logits_TL, Tensor) else type(logits_TL).__name__
        raise ValueError(f"logits should be a tensor [tokens, columns], got {got}; reshape them")
    if logits_TL.dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits should be float32, bfloat16 or float16, got {logits_TL.dtype}")


def _check_active_mask(active_mask: Tensor, logits_TL: Tensor) -> None:
    expected = (torch.bool, logits_TL.shape[:1], logits_TL.device)
    if (active_mask.dtype, active_mask.shape, active_mask.device) != expected:
        raise ValueError(
            f"active_mask should be bool [{logits_TL.shape[0]}] on {logits_TL.device}, one per row "
            f"of the logits, got {active_mask.dtype} {list(active_mask.shape)} on "
            f"{active_mask.device}"
        )


def _check_token_ids(token_ids: Tensor, logits_TL: Tensor) -> None:
    if not isinstance(token_ids, Tensor) or token_ids.dtype not in TOKEN_ID_DTYPES:
        got = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise ValueError(f"token ids should be an int64 or int32 tensor, got {got}")
    if token_ids.shape != logits_TL.shape[:1]:
        raise ValueError(
            f"token ids should be [{logits_TL.shape[0]}], one per row of the logits, "
            f"got {list(token_ids.shape)}"
        )
    if token_ids.device != logits_TL.device:
        raise ValueError(
            f"token ids are on {token_ids.device}, the logits on {logits_TL.device}; "
            "pass both on one device"
        )


def _real_token_ids(
    token_ids: Tensor, active: Tensor | None, vocab_size: int, ignore_index: int
) -> Tensor:
    """The ids as int64, with 0 in inactive rows; raises on the first id that has no place."""
    ids = token_ids.long()
    is_outside = (ids < 0) | (ids >= vocab_size)
    if active is not None:
        is_outside &= active | (ids != ignore_index)
    if is_outside.any():
        row = int(is_outside.nonzero()[0])
        value = int(ids[row])
        only = "; ignore_index stands on inactive rows only" if value == ignore_index else ""
        raise ValueError(
            f"row {row}: token id {value} is outside the vocabulary [0, {vocab_size}){only}"
        )
    return ids if active is None else torch.where(active, ids, 0)


def float32_bits(value: float) -> int:
    """The bits of a float32 as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
