"""Sums of float32 values with the same bits in any order, any split and on any number of ranks.

Every finite float32 is a whole number of units of 2**-150. Values whose exponents fall into one
group of eight are added into one int64 bin, as integers below 2**31, so that addition is integer
addition and nothing is lost; the sum is rounded once, when it is finished. Letters: R sums,
C values of each, K bins.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BIN_SHIFT = 3
BIN_WIDTH = 1 << BIN_SHIFT
"""Powers of two that one bin spans."""
SUM_BINS = 32
"""Bins that the exponents of float32 fill."""
MAX_VALUES = 1 << 31
"""Values of one sum: a bin takes less than 2**31 from each, and int64 ends at 2**63."""
UNIT_EXPONENT = -150
DIGIT_BITS = 32
TILE_ELEMENTS = 1 << 14
"""Values worked on at a time; temporaries of this size stay in cache."""
SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIGIT_MASK = (1 << DIGIT_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SumState:
    """Exact sums that are not rounded yet; `merge_sums` joins those of different values."""

    bins: Tensor
    """int64 [..., 32]: a sum is bins[..., k] * 2**(8 * k - 150) over all k."""
    num_values: int
    """Values in each sum, at most `MAX_VALUES`."""

    def __post_init__(self) -> None:
        shape = list(self.bins.shape)
        if self.bins.dtype != torch.int64 or shape[-1:] != [SUM_BINS]:
            raise ValueError(
                f"bins should be int64 [..., {SUM_BINS}], got {self.bins.dtype} {shape}"
            )
        if not 0 <= self.num_values <= MAX_VALUES:
            raise ValueError(
                f"a sum takes at most {MAX_VALUES} values, got {self.num_values}; "
                "finish it and add what comes out"
            )


def empty_sum(shape: tuple[int, ...] = (), device: torch.device | str = "cpu") -> SumState:
    """The sums of no values at all, which `merge_sums` leaves out."""
    bins = torch.zeros(*shape, SUM_BINS, dtype=torch.int64, device=device)
    return SumState(bins=bins, num_values=0)


def sum_state(values: Tensor, dim: int | None = None) -> SumState:
    """The exact sum of all values, or of those along ``dim``.

    Args:
        values: float32, bfloat16 or float16, of any shape.
        dim: The dimension to add up; None for all of them.

    Raises:
        ValueError: Naming the index, if a value is NaN or infinite; or if the dtype is another, or
            one sum would take more than `MAX_VALUES`.
    """
    if values.dtype not in SUM_DTYPES:
        raise ValueError(
            f"values should be float32, bfloat16 or float16, got {values.dtype}; "
            "math.fsum adds float64 exactly"
        )
    values = values.detach()
    moved = values.reshape(-1) if dim is None else values.movedim(dim, -1)
    bins = empty_sum(tuple(moved.shape[:-1]), values.device).bins
    # made first, as it checks the count before the bins could overflow
    state = SumState(bins=bins, num_values=moved.shape[-1])
    _check_finite(values)
    if moved.numel():
        add_values(state.bins.view(-1, SUM_BINS), moved.reshape(-1, moved.shape[-1]))
    return state


def add_values(bins_RK: Tensor, values_RC: Tensor) -> None:
    """Add finite values to sums in place, row by row; the caller counts them."""
    for rows, columns in tiles(*values_RC.shape):
        _add_tile(bins_RK[rows], values_RC[rows, columns].float())


def tiles(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Slices that cut a matrix into pieces of at most `TILE_ELEMENTS`, long rather than high."""
    width = max(1, min(num_columns, TILE_ELEMENTS))
    height = TILE_ELEMENTS // width
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, width):
            yield slice(row, row + height), slice(column, min(column + width, num_columns))


def merge_sums(a: SumState, b: SumState) -> SumState:
    """The sums of the values of ``a`` and ``b`` together; exact, in any order.

    Raises:
        ValueError: If the shapes differ, or together they hold more than `MAX_VALUES`.
    """
    if a.bins.shape != b.bins.shape:
        raise ValueError(
            f"only sums of one shape merge; got {list(a.bins.shape[:-1])} and "
            f"{list(b.bins.shape[:-1])}"
        )
    num_values = a.num_values + b.num_values
    # both counts are checked before the bins could overflow
    SumState(bins=a.bins, num_values=num_values)
    return SumState(bins=a.bins + b.bins, num_values=num_values)


