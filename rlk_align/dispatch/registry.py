"""The backends there are; anyone may add one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from rlk_align.dispatch.capability import Capability, Platform, Tier, checked_backend_id
from rlk_align.errors import UnusableInput
from rlk_kernels import SelectedLogprob, selected_logprob
from rlk_kernels.backends import backend_id, load_backend


class LogprobBackend(Protocol):
    """What a backend computes; `rlk_kernels.selected_logprob` is one."""

    def __call__(
        self,
        logits_TL: Tensor,
        token_ids_T: Tensor,
        *,
        vocab_size: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
    ) -> SelectedLogprob:
        """Float32 logprob and LSE [T] of the whole vocabulary, the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    """A backend, and where it may run.

    Raises:
        UnusableInput: If a capability is of another backend.
    """

    backend_id: str
    build: Callable[[Platform], LogprobBackend]
    """Imports what it needs; whatever it raises is a reason for its rejection."""
    platforms: frozenset[Platform]
    """Where it is a candidate. Without a capability there it is rejected as undeclared."""
    capabilities: tuple[Capability, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend_id", checked_backend_id(self.backend_id))
        for capability in self.capabilities:
            if capability.backend_id != self.backend_id:
                raise UnusableInput(
                    f"backend {self.backend_id!r} is given a capability of "
                    f"{capability.backend_id!r}; declare its own"
                )

    def capability_on(self, platform: Platform) -> Capability | None:
        """What it declares for a platform, if anything."""
        return next((c for c in self.capabilities if c.platform == platform), None)


@dataclass(slots=True)
class Registry:
    """Backends by id, in the order in which they were registered."""

    entries: dict[str, BackendEntry] = field(default_factory=dict)

    def register(self, entry: BackendEntry) -> None:
        """Add a backend; one of the same id is replaced and keeps its place."""
        self.entries[entry.backend_id] = entry

    def candidates(self, platform: Platform) -> list[BackendEntry]:
        """Who may run on a platform; those of the reference tier come last."""
        here = [entry for entry in self.entries.values() if platform in entry.platforms]
        return sorted(here, key=lambda entry: _is_reference(entry.capability_on(platform)))


def _is_reference(capability: Capability | None) -> bool:
    return capability is not None and capability.tier == Tier.REFERENCE


def _build_kernel(name: str, platform: Platform) -> LogprobBackend:
    """`selected_logprob` with one of its own backends."""
    device = "cpu" if platform == Platform.CPU else "cuda"
    load_backend(backend_id(name, device))
    return partial(selected_logprob, backend=name)


def _kernel_entry(name: str, tier: Tier, platforms: tuple[Platform, ...]) -> BackendEntry:
    return BackendEntry(
        backend_id=f"expsum-{name}",
        build=partial(_build_kernel, name),
        platforms=frozenset(platforms),
        capabilities=tuple(
            Capability(backend_id=f"expsum-{name}", platform=platform, tier=tier)
            for platform in platforms
        ),
    )


DEFAULT_REGISTRY = Registry()
for _entry in (
    _kernel_entry("cpu", Tier.PRODUCTION, (Platform.CPU,)),
    _kernel_entry("triton", Tier.PRODUCTION, (Platform.CUDA, Platform.ROCM)),
    _kernel_entry("reference", Tier.REFERENCE, tuple(Platform)),
):
    DEFAULT_REGISTRY.register(_entry)


def register_backend(entry: BackendEntry) -> None:
    """Make a backend known to every later dispatch of this process."""
    DEFAULT_REGISTRY.register(entry)
