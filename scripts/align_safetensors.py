"""Compare two plain safetensors files, for people who saved their own logits."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rlk_align.cli import HELP, report_options, run

EPILOG = """
\b
Example: python scripts/align_safetensors.py rollout.safetensors trainer.safetensors
Exit: 0 aligned, 1 drifted, 2 unusable input, 3 inconclusive (not all was observed).
"""


@click.command(context_settings=HELP, epilog=EPILOG)
@click.argument("rollout", type=click.Path(path_type=Path))
@click.argument("trainer", type=click.Path(path_type=Path))
@report_options
@click.pass_context
def command(
    context: click.Context,
    rollout: Path,
    trainer: Path,
    limit: float | None,
    limit_max: float | None,
    out: Path,
    as_json: bool,
    worst: int,
    no_parquet: bool,
) -> None:
    """How far apart the logits of two files are, token by token.

    Each file holds `logits` [T, V] or [B, S, V] in float32, bfloat16 or float16, `token_ids` [T]
    or [B, S], and maybe `logprobs` float32 like the ids. Logits at a place predicted the token id
    at that place. d is the difference of the logprobs where both files hold them, else that of
    the kernel's logprobs.
    """
    from rlk_align.compare.compare_files import compare_files
    from rlk_align.compare.verdict import limits_of
    from rlk_align.progress import bars
    from rlk_align.report.publish import publish

    comparison = compare_files(
        rollout, trainer, limits=limits_of(limit, limit_max), num_worst=worst, track=bars
    )
    publish(comparison, out, as_json=as_json, parquet=not no_parquet)
    context.exit(int(comparison.verdict.outcome))


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run(command, argv, "align_safetensors")


if __name__ == "__main__":
    sys.exit(main())
