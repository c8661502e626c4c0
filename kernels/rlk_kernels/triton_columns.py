# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What Triton does to single columns: widen, exponentiate, scale; the pieces both passes share.

No fused multiply-add may touch these, see `rlk_kernels.triton_kernels`.
"""

import triton
import triton.language as tl

from rlk_kernels import expsum

BIN_WIDTH = tl.constexpr(expsum.BIN_WIDTH)
MAGIC = tl.constexpr(expsum.MAGIC)
MAGIC_BITS = tl.constexpr(0x4B400000)
"""The bits of MAGIC as an integer; those of MAGIC + n are n more."""
LOG2E = tl.constexpr(expsum.LOG2E)
LN2_HI = tl.constexpr(expsum.LN2_HI)
LN2_LO = tl.constexpr(expsum.LN2_LO)
C0, C1, C2, C3, C4 = map(tl.constexpr, expsum.POLYNOMIAL)
BIN_BIAS = tl.constexpr(600)
"""Makes every bin of a live logit positive, since integer division rounds towards zero."""


@triton.jit
def exponential(z):
    """Float32 (n + MAGIC, p) with exp(z) = p * 2**n, as in `rlk_kernels.reference`."""
    shifted = z * LOG2E + MAGIC
    n = shifted - MAGIC
    r = (z - n * LN2_HI) - n * LN2_LO
    p = (((C4 * r + C3) * r + C2) * r + C1) * r + C0
    return shifted, ((p * r) * r + r) + 1.0


@triton.jit
def bin_of(z):
    """Bin of a live logit."""
    n = (z * LOG2E + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return (n + BIN_WIDTH * BIN_BIAS) // BIN_WIDTH - BIN_BIAS


@triton.jit
def scaled(t, power):
    """Float32 t * 2**power, exactly, or 0 below 2**-126, as in `rlk_kernels.reference`."""
    bits = t.to(tl.int32, bitcast=True)
    shift = tl.maximum(power, -256)
    scaled = (bits + (shift << 23)).to(tl.float32, bitcast=True)
    return tl.where((bits >> 23) + shift >= 1, scaled, 0.0)


@triton.jit
def widened(z, temperature, HAS_TEMPERATURE: tl.constexpr):
    """Logits widened and divided by the temperature."""
    z = z.to(tl.float32)
    if HAS_TEMPERATURE:
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def tile_offsets(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Columns of a tile, int32 [BLOCK // VECTOR, VECTOR]."""
    return tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def larger(a, b):
    """The larger one, NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
