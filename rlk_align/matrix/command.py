"""``rlk-align matrix``: plan it, run it, run one launch of it, judge it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlk_align.matrix.options import (
    DIRECTORY,
    LAYOUTS,
    SIZE,
    case_options,
    checked_layouts,
    known_backends,
    parsed_table,
)

if TYPE_CHECKING:
    from rlk_align.matrix.case import MatrixCase

EPILOG = """
\b
Example: rlk-align matrix --run --tp 1 --tp 2 --cp 1
Exit: 0 passed, 1 failed, 2 unusable input, 3 inconclusive (a case did not run).
"""


@click.group(invoke_without_command=True, epilog=EPILOG)
@click.option("--plan", "is_plan", is_flag=True, help="Print and write the commands; run nothing.")
@click.option("--run", "is_run", is_flag=True, help="Run those that fit this machine.")
@click.option("--tp", "tps", type=SIZE, multiple=True, default=(1, 2, 4), metavar="N",
              help="TP sizes [1 2 4].")  # fmt: skip
@click.option("--cp", "cps", type=SIZE, multiple=True, default=(1, 2), metavar="N",
              help="CP sizes [1 2].")  # fmt: skip
@click.option("--layout", "layouts", multiple=True, default=LAYOUTS, metavar="NAME",
              help="even, uneven, megatron, vllm [all].")  # fmt: skip
@click.option("--backend", default="expsum-cpu", metavar="ID", help="Exact id [expsum-cpu].")
@click.option("--max-processes", type=SIZE, metavar="N", help="At a time [8, or the GPUs].")
@case_options
@click.pass_context
def matrix(
    context: click.Context,
    /,
    is_plan: bool,
    is_run: bool,
    tps: tuple[int, ...],
    cps: tuple[int, ...],
    layouts: tuple[str, ...],
    backend: str,
    max_processes: int | None,
    timeout: float,
    out: Path,
    modules: tuple[str, ...],
    **fields: Any,
) -> None:
    """The same seeded rows on every TP x CP topology and vocabulary layout: the same bits?"""
    if context.invoked_subcommand is not None:
        return
    if is_plan == is_run:
        raise click.UsageError("pass --plan, --run or a command: case, backends, verdict")
    from rlk_align.matrix.launcher import run_launches
    from rlk_align.matrix.plan import plan_script, planned_artifacts, planned_launches, write_plan
    from rlk_align.progress import bars

    known_backends([backend], modules)
    launches = planned_launches(
        _cases(fields, backend, layouts),
        tps=tps,
        cps=cps,
        directory=out,
        timeout_s=timeout,
        modules=modules,
    )
    write_plan(launches, out)
    if is_plan:
        click.echo(plan_script(launches, out), nl=False)
        return
    for problem in run_launches(launches, max_processes=max_processes, track=bars):
        click.echo(f"{problem.name}: {problem.reason}", err=True)
    _print_and_exit(context, planned_artifacts(out))


@matrix.command(epilog="Example: torchrun --nproc-per-node 4 -m rlk_align.cli matrix case --tp 2 "
                "--cp 2 --backend expsum-cpu")  # fmt: skip
@click.option("--tp", type=SIZE, default=1, metavar="N", help="[1]")
@click.option("--cp", type=SIZE, default=1, metavar="N", help="[1]")
@click.option("--layout", "layouts", multiple=True, metavar="NAME",
              help="even, uneven, megatron, vllm; one case of each [even].")  # fmt: skip
@click.option("--table", metavar="BOUNDS", help="Explicit layout: START:END,START:END,...")
@click.option("--backend", required=True, metavar="ID", help="Exact id.")
@case_options
@click.pass_context
def case(
    context: click.Context,
    /,
    tp: int,
    cp: int,
    layouts: tuple[str, ...],
    table: str | None,
    backend: str,
    timeout: float,
    out: Path,
    modules: tuple[str, ...],
    **fields: Any,
) -> None:
    """One topology, under torchrun; rank 0 writes the artifacts and exits 1 if a check fails."""
    from rlk_align.matrix.run import run_cases

    if table is not None and layouts:
        raise click.UsageError("pass --layout or --table, not both")
    known_backends([backend], modules)
    fields.update(tp=tp, cp=cp)
    if table is None:
        cases = _cases(fields, backend, layouts or LAYOUTS[:1])
    else:
        cases = _cases({**fields, "table": parsed_table(table)}, backend, ["explicit"])
    paths, is_first = run_cases(cases, out, timeout=timedelta(seconds=timeout))
    if is_first:
        _print_and_exit(context, paths)


@matrix.command(epilog="Example: rlk-align matrix backends expsum-reference expsum-cpu")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@case_options
@click.pass_context
def backends(
    context: click.Context,
    /,
    names: tuple[str, ...],
    timeout: float,
    out: Path,
    modules: tuple[str, ...],
    **fields: Any,
) -> None:
    """Named backends on the same rows in one process: the same bits?"""
    from rlk_align.matrix.run import run_cases

    if len(set(names)) < max(2, len(names)):
        raise click.UsageError("pass two ids or more, all different: one has nothing to agree with")
    known_backends(names, modules)
    cases = [case for name in names for case in _cases(fields, name, LAYOUTS[:1])]
    paths, _ = run_cases(cases, out, timeout=timedelta(seconds=timeout))
    _print_and_exit(context, paths)


@matrix.command(epilog="Example: rlk-align matrix verdict rlk-matrix")
@click.argument("directory", type=DIRECTORY)
@click.pass_context
def verdict(context: click.Context, /, directory: Path) -> None:
    """Judge the artifacts that a plan has left in a directory."""
    from rlk_align.matrix.plan import planned_artifacts

    _print_and_exit(context, planned_artifacts(directory))


def _cases(fields: dict[str, Any], backend: str, layouts: Sequence[str]) -> list[MatrixCase]:
    """A case in each layout."""
    from rlk_align.matrix.case import MatrixCase
    from rlk_align.matrix.layouts import LayoutName

    names = layouts if "table" in fields else checked_layouts(layouts)
    return [MatrixCase(backend=backend, layout=LayoutName(name), **fields) for name in names]


def _print_and_exit(context: click.Context, paths: list[Path]) -> None:
    from rlk_align.matrix.table import print_verdict
    from rlk_align.matrix.verdict import judge
    from rlk_align.report.tables import console_for

    judged = judge(paths)
    print_verdict(judged, console_for(sys.stdout))
    context.exit(int(judged.outcome))
