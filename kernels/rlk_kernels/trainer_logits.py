"""Selected logprobs of logits as trainers hold them: batches, Megatron's, DTensors.

Each function lays the rows out for `rlk_kernels.selected_logprob` and its result back in the ids'
shape. A row's number in an error counts the rows of the flattened logits.

Letters: B sequences, S positions, L this rank's columns, T rows.
"""

from typing import Any, TypedDict, Unpack

import torch.distributed as dist
from torch import Tensor

from rlk_kernels.finish import SelectedLogprob
from rlk_kernels.selected_logprob import in_place_complaint, logprob_or_complaint


class Options(TypedDict, total=False):
    """What is passed on to `rlk_kernels.selected_logprob` as it is, with the same defaults."""

    temperature: float
    backend: str
    ignore_index: int
    inplace_backward: bool


def batch_logprob(
    logits_BSL: Tensor,
    token_ids_BS: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    active_mask: Tensor | None = None,
    **options: Unpack[Options],
) -> SelectedLogprob:
    """Logprob and LSE ``[B, S]`` of logits ``[B, S, L]``; any leading dimensions do.

    Args:
        logits_BSL: This rank's columns. They are copied where the leading dimensions are no view
            of one, as in ``logits[:, :-1]``; mask the last position instead.
        token_ids_BS: ``[B, S]``, each position's target: the caller shifts.
        vocab_size: As `rlk_kernels.selected_logprob`, and so are the following.
        vocab_start: Token id of this rank's first column.
        group: The ranks whose columns make up the vocabulary.
        active_mask: bool ``[B, S]``.
        options: ``temperature``, ``backend``, ``ignore_index`` and ``inplace_backward``.

    Raises:
        ValueError: On every rank of the group alike, as `rlk_kernels.selected_logprob`.
    """
    return _in_shape(
        logits_BSL,
        token_ids_BS,
        active_mask,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        group=group,
        **options,
    )


def megatron_logprob(
    logits_SBL: Tensor,
    token_ids_BS: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    active_mask: Tensor | None = None,
    **options: Unpack[Options],
) -> SelectedLogprob:
    """Logprob and LSE ``[b, s]`` of Megatron's ``[s, b, V / tp]`` logits.

    Megatron pads the vocabulary until every rank has as many columns, and rank r holds those from
    r times that many on. Ids come and values go as its labels and its loss do, ``[b, s]``.

    Args:
        logits_SBL: What the output layer gives with ``parallel_output``.
        token_ids_BS: ``[b, s]``, each position's target: the caller shifts.
        vocab_size: The real one, without padding.
        group: The tensor-parallel group.
        active_mask: bool ``[b, s]``.
        options: As `batch_logprob`.

    Raises:
        ValueError: On every rank of the group alike, as `rlk_kernels.selected_logprob`.
    """
    width = logits_SBL.shape[-1] if isinstance(logits_SBL, Tensor) and logits_SBL.dim() else 0
    values = _in_shape(
        logits_SBL,
        _transposed(token_ids_BS),
        _transposed(active_mask),
        vocab_size=vocab_size,
        vocab_start=width * dist.get_rank(group),
        group=group,
        **options,
    )
    return SelectedLogprob(logprob=values.logprob.t().contiguous(), lse=values.lse.t().contiguous())


def dtensor_logprob(
    logits: Tensor,
    token_ids: Tensor,
    *,
    vocab_size: int | None = None,
    active_mask: Tensor | None = None,
    **options: Unpack[Options],
) -> SelectedLogprob:
    """Logprob and LSE, plain tensors of the ids' shape, of a DTensor sharded over its columns.

    Bounds and group come from the DTensor; shards may be uneven or empty. Its gradient is sharded
    as the logits are.

    Args:
        logits: DTensor ``[..., V]`` with the placement ``Shard(-1)`` on a mesh of one dimension.
        token_ids: Plain, ``[...]``, the same on every rank.
        vocab_size: Real columns where some are padding; None if all of them are real.
        active_mask: Plain bool ``[...]``.
        options: As `batch_logprob`.

    Raises:
        ValueError: If the logits are no such DTensor; on every rank of the mesh alike, as
            `rlk_kernels.selected_logprob`.
    """
    # imported where it is used: no other part of the kernel needs it
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(logits, DTensor):
        raise ValueError(
            f"dtensor_logprob takes a DTensor, got {type(logits).__name__}; "
            "pass plain shards to selected_logprob"
        )
    mesh, placements = logits.device_mesh, logits.placements
    is_sharded = mesh.ndim == 1 and type(placements[0]) is Shard
    if not is_sharded or placements[0].dim != logits.dim() - 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"logits should be Shard({logits.dim() - 1}) on a mesh of one dimension, got "
            f"{placements} on {mesh.ndim}; redistribute them, or pass to_local() of each "
            "to batch_logprob with its own vocab_start"
        )
    _, offset = compute_local_shape_and_global_offset(logits.shape, mesh, placements)
    in_place = options.get("inplace_backward", False)
    return _in_shape(
        logits.to_local(),
        token_ids,
        active_mask,
        # to_local() is no leaf either
        complaint=in_place_complaint(logits) if in_place else "",
        vocab_size=logits.shape[-1] if vocab_size is None else vocab_size,
        vocab_start=offset[-1],
        group=mesh.get_group(),
        **options,
    )


def _in_shape(
    logits: Tensor,
    token_ids: Tensor,
    active_mask: Tensor | None,
    *,
    complaint: str = "",
    **call: Any,
) -> SelectedLogprob:
    """`selected_logprob` of flattened rows, its values in the ids' shape."""
    complaint = complaint or _shape_complaint(logits, token_ids, active_mask)
    if not complaint and call.get("inplace_backward", False):
        # of the logits as they came: flattened ones are no leaf any more
        complaint = in_place_complaint(logits)
    if complaint:
        # raises it, here and on the other ranks
        return logprob_or_complaint(
            logits, token_ids, active_mask=None, complaint=complaint, **call
        )
    values = logprob_or_complaint(
        logits.flatten(0, -2),
        token_ids.flatten(),
        active_mask=None if active_mask is None else active_mask.flatten(),
        **call,
    )
    shape = token_ids.shape
    return SelectedLogprob(logprob=values.logprob.view(shape), lse=values.lse.view(shape))


def _shape_complaint(logits: Tensor, token_ids: Tensor, active_mask: Tensor | None) -> str:
    """Why the rows cannot be laid out; empty if they can."""
    if not isinstance(logits, Tensor) or not isinstance(token_ids, Tensor):
        got = f"{type(logits).__name__} and {type(token_ids).__name__}"
        return f"logits and token ids should be tensors, got {got}"
    if logits.dim() < 2 or token_ids.shape != logits.shape[:-1]:
        return (
            f"logits [..., columns] and token ids [...] should have the same leading dimensions "
            f"in this order, got {list(logits.shape)} and {list(token_ids.shape)}"
        )
    if active_mask is not None and active_mask.shape != token_ids.shape:
        return (
            "active_mask should have the token ids' shape, got "
            f"{list(active_mask.shape)} and {list(token_ids.shape)}"
        )
    return ""


def _transposed(rows: Any) -> Any:
    """``[b, s]`` as ``[s, b]``; what is no matrix is refused later, on every rank alike."""
    is_matrix = isinstance(rows, Tensor) and rows.dim() == 2
    return rows.t() if is_matrix else rows
