"""A shard's checked input and, from it, the state of the whole vocabulary on every rank.

Letters: T tokens (rows), L this shard's columns.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.backends import load_backend
from rlk_kernels.collective import Header, coverage_error, gather_state, group_failure
from rlk_kernels.expsum import State, empty_state
from rlk_kernels.finish import invalid_logit_message
from rlk_kernels.shard_input import IGNORE_INDEX, ShardInput, check_top_k, checked_input


def vocabulary_state(
    logits_TL: Tensor,
    token_ids: Tensor,
    *,
    vocab_size: int,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    backend: str,
    active_mask: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    top_k: int = 1,
) -> tuple[ShardInput, State]:
    """This rank's checked shard and the state of all ranks'; as `rlk_kernels.selected_logprob`.

    Inactive rows come back as rows of which no column was seen.
    """
    try:
        shard = checked_input(
            logits_TL,
            token_ids,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            temperature=temperature,
            backend=backend,
            active_mask=active_mask,
            ignore_index=ignore_index,
        )
        check_top_k(top_k, vocab_size)
        state, header = _valid_state(shard), Header.of(shard, top_k)
    except Exception as error:
        if group is None:
            raise
        device = logits_TL.device if isinstance(logits_TL, Tensor) else "cpu"
        raise group_failure(error, group, device) from error
    if group is not None:
        state = gather_state(header, state, group)
    elif (gap := coverage_error([(header.start, header.end)], vocab_size)) is not None:
        raise ValueError(gap)
    return shard, state


def shard_state(shard: ShardInput) -> State:
    """The state of a shard's real columns."""
    return load_backend(shard.backend).expsum_state(
        shard.real_logits_TL.detach(), shard.token_ids, shard.vocab_start, shard.temperature
    )


def _valid_state(shard: ShardInput) -> State:
    """The same without inactive rows, or a ValueError on the first row with an invalid logit."""
    state = shard_state(shard)
    if shard.active is not None:
        state = _only(shard.active, state)
    bad = (state.invalid_column >= 0).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(invalid_logit_message(row, int(state.invalid_column[row])))
    return state


def _only(active: Tensor, state: State) -> State:
    """The state with nothing in the other rows."""
    nothing = empty_state(state.num_tokens, state.top.device)
    return State(
        top=torch.where(active, state.top, nothing.top),
        bins=torch.where(active[:, None], state.bins, nothing.bins),
        target_logit=torch.where(active, state.target_logit, nothing.target_logit),
        has_target=active & state.has_target,
        invalid_column=torch.where(active, state.invalid_column, nothing.invalid_column),
    )
