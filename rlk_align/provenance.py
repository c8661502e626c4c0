"""Where numbers come from: engine, model, topology, semantics, software, environment, command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

NOT_OBSERVED: Final = "not observed"
COMMAND_VARIABLE = "RLK_LAUNCH_COMMAND"
PACKAGES = ("rlk-align", "torch", "numpy", "numba", "safetensors", "triton")
# settings of these families change numbers or the choice of code that computes them
ENVIRONMENT_PREFIXES = (
    "ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "KMP_", "MKL_", "NCCL_", "NUMBA_", "NVIDIA_TF32", "OMP_",
    "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_",
    "VLLM_",
)  # fmt: skip
# names of the families above whose values are places or secrets, not arithmetic
ENVIRONMENT_EXCLUDED = ("_DIR", "_PATH", "_KEY", "_TOKEN", "_HOME", "_PORT", "_HOST", "_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSemantics:
    """What the captured logits are."""

    stage: Literal["model_output"]
    """``model_output``: what the head produced, soft cap and scale applied; before temperature,
    penalties, masks and processors."""
    dtype: str
    """Dtype of the captured values, such as ``bfloat16``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSemantics:
    """What the engine's reported logprob of a token is."""

    function: str
    """In the engine's words, such as ``vllm raw_logprobs`` or ``log_softmax(float32)``."""
    distribution: Literal["raw", "processed"]
    """``raw``: the softmax of the model's output; ``processed``: after temperature, penalties,
    and renormalisation over what top-k, top-p or min-p kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Which model, without trusting its name."""

    name: str
    architecture: dict[str, Any] | Literal["not observed"]
    """The fields of the config that fix the function; equal on both sides or not the same model."""
    weights_digest: str
    """`checkpoint_digest` of the tensors, or ``not observed``."""
    tokenizer_digest: str
    """SHA-256 of ``tokenizer.json``, or ``not observed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Everything about a capture that is the same on each of its workers."""

    engine: str
    engine_version: str
    engine_settings: dict[str, Any]
    """The engine's own switches that may change numbers, in its own words."""
    model: ModelIdentity
    topology: dict[str, int]
    """Sizes of ``tp``, ``pp``, ``dp``, ``cp``."""
    logits: LogitsSemantics
    reported: ReportedSemantics
    kernel: dict[str, str]
    """``spec`` and ``backend`` of the kernel that computed the states."""
    software: dict[str, str]
    environment: dict[str, str]
    git: str
    """Commit of the launching working directory, ``+dirty`` where it had changes."""
    command: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def software_versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages whose code makes the numbers."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for package in (*PACKAGES, *more):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def numeric_environment() -> dict[str, str]:
    """Environment variables that may change numbers."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and not name.endswith(ENVIRONMENT_EXCLUDED)
    }


def git_state() -> str:
    """Commit of the checkout around the working directory."""
    try:
        commit, status = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return NOT_OBSERVED
    return commit + ("+dirty" if status else "")


def launch_command() -> list[str]:
    """The command line that the user typed, also in a worker that an engine or torchrun spawned.

    The first process of ours leaves it in the environment, where its children find it. Of the
    interpreter only the name is kept: where it is installed changes nothing.
    """
    typed = _torchrun_command() or sys.orig_argv
    ours = [Path(typed[0]).name, *typed[1:]]
    return list(json.loads(os.environ.setdefault(COMMAND_VARIABLE, json.dumps(ours))))


def _torchrun_command() -> list[str]:
    """What started the ranks of this process; empty where that was not torchrun, or is hidden."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    try:
        content = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return content.decode("utf-8", "backslashreplace").split("\0")[:-1]
