"""From scheduler steps to rows: each token has its exact request and position."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlk_adapters.vllm_rows import (
    NOT_OBSERVED,
    RequestTable,
    SampledRows,
    StepRecord,
    effective_sampling,
    reported_of,
)
from rlk_align.capture import ReportedStatus


def sampling_params(**changed):
    defaults = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": None, "max_tokens": 16,
        "min_tokens": 0, "ignore_eos": False, "eos_token_id": 9, "stop_token_ids": [8],
        "logprobs": 0, "prompt_logprobs": None, "logit_bias": None, "allowed_token_ids": None,
        "bad_words": [], "logprob_token_ids": None, "structured_outputs": None,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **changed})


def new_request(engine_id: str, prompt: list[int] | None, computed: int = 0, **changed):
    return SimpleNamespace(
        req_id=engine_id,
        prompt_token_ids=prompt,
        num_computed_tokens=computed,
        sampling_params=sampling_params(**changed),
    )


def step_record(rows, *, new=(), finished=(), step=1):
    """``rows``: (engine id, computed, scheduled, discarded, token id) of each request."""
    computed = {engine_id: done for engine_id, done, *_ in rows}
    scheduled = {engine_id: fed for engine_id, _, fed, *_ in rows}
    sample = SampledRows(
        request_ids=[row[0] for row in rows],
        discarded=np.array([row[3] for row in rows], dtype=bool),
        position=torch.tensor([row[1] + row[2] for row in rows]),
        token_id=torch.tensor([row[4] for row in rows], dtype=torch.int32),
        reported_ids=None,
        reported=None,
        shard=torch.zeros(len(rows), 4),
        ready=None,
    )
    return StepRecord(
        step=step,
        new_requests=list(new),
        finished_ids=frozenset(finished),
        computed=computed,
        scheduled=scheduled,
        sample=sample,
    )


def run(table: RequestTable, record: StepRecord):
    announced = table.begin(record)
    kept = table.keep(record, record.sample)
    positions = record.sample.position[kept.index].tolist()
    return announced, list(zip(kept.labels, positions, strict=True)), kept


def test_a_chunk_that_is_not_the_prompts_last_gives_no_row():
    table = RequestTable()
    prompt = list(range(20, 30))
    announced, rows, _ = run(
        table, step_record([("5-0a1b2c3d", 0, 6, True, 1)], new=[new_request("5-0a1b2c3d", prompt)])
    )
    assert announced[0][:2] == ("5", prompt)
    assert rows == []
    _, rows, _ = run(table, step_record([("5-0a1b2c3d", 6, 4, False, 2)]))
    assert rows == [("5", 10)]


def test_a_resumed_request_gives_its_next_token_and_no_other():
    table = RequestTable()
    run(table, step_record([("a", 0, 3, False, 1)], new=[new_request("a", [4, 5, 6])]))
    run(table, step_record([("a", 3, 1, False, 2)]))
    # preempted: prompt and both tokens are computed again, in two chunks
    _, rows, _ = run(table, step_record([("a", 0, 2, True, 1)]))
    assert rows == []
    _, rows, _ = run(table, step_record([("a", 2, 3, False, 3)]))
    assert rows == [("a", 5)]


def test_rows_follow_the_batch_and_not_the_requests():
    table = RequestTable()
    new = [new_request("a", [1, 2]), new_request("b", [1, 2, 3])]
    rows = [("b", 0, 3, False, 1), ("a", 0, 2, False, 1)]
    assert run(table, step_record(rows, new=new))[1] == [("b", 3), ("a", 2)]


def test_a_token_computed_after_the_end_of_a_sequence_is_none_of_it():
    table = RequestTable()
    run(table, step_record([("a", 0, 1, False, 5)], new=[new_request("a", [1])]))
    for stop in (8, 9):
        name = f"stops at {stop}"
        _, rows, _ = run(
            table, step_record([(name, 0, 1, False, stop)], new=[new_request(name, [1])])
        )
        assert rows == [(name, 1)]
        assert run(table, step_record([(name, 1, 1, False, 3)]))[1] == []


def test_labels_are_the_callers_ids_while_they_are_free():
    table = RequestTable()
    ids = ["7-00000001", "7-00000002", "traj-42", "traj-42"]
    labels = []
    for engine_id in ids:
        announced, _, _ = run(
            table, step_record([(engine_id, 0, 1, False, 1)], new=[new_request(engine_id, [1])])
        )
        labels += [label for label, _, _ in announced]
        table.begin(step_record([], finished=[engine_id]))
    assert labels == ["7", "7-00000002", "traj-42", "traj-42#2"]


def test_a_prompt_without_token_ids_is_counted_as_lost():
    table = RequestTable()
    announced, rows, kept = run(
        table, step_record([("a", 0, 3, False, 1)], new=[new_request("a", None)])
    )
    assert (announced, rows, dict(kept.lost)) == ([], [], {NOT_OBSERVED: 1})


def test_two_sources_of_the_position_must_agree():
    table = RequestTable()
    record = step_record([("a", 0, 3, False, 1)], new=[new_request("a", [1, 2, 3])])
    record.sample.position[0] = 4
    with pytest.raises(RuntimeError, match="predicts position 4, the scheduler 3"):
        run(table, record)


def test_a_session_whose_prompt_grows_is_refused():
    table = RequestTable()
    record = step_record([("a", 0, 1, False, 1)], new=[new_request("a", [1])])
    table.begin(record)
    with pytest.raises(RuntimeError, match="began twice"):
        table.begin(record)


def test_sampling_parameters_are_strict_json():
    values = effective_sampling(sampling_params(logit_bias={100: 5}, structured_outputs=object()))
    assert (values["logit_bias"], values["structured_outputs"]) == ({"100": 5.0}, True)
    assert (values["eos_token_id"], values["stop_token_ids"]) == (9, [8])


def reported(ids, values, token_id, *, logprobs: int | None = 0):
    table = RequestTable()
    record = step_record(
        [("a", 0, 1, False, token_id)], new=[new_request("a", [1], logprobs=logprobs)]
    )
    sample = SampledRows(
        **{name: getattr(record.sample, name) for name in SampledRows.__slots__}
        | {
            "reported_ids": None if ids is None else torch.tensor([ids], dtype=torch.int32),
            "reported": None if ids is None else torch.tensor([values]),
        }
    )
    table.begin(record)
    value, status = reported_of(sample, table.keep(record, sample))
    return value.item(), ReportedStatus(int(status))


@pytest.mark.parametrize(
    ("ids", "values", "expected"),
    [
        ([3, 7], [-1.0, -0.5], (-1.0, ReportedStatus.VALID)),
        # top-k first and the sampled token behind it
        ([7, 3], [-0.5, -1.0], (-1.0, ReportedStatus.VALID)),
        ([7, 6], [-0.5, -1.0], (0.0, ReportedStatus.OTHER_TOKEN)),
        ([3], [float("nan")], (0.0, ReportedStatus.NAN)),
        ([3], [float("-inf")], (0.0, ReportedStatus.NEGATIVE_INFINITY)),
        ([3], [-9999.0], (0.0, ReportedStatus.SENTINEL)),
        ([3], [0.25], (0.0, ReportedStatus.POSITIVE)),
        (None, None, (0.0, ReportedStatus.NOT_REQUESTED)),
    ],
)
def test_the_reported_logprob_is_taken_by_id_and_never_made_up(ids, values, expected):
    assert reported(ids, values, token_id=3) == expected


def test_what_a_neighbour_in_the_batch_asked_for_is_not_reported():
    asked = reported([3], [-1.0], token_id=3, logprobs=None)
    assert asked == (0.0, ReportedStatus.NOT_REQUESTED)
