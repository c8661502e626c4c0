"""What one column adds to KL both ways, Jensen-Shannon and total variation; elementwise.

Each term is chosen to be at least 0, so that nothing cancels in the sum: a KL of 1e-5 between two
nearly equal rows keeps its digits. With a >= b the column's two probabilities and
g = log(a / b) >= 0, taken as the difference of logits minus that of the LSEs:

    KL(larger || smaller)  a g - a + b  = a f(g),  f(g) = g - 1 + exp(-g)
    KL(smaller || larger)  -b g - b + a = a (g^2 - f(g) (1 + g))
    Jensen-Shannon         ((a + b) log(2 a / (a + b)) - b g) / 2
    total variation        abs(p - q) / 2

The added q - p sum to 0 over the vocabulary. They also make an error of the LSEs harmless, as it
enters times the sum of p - q. Below g = 1 everything comes from a series in g; above, from a and b.
"""

import math

import torch
from torch import Tensor

from rlk_kernels.finish import atanh2
from rlk_kernels.probability import Columns

TERMS = ("kl_pq", "kl_qp", "js", "tv")
LN2 = 0.69314718055994531
F_SERIES = tuple((-1.0) ** k / math.factorial(k) for k in range(2, 15))
"""f(g) / g^2 = 1/2 - g/6 + g^2/24 - ...; for g < 1 less than 1e-11 is left out."""
J_SERIES = tuple(1.0 / (k * (2 * k - 1)) for k in range(1, 14))
"""((1+u) log(1+u) + (1-u) log(1-u)) / u^2 = 1 + w/6 + w^2/15 + ..., w = u^2.

u is tanh(g / 2), below 0.463 for g < 1: less than 1e-11 is left out."""
FAR = 65536.0
"""Stands for g where one side is masked: beyond the distance of any two logits."""


def divergence_terms(p: Columns, q: Columns) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float32 [T, C] terms, at least 0, in the order of `TERMS`.

    Where one side is masked, the KL that is infinite there gets a finite term that means nothing.
    """
    both = p.is_live & q.is_live
    difference = p.logprob - q.logprob
    p_is_larger = torch.where(both, difference >= 0, p.is_live)
    larger = torch.where(p_is_larger, p.probability, q.probability)
    smaller = torch.where(p_is_larger, q.probability, p.probability)
    g = torch.where(both, difference.abs(), FAR)
    is_close = g < 1.0
    terms = _close_terms(larger, torch.where(is_close, g, 0.0))
    # between two engines that agree no column is far
    if not is_close.all():
        far = _far_terms(larger, smaller, g)
        terms = [torch.where(is_close, *pair) for pair in zip(terms, far, strict=True)]
    down, up, js = terms
    kl_pq, kl_qp = torch.where(p_is_larger, down, up), torch.where(p_is_larger, up, down)
    tv = (p.probability - q.probability).abs() * 0.5
    return kl_pq.float(), kl_qp.float(), js.float(), tv.float()


def _close_terms(a: Tensor, g: Tensor) -> list[Tensor]:
    """KL(larger || smaller), KL(smaller || larger) and JS for g < 1."""
    square = g * g
    f = square * _horner(F_SERIES, g)
    # 1 - b/a
    gap = g - f
    u = gap / (2.0 - gap)
    w = u * u
    js = a * (2.0 - gap) * 0.25 * (w * _horner(J_SERIES, w))
    return [a * f, a * (square - f * (1.0 + g)), js]


def _far_terms(a: Tensor, b: Tensor, g: Tensor) -> list[Tensor]:
    """The same for g >= 1."""
    ratio = b / torch.where(a > 0, a, 1.0)
    log_ratio = atanh2(ratio / (2.0 + ratio))
    js = ((a + b) * (LN2 - log_ratio) - b * g) * 0.5
    return [a * (g - 1.0) + b, a - b * (g + 1.0), js]


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """c0 + c1 x + c2 x^2 + ..., each operation rounded by itself."""
    series = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        series = series * x + coefficient
    return series
