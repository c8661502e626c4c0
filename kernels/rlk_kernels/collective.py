"""One all-gather that carries every rank's state together with its complaints.

A rank that finds its own input wrong must not raise before the others know: they would wait for it.
So each rank sends a fixed-size message, a header and its first rows, whatever has happened to it.
All ranks then read the same messages and raise the same error, or go on. Only a longer batch needs
a second all-gather for its other rows, whose number the headers have agreed on by then.

Letters: T tokens (rows), R ranks, M words of a message, W words of a row.
"""

import hashlib
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_kernels.expsum import NUM_BINS, State, merge
from rlk_kernels.shard_input import LOGITS_DTYPES, ShardInput, float32_bits

ROW_WORDS = NUM_BINS + 2
"""int64 words of a row: 40 bytes."""
FIRST_ROWS = 128
ERROR_BYTES = 320
HEADER_FIELDS = (
    "num_tokens",
    "vocab_size",
    "dtype",
    "temperature",
    "active",
    "digest",
    "top_k",
    "start",
    "end",
)
HEADER_WORDS = len(HEADER_FIELDS) + ERROR_BYTES // 8
MUST_AGREE = {
    "num_tokens": "another number of tokens than",
    "vocab_size": "another vocabulary size than",
    "dtype": "another dtype of logits than",
    "temperature": "another temperature than",
    "active": "another active_mask than",
    "digest": "other token ids than",
    "top_k": "another top_k than",
}
SHOWN = ("num_tokens", "vocab_size", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank says about its shard."""

    num_tokens: int = 0
    vocab_size: int = 0
    dtype: int = 0
    temperature: int = 0
    active: int = 0
    """Digest of which rows are active."""
    digest: int = 0
    """Of the token ids, 0 in inactive rows."""
    top_k: int = 1
    """How many of the largest logits are asked for; 1 where nobody asks."""
    start: int = 0
    """First token id of the shard's real columns."""
    end: int = 0
    """One past the last."""
    error: str = ""
    """What is wrong with this rank's input; the other fields mean nothing then."""

    @classmethod
    def of(cls, shard: ShardInput, top_k: int = 1) -> "Header":
        """The header of a sound shard."""
        num_tokens = len(shard.token_ids)
        active = b"\1" * num_tokens if shard.active is None else _bytes(shard.active)
        return cls(
            num_tokens=num_tokens,
            vocab_size=shard.vocab_size,
            dtype=LOGITS_DTYPES.index(shard.logits_TL.dtype),
            temperature=float32_bits(shard.temperature),
            active=_digest(active),
            digest=_digest(_bytes(shard.token_ids)),
            top_k=top_k,
            start=shard.vocab_start,
            end=shard.vocab_start + shard.num_real_columns,
        )

    def words(self) -> Tensor:
        """int64 [HEADER_WORDS]; a long error is cut."""
        numbers = torch.tensor([getattr(self, name) for name in HEADER_FIELDS], dtype=torch.int64)
        text = self.error.encode("ascii", "replace")[:ERROR_BYTES].ljust(ERROR_BYTES, b"\0")
        return torch.cat([numbers, torch.from_numpy(np.frombuffer(text, np.int64).copy())])

    @classmethod
    def from_words(cls, words: Tensor) -> "Header":
        """The header that `words` gave."""
        numbers, text = words[: len(HEADER_FIELDS)].tolist(), words[len(HEADER_FIELDS) :]
        error = text.numpy().tobytes().rstrip(b"\0").decode("ascii")
        return cls(**dict(zip(HEADER_FIELDS, numbers, strict=True)), error=error)


def gather_state(header: Header, state: State, group: dist.ProcessGroup) -> State:
    """The merged state of all ranks, the same on each; it waits at most for the group's timeout.

    Raises:
        ValueError: The same on every rank, naming the first rank at fault.
    """
    rows = _pack(state).to(_transport_device(group, state.top.device))
    first = torch.zeros(FIRST_ROWS, ROW_WORDS, dtype=torch.int64, device=rows.device)
    first[: len(rows)] = rows[:FIRST_ROWS]
    message = torch.cat([header.words().to(rows.device), first.flatten()])
    messages_RM = _all_gather(message, group)
    # the one wait for a GPU: the states stay on it
    headers = messages_RM[:, :HEADER_WORDS].cpu()
    error = group_error([Header.from_words(words) for words in headers])
    if error is not None:
        raise ValueError(error)
    parts_RTW = messages_RM[:, HEADER_WORDS:].view(-1, FIRST_ROWS, ROW_WORDS)[:, : len(rows)]
    if len(rows) > FIRST_ROWS:
        parts_RTW = torch.cat([parts_RTW, _all_gather(rows[FIRST_ROWS:], group)], dim=1)
    return reduce(merge, (_unpack(part_TW, state.top.device) for part_TW in parts_RTW))


def group_failure(
    error: Exception, group: dist.ProcessGroup, device: torch.device | str
) -> ValueError:
    """The error that every rank raises, once they have been told of this rank's.

    ``device`` is that of the rank's logits, from which the others send.
    """
    header = Header(error=str(error) or type(error).__name__)
    nothing = torch.zeros(FIRST_ROWS * ROW_WORDS, dtype=torch.int64)
    message = torch.cat([header.words(), nothing]).to(_transport_device(group, device))
    headers = _all_gather(message, group)[:, :HEADER_WORDS].cpu()
    return ValueError(group_error([Header.from_words(words) for words in headers]))


def group_error(headers: list[Header]) -> str | None:
    """What is wrong with a group's shards, naming the rank; None if they fit together."""
    for rank, header in enumerate(headers):
        if header.error:
            return f"rank {rank}: {header.error}"
    for name, difference in MUST_AGREE.items():
        values = [getattr(header, name) for header in headers]
        for rank, value in enumerate(values):
            if value != values[0]:
                shown = f" ({value}, {values[0]})" if name in SHOWN else ""
                return (
                    f"rank {rank} has {difference} rank 0{shown}; "
                    "every rank of the group passes the same rows"
                )
    return coverage_error([(header.start, header.end) for header in headers], headers[0].vocab_size)


def coverage_error(bounds: list[tuple[int, int]], vocab_size: int) -> str | None:
    """Where the ranks' half-open ranges of token ids leave a gap or overlap; None if nowhere."""
    covered, before = 0, "the start"
    for (start, end), rank in sorted((b, rank) for rank, b in enumerate(bounds) if b[0] < b[1]):
        if start < covered:
            return (
                f"rank {rank} holds token ids [{start}, {end}), but {before} already holds those "
                f"below {covered}; pass each shard's own vocab_start"
            )
        if start > covered:
            return _gap(covered, start, before, f"rank {rank}")
        covered, before = end, f"rank {rank}"
    return _gap(covered, vocab_size, before, "the end") if covered < vocab_size else None


def _gap(start: int, end: int, before: str, after: str) -> str:
    return (
        f"no rank holds token ids [{start}, {end}), between {before} and {after}; "
        "pass the whole vocabulary and each shard's own vocab_start"
    )


def all_gather_words(words: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's int64 tensor of one shape, on the CPU, rank by rank."""
    return list(_all_gather(words.to(_transport_device(group, words.device)), group).cpu())


def _transport_device(group: dist.ProcessGroup, device: torch.device | str) -> torch.device:
    """Where the group's backend takes tensors from; ``device`` is where the rank's own lie."""
    if "nccl" not in dist.get_backend(group):
        return torch.device("cpu")
    own = torch.device(device)
    # a process may hold its logits on another GPU than the current one
    return own if own.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _all_gather(words: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tensor of one shape, stacked rank by rank, where the backend put them."""
    shape = (dist.get_world_size(group), *words.shape)
    received = torch.empty(shape, dtype=words.dtype, device=words.device)
    dist.all_gather(list(received.unbind()), words.contiguous(), group=group)
    return received


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _digest(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _pack(state: State) -> Tensor:
    """int64 [T, 5]: the bins, then two words of two 32-bit halves."""
    halves = [
        state.top,
        state.target_logit.view(torch.int32),
        state.invalid_column,
        state.has_target.int(),
    ]
    return torch.cat([state.bins, torch.stack(halves, dim=1).view(torch.int64)], dim=1)


def _unpack(rows: Tensor, device: torch.device) -> State:
    """The state that `_pack` packed."""
    rows = rows.to(device)
    halves = rows[:, NUM_BINS:].contiguous().view(torch.int32)
    return State(
        top=halves[:, 0].contiguous(),
        bins=rows[:, :NUM_BINS].contiguous(),
        target_logit=halves[:, 1].contiguous().view(torch.float32),
        has_target=halves[:, 3] != 0,
        invalid_column=halves[:, 2].contiguous(),
    )