def finish_sum(state: SumState, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sums, rounded once to the nearest float32 or float64, ties to even; zero is +0.0.

    Raises:
        ValueError: Naming the sum, if it lies beyond the largest float32 and float32 was asked for.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a sum is finished as float32 or float64, got {dtype}")
    is_negative, digits = _digits(state.bins)
    significand, exponent = _leading_bits(digits)
    if dtype == torch.float32:
        # rounded to odd at 53 bits, so that rounding to 24 bits rounds as from the whole sum
        significand = (significand >> 9) | ((significand & 511) != 0).long()
        exponent = exponent + 9
    magnitude = significand.double() * power_of_two(exponent)
    total = torch.where(is_negative, -magnitude, magnitude).to(dtype)
    if dtype == torch.float32 and total.isinf().any():
        where = total.isinf().nonzero()[0].tolist()
        raise ValueError(f"the sum{where or ''} is beyond float32; finish it as float64")
    return total


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float64 for int64 exponents up to 1023; 0 below -1022."""
    bits = (exponent + 1023).clamp(min=0) << 52
    return bits.view(torch.float64)


def _check_finite(values: Tensor) -> None:
    bad = ~values.isfinite()
    if bad.any():
        index = bad.nonzero()[0].tolist()
        raise ValueError(
            f"values{index} is {float(values[tuple(index)])}; an exact sum takes finite values, "
            "leave the others out"
        )


def _add_tile(bins_RK: Tensor, values_RC: Tensor) -> None:
    """Add each value's integer where its exponent says."""
    bits = values_RC.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 255
    # subnormal values have no leading bit, and the exponent of the smallest normal ones
    mantissa = (bits & 0x7FFFFF) | (exponent.clamp(max=1) << 23)
    placed = mantissa << (exponent.clamp(min=1) & (BIN_WIDTH - 1))
    sign = bits >> 31
    signed = (placed ^ sign) - sign
    bins_RK.scatter_add_(1, (exponent >> BIN_SHIFT).long(), signed.long())


def _digits(bins: Tensor) -> tuple[Tensor, Tensor]:
    """Sign, and the magnitude as base 2**32 digits int64 [..., 10], the lowest first."""
    is_negative = _carried(bins)[1] < 0
    small, rest = _carried(torch.where(is_negative[..., None], -bins, bins))
    places = torch.arange(0, DIGIT_BITS, BIN_WIDTH, device=bins.device)
    digits = (small.unflatten(-1, (-1, len(places))) << places).sum(-1)
    top = torch.stack([rest & DIGIT_MASK, rest >> DIGIT_BITS], dim=-1)
    return is_negative, torch.cat([digits, top], dim=-1)


def _carried(bins: Tensor) -> tuple[Tensor, Tensor]:
    """Digits in [0, 2**8) int64 [..., 32], and what is left above them, which keeps the sign."""
    digits, carry = [], torch.zeros_like(bins[..., 0])
    for one in bins.unbind(-1):
        total = one + carry
        digits.append(total & ((1 << BIN_WIDTH) - 1))
        carry = total >> BIN_WIDTH
    return torch.stack(digits, dim=-1), carry


def _leading_bits(digits: Tensor) -> tuple[Tensor, Tensor]:
    """(significand, exponent), int64: the number is about significand * 2**exponent.

    The significand has 62 bits; its last one is set as well if anything below it is not zero.
    """
    places = torch.arange(digits.shape[-1], device=digits.device)
    first = torch.where(digits != 0, places, 0).amax(-1)
    high, middle, low = (
        torch.where(first >= k, digits.gather(-1, (first - k).clamp(min=0)[..., None])[..., 0], 0)
        for k in range(3)
    )
    rest = (torch.where(places < first[..., None] - 2, digits, 0) != 0).any(-1)
    # frexp of an integer below 2**32 is exact and gives its length in bits
    lead = DIGIT_BITS - torch.frexp(high.double())[1].long()
    lead = torch.where(high > 0, lead, 0)
    significand = (high << (lead + 30)) + ((middle << lead) >> 2) + (low >> (34 - lead))
    cut = ((middle << lead) & 3) | (low & ((1 << (34 - lead)) - 1)) | rest.long()
    exponent = UNIT_EXPONENT + DIGIT_BITS * (first - 2) + 34 - lead
    return significand | (cut != 0).long(), exponent
