"""Captures: what was written is read back bit for bit, and what contradicts itself is refused."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captures import (
    PROVENANCE,
    VOCAB,
    Plan,
    Sample,
    kernel_logprob,
    rows_of,
    samples,
    write_capture,
    write_workers,
)
from safetensors.torch import save_file

from rlk_align.capture import (
    CaptureWriter,
    ReportedStatus,
    WorkerIdentity,
    open_capture,
    seal_capture,
    sequence_digest,
)
from rlk_align.contract import VocabLayout, equal_shards
from rlk_align.errors import UnusableInput
from rlk_kernels import expsum_state, finish

TWO = equal_shards(VOCAB, 2, padded_size=1024)


def writer_of(directory: Path, plan: Plan, *, tp_rank: int = 0, dp_rank: int = 0) -> CaptureWriter:
    return CaptureWriter(
        directory,
        role="rollout",
        layout=plan.layout,
        worker=WorkerIdentity(tp_rank=tp_rank, dp_rank=dp_rank),
        provenance=plan.provenance,
    )


def test_what_was_written_is_read_back(tmp_path):
    given = samples(11)
    plan = Plan(layout=TWO, dp=2, token_texts=True, sampling={"temperature": 1.0}, part_bytes=1)
    capture = open_capture(write_capture(tmp_path / "c", given, plan))
    # labels count as numbers do: 10 after 9
    assert capture.sequences.labels == [s.label for s in given]
    assert capture.sequences.token_ids == [s.prompt + s.response for s in given]
    assert capture.sequences.sampling[0] == {"temperature": 1.0}
    assert capture.sequences.token_texts[given[0].prompt[0]] == f"t{given[0].prompt[0]}"
    assert (capture.role, capture.layout, capture.provenance) == ("rollout", TWO, PROVENANCE)
    rows = capture.tokens()
    ids = torch.tensor([i for s in given for i in s.response])
    assert torch.equal(rows.token_id, ids)
    assert torch.equal(rows.reported, torch.cat([s.reported for s in given]))
    assert torch.equal(rows.owner_rank, (ids >= 512).long())
    assert rows.all_ranks.all()
    whole = torch.cat([s.logits for s in given])
    expected = finish(expsum_state(whole, token_ids=ids, vocab_size=VOCAB))
    merged = finish(rows.state)
    assert torch.equal(merged.logprob, expected.logprob)
    assert torch.equal(merged.lse, expected.lse)


def test_logits_stream_back_with_their_states(tmp_path):
    given = samples(2)
    capture = open_capture(write_capture(tmp_path / "c", given, Plan(layout=TWO)))
    blocks = list(capture.logits_blocks(rows=3))
    assert {block.tp_rank for block in blocks} == {0, 1}
    for rank, (start, end) in enumerate(((0, 512), (512, VOCAB))):
        ours = [block for block in blocks if block.tp_rank == rank]
        assert {(block.vocab_start, block.logits.shape[1]) for block in ours} == {
            (start, end - start)
        }
        logits = torch.cat([block.logits for block in ours])
        assert torch.equal(logits, torch.cat([s.logits[:, start:end] for s in given]))


def test_without_logits_only_states_are_kept(tmp_path):
    capture = open_capture(write_capture(tmp_path / "c", samples(), Plan(keep_logits=False)))
    assert list(capture.logits_blocks()) == []
    assert len(capture.tokens()) == 18


def test_of_two_rows_for_one_token_the_later_step_counts(tmp_path):
    sample = samples(1)[0]
    again = replace(sample, logits=sample.logits + 1, reported=sample.reported - 1)
    writer = writer_of(tmp_path / "c", Plan())
    writer.register(sample.label, sample.prompt)
    # the later computation is written first: time is the step, not the place in the file
    writer.append(rows_of(again, [1], Plan(step=5), 0))
    writer.append(rows_of(sample, [0, 1, 2], Plan(step=0), 0))
    writer.close()
    seal_capture(tmp_path / "c")
    rows = open_capture(tmp_path / "c").tokens()
    assert len(rows) == 3
    assert rows.reported[1] == again.reported[1]
    assert rows.state.target_logit[1] == again.logits[1, sample.response[1]]


def test_ranks_that_hold_different_steps_of_a_token_are_not_a_whole_row(tmp_path):
    sample = samples(1)[0]
    for tp_rank in range(2):
        plan = Plan(layout=TWO)
        writer = writer_of(tmp_path / "c", plan, tp_rank=tp_rank)
        writer.register(sample.label, sample.prompt)
        writer.append(rows_of(sample, [0, 1], plan, tp_rank))
        again = replace(sample, reported=sample.reported - tp_rank)
        writer.append(rows_of(again, [2], replace(plan, step=tp_rank), tp_rank))
        writer.close()
    seal_capture(tmp_path / "c")
    rows = open_capture(tmp_path / "c").tokens()
    assert rows.all_ranks.tolist() == [True, True, False]
    # what the later computation reported counts, whichever rank has it
    assert rows.reported[2] == sample.reported[2] - 1


def test_two_rows_of_one_step_are_refused(tmp_path):
    sample = samples(1)[0]
    writer = writer_of(tmp_path / "c", Plan())
    writer.register(sample.label, sample.prompt)
    writer.append(rows_of(sample, [0, 1, 2], Plan(), 0))
    writer.append(rows_of(sample, [1], Plan(), 0))
    writer.close()
    seal_capture(tmp_path / "c")
    with pytest.raises(UnusableInput, match="two rows of one step"):
        open_capture(tmp_path / "c").tokens()


def disagreeing(directory: Path, ours: Sample, theirs: Sample) -> None:
    for tp_rank, sample in enumerate((ours, theirs)):
        writer = writer_of(directory, Plan(layout=TWO), tp_rank=tp_rank)
        writer.register(sample.label, sample.prompt)
        writer.append(rows_of(sample, [0, 1, 2], Plan(layout=TWO), tp_rank))
        writer.close()


def test_ranks_that_report_different_values_are_refused(tmp_path):
    sample = samples(1)[0]
    disagreeing(tmp_path / "c", sample, replace(sample, reported=sample.reported - 1))
    seal_capture(tmp_path / "c")
    with pytest.raises(UnusableInput, match=r"'0', position 2: reported is .* on rank 1 and"):
        open_capture(tmp_path / "c").tokens()


def test_ranks_that_sampled_different_tokens_are_refused(tmp_path):
    sample = samples(1)[0]
    other = [sample.response[0], (sample.response[1] + 1) % VOCAB, sample.response[2]]
    disagreeing(tmp_path / "c", sample, replace(sample, response=other))
    with pytest.raises(UnusableInput, match=r"'0' position 3 has token .* ranks must agree"):
        seal_capture(tmp_path / "c")


def test_replicas_that_give_two_sequences_one_label_are_refused(tmp_path):
    first, second = samples(1)[0], samples(1, seed=1)[0]
    # the same prompt and other steps: nothing else tells the two sequences apart
    second = replace(second, prompt=first.prompt)
    for dp_rank, sample in enumerate((first, second)):
        writer = writer_of(tmp_path / "c", Plan(), dp_rank=dp_rank)
        writer.register(sample.label, sample.prompt)
        writer.append(rows_of(sample, [0, 1, 2], Plan(step=dp_rank), 0))
        writer.close()
    with pytest.raises(UnusableInput, match="label '0' is used by data-parallel ranks 0 and 1"):
        seal_capture(tmp_path / "c")


def test_a_sequence_with_a_hole_is_left_out_and_listed(tmp_path):
    plan = Plan(skip=lambda rank, label, at: (label, at) == ("1", 4))
    capture = open_capture(write_capture(tmp_path / "c", samples(), plan))
    assert capture.incomplete == [{"label": "1", "reason": "no row at position 4"}]
    assert capture.sequences.labels == ["0", "2", "3"]
    assert len(capture.tokens()) == 3 + 5 + 6


def test_missing_values_keep_their_kind(tmp_path):
    plan = Plan(status={("0", 3): ReportedStatus.OTHER_TOKEN})
    rows = open_capture(write_capture(tmp_path / "c", samples(1), plan)).tokens()
    assert rows.reported_status.tolist() == [0, ReportedStatus.OTHER_TOKEN, 0]


def test_lost_rows_of_all_workers_are_counted(tmp_path):
    plan = Plan(layout=TWO, lost={"queue full": 2})
    capture = open_capture(write_capture(tmp_path / "c", samples(1), plan))
    assert capture.lost == {"queue full": 4}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda worker: worker | {"closed": False}, "did not finish"),
        (lambda worker: worker | {"role": "trainer"}, "its role is not that of dp0-tp0"),
        (lambda worker: {k: v for k, v in worker.items() if k != "lost"}, "no field 'lost'"),
        (lambda worker: worker | {"schema": "rlk-capture/0"}, "rlk-capture/0"),
        (
            lambda worker: worker | {"provenance": worker["provenance"] | {"git": "other"}},
            "its git is not that of dp0-tp0",
        ),
    ],
)
def test_workers_that_do_not_fit_together_are_not_sealed(tmp_path, spoil, expected):
    write_workers(tmp_path / "c", samples(), Plan(layout=TWO))
    path = tmp_path / "c" / "dp0-tp1" / "worker.json"
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(UnusableInput, match=expected):
        seal_capture(tmp_path / "c")
    assert not (tmp_path / "c" / "capture.json").exists()


def test_a_rank_that_wrote_nothing_is_missed(tmp_path):
    sample = samples(1)[0]
    writer = writer_of(tmp_path / "c", Plan(layout=TWO))
    writer.register(sample.label, sample.prompt)
    writer.append(rows_of(sample, [0, 1, 2], Plan(layout=TWO), 0))
    writer.close()
    with pytest.raises(UnusableInput, match="rank 1 of 2 wrote nothing"):
        seal_capture(tmp_path / "c")


def test_the_writer_refuses_what_a_reader_would(tmp_path):
    sample = samples(1)[0]
    writer = writer_of(tmp_path / "c", Plan(layout=TWO))
    with pytest.raises(ValueError, match="'0' has rows but was never registered"):
        writer.append(rows_of(sample, [0], Plan(layout=TWO), 0))
    writer.register(sample.label, sample.prompt)
    with pytest.raises(ValueError, match="registered already"):
        writer.register(sample.label, sample.prompt)
    with pytest.raises(ValueError, match=r"real columns are \[0, 512\)"):
        writer.append(rows_of(sample, [0], Plan(layout=equal_shards(VOCAB, 3)), 0))
    rows = rows_of(sample, [0], Plan(layout=TWO), 0)
    with pytest.raises(ValueError, match=r"position 2: token id 1000 is outside .*\[0, 1000\)"):
        writer.append(replace(rows, token_id=torch.tensor([VOCAB])))
    with pytest.raises(UnusableInput, match="exists already"):
        writer_of(tmp_path / "c", Plan(layout=TWO))


def third_party(directory: Path, *, metadata: object = None, **changed: torch.Tensor) -> Path:
    """A capture written by hand from docs/capture-format.md, without our writer or sealer."""
    vocab = 8
    logits = torch.arange(2 * vocab, dtype=torch.float32).reshape(2, vocab) / 4
    ids = torch.tensor([3, 5], dtype=torch.int32)
    state = expsum_state(logits, token_ids=ids, vocab_size=vocab)
    tensors = {
        "sequence": torch.tensor([0, 0], dtype=torch.int32),
        "position": torch.tensor([1, 2], dtype=torch.int32),
        "token_id": ids,
        "step": torch.tensor([0, 1]),
        "is_prompt": torch.tensor([False, False]),
        "weights_epoch": torch.zeros(2, dtype=torch.int32),
        "reported": torch.tensor([-2.0, -1.0]),
        "reported_status": torch.zeros(2, dtype=torch.uint8),
        "state_top": state.top,
        "state_bins": state.bins,
        "state_invalid_column": state.invalid_column,
        "target_logit": state.target_logit,
        "has_target": state.has_target,
        "logits": logits,
        "prompt_token_ids": torch.tensor([7], dtype=torch.int32),
    } | changed
    (directory / "dp0-tp0").mkdir(parents=True)
    part = directory / "dp0-tp0" / "part-00000.safetensors"
    prompts = [{"label": "a", "tokens": 1, "sampling": {}}]
    if metadata is None:
        metadata = {"schema": "rlk-capture/1", "labels": ["a"], "prompts": prompts}
    save_file(tensors, part, {"rlk": json.dumps(metadata)})
    table = directory / "sequences.safetensors"
    save_file(
        {
            "token_ids": torch.tensor([7, 3, 5], dtype=torch.int32),
            "lengths": torch.tensor([3]),
            "prompt_lengths": torch.tensor([1]),
        },
        table,
        {"rlk": json.dumps({"labels": ["a"], "sampling": [{}], "token_texts": {}})},
    )
    manifest = {
        "schema": "rlk-capture/1",
        "role": "trainer",
        "layout": {"vocab_size": vocab, "padded_size": vocab, "bounds": [[0, vocab]]},
        "provenance": PROVENANCE.to_json(),
        "weights": [],
        "workers": [{"tp_rank": 0, "dp_rank": 0}],
        "parts": [
            {
                "path": "dp0-tp0/part-00000.safetensors",
                "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
                "bytes": part.stat().st_size,
                "rows": 2,
            }
        ],
        "sequences": {
            "path": "sequences.safetensors",
            "sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
            "count": 1,
        },
        "incomplete": [],
        "lost": {},
    }
    text = json.dumps(manifest, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    manifest["seal"] = hashlib.sha256(text.encode()).hexdigest()
    (directory / "capture.json").write_text(json.dumps(manifest, indent=2))
    return directory


def test_a_capture_written_by_hand_from_the_format_page_is_read(tmp_path):
    capture = open_capture(third_party(tmp_path / "c"))
    rows = capture.tokens()
    assert rows.token_id.tolist() == [3, 5]
    assert rows.reported.tolist() == [-2.0, -1.0]
    truth = torch.arange(16, dtype=torch.float64).reshape(2, 8) / 4
    exact = truth.log_softmax(dim=1)[[0, 1], [3, 5]]
    assert (finish(rows.state).logprob.double() - exact).abs().max() < 2e-7
    digest = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in (7, 3, 5))).hexdigest()
    assert capture.sequences.keys() == [(digest, 0)] == [(sequence_digest([7, 3, 5]), 0)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"sequence": torch.tensor([0, 1], dtype=torch.int32)}, r"row 1: sequence 1 is not in"),
        ({"position": torch.tensor([1, -2], dtype=torch.int32)}, r"row 1: position -2 is not in"),
        ({"position": torch.tensor([1, 9], dtype=torch.int32)}, "the sequence table has another"),
        ({"token_id": torch.tensor([3, 6], dtype=torch.int32)}, "the sequence table has another"),
        (
            {"is_prompt": torch.tensor([False, True])},
            "position 2: is_prompt is True, but the prompt",
        ),
        ({"weights_epoch": torch.tensor([0, -7], dtype=torch.int32)}, "weights_epoch -7 is not in"),
        ({"reported_status": torch.tensor([0, 9], dtype=torch.uint8)}, "reported_status 9 is not"),
        ({"reported": torch.zeros(2, dtype=torch.float64)}, "reported is torch.float64"),
        ({"target_logit": torch.zeros(3)}, r"target_logit is torch.float32 \(3,\)"),
        ({"has_target": torch.tensor([True, False])}, "the state is not one of columns"),
        ({"state_bins": torch.full((2, 3), -1)}, "the state is not one of columns"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, "logits are F64, but the provenance"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, "logits are I32, but the provenance"),
        ({"logits": torch.zeros(2, 8, dtype=torch.bool)}, "logits are BOOL, but the provenance"),
        ({"logits": torch.zeros(2, 8).half()}, "are float16, but the provenance says float32"),
        ({"logits": torch.zeros(2, 9)}, r"logits have shape \(2, 9\)"),
    ],
)
def test_a_capture_written_by_hand_that_is_wrong_is_refused(tmp_path, changed, expected):
    capture = open_capture(third_party(tmp_path / "c", **changed))
    with pytest.raises(UnusableInput, match=expected):
        capture.tokens(), list(capture.logits_blocks())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"labels": 5}, "labels should be a list, each entry a text, got 5"),
        ({"labels": [["a"]]}, "labels should be a list, each entry a text"),
        ({"prompts": 5}, "not a part"),
        ({"prompts": [{"label": "a", "tokens": "1", "sampling": {}}]}, "tokens should be an int"),
        ({"prompts": [{"label": ["a"], "tokens": 1, "sampling": {}}]}, "label should be a text"),
        ({"prompts": [{"label": "a", "tokens": 1}]}, "not a part"),
        (None, "not a part"),
    ],
)
def test_a_part_whose_metadata_is_wrong_is_refused(tmp_path, changed, expected):
    prompts = [{"label": "a", "tokens": 1, "sampling": {}}]
    metadata = {"schema": "rlk-capture/1", "labels": ["a"], "prompts": prompts}
    metadata = [] if changed is None else metadata | changed
    capture = open_capture(third_party(tmp_path / "c", metadata=metadata))
    with pytest.raises(UnusableInput, match=expected):
        capture.tokens()


def test_a_token_beyond_the_vocabulary_is_refused_where_its_sequence_is_in_no_table(tmp_path):
    token_id = torch.tensor([3, 8], dtype=torch.int32)
    metadata = {"schema": "rlk-capture/1", "labels": ["left out"], "prompts": []}
    directory = third_party(tmp_path / "c", metadata=metadata, token_id=token_id)
    with pytest.raises(UnusableInput, match=r"row 1: token id 8 is outside .*\[0, 8\)"):
        list(open_capture(directory).logits_blocks())


def without(place: dict, name: str) -> dict:
    return {key: value for key, value in place.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda w: {"parts": [w["parts"][0] | {"x": 1}]}, "part has an unknown field 'x'"),
        (lambda w: {"parts": None}, "dp0-tp0/worker.json: incomplete"),
        (lambda w: {"worker": {"tp_rank": 0}}, "worker is incomplete .no 'dp_rank'."),
        (lambda w: {"provenance": without(w["provenance"], "git")}, "is incomplete .no 'git'."),
        (lambda w: {"provenance": "x"}, "provenance should be an object"),
        (lambda w: {"lost": {"x": float("nan")}}, "NaN is no JSON"),
        (lambda w: {"layout": w["layout"] | {"padded_size": 1}}, "padded_size is 1, but the"),
        (
            lambda w: {"parts": [w["parts"][0] | {"path": "dp7-tp9/part-00000.safetensors"}]},
            "rank 9, but the layout has 1 ranks",
        ),
    ],
)
def test_a_worker_whose_capture_would_not_open_is_not_sealed(tmp_path, spoil, expected):
    write_workers(tmp_path / "c", samples(), Plan())
    path = tmp_path / "c" / "dp0-tp0" / "worker.json"
    worker = json.loads(path.read_text())
    path.write_text(json.dumps(worker | spoil(worker)))
    with pytest.raises(UnusableInput, match=expected):
        seal_capture(tmp_path / "c")
    assert not (tmp_path / "c" / "capture.json").exists()


def test_a_part_that_is_no_safetensors_file_is_refused(tmp_path):
    capture = open_capture(third_party(tmp_path / "c"))
    part = tmp_path / "c" / capture.parts[0].path
    content = b"\xff" * part.stat().st_size
    part.write_bytes(content)
    entry = replace(capture.parts[0], sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(UnusableInput, match=r"part-00000.safetensors: not a part"):
        replace(capture, parts=[entry]).tokens()


def test_layouts_name_every_tokens_owner():
    layout = VocabLayout(vocab_size=10, bounds=((0, 3), (3, 3), (3, 9), (9, 16)))
    assert [layout.owner_rank(i) for i in (0, 2, 3, 8, 9)] == [0, 0, 2, 2, 3]
    assert [layout.real_bounds(rank) for rank in range(4)] == [(0, 3), (3, 3), (3, 9), (9, 10)]
    for token_id in (-1, 10, 15):
        with pytest.raises(UnusableInput, match="outside the vocabulary"):
            layout.owner_rank(token_id)


SAME_BYTES = """
import hashlib, pathlib, sys
sys.path.insert(0, "tests")
from captures import Plan, samples, write_capture
directory = pathlib.Path(sys.argv[1])
write_capture(directory, samples(), Plan())
for path in sorted(directory.rglob("*")):
    if path.is_file() and path.suffix == ".safetensors":
        print(path.relative_to(directory), hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_the_same_rows_are_the_same_bytes_in_every_process(tmp_path):
    runs = [
        subprocess.run(
            [sys.executable, "-c", SAME_BYTES, str(tmp_path / str(i))],
            capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
        ).stdout
        for i in range(2)
    ]  # fmt: skip
    assert "sequences.safetensors" in runs[0]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "bounds",
    [((0, 512), (512, 1024)), ((0, 512), (512, 512), (512, 1000))],
    ids=["padded", "empty"],
)
def test_ids_at_the_edges_of_shards_have_the_owner_that_the_layout_says(tmp_path, bounds):
    layout = VocabLayout(vocab_size=VOCAB, bounds=bounds)
    edges = [0, 511, 512, VOCAB - 1]
    logits = torch.randn(len(edges), VOCAB, generator=torch.Generator().manual_seed(3))
    sample = Sample("0", [7], edges, logits, kernel_logprob(logits, edges))
    write_capture(tmp_path / "c", [sample], Plan(layout=layout))
    owners = open_capture(tmp_path / "c").tokens().owner_rank.tolist()
    last = len(bounds) - 1
    assert owners == [0, 0, last, last] == [layout.owner_rank(i) for i in edges]
