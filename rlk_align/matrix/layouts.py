"""The ways in which engines cut a vocabulary, by name."""

from __future__ import annotations

import itertools
from enum import StrEnum

from rlk_align.contract import VocabLayout, equal_shards
from rlk_align.errors import UnusableInput

MEGATRON_MULTIPLE = 128
"""Megatron-core pads to a multiple of this for every TP rank."""
VLLM_MULTIPLE = 64
"""vLLM pads to a multiple of this at any TP size."""


class LayoutName(StrEnum):
    """How shards are cut."""

    EVEN = "even"
    """Like ``torch.chunk``, as DTensor and transformers do."""
    UNEVEN = "uneven"
    """Each shard one share wider than the one before."""
    MEGATRON = "megatron"
    VLLM = "vllm"
    EXPLICIT = "explicit"
    """By a table of the user's own."""


def named_layout(
    name: LayoutName, vocab_size: int, tp: int, *, padded_size: int | None = None
) -> VocabLayout:
    """The layout of one of the named ways.

    Raises:
        UnusableInput: If the way pads to another size than ``padded_size``, or cannot cut so.
    """
    if name == LayoutName.MEGATRON:
        return _padded(name, vocab_size, tp, MEGATRON_MULTIPLE * tp, padded_size)
    if name == LayoutName.VLLM:
        return _padded(name, vocab_size, tp, VLLM_MULTIPLE, padded_size)
    if name == LayoutName.EVEN:
        return equal_shards(vocab_size, tp, padded_size=padded_size)
    if name == LayoutName.UNEVEN:
        total = vocab_size if padded_size is None else padded_size
        edges = [total * rank * (rank + 1) // (tp * (tp + 1)) for rank in range(tp + 1)]
        return VocabLayout(vocab_size=vocab_size, bounds=tuple(itertools.pairwise(edges)))
    raise UnusableInput(f"layout {name} needs a table; pass --table START:END,START:END,...")


def _padded(
    name: LayoutName, vocab_size: int, tp: int, multiple: int, padded_size: int | None
) -> VocabLayout:
    """Equal shards of the vocabulary, padded to a multiple."""
    total = -(-vocab_size // multiple) * multiple
    if padded_size not in (None, total):
        raise UnusableInput(
            f"layout {name} pads {vocab_size} columns to {total} at TP {tp}, "
            f"got padded size {padded_size}; leave it out"
        )
    if total % tp:
        raise UnusableInput(f"layout {name} cannot cut {total} columns into {tp} equal shards")
    return equal_shards(vocab_size, tp, padded_size=total)
