"""Topology and layout leave no trace in the bits, and every sabotage is caught by a named check."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from rlk_align.cli import main
from rlk_align.errors import UnusableInput
from rlk_align.matrix.case import MatrixCase
from rlk_align.matrix.differences import differences, is_within
from rlk_align.matrix.evaluation import evaluate
from rlk_align.matrix.grid import open_grid
from rlk_align.matrix.inputs import (
    PADDING_LOGIT,
    edge_ids,
    raised_ids,
    seeded_logits,
    shard_of,
    target_ids,
)
from rlk_align.matrix.oracle import exact_values
from rlk_align.matrix.run import run_cases
from rlk_align.matrix.verdict import MatrixOutcome, judge
from rlk_align.matrix.worker import run_rank

Artifact = dict[str, Any]
LAYOUTS = ("even", "uneven", "megatron", "vllm")
TOPOLOGIES = ((2, 2), (4, 1), (1, 4))
SMALL = {"vocab_size": 1000, "backend": "expsum-reference"}
ODD = {**SMALL, "batch": 3, "sequence": 5, "prompt_tokens": 2}
TABLE = ((0, 1), (1, 1), (1, 1003), (1003, 1010))
SABOTAGES = {
    "phantom": ("megatron", "kernel"),
    "swap": ("even", "kernel"),
    "owner": ("even", "kernel"),
    "replica": ("even", "replication"),
    "nan": ("even", "kernel"),
    "crash": ("even", "ranks"),
}
"""Layout in which it shows, and the check that catches it."""
REAL_LOGPROBS = "e7293cda6bd20cf49e3bd76954900dbab6c5a32c7220c200d05c2fdb9e8d42dc"
REAL_LSES = "071d9f64092979d5dda312f1c52743c4c50dbe7d1c9c7ccb4c746060a39a66be"
"""Of the default case: rows from integers and an exact kernel give them on every machine."""


def case_with(**fields: Any) -> MatrixCase:
    return MatrixCase(**{**SMALL, **fields})


def four_rank_cases() -> dict[str, list[MatrixCase]]:
    cases = {
        f"{tp} x {cp}": [case_with(tp=tp, cp=cp, layout=layout) for layout in LAYOUTS]
        for tp, cp in TOPOLOGIES
    }
    cases |= {
        f"odd {tp} x {cp}": [MatrixCase(**ODD, tp=tp, cp=cp, layout="uneven")]
        for tp, cp in TOPOLOGIES
    }
    cases["table"] = [case_with(tp=4, layout="explicit", table=TABLE)]
    cases["no active token"] = [case_with(tp=2, cp=2, prompt_tokens=16)]
    cases["float"] = [case_with(tp=2, cp=2, backend="float", layout=one) for one in LAYOUTS]
    for name, (layout, _) in SABOTAGES.items():
        cases[name] = [case_with(tp=2, cp=2, backend=name, layout=layout)]
    return cases


def run_all(rank: int, directory: str) -> dict[str, Any]:
    import bad_backends  # noqa: F401

    with pytest.raises(UnusableInput, match="TP 2 x CP 1 needs 2 processes, the launch has 4"):
        run_cases([case_with(tp=2)], Path(directory))
    paths = {}
    for name, cases in four_rank_cases().items():
        ran, is_first = run_cases(cases, Path(directory), timeout=timedelta(seconds=3))
        assert is_first == (rank == 0)
        paths[name] = [str(path) for path in ran]
    # the process group was here before, and still is
    dist.barrier()
    return paths


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Artifacts of one run of four processes."""
    directory = tmp_path_factory.mktemp("matrix")
    found = run_on_ranks(4, run_all, str(directory))[0]
    return {name: [Path(path) for path in group] for name, group in found.items()}


def read(path: Path) -> Artifact:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def failed_checks(artifact: Artifact) -> list[str]:
    return [check["name"] for check in artifact["checks"] if not check["passed"]]


