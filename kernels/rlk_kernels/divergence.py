"""Divergences between two logits matrices over the whole vocabulary, cut as each side likes.

Nothing is gathered: matching columns of both sides are fed in any order and any cut, each adds
terms that depend on its two logits and the two rows' sums alone, and terms are added exactly.
Letters: T tokens (rows), L columns fed at once, C of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce

import torch
from torch import Tensor

from rlk_kernels.column_ranges import ColumnRanges
from rlk_kernels.divergence_terms import LN2, TERMS, divergence_terms
from rlk_kernels.eager import eager
from rlk_kernels.entropy import targets_unused
from rlk_kernels.expsum import State, merge
from rlk_kernels.probability import check_mass, column_probabilities, row_norm
from rlk_kernels.reference import divided
from rlk_kernels.selected_logprob import expsum_state
from rlk_kernels.shard_input import ShardInput, checked_input
from rlk_kernels.sum_state import SumState, add_values, empty_sum, finish_sum, tiles

Shards = Sequence[tuple[int, Tensor]]
"""(vocab_start, logits [T, L]) of each shard, in any order."""


class PairStatus(IntEnum):
    """Why a pair of rows has divergences, or none."""

    OK = 0
    P_UNUSABLE = 1
    """P's row has an invalid logit or no live column."""
    Q_UNUSABLE = 2
    """Q's row has, and P's has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences:
    """How far P is from Q, row by row: float64 [T], in nats but for ``tv``.

    Where ``status`` is not OK all values are 0 and mean nothing.
    """

    kl_pq: Tensor
    """KL(P || Q) = sum of p log(p / q); 0 and meaningless where ``kl_pq_is_infinite``."""
    kl_qp: Tensor
    """KL(Q || P) = sum of q log(q / p); 0 and meaningless where ``kl_qp_is_infinite``."""
    js: Tensor
    """Jensen-Shannon, the mean of both sides' KL to their average; at most log 2."""
    tv: Tensor
    """Total variation, half the sum of abs(p - q); at most 1."""
    kl_pq_is_infinite: Tensor
    """bool [T]: a column is live in P and masked in Q."""
    kl_qp_is_infinite: Tensor
    """bool [T]: a column is live in Q and masked in P."""
    status: Tensor
    """int8 [T], a `PairStatus`."""


class DivergenceSum:
    """Divergences of T rows that are fed their columns in any order and any cut, each once.

    Example:
        pair = DivergenceSum(p_state, q_state, vocab_size=100)
        pair.add(p[:, 60:], q_right, vocab_start=60)
        pair.add(p[:, :60], q_left, vocab_start=0)
        pair.finish().kl_pq
    """

    def __init__(
        self,
        p_state: State,
        q_state: State,
        *,
        vocab_size: int,
        p_temperature: float = 1.0,
        q_temperature: float = 1.0,
    ) -> None:
        """Start with no columns.

        Args:
            p_state: Of P's rows over the whole vocabulary, at P's temperature.
            q_state: Of Q's; targets play no part.
            vocab_size: Real columns of a row.
            p_temperature: As in P's state.
            q_temperature: As in Q's state.
        """
        if p_state.num_tokens != q_state.num_tokens:
            raise ValueError(
                f"P and Q should have the same rows, got {p_state.num_tokens} and "
                f"{q_state.num_tokens}"
            )
        self._states = p_state, q_state
        self._norms = row_norm(p_state), row_norm(q_state)
        self._temperatures = p_temperature, q_temperature
        self._fed = ColumnRanges(vocab_size)
        num_tokens, device = p_state.num_tokens, p_state.top.device
        self._bins = empty_sum((len(TERMS), num_tokens), device).bins
        self._masses = torch.zeros(2, num_tokens, dtype=torch.float64, device=device)
        self._only_p = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        self._only_q = torch.zeros(num_tokens, dtype=torch.bool, device=device)

    def add(self, p_TL: Tensor, q_TL: Tensor, *, vocab_start: int) -> None:
        """Take in both sides' columns [vocab_start, vocab_start + L); padding is not read.

        Raises:
            ValueError: If the sides differ in shape, are no float matrices of the states' rows, or
                some of their columns were fed before.
        """
        if p_TL.shape != q_TL.shape:
            raise ValueError(
                f"P and Q should be fed the same columns, got {list(p_TL.shape)} and "
                f"{list(q_TL.shape)}"
            )
        p = self._checked(p_TL, vocab_start, self._temperatures[0])
        q = self._checked(q_TL, vocab_start, self._temperatures[1])
        self._fed.add(vocab_start, vocab_start + p.num_real_columns)
        for rows, columns in tiles(p_TL.shape[0], p.num_real_columns):
            self._add_tile(_tile(p, rows, columns), _tile(q, rows, columns), rows)

    def merge(self, other: "DivergenceSum") -> None:
        """Take in what another one of the same rows was fed.

        Raises:
            ValueError: If both were fed some column, or their rows differ in number.
        """
        if self._bins.shape != other._bins.shape:
            raise ValueError(
                f"only divergences of the same rows merge; got {self._bins.shape[1]} and "
                f"{other._bins.shape[1]} rows"
            )
        for start, end in other._fed.ranges:
            self._fed.add(start, end)
        self._bins += other._bins
        self._masses += other._masses
        self._only_p |= other._only_p
        self._only_q |= other._only_q

    def finish(self) -> Divergences:
        """The divergences, once all columns were fed.

        Raises:
            ValueError: If columns are missing, or they are not those of the states.
        """
        self._fed.check_complete()
        status = _pair_status(*self._states)
        is_ok = status == PairStatus.OK
        check_mass(self._masses[0], is_ok, "P, ")
        check_mass(self._masses[1], is_ok, "Q, ")
        sums = SumState(bins=self._bins, num_values=self._fed.vocab_size)
        kl_pq, kl_qp, js, tv = torch.where(is_ok, finish_sum(sums, torch.float64), 0.0)
        return Divergences(
            kl_pq=torch.where(self._only_p, 0.0, kl_pq),
            kl_qp=torch.where(self._only_q, 0.0, kl_qp),
            # the terms' roundings may add up to a little more than the bound
            js=js.clamp(max=LN2),
            tv=tv.clamp(max=1.0),
            kl_pq_is_infinite=self._only_p & is_ok,
            kl_qp_is_infinite=self._only_q & is_ok,
            status=status,
        )

    def _checked(self, logits_TL: Tensor, vocab_start: int, temperature: float) -> ShardInput:
        num_tokens = self._states[0].num_tokens
        return checked_input(
            logits_TL,
            torch.zeros(num_tokens, dtype=torch.int64, device=logits_TL.device),
            vocab_start=vocab_start,
            vocab_size=self._fed.vocab_size,
            temperature=temperature,
            backend="reference",
        )

    def _add_tile(self, p_TC: Tensor, q_TC: Tensor, rows: slice) -> None:
        p = column_probabilities(p_TC, self._norms[0].rows(rows))
        q = column_probabilities(q_TC, self._norms[1].rows(rows))
        self._masses[0, rows] += p.probability.sum(1)
        self._masses[1, rows] += q.probability.sum(1)
        for bins, terms in zip(self._bins, divergence_terms(p, q), strict=True):
            add_values(bins[rows], terms)
        self._only_p[rows] |= (p.is_live & ~q.is_live).any(1)
        self._only_q[rows] |= (q.is_live & ~p.is_live).any(1)


