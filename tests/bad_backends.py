"""Backends that are wrong in one way each; importing this registers them all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_align.dispatch import BackendEntry, Capability, Platform, register_backend
from rlk_kernels import SelectedLogprob, selected_logprob

Group = dist.ProcessGroup | None


def phantom_column(logits: Tensor, ids: Tensor, *, vocab_size: int, **layout: Any) -> Any:
    """Counts the first padding column."""
    return selected_logprob(logits, ids, vocab_size=vocab_size + 1, **layout)


def swapped_tokens(logits: Tensor, ids: Tensor, **layout: Any) -> SelectedLogprob:
    """Returns the last two tokens in the wrong order."""
    good = selected_logprob(logits, ids, **layout)
    order = [*range(len(ids) - 2), len(ids) - 1, len(ids) - 2]
    return SelectedLogprob(logprob=good.logprob[order], lse=good.lse[order])


def one_off_owner(
    logits: Tensor, ids: Tensor, *, vocab_start: int, group: Group, **layout: Any
) -> SelectedLogprob:
    """Takes the first column of the next shard for its own, and reads its last column for it."""
    good = selected_logprob(logits, ids, vocab_start=vocab_start, group=group, **layout)
    column = ids - vocab_start
    is_first = vocab_start == 0
    owned = (column >= (0 if is_first else 1)) & (column <= logits.shape[1])
    read = logits.float().gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    target = torch.where(owned, read, 0.0)
    dist.all_reduce(target, group=group)
    # only where the owner is wrong: elsewhere the kernel's bits
    wrong = torch.where(column == logits.shape[1], 1.0, 0.0)
    dist.all_reduce(wrong, group=group)
    is_wrong = (wrong > 0) & (target - good.lse != good.logprob)
    return SelectedLogprob(
        logprob=torch.where(is_wrong, target - good.lse, good.logprob), lse=good.lse
    )


def float_merge(
    logits: Tensor, ids: Tensor, *, vocab_size: int, vocab_start: int, group: Group
) -> SelectedLogprob:
    """Adds the shards' float32 sums, as a trainer would."""
    layout = {"vocab_size": vocab_size, "vocab_start": vocab_start, "group": group}
    good = selected_logprob(logits, ids, **layout)  # type: ignore[arg-type]
    total = (
        logits[:, : max(0, vocab_size - vocab_start)].float().sub(good.lse[:, None]).exp().sum(1)
    )
    if group is not None:
        dist.all_reduce(total, group=group)
    lse = good.lse + total.log()
    return SelectedLogprob(logprob=good.logprob, lse=lse)


def other_bits_on_one_rank(
    logits: Tensor, ids: Tensor, *, vocab_start: int, **layout: Any
) -> SelectedLogprob:
    """One float32 step more on all TP ranks but the first."""
    good = selected_logprob(logits, ids, vocab_start=vocab_start, **layout)
    if vocab_start == 0:
        return good
    more = torch.nextafter(good.logprob, torch.tensor(1.0))
    return SelectedLogprob(logprob=more, lse=good.lse)


def fails_on_the_last_rank(logits: Tensor, ids: Tensor, **layout: Any) -> SelectedLogprob:
    """Leaves its TP group waiting."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise MemoryError("no memory for the copy")
    return selected_logprob(logits, ids, **layout)


def not_a_number(logits: Tensor, ids: Tensor, **layout: Any) -> SelectedLogprob:
    """Returns NaN for one token."""
    good = selected_logprob(logits, ids, **layout)
    logprob = good.logprob.clone()
    logprob[-1] = torch.nan
    return SelectedLogprob(logprob=logprob, lse=good.lse)


BAD_BACKENDS: dict[str, Callable[..., Any]] = {
    "phantom": phantom_column,
    "swap": swapped_tokens,
    "owner": one_off_owner,
    "float": float_merge,
    "replica": other_bits_on_one_rank,
    "crash": fails_on_the_last_rank,
    "nan": not_a_number,
}


def build(function: Callable[..., Any], platform: Platform) -> Callable[..., Any]:
    return function


for name, function in BAD_BACKENDS.items():
    register_backend(
        BackendEntry(
            backend_id=name,
            build=partial(build, function),
            platforms=frozenset({Platform.CPU}),
            capabilities=(Capability(backend_id=name, platform="cpu", tier="production"),),
        )
    )
