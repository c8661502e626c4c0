"""Checks of single fields: integers that are no bools, and enums that take their strings."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar, cast

from rlk_align.errors import UnusableInput

E = TypeVar("E", bound=StrEnum)


def checked_integer(name: str, value: object, *, low: int | None = None) -> int:
    """The integer, or an `UnusableInput` that names the field."""
    # True is an int in Python, and would be taken for 1
    if type(value) is not int:
        raise UnusableInput(f"{name} should be an integer, got {value!r}")
    if low is not None and value < low:
        raise UnusableInput(f"{name} should be {low} or more, got {value}")
    return value


def checked_member(name: str, enum: type[E], value: object) -> E:
    """The enum's member for a member or its string, or an `UnusableInput` that lists them all."""
    try:
        return enum(cast(str, value))
    except ValueError:
        raise UnusableInput(f"{name} should be one of {', '.join(enum)}, got {value!r}") from None


def checked_members(name: str, enum: type[E], values: object) -> frozenset[E]:
    """The members for a collection of members or strings; never empty."""
    if isinstance(values, str) or not isinstance(values, (tuple, list, set, frozenset)):
        raise UnusableInput(f"{name} should be several of {', '.join(enum)}, got {values!r}")
    if not values:
        raise UnusableInput(f"{name} should hold at least one of {', '.join(enum)}, got none")
    return frozenset(checked_member(name, enum, value) for value in values)


def require_fixed(name: str, value: object, allowed: object) -> None:
    """Refuse anything but the one value that this version can keep."""
    if type(value) is not type(allowed) or value != allowed:
        raise UnusableInput(f"{name} can only be {allowed!r}, got {value!r}; leave it out")
