"""Which backend keeps a contract: asked for openly, chosen openly, refused with every reason."""

from rlk_align.dispatch.capability import Capability, Platform, Tier, platform_of
from rlk_align.dispatch.registry import BackendEntry, LogprobBackend, Registry, register_backend
from rlk_align.dispatch.resolve import Dispatch, Rejection, RejectionKind, resolve

__all__ = [
    "BackendEntry",
    "Capability",
    "Dispatch",
    "LogprobBackend",
    "Platform",
    "Registry",
    "Rejection",
    "RejectionKind",
    "Tier",
    "platform_of",
    "register_backend",
    "resolve",
]
