"""Before a TP group computes, its ranks tell each other what they are about to do.

A rank that finds its own contract or input wrong must not raise alone: the others would wait for
it. So its sentence travels in the same exchange as the others' fingerprints, and all raise it.
Beyond this the kernel's own collective compares the rows (`rlk_kernels.collective`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_align.dispatch import Dispatch
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json
from rlk_kernels import KERNEL_SPEC
from rlk_kernels.collective import all_gather_words

FINGERPRINT_BYTES = 32
DIGEST_BYTES = 8
NAME_BYTES = 64
ERROR_BYTES = 512
SECTIONS = (
    "determinism_scope",
    "logits_dtype",
    "mask",
    "output",
    "reduction",
    "role",
    "schema",
    "sharding",
)
"""Of `LogprobContract.cross_rank_dict`; their digests say where two fingerprints part."""
SIZES = {
    "fingerprint": FINGERPRINT_BYTES,
    **dict.fromkeys(SECTIONS, DIGEST_BYTES),
    "backend": NAME_BYTES,
    "kernel_spec": NAME_BYTES,
    "error": ERROR_BYTES,
}


class GroupSilent(RuntimeError):
    """The exchange did not come about: the group's timeout has passed, or a rank is gone."""


class HasDispatch(Protocol):
    """What a rank has prepared."""

    @property
    def dispatch(self) -> Dispatch:
        """The backend that is going to run, and the contract that it keeps."""


P = TypeVar("P", bound=HasDispatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What one rank tells the others."""

    fields: dict[str, bytes]
    """By the names of `SIZES`; what is missing is empty."""

    @classmethod
    def of(cls, dispatch: Dispatch) -> Announcement:
        """What a sound rank is about to do."""
        content = dispatch.contract.cross_rank_dict()
        fingerprint = bytes.fromhex(dispatch.contract.cross_rank_fingerprint())
        digests = {section: _digest(content[section]) for section in SECTIONS}
        names = {"backend": dispatch.actual.encode(), "kernel_spec": KERNEL_SPEC.encode()}
        return cls(fields={"fingerprint": fingerprint, **digests, **names})

    def words(self) -> Tensor:
        """int64, of the same length for all; long names and errors are cut."""
        parts = [
            self.fields.get(name, b"")[:size].ljust(size, b"\0") for name, size in SIZES.items()
        ]
        return torch.from_numpy(np.frombuffer(b"".join(parts), np.int64).copy())

    @classmethod
    def from_words(cls, words: Tensor) -> Announcement:
        """The announcement that `words` gave."""
        content, fields, start = words.numpy().tobytes(), {}, 0
        for name, size in SIZES.items():
            fields[name] = content[start : start + size]
            start += size
        return cls(fields=fields)

    def text(self, name: str) -> str:
        """A field that holds text."""
        return self.fields[name].rstrip(b"\0").decode("utf-8", "replace")


def preflight(prepare: Callable[[], P], group: dist.ProcessGroup | None) -> P:
    """What ``prepare`` gives, once it has succeeded on every rank and all ranks fit together.

    Collective: one all-gather of about 700 bytes a rank, which waits at most for the group's own
    timeout.

    Args:
        prepare: Makes this rank's contract, checks this rank's input and resolves its backend;
            raises what is wrong. It holds no collective.
        group: The ranks of the contract's TP group; None for a single process.

    Raises:
        UnusableInput: Whatever ``prepare`` raises; on every rank alike, naming the rank at fault.
        GroupSilent: If not all ranks of the group have come; a rank that knows of a fault of its
            own raises that.
    """
    if group is None:
        try:
            return prepare()
        except Exception as error:
            raise UnusableInput(_sentence(error)) from error
    if dist.get_rank(group) < 0:
        raise UnusableInput("this process is no member of the group it passes; pass its own")
    try:
        prepared = prepare()
        announcement = Announcement.of(prepared.dispatch)
    except Exception as error:
        sentence = _sentence(error)
        _exchange(Announcement(fields={"error": sentence.encode()}), group, sentence)
        raise AssertionError("an announced error is raised by every rank") from error
    _exchange(announcement, group, "")
    return prepared


def _exchange(announcement: Announcement, group: dist.ProcessGroup, own_error: str) -> None:
    """Tell and hear; raise what is wrong with the group."""
    try:
        messages = all_gather_words(announcement.words(), group)
    except RuntimeError as error:
        if own_error:
            raise UnusableInput(own_error) from error
        raise GroupSilent(
            f"not all {dist.get_world_size(group)} ranks of the TP group came to the preflight; "
            "a rank has stopped or passed another group"
        ) from error
    fault = group_fault([Announcement.from_words(words) for words in messages])
    if fault is not None:
        raise UnusableInput(fault)


def group_fault(announcements: list[Announcement]) -> str | None:
    """What is wrong with a group, naming the first TP rank at fault; None if all fits."""
    for rank, one in enumerate(announcements):
        if one.text("error"):
            return f"TP rank {rank}: {one.text('error')}"
    first = announcements[0]
    for name, what in (("kernel_spec", "kernel"), ("backend", "backend")):
        for rank, one in enumerate(announcements):
            if one.text(name) != first.text(name):
                return (
                    f"TP rank {rank} runs {what} {one.text(name)}, TP rank 0 {first.text(name)}; "
                    "run the same on every rank of the group"
                )
    for rank, one in enumerate(announcements):
        if one.fields["fingerprint"] != first.fields["fingerprint"]:
            different = [name for name in SECTIONS if one.fields[name] != first.fields[name]]
            return (
                f"TP rank {rank} has another contract than TP rank 0 in "
                f"{', '.join(different) or 'a field of no section'}; "
                "give every rank of the group the same"
            )
    return None


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__


def _digest(value: object) -> bytes:
    return hashlib.sha256(canonical_json(value)).digest()[:DIGEST_BYTES]
