"""The ``rlk-align`` command: reads captures, imports no engine."""

from __future__ import annotations

import io
import math
import os
import sys
import traceback
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import click

from rlk_align.errors import UnusableInput
from rlk_align.matrix.command import matrix

COMPARE_EPILOG = """
\b
Example: rlk-align compare captures/rollout captures/trainer --limit 0.02
Exit: 0 aligned, 1 drifted, 2 unusable input, 3 inconclusive (not all was observed),
70 a fault of rlk-align itself.
--json prints one object a line: {"kind": "summary", ...}, four {"kind": "term", ...}
and the worst tokens, {"kind": "token", ...}, with the fields of report.json.
"""
FAULT_OF_OURS = 70
HELP = {"help_option_names": ["-h", "--help"]}
DIRECTORY = click.Path(path_type=Path)


def _check_parquet(context: click.Context, parameter: click.Parameter, no_parquet: bool) -> bool:
    """Without pyarrow, say so before the work is done."""
    if not no_parquet:
        from rlk_align.report.parquet import check_parquet

        check_parquet()
    return no_parquet


def _check_nats(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    # nan is above no limit and would call anything aligned
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} is not a number of nats, 0 or more")
    return value


REPORT_OPTIONS = (
    click.option("--limit", type=float, callback=_check_nats, metavar="NATS",
                 help="Largest mean |d| that is aligned [0.02]."),
    click.option("--limit-max", type=float, callback=_check_nats, metavar="NATS",
                 help="Largest |d| of one token that is aligned [1, or --limit if larger]."),
    click.option("--out", type=DIRECTORY, default=Path("rlk-report"), metavar="DIR",
                 help="For report.json and tokens.parquet [rlk-report]."),
    click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout, not tables."),
    click.option("--worst", type=click.IntRange(0), default=10, metavar="N",
                 help="How many of the worst tokens to show [10]."),
    click.option("--no-parquet", is_flag=True, callback=_check_parquet,
                 help="Do not write tokens.parquet."),
)  # fmt: skip


def report_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that compares."""
    return reduce(lambda decorated, option: option(decorated), reversed(REPORT_OPTIONS), function)


@click.group(context_settings=HELP, epilog="Example: rlk-align compare rollout trainer")
@click.version_option(package_name="rlk-align")
def command() -> None:
    """Do a rollout engine and a trainer agree, token by token, and if not, why?"""


@command.command(epilog=COMPARE_EPILOG)
@click.argument("rollout", type=DIRECTORY)
@click.argument("trainer", type=DIRECTORY)
@report_options
@click.option("--allow-different-weights", is_flag=True, help="Compare other weights, too.")
@click.option("--no-audit", is_flag=True, help="Do not recompute states from the logits.")
@click.pass_context
def compare(
    context: click.Context,
    rollout: Path,
    trainer: Path,
    limit: float | None,
    limit_max: float | None,
    out: Path,
    as_json: bool,
    worst: int,
    allow_different_weights: bool,
    no_audit: bool,
    no_parquet: bool,
) -> None:
    """How far apart two captures are, token by token, and why.

    ROLLOUT and TRAINER are sealed captures of the same tokens. d = trainer - rollout, in nats,
    per token. Two captures of one role may be compared, too: then d = second - first.
    """
    from rlk_align.compare.comparison import compare_captures
    from rlk_align.compare.verdict import limits_of
    from rlk_align.progress import bars
    from rlk_align.report.publish import publish

    comparison = compare_captures(
        rollout,
        trainer,
        limits=limits_of(limit, limit_max),
        num_worst=worst,
        allow_different_weights=allow_different_weights,
        audit=not no_audit,
        track=bars,
    )
    publish(comparison, out, as_json=as_json, parquet=not no_parquet)
    context.exit(int(comparison.verdict.outcome))


@command.command(epilog="Example: rlk-align inspect captures/rollout")
@click.argument("capture", type=DIRECTORY)
def inspect(capture: Path) -> None:
    """What a capture holds, and what is missing from it."""
    from rlk_align.progress import bars
    from rlk_align.report.inspection import print_inspection
    from rlk_align.report.tables import console_for

    print_inspection(capture, console_for(sys.stdout), track=bars)


@command.command(epilog="Example: rlk-align seal captures/rollout")
@click.argument("capture", type=DIRECTORY)
def seal(capture: Path) -> None:
    """Turn what the workers wrote into one capture."""
    from rlk_align.capture import seal_capture
    from rlk_align.progress import bars

    click.echo(f"sealed: {seal_capture(capture, progress=bars('sealing'))}")


command.add_command(matrix)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run(command, argv, "rlk-align")


def run(entry: click.Command, argv: list[str] | None, name: str) -> int:
    """Run a click command of ours: one sentence on stderr for what its user can mend.

    Any other exception is a fault of ours: its traceback, and status 70, which is no verdict.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # tokens may hold any letter, a terminal may not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = entry.main(args=argv, prog_name=name, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _complain(name, "interrupted", 130)
    except click.ClickException as error:
        return _complain(name, error.format_message(), 2)
    except BrokenPipeError:
        # whoever read our output has enough; the interpreter must not flush into the pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UnusableInput, OSError) as error:
        return _complain(name, str(error), 2)
    except Exception:
        traceback.print_exc()
        return FAULT_OF_OURS


def _complain(name: str, sentence: str, status: int) -> int:
    # one line, whatever an engine put into a label
    print(f"{name}: {' '.join(sentence.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
