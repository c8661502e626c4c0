"""The tiny Qwen3 is deterministic, loads offline, speaks peaked text; the tokenizer is Qwen3's."""

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

import rlk_fixtures
from rlk_fixtures import tokenizer as tokenizer_module
from rlk_fixtures.tiny_qwen3 import _weights, main, write_tiny_qwen3

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(rlk_fixtures.__path__[0]) / "prompts.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


@dataclass
class Sampled:
    token_ids: torch.Tensor
    """[B, S] sampled at temperature 1."""
    logprobs: torch.Tensor
    """[B, S, V] float32, the distributions that they were drawn from."""


@pytest.fixture(scope="module")
def sampled(tiny_model_dir: Path) -> Sampled:
    from transformers import AutoModelForCausalLM

    return sample(AutoModelForCausalLM.from_pretrained(tiny_model_dir))


def sample(model) -> Sampled:
    prompt = torch.tensor([[785, 6722, 315, 9625, 374]]).repeat(8, 1)
    torch.manual_seed(0)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0, top_k=0,
        top_p=1.0, max_new_tokens=25, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.stack(out.logits, dim=1).float()
    return Sampled(out.sequences[:, prompt.shape[1] :], logits.log_softmax(-1))


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("<think>", [151667]),
        ("</think>", [151668]),
        ("<|im_end|>", [151645]),
        ("<|endoftext|>", [151643]),
        ("Hello, world!", [9707, 11, 1879, 0]),
        # every digit is a token of its own
        (" 12", [220, 16, 17]),
        ("The capital of France is", [785, 6722, 315, 9625, 374]),
    ],
)
def test_known_strings_have_the_ids_of_qwen3(tokenizer, text, token_ids):
    assert tokenizer.encode(text).ids == token_ids


def test_the_vocabulary_is_complete(tokenizer):
    assert tokenizer.get_vocab_size() == 151669
    assert sorted(tokenizer.get_vocab().values()) == list(range(151669))


def test_the_ids_are_those_of_tiktoken_on_the_same_ranks(tokenizer):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = tokenizer_module._load_ranks(tokenizer_module._ranks_file())
    reference = tiktoken.Encoding(
        "qwen", pat_str=tokenizer_module.SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    for text in PROMPTS:
        plain = text.replace("<think>", "")
        assert tokenizer.encode(plain).ids == reference.encode(plain), plain


@pytest.mark.parametrize("text", [*PROMPTS, "e\u0301", "\U0001f469\u200d\U0001f680 \t\n x"])
def test_text_comes_back_in_nfc(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_another_ranks_file_is_refused(tmp_path):
    (tmp_path / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    with pytest.raises(ValueError, match=r"SHA-256 .* install dashscope"):
        tokenizer_module._load_ranks(tmp_path / "qwen.tiktoken")


def test_the_same_seed_gives_the_same_bytes_also_from_the_command_line(tiny_model_dir, tmp_path):
    result = CliRunner().invoke(main, ["--out", str(tmp_path), "--untied", "--seed", "0"])
    assert result.exit_code == 0, result.output
    for path in tiny_model_dir.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_seed_gives_other_weights():
    first, second = (_weights(tied=True, seed=seed) for seed in (0, 1))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert not torch.equal(first[name], second[name])


def test_transformers_reads_the_directory_as_qwen3(tiny_model_dir):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(tiny_model_dir)
    assert (config.model_type, config.vocab_size, config.num_hidden_layers) == ("qwen3", 151936, 2)
    assert config.num_attention_heads % 4 == config.num_key_value_heads % 4 == 0
    assert config.rope_parameters["rope_theta"] == 1000000
    assert config.dtype == torch.bfloat16
    assert GenerationConfig.from_pretrained(tiny_model_dir).top_k == 20
    loaded = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert loaded("Hello, world!").input_ids == [9707, 11, 1879, 0]


def test_the_logits_are_peaked_like_a_language_models(sampled):
    check_peaked(sampled)


def test_the_tied_model_is_peaked_too_and_keeps_no_head(tmp_path):
    from transformers import AutoModelForCausalLM

    write_tiny_qwen3(tmp_path, tied=True, dtype="float32", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    check_peaked(sample(model))


def check_peaked(sampled):
    top1 = sampled.logprobs.amax(-1).exp().flatten()
    entropy = -(sampled.logprobs.exp() * sampled.logprobs).sum(-1).flatten()
    chosen = sampled.logprobs.gather(-1, sampled.token_ids[..., None]).flatten()
    assert 0.3 < top1.median() < 0.9
    assert top1.quantile(0.9) - top1.quantile(0.1) > 0.4
    assert -3 < chosen.mean() < -0.5
    assert entropy.min() < 0.1
    assert entropy.max() > 3
    # near uniform would be ln V = 11.9
    assert entropy.mean() < 4


def test_sampled_text_does_not_stop_at_once_nor_repeats_one_token(sampled):
    for row in sampled.token_ids:
        assert len(row.unique()) >= 10
    assert (sampled.token_ids < 151643).all()
