"""Switches the capture on inside vLLM: by environment, or by a worker extension.

``register`` is an entry point of ``vllm.general_plugins``: vLLM calls it in every process, before
the worker exists. Without ``RLK_CAPTURE_DIR`` it does nothing at all.

A worker is complete after ``collective_rpc("rlk_close")``, or when vLLM shuts it down with no
sequence in flight. A server of vLLM kills its workers at once when it stops, before they have
written, unless it was started with ``--shutdown-timeout``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rlk_adapters.vllm_settings import CaptureSettings, settings_from_environment

WRAPPED_MARK = "_rlk_capture_installs"


def register() -> None:
    """Have every worker of this process install the capture once its model is loaded.

    Never raises: vLLM would not start. A capture that cannot be installed says so on stderr, and
    cannot be sealed.
    """
    try:
        if settings_from_environment() is None:
            return
        from rlk_adapters.vllm_identity import remember_launch
        from rlk_adapters.vllm_numba import give_library_a_dict

        remember_launch()
        give_library_a_dict()
        _wrap_workers()
    except Exception as error:
        _complain(error)


def _wrap_workers() -> None:
    """The one change of a class: every executor owns its worker through this wrapper."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.initialize_from_config
    if hasattr(original, WRAPPED_MARK):
        return

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # read again: a later engine of this process may capture elsewhere, or not at all
        if (settings := settings_from_environment()) is not None:
            install_or_complain(self.worker, settings)
        return result

    setattr(initialize_from_config, WRAPPED_MARK, True)
    WorkerWrapperBase.initialize_from_config = initialize_from_config


def install_or_complain(worker: Any, settings: CaptureSettings) -> dict[str, Any]:
    """Install the capture on a worker, or leave it as it is and say why.

    Either way ``collective_rpc`` finds ``rlk_status``, ``rlk_flush`` and ``rlk_close`` on the
    worker afterwards; each returns worker, rows, lost and failure.
    """
    if hasattr(worker, "rlk_status"):
        return dict(worker.rlk_status())
    try:
        from rlk_adapters.vllm_install import install

        return install(worker, settings).status()
    except Exception as error:
        _complain(error)
        status: dict[str, Any] = {"worker": None, "rows": 0, "lost": {}, "failure": str(error)}
        for name in ("rlk_status", "rlk_flush", "rlk_close"):
            setattr(worker, name, lambda: status)
        return status


def _complain(error: Exception) -> None:
    print(f"rlk-align: nothing is captured: {error}", file=sys.stderr, flush=True)


class WorkerExtension:
    """The second way in, where plugins are not loaded.

    Example:
        ``llm = LLM(..., worker_extension_cls="rlk_adapters.vllm_plugin.WorkerExtension")``, then
        ``llm.collective_rpc("rlk_install")`` with ``RLK_CAPTURE_DIR`` set.
    """

    def rlk_install(self) -> dict[str, Any]:
        """Install the capture as the environment says; returns the status.

        Raises:
            ValueError: If ``RLK_CAPTURE_DIR`` is not set.
        """
        settings = settings_from_environment()
        if settings is None:
            raise ValueError("RLK_CAPTURE_DIR is not set; set it to the directory to capture into")
        return install_or_complain(self, settings)
