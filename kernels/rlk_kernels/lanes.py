"""Sixteen values at a time: the LLVM vectors of the CPU backend, how they are read and written.

The bits of logits travel as integers: uint32 is float32, uint16 bfloat16, int16 float16.
"""

import math
from functools import reduce
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rlk_kernels.expsum import LIMIT

LANES = 16

FLAGS, SHORTS, INTS, LONGS = (ir.VectorType(ir.IntType(b), LANES) for b in (1, 16, 32, 64))
HALVES, FLOATS, DOUBLES = (
    ir.VectorType(t(), LANES) for t in (ir.HalfType, ir.FloatType, ir.DoubleType)
)

BITS_OF_LOGITS = {types.uint32: INTS, types.uint16: SHORTS, types.int16: SHORTS}


@intrinsic  # type: ignore[untyped-decorator]
def load_tile(typingctx: Any, source: Any, tile: Any, num_vectors: Any) -> Any:
    """Widen the logits' bits into the float32 tile; the largest valid one, and is any invalid."""
    result = types.Tuple((types.float32, types.boolean))

    def codegen(context: Any, build: ir.IRBuilder, signature: Any, args: Any) -> Any:
        from_ptr, to_ptr = (vector_pointer(context, build, signature, args, i) for i in (0, 1))
        largest = cgutils.alloca_once_value(build, all_lanes(FLOATS, -math.inf))
        invalid = cgutils.alloca_once_value(build, all_lanes(FLAGS, 0))
        with cgutils.for_range(build, args[2]) as loop:
            bits = build.load(build.gep(from_ptr, [loop.index]), align=2)
            z = widened(build, bits, source.dtype)
            build.store(z, build.gep(to_ptr, [loop.index]), align=4)
            # unordered: true of NaN
            is_bad = build.fcmp_unordered(">", z, all_lanes(FLOATS, LIMIT))
            build.store(build.or_(build.load(invalid), is_bad), invalid)
            build.store(larger(build, z, build.load(largest)), largest)
        flags = build.bitcast(build.load(invalid), ir.IntType(LANES))
        any_invalid = build.icmp_unsigned("!=", flags, flags.type(0))
        values = [largest_lane(build, build.load(largest)), any_invalid]
        return context.make_tuple(build, signature.return_type, values)

    return result(source, tile, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_tile(typingctx: Any, tile: Any, target: Any, num_vectors: Any) -> Any:
    """Round the float32 tile to the target's type, to nearest even."""

    def codegen(context: Any, build: ir.IRBuilder, signature: Any, args: Any) -> Any:
        from_ptr, to_ptr = (vector_pointer(context, build, signature, args, i) for i in (0, 1))
        with cgutils.for_range(build, args[2]) as loop:
            value = build.load(build.gep(from_ptr, [loop.index]), align=4)
            bits = narrowed(build, value, target.dtype)
            build.store(bits, build.gep(to_ptr, [loop.index]), align=2)
        return context.get_dummy_value()

    return types.void(tile, target, types.int64), codegen


def vector_pointer(context: Any, build: ir.IRBuilder, signature: Any, args: Any, index: int) -> Any:
    """An argument array's data as a pointer to vectors."""
    array = signature.args[index]
    data = context.make_array(array)(context, build, args[index]).data
    vector = FLOATS if array.dtype == types.float32 else BITS_OF_LOGITS[array.dtype]
    return build.bitcast(data, vector.as_pointer())


def prefetch(build: ir.IRBuilder, pointer: Any) -> None:
    """Ask for what lies there; harmless beyond the end of an array."""
    byte_ptr, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [byte_ptr, flag, flag, flag])
    function = build.module.declare_intrinsic("llvm.prefetch", (byte_ptr,), signature)
    to_read, keep, data = flag(0), flag(3), flag(1)
    build.call(function, [build.bitcast(pointer, byte_ptr), to_read, keep, data])


def widened(build: ir.IRBuilder, bits: Any, dtype: Any) -> Any:
    """Float32 from the bits of a narrower or equal type; exact."""
    if dtype == types.uint32:
        return build.bitcast(bits, FLOATS)
    if dtype == types.int16:
        return build.fpext(build.bitcast(bits, HALVES), FLOATS)
    return build.bitcast(build.shl(build.zext(bits, INTS), all_lanes(INTS, 16)), FLOATS)


def narrowed(build: ir.IRBuilder, value: Any, dtype: Any) -> Any:
    """The bits of float32 rounded to a type, to nearest even."""
    bits = build.bitcast(value, INTS)
    if dtype == types.uint32:
        return bits
    if dtype == types.int16:
        return build.bitcast(build.fptrunc(value, HALVES), SHORTS)
    is_odd = build.and_(build.lshr(bits, all_lanes(INTS, 16)), all_lanes(INTS, 1))
    rounded = build.add(build.add(bits, all_lanes(INTS, 0x7FFF)), is_odd)
    upper = build.trunc(build.lshr(rounded, all_lanes(INTS, 16)), SHORTS)
    is_nan = build.fcmp_unordered("uno", value, value)
    return build.select(is_nan, all_lanes(SHORTS, 0x7FC0), upper)


def larger(build: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The larger one, and b if a is NaN."""
    return build.select(build.fcmp_ordered(">", a, b), a, b)


def largest_lane(build: ir.IRBuilder, vector: Any) -> Any:
    """The largest of the lanes, none of which is NaN."""
    lanes = [build.extract_element(vector, ir.IntType(32)(i)) for i in range(LANES)]
    return reduce(lambda a, b: larger(build, a, b), lanes)


def lane_sum(build: ir.IRBuilder, longs: Any) -> Any:
    """The sum of integer lanes."""
    lanes = [build.extract_element(longs, ir.IntType(32)(i)) for i in range(LANES)]
    return reduce(build.add, lanes)


def splat(build: ir.IRBuilder, scalar: Any) -> Any:
    """The scalar in every lane."""
    vector = ir.VectorType(scalar.type, LANES)
    first = build.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    return build.shuffle_vector(first, first, all_lanes(INTS, 0))


def all_lanes(vector: Any, value: float) -> ir.Constant:
    """The constant in every lane."""
    return ir.Constant(vector, [value] * LANES)
