"""The prompts of a rollout: a file of lines in, token ids out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_align.errors import UnusableInput

KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line of the file: exactly one of text, chat messages or token ids."""

    place: str
    """Such as ``prompts.jsonl, line 3``, for messages."""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None


def read_prompts(path: Path) -> list[PromptLine]:
    """The lines of a file: JSON objects where its name ends in ``.jsonl``, else plain text.

    Empty lines are skipped.

    Raises:
        UnusableInput: If the file is absent or holds no prompt, or naming the bad line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnusableInput(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableInput(f"{path}: cannot be read as UTF-8 text ({error})") from None
    lines = [
        _parse(line, f"{path.name}, line {number}", is_json=path.suffix == ".jsonl")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not lines:
        raise UnusableInput(f"{path}: no prompt in it; write one a line")
    return lines


def _parse(line: str, place: str, *, is_json: bool) -> PromptLine:
    if not is_json:
        return PromptLine(place=place, prompt=line)
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UnusableInput(f"{place}: not valid JSON ({error})") from None
    given = [kind for kind in KINDS if isinstance(value, dict) and kind in value]
    if len(given) != 1:
        raise UnusableInput(
            f"{place}: exactly one of {', '.join(KINDS)} is expected, found {given or 'none'}"
        )
    content = value[given[0]]
    if given[0] == "prompt" and not isinstance(content, str):
        raise UnusableInput(f"{place}: prompt must be a string")
    if given[0] == "messages" and not _is_list_of(content, dict):
        raise UnusableInput(f"{place}: messages must be a list of objects")
    if given[0] == "prompt_token_ids" and not _is_list_of(content, int):
        raise UnusableInput(f"{place}: prompt_token_ids must be a list of whole numbers")
    return PromptLine(place=place, **{given[0]: content})


def _is_list_of(content: Any, kind: type) -> bool:
    # a bool is an int to Python, but no token id
    return isinstance(content, list) and all(type(item) is kind for item in content)


def encode_prompts(lines: Sequence[PromptLine], model: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt; text and messages go through the model's own tokenizer.

    Raises:
        UnusableInput: If a prompt is empty or has ids outside ``[0, vocab_size)``, or the model
            has no tokenizer or no chat template where one is needed.
    """
    needs_tokenizer = [line for line in lines if line.prompt_token_ids is None]
    tokenizer: Any = None
    if needs_tokenizer:
        tokenizer = _load_tokenizer(model, needs_tokenizer[0].place)
    encoded = []
    for line in lines:
        ids = line.prompt_token_ids
        if line.prompt is not None:
            ids = list(tokenizer(line.prompt)["input_ids"])
        elif line.messages is not None:
            ids = _apply_template(tokenizer, line, model)
        assert ids is not None
        if not ids:
            raise UnusableInput(f"{line.place}: the prompt has no tokens")
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise UnusableInput(
                    f"{line.place}: token id {token_id} is outside the vocabulary [0, {vocab_size})"
                )
        encoded.append(ids)
    return encoded


def _load_tokenizer(model: Path, place: str) -> Any:
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UnusableInput(
            f"{place}: the prompt is text, but {model} has no tokenizer; give prompt_token_ids"
        )
    from transformers import AutoTokenizer  # vLLM depends on it

    return AutoTokenizer.from_pretrained(model)


def _apply_template(tokenizer: Any, line: PromptLine, model: Path) -> list[int]:
    if tokenizer.chat_template is None:
        raise UnusableInput(f"{line.place}: {model} has no chat template; give prompt instead")
    try:
        text = tokenizer.apply_chat_template(
            line.messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        raise UnusableInput(f"{line.place}: the chat template refuses it ({error})") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
