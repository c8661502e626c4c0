"""Runs a plan's launches on this machine, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_align.dispatch import Platform
from rlk_align.matrix.plan import Launch
from rlk_align.progress import Track
from rlk_align.provenance import COMMAND_VARIABLE

MAX_CPU_PROCESSES = 8
COMPLAINT = "rlk-align: "
LINES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProblem:
    """A launch that left no artifact, or was not started."""

    name: str
    reason: str


def run_launches(
    launches: Sequence[Launch], *, max_processes: int | None, track: Track
) -> list[LaunchProblem]:
    """Run those that fit this machine; what they find is in their artifacts.

    Args:
        launches: What to run.
        max_processes: Processes at a time; None is 8 on a CPU, and the number of GPUs otherwise.
        track: Shows how far it has come.
    """
    problems = []
    for launch in track("running the matrix")(launches):
        # what an earlier run has left must not pass for what this one finds
        for path in launch.artifacts:
            path.unlink(missing_ok=True)
        problem = _misfit(launch, max_processes) or _run(launch)
        if problem is not None:
            problems.append(LaunchProblem(name=launch.name, reason=problem))
    return problems


def _misfit(launch: Launch, max_processes: int | None) -> str | None:
    """Why a launch does not fit this machine, or None."""
    on_cpu = launch.cases[0].platform == Platform.CPU
    limit = max_processes
    if limit is None:
        limit = MAX_CPU_PROCESSES if on_cpu else torch.cuda.device_count()
    if launch.num_ranks <= limit:
        return None
    return f"not run: it needs {launch.num_ranks} processes, at most {limit} fit this machine"


def _run(launch: Launch) -> str | None:
    """Run it; why it left less than all artifacts, or None."""
    # torchrun of this very interpreter, wherever its scripts are installed
    command = [sys.executable, "-m", "torch.distributed.run", *launch.command[1:]]
    environment = {**os.environ, COMMAND_VARIABLE: json.dumps(launch.command)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if all(path.exists() for path in launch.artifacts):
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    complaints = [line for line in lines if line.startswith(COMPLAINT)]
    told = complaints[:1] or lines[-LINES_SHOWN:]
    return f"ended with status {done.returncode} and wrote no artifact: {' | '.join(told)}"
