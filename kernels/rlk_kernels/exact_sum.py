"""The door to exact sums: the same bits in any order and on any number of ranks, differentiable."""

from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.collective import all_gather_words
from rlk_kernels.eager import eager
from rlk_kernels.sum_state import SUM_BINS, SumState, empty_sum, finish_sum, merge_sums, sum_state

FIRST_SUMS = 8
"""Sums that travel with the header; only more of them need a second all-gather."""
MAX_DIMS = 8
ERROR_WORDS = 40
HEADER_WORDS = 2 + MAX_DIMS + ERROR_WORDS


@eager
def exact_sum(
    values: Tensor, *, dim: int | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The sum of all values, or of those along ``dim``, correctly rounded to float32.

    The exact real sum is rounded once, to nearest even, so its bits do not depend on the order of
    the values, on how they are split over ranks or on what is added first (docs/numerics.md).

    Args:
        values: float32, bfloat16 or float16, of any shape; NaN and infinities are refused.
        dim: The dimension to add up; None for all of them.
        group: The ranks whose sums are added; None if this process holds all values. The ranks may
            hold different numbers of values (none, too), but their results have one shape. One
            all-gather carries up to 8 sums of 256 bytes; a second one follows for more.

    Returns:
        float32, of the shape of ``values`` without ``dim``; a scalar for None; the same on every
        rank. Zero is +0.0. The gradient of each of this rank's values is the result's, without
        any collective.

    Raises:
        ValueError: On every rank of the group alike, naming the rank and the index, if a value is
            not finite, a dtype is another, shapes differ, one sum has more than 2**31 values, or a
            sum lies beyond float32.
    """
    return _ExactSum.apply(values, dim, group, False)  # type: ignore[no-untyped-call, no-any-return]


@eager
def exact_mean(
    values: Tensor, *, dim: int | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean of all values of all ranks, or of those along ``dim``, as float32.

    The exact sum is rounded to float64, divided once by the number of values and rounded to
    float32. Arguments, gradient (divided by that number) and errors are those of `exact_sum`.

    Raises:
        ValueError: As `exact_sum`, and if there is no value at all.
    """
    return _ExactSum.apply(values, dim, group, True)  # type: ignore[no-untyped-call, no-any-return]


def group_sum_state(values: Tensor, dim: int | None, group: dist.ProcessGroup) -> SumState:
    """The merged `sum_state` of all ranks; it waits at most for the group's timeout.

    Raises:
        ValueError: The same on every rank, naming the first rank at fault.
    """
    state, error = _own_state(values, dim)
    rows = state.bins.reshape(-1, SUM_BINS)
    first = torch.zeros(FIRST_SUMS, SUM_BINS, dtype=torch.int64, device=rows.device)
    first[: len(rows)] = rows[:FIRST_SUMS]
    header = _header(state, error).to(rows.device)
    messages = all_gather_words(torch.cat([header, first.flatten()]), group)
    headers = torch.stack(messages)[:, :HEADER_WORDS]
    _check_headers(headers)
    parts = [words[HEADER_WORDS:].view(FIRST_SUMS, SUM_BINS)[: len(rows)] for words in messages]
    if len(rows) > FIRST_SUMS:
        others = all_gather_words(rows[FIRST_SUMS:], group)
        parts = [torch.cat(pair) for pair in zip(parts, others, strict=True)]
    states = (
        SumState(bins=part.view_as(state.bins).to(state.bins.device), num_values=count)
        for part, count in zip(parts, headers[:, 0].tolist(), strict=True)
    )
    return reduce(merge_sums, states)


class _ExactSum(torch.autograd.Function):
    """A sum or a mean whose gradient is handed to every value alike."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, dim: int | None, group: dist.ProcessGroup | None, is_mean: bool
    ) -> Tensor:
        state = sum_state(values, dim) if group is None else group_sum_state(values, dim, group)
        ctx.values_like, ctx.dim = (values.shape, values.dtype), dim
        ctx.divisor = state.num_values if is_mean else 1
        if ctx.divisor == 0:
            raise ValueError("a mean needs at least one value, got none")
        if not is_mean:
            return finish_sum(state)
        total = finish_sum(state, torch.float64)
        # by a tensor: torch multiplies by the reciprocal of a scalar on CUDA
        return (total / torch.full_like(total, ctx.divisor)).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shape, dtype = ctx.values_like
        each = gradients[0] / torch.full_like(gradients[0], ctx.divisor)
        if ctx.dim is not None:
            each = each.unsqueeze(ctx.dim)
        return each.to(dtype).expand(shape), None, None, None


def _own_state(values: Tensor, dim: int | None) -> tuple[SumState, str]:
    """This rank's sums and an empty text, or what is wrong with its values."""
    try:
        state = sum_state(values, dim)
        if state.bins.dim() > MAX_DIMS + 1:
            raise ValueError(f"a group's sums have at most {MAX_DIMS} dimensions; reshape them")
    except Exception as error:
        device = values.device if isinstance(values, Tensor) else "cpu"
        return empty_sum(device=device), str(error) or type(error).__name__
    return state, ""


def _header(state: SumState, error: str) -> Tensor:
    """int64 [HEADER_WORDS]: number of values, shape, error; a long error is cut."""
    shape = state.bins.shape[:-1]
    padded = [*shape, *[-1] * (MAX_DIMS - len(shape))]
    size = ERROR_WORDS * 8
    text = error.encode("ascii", "replace")[:size].ljust(size, b"\0")
    words = np.frombuffer(text, np.int64).copy()
    numbers = torch.tensor([state.num_values, len(shape), *padded])
    return torch.cat([numbers, torch.from_numpy(words)])


def _check_headers(headers: Tensor) -> None:
    """Raise what is wrong with the group's sums, naming the rank."""
    numbers, texts = headers[:, : 2 + MAX_DIMS].tolist(), headers[:, 2 + MAX_DIMS :]
    for rank, text in enumerate(texts):
        error = text.contiguous().numpy().tobytes().rstrip(b"\0").decode("ascii")
        if error:
            raise ValueError(f"rank {rank}: {error}")
    shapes = [row[2 : 2 + row[1]] for row in numbers]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"rank {rank} has sums of shape {shape}, rank 0 {shapes[0]}; "
                "every rank of the group passes values of one shape but for the summed dimension"
            )
