"""From every rank's rows to one row a token: the last computation counts, states are merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_align.capture.parts import PartColumns
from rlk_align.capture.rows import SMALL_COLUMNS, state_from_tensors
from rlk_align.capture.sequences import SequenceTable
from rlk_align.contract import VocabLayout
from rlk_align.errors import UnusableInput
from rlk_kernels import State, empty_state, merge

POSITION_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """N tokens of a capture, sorted by sequence and position."""

    sequence: torch.Tensor
    """``[N]`` int64, index into the capture's sequence table."""
    position: torch.Tensor
    """``[N]`` int64."""
    token_id: torch.Tensor
    """``[N]`` int64."""
    owner_rank: torch.Tensor
    """``[N]`` int64, the tensor-parallel rank whose shard holds the token id."""
    is_prompt: torch.Tensor
    """``[N]`` bool."""
    weights_epoch: torch.Tensor
    """``[N]`` int64."""
    state: State
    """expsum state of the whole row; of the ranks that have it where not ``all_ranks``."""
    all_ranks: torch.Tensor
    """``[N]`` bool: every rank's shard of the same computation is there."""
    reported: torch.Tensor
    """``[N]`` float32, in nats; read only where the status is valid."""
    reported_status: torch.Tensor
    """``[N]`` uint8 `ReportedStatus`."""

    def __len__(self) -> int:
        return self.sequence.shape[0]


Columns = dict[str, torch.Tensor]


def merge_ranks(
    ranks: list[list[PartColumns]], sequences: SequenceTable, layout: VocabLayout
) -> TokenRows:
    """One row for every token that any rank has.

    Raises:
        UnusableInput: If ranks disagree on a token id, a reported value or a weights epoch, or a
            row's token or ``is_prompt`` is not what the sequence table says.
    """
    index = {label: i for i, label in enumerate(sequences.labels)}
    per_rank = [_last_rows(parts, index, rank) for rank, parts in enumerate(ranks)]
    for rank, columns in enumerate(per_rank):
        _check_state(columns, layout.real_bounds(rank), rank)
    keys = torch.cat([columns["key"] for columns in per_rank]).unique()
    shared: Columns = {}
    state, steps = empty_state(len(keys)), []
    for rank, columns in enumerate(per_rank):
        at = torch.searchsorted(keys, columns["key"])
        _agree_or_raise(shared, columns, at, len(keys), rank, sequences)
        steps.append(_scatter(columns["step"], at, len(keys)))
        state = merge(state, _scatter_state(columns, at, len(keys)))
    _check_tokens(shared, keys, sequences)
    ends = torch.tensor([end for _, end in layout.bounds])
    return TokenRows(
        sequence=keys >> POSITION_BITS,
        position=keys & ((1 << POSITION_BITS) - 1),
        token_id=shared["token_id"].long(),
        owner_rank=torch.bucketize(shared["token_id"].long(), ends, right=True),
        is_prompt=shared["is_prompt"],
        weights_epoch=shared["weights_epoch"].long(),
        state=state,
        # steps are at least 0, so a rank without a row, -1, agrees with none
        all_ranks=(torch.stack(steps) == shared["step"]).all(dim=0),
        reported=shared["reported"],
        reported_status=shared["reported_status"],
    )


def _last_rows(parts: list[PartColumns], index: dict[str, int], rank: int) -> Columns:
    """A rank's rows, sorted by key; of several rows for one token the one of the last step."""
    pieces = []
    for part in parts:
        known = torch.tensor([index.get(label, -1) for label in part.labels], dtype=torch.int64)
        sequence = known[part.columns["sequence"].long()]
        keep = sequence >= 0
        columns = {name: tensor[keep] for name, tensor in part.columns.items()}
        columns["key"] = (sequence[keep] << POSITION_BITS) | columns["position"].long()
        pieces.append(columns)
    if not pieces:
        empty = {
            n: torch.empty((0, *tail), dtype=dtype) for n, (dtype, tail) in SMALL_COLUMNS.items()
        }
        return {**empty, "key": torch.empty(0, dtype=torch.int64)}
    rows = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    by_step = torch.argsort(rows["step"], stable=True)
    order = by_step[torch.argsort(rows["key"][by_step], stable=True)]
    rows = {name: tensor[order] for name, tensor in rows.items()}
    same_key = rows["key"][1:] == rows["key"][:-1]
    if (same_key & (rows["step"][1:] == rows["step"][:-1])).any():
        raise UnusableInput(f"rank {rank} holds two rows of one step for one token")
    last = torch.cat([~same_key, torch.ones(min(len(order), 1), dtype=torch.bool)])
    return {name: tensor[last] for name, tensor in rows.items()}


