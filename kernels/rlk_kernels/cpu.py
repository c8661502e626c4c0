"""expsum-1 fused for the CPU: a row is read once, tile by tile, and only a tile is ever widened.

Rows are split over torch's number of threads, which share no state, so any thread may call.
Letters: T tokens (rows), L this shard's columns.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_kernels.cpu_kernels import row_gradients, row_states
from rlk_kernels.expsum import State, empty_state
from rlk_kernels.reference import divided

BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""The integers that carry a dtype's bits; `rlk_kernels.cpu_kernels` tells the dtype by them."""
Range = tuple[int, int]
MIN_ELEMENTS = 1 << 17
"""Fewer logits are done before another thread would have started."""


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="rlk_kernels")


def _replace_pool() -> None:
    global _pool
    _pool = _new_pool()


_pool = _new_pool()
# threads do not survive a fork
os.register_at_fork(after_in_child=_replace_pool)


def expsum_state(
    logits_TL: Tensor, token_ids: Tensor, vocab_start: int, temperature: float
) -> State:
    """State of the columns [vocab_start, vocab_start + L), all of them real; arguments checked."""
    num_tokens, num_columns = logits_TL.shape
    state = empty_state(num_tokens)
    if num_columns == 0:
        return state
    bits, stride = _row_bits(logits_TL)
    outputs = (state.top.numpy(), state.bins.numpy(), state.invalid_column.numpy())
    heat = np.float32(temperature)

    def work(rows: Range) -> None:
        row_states(bits, stride, num_columns, vocab_start, heat, rows, outputs)

    _over_rows(logits_TL.shape, work)
    column = token_ids - vocab_start
    has_target = (column >= 0) & (column < num_columns)
    target_logit = logits_TL.gather(1, torch.where(has_target, column, 0)[:, None])[:, 0].float()
    return State(
        top=state.top,
        bins=state.bins,
        target_logit=torch.where(has_target, divided(target_logit, temperature), 0.0),
        has_target=has_target,
        invalid_column=state.invalid_column,
    )


def logits_gradient(
    logits_TL: Tensor,
    token_ids: Tensor,
    vocab_start: int,
    temperature: float,
    *,
    mantissa: Tensor,
    exponent: Tensor,
    grad_logprob: Tensor,
    grad_lse: Tensor,
    out_TL: Tensor,
) -> None:
    """Write the gradient of the logits into ``out_TL``, as `rlk_kernels.reference` does."""
    num_columns = logits_TL.shape[1]
    if out_TL.numel() == 0:
        return
    bits, stride = _row_bits(logits_TL)
    out_bits, out_stride = _row_bits(out_TL)
    # halving is exact, and keeps the factor 2**(n - exponent + 1) a normal number
    half_inverse = ((1.0 / mantissa).float() * 0.5).numpy()
    weight = (grad_lse - grad_logprob).numpy()
    target_column = (token_ids - vocab_start).numpy()
    per_row = (target_column, exponent.float().numpy(), half_inverse, grad_logprob.numpy(), weight)
    heat = np.float32(temperature)

    def work(rows: Range) -> None:
        row_gradients(bits, stride, num_columns, heat, rows, per_row, out_bits, out_stride)

    _over_rows(logits_TL.shape, work)


def _row_bits(matrix_TL: Tensor) -> tuple[npt.NDArray[np.generic], int]:
    """The bits from the first row's first column to the last one's last, and the rows' distance."""
    num_tokens, num_columns = matrix_TL.shape
    stride = matrix_TL.stride(0)
    span = max(0, (num_tokens - 1) * stride + num_columns)
    return matrix_TL.detach().as_strided((span,), (1,)).view(BITS[matrix_TL.dtype]).numpy(), stride


def _over_rows(shape: torch.Size, work: Callable[[Range], None]) -> None:
    """Do ``work`` on ranges of rows that make up all of them, one range a thread."""
    num_tokens = shape[0]
    num_parts = max(1, min(torch.get_num_threads(), num_tokens, shape.numel() // MIN_ELEMENTS))
    cuts = [num_tokens * part // num_parts for part in range(num_parts + 1)]
    first, *others = pairwise(cuts)
    running = [_pool.submit(work, rows) for rows in others]
    work(first)
    for part in running:
        part.result()