@eager
def divergence(
    p_shards: Shards,
    q_shards: Shards,
    *,
    vocab_size: int,
    p_temperature: float = 1.0,
    q_temperature: float = 1.0,
    backend: str = "auto",
) -> Divergences:
    """Divergences of two logits matrices, each given as shards of a layout of its own.

    The same bits come back for any two layouts (docs/numerics.md).

    Args:
        p_shards: ``(vocab_start, logits [T, L])`` of each shard of P, in any order; columns at or
            beyond ``vocab_size`` are padding and never read.
        q_shards: The same of Q; T agrees, cuts and dtypes need not.
        vocab_size: Real columns of either side.
        p_temperature: P's logits are divided by it first, in float32.
        q_temperature: Likewise Q's.
        backend: What computes the rows' sums: "auto", "reference", "cpu" or "triton".

    Raises:
        ValueError: If a shard breaks the contract, a side has no shard, or its shards overlap or
            leave a gap.
    """
    p_state = _whole_state(p_shards, "P", vocab_size, p_temperature, backend)
    q_state = _whole_state(q_shards, "Q", vocab_size, q_temperature, backend)
    pair = DivergenceSum(
        p_state,
        q_state,
        vocab_size=vocab_size,
        p_temperature=p_temperature,
        q_temperature=q_temperature,
    )
    for p_start, p_TL in p_shards:
        for q_start, q_TL in q_shards:
            start = max(p_start, q_start)
            end = min(p_start + p_TL.shape[1], q_start + q_TL.shape[1], vocab_size)
            if start < end:
                p_part = p_TL[:, start - p_start : end - p_start]
                q_part = q_TL[:, start - q_start : end - q_start]
                pair.add(p_part, q_part, vocab_start=start)
    return pair.finish()


def _whole_state(
    shards: Shards, side: str, vocab_size: int, temperature: float, backend: str
) -> State:
    """The merged state of one side's shards, which must cover the vocabulary."""
    if not shards:
        raise ValueError(f"{side} has no shard; pass at least one")
    states = [
        expsum_state(
            logits_TL,
            token_ids=targets_unused(logits_TL),
            vocab_start=start,
            vocab_size=vocab_size,
            temperature=temperature,
            backend=backend,
        )
        for start, logits_TL in shards
    ]
    fed = ColumnRanges(vocab_size)
    try:
        for start, logits_TL in shards:
            fed.add(start, min(start + logits_TL.shape[1], vocab_size))
        fed.check_complete()
    except ValueError as error:
        raise ValueError(f"{side}: {error}") from error
    return reduce(merge, states)


def _tile(shard: ShardInput, rows: slice, columns: slice) -> Tensor:
    """Float32 logits over the temperature."""
    return divided(shard.logits_TL.detach()[rows, columns].float(), shard.temperature)


def _pair_status(p_state: State, q_state: State) -> Tensor:
    """A `PairStatus` int8 [T] for every row."""
    status = torch.full_like(p_state.top, PairStatus.OK, dtype=torch.int8)
    for state, unusable in ((q_state, PairStatus.Q_UNUSABLE), (p_state, PairStatus.P_UNUSABLE)):
        # the largest live column stands in the first bin, so an empty one means no live column
        status[(state.bins[:, 0] == 0) | (state.invalid_column >= 0)] = unusable
    return status