def _check_state(columns: Columns, bounds: tuple[int, int], rank: int) -> None:
    """A state that claims a target of other columns, or a negative sum, is not ours to finish."""
    owned = (columns["token_id"] >= bounds[0]) & (columns["token_id"] < bounds[1])
    wrong = (columns["has_target"] != owned) | (columns["state_bins"] < 0).any(dim=1)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise UnusableInput(
            f"rank {rank}, position {int(columns['position'][row])}, token id "
            f"{int(columns['token_id'][row])}: the state is not one of columns "
            f"[{bounds[0]}, {bounds[1]}); write has_target and the bins as the format says"
        )


def _agree_or_raise(
    shared: Columns, columns: Columns, at: torch.Tensor, count: int, rank: int, table: SequenceTable
) -> None:
    """Fill what is not known yet; where another rank was first, all must be the same bits."""
    names = ("step", "token_id", "is_prompt", "weights_epoch", "reported", "reported_status")
    if not shared:
        for name in names:
            shared[name] = torch.zeros(count, dtype=columns[name].dtype)
        shared["known"] = torch.zeros(count, dtype=torch.bool)
    again = shared["known"][at] & (shared["step"][at] == columns["step"])
    for name in names:
        ours, theirs = shared[name][at], columns[name]
        different = again & (_bits(ours) != _bits(theirs))
        if different.any():
            row = int(different.nonzero()[0, 0])
            key = int(columns["key"][row])
            raise UnusableInput(
                f"sequence {table.labels[key >> POSITION_BITS]!r}, position "
                f"{key & ((1 << POSITION_BITS) - 1)}: {name} is {theirs[row].item()} on rank "
                f"{rank} and {ours[row].item()} on another; tensor-parallel ranks must agree"
            )
    # the later computation counts, whichever rank has it
    newer = ~shared["known"][at] | (columns["step"] > shared["step"][at])
    for name in names:
        shared[name][at[newer]] = columns[name][newer]
    shared["known"][at] = True


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32) if values.dtype == torch.float32 else values


def _scatter(values: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.full((count, *values.shape[1:]), -1, dtype=values.dtype)
    out[at] = values
    return out


def _scatter_state(columns: Columns, at: torch.Tensor, count: int) -> State:
    empty = empty_state(count)
    given = state_from_tensors(columns)
    for name in ("top", "bins", "target_logit", "has_target", "invalid_column"):
        getattr(empty, name)[at] = getattr(given, name)
    return empty


def _check_tokens(shared: Columns, keys: torch.Tensor, table: SequenceTable) -> None:
    """Every row's token must stand in its sequence at its position, in or after the prompt."""
    lengths = torch.tensor([len(ids) for ids in table.token_ids], dtype=torch.int64)
    offsets = lengths.cumsum(0) - lengths
    flat = torch.tensor([i for ids in table.token_ids for i in ids], dtype=torch.int64)
    sequence, position = keys >> POSITION_BITS, keys & ((1 << POSITION_BITS) - 1)
    beyond = position >= lengths[sequence]
    place = (offsets[sequence] + position).clamp(max=max(len(flat) - 1, 0))
    wrong = beyond | (flat[place] != shared["token_id"].long())
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise UnusableInput(
            f"sequence {table.labels[int(sequence[row])]!r}, position {int(position[row])}: the "
            f"row is for token {int(shared['token_id'][row])}, the sequence table has another"
        )
    prompt_end = torch.tensor(table.prompt_lengths, dtype=torch.int64)[sequence]
    wrong = shared["is_prompt"] != (position < prompt_end)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise UnusableInput(
            f"sequence {table.labels[int(sequence[row])]!r}, position {int(position[row])}: "
            f"is_prompt is {bool(shared['is_prompt'][row])}, but the prompt has "
            f"{int(prompt_end[row])} tokens; write true for the prompt's tokens and no others"
        )
