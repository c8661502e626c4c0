"""From a policy and a contract to one backend, with a record of everything that was passed over."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from rlk_align.contract import LogprobContract
from rlk_align.dispatch.capability import POLICY_WORDS, Capability, Platform, Tier
from rlk_align.dispatch.registry import DEFAULT_REGISTRY, BackendEntry, LogprobBackend, Registry
from rlk_align.errors import UnusableInput


class RejectionKind(StrEnum):
    """Why a candidate was passed over."""

    UNDECLARED_CAPABILITY = "undeclared_capability"
    EXCLUDED_BY_POLICY = "excluded_by_policy"
    """The caller's own wish, hence no fallback."""
    INCOMPATIBLE = "incompatible"
    UNAVAILABLE = "unavailable"
    """It could not be imported or built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One candidate that was not taken."""

    backend_id: str
    kind: RejectionKind
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The backend that runs, and how it came to that."""

    requested: str
    """The policy word or exact id."""
    actual: str
    platform: Platform
    rejections: tuple[Rejection, ...]
    """Candidates before the one taken, in order."""
    contract: LogprobContract
    capability: Capability
    backend: LogprobBackend

    @property
    def is_fallback(self) -> bool:
        """Somebody who would have come first was rejected, other than by the caller's policy."""
        return any(r.kind != RejectionKind.EXCLUDED_BY_POLICY for r in self.rejections)

    def to_dict(self) -> dict[str, object]:
        """Provenance as strict JSON."""
        return {
            "requested": self.requested,
            "actual": self.actual,
            "platform": self.platform,
            "fallback": self.is_fallback,
            "rejections": [asdict(rejection) for rejection in self.rejections],
            "contract": self.contract.to_dict(),
            "capability": self.capability.to_dict(),
        }


def resolve(
    contract: LogprobContract,
    policy: str,
    platform: Platform,
    *,
    registry: Registry = DEFAULT_REGISTRY,
) -> Dispatch:
    """The first candidate that keeps the contract.

    Args:
        contract: What has to be kept.
        policy: "auto" (one rank only), "reference", "production", or a backend's exact id.
        platform: Where the logits live.
        registry: Who may be a candidate.

    Raises:
        UnusableInput: If the policy is none, or no candidate is left; then with all reasons.
    """
    if not isinstance(policy, str):
        raise UnusableInput(f"a policy should be a word or a backend's id, got {policy!r}")
    policy = policy.strip()
    rejections: list[Rejection] = []
    for entry in _candidates(contract, policy, platform, registry):
        outcome = _tried(entry, contract, policy, platform, tuple(rejections))
        if isinstance(outcome, Dispatch):
            return outcome
        rejections.append(outcome)
    told = "; ".join(f"{r.backend_id}: {r.kind} ({', '.join(r.reasons)})" for r in rejections)
    raise UnusableInput(
        f"no backend keeps the contract for {policy!r} on {platform}; "
        f"{told or 'none is registered there'}"
    )


def _candidates(
    contract: LogprobContract, policy: str, platform: Platform, registry: Registry
) -> list[BackendEntry]:
    """Who is asked, in order; an exact id asks nobody else."""
    if policy == "deterministic":
        raise UnusableInput(
            "'deterministic' is no policy, as every backend has to keep the contract's "
            "determinism_scope; set that, and name a backend"
        )
    if policy == "auto" and contract.sharding.tp_world > 1:
        raise UnusableInput(
            f"'auto' is refused for {contract.sharding.tp_world} TP ranks, which might each choose "
            "another backend; name one, such as expsum-cpu"
        )
    if policy in POLICY_WORDS:
        return registry.candidates(platform)
    if policy not in registry.entries:
        raise UnusableInput(
            f"no backend {policy!r}; pass auto, reference, production or one of "
            f"{', '.join(registry.entries)}"
        )
    return [registry.entries[policy]]


def _tried(
    entry: BackendEntry,
    contract: LogprobContract,
    policy: str,
    platform: Platform,
    before: tuple[Rejection, ...],
) -> Dispatch | Rejection:
    """The dispatch to a candidate, or the first step at which it fell."""

    def rejected(kind: RejectionKind, *reasons: str) -> Rejection:
        return Rejection(backend_id=entry.backend_id, kind=kind, reasons=reasons)

    capability = entry.capability_on(platform)
    if capability is None:
        return rejected(
            RejectionKind.UNDECLARED_CAPABILITY, f"it declares no capability on {platform}"
        )
    if policy in tuple(Tier) and capability.tier != policy:
        return rejected(
            RejectionKind.EXCLUDED_BY_POLICY, f"its tier is {capability.tier}, not {policy}"
        )
    if reasons := capability.incompatibilities(contract):
        return rejected(RejectionKind.INCOMPATIBLE, *reasons)
    try:
        backend = entry.build(platform)
    except Exception as error:
        return rejected(RejectionKind.UNAVAILABLE, f"{type(error).__name__}: {error}")
    return Dispatch(
        requested=policy,
        actual=entry.backend_id,
        platform=platform,
        rejections=before,
        contract=contract,
        capability=capability,
        backend=backend,
    )
