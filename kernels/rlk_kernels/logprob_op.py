"""The logprob as operators that the compiler looks at from outside: schema, shapes, gradient.

A rank's arguments are checked inside, where its complaint can be told to the others, so the
schema takes whatever has the right type. `torch.library.define` and not `custom_op`: the latter
imports the whole compiler at its first call, two seconds in every process that never compiles.

Letters: T tokens (rows), L this shard's columns.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from rlk_kernels.backends import backend_id, load_backend
from rlk_kernels.collective import group_failure
from rlk_kernels.finish import finish_active
from rlk_kernels.reference import divided
from rlk_kernels.vocabulary_state import vocabulary_state

FORWARD, GRADIENT, GRADIENT_IN_PLACE = (
    f"rlk_kernels::{name}" for name in ("selected_logprob", "logits_gradient", "logits_gradient_")
)
SHARD = "SymInt vocab_size, SymInt vocab_start, float temperature, str backend"
SUM = "Tensor mantissa, Tensor exponent, Tensor? grad_logprob, Tensor? grad_lse"
NUM_ARGUMENTS = 11
"""Of the forward operator; only the first one has a gradient."""
NO_SECOND_GRADIENT = (
    "the gradient of selected_logprob has no gradient of its own; "
    "call backward without create_graph=True"
)

torch.library.define(
    FORWARD,
    f"(Tensor logits, Tensor token_ids, Tensor? active_mask, {SHARD}, int ignore_index, "
    "str? group_name, bool inplace_backward, str complaint) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    GRADIENT, f"(Tensor logits, Tensor token_ids, Tensor? active_mask, {SHARD}, {SUM}) -> Tensor"
)
torch.library.define(
    GRADIENT_IN_PLACE,
    f"(Tensor(a!) logits, Tensor token_ids, Tensor? active_mask, {SHARD}, {SUM}) -> ()",
)


@torch.library.impl(FORWARD, "CompositeExplicitAutograd")
def _forward(
    logits_TL: Tensor,
    token_ids: Tensor,
    active_mask: Tensor | None,
    vocab_size: int,
    vocab_start: int,
    temperature: float,
    backend: str,
    ignore_index: int,
    group_name: str | None,
    inplace_backward: bool,
    complaint: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob and lse float32 [T], then mantissa and exponent float64 [T] of the rows' sums."""
    group = None if group_name is None else _group_of(group_name)
    if complaint:
        error = ValueError(complaint)
        raise error if group is None else group_failure(error, group, logits_TL.device)
    shard, state = vocabulary_state(
        logits_TL,
        token_ids,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        backend=backend,
        active_mask=active_mask,
        ignore_index=ignore_index,
    )
    values, total = finish_active(state, shard.active)
    return values.logprob, values.lse, total.mantissa, total.exponent


def _group_of(name: str) -> dist.ProcessGroup:
    # how torch's own functional collectives find theirs; it is not exported, so not typed either
    resolve: Callable[[str], dist.ProcessGroup] = vars(c10d)["_resolve_process_group"]
    return resolve(name)


@torch.library.register_fake(FORWARD)  # type: ignore[untyped-decorator]
def _forward_shapes(logits_TL: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    single, double = (
        logits_TL.new_empty(logits_TL.shape[:1], dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    return single, torch.empty_like(single), double, torch.empty_like(double)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TL, token_ids, active_mask, *ctx.shard = inputs[:7]
    ctx.is_in_place = inputs[9]
    mantissa, exponent = output[2:]
    ctx.mark_non_differentiable(mantissa, exponent)
    ctx.set_materialize_grads(False)
    # saved tensors, as torch checks that nobody has changed them in place
    ctx.save_for_backward(logits_TL, token_ids, active_mask, mantissa, exponent)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_TL, token_ids, active_mask, mantissa, exponent = ctx.saved_tensors
    upstream = (mantissa, exponent, *gradients[:2])
    arguments = (token_ids, active_mask, *ctx.shard, *upstream)
    if ctx.is_in_place:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_GRADIENT)
        # its version goes with the logits', so every later use of what they were is noticed
        gradient_TL = logits_TL.detach()
        torch.ops.rlk_kernels.logits_gradient_(gradient_TL, *arguments)
    else:
        gradient_TL = torch.ops.rlk_kernels.logits_gradient(logits_TL, *arguments)
    return (gradient_TL, *[None] * (NUM_ARGUMENTS - 1))


torch.library.register_autograd(FORWARD, _backward, setup_context=_keep_for_backward)


@torch.library.impl(GRADIENT, "CompositeExplicitAutograd")
def _gradient(logits_TL: Tensor, *arguments: Any) -> Tensor:
    gradient_TL = _empty_like(logits_TL)
    _write_gradient(logits_TL, *arguments, out_TL=gradient_TL)
    return gradient_TL


@torch.library.impl(GRADIENT_IN_PLACE, "CompositeExplicitAutograd")
def _gradient_in_place(logits_TL: Tensor, *arguments: Any) -> None:
    _write_gradient(logits_TL, *arguments, out_TL=logits_TL)
    # backends write past torch's eyes
    torch.autograd.graph.increment_version(logits_TL)


@torch.library.register_fake(GRADIENT)  # type: ignore[untyped-decorator]
def _gradient_shape(logits_TL: Tensor, *_: Any) -> Tensor:
    return _empty_like(logits_TL)


def _empty_like(logits_TL: Tensor) -> Tensor:
    """Contiguous, whatever the rows' distance."""
    return torch.empty(logits_TL.shape, dtype=logits_TL.dtype, device=logits_TL.device)


@torch.library.register_fake(GRADIENT_IN_PLACE)  # type: ignore[untyped-decorator]
def _gradient_in_place_shape(logits_TL: Tensor, *_: Any) -> None:
    return None


def _refuse_second_gradient(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_GRADIENT)


torch.library.register_autograd(GRADIENT, _refuse_second_gradient)


def _write_gradient(
    logits_TL: Tensor,
    token_ids: Tensor,
    active_mask: Tensor | None,
    vocab_size: int,
    vocab_start: int,
    temperature: float,
    backend: str,
    mantissa: Tensor,
    exponent: Tensor,
    grad_logprob: Tensor | None,
    grad_lse: Tensor | None,
    *,
    out_TL: Tensor,
) -> None:
    """The gradient of numerics.md, zero in padding columns and inactive rows."""
    num_real_columns = min(logits_TL.shape[1], max(0, vocab_size - vocab_start))
    grad_logprob, grad_lse = (
        mantissa.new_zeros(len(mantissa), dtype=torch.float32)
        if g is None
        else divided(g.float().contiguous(), temperature)
        for g in (grad_logprob, grad_lse)
    )
    load_backend(backend_id(backend, logits_TL.device)).logits_gradient(
        logits_TL[:, :num_real_columns].detach(),
        token_ids.long(),
        vocab_start,
        temperature,
        mantissa=mantissa,
        exponent=exponent,
        grad_logprob=grad_logprob,
        grad_lse=grad_lse,
        out_TL=out_TL[:, :num_real_columns],
    )
    if num_real_columns < out_TL.shape[1]:
        out_TL[:, num_real_columns:] = 0
    if active_mask is not None:
        out_TL[~active_mask] = 0
