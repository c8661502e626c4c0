"""Two plain files: the numbers of a capture without one, and every malformed file refused."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from captures import Plan, kernel_logprob, samples, with_logits, write_capture
from safetensors.torch import save_file

from rlk_align.cli import main as rlk_align

VOCAB = 1000


@pytest.fixture(scope="module")
def main():
    path = Path(__file__).parent.parent / "scripts" / "align_safetensors.py"
    spec = importlib.util.spec_from_file_location("align_safetensors", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def tensors(length=150, seed=0, batch=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (length,) if batch is None else (batch, length)
    logits = torch.randn(*shape, VOCAB, generator=generator) * 3
    ids = torch.randint(VOCAB, shape, generator=generator)
    return {"logits": logits, "token_ids": ids}


def logprobs_of(given):
    flat = kernel_logprob(given["logits"].reshape(-1, VOCAB), given["token_ids"].flatten().tolist())
    return flat.reshape(given["token_ids"].shape)


@pytest.fixture
def run(main, tmp_path, capsys):
    def compare(ours, theirs, *options):
        """Exit status, report (None where none was written), stderr."""
        for name, given in (("a", ours), ("b", theirs)):
            save_file(given, tmp_path / f"{name}.safetensors")
        paths = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
        status = main([*paths, "--out", str(tmp_path / "out"), *options])
        err = capsys.readouterr().err
        report = tmp_path / "out" / "report.json"
        return status, json.loads(report.read_text()) if report.exists() else None, err

    return compare


def complaint(run, ours, theirs):
    status, report, err = run(ours, theirs)
    assert (status, report) == (2, None)
    assert err.count("\n") == 1
    assert err.startswith("align_safetensors: ")
    return err


def test_files_and_captures_of_the_same_numbers_give_the_same_statistics(run, tmp_path):
    ours = samples(1)
    theirs = with_logits(ours, lambda s: s.logits * 1.01)
    write_capture(tmp_path / "rollout", ours, Plan())
    write_capture(tmp_path / "trainer", theirs, Plan(role="trainer"))
    out = tmp_path / "captures"
    rlk_align(["compare", f"{tmp_path}/rollout", f"{tmp_path}/trainer", "--out", str(out)])
    of_captures = json.loads((out / "report.json").read_text())
    files = (
        {"logits": s.logits, "token_ids": torch.tensor(s.response), "logprobs": s.reported}
        for s in (ours[0], theirs[0])
    )
    _, of_files, _ = run(*files)
    # a plain file counts positions from its own first row
    for report in (of_files, of_captures):
        for bits in report["bits"].values():
            bits.pop("first_mismatch")
    for field in ("terms", "metrics", "bits", "num_tokens", "token_classes", "verdict"):
        assert of_files[field] == of_captures[field]


@pytest.mark.parametrize("batch", [None, 3], ids=["[T, V]", "[B, S, V]"])
def test_without_logprobs_d_is_that_of_k_and_the_function_terms_are_not_observed(run, batch):
    ours = tensors(batch=batch)
    theirs = {**ours, "logits": ours["logits"].bfloat16()}
    status, report, _ = run(ours, theirs)
    assert (status, report["basis"], report["num_tokens"]) == (0, "kernel", 150 * (batch or 1))
    assert report["num_sequences"] == (batch or 1)
    expected = (logprobs_of(theirs).double() - logprobs_of(ours).double()).flatten().tolist()
    mean = math.fsum(map(abs, expected)) / len(expected)
    assert report["terms"]["logits"]["logp_abs_diff_mean"] == mean
    assert report["terms"]["drift"] == report["terms"]["logits"]
    assert report["terms"]["trainer_function"] is report["terms"]["engine_function"] is None
    assert report["worst"][0]["rollout_reported"] is None


def test_logprobs_on_one_side_only_are_not_enough(run):
    ours = tensors()
    status, report, _ = run(ours, {**ours, "logprobs": logprobs_of(ours)})
    assert (status, report["basis"]) == (0, "kernel")
    assert "not both files hold logprobs" in report["notes"][0]


def test_a_shift_of_the_logprobs_is_in_its_own_term(run):
    ours = tensors() | {"logprobs": logprobs_of(tensors())}
    status, report, _ = run(ours, {**ours, "logprobs": ours["logprobs"] - 0.25})
    assert (status, report["verdict"]) == (1, "drifted")
    assert report["terms"]["trainer_function"]["logp_diff_mean"] == pytest.approx(-0.25, abs=1e-6)
    assert report["terms"]["logits"]["logp_abs_diff_max"] == 0
    assert report["bits"]["kernel"]["equal_count"] == 150


def test_missing_logprobs_are_inconclusive(run):
    ours = tensors() | {"logprobs": logprobs_of(tensors())}
    bad = ours["logprobs"].clone()
    bad[3], bad[4] = -9999.0, math.nan
    status, report, _ = run(ours, {**ours, "logprobs": bad})
    assert (status, report["verdict"]) == (3, "inconclusive")
    assert report["token_classes"] == {
        "compared": 148,
        "trainer reported: nan": 1,
        "trainer reported: sentinel": 1,
    }


def test_other_tokens_are_refused_with_the_first_difference(run):
    ours = tensors(batch=2)
    ids = ours["token_ids"].clone()
    ids[1, 7] = (ids[1, 7] + 1) % VOCAB
    line = complaint(run, ours, {**ours, "token_ids": ids})
    was = int(ours["token_ids"][1, 7])
    assert f"sequence 1 differs at token 7: rollout has {was}, trainer has {ids[1, 7]}" in line


def test_other_lengths_are_refused(run):
    ours, theirs = tensors(150), tensors(150)
    theirs = {name: tensor[:100].contiguous() for name, tensor in theirs.items()}
    line = complaint(run, ours, theirs)
    assert "sequence 0 has 150 tokens in rollout and 100 in trainer, the first 100" in line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"logits": torch.zeros(150, 999)}, "the vocabulary size differs"),
        ({"logits": torch.zeros(150)}, "[T, V] or [B, S, V]"),
        ({"logits": torch.zeros(150, VOCAB, dtype=torch.float64)}, "logits are F64 [150, 1000]"),
        ({"token_ids": torch.zeros(149, dtype=torch.int64)}, "token_ids is int64 [149]"),
        ({"token_ids": torch.zeros(150)}, "token_ids is float32 [150]"),
        ({"token_ids": torch.full((150,), VOCAB)}, "id 1000 is outside the vocabulary [0, 1000)"),
        ({"logprobs": torch.zeros(150, dtype=torch.bfloat16)}, "logprobs is bfloat16 [150]"),
    ],
)
def test_a_malformed_file_is_refused(run, change, expected):
    theirs = tensors() | change
    if "logits" in change and change["logits"].shape[-1:] == (999,):
        theirs["token_ids"] = theirs["token_ids"] % 999
    assert expected in complaint(run, tensors(), theirs)


@pytest.mark.parametrize("name", ["logits", "token_ids"])
def test_a_missing_tensor_is_named(run, name):
    ours = tensors()
    theirs = {key: tensor for key, tensor in ours.items() if key != name}
    assert f"b.safetensors: no tensor '{name}'" in complaint(run, ours, theirs)


def test_a_file_cut_short_or_absent_is_refused(main, tmp_path, capsys):
    save_file(tensors(), tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(content[:-10])
    for name, expected in (("b", "not a whole safetensors file"), ("c", "no such file")):
        paths = [str(tmp_path / f"{n}.safetensors") for n in ("a", name)]
        assert main([*paths, "--out", str(tmp_path / "out")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert expected in err
