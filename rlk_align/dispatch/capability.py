"""What a backend declares that it can do on one platform."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from rlk_align.contract import DeterminismScope, LogitsDtype, LogprobContract, MaskMode, Role
from rlk_align.contract.fields import checked_integer, checked_member, checked_members
from rlk_align.errors import UnusableInput

POLICY_WORDS = ("auto", "reference", "production", "deterministic")
"""No backend may be called like these."""
CHOICES = {
    "roles": Role,
    "logits_dtypes": LogitsDtype,
    "mask_modes": MaskMode,
    "determinism_scopes": DeterminismScope,
}


class Platform(StrEnum):
    """Where logits live."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


class Tier(StrEnum):
    """What a backend is for."""

    REFERENCE = "reference"
    """Written to be believed."""
    PRODUCTION = "production"
    """The same bits, fast."""


def platform_of(device: torch.device | str) -> Platform:
    """The platform of a device; torch calls AMD's GPUs cuda, too.

    Raises:
        UnusableInput: For a device of any other kind.
    """
    kind = torch.device(device).type
    if kind == "cuda" and torch.version.hip is not None:
        return Platform.ROCM
    return checked_member("platform", Platform, kind)


def checked_backend_id(value: object) -> str:
    """The id without surrounding blanks, or an `UnusableInput`."""
    name = value.strip() if isinstance(value, str) else ""
    if not name or name in POLICY_WORDS:
        raise UnusableInput(
            f"a backend's id should be a word other than {', '.join(POLICY_WORDS)}, got {value!r}"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A backend on one platform. Enums take their strings, sets any collection of them.

    Raises:
        UnusableInput: If a field is out of range or a set is empty.
    """

    backend_id: str
    platform: Platform
    tier: Tier
    roles: frozenset[Role] = frozenset(Role)
    logits_dtypes: frozenset[LogitsDtype] = frozenset(LogitsDtype)
    tp_sizes: frozenset[int] | None = None
    """None is any."""
    cp_sizes: frozenset[int] | None = None
    supports_padding: bool = True
    """Shards may reach beyond the real vocabulary."""
    exports_lse: bool = True
    mask_modes: frozenset[MaskMode] = frozenset(MaskMode)
    determinism_scopes: frozenset[DeterminismScope] = frozenset(DeterminismScope)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend_id", checked_backend_id(self.backend_id))
        object.__setattr__(self, "platform", checked_member("platform", Platform, self.platform))
        object.__setattr__(self, "tier", checked_member("tier", Tier, self.tier))
        for name, enum in CHOICES.items():
            object.__setattr__(self, name, checked_members(name, enum, getattr(self, name)))
        for name in ("tp_sizes", "cp_sizes"):
            sizes = getattr(self, name)
            if sizes is not None:
                checked = frozenset(checked_integer(name, size, low=1) for size in sizes)
                object.__setattr__(self, name, checked)

    def incompatibilities(self, contract: LogprobContract) -> tuple[str, ...]:
        """Every reason why this backend cannot keep the contract; empty if it can."""
        sharding = contract.sharding
        reasons = [
            _not_among("role", contract.role, self.roles),
            _not_among("logits dtype", contract.logits_dtype, self.logits_dtypes),
            _not_among("TP size", sharding.tp_world, self.tp_sizes),
            _not_among("CP size", sharding.cp_world, self.cp_sizes),
            _not_among("mask mode", contract.mask.mode, self.mask_modes),
            _not_among("determinism", contract.determinism_scope, self.determinism_scopes),
        ]
        layout = sharding.layout
        if not self.supports_padding and layout.padded_size > layout.vocab_size:
            reasons.append(
                f"padding is not supported, the contract pads {layout.vocab_size} columns "
                f"to {layout.padded_size}"
            )
        if contract.output.exports_lse and not self.exports_lse:
            reasons.append("the LSE is not exported, the contract asks for it")
        return tuple(reason for reason in reasons if reason is not None)

    def to_dict(self) -> dict[str, object]:
        """Strict JSON; sets are sorted, None is any."""
        return {
            "backend_id": self.backend_id,
            "platform": self.platform,
            "tier": self.tier,
            **{name: sorted(getattr(self, name)) for name in CHOICES},
            "tp_sizes": None if self.tp_sizes is None else sorted(self.tp_sizes),
            "cp_sizes": None if self.cp_sizes is None else sorted(self.cp_sizes),
            "supports_padding": self.supports_padding,
            "exports_lse": self.exports_lse,
        }


def _not_among(what: str, asked: object, declared: frozenset[object] | None) -> str | None:
    """Why the wish is not met, or None if it is."""
    if declared is None or asked in declared:
        return None
    return f"{what} {asked} is asked for, only {', '.join(sorted(map(str, declared)))} is declared"
