"""Entropy of a row over the whole vocabulary, the same bits on every layout, differentiable.

Letters: T tokens (rows), L this shard's columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_kernels.collective import all_gather_words
from rlk_kernels.eager import eager
from rlk_kernels.finish import finish
from rlk_kernels.probability import (
    Columns,
    RowNorm,
    column_probabilities,
    row_norm,
    surprisal,
)
from rlk_kernels.reference import divided
from rlk_kernels.shard_input import ShardInput
from rlk_kernels.sum_state import SumState, add_values, empty_sum, finish_sum, tiles
from rlk_kernels.vocabulary_state import vocabulary_state


@eager
def entropy(
    logits_TL: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Entropy of each row's softmax over the whole vocabulary, differentiable.

    H = sum of p * -log p, each term in float64 from the logit and the row's sum alone, rounded to
    float32; the terms are added exactly. Masked columns take no part.

    Args:
        logits_TL: ``[T, L]`` this rank's columns, see `rlk_kernels.expsum_state`.
        vocab_size: Real columns of all ranks together.
        vocab_start: Token id of this rank's first column.
        group: The ranks whose columns make up the vocabulary; None if this process holds it all.
            One all-gather more than `rlk_kernels.selected_logprob`, of 256 bytes a token.
        temperature: The logits are divided by it first, in float32.
        backend: What computes the rows' sums: "auto", "reference", "cpu" or "triton".

    Returns:
        float32 ``[T]`` in nats, the same on every rank. The gradient, -p * (log p + H), is
        elementwise in the logits, needs no collective and has the logits' dtype.

    Raises:
        ValueError: On every rank of the group alike, naming the rank and the row, if any rank's
            logits or bounds break the contract, or a row has no live column.
    """
    shard, state = vocabulary_state(
        logits_TL,
        targets_unused(logits_TL),
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        backend=backend,
    )
    # raises on every rank where a row has no live column
    finish(state)
    norm = row_norm(state)
    bins = _entropy_bins(shard, norm)
    if group is not None:
        # of one shape on all ranks: they have agreed on the rows by now
        bins = torch.stack(all_gather_words(bins, group)).sum(0).to(bins.device)
    total = finish_sum(SumState(bins=bins, num_values=vocab_size), torch.float64)
    return _WithGradient.apply(logits_TL, shard, norm, total)  # type: ignore[no-untyped-call, no-any-return]


def entropy_terms(columns: Columns) -> Tensor:
    """What each column adds to its row's entropy: float32 [T, C], at least 0."""
    return (columns.probability * surprisal(columns)).float()


def targets_unused(logits_TL: Tensor) -> Tensor:
    """Targets for a row's state where nobody asks for a target: int64 [T], zeros."""
    # logits that are no matrix are refused later, on every rank alike
    rows = logits_TL.shape[:1] if isinstance(logits_TL, Tensor) else (0,)
    device = logits_TL.device if isinstance(logits_TL, Tensor) else "cpu"
    return torch.zeros(rows, dtype=torch.int64, device=device)


def _entropy_bins(shard: ShardInput, norm: RowNorm) -> Tensor:
    """Exact sums int64 [T, 32] of the terms of a shard's columns."""
    logits_TL = shard.real_logits_TL.detach()
    bins = empty_sum((logits_TL.shape[0],), logits_TL.device).bins
    for rows, columns in tiles(*logits_TL.shape):
        z_TC = divided(logits_TL[rows, columns].float(), shard.temperature)
        terms = entropy_terms(column_probabilities(z_TC, norm.rows(rows)))
        add_values(bins[rows], terms)
    return bins


class _WithGradient(torch.autograd.Function):
    """Ties the entropies to the logits they came from."""

    @staticmethod
    def forward(
        ctx: Any, logits_TL: Tensor, shard: ShardInput, norm: RowNorm, total: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits_TL)
        ctx.shard, ctx.norm, ctx.total = shard, norm, total
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # the saved tensor, as torch checks that nobody has changed it in place
        (logits_TL,) = ctx.saved_tensors
        shard: ShardInput = ctx.shard
        norm: RowNorm = ctx.norm
        upstream = divided(gradients[0].float(), shard.temperature).double()
        gradient_TL = torch.zeros_like(logits_TL)
        for rows, columns in tiles(logits_TL.shape[0], shard.num_real_columns):
            z_TC = divided(logits_TL[rows, columns].float(), shard.temperature)
            p = column_probabilities(z_TC, norm.rows(rows))
            slope = p.probability * (surprisal(p) - ctx.total[rows, None])
            gradient_TL[rows, columns] = upstream[rows, None] * slope
        return gradient_TL, None, None, None
