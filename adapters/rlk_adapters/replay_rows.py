"""Captured sequences in batches, and a batch of logits as rows of a capture.

Letters: B sequences, S positions, R rows, L this rank's columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_adapters.transformers_tp import ShardedModel
from rlk_align.capture import Rows, SequenceTable
from rlk_align.capture.rows import classify_reported
from rlk_align.errors import UnusableInput
from rlk_kernels import expsum_state

# bounds what [rows, vocabulary] float32 takes: 39 MB at Qwen3's 151936 columns
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences, padded on the right."""

    step: int
    sequences: list[int]
    """Indices into the capture's sequence table."""
    token_ids_BS: torch.Tensor
    is_token_BS: torch.Tensor
    sequence_R: torch.Tensor
    """``[R]`` int64: which of the B sequences each response token belongs to."""
    position_R: torch.Tensor
    """``[R]`` int64: where it stands; the logits one position before predicted it."""


def check_sequences(table: SequenceTable, max_positions: int | None) -> None:
    """Whether a model can be given these sequences.

    Raises:
        UnusableInput: Naming the first sequence that it cannot.
    """
    if not len(table):
        raise UnusableInput("the capture holds no whole sequence; there is nothing to replay")
    for label, ids, prompt in zip(table.labels, table.token_ids, table.prompt_lengths, strict=True):
        if prompt < 1:
            raise UnusableInput(f"sequence {label!r} has no prompt; its first token has no context")
        if max_positions is not None and len(ids) > max_positions:
            raise UnusableInput(
                f"sequence {label!r} has {len(ids)} tokens, but the model has {max_positions} "
                "positions; give the model that the capture was made with"
            )


def make_batches(table: SequenceTable, batch_size: int) -> list[Batch]:
    """All sequences, those of like length together."""
    order = sorted(range(len(table)), key=lambda i: (len(table.token_ids[i]), i))
    return [
        _batch(table, order[start : start + batch_size], step)
        for step, start in enumerate(range(0, len(order), batch_size))
    ]


def _batch(table: SequenceTable, sequences: list[int], step: int) -> Batch:
    lengths = [len(table.token_ids[i]) for i in sequences]
    token_ids_BS = torch.zeros(len(sequences), max(lengths), dtype=torch.int64)
    for row, i in enumerate(sequences):
        token_ids_BS[row, : lengths[row]] = torch.tensor(table.token_ids[i])
    positions = torch.arange(max(lengths))
    is_token_BS = positions < torch.tensor(lengths)[:, None]
    prompts = torch.tensor([table.prompt_lengths[i] for i in sequences])
    sequence_R, position_R = (is_token_BS & (positions >= prompts[:, None])).nonzero().unbind(1)
    return Batch(
        step=step,
        sequences=sequences,
        token_ids_BS=token_ids_BS,
        is_token_BS=is_token_BS.long(),
        sequence_R=sequence_R,
        position_R=position_R,
    )


def replay_batch(sharded: ShardedModel, table: SequenceTable, batch: Batch) -> Rows:
    """This rank's rows of a batch's response tokens; collective."""
    logits_BSL = sharded.shard_logits(batch.token_ids_BS, batch.is_token_BS)
    logits_RL = logits_BSL[batch.sequence_R, batch.position_R - 1]
    token_id_R = batch.token_ids_BS[batch.sequence_R, batch.position_R]
    reported_R = trainer_logprobs(sharded, logits_RL, token_id_R)
    logits_RL, count = logits_RL.cpu(), len(token_id_R)
    start, _ = sharded.layout.bounds[sharded.ranks.rank]
    return Rows(
        labels=[table.labels[batch.sequences[i]] for i in batch.sequence_R.tolist()],
        position=batch.position_R,
        token_id=token_id_R,
        step=torch.full((count,), batch.step),
        state=expsum_state(
            logits_RL,
            token_ids=token_id_R,
            vocab_start=start,
            vocab_size=sharded.layout.vocab_size,
        ),
        reported=reported_R,
        reported_status=classify_reported(reported_R),
        weights_epoch=torch.zeros(count),
        is_prompt=torch.zeros(count, dtype=torch.bool),
        logits=logits_RL,
    )


def trainer_logprobs(
    sharded: ShardedModel, logits_RL: torch.Tensor, token_id_R: torch.Tensor
) -> torch.Tensor:
    """What trainer code usually computes: float32 log_softmax of gathered logits; collective.

    Returns:
        ``[R]`` float32 on the CPU, in nats.
    """
    pieces = [torch.empty(0)]
    for start in range(0, len(token_id_R), ROWS_AT_ONCE):
        logits = sharded.gathered(logits_RL[start : start + ROWS_AT_ONCE])
        token_ids = token_id_R[start : start + ROWS_AT_ONCE, None].to(logits.device)
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        pieces.append(logprobs.gather(-1, token_ids).squeeze(-1).cpu())
    return torch.cat(pieces)
