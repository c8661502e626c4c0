"""A batch of ten sequences in three groups, and its cuts over ranks; for tests of the loss.

Letters: T tokens of the batch, V columns, R ranks.
"""

import itertools
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from rlk_align.contract import (
    LogprobContract,
    MaskContract,
    ShardingContract,
    equal_shards,
    layout_from_bounds,
)
from rlk_align.loss import GrpoLoss, LossContract, SequenceTable, TokenRows, grpo_loss

VOCAB_SIZE = 500
LENGTHS = (31, 1, 40, 24, 0, 17, 8, 60, 3, 22)
"""Rows of each sequence: none, one, and 206 in all, more than the kernel's first all-gather has."""
GROUPS = (7, 7, 7, 3, 3, 9, 9, 9, 9, 3)
REWARDS = (1.0, 0.0, 0.3, 0.1, 0.1, -2.0, 1.5, 0.7, 0.7, 0.1)
COLUMNS = {
    "even": {1: (0, 500), 2: (0, 250, 500), 4: (0, 125, 250, 375, 500)},
    # empty, a single column, and padding behind the vocabulary
    "uneven": {1: (0, 512), 2: (0, 1, 500), 4: (0, 0, 300, 499, 640)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "tokens, k3": {"clip_high": 0.28, "kl": "k3", "kl_weight": 0.04},
    "sequences, k1, mean": {
        "normalizer": "sequence_mean",
        "kl": "k1",
        "kl_weight": 0.1,
        "advantage": "mean",
    },
    "constant": {"normalizer": "constant", "constant": 640.0},
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Batch(NamedTuple):
    """All rows of the batch, with padding columns up to 640."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    is_active: torch.Tensor
    rows: TokenRows
    sequences: SequenceTable


def whole_batch(dtype: torch.dtype = torch.float32, *, has_reference: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(5)
    num_rows = sum(LENGTHS)
    logits = 3 * torch.randn(num_rows, 640, generator=generator)
    logits[:, VOCAB_SIZE:] = torch.nan
    token_ids = torch.randint(0, VOCAB_SIZE, (num_rows,), generator=generator)
    # likely tokens, as a policy samples them
    logits[torch.arange(num_rows), token_ids] += 6
    logits = logits.to(dtype)
    sequence_ids = torch.arange(10).repeat_interleave(torch.tensor(LENGTHS))
    is_active = torch.rand(num_rows, generator=generator) < 0.8
    # sequence 8 has rows and none of them active
    is_active &= sequence_ids != 8
    logprob = logits[:, :VOCAB_SIZE].double().log_softmax(1)
    logprob = logprob[torch.arange(num_rows), token_ids]
    old, reference = (
        (logprob + 0.3 * torch.randn(num_rows, generator=generator)).float() for _ in range(2)
    )
    old[~is_active] = torch.nan
    token_ids[~is_active] = -100
    rows = TokenRows(
        sequence_ids_T=sequence_ids,
        old_logprob_T=old,
        ref_logprob_T=reference if has_reference else None,
    )
    sequences = SequenceTable(
        ids=torch.arange(10),
        group_ids=torch.tensor(GROUPS),
        rewards=torch.tensor(REWARDS),
        num_active=torch.zeros(10, dtype=torch.int64).index_add(0, sequence_ids, is_active.long()),
    )
    return Batch(logits, token_ids, is_active, rows, sequences)


def cut_over_data_ranks(cut: str, dp: int, cp: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows, in an order of their own, and sequence ids of each data rank; dp varies slowest."""
    sequence_ids = torch.arange(10).repeat_interleave(torch.tensor(LENGTHS))
    ids = torch.arange(10)
    parts = []
    for dp_rank in range(dp):
        if cut == "even":
            own_ids = ids[ids % dp == dp_rank]
        else:
            # the last rank has most, and with four ranks the first one nothing
            edges = {1: (0, 10), 2: (0, 2, 10), 4: (0, 0, 1, 3, 10)}[dp]
            own_ids = ids[edges[dp_rank] : edges[dp_rank + 1]].flip(0)
        rows = torch.isin(sequence_ids, own_ids).nonzero()[:, 0]
        if cut == "even":
            shares = list(rows.tensor_split(cp))
        else:
            # backwards and unequal: every third row, and the others
            is_third = rows % 3 == 0
            shares = [rows.flip(0)] if cp == 1 else [rows[is_third].flip(0), rows[~is_third]]
        parts += [(share, own_ids) for share in shares]
    return parts


def part_of(
    batch: Batch,
    rows: torch.Tensor,
    ids: torch.Tensor,
    *,
    edges: tuple[int, ...] = (0, VOCAB_SIZE),
    tp_rank: int = 0,
) -> dict[str, Any]:
    """What one rank passes, in pieces that a test may change: see `loss_of`."""
    start, end = edges[tp_rank : tp_rank + 2]
    is_active = tuple(batch.is_active[rows].tolist())
    return {
        "role": "train",
        "logits_dtype": DTYPES[batch.logits.dtype],
        "sharding": ShardingContract(
            layout=layout_from_bounds(VOCAB_SIZE, list(itertools.pairwise(edges))), tp_rank=tp_rank
        ),
        "mask": MaskContract(num_tokens=len(rows), active=is_active, ignore_index=-100),
        "logits_TL": batch.logits[rows, start:end].clone().requires_grad_(),
        "token_ids_T": batch.token_ids[rows],
        "rows": selected(batch.rows, rows),
        "sequences": selected(batch.sequences, ids),
    }


def selected(table: Any, index: torch.Tensor) -> Any:
    """The same rows of each tensor of a dataclass."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    return type(table)(**{n: None if v is None else v[index] for n, v in columns.items()})


def whole_part(batch: Batch) -> dict[str, Any]:
    """What a process that is alone passes."""
    return part_of(batch, torch.arange(len(batch.token_ids)), torch.arange(10))


def loss_of(
    part: dict[str, Any], settings: dict[str, Any], backend: str = "expsum-reference", **groups: Any
) -> GrpoLoss:
    """`grpo_loss` of a part."""
    logprob = {name: part[name] for name in ("role", "logits_dtype", "sharding", "mask")}
    return grpo_loss(
        lambda: LossContract(logprob=LogprobContract(**logprob), **settings),
        *(part[name] for name in ("logits_TL", "token_ids_T", "rows", "sequences")),
        backend=backend,
        **groups,
    )


def loss_contract(**settings: Any) -> LossContract:
    """Of a batch of no rows, for what needs settings only."""
    sharding = ShardingContract(layout=equal_shards(VOCAB_SIZE, 1))
    mask = MaskContract(num_tokens=0, active=())
    logprob = LogprobContract(role="train", logits_dtype="fp32", sharding=sharding, mask=mask)
    return LossContract(logprob=logprob, **settings)
