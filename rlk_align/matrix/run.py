"""Cases on one grid: every rank computes, rank 0 judges and writes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rlk_align.dispatch import Registry
from rlk_align.dispatch.registry import DEFAULT_REGISTRY
from rlk_align.errors import UnusableInput
from rlk_align.matrix.artifact import artifact_of, artifact_path, write_artifact
from rlk_align.matrix.case import MatrixCase
from rlk_align.matrix.evaluation import evaluate
from rlk_align.matrix.grid import Grid, open_grid
from rlk_align.matrix.worker import run_rank

DEFAULT_TIMEOUT_S = 300.0


def run_cases(
    cases: Sequence[MatrixCase],
    directory: Path,
    *,
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S),
    registry: Registry = DEFAULT_REGISTRY,
) -> tuple[list[Path], bool]:
    """Run the cases of one topology on the ranks of this launch; rank 0 writes an artifact of each.

    Collective. A case that fails does not stop the next one, and its artifact is written, too.

    Args:
        cases: All of one TP, CP and platform; the same on every rank.
        directory: Where artifacts go.
        timeout: The longest that a rank waits for another.
        registry: Where backends are looked up.

    Returns:
        The paths of the artifacts, and whether this process is global rank 0, which wrote them.

    Raises:
        UnusableInput: If the cases are of several topologies, or the launch has other ranks.
    """
    if len({(case.tp, case.cp, case.platform) for case in cases}) != 1:
        raise UnusableInput("one launch runs one topology; give cases of one TP, CP and platform")
    first = cases[0]
    with open_grid(first.tp, first.cp, platform=first.platform, timeout=timeout) as grid:
        paths = [_run_case(case, grid, directory, registry) for case in cases]
        return paths, grid.rank == 0


def _run_case(case: MatrixCase, grid: Grid, directory: Path, registry: Registry) -> Path:
    records = grid.gather(run_rank(case, grid, registry=registry))
    path = artifact_path(directory, case)
    if grid.rank == 0:
        write_artifact(path, artifact_of(case, grid, records, evaluate(case, records)))
    return path
