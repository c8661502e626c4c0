"""The drift budget: d of every compared token and the three terms that it is the sum of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlk_align.compare.token_table import Float32s, TokenTable

Float64s = npt.NDArray[np.float64]
TERMS = ("drift", "trainer_function", "logits", "engine_function")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Drift, trainer minus rollout, of M compared tokens, in nats; float64 ``[M]`` each.

    drift = [trainer reported - K(trainer logits)] + [K(trainer logits) - K(rollout logits)]
    + [K(rollout logits) - rollout reported], K the kernel's logprob. Each term is one float64
    subtraction of two float32 values: exact, unless the smaller one is below 2**-29 of the larger.
    """

    drift: Float64s
    trainer_function: Float64s | None
    """What the trainer reports beyond K of its own logits; None where it was not observed."""
    logits: Float64s
    """What comes from logits that differ; exactly 0 where K has the same bits on both sides."""
    engine_function: Float64s | None
    """What K of the engine's own logits has beyond what the engine reports."""

    def terms(self) -> Iterator[tuple[str, Float64s | None]]:
        """Drift, then its three terms, by name."""
        return ((name, getattr(self, name)) for name in TERMS)


def drift_budget(table: TokenTable) -> Budget:
    """The budget of the compared tokens, in the table's order."""
    at = table.compared
    ours, theirs = table.rollout, table.trainer
    rollout_k, trainer_k = _wide(ours.logprob[at]), _wide(theirs.logprob[at])
    if table.basis == "kernel":
        logits = trainer_k - rollout_k
        return Budget(drift=logits, trainer_function=None, logits=logits, engine_function=None)
    rollout, trainer = _wide(ours.reported[at]), _wide(theirs.reported[at])
    return Budget(
        drift=trainer - rollout,
        trainer_function=trainer - trainer_k,
        logits=trainer_k - rollout_k,
        engine_function=rollout_k - rollout,
    )


def basis_values(table: TokenTable) -> tuple[Float64s, Float64s]:
    """``(rollout, trainer)`` logprobs of the compared tokens that d is the difference of."""
    name = "reported" if table.basis == "reported" else "logprob"
    at = table.compared
    return _wide(getattr(table.rollout, name)[at]), _wide(getattr(table.trainer, name)[at])


def _wide(values: Float32s) -> Float64s:
    return values.astype(np.float64)