@pytest.mark.parametrize("rows", ["", "odd "])
def test_all_topologies_and_layouts_have_one_pair_of_fingerprints(
    paths: dict[str, list[Path]], rows: str
) -> None:
    sound = [path for tp, cp in TOPOLOGIES for path in paths[f"{rows}{tp} x {cp}"]]
    if not rows:
        sound += paths["table"]
    verdict = judge(sound)
    assert verdict.outcome == MatrixOutcome.PASSED, verdict.sentence
    assert len(verdict.artifacts) == len(sound)
    assert len({a["fingerprints"]["logprob_sha256"] for a in verdict.artifacts}) == 1
    assert len({a["fingerprints"]["lse_sha256"] for a in verdict.artifacts}) == 1


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_caught_by_its_check(paths: dict[str, list[Path]], name: str) -> None:
    artifact = read(paths[name][0])
    assert artifact["passed"] is False
    assert SABOTAGES[name][1] in failed_checks(artifact)
    assert judge(paths[name]).outcome == MatrixOutcome.FAILED


def test_a_float_merge_passes_each_case_by_itself_and_not_all_together(
    paths: dict[str, list[Path]],
) -> None:
    judged = judge([*paths["2 x 2"], *paths["float"]])
    (failed,) = [check for check in judged.checks if not check.passed]
    assert failed.name == "same_bits"
    # near the truth, so that only the bits tell
    assert all(read(path)["passed"] for path in paths["float"])
    # and its own layouts already disagree
    assert len({read(path)["fingerprints"]["lse_sha256"] for path in paths["float"]}) > 1


def test_the_error_shown_is_that_of_the_rank_that_failed(paths: dict[str, list[Path]]) -> None:
    artifact = read(paths["crash"][0])
    (check,) = artifact["checks"]
    assert check["detail"] == "rank 3: MemoryError: no memory for the copy"
    errors = [rank["error"] for rank in artifact["ranks"]]
    # the other CP shard is not touched; rank 2 waited for its TP group
    assert errors[:2] == [None, None]
    assert errors[2] is not None
    assert artifact["aggregate"] is None
    assert artifact["ranks"][0]["statistics"]["dlogp"]["status"] == "compared"
    assert artifact["ranks"][3]["statistics"] is None


def test_what_is_no_number_is_told_as_text(paths: dict[str, list[Path]]) -> None:
    artifact = read(paths["nan"][0])
    dlogp = artifact["aggregate"]["dlogp"]
    assert dlogp["max_abs"] == "nan"
    # the last token of a CP shard
    assert dlogp["worst"]["token"] in (15, 31)
    assert dlogp["worst"]["value"] == "nan"


def test_the_worst_token_is_global_with_target_and_owner(paths: dict[str, list[Path]]) -> None:
    artifact = read(paths["owner"][0])
    worst = artifact["aggregate"]["dlogp"]["worst"]
    case = case_with(tp=2, cp=2)
    assert worst["target_id"] == 500
    assert worst["owner_rank"] == 1
    assert target_ids(case.inputs, 0, 32)[worst["token"]] == 500
    assert worst["token"] % 16 >= 8


def test_an_empty_active_set_is_a_status_of_its_own(paths: dict[str, list[Path]]) -> None:
    artifact = read(paths["no active token"][0])
    assert artifact["passed"] is True
    dlogp = artifact["aggregate"]["dlogp"]
    assert (dlogp["status"], dlogp["num_tokens"], dlogp["max_abs"]) == ("no_active_tokens", 0, None)
    assert artifact["aggregate"]["lse"]["num_tokens"] == 32


def test_an_artifact_says_where_its_numbers_come_from(paths: dict[str, list[Path]]) -> None:
    path = paths["2 x 2"][2]
    artifact = read(path)
    assert artifact["schema_version"] == 1
    assert artifact["case_id"] in path.name
    assert artifact["case"]["padded_size"] == 1024
    assert artifact["case"]["bounds"] == [[0, 512], [512, 1024]]
    assert artifact["backend"] == {
        "requested": "expsum-reference",
        "actual": "expsum-reference",
        "platform": "cpu",
        "fallback": False,
        "rejections": [],
    }
    assert artifact["capability"]["tier"] == "reference"
    assert artifact["contract"]["mask"]["num_active"] == 8
    assert artifact["environment"]["transport"] == "gloo"
    assert artifact["environment"]["software"]["torch"] == torch.__version__
    assert [rank["tokens"] for rank in artifact["ranks"]] == [[0, 16], [0, 16], [16, 32], [16, 32]]
    assert [rank["tp_rank"] for rank in artifact["ranks"]] == [0, 1, 0, 1]
    for of in ("lse", "dlogp", "storage_lse", "storage_dlogp"):
        numbers = artifact["aggregate"][of]
        assert numbers["mean_abs"] <= numbers["p95_abs"] <= numbers["p99_abs"] <= numbers["max_abs"]


