"""The door: a row's selected-token logprob and LSE, the same bits on every layout.

Letters: T tokens (rows), L this shard's columns.
"""

import torch
import torch.distributed as dist
from torch import Tensor

import rlk_kernels.logprob_op  # noqa: F401 (registers the operator)
from rlk_kernels.eager import eager
from rlk_kernels.expsum import State
from rlk_kernels.finish import SelectedLogprob
from rlk_kernels.shard_input import IGNORE_INDEX, checked_input, setting_complaint
from rlk_kernels.vocabulary_state import shard_state


@eager
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
    return shard_state(shard)


def selected_logprob(
    logits_TL: Tensor,
    token_ids_T: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
    active_mask: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    inplace_backward: bool = False,
) -> SelectedLogprob:
    """Log-probability of each row's token and the row's log-sum-exp, differentiable.

    The same bits come back for any number of ranks, any cut of the vocabulary and any batch around
    a row, because every exponential is an integer and integers are added (docs/numerics.md).
    Works under ``torch.compile(fullgraph=True)`` and under activation checkpointing.

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
        active_mask: bool ``[T]``, the same on every rank; None if all rows are active. An inactive
            row's logits may hold anything; its logprob and lse are 0.0, its gradient is zero.
        ignore_index: What an inactive row's id may be instead of a token id.
        inplace_backward: Write the gradient into the logits' own memory, which saves a second
            matrix. After the backward pass the logits hold their gradient, whoever else looks at
            them; torch raises where its graph still needed their values.

    Returns:
        ``logprob`` and ``lse``, float32 ``[T]`` in nats, the same on every rank. The gradient is
        elementwise in the logits and needs no collective; it has the logits' dtype. There is no
        second gradient.

    Raises:
        ValueError: On every rank of the group alike, naming the rank and the row, if any rank's
            logits, ids, mask or bounds break the contract, or a row has no logprob.
    """
    return logprob_or_complaint(
        logits_TL,
        token_ids_T,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        backend=backend,
        active_mask=active_mask,
        ignore_index=ignore_index,
        inplace_backward=inplace_backward,
    )


def logprob_or_complaint(
    logits_TL: Tensor,
    token_ids_T: Tensor,
    *,
    vocab_size: int,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    active_mask: Tensor | None,
    temperature: float = 1.0,
    backend: str = "auto",
    ignore_index: int = IGNORE_INDEX,
    inplace_backward: bool = False,
    complaint: str = "",
) -> SelectedLogprob:
    """As `selected_logprob`, but where there is a complaint every rank raises it."""
    complaint = (
        complaint
        or _type_complaint(logits_TL, token_ids_T, active_mask, inplace_backward)
        or setting_complaint(vocab_size, vocab_start, ignore_index, temperature, backend)
        or (in_place_complaint(logits_TL) if inplace_backward else "")
    )
    if complaint:
        # what the operator's schema takes, so that the complaint reaches the other ranks
        device = logits_TL.device if isinstance(logits_TL, Tensor) else "cpu"
        logits_TL, active_mask = torch.empty(0, 0, device=device), None
        token_ids_T = torch.empty(0, dtype=torch.int64, device=device)
        vocab_size, vocab_start, ignore_index, temperature, backend = 0, 0, 0, 1.0, ""
        inplace_backward = False
    logprob, lse, _, _ = torch.ops.rlk_kernels.selected_logprob(
        logits_TL,
        token_ids_T,
        active_mask,
        vocab_size,
        vocab_start,
        temperature,
        backend,
        ignore_index,
        None if group is None else group.group_name,
        inplace_backward,
        complaint,
    )
    return SelectedLogprob(logprob=logprob, lse=lse)


def _type_complaint(
    logits_TL: Tensor, token_ids_T: Tensor, active_mask: Tensor | None, inplace_backward: bool
) -> str:
    """What the operator could not even be told of; empty if nothing."""
    if not isinstance(logits_TL, Tensor):
        got = type(logits_TL).__name__
        return f"logits should be a tensor [tokens, columns], got {got}; reshape them"
    if not isinstance(token_ids_T, Tensor):
        got = type(token_ids_T).__name__
        return f"token ids should be an int64 or int32 tensor, got {got}"
    if not (active_mask is None or isinstance(active_mask, Tensor)):
        return f"active_mask should be a bool tensor or None, got {type(active_mask).__name__}"
    if not isinstance(inplace_backward, bool):
        return f"inplace_backward should be True or False, got {inplace_backward!r}"
    if any(hasattr(t, "placements") for t in (logits_TL, token_ids_T, active_mask)):
        return (
            "logits, token ids and mask should be plain tensors, got a DTensor; pass the logits "
            "to rlk_kernels.dtensor_logprob, and ids and mask as to_local()"
        )
    return ""


def in_place_complaint(logits_TL: Tensor) -> str:
    """Why a gradient cannot take the logits' place; empty if it can."""
    if logits_TL.requires_grad and logits_TL.is_leaf:
        return (
            "inplace_backward should get logits that an operation made, got a leaf, whose values "
            "the gradient would replace; pass inplace_backward=False"
        )
    has_rows = logits_TL.dim() == 2 and logits_TL.shape[0] > 1
    if has_rows and logits_TL.stride(0) < logits_TL.shape[1]:
        return (
            f"inplace_backward should get rows that lie apart, got {logits_TL.shape[1]} columns "
            f"in rows {logits_TL.stride(0)} apart; pass logits.contiguous()"
        )
    return ""
