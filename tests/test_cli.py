"""The command line: stdout, stderr, exit status, help, and what is written."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from captures import (
    VOCAB,
    Plan,
    samples,
    with_logits,
    with_reported,
    write_capture,
    write_workers,
)

from rlk_align.cli import main
from rlk_align.contract import equal_shards


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A rollout at TP 2, and a trainer with other logits whose reports are 0.5 nats too low."""
    directory = tmp_path_factory.mktemp("pair")
    ours = samples(6)
    # markup in a label must not disturb a table
    ours[5] = replace(ours[5], label="[red]5")
    theirs = with_logits(ours, lambda s: s.logits * 1.01)
    theirs = with_reported(theirs, lambda s: s.reported - 0.5)
    plan = Plan(layout=equal_shards(VOCAB, 2), token_texts=True, sampling={"temperature": 1.0})
    write_capture(directory / "rollout", ours, plan)
    write_capture(directory / "trainer", theirs, Plan(role="trainer"))
    return directory


@pytest.fixture
def compared(pair, tmp_path, capsys):
    """What `compare` printed, and the folder with its files."""
    arguments = [str(pair / "rollout"), str(pair / "trainer"), "--out", str(tmp_path)]
    assert main(["compare", *arguments]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    return out, tmp_path


def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_table_names_the_terms_the_worst_tokens_and_the_verdict(compared):
    out, folder = compared
    for words in ("trainer function", "logits", "engine function", "[red]5", "Provenance"):
        assert words in out
    assert "\ndrifted: mean |d| is 0.5" in out
    assert f"{folder}/report.json" in out.replace("\n", "")
    # neither colour nor a line too long where the output is no terminal
    assert "\x1b" not in out
    assert max(map(len, out.split("written:")[0].splitlines()[3:])) <= 100


def test_the_report_is_strict_json_with_every_number(compared):
    report = strict_json((compared[1] / "report.json").read_text())
    assert (report["schema"], report["verdict"], report["exit_status"]) == (
        "rlk-report/1",
        "drifted",
        1,
    )
    assert report["num_tokens"] == report["token_classes"]["compared"] == 33
    assert report["terms"]["trainer_function"]["logp_abs_diff_mean"] == pytest.approx(0.5, abs=1e-6)
    assert report["terms"]["engine_function"]["logp_abs_diff_max"] == 0
    assert report["statuses"]["rollout"] == {"reported": {"valid": 33}, "kernel": {"ok": 33}}
    assert len(report["worst"]) == 10
    # text stands before numbers in the natural order of labels
    token_id = samples(6)[5].response[0]
    assert report["bits"]["kernel"]["first_mismatch"] == {
        "sequence": "[red]5",
        "position": 2,
        "token_id": token_id,
        "rollout_rank": token_id // 500,
        "trainer_rank": 0,
    }
    sizes = [abs(token["drift"]) for token in report["worst"]]
    assert sizes == sorted(sizes, reverse=True)
    first = report["worst"][0]
    assert first["text"] == f"t{first['token_id']}"
    assert first["rollout_rank"] == first["token_id"] // 500
    differing = [row["field"] for row in report["provenance"] if row["differs"]]
    assert differing == ["layout.bounds", "role", "sampling.temperature"]


def test_the_parquet_holds_every_token_and_its_terms(compared):
    table = pq.read_table(compared[1] / "tokens.parquet").to_pydict()
    assert len(table["token_id"]) == 33
    assert set(table["class"]) == {"compared"}
    assert set(table["sequence"]) == {"0", "1", "2", "3", "4", "[red]5"}
    for row in range(33):
        terms = [table[t][row] for t in ("trainer_function", "logits", "engine_function")]
        assert math.fsum(terms) == pytest.approx(table["drift"][row], abs=1e-15)
        difference = table["trainer_reported"][row] - table["rollout_reported"][row]
        assert table["drift"][row] == difference


def test_a_missing_value_is_null_in_the_parquet(pair, tmp_path):
    bad = with_reported(samples(6), lambda s: s.reported * math.nan)
    bad[5] = replace(bad[5], label="[red]5")
    write_capture(tmp_path / "bad", bad, Plan())
    arguments = ["compare", str(tmp_path / "bad"), str(pair / "trainer"), "--out", str(tmp_path)]
    assert main(arguments) == 3
    strict_json((tmp_path / "report.json").read_text())
    table = pq.read_table(tmp_path / "tokens.parquet").to_pydict()
    assert table["rollout_reported"] == table["drift"] == table["logits"] == [None] * 33
    assert set(table["rollout_reported_status"]) == {"nan"}
    assert None not in table["rollout_kernel"]


def test_json_is_one_object_a_line_with_the_fields_of_the_report(pair, tmp_path, capsys):
    arguments = [str(pair / "rollout"), str(pair / "trainer"), "--out", str(tmp_path)]
    assert main(["compare", *arguments, "--json", "--worst", "2"]) == 1
    lines = [strict_json(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.pop("kind") for line in lines] == ["summary", *["term"] * 4, *["token"] * 2]
    report = strict_json((tmp_path / "report.json").read_text())
    assert lines[0].items() <= report.items()
    assert lines[2] == {
        "name": "trainer_function",
        "observed": True,
        **report["terms"]["trainer_function"],
    }
    assert lines[5:] == report["worst"]


def test_limits_decide(pair, tmp_path, capsys):
    arguments = [str(pair / "rollout"), str(pair / "trainer"), "--out", str(tmp_path)]
    assert main(["compare", *arguments, "--limit", "0.9"]) == 0
    assert "\naligned: mean |d| is" in capsys.readouterr().out
    assert main(["compare", *arguments, "--limit", "0.9", "--limit-max", "0.4"]) == 1


def test_without_pyarrow_the_extra_is_named(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    arguments = [str(pair / "rollout"), str(pair / "trainer"), "--out", str(tmp_path / "out")]
    assert main(["compare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "install rlk-align[report], or pass --no-parquet" in err
    assert main(["compare", *arguments, "--no-parquet"]) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]


def test_inspect_says_what_a_capture_holds(pair, capsys):
    assert main(["inspect", str(pair / "rollout")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "role rollout",
        "engine engine 1",
        "sequences 6, 0 incomplete",
        "tokens 33 sampled, 12 of prompts",
        "reported 33 valid",
        "K 33 ok",
        "1 [500, 1000) 500 1 1 33",
        "sampling.temperature 1.0",
    ):
        assert words in out


def test_inspect_says_what_is_missing(tmp_path, capsys):
    plan = Plan(skip=lambda rank, label, at: (label, at) == ("1", 3), lost={"queue full": 7})
    write_capture(tmp_path / "c", samples(), plan)
    assert main(["inspect", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert "incomplete: sequence 1, no row at position 3" in out
    assert "lost: 7 rows, queue full" in out


def test_inspect_refuses_what_is_altered(pair, tmp_path, capsys):
    write_capture(tmp_path / "c", samples(), Plan())
    part = tmp_path / "c" / "dp0-tp0" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    assert main(["inspect", str(tmp_path / "c")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_seal_makes_a_capture_of_what_workers_wrote(tmp_path, capsys):
    write_workers(tmp_path / "c", samples(), Plan())
    assert main(["inspect", str(tmp_path / "c")]) == 2
    assert f"seal it with: rlk-align seal {tmp_path}/c" in capsys.readouterr().err
    assert main(["seal", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out == f"sealed: {tmp_path}/c/capture.json\n"
    assert main(["seal", str(tmp_path / "c")]) == 2
    assert capsys.readouterr().err == f"rlk-align: {tmp_path}/c is sealed already\n"


def test_a_fault_of_ours_is_no_verdict(pair, tmp_path, capsys, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr("rlk_align.compare.comparison.compare_captures", failing)
    arguments = [str(pair / "rollout"), str(pair / "trainer"), "--out", str(tmp_path)]
    assert main(["compare", *arguments]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback")
    assert err.endswith("RuntimeError: nobody thought of this\n")


def test_a_stdout_that_knows_only_ascii_shows_other_letters_escaped(tmp_path):
    ours = [replace(sample, label=f"\u4f60-{sample.label}") for sample in samples()]
    write_capture(tmp_path / "rollout", ours, Plan())
    write_capture(tmp_path / "trainer", ours, Plan(role="trainer"))
    done = subprocess.run(
        [sys.executable, "-m", "rlk_align.cli", "compare", "rollout", "trainer"],
        cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u4f60-" in done.stdout


@pytest.mark.parametrize("words", [[], ["compare"], ["inspect"], ["seal"]])
def test_help_fits_a_screen_and_holds_an_example(words, capsys):
    assert main([*words, "-h"]) == 0
    out = capsys.readouterr().out
    assert "Example: rlk-align" in out
    assert len(out.splitlines()) <= 30
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("words", [["compare"], ["compare", "one"], ["nothing"], ["seal", "-x"]])
def test_a_command_line_that_is_wrong_is_one_line_on_stderr(words, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("rlk-align: ")


def test_help_imports_neither_torch_nor_an_engine():
    code = (
        "import sys; from rlk_align.cli import main; main(['compare', '-h']);"
        "print(sorted({'torch', 'numpy', 'vllm', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_comparing_imports_no_engine(pair, tmp_path):
    code = (
        "import sys; from rlk_align.cli import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'vllm', 'transformers', 'rlk_adapters'} & set(sys.modules)))"
    )
    arguments = ["compare", str(pair / "rollout"), str(pair / "trainer"), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "1 []"
    assert done.stderr == ""


def test_a_reader_that_has_seen_enough_is_no_error(pair, tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "rlk_align.cli", "compare", str(pair / "rollout"),
             str(pair / "trainer"), "--out", str(tmp_path)],
            stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")
