"""Input that cannot be compared: exit 2 and one sentence on stderr that says what is wrong."""

import json
import shutil
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from captures import (
    VOCAB,
    Plan,
    samples,
    with_model,
    with_provenance,
    write_capture,
    write_workers,
)

from rlk_align.capture.seal import manifest_digest
from rlk_align.cli import main
from rlk_align.compare.audit import same_rows
from rlk_align.contract import equal_shards
from rlk_align.provenance import NOT_OBSERVED
from rlk_kernels import expsum_state

LAYOUT = equal_shards(VOCAB, 2)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A rollout at TP 2 and its trainer, never written to."""
    directory = tmp_path_factory.mktemp("good")
    write_capture(directory / "rollout", samples(), Plan(layout=LAYOUT))
    write_capture(directory / "trainer", samples(), Plan(role="trainer"))
    return directory


def complaint(capsys, *arguments: Path | str) -> str:
    """The one line on stderr of a comparison that must be refused."""
    status = main(["compare", *map(str, arguments), "--out", "never-written"])
    out, err = capsys.readouterr()
    assert status == 2, (out, err)
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("rlk-align: ")
    assert not Path("never-written").exists()
    return err.removeprefix("rlk-align: ").strip()


def copied(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good / "rollout", tmp_path / "rollout")
    return tmp_path / "rollout"


FILES = (
    "capture.json",
    "sequences.safetensors",
    "dp0-tp0/part-00000.safetensors",
    "dp0-tp1/part-00000.safetensors",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_byte(good, tmp_path, capsys, name, where):
    rollout = copied(good, tmp_path)
    content = bytearray((rollout / name).read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    (rollout / name).write_bytes(content)
    assert name in complaint(capsys, rollout, good / "trainer")


def test_every_flipped_byte_of_a_manifest_is_seen(good, tmp_path, capsys):
    rollout = copied(good, tmp_path)
    content = (rollout / "capture.json").read_bytes()
    for at in range(0, len(content), 37):
        altered = bytearray(content)
        altered[at] ^= 1
        (rollout / "capture.json").write_bytes(altered)
        complaint(capsys, rollout, good / "trainer")


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short(good, tmp_path, capsys, name):
    rollout = copied(good, tmp_path)
    content = (rollout / name).read_bytes()
    (rollout / name).write_bytes(content[: len(content) // 2])
    assert name in complaint(capsys, rollout, good / "trainer")


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_is_absent(good, tmp_path, capsys, name):
    rollout = copied(good, tmp_path)
    (rollout / name).unlink()
    assert Path(name).name in complaint(capsys, rollout, good / "trainer")


def test_no_such_directory(good, tmp_path, capsys):
    line = complaint(capsys, tmp_path / "nowhere", good / "trainer")
    assert line == f"{tmp_path}/nowhere: no such directory; give the directory of a capture"


def test_a_file_instead_of_a_directory(good, capsys):
    line = complaint(capsys, good / "rollout" / "capture.json", good / "trainer")
    assert "no such directory" in line


def test_an_unsealed_capture(good, tmp_path, capsys):
    write_workers(tmp_path / "open", samples(), Plan())
    line = complaint(capsys, tmp_path / "open", good / "trainer")
    assert "not a sealed capture" in line
    assert f"rlk-align seal {tmp_path}/open" in line


def test_swapped_roles(good, capsys):
    assert "swap them" in complaint(capsys, good / "trainer", good / "rollout")


def trainer_of(tmp_path, given=None, **plan) -> Path:
    return write_capture(tmp_path / "trainer", given or samples(), Plan(role="trainer", **plan))


def test_a_different_model(good, tmp_path, capsys):
    model = with_model(architecture={"vocab_size": VOCAB, "num_hidden_layers": 3})
    line = complaint(capsys, good / "rollout", trainer_of(tmp_path, provenance=model))
    assert "num_hidden_layers is 2 in rollout and 3 in trainer" in line


def test_different_weights(good, tmp_path, capsys):
    trainer = trainer_of(tmp_path, provenance=with_model(weights_digest="c" * 64))
    line = complaint(capsys, good / "rollout", trainer)
    assert line.startswith("the weights differ: rollout has aaaaaaaaaaaa, trainer has cccccccccccc")
    allowed = ["--allow-different-weights", "--out", str(tmp_path / "out")]
    assert main(["compare", str(good / "rollout"), str(trainer), *allowed]) == 0
    assert "the weights differ, which was allowed" in capsys.readouterr().out


def test_weights_that_were_not_observed_are_said(good, tmp_path, capsys):
    trainer = trainer_of(tmp_path, provenance=with_model(weights_digest=NOT_OBSERVED))
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", str(good / "rollout"), str(trainer), *out]) == 0
    assert "weights of a side were not observed" in capsys.readouterr().out


def test_another_tokenizer(good, tmp_path, capsys):
    trainer = trainer_of(tmp_path, provenance=with_model(tokenizer_digest="c" * 64))
    assert "the tokenizer differs" in complaint(capsys, good / "rollout", trainer)


def test_another_vocabulary(good, tmp_path, capsys):
    trainer = trainer_of(tmp_path, samples(vocab=999), layout=equal_shards(999, 1))
    line = complaint(capsys, good / "rollout", trainer)
    assert "the vocabulary size differs: rollout has 1000, trainer has 999" in line


def test_another_kernel(good, tmp_path, capsys):
    kernel = {"spec": "expsum-0", "backend": "cpu"}
    trainer = trainer_of(tmp_path, provenance=with_provenance(kernel=kernel))
    assert "kernel 'expsum-0'" in complaint(capsys, good / "rollout", trainer)


def test_a_token_that_differs(good, tmp_path, capsys):
    given = samples()
    ids = [(given[2].prompt[1] + 1) % VOCAB]
    given[2] = replace(given[2], prompt=given[2].prompt[:1] + ids)
    line = complaint(capsys, good / "rollout", trainer_of(tmp_path, given))
    assert line.startswith(
        f"sequence 2 differs at token 1: rollout has {samples()[2].prompt[1]}, trainer has {ids[0]}"
    )


def test_different_prompts(good, tmp_path, capsys):
    line = complaint(capsys, good / "rollout", trainer_of(tmp_path, samples(seed=1)))
    assert line.startswith("sequence 0 differs at token 0: rollout has ")


def test_a_sequence_that_is_longer(good, tmp_path, capsys):
    given = samples()
    short = given[3]
    given[3] = replace(
        short, response=short.response[:-1], logits=short.logits[:-1], reported=short.reported[:-1]
    )
    line = complaint(capsys, good / "rollout", trainer_of(tmp_path, given))
    assert line.startswith("sequence 3 has 8 tokens in rollout and 7 in trainer, the first 7 are")


def test_a_sequence_that_only_one_side_has(good, tmp_path, capsys):
    line = complaint(capsys, good / "rollout", trainer_of(tmp_path, samples(3)))
    assert line.startswith("only rollout has the token ids of its sequence 3 (rollout holds 4")
    write_capture(tmp_path / "more", samples(5), Plan(role="trainer"))
    line = complaint(capsys, good / "rollout", tmp_path / "more")
    assert line.startswith("only trainer has the token ids of its sequence 4")


def test_incomplete_sequences_excuse_no_more_than_they_are(good, tmp_path, capsys):
    plan = {"skip": lambda rank, label, at: label == "0" and at == 3}
    line = complaint(capsys, good / "rollout", trainer_of(tmp_path, samples(3), **plan))
    assert line.startswith("only rollout has the token ids of its sequence 0")


def reseal(directory: Path, **changes: object) -> None:
    """Alter a manifest and seal it again, as a third party's writer would have written it."""
    path = directory / "capture.json"
    manifest = json.loads(path.read_text()) | changes
    manifest["seal"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))


