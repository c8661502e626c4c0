"""JSON values held against the types that they should have."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlk_align.errors import UnusableInput

T = TypeVar("T")
# how a union is made decides which of the two it is
UNIONS = (Union, UnionType)
WORDS = {str: "a text", int: "an integer", bool: "true or false"}


def from_json(kind: type[T], value: object, name: str) -> T:
    """The dataclass ``kind`` from a JSON object with exactly its fields, dataclasses in it too.

    Raises:
        UnusableInput: Naming the field that is missing, unknown or of another type.
    """
    if not isinstance(value, dict):
        raise UnusableInput(f"{name} should be an object, got {value!r}")
    hints = get_type_hints(kind)
    if absent := sorted(hints.keys() - value.keys()):
        raise UnusableInput(
            f"{name} is incomplete (no {absent[0]!r}); it must hold {', '.join(hints)}"
        )
    if unknown := sorted(value.keys() - hints.keys()):
        raise UnusableInput(
            f"{name} has an unknown field {unknown[0]!r}; it must hold {', '.join(hints)}"
        )
    return kind(
        **{
            field: from_json(hint, value[field], f"{name}.{field}")
            if is_dataclass(hint) and isinstance(hint, type)
            else checked(value[field], hint, f"{name}.{field}")
            for field, hint in hints.items()
        }
    )


def checked(value: Any, hint: Any, name: str) -> Any:
    """``value``, if it is of the type that ``hint`` says, and everything in it is, too.

    Raises:
        UnusableInput: If it is not.
    """
    if not _fits(value, hint):
        raise UnusableInput(f"{name} should be {_words(hint)}, got {value!r}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in UNIONS:
        return any(_fits(value, option) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    # the type itself: true is no integer
    return hint is Any or type(value) is hint


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in UNIONS:
        return " or ".join(map(_words, inner))
    if origin is list:
        return f"a list, each entry {_words(inner[0])}"
    if origin is dict:
        return "an object" if inner[1] is Any else f"an object, each value {_words(inner[1])}"
    return WORDS[hint]
