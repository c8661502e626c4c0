"""expsum-1 in plain PyTorch, written to be believed: what every other backend must reproduce.

Letters: T tokens (rows), L this shard's columns, C columns of one chunk.
"""

import torch
from torch import Tensor

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
    State,
    empty_state,
    merge,
)

CHUNK_ELEMENTS = 1 << 21
"""Logits worked on at a time; int64 temporaries of this size take 16 MiB each."""


def expsum_state(
    logits_TL: Tensor, token_ids: Tensor, vocab_start: int, temperature: float
) -> State:
    """State of the columns [vocab_start, vocab_start + L), all of them real; arguments checked."""
    num_tokens, num_columns = logits_TL.shape
    state = empty_state(num_tokens, logits_TL.device)
    step = max(1, CHUNK_ELEMENTS // max(1, num_tokens))
    for start in range(0, num_columns, step):
        z_TC = divided(logits_TL[:, start : start + step].float(), temperature)
        state = merge(state, _chunk_state(z_TC, token_ids.long(), vocab_start + start))
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
    """Write the gradient of the logits into ``out_TL``, in its dtype.

    Args:
        logits_TL: The columns of the forward pass.
        token_ids: int64 [T].
        vocab_start: Token id of the first column.
        temperature: As in the forward pass.
        mantissa: float64 [T], of the row's whole sum mantissa * 2**exponent.
        exponent: float64 [T].
        grad_logprob: float32 [T], already divided by the temperature.
        grad_lse: float32 [T], likewise.
        out_TL: Where the gradient goes.
    """
    step = max(1, CHUNK_ELEMENTS // max(1, len(token_ids)))
    inverse = (1.0 / mantissa).float()
    weight = grad_lse - grad_logprob
    for start in range(0, logits_TL.shape[1], step):
        z_TC = divided(logits_TL[:, start : start + step].float(), temperature)
        is_live = (z_TC > -LIMIT) & (z_TC <= LIMIT)
        n, p = _polynomial(torch.where(is_live, z_TC, 0.0))
        probability = _scaled(p * inverse[:, None], n.double() - exponent[:, None])
        d_TC = weight[:, None] * torch.where(is_live, probability, 0.0)
        ids = torch.arange(z_TC.shape[1], device=z_TC.device) + (vocab_start + start)
        is_target = ids == token_ids[:, None]
        d_TC = torch.where(is_target, d_TC + grad_logprob[:, None], d_TC)
        out_TL[:, start : start + step] = d_TC


def exponential(z: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (P, n), int64 of any shape, with exp(z) = P * 2**(n - 24), for abs(z) <= 8192."""
    n, p = _polynomial(z)
    return (p * float(1 << MANTISSA_BITS)).long(), n.long()


def divided(z: Tensor, temperature: float) -> Tensor:
    """Float32 logits over the temperature, one IEEE division each."""
    if temperature == 1.0:
        return z
    # a tensor on the same device: torch multiplies by the reciprocal of a scalar on CUDA
    return z / torch.tensor(temperature, dtype=torch.float32, device=z.device)


def _polynomial(z: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 (n, p) with exp(z) = p * 2**n and p between 0.70 and 1.42."""
    # each operation rounds by itself: addcmul and sub(alpha=...) may fuse two of them
    n = (z * LOG2E + MAGIC) - MAGIC
    r = (z - n * LN2_HI) - n * LN2_LO
    c0, c1, c2, c3, c4 = POLYNOMIAL
    p = (((c4 * r + c3) * r + c2) * r + c1) * r + c0
    return n, ((p * r) * r + r) + 1.0


def _chunk_state(z_TC: Tensor, token_ids: Tensor, start: int) -> State:
    """State of one chunk whose first column is token id ``start``."""
    num_columns = z_TC.shape[1]
    is_invalid = ~(z_TC <= LIMIT)
    is_live = (z_TC > -LIMIT) & ~is_invalid
    mantissa, power = exponential(torch.where(is_live, z_TC, 0.0))
    column_bin = torch.div(power, BIN_WIDTH, rounding_mode="floor")
    value = torch.where(is_live, mantissa << (power - BIN_WIDTH * column_bin), 0)
    top = torch.where(is_live, column_bin, EMPTY_TOP).amax(1)
    depth = top[:, None] - column_bin
    bins = [torch.where(depth == b, value, 0).sum(1) for b in range(NUM_BINS)]
    ids = torch.arange(start, start + num_columns, device=z_TC.device)
    none = start + num_columns
    first_invalid = torch.where(is_invalid, ids, none).amin(1)
    has_target = (token_ids >= start) & (token_ids < start + num_columns)
    own = torch.where(has_target, token_ids - start, 0)
    return State(
        top=top.int(),
        bins=torch.stack(bins, dim=1),
        target_logit=torch.where(has_target, z_TC.gather(1, own[:, None])[:, 0], 0.0),
        has_target=has_target,
        invalid_column=torch.where(first_invalid < none, first_invalid, -1).int(),
    )


def _scaled(t: Tensor, power: Tensor) -> Tensor:
    """Float32 t * 2**power, exactly, or 0 where the result is below 2**-126; t in [0.49, 2.01)."""
    # on the bits, as 2**power itself may not be a float32
    bits = t.view(torch.int32)
    shift = power.clamp(min=-256).int()
    is_normal = (bits >> 23) + shift >= 1
    return torch.where(is_normal, (bits + (shift << 23)).view(torch.float32), 0.0)
