"""The script that compares logprob functions: every one has a row, and only ours moves no bit."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench_peers.py"
NAMES = ["torch log_softmax(fp32) + gather", "rlk_kernels cpu", "verl logprobs_from_logits"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Standard output and the records by function."""
    records = tmp_path_factory.mktemp("peers") / "peers.jsonl"
    small = ["--tokens", "8", "--vocab-size", "2048", "--rounds", "1", "--tp", "1", "2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT / 'fixtures'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *small, "--json", records, "--markdown", "--only", *NAMES],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    return done.stdout, {name: [r for r in lines if r["peer"] == name] for name in NAMES}


def test_both_dtypes_of_a_function_are_measured(run):
    _, records = run
    for name in NAMES[:2]:
        assert [record["dtype"] for record in records[name]] == ["float32", "bfloat16"]
        for record in records[name]:
            assert record["max_error_nats"] < 1e-5
            assert record["forward_time_ratio"] > 0
            assert record["step_memory_ratio"] > 0


def test_padding_moves_the_usual_code_and_not_the_kernel(run):
    _, records = run
    for usual, kernel in zip(records[NAMES[0]], records[NAMES[1]], strict=True):
        assert usual["moved_by_padding"]["random"] == 8
        assert kernel["moved_by_padding"] == {"-inf": 0, "zero": 0, "random": 0}
        assert (kernel["moved_by_batch"], kernel["moved_by_tp"]) == (0, {"2": 0})


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_a_package_that_is_missing_has_a_row_that_says_so(run):
    table, records = run
    assert [record["status"] for record in records[NAMES[2]]] == ["not installed"]
    assert any(NAMES[2] in line and "not installed" in line for line in table.splitlines())
