"""Arithmetic that the compiler leaves alone: it may fuse a multiply with an add and move a bit."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run as it stands where ``torch.compile`` meets it: its graph breaks there."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # here and not as the decorator: it imports the whole compiler, one second
            undisturbed: Callable[P, R] = torch.compiler.disable(function)
            return undisturbed(*args, **kwargs)
        return function(*args, **kwargs)

    return run
