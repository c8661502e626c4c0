"""expsum-1 on a GPU, NVIDIA or AMD: reads the logits where they lie and writes nothing but states.

Letters: T tokens (rows), L this shard's columns, S pieces of a row.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from rlk_kernels.expsum import NUM_BINS, State, empty_state
from rlk_kernels.triton_kernels import piece_states, row_states, tile_gradients

BLOCK = 2048
"""Columns that a program works on at a time."""
NUM_WARPS = 4
LOAD_BYTES = 16
"""What one load of one thread brings at best."""
LONG_PIECE = 8 * BLOCK
"""Columns of a piece: it is read twice, and the second time from the cache."""
SHORT_PIECE = BLOCK
FEW_ROWS = 128
"""Below it rows are cut into short pieces, as long ones would leave most of a GPU idle."""
MAX_PROGRAMS = 1 << 20
"""Programs of a launch. HIP counts threads, at most 2**32, and pieces take 36 bytes each."""
COMPILE_OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
"""A fused multiply-add rounds once where expsum-1 rounds twice."""


def expsum_state(
    logits_TL: Tensor, token_ids: Tensor, vocab_start: int, temperature: float
) -> State:
    """State of the columns [vocab_start, vocab_start + L), all of them real; arguments checked."""
    num_tokens, num_columns = logits_TL.shape
    state = empty_state(num_tokens, logits_TL.device)
    if num_columns == 0:
        return state
    piece_columns = SHORT_PIECE if num_tokens < FEW_ROWS else LONG_PIECE
    num_pieces = triton.cdiv(num_columns, piece_columns)
    # the current device is where triton launches
    with torch.cuda.device_of(logits_TL):
        for rows in _slabs(num_tokens, num_pieces):
            logits_ids = (logits_TL[rows], token_ids[rows], vocab_start, temperature)
            _write_states(*logits_ids, piece_columns, num_pieces, _rows_of(state, rows))
    return state


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
    """Write the gradient of the logits into ``out_TL``, as `rlk_kernels.reference` does.

    ``out_TL`` may be the logits themselves.
    """
    num_tokens, num_columns = logits_TL.shape
    num_tiles = triton.cdiv(num_columns, BLOCK)
    if num_columns == 0:
        return
    per_row = (
        token_ids,
        (1.0 / mantissa).float(),
        exponent.int(),
        grad_logprob.contiguous(),
        grad_lse - grad_logprob,
    )
    with torch.cuda.device_of(logits_TL):
        for rows in _slabs(num_tokens, num_tiles):
            logits, out = logits_TL[rows], out_TL[rows]
            tile_gradients[(len(logits), num_tiles)](
                logits,
                *logits.stride(),
                num_columns,
                vocab_start,
                temperature,
                *(values[rows] for values in per_row),
                out,
                *out.stride(),
                BLOCK=BLOCK,
                HAS_TEMPERATURE=temperature != 1.0,
                **COMPILE_OPTIONS,
            )


def _vector_columns(logits_TL: Tensor) -> int:
    """Columns that one load of one thread brings: 1 unless all rows start at a whole vector."""
    row_stride, column_stride = logits_TL.stride()
    # 16 elements and 16 bytes: what triton itself looks at when it compiles for aligned arguments
    is_aligned = row_stride % 16 == 0 and logits_TL.data_ptr() % LOAD_BYTES == 0
    return LOAD_BYTES // logits_TL.itemsize if is_aligned and column_stride == 1 else 1


def _write_states(
    logits_TL: Tensor,
    token_ids: Tensor,
    vocab_start: int,
    temperature: float,
    piece_columns: int,
    num_pieces: int,
    out: tuple[Tensor, ...],
) -> None:
    """Write the states of some rows into ``out``, the tensors of a `State` in its order."""
    num_tokens, num_columns = logits_TL.shape
    shard = (logits_TL, *logits_TL.stride(), num_columns, vocab_start, temperature)
    top_TS, invalid_TS = (
        torch.empty(num_tokens, num_pieces, dtype=torch.int32, device=logits_TL.device)
        for _ in range(2)
    )
    bins_TSB = torch.empty(
        num_tokens, num_pieces, NUM_BINS, dtype=torch.int64, device=logits_TL.device
    )
    has_temperature = temperature != 1.0
    piece_states[(num_tokens, num_pieces)](
        *shard,
        piece_columns,
        top_TS,
        bins_TSB,
        invalid_TS,
        BLOCK=BLOCK,
        VECTOR=_vector_columns(logits_TL),
        HAS_TEMPERATURE=has_temperature,
        **COMPILE_OPTIONS,
    )
    row_states[(num_tokens,)](
        top_TS,
        bins_TSB,
        invalid_TS,
        num_pieces,
        *shard,
        token_ids,
        *out,
        PIECES=triton.next_power_of_2(num_pieces),
        HAS_TEMPERATURE=has_temperature,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _rows_of(state: State, rows: slice) -> tuple[Tensor, ...]:
    """Views of a state's tensors, in its order."""
    names = ("top", "bins", "target_logit", "has_target", "invalid_column")
    return tuple(getattr(state, name)[rows] for name in names)


def _slabs(num_tokens: int, programs_per_row: int) -> Iterator[slice]:
    """Slices of the rows, each small enough for one launch."""
    step = max(1, MAX_PROGRAMS // programs_per_row)
    for first in range(0, num_tokens, step):
        yield slice(first, min(first + step, num_tokens))
