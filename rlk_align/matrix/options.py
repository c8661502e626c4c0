"""What the commands of the matrix take from the command line; light, so that help is quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

import click

from rlk_align.errors import UnusableInput

DIRECTORY = click.Path(path_type=Path)
LAYOUTS = ("even", "uneven", "megatron", "vllm")
SIZE = click.IntRange(min=1)
CASE_OPTIONS = (
    click.option("--dtype", default="bf16", metavar="DTYPE", help="bf16, fp16 or fp32 [bf16]."),
    click.option("--platform", default="cpu", metavar="NAME", help="cpu, cuda or rocm [cpu]."),
    click.option("--vocab-size", type=int, default=151936, metavar="N", help="[151936]"),
    click.option("--padded-size", type=int, metavar="N", help="[what the layout makes of it]"),
    click.option("--batch", type=int, default=2, metavar="N", help="Sequences [2]."),
    click.option("--sequence", type=int, default=16, metavar="N", help="Tokens of each [16]."),
    click.option("--prompt-tokens", type=int, default=8, metavar="N",
                 help="The first of each, which do not count [8]."),
    click.option("--seed", type=int, default=123, metavar="N", help="[123]"),
    click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=300.0,
                 metavar="S", help="Longest wait of a rank for another [300]."),
    click.option("--out", type=DIRECTORY, default=Path("rlk-matrix"), metavar="DIR",
                 help="For the artifacts [rlk-matrix]."),
    click.option("--import", "modules", multiple=True, metavar="MODULE",
                 help="Import first: a module that registers backends."),
)  # fmt: skip


def case_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that runs cases."""
    return reduce(lambda decorated, option: option(decorated), reversed(CASE_OPTIONS), function)


def known_backends(names: Sequence[str], modules: Sequence[str]) -> None:
    """Import the modules, then hold the ids against those registered.

    Raises:
        UnusableInput: If a module cannot be imported or nobody has registered an id.
    """
    from rlk_align.dispatch.registry import DEFAULT_REGISTRY

    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnusableInput(f"--import {module}: {error}; give an importable module") from None
    for name in names:
        if name not in DEFAULT_REGISTRY.entries:
            raise UnusableInput(
                f"no backend {name!r}; pass one of {', '.join(DEFAULT_REGISTRY.entries)}"
            )


def checked_layouts(names: Sequence[str]) -> Sequence[str]:
    """The names, or an `UnusableInput` that lists those there are."""
    for name in names:
        if name not in LAYOUTS:
            raise UnusableInput(f"layout should be one of {', '.join(LAYOUTS)}, got {name!r}")
    return names


def parsed_table(text: str) -> tuple[tuple[int, int], ...]:
    """START:END of each rank, with commas between."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(start), int(end)) for start, end in pairs)
    except ValueError:
        raise UnusableInput(f"a table is START:END,START:END,..., got {text!r}") from None
