"""The TP x CP grid of a launch: its ranks meet, and only what was opened here is closed here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlk_align.dispatch import Platform
from rlk_align.errors import UnusableInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """This process among the ranks: rank = cp_rank * TP + tp_rank."""

    tp: int
    cp: int
    rank: int = 0
    device: str = "cpu"
    transport: str = "none"
    """Process group backend that carries the states."""
    tp_group: dist.ProcessGroup | None = None
    """This rank's TP group; None where TP is 1."""
    talk: dist.ProcessGroup | None = None
    """All ranks, over gloo, for their records; None for a single process."""

    def gather(self, record: Any) -> list[Any]:
        """Every rank's record, rank by rank."""
        if self.talk is None:
            return [record]
        records = [None] * (self.tp * self.cp)
        dist.all_gather_object(records, record, group=self.talk)
        return records


def launched_world_size() -> int:
    """Ranks of this launch, as an open process group or torchrun says; 1 without either."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def open_grid(tp: int, cp: int, *, platform: Platform, timeout: timedelta) -> Iterator[Grid]:
    """The grid of this launch, for as long as the block lasts.

    A process group that is open already is used and left open.

    Args:
        tp: Ranks that split the vocabulary.
        cp: Ranks that split the tokens.
        platform: Where the logits live.
        timeout: The longest that a rank waits for another in any collective.

    Raises:
        UnusableInput: If the launch does not have tp * cp ranks; before any group exists.
    """
    world_size = launched_world_size()
    if world_size != tp * cp:
        raise UnusableInput(
            f"TP {tp} x CP {cp} needs {tp * cp} processes, the launch has {world_size}; "
            f"start with torchrun --nproc-per-node {tp * cp}"
        )
    if world_size == 1:
        yield Grid(tp=1, cp=1, device="cpu" if platform == Platform.CPU else "cuda")
        return
    was_open, groups = dist.is_initialized(), []
    try:
        device, transport = _device_and_transport(platform)
        if not was_open:
            dist.init_process_group(transport, timeout=timeout)
        # twice: whoever waits for a rank that has failed gets here one timeout later
        talk = dist.new_group(backend="gloo", timeout=2 * timeout)
        groups.append(talk)
        tp_group = _own_tp_group(tp, world_size, transport, timeout) if tp > 1 else None
        if tp_group is not None:
            groups.append(tp_group)
        yield Grid(
            tp=tp,
            cp=cp,
            rank=dist.get_rank(),
            device=device,
            transport=transport,
            tp_group=tp_group,
            talk=talk,
        )
    finally:
        _close(was_open, groups)


def _own_tp_group(
    tp: int, world_size: int, transport: str, timeout: timedelta
) -> dist.ProcessGroup | None:
    """This rank's TP group; every rank makes all groups, in one order."""
    own = None
    for first in range(0, world_size, tp):
        members = range(first, first + tp)
        group = dist.new_group(members, backend=transport, timeout=timeout)
        if dist.get_rank() in members:
            own = group
    return own


def _device_and_transport(platform: Platform) -> tuple[str, str]:
    """This rank's device, and nccl where each rank of the machine has a GPU of its own."""
    if platform == Platform.CPU:
        return "cpu", "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise UnusableInput(f"platform {platform} needs a GPU, there is none; pass --platform cpu")
    torch.cuda.set_device(local_rank % num_devices)
    # nccl refuses two ranks on one GPU; gloo then carries the integers just as well
    transport = "nccl" if num_local <= num_devices else "gloo"
    return f"cuda:{local_rank % num_devices}", transport


def _close(was_open: bool, groups: list[dist.ProcessGroup]) -> None:
    if not dist.is_initialized():
        return
    if not was_open:
        dist.destroy_process_group()
        return
    for group in groups:
        dist.destroy_process_group(group)
