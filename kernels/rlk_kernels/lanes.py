"""Sixteen values at a time: the LLVM vectors of the CPU backend and their conversions.

The bits of logits travel as integers: uint32 is float32, uint16 bfloat16, int16 float16.
"""

from functools import reduce
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

LANES = 16

FLAGS, SHORTS, INTS, LONGS = (ir.VectorType(ir.IntType(b), LANES) for b in (1, 16, 32, 64))
HALVES, FLOATS, DOUBLES = (
    ir.VectorType(t(), LANES) for t in (ir.HalfType, ir.FloatType, ir.DoubleType)
)

BITS_OF_LOGITS = {types.uint32: INTS, types.uint16: SHORTS, types.int16: SHORTS}


def vector_pointer(context: Any, build: ir.IRBuilder, signature: Any, args: Any, index: int) -> Any:
    """An argument array's data as a pointer to vectors."""
    array = signature.args[index]
    data = context.make_array(array)(context, build, args[index]).data
    vector = FLOATS if array.dtype == types.float32 else BITS_OF_LOGITS[array.dtype]
    return build.bitcast(data, vector.as_pointer())


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
