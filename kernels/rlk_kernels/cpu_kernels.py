"""The CPU backend's inner loops: tiles of a row in LLVM vectors, rows in numba.

numba's own loops would do, but LLVM decides for itself whether to vectorise them and how wide, and
it never reorders a float sum. Here the lanes are said: a tile adds at most 256 terms to each
float64, which is exact, as 256 * 2**44.5 < 2**53. On narrower registers LLVM splits the vectors and
the bits stay, as no operation is fused and no sum rounds.

numba's cache notices only changes of a kernel's own file, and what it compiles holds constants and
code of two more: so a digest of theirs is part of the kernels' names, which the cache goes by.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rlk_kernels.expsum import (
    BIN_WIDTH,
    EMPTY_TOP,
    LIMIT,
    LN2_HI,
    LN2_LO,
    LOG2E,
    MAGIC,
    MANTISSA_BITS,
    NUM_BINS,
    POLYNOMIAL,
)
from rlk_kernels.lanes import (
    DOUBLES,
    FLOATS,
    INTS,
    LANES,
    LONGS,
    all_lanes,
    lane_sum,
    larger,
    load_tile,
    prefetch,
    splat,
    store_tile,
    vector_pointer,
)

TILE = LANES * 256
NEAR_MASKED = -8000.0
"""Below it a row's third bin may reach down to masked columns."""
SOURCES = ("expsum.py", "lanes.py")
"""What is compiled into the kernels beside this file."""

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compiled without the GIL and without fastmath, so that every operation rounds by itself."""
    function.__qualname__ = f"{function.__name__}-{_sources_digest()}"
    compiled = njit(nogil=True, cache=True, error_model="numpy")(function)
    return cast(Function, compiled)


def _sources_digest() -> str:
    sources = [(Path(__file__).parent / name).read_bytes() for name in SOURCES]
    return hashlib.blake2b(b"".join(sources), digest_size=8).hexdigest()


@intrinsic  # type: ignore[untyped-decorator]
def tile_sums(typingctx: Any, tile: Any, num_vectors: Any, lowest_power: Any, ahead: Any) -> Any:
    """Integer sums of the tile's three bins, the highest first.

    ``lowest_power`` is 21 * (top - 2): columns below take no part, and none lies above top.
    ``ahead`` are the logits read next, fetched into the cache meanwhile.
    """
    result = types.UniTuple(types.int64, NUM_BINS)

    def codegen(context: Any, build: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer, next_ptr = (vector_pointer(context, build, signature, args, i) for i in (0, 3))
        lowest = build.trunc(args[2], ir.IntType(32))
        origin = build.fadd(build.sitofp(lowest, ir.FloatType()), ir.FloatType()(MAGIC))
        # a bin is below < n + MAGIC < above; LLVM makes one masked comparison of that, not of >=
        below, above = (
            [splat(build, build.fadd(origin, ir.FloatType()(BIN_WIDTH * k + side))) for k in bins]
            for side, bins in ((-1.0, (2, 1, 0)), (0.0, (3, 2, 1)))
        )
        sums = [cgutils.alloca_once_value(build, all_lanes(DOUBLES, 0.0)) for _ in range(NUM_BINS)]
        with cgutils.for_range(build, args[1]) as loop:
            prefetch(build, build.gep(next_ptr, [loop.index]))
            z = build.load(build.gep(pointer, [loop.index]), align=4)
            shifted, p = _exponential(build, z)
            # p * 2**(n - lowest) by its bits; those of MAGIC leave with the shift
            power = build.sub(build.bitcast(shifted, INTS), splat(build, lowest))
            bits = build.add(build.bitcast(p, INTS), build.shl(power, all_lanes(INTS, 23)))
            value = build.fpext(build.bitcast(bits, FLOATS), DOUBLES)
            for b in range(NUM_BINS):
                inside = build.fcmp_ordered(">", shifted, below[b])
                if b > 0:
                    is_lower = build.fcmp_ordered(">", above[b], shifted)
                    inside = build.and_(inside, is_lower)
                before = build.load(sums[b])
                build.store(build.select(inside, build.fadd(before, value), before), sums[b])
        units = [2.0 ** (MANTISSA_BITS - BIN_WIDTH * k) for k in (2, 1, 0)]
        values = [
            lane_sum(build, build.fptosi(build.fmul(build.load(s), all_lanes(DOUBLES, u)), LONGS))
            for s, u in zip(sums, units, strict=True)
        ]
        return context.make_tuple(build, signature.return_type, values)

    return result(tile, types.int64, types.int64, ahead), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_gradient(
    typingctx: Any, tile: Any, num_vectors: Any, exponent: Any, half_inverse: Any, weight: Any
) -> Any:
    """Turn the tile's logits into weight * probability.

    probability = p * 2 half_inverse * 2**(n - exponent), in one rounding, 0 below 2**-126.
    """
    single = types.float32

    def codegen(context: Any, build: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = vector_pointer(context, build, signature, args, 0)
        one_less = build.fsub(args[2], ir.FloatType()(1.0))
        origin = splat(build, build.fadd(one_less, ir.FloatType()(MAGIC)))
        half_inverse, weight = (splat(build, value) for value in args[3:])
        with cgutils.for_range(build, args[1]) as loop:
            place = build.gep(pointer, [loop.index])
            z = build.load(place, align=4)
            shifted, p = _exponential(build, z)
            # n - exponent + 1, where -127 makes a factor of 0: 2**-127 itself is no normal number
            power = larger(build, build.fsub(shifted, origin), all_lanes(FLOATS, -127.0))
            factor_bits = build.fptosi(build.fadd(power, all_lanes(FLOATS, 127.0)), INTS)
            factor = build.bitcast(build.shl(factor_bits, all_lanes(INTS, 23)), FLOATS)
            probability = build.fmul(build.fmul(p, half_inverse), factor)
            # false of NaN, which the polynomial gives far below the limit
            is_normal = build.fcmp_ordered(">=", probability, all_lanes(FLOATS, 2.0**-126))
            is_live = build.and_(is_normal, build.fcmp_ordered(">", z, all_lanes(FLOATS, -LIMIT)))
            kept = build.select(is_live, probability, all_lanes(FLOATS, 0.0))
            build.store(build.fmul(weight, kept), place, align=4)
        return context.get_dummy_value()

    return types.void(tile, types.int64, single, single, single), codegen


@jit
def row_states(
    source: Any,
    stride: int,
    num_columns: int,
    vocab_start: int,
    temperature: Any,
    rows: Any,
    outputs: Any,
) -> None:
    """Write top, bins and invalid column of the rows [rows[0], rows[1]) into the outputs.

    Rows lie ``stride`` apart in ``source``.
    """
    top, bins, invalid_column = outputs
    tile = np.empty(TILE, np.float32)
    for row in range(rows[0], rows[1]):
        row_top, high, middle, low = EMPTY_TOP, 0, 0, 0
        for start in range(0, num_columns, TILE):
            begin = row * stride + start
            columns = source[begin : begin + min(TILE, num_columns - start)]
            num_vectors, largest, invalid = _load(columns, tile, temperature)
            if invalid and invalid_column[row] < 0:
                invalid_column[row] = vocab_start + start + _first_invalid(tile)
            if invalid or largest < NEAR_MASKED:
                _silence(tile[: num_vectors * LANES])
                largest, invalid = load_tile(tile.view(np.uint32), tile, num_vectors)
            if largest <= -LIMIT:
                continue
            tile_top = _bin(largest)
            for _ in range(min(tile_top - row_top, NUM_BINS)):
                high, middle, low = 0, high, middle
            row_top = max(row_top, tile_top)
            lowest_power = BIN_WIDTH * (row_top - NUM_BINS + 1)
            sums = tile_sums(tile, num_vectors, lowest_power, source[begin + TILE :])
            high, middle, low = high + sums[0], middle + sums[1], low + sums[2]
        top[row] = row_top
        bins[row, 0], bins[row, 1], bins[row, 2] = high, middle, low


@jit
def row_gradients(
    source: Any,
    stride: int,
    num_columns: int,
    temperature: Any,
    rows: Any,
    per_row: Any,
    out: Any,
    out_stride: int,
) -> None:
    """Write the gradients of the rows [rows[0], rows[1]) into ``out``.

    ``per_row`` holds the target's column, the sum's exponent and half the inverse of its mantissa,
    the logprob's gradient, and the factor of the probabilities.
    """
    target_column, exponent, half_inverse, grad_logprob, weight = per_row
    tile = np.empty(TILE, np.float32)
    last = np.empty(LANES, out.dtype)
    for row in range(rows[0], rows[1]):
        for start in range(0, num_columns, TILE):
            width = min(TILE, num_columns - start)
            begin = row * stride + start
            num_vectors, _, _ = _load(source[begin : begin + width], tile, temperature)
            tile_gradient(tile, num_vectors, exponent[row], half_inverse[row], weight[row])
            if start <= target_column[row] < start + width:
                tile[target_column[row] - start] += grad_logprob[row]
            begin = row * out_stride + start
            store_tile(tile, out[begin : begin + width], width // LANES)
            whole = width - width % LANES
            if whole < width:
                store_tile(tile[whole:], last, 1)
                out[begin + whole : begin + width] = last[: width - whole]


@jit
def _load(source: Any, tile: Any, temperature: Any) -> Any:
    """Fill the tile with the source's logits over the temperature, then -inf to a whole vector.

    Returns the number of vectors, the largest valid logit and whether any is invalid.
    """
    num_columns = source.shape[0]
    num_vectors = num_columns // LANES
    largest, invalid = load_tile(source, tile, num_vectors)
    whole = num_vectors * LANES
    if whole < num_columns:
        last = np.full(LANES, source[-1], source.dtype)
        last[: num_columns - whole] = source[whole:]
        last_largest, last_invalid = load_tile(last, tile[whole:], 1)
        largest, invalid = max(largest, last_largest), invalid or last_invalid
        num_vectors += 1
        tile[num_columns : num_vectors * LANES] = -np.inf
    if temperature != 1:
        for i in range(num_columns):
            tile[i] /= temperature
        largest, invalid = load_tile(tile.view(np.uint32), tile, num_vectors)
    return num_vectors, largest, invalid


@jit
def _first_invalid(tile: Any) -> Any:
    for i in range(TILE):
        if not tile[i] <= LIMIT:
            return i
    return -1


@jit
def _silence(tile: Any) -> None:
    """Take masked and invalid columns out of every bin."""
    for i in range(tile.shape[0]):
        if not -LIMIT < tile[i] <= LIMIT:
            tile[i] = -np.inf


@jit
def _bin(z: Any) -> Any:
    """Bin of a live logit, in float32 as in a tile."""
    n = (z * np.float32(LOG2E) + np.float32(MAGIC)) - np.float32(MAGIC)
    return np.int64(n) // BIN_WIDTH


def _exponential(build: ir.IRBuilder, z: Any) -> tuple[Any, Any]:
    """(n + MAGIC, p) with exp(z) = p * 2**n, as in `rlk_kernels.reference`."""
    add, sub, mul = build.fadd, build.fsub, build.fmul
    c0, c1, c2, c3, c4, log2e, magic, ln2_hi, ln2_lo, one = (
        all_lanes(FLOATS, value) for value in (*POLYNOMIAL, LOG2E, MAGIC, LN2_HI, LN2_LO, 1.0)
    )
    shifted = add(mul(z, log2e), magic)
    n = sub(shifted, magic)
    r = sub(sub(z, mul(n, ln2_hi)), mul(n, ln2_lo))
    p = add(mul(add(mul(add(mul(add(mul(c4, r), c3), r), c2), r), c1), r), c0)
    return shifted, add(add(mul(mul(p, r), r), r), one)