def test_a_case_that_ran_elsewhere_or_in_part_is_found_out() -> None:
    case = case_with(vocab_size=100)
    with open_grid(1, 1, platform=case.platform, timeout=timedelta(seconds=3)) as grid:
        record = run_rank(case, grid)
    assert evaluate(case, [record]).passed
    elsewhere = evaluate(replace(case, platform="rocm"), [record])
    assert [check.name for check in elsewhere.checks if not check.passed] == ["backend"]
    in_part = evaluate(replace(case, batch=3), [record])
    assert [check.name for check in in_part.checks if not check.passed] == ["coverage"]
    assert in_part.lse_sha256 is None


def test_tokens_are_cut_into_sizes_within_one() -> None:
    case = MatrixCase(**ODD, cp=4)
    ranges = [case.token_range(rank) for rank in range(4)]
    assert ranges == [(0, 3), (3, 7), (7, 11), (11, 15)]
    assert case.active(0, 7) == (False, False, True, True, True, False, False)
    assert [MatrixCase(tp=2, cp=2).coordinates(rank) for rank in range(4)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("layout", "tp", "bounds"),
    [
        ("even", 4, ((0, 37984), (37984, 75968), (75968, 113952), (113952, 151936))),
        ("vllm", 2, ((0, 75968), (75968, 151936))),
        ("megatron", 1, ((0, 151936),)),
        ("megatron", 2, ((0, 76032), (76032, 152064))),
        ("megatron", 4, ((0, 38016), (38016, 76032), (76032, 114048), (114048, 152064))),
        ("uneven", 2, ((0, 50645), (50645, 151936))),
    ],
)
def test_a_layout_cuts_qwen3_as_its_engine_does(layout: str, tp: int, bounds: Any) -> None:
    assert MatrixCase(tp=tp, layout=layout).vocab_layout.bounds == bounds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": True}, "tp should be an integer, got True"),
        ({"cp": 0}, "cp should be 1 or more, got 0"),
        ({"backend": "auto"}, "a backend's id should be a word other than auto"),
        ({"dtype": "fp8"}, "dtype should be one of bf16, fp16, fp32, got 'fp8'"),
        ({"layout": "odd"}, "layout should be one of even, uneven, megatron, vllm, explicit"),
        ({"prompt_tokens": 17}, "prompt_tokens should be at most the sequence of 16 tokens"),
        ({"layout": "explicit"}, "a table belongs to layout explicit"),
        ({"table": TABLE}, "a table belongs to layout explicit, got layout even"),
        ({"layout": "explicit", "table": TABLE, "tp": 2}, "the table has 4 shards, TP is 2"),
        ({"layout": "megatron", "padded_size": 1001}, "pads 1000 columns to 1024 at TP 1, got"),
        ({"layout": "vllm", "tp": 3}, "cannot cut 1024 columns into 3 equal shards"),
    ],
)
def test_a_case_that_cannot_be_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        case_with(**fields)


def test_every_field_is_in_the_case_id() -> None:
    others = [
        {"tp": 2}, {"cp": 2}, {"layout": "uneven"}, {"backend": "expsum-cpu"}, {"dtype": "fp16"},
        {"vocab_size": 999}, {"padded_size": 1001}, {"batch": 3}, {"sequence": 17},
        {"prompt_tokens": 7}, {"seed": 1}, {"platform": "cuda"},
    ]  # fmt: skip
    ids = {case_with(**changes).case_id for changes in [{}, *others]}
    assert len(ids) == len(others) + 1
    assert all(len(one) == 16 for one in ids)


