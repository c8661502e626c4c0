"""Text of single tokens: readable, on one line, and honest about bytes that are no text."""

import json

import pytest

from rlk_adapters.token_text import TokenTexts, printable
from rlk_align.errors import UnusableInput


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b" the", " the"),
        ("\u4eba\u5de5".encode(), "\u4eba\u5de5"),
        (b"\xe4\xb8", "\\xe4\\xb8"),
        (b"\n\n\t", "\\n\\n\\t"),
        ("e\u200bf".encode(), "e\\u200bf"),
    ],
)
def test_printable(content, text):
    assert printable(content) == text


def test_qwen3_tokens(tiny_model_dir):
    texts = TokenTexts(tiny_model_dir / "tokenizer.json")
    words = texts([785, 279, 198, 151645, 151667, 151700])
    assert list(words.values()) == [
        "The", " the", "\\n", "<|im_end|>", "<think>", "<id 151700>",
    ]  # fmt: skip


def test_every_qwen3_token_is_one_printable_line(tiny_model_dir):
    texts = TokenTexts(tiny_model_dir / "tokenizer.json")(range(151669))
    assert all(text.isprintable() and text for text in texts.values())
    # all single bytes are tokens of their own; 128 of them are ASCII
    lone = [text for text in texts.values() if len(text) == 4 and text.startswith("\\x")]
    assert len(lone) >= 128


def write_tokenizer(path, **changed):
    content = {"model": {"vocab": {}}, "added_tokens": [], "decoder": None, **changed}
    path.write_text(json.dumps(content))
    return path


def test_sentencepiece_pieces(tmp_path):
    vocab = [["<unk>", 0.0], ["\u2581the", -1.0], ["<0x0A>", -2.0], ["<0xE4>", -2.0]]
    path = write_tokenizer(tmp_path / "tokenizer.json", model={"vocab": vocab})
    assert list(TokenTexts(path)([0, 1, 2, 3]).values()) == ["<unk>", " the", "\\n", "\\xe4"]


@pytest.mark.parametrize("changed", [{"model": {}}, {"model": {"vocab": 3}}, {"added_tokens": [1]}])
def test_a_file_that_is_no_tokenizer(tmp_path, changed):
    path = write_tokenizer(tmp_path / "tokenizer.json", **changed)
    with pytest.raises(UnusableInput, match="not a tokenizer"):
        TokenTexts(path)
