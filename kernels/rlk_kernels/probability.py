"""A column's probability in float64, from its logit and its row's sum and from nothing else.

The second pass over the logits: the first one gives the row's sum, which is the same on every
layout, and so is then every column's probability. Letters: T tokens (rows), C columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlk_kernels.expsum import LIMIT, MANTISSA_BITS, State
from rlk_kernels.finish import natural_log, row_sum, split
from rlk_kernels.reference import exponential
from rlk_kernels.sum_state import power_of_two

MASS_TOLERANCE = 1e-5
"""Fifty times what the exponentials may err."""


class RowNorm(NamedTuple):
    """What turns the exponentials of T rows into probabilities."""

    mantissa: Tensor
    """float64 [T]: the row's sum is mantissa * 2**exponent."""
    exponent: Tensor
    """int64 [T]."""
    lse: Tensor
    """float64 [T], in nats."""

    def rows(self, rows: slice) -> "RowNorm":
        """The same of some rows."""
        return RowNorm(self.mantissa[rows], self.exponent[rows], self.lse[rows])


class Columns(NamedTuple):
    """Probabilities of some columns; finite, and meaningless in rows without a valid sum."""

    is_live: Tensor
    """bool [T, C]: neither masked nor invalid."""
    probability: Tensor
    """float64 [T, C]: the column's exact integer over the row's; 0 unless live."""
    logprob: Tensor
    """float64 [T, C]: logit minus LSE, in nats; 0 unless live."""


def row_norm(state: State) -> RowNorm:
    """The norm of rows whose state has seen the whole vocabulary."""
    total = row_sum(state)
    return RowNorm(total.mantissa, total.exponent.long(), natural_log(*total))


def column_probabilities(z_TC: Tensor, norm: RowNorm) -> Columns:
    """Probability and logprob of every column; ``z_TC`` is float32, over the temperature."""
    is_live = (z_TC > -LIMIT) & (z_TC <= LIMIT)
    z_TC = torch.where(is_live, z_TC, 0.0)
    mantissa, power = exponential(z_TC)
    # a division, so that a lone column's probability is exactly 1
    ratio = mantissa.double() / norm.mantissa[:, None]
    probability = ratio * power_of_two(power - MANTISSA_BITS - norm.exponent[:, None])
    logprob = z_TC.double() - norm.lse[:, None]
    return Columns(
        is_live, torch.where(is_live, probability, 0.0), torch.where(is_live, logprob, 0.0)
    )


def check_mass(mass_T: Tensor, is_ok_T: Tensor, side: str = "") -> None:
    """Raise unless the probabilities fed add up to 1 in every row that has a valid sum.

    Args:
        mass_T: float64 ``[T]``, summed in any order: only its first digits count.
        is_ok_T: bool ``[T]``.
        side: Whose rows they are, for the message.

    Raises:
        ValueError: Naming the first row that differs: its columns are not those of the state.
    """
    wrong = is_ok_T & ~((mass_T - 1.0).abs() < MASS_TOLERANCE)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{side}row {row}: the columns fed have a probability of {float(mass_T[row]):.6g} "
            "together, not 1; feed the logits, and pass the temperature, that the state came from"
        )


def surprisal(columns: Columns) -> Tensor:
    """-log of the probability, float64 [T, C] in nats, at least 0; 0 unless live.

    Above 1/2 it comes from the probability: logit minus LSE has no correct digit left near 1.
    """
    result = -columns.logprob
    likely = columns.probability > 0.5
    inverse = 1.0 / columns.probability[likely]
    result[likely] = natural_log(*split(inverse)).clamp(min=0.0)
    return result
