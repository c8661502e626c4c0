"""Every golden vector comes out of both backends bit for bit, however its row is cut."""

import struct
from functools import reduce
from itertools import pairwise

import pytest
import torch

from rlk_fixtures.logits import Vector, expsum_vectors
from rlk_kernels import LIMIT, expsum_state, finish, merge

BACKENDS = ["reference", "cpu"]
VECTORS = expsum_vectors()


def bits(value: torch.Tensor) -> str:
    return struct.pack(">f", value.item()).hex()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_a_vector_is_reproduced_bit_for_bit(vector: Vector, backend: str) -> None:
    num_columns = len(vector.logits)
    state = expsum_state(
        vector.logits[None],
        token_ids=torch.tensor([vector.target]),
        vocab_size=num_columns,
        backend=backend,
    )
    values = finish(state)
    assert state.top.tolist() == [vector.top]
    assert state.bins.tolist() == [list(vector.bins)]
    assert bits(values.logprob) == vector.logprob_bits
    assert bits(values.lse) == vector.lse_bits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_shards", [3, 7])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_shards_of_a_vector_merge_to_the_same_bits(
    vector: Vector, num_shards: int, backend: str
) -> None:
    num_columns = len(vector.logits)
    cuts = [num_columns * shard // num_shards for shard in range(num_shards + 1)]
    shards = [
        expsum_state(
            vector.logits[None, start:end],
            token_ids=torch.tensor([vector.target]),
            vocab_start=start,
            vocab_size=num_columns,
            backend=backend,
        )
        for start, end in pairwise(cuts)
    ]
    values = finish(reduce(merge, reversed(shards)))
    assert (bits(values.logprob), bits(values.lse)) == (vector.logprob_bits, vector.lse_bits)


def test_the_vectors_hold_masked_columns_and_a_masked_target() -> None:
    assert any((vector.logits <= -LIMIT).any() for vector in VECTORS)
    assert any(vector.logits[vector.target] <= -LIMIT for vector in VECTORS)
