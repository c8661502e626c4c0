"""The tokens with the largest drift, with everything a person needs to look for the reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlk_align.compare.budget import Budget, Float64s
from rlk_align.compare.token_table import Float32s, TokenTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """One compared token; logprobs and terms in nats, None where a side reported nothing."""

    text: str | None
    """Printable; None where no tokenizer was at hand."""
    sequence: str
    """The rollout's label."""
    sample_index: int
    position: int
    token_id: int
    rollout_rank: int
    """Tensor-parallel rank that holds the token's column."""
    trainer_rank: int
    rollout_reported: float | None
    trainer_reported: float | None
    rollout_kernel: float
    trainer_kernel: float
    drift: float
    trainer_function: float | None
    logits: float
    engine_function: float | None

    def place(self) -> str:
        """Where the token stands, in words."""
        return f"sequence {self.sequence}, position {self.position} (token id {self.token_id})"


def worst_tokens(table: TokenTable, budget: Budget, count: int) -> list[WorstToken]:
    """At most ``count`` tokens by abs(d), the largest first; ties in the table's order."""
    order = np.argsort(-np.abs(budget.drift), kind="stable")[:count]
    rows = np.flatnonzero(table.compared)
    return [_token(table, budget, int(at), int(rows[at])) for at in order]


def _token(table: TokenTable, budget: Budget, at: int, row: int) -> WorstToken:
    rollout, trainer = table.rollout, table.trainer
    sequence, token_id = int(table.sequence[row]), int(table.token_id[row])
    reported = table.basis == "reported"
    return WorstToken(
        text=table.token_texts.get(token_id),
        sequence=table.labels[sequence],
        sample_index=table.sample_indices[sequence],
        position=int(table.position[row]),
        token_id=token_id,
        rollout_rank=int(rollout.owner_rank[row]),
        trainer_rank=int(trainer.owner_rank[row]),
        rollout_reported=_at(rollout.reported, row) if reported else None,
        trainer_reported=_at(trainer.reported, row) if reported else None,
        rollout_kernel=float(rollout.logprob[row]),
        trainer_kernel=float(trainer.logprob[row]),
        drift=float(budget.drift[at]),
        trainer_function=_at(budget.trainer_function, at),
        logits=float(budget.logits[at]),
        engine_function=_at(budget.engine_function, at),
    )


def _at(values: Float32s | Float64s | None, index: int) -> float | None:
    return None if values is None else float(values[index])
