"""The truth, in float64 over whole rows; nothing here knows of shards, states or bins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Float64 [T] each, in nats."""

    logprob: Tensor
    lse: Tensor


def exact_values(logits_TV: Tensor, token_ids_T: Tensor) -> Exact:
    """Logprob and LSE of rows that hold the whole vocabulary.

    Of the logits as the case rounds them this is what the kernel must reach; of the unrounded
    float32 ones, what storing them in the case's dtype costs (the storage term).
    """
    logprobs, lses = [], []
    for start in range(0, len(logits_TV), ROWS_AT_ONCE):
        rows = logits_TV[start : start + ROWS_AT_ONCE].double()
        ids = token_ids_T[start : start + ROWS_AT_ONCE, None]
        lses.append(rows.logsumexp(1))
        # from the odds against the target: z - LSE has no digits left where the two are equal
        odds = rows - rows.gather(1, ids)
        odds.scatter_(1, ids, -torch.inf)
        logprobs.append(-torch.nn.functional.softplus(odds.logsumexp(1), threshold=700))
    nothing = torch.empty(0, dtype=torch.float64)
    return Exact(
        logprob=torch.cat(logprobs) if logprobs else nothing,
        lse=torch.cat(lses) if lses else nothing,
    )