def test_a_rank_builds_just_its_own_rows() -> None:
    inputs = case_with().inputs
    whole = seeded_logits(inputs, 0, 32)
    assert torch.equal(seeded_logits(inputs, 5, 21), whole[5:21])
    assert torch.equal(target_ids(inputs, 5, 21), target_ids(inputs, 0, 32)[5:21])
    assert not torch.equal(seeded_logits(case_with(seed=1).inputs, 0, 32), whole)
    assert not torch.equal(whole, whole.bfloat16().float())


def test_rows_are_peaked_and_targets_lie_at_every_edge() -> None:
    inputs = case_with(batch=4).inputs
    rows, ids = seeded_logits(inputs, 0, 64), target_ids(inputs, 0, 64)
    assert set(edge_ids(1000)) <= set(ids.tolist())
    assert {499, 500, 511, 512, 249, 250, 332, 333} <= set(edge_ids(1000))
    assert torch.equal(ids[1::2], raised_ids(inputs, torch.arange(1, 64, 2), 0))
    assert rows.max() < 12
    assert (rows > 6).sum(1).min() > 9


def test_a_shard_is_poisoned_beyond_the_vocabulary() -> None:
    rows = torch.arange(10.0)[None]
    assert shard_of(rows, 8, 12).tolist() == [[8, 9, PADDING_LOGIT, PADDING_LOGIT]]
    assert shard_of(rows, 11, 12).tolist() == [[PADDING_LOGIT]]
    assert shard_of(rows, 3, 3).shape == (1, 0)


def test_the_oracle_agrees_with_fifty_digits() -> None:
    inputs = case_with(vocab_size=60).inputs
    rows, ids = seeded_logits(inputs, 0, 12), target_ids(inputs, 0, 12)
    exact = exact_values(rows, ids)
    with mpmath.workdps(50):
        for row, target, logprob, lse in zip(
            rows.tolist(), ids.tolist(), exact.logprob.tolist(), exact.lse.tolist(), strict=True
        ):
            true = mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(z)) for z in row))
            assert abs(lse - true) <= abs(true) * 1e-14
            assert abs(logprob - (row[target] - true)) <= abs(true) * 1e-13


def test_differences_are_told_in_nats_and_in_steps() -> None:
    expected = torch.tensor([-1.0, -2.0, -1e-12, -8.0], dtype=torch.float64)
    value = torch.tensor([-1.0, -2.0, 0.0, -8.0])
    value[3] = torch.nextafter(value[3], torch.tensor(-9.0))
    found = differences(value, expected, tokens=[4, 5, 6, 7], targets=[1, 2, 3, 9], owners=[0] * 4)
    assert found.max_abs == 2.0**-20
    assert found.max_ulp == 1.0
    assert found.max_relative == 2.0**-23
    assert (found.worst.token, found.worst.target_id) == (7, 9)
    assert is_within(found.max_ulp, 1.5)
    assert not is_within("nan", 1.5)
    assert not is_within(None, 1.5)


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "rlk_align.cli", "matrix", *arguments],
        env={**os.environ, "PYTHONPATH": tests, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_real_vocabulary_on_four_processes(tmp_path: Path) -> None:
    layouts = ("--layout", "megatron", "--layout", "uneven")
    done = run_command("--run", "--tp", "2", "--cp", "2", *layouts, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed: 2 of 2 cases passed; one fingerprint of the logprobs" in done.stdout
    artifacts = [read(path) for path in tmp_path.glob("tp2-*.json")]
    assert {a["fingerprints"]["logprob_sha256"] for a in artifacts} == {REAL_LOGPROBS}
    assert {a["fingerprints"]["lse_sha256"] for a in artifacts} == {REAL_LSES}
    assert artifacts[0]["launch_command"][:4] == [
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]


def test_numbers_that_fail_are_archived_and_the_exit_is_1(tmp_path: Path) -> None:
    done = run_command(
        "--run", "--tp", "1", "--cp", "1", "--layout", "megatron", "--vocab-size", "1000",
        "--backend", "phantom", "--import", "bad_backends", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "failed: cases: TP 1 x CP 1 megatron phantom: kernel: LSE" in done.stdout
    (path,) = tmp_path.glob("tp1-*.json")
    assert read(path)["passed"] is False


def test_the_wrong_number_of_processes_is_told_before_any_group(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path))
    assert main(["matrix", "case", "--tp", "2", "--backend", "expsum-cpu", *out]) == 2
    assert "TP 2 x CP 1 needs 2 processes, the launch has 1; start with" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_a_plan_is_printed_written_and_judged_as_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["matrix", "--plan", "--out", str(tmp_path)]) == 0
    script = capsys.readouterr().out
    assert (tmp_path / "plan.sh").read_text() == script
    for tp, cp in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)):
        command = (
            f"torchrun --standalone --nproc-per-node {tp * cp} -m rlk_align.cli matrix case "
            f"--tp {tp} --cp {cp} --backend expsum-cpu --platform cpu --dtype bf16"
        )
        assert command in script
    assert script.endswith(f"rlk-align matrix verdict {tmp_path}\n")
    assert main(["matrix", "verdict", str(tmp_path)]) == 3
    assert "inconclusive: 24 cases have not run, such as tp1-cp1-even" in capsys.readouterr().out


