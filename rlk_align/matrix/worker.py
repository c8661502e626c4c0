"""What one rank does with a case: its slice through the backend, the truth beside it, a record.

Letters: T tokens (rows) of this CP shard, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from rlk_align.contract_logprob import contract_logprob
from rlk_align.dispatch import Registry
from rlk_align.dispatch.registry import DEFAULT_REGISTRY
from rlk_align.matrix.case import MatrixCase
from rlk_align.matrix.grid import Grid
from rlk_align.matrix.inputs import SeededInputs, seeded_logits, shard_of, target_ids
from rlk_align.matrix.oracle import Exact, exact_values


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededRows:
    """Some tokens' rows, whole, and what is true of them."""

    logits_TV: Tensor
    """In the case's dtype."""
    ids_T: Tensor
    rounded: Exact
    """Of these logits: what the kernel must reach."""
    unrounded: Exact
    """Of the float32 logits before: the storage term is against these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """The values of one rank's tokens, on the CPU."""

    logprob: Tensor
    """float32 [T]."""
    lse: Tensor
    """float32 [T]."""
    rounded: Exact
    """As in `SeededRows`."""
    unrounded: Exact
    targets: list[int]
    dispatch: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank tells rank 0: values, or why there are none."""

    rank: int
    tp_rank: int
    cp_rank: int
    tokens: tuple[int, int]
    """``[start, end)`` of its global tokens."""
    values: RankValues | None
    error: str | None
    ended_at_s: float
    """Seconds since the epoch: what a rank waits for fails before its waiting does."""


def run_rank(case: MatrixCase, grid: Grid, *, registry: Registry = DEFAULT_REGISTRY) -> RankRecord:
    """This rank's record. Collective over its TP group; an error is recorded, not raised."""
    tp_rank, cp_rank = case.coordinates(grid.rank)
    values, error = None, None
    try:
        values = _rank_values(case, grid, registry)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    return RankRecord(
        rank=grid.rank,
        tp_rank=tp_rank,
        cp_rank=cp_rank,
        tokens=case.token_range(cp_rank),
        values=values,
        error=error,
        ended_at_s=time.time(),
    )


def _rank_values(case: MatrixCase, grid: Grid, registry: Registry) -> RankValues:
    rows = seeded_rows(case.inputs, *case.token_range(case.coordinates(grid.rank)[1]))
    bounds = case.contract(grid.rank).sharding.bounds
    computed = contract_logprob(
        lambda: case.contract(grid.rank),
        # the candidate sees its tokens and columns and nothing else
        shard_of(rows.logits_TV, *bounds).to(grid.device),
        rows.ids_T.to(grid.device),
        backend=case.backend,
        group=grid.tp_group,
        registry=registry,
    )
    return RankValues(
        logprob=computed.logprob.cpu(),
        lse=computed.lse.cpu(),
        rounded=rows.rounded,
        unrounded=rows.unrounded,
        targets=rows.ids_T.tolist(),
        dispatch=computed.dispatch.to_dict(),
    )


# the layouts of one launch have the same rows, and a rank the same tokens of them
@lru_cache(maxsize=1)
def seeded_rows(inputs: SeededInputs, start: int, end: int) -> SeededRows:
    """The tokens ``[start, end)`` and the truth about them."""
    unrounded_TV, ids = seeded_logits(inputs, start, end), target_ids(inputs, start, end)
    rounded_TV = unrounded_TV.to(inputs.dtype.torch_dtype)
    return SeededRows(
        logits_TV=rounded_TV,
        ids_T=ids,
        rounded=exact_values(rounded_TV, ids),
        unrounded=exact_values(unrounded_TV, ids),
    )