def test_a_third_partys_token_id_beyond_the_vocabulary(good, tmp_path, capsys):
    rollout = copied(good, tmp_path)
    largest = max(i for s in samples() for i in s.prompt + s.response)
    bounds = [[0, 500], [500, largest]]
    reseal(rollout, layout={"vocab_size": largest, "padded_size": largest, "bounds": bounds})
    line = complaint(capsys, rollout, good / "trainer")
    assert f"token id {largest} is outside the vocabulary [0, {largest})" in line


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema": "rlk-capture/9"}, "rlk-capture/9"),
        ({"role": "judge"}, "rollout or trainer"),
        ({"parts": [{"path": "../../part", "sha256": "", "bytes": 0, "rows": 1}]}, "../../part"),
        ({"parts": [{"path": "dp0-tp7/p", "sha256": "", "bytes": 0, "rows": 1}]}, "rank 7"),
        ({"parts": 3}, "incomplete manifest"),
        ({"provenance": {}}, "provenance is incomplete"),
        ({"layout": {"vocab_size": 10, "bounds": [[0, 4], [5, 10]]}}, "start at 4"),
    ],
)
def test_a_third_partys_manifest_that_is_wrong(good, tmp_path, capsys, changes, expected):
    rollout = copied(good, tmp_path)
    reseal(rollout, **changes)
    assert expected in complaint(capsys, rollout, good / "trainer")


