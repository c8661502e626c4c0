"""Entropy, rank of the target and the largest logits of each row, over the whole vocabulary.

A column's place is one integer: its logit's bits in an order-preserving form, then its id turned
round, so that of equal logits the smaller id stands first and no two columns are equal. Letters:
T tokens (rows), L columns of a shard, C of a tile, k largest.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.collective import all_gather_words
from rlk_kernels.column_ranges import ColumnRanges
from rlk_kernels.eager import eager
from rlk_kernels.entropy import entropy_terms
from rlk_kernels.expsum import LIMIT, State
from rlk_kernels.finish import RowStatus, finish, row_status
from rlk_kernels.probability import check_mass, column_probabilities, row_norm
from rlk_kernels.reference import divided
from rlk_kernels.shard_input import check_top_k, checked_input
from rlk_kernels.sum_state import SUM_BINS, SumState, add_values, empty_sum, finish_sum, tiles
from rlk_kernels.vocabulary_state import vocabulary_state

ID_MASK = (1 << 32) - 1
NO_KEY = -(1 << 63)
"""Below the key of any column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Statistics of T rows; where ``status`` is not OK the others are 0 (ids -1), never to be read.

    Logits are those over the temperature. Masked columns have logit -inf and stand last.
    """

    entropy: Tensor
    """float64 [T], in nats."""
    target_rank: Tensor
    """int64 [T]: 1 for the largest logit; of equal logits the smaller id stands first."""
    top_logits: Tensor
    """float32 [T, k], the largest first."""
    top_ids: Tensor
    """int64 [T, k], their token ids; [:, 0] is the argmax."""
    status: Tensor
    """int8 [T], a `RowStatus`."""


class RowStatisticsSum:
    """Statistics of T rows that are fed their columns in any order and any cut, each once.

    Example:
        state = merge(expsum_state(left, ...), expsum_state(right, ...))
        rows = RowStatisticsSum(state, token_ids, vocab_size=100, top_k=5)
        rows.add(right, vocab_start=60)
        rows.add(left, vocab_start=0)
        rows.finish().entropy
    """

    def __init__(
        self,
        state: State,
        token_ids: Tensor,
        *,
        vocab_size: int,
        temperature: float = 1.0,
        top_k: int = 1,
    ) -> None:
        """Start with no columns.

        Args:
            state: Of the same rows over the whole vocabulary, at the same temperature.
            token_ids: int64 or int32 ``[T]``, those of the state.
            vocab_size: Real columns of a row.
            temperature: As in the state.
            top_k: How many of the largest logits to keep, at most ``vocab_size``.
        """
        check_top_k(top_k, vocab_size)
        self._state, self._token_ids = state, token_ids
        self._vocab_size, self._temperature = vocab_size, temperature
        self._norm = row_norm(state)
        self._fed = ColumnRanges(vocab_size)
        num_tokens, device = state.num_tokens, state.top.device
        self._target_key = _keys(state.target_logit[:, None], token_ids.to(device).long()[:, None])
        self._bins = empty_sum((num_tokens,), device).bins
        self._mass = torch.zeros(num_tokens, dtype=torch.float64, device=device)
        self._num_before = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._top_keys = torch.full((num_tokens, top_k), NO_KEY, device=device)

    def add(self, logits_TL: Tensor, *, vocab_start: int) -> None:
        """Take in the columns [vocab_start, vocab_start + L); padding is not read.

        Raises:
            ValueError: If the logits are no float matrix of the state's rows, or some of their
                columns were fed before.
        """
        shard = checked_input(
            logits_TL,
            self._token_ids,
            vocab_start=vocab_start,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            backend="reference",
        )
        real_TL = shard.real_logits_TL.detach()
        self._fed.add(vocab_start, vocab_start + real_TL.shape[1])
        for rows, columns in tiles(*real_TL.shape):
            z_TC = divided(real_TL[rows, columns].float(), shard.temperature)
            self._add_tile(z_TC, rows, vocab_start + columns.start)

    def merge(self, other: "RowStatisticsSum") -> None:
        """Take in what another one of the same rows was fed.

        Raises:
            ValueError: If both were fed some column, or keep different numbers of logits.
        """
        if self._top_keys.shape != other._top_keys.shape:
            raise ValueError(
                f"only statistics of the same rows and top_k merge; got "
                f"{list(self._top_keys.shape)} and {list(other._top_keys.shape)}"
            )
        for start, end in other._fed.ranges:
            self._fed.add(start, end)
        self._absorb(other._words())

    def finish(self) -> RowStatistics:
        """The statistics, once all columns were fed.

        Raises:
            ValueError: If columns are missing, or they are not those of the state.
        """
        self._fed.check_complete()
        return self._finished()

    def merge_group(self, group: dist.ProcessGroup) -> None:
        """Take in what the other ranks were fed; all have agreed on rows, ``top_k`` and columns."""
        words = all_gather_words(self._words(), group)
        for rank, part in enumerate(words):
            if rank != dist.get_rank(group):
                self._absorb(part.to(self._bins.device))
        self._fed = ColumnRanges(self._vocab_size, [(0, self._vocab_size)])

    def _add_tile(self, z_TC: Tensor, rows: slice, start: int) -> None:
        columns = column_probabilities(z_TC, self._norm.rows(rows))
        self._mass[rows] += columns.probability.sum(1)
        add_values(self._bins[rows], entropy_terms(columns))
        keys = _keys(z_TC, torch.arange(start, start + z_TC.shape[1], device=z_TC.device))
        self._num_before[rows] += (keys > self._target_key[rows]).sum(1)
        self._top_keys[rows] = _largest(self._top_keys[rows], keys)

    def _words(self) -> Tensor:
        """int64 [T, 34 + k]: bins of the entropy, columns before the target, mass, largest keys."""
        counts = torch.stack([self._num_before, self._mass.view(torch.int64)], dim=1)
        return torch.cat([self._bins, counts, self._top_keys], dim=1)

    def _absorb(self, words: Tensor) -> None:
        self._bins += words[:, :SUM_BINS]
        self._num_before += words[:, SUM_BINS]
        self._mass += words[:, SUM_BINS + 1].contiguous().view(torch.float64)
        self._top_keys = _largest(self._top_keys, words[:, SUM_BINS + 2 :])

    def _finished(self) -> RowStatistics:
        status = row_status(self._state)
        is_ok = status == RowStatus.OK
        check_mass(self._mass, is_ok)
        sums = SumState(bins=self._bins, num_values=self._vocab_size)
        logits, ids = _logits_and_ids(self._top_keys)
        return RowStatistics(
            entropy=torch.where(is_ok, finish_sum(sums, torch.float64), 0.0),
            target_rank=torch.where(is_ok, self._num_before + 1, 0),
            top_logits=torch.where(is_ok[:, None], logits, 0.0),
            top_ids=torch.where(is_ok[:, None], ids, -1),
            status=status,
        )


@eager
def row_statistics(
    logits_TL: Tensor,
    token_ids_T: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    top_k: int = 1,
    backend: str = "auto",
) -> RowStatistics:
    """Entropy, rank of the target and the largest logits of each row; the same on every layout.

    Args:
        logits_TL: ``[T, L]`` this rank's columns, see `rlk_kernels.expsum_state`.
        token_ids_T: ``[T]`` int64 or int32, the same on every rank.
        vocab_size: Real columns of all ranks together.
        vocab_start: Token id of this rank's first column.
        group: The ranks whose columns make up the vocabulary; None if this process holds it all.
        temperature: The logits are divided by it first, in float32; all statistics are of those.
        top_k: How many of the largest logits to return, the same on every rank.
        backend: What computes the rows' sums: "auto", "reference", "cpu" or "triton".

    Returns:
        The same on every rank, without gradient; every row's status is OK.

    Raises:
        ValueError: On every rank of the group alike, naming the rank and the row, if any rank's
            logits, ids, bounds or ``top_k`` break the contract, or a row has no logprob.
    """
    shard, state = vocabulary_state(
        logits_TL,
        token_ids_T,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        backend=backend,
        top_k=top_k,
    )
    # raises on every rank where a row has no live column
    finish(state)
    rows = RowStatisticsSum(
        state, shard.token_ids, vocab_size=vocab_size, temperature=temperature, top_k=top_k
    )
    rows.add(logits_TL, vocab_start=vocab_start)
    if group is not None:
        rows.merge_group(group)
    return rows.finish()


def _keys(z: Tensor, ids: Tensor) -> Tensor:
    """int64 places: larger for a larger logit, then for a smaller id; masked columns lowest."""
    # adding 0 turns -0 into +0, which is equal to it
    z = torch.where(z > -LIMIT, z + 0.0, -torch.inf)
    bits = z.contiguous().view(torch.int32)
    # negative floats order the other way round as integers
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) + (ID_MASK - ids)


def _logits_and_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
    """What `_keys` was given."""
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), ID_MASK - (keys & ID_MASK)


def _largest(keys_Tk: Tensor, others: Tensor) -> Tensor:
    """The k largest keys of both, in falling order; no two columns have one key."""
    return torch.cat([keys_Tk, others], dim=1).topk(keys_Tk.shape[1], dim=1).values
