"""The exact commands of a whole matrix, one launch for each topology."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json, read_json, write_atomically
from rlk_align.matrix.artifact import artifact_path
from rlk_align.matrix.case import MatrixCase

PLAN_FILE = "plan.json"
SCRIPT_FILE = "plan.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One topology: one torchrun, one process group, all layouts."""

    cases: tuple[MatrixCase, ...]
    directory: Path
    timeout_s: float
    modules: tuple[str, ...] = ()
    """Imported first, for the backends that they register."""

    @property
    def num_ranks(self) -> int:
        """Processes that it needs."""
        return self.cases[0].num_ranks

    @property
    def name(self) -> str:
        """For a person."""
        return f"TP {self.cases[0].tp} x CP {self.cases[0].cp}"

    @property
    def artifacts(self) -> list[Path]:
        """What it writes."""
        return [artifact_path(self.directory, case) for case in self.cases]

    @property
    def command(self) -> list[str]:
        """The command line, whole: nothing is left to a default that could change."""
        case = self.cases[0]
        options: dict[str, object] = {
            "--tp": case.tp,
            "--cp": case.cp,
            "--backend": case.backend,
            "--platform": case.platform,
            "--dtype": case.dtype,
            "--vocab-size": case.vocab_size,
            "--batch": case.batch,
            "--sequence": case.sequence,
            "--prompt-tokens": case.prompt_tokens,
            "--seed": case.seed,
            "--timeout": f"{self.timeout_s:g}",
            "--out": self.directory,
        }
        if case.padded_size is not None:
            options["--padded-size"] = case.padded_size
        words = [str(word) for option in options.items() for word in option]
        layouts = [word for one in self.cases for word in ("--layout", str(one.layout))]
        modules = [word for module in self.modules for word in ("--import", module)]
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(self.num_ranks)]
        return [*torchrun, "-m", "rlk_align.cli", "matrix", "case", *words, *layouts, *modules]


def planned_launches(
    cases: Sequence[MatrixCase],
    *,
    tps: Sequence[int],
    cps: Sequence[int],
    directory: Path,
    timeout_s: float,
    modules: Sequence[str] = (),
) -> list[Launch]:
    """A launch of all cases for each TP and CP.

    Raises:
        UnusableInput: If a layout cannot be cut so, before anything runs.
    """
    return [
        Launch(
            cases=tuple(replace(case, tp=tp, cp=cp) for case in cases),
            directory=directory,
            timeout_s=timeout_s,
            modules=tuple(modules),
        )
        for tp, cp in product(tps, cps)
    ]


def write_plan(launches: Sequence[Launch], directory: Path) -> None:
    """``plan.sh`` to run it all, and ``plan.json`` that says which artifacts it must leave."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "launches": [
            {
                "name": launch.name,
                "command": launch.command,
                "artifacts": [path.name for path in launch.artifacts],
            }
            for launch in launches
        ]
    }
    write_atomically(directory / PLAN_FILE, canonical_json(content, indent=1))
    write_atomically(directory / SCRIPT_FILE, plan_script(launches, directory).encode())


def plan_script(launches: Sequence[Launch], directory: Path) -> str:
    """A shell script: each launch after the one before, failed or not, and the verdict."""
    lines = ["#!/bin/sh", "# a launch that fails leaves its artifact; the verdict comes last"]
    for launch in launches:
        lines.append(shlex.join(["rm", "-f", *map(str, launch.artifacts)]))
        command = json.dumps(launch.command)
        lines.append(
            f"RLK_LAUNCH_COMMAND={shlex.quote(command)} \\\n  {shlex.join(launch.command)}"
        )
    lines.append(shlex.join(["rlk-align", "matrix", "verdict", str(directory)]))
    return "\n".join(lines) + "\n"


def planned_artifacts(directory: Path) -> list[Path]:
    """What has to lie in a directory: by its plan, or what lies there if it has none.

    Raises:
        UnusableInput: If there is neither.
    """
    if not (directory / PLAN_FILE).exists():
        found = sorted(directory.glob("*.json"))
        if not found:
            raise UnusableInput(f"{directory}: neither {PLAN_FILE} nor an artifact; run a case")
        return found
    launches = read_json(directory / PLAN_FILE).get("launches")
    try:
        return [directory / name for launch in launches for name in launch["artifacts"]]  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise UnusableInput(
            f"{directory / PLAN_FILE}: not a plan ({error}); write it again"
        ) from None