WRONG_VALUES = {
    ("provenance", "kernel"): ("cpu", "provenance.kernel should be an object, each value a text"),
    ("provenance", "command"): ("run.py", "provenance.command should be a list"),
    ("provenance", "topology", "tp"): ("2", "provenance.topology should be an object"),
    ("provenance", "model", "architecture"): (
        "unknown",
        "an object or not observed, got 'unknown'",
    ),
    ("provenance", "model", "more"): (1, "provenance.model has an unknown field 'more'"),
    ("provenance", "reported", "distribution"): ("bogus", "should be raw or processed"),
    ("provenance", "logits", "stage"): ("after_temperature", "should be model_output, got"),
    ("provenance", "logits"): (None, "provenance.logits should be an object, got None"),
    ("weights",): (None, "weights should be a list, each entry an object, got None"),
    ("weights", 0): ({"digest": "a"}, "incomplete manifest (KeyError('epoch'))"),
    ("weights", 0, "epoch"): (-1, "weights epoch -1 should be 0 or more"),
    ("weights", 0, "digest"): (None, "a weights digest should be a text"),
    ("layout", "bounds"): ([[0, 1, 1000]], "bounds of rank 0 should be (start, end)"),
    ("layout", "padded_size"): (1024, "padded_size is 1024, but the bounds end at column 1000"),
    ("parts", 0): (None, "part should be an object, got None"),
    ("parts", 0, "rows"): ("1", "part.rows should be an integer, got '1'"),
    ("incomplete",): (None, "incomplete should be a list"),
    ("lost",): ({"queue full": "many"}, "lost should be an object, each value an integer"),
    ("sequences",): ([], "sequences should be an object, got []"),
    ("sequences", "path"): (None, "sequences.path should be a text, got None"),
}


@pytest.mark.parametrize("place", WRONG_VALUES, ids=lambda place: ".".join(map(str, place)))
def test_a_third_partys_field_of_another_type(good, tmp_path, capsys, place):
    value, expected = WRONG_VALUES[place]
    rollout = copied(good, tmp_path)
    manifest = json.loads((rollout / "capture.json").read_text())
    manifest["weights"] = [{"epoch": 0, "digest": "a" * 64}]
    *path, last = place
    reduce(getitem, path, manifest)[last] = value
    reseal(rollout, **manifest)
    assert expected in complaint(capsys, rollout, good / "trainer")
    assert main(["inspect", str(rollout)]) == 2


@pytest.mark.parametrize("constant", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have(good, tmp_path, capsys, constant):
    rollout = copied(good, tmp_path)
    path = rollout / "capture.json"
    path.write_text(path.read_text().replace('"lost": {}', f'"lost": {{"x": {constant}}}'))
    assert "capture.json" in complaint(capsys, rollout, good / "trainer")


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_an_architecture_that_was_not_observed_is_said(good, tmp_path, capsys, side):
    unknown = with_model(architecture=NOT_OBSERVED)
    write_capture(tmp_path / side, samples(), Plan(role=side, provenance=unknown))
    sides = {name: good / name for name in ("rollout", "trainer")} | {side: tmp_path / side}
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", str(sides["rollout"]), str(sides["trainer"]), *out]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    lines = {line["what"]: line for line in report["identity"]}
    assert lines["architecture"]["outcome"] == "not observed"
    assert lines["architecture"][side] == NOT_OBSERVED


def test_a_state_that_is_not_that_of_its_logits(good, tmp_path, capsys):
    given = samples()
    given[1].logits[2, 700] += 1
    liar = Plan(layout=LAYOUT)
    write_capture(tmp_path / "rollout", given, liar)
    _swap_logits(tmp_path / "rollout", good / "rollout", "dp0-tp1/part-00000.safetensors")
    line = complaint(capsys, tmp_path / "rollout", good / "trainer")
    # three rows of sequence 0 stand before
    assert line.startswith("dp0-tp1/part-00000.safetensors, row 5: the recorded state is not")
    silent = ["--no-audit", "--out", str(tmp_path / "out")]
    assert main(["compare", str(tmp_path / "rollout"), str(good / "trainer"), *silent]) == 0
    assert "not audited" in capsys.readouterr().out


def _swap_logits(directory: Path, other: Path, name: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from rlk_align.files import sha256_of_file

    with safe_open(directory / name, framework="pt") as part:
        metadata = part.metadata()
    tensors = load_file(directory / name)
    logits = load_file(other / name)["logits"]
    assert not torch.equal(tensors["logits"], logits)
    save_file({**tensors, "logits": logits}, directory / name, metadata)
    manifest = json.loads((directory / "capture.json").read_text())
    for part in manifest["parts"]:
        if part["path"] == name:
            part["sha256"] = sha256_of_file(directory / name)
            part["bytes"] = (directory / name).stat().st_size
    reseal(directory, parts=manifest["parts"])


@pytest.mark.parametrize("limit", ["nan", "-1", "inf", "much"])
def test_a_limit_that_is_none(good, capsys, limit):
    assert "--limit" in complaint(capsys, good / "rollout", good / "trainer", "--limit", limit)


def test_a_report_that_cannot_be_written(good, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = main(
        ["compare", str(good / "rollout"), str(good / "trainer"), "--out", str(tmp_path / "file")]
    )
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "the report cannot be written" in err


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("top", 1, 3),
        ("bins", (1, 2), 3),
        ("invalid_column", 1, 3),
        ("has_target", 1, False),
        ("target_logit", 1, 3.0),
    ],
)
def test_the_audit_sees_every_field_of_a_state(name, row, value):
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    state = expsum_state(logits, token_ids=torch.tensor([3, 4]), vocab_size=20)
    changed = getattr(state, name).clone()
    changed[row] = value
    assert same_rows(state, state).tolist() == [True, True]
    assert same_rows(state, replace(state, **{name: changed})).tolist() == [True, False]
