"""rlk-rollout without an engine: what a person may get wrong ends in one sentence and exit 2."""

import json
import os

import pytest

from rlk_adapters.rollout import command, main
from rlk_adapters.rollout_engine import one_sentence
from rlk_adapters.rollout_prompts import encode_prompts, read_prompts
from rlk_align.errors import UnusableInput

VOCAB = 151936


@pytest.fixture
def model(tmp_path):
    """A directory that passes for a model until an engine is started."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return directory


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}\n')
    return path


@pytest.fixture
def run(model, prompts, tmp_path, capfd, monkeypatch):
    """Runs the command with some arguments replaced; (status, stdout, stderr)."""
    # the command prepares its process for vLLM; this one goes on to other tests
    monkeypatch.setattr(os, "environ", os.environ.copy())
    arguments = {"--model": model, "--prompts": prompts, "--out": tmp_path / "out"}

    def call(**changed):
        given = {**arguments, **{f"--{name.replace('_', '-')}": v for name, v in changed.items()}}
        argv = [str(word) for pair in given.items() for word in pair if word is not None]
        status = main(argv)
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": "nowhere"}, "nowhere: no such directory"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"tp": "0"}, "'--tp': 0 is not in the range"),
        ({"level": "hidden"}, "'--level': 'hidden' is not one of"),
        ({"temperature": "-1"}, "'--temperature': -1.0 is not in the range"),
        ({"top_p": "2"}, "'--top-p': 2.0 is not in the range"),
        ({"temprature": "1"}, "No such option '--temprature'"),
    ],
)
def test_bad_arguments(run, changed, sentence):
    status, out, err = run(**changed)
    assert (status, out) == (2, "")
    assert err.startswith("rlk-rollout: ")
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"prompt_token_ids": [1]}\n{"prompt": ', "prompts.jsonl, line 2: not valid JSON"),
        ('\n\n{"text": "a"}', "line 3: exactly one of prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "messages": []}', "line 1: exactly one of"),
        ("[1, 2]", "line 1: exactly one of"),
        ('{"prompt": 3}', "line 1: prompt must be a string"),
        ('{"messages": ["a"]}', "line 1: messages must be a list of objects"),
        ('{"prompt_token_ids": [1, 2.5]}', "line 1: prompt_token_ids must be a list of whole"),
        ('{"prompt_token_ids": [true]}', "line 1: prompt_token_ids must be a list of whole"),
        ('{"prompt_token_ids": []}', "line 1: the prompt has no tokens"),
        (
            '{"prompt_token_ids": [151936]}',
            "line 1: token id 151936 is outside the vocabulary [0, 151936)",
        ),
        ('{"prompt_token_ids": [-1]}', "line 1: token id -1 is outside"),
        ('{"prompt": "a"}', "line 1: the prompt is text, but"),
        ("\n", "no prompt in it"),
    ],
)
def test_bad_prompts(run, prompts, lines, sentence):
    prompts.write_text(lines)
    status, out, err = run()
    assert (status, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_capture_is_never_written_over(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "capture.json").touch()
    status, _, err = run()
    assert status == 2
    assert "exists already" in err


def test_a_model_without_a_config(run, model):
    (model / "config.json").unlink()
    status, _, err = run()
    assert status == 2
    assert "config.json: no such file" in err


def test_help_fits_a_screen_and_holds_an_example(capfd):
    assert main(["-h"]) == 0
    text = capfd.readouterr().out
    assert len(text.splitlines()) <= 40
    assert "Example: rlk-rollout --model" in text
    assert all(option.help for option in command.params if option.name != "help")


def test_text_and_token_ids_give_the_same_prompt(tmp_path, tiny_model_dir):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "The capital of France is"}\n'
        '{"prompt_token_ids": [785, 6722, 315, 9625, 374]}\n'
    )
    plain = tmp_path / "prompts.txt"
    plain.write_text("The capital of France is\n\n")
    first, second = encode_prompts(read_prompts(path), tiny_model_dir, VOCAB)
    assert first == second == encode_prompts(read_prompts(plain), tiny_model_dir, VOCAB)[0]


def test_messages_need_a_chat_template(tmp_path, tiny_model_dir):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n')
    tokenizer_config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    assert "chat_template" not in tokenizer_config
    with pytest.raises(UnusableInput, match=r"line 1: .* has no chat template"):
        encode_prompts(read_prompts(path), tiny_model_dir, VOCAB)


def test_the_heart_of_a_pydantic_message_is_shown():
    error = ValueError(
        "1 validation error for VllmConfig\n  Value error, 4 heads cannot be cut into 3 "
        "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n    For more"
    )
    assert one_sentence(error) == "4 heads cannot be cut into 3"
    assert one_sentence(RuntimeError("two\n lines")) == "two lines"
