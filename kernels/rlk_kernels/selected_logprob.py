"""The door: a row's selected-token logprob and LSE, the same bits on every layout.

Letters: T tokens (rows), L this shard's columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_kernels.backends import load_backend
from rlk_kernels.collective import Header, coverage_error, gather_state, group_failure
from rlk_kernels.expsum import State
from rlk_kernels.finish import RowSum, SelectedLogprob, finish, invalid_logit_message, row_sum
from rlk_kernels.reference import divided
from rlk_kernels.shard_input import ShardInput, checked_input


def expsum_state(
    logits_TL: Tensor,
    *,
    token_ids: Tensor,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    backend: str = "auto",
) -> State:
    """State of one shard's columns, to be merged with the other shards' and finished.

    Args:
        logits_TL: ``[T, L]`` float32, bfloat16 or float16; L may be 0 and rows may lie apart.
            Columns are the token ids ``[vocab_start, vocab_start + L)``; those at or beyond
            ``vocab_size`` are padding and never read.
        token_ids: ``[T]`` int64 or int32, each row's target in ``[0, vocab_size)``.
        vocab_start: Token id of the first column.
        vocab_size: Real columns of all shards together.
        temperature: The logits are divided by it first, in float32.
        backend: "auto" (by device), "reference", "cpu" or "triton".

    Raises:
        ValueError: If an argument breaks this contract. An invalid logit does not raise: the state
            carries it in ``invalid_column``.
    """
    shard = checked_input(
        logits_TL,
        token_ids,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        temperature=temperature,
        backend=backend,
    )
    return _shard_state(shard)


def selected_logprob(
    logits_TL: Tensor,
    token_ids_T: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> SelectedLogprob:
    """Log-probability of each row's token and the row's log-sum-exp, differentiable.

    The same bits come back for any number of ranks, any cut of the vocabulary and any batch around
    a row, because every exponential is an integer and integers are added (docs/numerics.md).

    Args:
        logits_TL: ``[T, L]`` this rank's columns, see `expsum_state`.
        token_ids_T: ``[T]`` int64 or int32, the same on every rank.
        vocab_size: Real columns of all ranks together.
        vocab_start: Token id of this rank's first column.
        group: The ranks whose columns make up the vocabulary; None if this process holds it all.
            One all-gather carries 40 bytes a token; a second one follows above 128 tokens.
            It waits for a missing rank as long as the group's own timeout says.
        temperature: The logits are divided by it first, in float32.
        backend: "auto" (by device), "reference", "cpu" or "triton".

    Returns:
        ``logprob`` and ``lse``, float32 ``[T]`` in nats, the same on every rank. The gradient is
        elementwise in the logits and needs no collective; it has the logits' dtype.

    Raises:
        ValueError: On every rank of the group alike, naming the rank and the row, if any rank's
            logits, ids or bounds break the contract, or a row has no logprob.
    """
    shard, state = vocabulary_state(
        logits_TL,
        token_ids_T,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        backend=backend,
    )
    values, total = finish(state), row_sum(state)
    logprob, lse = _WithGradient.apply(logits_TL, shard, values, total)  # type: ignore[no-untyped-call]
    return SelectedLogprob(logprob=logprob, lse=lse)


def vocabulary_state(
    logits_TL: Tensor,
    token_ids: Tensor,
    *,
    vocab_size: int,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    backend: str,
) -> tuple[ShardInput, State]:
    """This rank's checked shard and the state of the whole vocabulary; as `selected_logprob`."""
    try:
        shard = checked_input(
            logits_TL,
            token_ids,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            temperature=temperature,
            backend=backend,
        )
        state, header = _valid_state(shard), Header.of(shard)
    except Exception as error:
        if group is None:
            raise
        raise group_failure(error, group) from error
    if group is not None:
        state = gather_state(header, state, group)
    elif (gap := coverage_error([(header.start, header.end)], vocab_size)) is not None:
        raise ValueError(gap)
    return shard, state


def _shard_state(shard: ShardInput) -> State:
    """The state of a shard's real columns."""
    return load_backend(shard.backend).expsum_state(
        shard.real_logits_TL.detach(), shard.token_ids, shard.vocab_start, shard.temperature
    )


def _valid_state(shard: ShardInput) -> State:
    """The same, or a ValueError on the first row with an invalid logit."""
    state = _shard_state(shard)
    bad = (state.invalid_column >= 0).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(invalid_logit_message(row, int(state.invalid_column[row])))
    return state


class _WithGradient(torch.autograd.Function):
    """Ties finished values to the logits they came from."""

    @staticmethod
    def forward(
        ctx: Any, logits_TL: Tensor, shard: ShardInput, values: SelectedLogprob, total: RowSum
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits_TL)
        ctx.shard, ctx.total = shard, total
        return values.logprob, values.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # the saved tensor, as torch checks that nobody has changed it in place
        (logits_TL,) = ctx.saved_tensors
        shard: ShardInput = ctx.shard
        grad_logprob, grad_lse = (divided(g.float(), shard.temperature) for g in gradients)
        gradient_TL = torch.empty(logits_TL.shape, dtype=logits_TL.dtype, device=logits_TL.device)
        gradient_TL[:, shard.num_real_columns :] = 0
        load_backend(shard.backend).logits_gradient(
            logits_TL[:, : shard.num_real_columns],
            shard.token_ids,
            shard.vocab_start,
            shard.temperature,
            mantissa=ctx.total.mantissa,
            exponent=ctx.total.exponent,
            grad_logprob=grad_logprob,
            grad_lse=grad_lse,
            out_TL=gradient_TL[:, : shard.num_real_columns],
        )
        return gradient_TL, None, None, None
