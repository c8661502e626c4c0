"""Prepares a process for vLLM: settings of the environment, and a stdout kept for results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator

from rlk_adapters.vllm_settings import CaptureSettings

PLUGIN = "rlk_capture"
# what a person may have set differently stays as it is; all of it stands in the provenance
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # the scheduler runs in this process, so that the workers are the only others
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
ON_CPU = {
    # compiling C++ for the rank of a token takes longer than sampling a few thousand
    "TORCH_COMPILE_DISABLE": "1",
    # binding needs a NUMA node a worker
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def set_environment(tp: int, capture: CaptureSettings) -> None:
    """Prepare this process and its workers; call it before torch is imported."""
    defaults = dict(QUIET)
    if runs_on_cpu():
        defaults |= ON_CPU
        if tp > 1:
            # workers that each take every core hinder one another
            defaults["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // tp))
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # vLLM's own uses of torch's old names, which nobody here can mend
    warnings.simplefilter("ignore", FutureWarning)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}"
    os.environ.update(capture.to_environment())


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is a build for the CPU; nothing is imported."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return "cpu" in importlib.metadata.version("vllm")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm-cpu"))
    return False


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what engine, workers and C++ libraries print to stderr; stdout is for results."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
