"""Seeded rows that every rank rebuilds for itself, from integers alone.

A random generator's floats may differ between machines; a hash of (seed, token, column) does not,
and any rank can make just its own tokens. Letters: T tokens (rows), V vocabulary, L shard columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_align.contract import LogitsDtype
from rlk_align.matrix.layouts import LayoutName, named_layout

NUM_RAISED = 12
PADDING_LOGIT = 60.0
"""One padding column read by mistake outweighs a whole row."""
MASK_32 = 0xFFFFFFFF
ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededInputs:
    """What the rows are made from: cases that agree in this have one answer."""

    dtype: LogitsDtype
    vocab_size: int
    batch: int
    sequence: int
    prompt_tokens: int
    seed: int


def seeded_logits(inputs: SeededInputs, start: int, end: int) -> Tensor:
    """Float32 [T, V] of the tokens ``[start, end)``: real columns, before rounding to the dtype.

    A triangle between -2 and 2 in steps of 2**-15, which bfloat16 cannot hold, and 12 columns of
    each row raised by 6 to 12, so that rows are peaked like a language model's.
    """
    columns = torch.arange(inputs.vocab_size)
    pieces = [torch.empty(0, inputs.vocab_size)]
    for first in range(start, end, ROWS_AT_ONCE):
        tokens = torch.arange(first, min(first + ROWS_AT_ONCE, end))
        h_TV = _hash(_hash(columns + 1)[None] ^ _hash(tokens + (inputs.seed << 20))[:, None])
        # two halves of 16 bits: their sum is a triangle
        piece = ((h_TV & 0xFFFF) + (h_TV >> 16) - 0xFFFF).float() / 2**15
        rows = torch.arange(len(tokens))
        for k in range(NUM_RAISED):
            ids = raised_ids(inputs, tokens, k)
            piece[rows, ids] = (_hash(ids + k) & 0x3FFF).float() * (6 / 2**14) + 6
        pieces.append(piece)
    return torch.cat(pieces)


def raised_ids(inputs: SeededInputs, tokens: Tensor, k: int) -> Tensor:
    """Int64 [T]: the ``k``-th raised column of each token."""
    return _hash(tokens * NUM_RAISED + k + (inputs.seed << 24)) % inputs.vocab_size


def target_ids(inputs: SeededInputs, start: int, end: int) -> Tensor:
    """Int64 [T]: every second token is a likely one, the others lie at the edges of shards."""
    tokens = torch.arange(start, end)
    edges = torch.tensor(edge_ids(inputs.vocab_size))
    at_edge = edges[(tokens // 2) % len(edges)]
    return torch.where(tokens % 2 == 0, at_edge, raised_ids(inputs, tokens, 0))


def edge_ids(vocab_size: int) -> list[int]:
    """Both sides of each edge of the named layouts at TP 2 and 4, the same for every inputs."""
    ids = {0, vocab_size - 1}
    for name in (LayoutName.EVEN, LayoutName.UNEVEN, LayoutName.MEGATRON):
        for tp in (2, 4):
            for _, edge in named_layout(name, vocab_size, tp).bounds[:-1]:
                ids |= {min(edge, vocab_size) - 1, min(edge, vocab_size - 1)}
    return sorted(ids)


def shard_of(rounded_TV: Tensor, start: int, end: int) -> Tensor:
    """[T, L] the columns ``[start, end)``, those beyond the vocabulary poisoned."""
    vocab_size = rounded_TV.shape[1]
    real = rounded_TV[:, min(start, vocab_size) : min(end, vocab_size)]
    padding = real.new_full((len(real), end - start - real.shape[1]), PADDING_LOGIT)
    return torch.cat([real, padding], dim=1)


def _hash(x: Tensor) -> Tensor:
    """32 mixed bits of each int64 (the finalizer of MurmurHash3)."""
    h = x & MASK_32
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK_32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK_32
    return h ^ (h >> 16)
