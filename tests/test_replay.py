"""The trainer's capture holds transformers' own logits, shifted right, at any number of ranks."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captures import Plan, Sample, write_capture
from engine_runs import engine_environment

from rlk_adapters.replay import main
from rlk_adapters.replay_rows import check_sequences, make_batches
from rlk_adapters.token_text import TokenTexts
from rlk_adapters.transformers_tp import check_tensor_parallel, full_tp_plan, read_config
from rlk_align.capture import Capture, ReportedStatus, SequenceTable, open_capture
from rlk_align.capture.parts import read_columns
from rlk_align.contract import equal_shards
from rlk_align.errors import UnusableInput
from rlk_align.model_identity import checkpoint_digest
from rlk_align.provenance import COMMAND_VARIABLE
from rlk_kernels import finish, selected_logprob

V = 151936
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def some_samples(count: int, vocab_size: int = V) -> list[Sample]:
    """Sequences to replay; nobody reads their logits."""
    rng = random.Random(0)

    def ids(at_most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, at_most))]

    prompts_and_responses = [(ids(9), ids(14)) for _ in range(count)]
    return [
        Sample(f"request-{i}", prompt, response, torch.zeros(n, vocab_size), torch.zeros(n))
        for i, (prompt, response) in enumerate(prompts_and_responses)
        for n in [len(response)]
    ]


def write_rollout(directory: Path, samples: list[Sample], vocab_size: int = V) -> Path:
    plan = Plan(layout=equal_shards(vocab_size, 1), keep_logits=False, token_texts=True)
    return write_capture(directory, samples, plan)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    samples = some_samples(7)
    # the same tokens twice are two samples
    again = replace(samples[3], label="request-again")
    return write_rollout(tmp_path_factory.mktemp("captures") / "rollout", [*samples, again])


@pytest.fixture(scope="module")
def one_process(rollout, tiny_model_dir) -> Capture:
    out = rollout.parent / "trainer-tp1"
    arguments = ["--capture", rollout, "--model", tiny_model_dir, "--out", out, "--batch-size", "1"]
    with pytest.MonkeyPatch.context() as patch:
        # main leaves its command line here for its children; other tests have commands of their own
        patch.setenv(COMMAND_VARIABLE, '["in", "this", "process"]')
        assert main([str(argument) for argument in arguments]) == 0
    return open_capture(out)


@pytest.fixture(scope="module")
def two_ranks(rollout, tiny_model_dir) -> Capture:
    out = rollout.parent / "trainer-tp2"
    result = run_torchrun(
        "-m", "rlk_adapters.replay", "--capture", rollout, "--model", tiny_model_dir,
        "--out", out, "--batch-size", "3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return open_capture(out)


def run_torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=engine_environment(),
        check=False,
    )


def rows_by_token(capture: Capture) -> dict[tuple[str, int], torch.Tensor]:
    """(label, position) -> the row's logits, the ranks' columns side by side."""
    shards: dict[tuple[str, int], list[torch.Tensor]] = {}
    # parts are in the order of the ranks
    for entry in capture.parts:
        part = read_columns(capture.directory, entry)
        (block,) = capture.logits_blocks([entry], rows=entry.rows)
        sequences, positions = (part.columns[name].tolist() for name in ("sequence", "position"))
        for sequence, position, row in zip(sequences, positions, block.logits, strict=True):
            shards.setdefault((part.labels[sequence], position), []).append(row)
    return {key: torch.cat(rows) for key, rows in shards.items()}


@pytest.fixture(scope="module")
def rows_tp1(one_process):
    return rows_by_token(one_process)


@pytest.fixture(scope="module")
def rows_tp2(two_ranks):
    return rows_by_token(two_ranks)


def test_one_process_captures_the_logits_that_predicted_each_token(
    one_process, rows_tp1, rollout, tiny_model_dir
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    table = open_capture(rollout).sequences
    expected = {}
    for label, ids, prompt in zip(table.labels, table.token_ids, table.prompt_lengths, strict=True):
        with torch.no_grad():
            (logits_SV,) = model(torch.tensor([ids])).logits
        expected |= {(label, p): logits_SV[p - 1] for p in range(prompt, len(ids))}
    assert rows_tp1.keys() == expected.keys()
    for key, row in rows_tp1.items():
        assert row.dtype == torch.bfloat16
        assert torch.equal(row, expected[key]), key


@pytest.mark.parametrize("ranks", ["one_process", "two_ranks"])
def test_reported_is_log_softmax_of_gathered_logits_and_k_is_the_kernel_of_them(ranks, request):
    capture = request.getfixturevalue(ranks)
    rows = request.getfixturevalue({"one_process": "rows_tp1", "two_ranks": "rows_tp2"}[ranks])
    tokens, labels = capture.tokens(), capture.sequences.labels
    places = zip(tokens.sequence.tolist(), tokens.position.tolist(), strict=True)
    logits = torch.stack([rows[labels[sequence], position] for sequence, position in places])
    ids = tokens.token_id
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, None]).squeeze(-1)
    assert torch.equal(tokens.reported, logprobs)
    assert (tokens.reported_status == ReportedStatus.VALID).all()
    assert tokens.all_ranks.all()
    direct = selected_logprob(logits, ids, vocab_size=V)
    assert torch.equal(finish(tokens.state).logprob, direct.logprob)
    assert torch.equal(finish(tokens.state).lse, direct.lse)
    # 6e-5: what a float32 log_softmax over 151936 columns may err
    assert (tokens.reported - direct.logprob).abs().max() < 6e-5


def test_two_ranks_compute_the_same_tokens_with_other_rounding(one_process, two_ranks):
    ours, theirs = one_process.tokens(), two_ranks.tokens()
    for name in ("sequence", "position", "token_id", "is_prompt"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    drift = (finish(ours.state).logprob - finish(theirs.state).logprob).abs()
    # bfloat16 logits near 32 stand 0.25 apart
    assert 0 < drift.max() < 1
    assert two_ranks.layout.bounds == ((0, 75968), (75968, V))
    assert torch.equal(theirs.owner_rank, (theirs.token_id >= 75968).long())


def test_the_sequences_are_those_of_the_rollout(rollout, one_process, two_ranks, tiny_model_dir):
    table = open_capture(rollout).sequences
    for capture in (one_process, two_ranks):
        assert capture.role == "trainer"
        assert capture.sequences.keys() == table.keys()
        assert capture.sequences.labels == table.labels
        assert capture.sequences.prompt_lengths == table.prompt_lengths
        # every token's text is the model's, also where the rollout's sealing had none
        occurring = {i for ids in table.token_ids for i in ids}
        texts = TokenTexts(tiny_model_dir / "tokenizer.json")(occurring)
        assert capture.sequences.token_texts == texts


def test_without_a_tokenizer_the_texts_are_those_of_the_rollout(tmp_path, tiny_model_dir):
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model_dir.iterdir():
        if path.name != "tokenizer.json":
            (model / path.name).symlink_to(path)
    rollout = write_rollout(tmp_path / "rollout", some_samples(1))
    arguments = ["--capture", rollout, "--model", model, "--out", tmp_path / "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COMMAND_VARIABLE, '["in", "this", "process"]')
        assert main([str(argument) for argument in arguments]) == 0
    texts = open_capture(tmp_path / "out").sequences.token_texts
    assert texts == open_capture(rollout).sequences.token_texts
    assert set(texts.values()) == {f"t{i}" for i in texts}


def test_provenance_says_where_the_numbers_come_from(two_ranks, tiny_model_dir):
    provenance = two_ranks.provenance
    assert (provenance.engine, provenance.engine_version[:2]) == ("transformers", "5.")
    assert provenance.topology == {"tp": 2, "pp": 1, "dp": 1, "cp": 1}
    assert provenance.model.weights_digest == checkpoint_digest(tiny_model_dir)
    assert two_ranks.weights == [{"epoch": 0, "digest": provenance.model.weights_digest}]
    assert provenance.logits.dtype == "bfloat16"
    assert provenance.engine_settings["attention_implementation"] == "sdpa"
    assert provenance.engine_settings["tp_plan_head"] == "colwise"
    assert provenance.software["torch"] == torch.__version__
    # as typed: neither torchrun nor its flags are in a rank's own command line
    interpreter, *rest = provenance.command
    assert interpreter == Path(sys.executable).name
    assert rest[: len(TORCHRUN) + 1] == [*TORCHRUN[1:], "-m", "rlk_adapters.replay"]


def test_a_bad_rank_stops_every_rank_with_its_name(rollout, tiny_model_dir, tmp_path):
    other = write_rollout(tmp_path / "other", some_samples(1))
    (other / "capture.json").unlink()
    result = run_torchrun(
        Path(__file__).with_name("replay_with_bad_rank.py"), rollout, other,
        "--model", tiny_model_dir, "--out", tmp_path / "out", "--timeout", "60",
    )  # fmt: skip
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("rlk-replay: ")]
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].startswith(f"rlk-replay: rank 1: {other} is not a sealed capture")
    assert "exitcode  : 2" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_whole_plan_is_given_and_only_the_head_is_changed(tiny_model_dir):
    plan = full_tp_plan(read_config(tiny_model_dir))
    assert plan["lm_head"] == "colwise"
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_ranks_that_do_not_divide_the_heads_are_refused(tiny_model_dir):
    config = read_config(tiny_model_dir)
    check_tensor_parallel(config, 4)
    with pytest.raises(UnusableInput, match="num_attention_heads 8, which 3 ranks do not divide"):
        check_tensor_parallel(config, 3)
    with pytest.raises(UnusableInput, match="num_key_value_heads 4, which 8 ranks do not divide"):
        check_tensor_parallel(config, 8)


def unseal(capture: Path) -> None:
    (capture / "capture.json").unlink()


def alter_manifest(capture: Path) -> None:
    path = capture / "capture.json"
    path.write_text(path.read_text().replace('"trainer"', '"rollout"').replace("151936", "151935"))


def alter_sequences(capture: Path) -> None:
    path = capture / "sequences.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (unseal, "is not a sealed capture"),
        (alter_manifest, "does not match its seal"),
        (alter_sequences, "sequences.safetensors: its SHA-256 is not the recorded one"),
    ],
)
def test_an_unsealed_or_altered_capture_is_refused(spoil, said, tmp_path, tiny_model_dir, capsys):
    capture = write_rollout(tmp_path / "rollout", some_samples(1))
    spoil(capture)
    check_refused(capsys, said, capture, tiny_model_dir, tmp_path / "out")


def test_a_capture_of_another_vocabulary_is_refused(tmp_path, tiny_model_dir, capsys):
    capture = write_rollout(tmp_path / "rollout", some_samples(1, 9), 9)
    said = f"{tiny_model_dir} has a vocabulary of 151936 columns, but the capture has 9"
    check_refused(capsys, said, capture, tiny_model_dir, tmp_path / "out")


def test_a_model_that_is_not_there_is_refused(tmp_path, rollout, capsys):
    check_refused(capsys, "absent: no config.json", rollout, tmp_path / "absent", tmp_path / "out")


def test_a_directory_in_use_is_refused(rollout, tiny_model_dir, capsys):
    check_refused(capsys, "exists already", rollout, tiny_model_dir, rollout)


def check_refused(capsys, said, capture, model, out):
    arguments = ["--capture", capture, "--model", model, "--out", out]
    assert main([str(argument) for argument in arguments]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("rlk-replay: ")
    assert said in stderr
    assert stderr.count("\n") == 1


def test_a_wrong_flag_is_refused_with_one_sentence(capsys):
    assert main(["--batch-size", "0"]) == 2
    assert capsys.readouterr().err.startswith("rlk-replay: Invalid value for '--batch-size'")


def table_of(ids: list[int], prompt_length: int) -> SequenceTable:
    return SequenceTable(
        token_ids=[ids], prompt_lengths=[prompt_length], labels=["a"], sampling=[{}], token_texts={}
    )


@pytest.mark.parametrize(
    ("ids", "prompt_length", "said"),
    [
        ([3, 4], 0, "'a' has no prompt"),
        ([1] * 5, 1, "'a' has 5 tokens, but the model has 4 positions"),
    ],
)
def test_sequences_that_the_model_cannot_take_are_refused(ids, prompt_length, said):
    with pytest.raises(UnusableInput, match=said):
        check_sequences(table_of(ids, prompt_length), max_positions=4)


def test_batches_hold_every_response_token_once():
    table = SequenceTable(
        token_ids=[[1, 2, 3, 4], [5, 6], [7, 8, 9]],
        prompt_lengths=[2, 1, 2],
        labels=["a", "b", "c"],
        sampling=[{}] * 3,
        token_texts={},
    )
    first, second = make_batches(table, 2)
    assert (first.sequences, second.sequences) == ([1, 2], [0])
    assert first.token_ids_BS.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert first.is_token_BS.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert list(zip(first.sequence_R.tolist(), first.position_R.tolist(), strict=True)) == [
        (0, 1),
        (1, 2),
    ]
    assert second.position_R.tolist() == [2, 3]
