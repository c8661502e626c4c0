"""Progress bars on stderr, where a person watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Progress = Callable[[Iterable[Any]], Iterable[Any]]
Track = Callable[[str], Progress]
"""Gives what wraps an iteration under a title."""


def silent(title: str) -> Progress:
    """No bar."""
    return iter


def bars(title: str) -> Progress:
    """A bar on stderr that vanishes when done; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)

    def wrapped(items: Iterable[Any]) -> Iterable[Any]:
        return track(
            list(items), title, console=console, transient=True, disable=not console.is_terminal
        )

    return wrapped
