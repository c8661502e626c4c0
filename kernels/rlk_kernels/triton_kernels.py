# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""expsum-1 as Triton kernels, for NVIDIA and AMD: the same integers as `rlk_kernels.reference`.

A row is cut into pieces, and each program adds up one piece: it finds the piece's largest logit and
then, from the cache, accumulates. A second kernel merges a row's pieces. No order of additions can
change the bits, so block sizes, pieces and warps may be tuned freely; a fused multiply-add may not,
so all kernels are launched with ``enable_fp_fusion=False``.

A tile is [BLOCK // VECTOR, VECTOR], where VECTOR columns are what one load of one thread brings, so
that summing over them moves nothing between threads.
Pointers have no Python type. Letters: T tokens (rows), L this shard's columns, S pieces of a row.
"""

import triton
import triton.language as tl

from rlk_kernels import expsum
from rlk_kernels.triton_columns import (
    BIN_WIDTH,
    MAGIC_BITS,
    bin_of,
    exponential,
    larger,
    scaled,
    tile_offsets,
    widened,
)

LIMIT = tl.constexpr(expsum.LIMIT)
NUM_BINS = tl.constexpr(expsum.NUM_BINS)
EMPTY_TOP = tl.constexpr(expsum.EMPTY_TOP)
MANTISSA_UNIT = tl.constexpr(float(1 << expsum.MANTISSA_BITS))
NEAR_MASKED = tl.constexpr(-8000.0)
"""Above it no kept bin of a piece reaches down to masked columns."""


@triton.jit
def piece_states(
    logits_ptr,  # [T, L]
    row_stride,
    column_stride,
    num_columns,
    vocab_start,
    temperature,
    piece_columns,
    top_ptr,  # int32 [T, S]
    bins_ptr,  # int64 [T, S, 3]
    invalid_ptr,  # int32 [T, S]
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Write the state of one piece of one row; the grid is (T, S)."""
    # int64: T * L passes 2**31 at 14135 rows of 151936 columns
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * piece_columns
    length = tl.minimum(piece_columns, num_columns - start)
    piece_ptr = logits_ptr + row * row_stride + start.to(tl.int64) * column_stride
    largest, is_valid = _piece_maximum(
        piece_ptr, column_stride, length, temperature, BLOCK, VECTOR, HAS_TEMPERATURE
    )
    largest, first_invalid = _valid_maximum(
        piece_ptr,
        column_stride,
        length,
        tl.where(is_valid, 0, length),
        largest,
        temperature,
        BLOCK,
        VECTOR,
        HAS_TEMPERATURE,
    )
    is_empty = largest <= -LIMIT
    top = tl.where(is_empty, EMPTY_TOP, bin_of(largest))
    high, middle, low = _piece_sums(
        piece_ptr,
        column_stride,
        tl.where(is_empty, 0, length),
        is_valid & (largest > NEAR_MASKED),
        temperature,
        top,
        BLOCK,
        VECTOR,
        HAS_TEMPERATURE,
    )
    piece = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(top_ptr + piece, top)
    tl.store(bins_ptr + piece * NUM_BINS, high)
    tl.store(bins_ptr + piece * NUM_BINS + 1, middle)
    tl.store(bins_ptr + piece * NUM_BINS + 2, low)
    invalid = tl.where(first_invalid < length, vocab_start + start + first_invalid, -1)
    tl.store(invalid_ptr + piece, invalid)


@triton.jit
def row_states(
    piece_top_ptr,  # int32 [T, S]
    piece_bins_ptr,  # int64 [T, S, 3]
    piece_invalid_ptr,  # int32 [T, S]
    num_pieces,
    logits_ptr,  # [T, L]
    row_stride,
    column_stride,
    num_columns,
    vocab_start,
    temperature,
    token_ids_ptr,  # int64 [T]
    top_ptr,  # int32 [T]
    bins_ptr,  # int64 [T, 3]
    target_logit_ptr,  # float32 [T]
    has_target_ptr,  # bool [T]
    invalid_ptr,  # int32 [T]
    PIECES: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Merge the pieces of one row; the grid is (T,), PIECES a power of two that holds S."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, PIECES)
    is_piece = offsets < num_pieces
    pieces = row * num_pieces + offsets
    piece_top = tl.load(piece_top_ptr + pieces, mask=is_piece, other=EMPTY_TOP)
    top = tl.max(piece_top, 0)
    tl.store(top_ptr + row, top)
    for b in tl.static_range(NUM_BINS):
        total = tl.zeros([PIECES], tl.int64)
        for source in tl.static_range(b + 1):
            # a lower piece's bins move down; what leaves the third bin is dropped
            is_moved = is_piece & (top - piece_top == b - source)
            total += tl.load(piece_bins_ptr + pieces * NUM_BINS + source, mask=is_moved, other=0)
        tl.store(bins_ptr + row * NUM_BINS + b, tl.sum(total, 0))
    invalid = tl.load(piece_invalid_ptr + pieces, mask=is_piece, other=-1)
    # the smallest id counts, and as an unsigned number -1 is the largest
    first = tl.min(invalid.to(tl.uint32, bitcast=True), 0)
    tl.store(invalid_ptr + row, first.to(tl.int32, bitcast=True))
    column = tl.load(token_ids_ptr + row) - vocab_start
    has_target = (column >= 0) & (column < num_columns)
    place = logits_ptr + row * row_stride + column * column_stride
    target_logit = tl.load(place, mask=has_target, other=0.0).to(tl.float32)
    if HAS_TEMPERATURE:
        target_logit = tl.div_rn(target_logit, temperature)
    tl.store(target_logit_ptr + row, target_logit)
    tl.store(has_target_ptr + row, has_target)


@triton.jit
def tile_gradients(
    logits_ptr,  # [T, L]
    row_stride,
    column_stride,
    num_columns,
    vocab_start,
    temperature,
    token_ids_ptr,  # int64 [T]
    inverse_ptr,  # float32 [T]
    exponent_ptr,  # int32 [T]
    grad_logprob_ptr,  # float32 [T]
    weight_ptr,  # float32 [T]
    out_ptr,  # [T, L], may be the logits
    out_row_stride,
    out_column_stride,
    BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Write the gradient of BLOCK columns of one row; the grid is (T, tiles of a row)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    place = logits_ptr + row * row_stride + columns.to(tl.int64) * column_stride
    z = widened(tl.load(place, mask=is_column, other=0.0), temperature, HAS_TEMPERATURE)
    shifted, p = exponential(z)
    power = shifted.to(tl.int32, bitcast=True) - (MAGIC_BITS + tl.load(exponent_ptr + row))
    probability = scaled(p * tl.load(inverse_ptr + row), power)
    is_live = (z > -LIMIT) & (z <= LIMIT)
    gradient = tl.load(weight_ptr + row) * tl.where(is_live, probability, 0.0)
    is_target = columns == (tl.load(token_ids_ptr + row) - vocab_start).to(tl.int32)
    gradient = tl.where(is_target, gradient + tl.load(grad_logprob_ptr + row), gradient)
    out = out_ptr + row * out_row_stride + columns.to(tl.int64) * out_column_stride
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _piece_maximum(
    piece_ptr,
    column_stride,
    length,
    temperature,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """The largest logit and whether all are valid; if not, the first one means nothing."""
    offsets = tile_offsets(BLOCK, VECTOR)
    tile_ptr = piece_ptr + offsets.to(tl.int64) * column_stride
    largest = tl.full([BLOCK // VECTOR, VECTOR], -float("inf"), tl.float32)
    whole = length // BLOCK * BLOCK
    for _ in range(0, whole, BLOCK):
        largest = larger(largest, tl.load(tile_ptr).to(tl.float32))
        tile_ptr += BLOCK * column_stride
    z = tl.load(tile_ptr, mask=whole + offsets < length, other=-float("inf"))
    largest = larger(largest, z.to(tl.float32))
    # divided last: a rounded division by a positive number keeps the order
    largest = widened(largest, temperature, HAS_TEMPERATURE)
    is_valid = largest <= LIMIT
    return tl.max(tl.where(is_valid, largest, -float("inf"))), tl.min(is_valid.to(tl.int32)) != 0


@triton.jit
def _valid_maximum(
    piece_ptr,
    column_stride,
    length,
    search_length,
    largest,
    temperature,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """The largest valid logit and the first invalid column, ``length`` if none is.

    ``search_length`` is 0 if none is invalid and ``largest`` stands, else ``length``.
    """
    offsets = tile_offsets(BLOCK, VECTOR)
    first = tl.full([BLOCK // VECTOR, VECTOR], 0, tl.int32) + length
    valid = tl.full([BLOCK // VECTOR, VECTOR], -float("inf"), tl.float32)
    for start in range(0, search_length, BLOCK):
        columns = start + offsets
        place = piece_ptr + columns.to(tl.int64) * column_stride
        z = tl.load(place, mask=columns < length, other=-float("inf"))
        z = widened(z, temperature, HAS_TEMPERATURE)
        is_valid = z <= LIMIT
        first = tl.minimum(first, tl.where(is_valid, length, columns))
        valid = tl.maximum(valid, tl.where(is_valid, z, -float("inf")))
    return tl.where(search_length > 0, tl.max(valid), largest), tl.min(first)


@triton.jit
def _piece_sums(
    piece_ptr,
    column_stride,
    length,
    is_plain,
    temperature,
    top,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """The three bins of a piece, the highest first.

    In a plain piece no column is invalid or lies both in a bin and at or below -LIMIT.
    """
    offsets = tile_offsets(BLOCK, VECTOR)
    from_high = tl.zeros([BLOCK // VECTOR], tl.int64)
    from_middle = tl.zeros([BLOCK // VECTOR], tl.int64)
    from_low = tl.zeros([BLOCK // VECTOR], tl.int64)
    tile_ptr = piece_ptr + offsets.to(tl.int64) * column_stride
    whole = tl.where(is_plain, length // BLOCK * BLOCK, 0)
    for _ in range(0, whole, BLOCK):
        z = widened(tl.load(tile_ptr), temperature, HAS_TEMPERATURE)
        high, middle, low = _tile_sums(z, top)
        from_high += high
        from_middle += middle
        from_low += low
        tile_ptr += BLOCK * column_stride
    # the rest: a last part of a tile, or all of a piece that is not plain
    for start in range(whole, length, BLOCK):
        z = tl.load(tile_ptr, mask=start + offsets < length, other=-float("inf"))
        z = widened(z, temperature, HAS_TEMPERATURE)
        z = tl.where((z > -LIMIT) & (z <= LIMIT), z, -float("inf"))
        high, middle, low = _tile_sums(z, top)
        from_high += high
        from_middle += middle
        from_low += low
        tile_ptr += BLOCK * column_stride
    high = tl.sum(from_high, 0)
    middle = tl.sum(from_middle, 0)
    return high, middle - high, tl.sum(from_low, 0) - middle


@triton.jit
def _tile_sums(z, top):
    """For each vector of the tile the int64 sums of its columns from each bin upwards.

    A column has one integer in whichever sum it is, so the bins are differences of the sums, and a
    bin takes one comparison. It compares integers, because behind a comparison of floats LLVM
    widens before it selects, and then multiplies 64 by 64 bits.
    """
    shifted, p = exponential(z)
    bits = shifted.to(tl.int32, bitcast=True)
    high_bits = MAGIC_BITS + BIN_WIDTH * top
    middle_bits = high_bits - BIN_WIDTH
    low_bits = middle_bits - BIN_WIDTH
    in_high = bits >= high_bits
    in_middle = bits >= middle_bits
    bin_bits = tl.where(in_high, high_bits, tl.where(in_middle, middle_bits, low_bits))
    # of a column below all bins the shift and the mantissa mean nothing, and no sum selects it
    weight = 1 << (bits - bin_bits)
    mantissa = (p * MANTISSA_UNIT).to(tl.int32)
    return (
        _sum_of_products(mantissa, tl.where(in_high, weight, 0)),
        _sum_of_products(mantissa, tl.where(in_middle, weight, 0)),
        _sum_of_products(mantissa, tl.where(bits >= low_bits, weight, 0)),
    )


@triton.jit
def _sum_of_products(mantissa, weight):
    """The int64 sums over a tile's vectors."""
    products = mantissa.to(tl.uint32).to(tl.uint64) * weight.to(tl.uint32).to(tl.uint64)
    return tl.sum(products, 1).to(tl.int64)
