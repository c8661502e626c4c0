"""Printable text of token ids, from a model's ``tokenizer.json`` alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlk_align.errors import UnusableInput
from rlk_align.files import read_json

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Text of single tokens; whatever does not print is shown escaped, like ``\\n`` or ``\\xe4``.

    Example:
        Qwen3's id 98 is the lone byte E4: ``TokenTexts(path)([98])`` gives ``{98: "\\\\xe4"}``.

    Raises:
        UnusableInput: If the file is not a ``tokenizer.json``.
    """

    def __init__(self, tokenizer_json: Path) -> None:
        tokenizer: dict[str, Any] = read_json(tokenizer_json)
        try:
            vocabulary = tokenizer["model"]["vocab"]
            self._added = {int(t["id"]): str(t["content"]) for t in tokenizer["added_tokens"]}
            # unigram models list (piece, score) pairs; the others map pieces to ids
            pairs = (
                ((piece, i) for i, (piece, _) in enumerate(vocabulary))
                if isinstance(vocabulary, list)
                else vocabulary.items()
            )
            self._pieces = {int(i): str(piece) for piece, i in pairs}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnusableInput(f"{tokenizer_json}: not a tokenizer.json ({error!r})") from None
        self._bytes = _byte_alphabet() if _names_type(tokenizer, "ByteLevel") else None

    def __call__(self, token_ids: Iterable[int]) -> Mapping[int, str]:
        """The printable text of each id; ``<id 151900>`` for one that has none."""
        return {token_id: self._text(token_id) for token_id in token_ids}

    def _text(self, token_id: int) -> str:
        if token_id in self._added:
            return printable(self._added[token_id].encode())
        piece = self._pieces.get(token_id)
        if piece is None:
            return f"<id {token_id}>"
        if self._bytes is not None and all(letter in self._bytes for letter in piece):
            return printable(bytes(self._bytes[letter] for letter in piece))
        if byte := BYTE_PIECE.fullmatch(piece):
            return printable(bytes.fromhex(byte[1]))
        # sentencepiece writes a space as U+2581
        return printable(piece.replace("\u2581", " ").encode())


def texts_of_model(model: Path) -> TokenTexts | None:
    """The texts of a checkpoint's tokens; None where it has no ``tokenizer.json``.

    Raises:
        UnusableInput: If the file is not a ``tokenizer.json``.
    """
    path = model / "tokenizer.json"
    return TokenTexts(path) if path.is_file() else None


def printable(content: bytes) -> str:
    """The text of UTF-8 bytes on one line; what is no text or does not print is escaped."""
    text = content.decode("utf-8", "backslashreplace")
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level BPE writes for the 256 bytes, as GPT-2 chose them."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {chr(byte): byte for byte in own}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _names_type(part: Any, name: str) -> bool:
    """Whether the tokenizer's decoder or pre-tokenizer is, or contains, a part of this type."""
    if isinstance(part, list):
        return any(_names_type(item, name) for item in part)
    if not isinstance(part, dict):
        return False
    if part.get("type") == name:
        return True
    inner = ("decoder", "decoders", "pre_tokenizer", "pretokenizers")
    return any(_names_type(part[key], name) for key in inner if key in part)
