"""The one place that chooses an implementation: a wish and a device in, a backend out."""

from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from rlk_kernels.expsum import State

DEVICES = {"reference": None, "cpu": ("cpu",), "triton": ("cuda",)}
"""Device types that a backend runs on; None is any. AMD's GPUs are "cuda" to torch as well."""


class Backend(Protocol):
    """What a backend's module offers; arguments are checked and all columns are real."""

    def expsum_state(
        self, logits_TL: Tensor, token_ids: Tensor, vocab_start: int, temperature: float
    ) -> State:
        """State of the columns [vocab_start, vocab_start + L)."""

    def logits_gradient(
        self,
        logits_TL: Tensor,
        token_ids: Tensor,
        vocab_start: int,
        temperature: float,
        *,
        mantissa: Tensor,
        exponent: Tensor,
        grad_logprob: Tensor,
        grad_lse: Tensor,
        out_TL: Tensor,
    ) -> None:
        """Write the gradient of the logits into ``out_TL``, see `rlk_kernels.reference`."""


def backend_id(backend: str, device: torch.device | str) -> str:
    """Name of the backend that runs for a wish and a device; "auto" is the fused one if any.

    Raises:
        ValueError: If there is no such backend, it does not run on the device, or the package that
            it needs is not installed.
    """
    device_type = torch.device(device).type
    if backend == "auto":
        fused = [name for name, types in DEVICES.items() if types and device_type in types]
        return next((name for name in fused if _is_installed(name)), "reference")
    if backend not in DEVICES:
        raise ValueError(f"no backend {backend!r}; pass one of {', '.join(['auto', *DEVICES])}")
    devices = DEVICES[backend]
    if devices is not None and device_type not in devices:
        raise ValueError(
            f"backend {backend!r} runs on {', '.join(devices)}, the logits are on {device_type}; "
            "move them or pass backend='auto'"
        )
    if not _is_installed(backend):
        raise ValueError(
            f"backend {backend!r} needs the package {backend}, which is not installed; "
            "install it or pass backend='auto'"
        )
    return backend


def _is_installed(backend: str) -> bool:
    # torch for the CPU comes without triton
    return backend != "triton" or find_spec("triton") is not None


def load_backend(name: str) -> Backend:
    """The module of a backend; numba and triton are imported by the first use."""
    return cast(Backend, import_module(f"rlk_kernels.{name}"))