@pytest.mark.parametrize("launches", [[], [{"artifacts": []}]])
def test_a_plan_of_nothing_proves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, launches: list[Any]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"launches": launches}))
    assert main(["matrix", "verdict", str(tmp_path)]) == 2
    assert "no artifact is asked for, so nothing is proved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checks", "status", "told"),
    [
        ([], 2, "no check was made, so nothing is proved; run the case again"),
        ([{"name": "kernel", "passed": False, "detail": "far off"}], 1, "kernel: far off"),
        ([{"name": "kernel", "passed": True, "detail": "near"}], 0, "1 of 1 cases passed"),
    ],
)
def test_an_artifact_passes_by_checks_that_were_made(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    checks: list[dict[str, Any]],
    status: int,
    told: str,
) -> None:
    run_cases([case_with(vocab_size=100)], tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps({**read(path), "checks": checks}))
    assert main(["matrix", "verdict", str(tmp_path)]) == status
    assert told in "".join(capsys.readouterr())


def test_a_launch_that_does_not_fit_is_not_passed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--tp", "4", "--cp", "1", "--max-processes", "2", "--out", str(tmp_path)]
    assert main(["matrix", "--run", *arguments]) == 3
    told = capfd.readouterr()
    assert "TP 4 x CP 1: not run: it needs 4 processes, at most 2 fit this machine" in told.err
    assert "inconclusive: 4 cases have not run" in told.out


def test_named_backends_in_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--vocab-size", "500", "--out", str(tmp_path)]
    assert main(["matrix", "backends", "expsum-reference", "expsum-cpu", *options]) == 0
    assert "passed: 2 of 2 cases passed" in capsys.readouterr().out
    assert main(["matrix", "backends", "expsum-cpu", "float", "--import", "bad_backends",
                 *options]) == 1  # fmt: skip
    assert "failed: same_bits" in capsys.readouterr().out
    assert main(["matrix", "backends", "expsum-cpu", "expsum-triton", *options]) == 1
    assert "expsum-triton: undeclared_capability" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "pass --plan, --run or a command"),
        (["--plan", "--run"], "pass --plan, --run or a command"),
        (["--run", "--backend", "fast"], "no backend 'fast'; pass one of expsum-cpu"),
        (["--plan", "--layout", "odd"], "layout should be one of even, uneven, megatron, vllm"),
        (["--plan", "--layout", "vllm", "--tp", "3"], "cannot cut 151936 columns into 3"),
        (["--plan", "--import", "no_such_module"], "--import no_such_module: No module named"),
        (["case", "--backend", "expsum-cpu", "--table", "0-5"], "a table is START:END,START:END"),
        (["case", "--backend", "expsum-cpu", "--table", "0:5"], "the shards end at column 5"),
        (["backends", "expsum-cpu"], "pass two ids or more, all different: one has nothing to"),
        (["backends", "expsum-cpu", "expsum-cpu"], "pass two ids or more, all different"),
        (["verdict", "no-such-directory"], "neither plan.json nor an artifact; run a case"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    out = [] if "verdict" in arguments else ["--out", str(tmp_path)]
    assert main(["matrix", *arguments, *out]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlk-align: ")
    assert complaint in told
    assert told.count("\n") == 1
