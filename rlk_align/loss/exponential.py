"""exp(x), and exp(x) - 1 - x without cancellation, in float64 with the same bits on every machine.

Only + - * on float64, each rounded once: the last bits of a libm's exp differ between machines, and
those of a vectorized one between the body and the tail of a tensor. Letters: T tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_kernels.finish import LN2_D_HI, LN2_D_LO
from rlk_kernels.sum_state import power_of_two

SERIES = tuple(1 / math.factorial(k) for k in range(2, 18))
"""Taylor's 1/2!, 1/3!, ...; the first term left out is below 2**-76 of the sum."""


class Exponential(NamedTuple):
    """Both functions of the same x."""

    value: Tensor
    """float64 [T]: exp(x)."""
    above_tangent: Tensor
    """float64 [T]: exp(x) - 1 - x, never negative, right in its leading digits however small."""


def exponential(x_T: Tensor) -> Exponential:
    """exp(x) and exp(x) - 1 - x for float64 x up to 700; exp(x) is 0 below -708."""
    n = torch.round(x_T * (1 / math.log(2)))
    # two steps: n * LN2_D_HI is exact, so that the remainder has every digit
    r = (x_T - n * LN2_D_HI) - n * LN2_D_LO
    series = torch.full_like(r, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = series * r + coefficient
    above = (r * r) * series
    value = ((above + r) + 1.0) * power_of_two(n.long())
    # for n = 0, x is r; elsewhere abs(x) > 0.34 and the subtraction cancels little
    return Exponential(value, torch.where(n == 0, above, (value - 1.0) - x_T))
