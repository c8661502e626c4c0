"""Real vLLM: every sampled token has its row, with the engine's bits, and vLLM notices nothing."""

import math

import pytest
import torch
from engine_runs import MAX_TOKENS, NUM_PROMPTS, Session

from rlk_adapters.rollout_audit import audit
from rlk_adapters.rollout_engine import CaptureFailed, Sampled
from rlk_align.capture import Capture, ReportedStatus, open_capture, seal_capture
from rlk_align.errors import UnusableInput
from rlk_kernels import RowStatus, expsum_state, finish, finish_where_valid
from rlk_kernels.expsum import State, merge

BROKEN_RUNS = {
    "no-directory": "Not a directory",
    "tap-broke": "the tap broke",
}
# vLLM sums 151936 exponentials in float32; what torch's log_softmax was measured to err at most
VLLM_ERROR_NATS = 6e-5
KERNEL_ERROR_ULP = 1.5
# columns 2^-42 below the largest are dropped; all 151936 of them are this much of the sum
DROPPED_TAIL = 2**-24.8


@pytest.fixture(params=[1, 2])
def capture(request: pytest.FixtureRequest) -> Capture:
    return open_capture(request.getfixturevalue(f"rollout_tp{request.param}"))


def whole_rows(capture: Capture) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Full logits rows, their tokens, and the merged recorded states; rows in order of capture.

    Every worker writes the same rows in the same order, so ranks are put side by side.
    """
    ranks = range(capture.layout.tp_size)
    blocks = list(capture.logits_blocks(rows=1 << 30))
    per_rank = [[block for block in blocks if block.tp_rank == rank] for rank in ranks]
    token_id = torch.cat([block.token_id for block in per_rank[0]])
    logits = torch.cat([torch.cat([b.logits for b in rank]) for rank in per_rank], dim=1)
    state = _cat([block.state for block in per_rank[0]])
    for rank in per_rank[1:]:
        state = merge(state, _cat([block.state for block in rank]))
    return logits, token_id, state


def _cat(states: list[State]) -> State:
    names = ("top", "bins", "target_logit", "has_target", "invalid_column")
    return State(**{name: torch.cat([getattr(state, name) for state in states]) for name in names})


def assert_same_state(ours: State, theirs: State) -> None:
    for name in ("top", "bins", "target_logit", "has_target", "invalid_column"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def float64_logprob(logits: torch.Tensor, token_id: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(1).gather(1, token_id.long()[:, None])[:, 0]


def test_every_sampled_token_has_its_row(capture):
    tokens = capture.tokens()
    lengths = [len(ids) for ids in capture.sequences.token_ids]
    sampled = sum(lengths) - sum(capture.sequences.prompt_lengths)
    assert len(capture.sequences) == NUM_PROMPTS
    assert NUM_PROMPTS < len(tokens) <= NUM_PROMPTS * MAX_TOKENS
    assert (len(tokens), capture.incomplete, capture.lost) == (sampled, [], {})
    assert tokens.all_ranks.all()
    assert (tokens.reported_status == ReportedStatus.VALID).all()


def test_recorded_states_are_those_of_the_recorded_logits(capture):
    blocks = list(capture.logits_blocks())
    assert blocks
    for block in blocks:
        again = expsum_state(
            block.logits,
            token_ids=block.token_id.long(),
            vocab_start=block.vocab_start,
            vocab_size=capture.layout.vocab_size,
        )
        assert_same_state(again, block.state)


def test_states_of_the_shards_merge_to_the_state_of_the_whole_row(capture):
    logits, token_id, merged = whole_rows(capture)
    assert logits.shape[1] == capture.layout.vocab_size == 151936
    whole = expsum_state(logits, token_ids=token_id.long(), vocab_size=151936)
    assert_same_state(merged, whole)
    assert torch.equal(finish(merged).logprob, finish(whole).logprob)


def test_kernel_and_vllm_differ_by_the_error_of_vllm(capture):
    tokens = capture.tokens()
    selected, status = finish_where_valid(tokens.state)
    assert (status == RowStatus.OK).all()
    logits, token_id, merged = whole_rows(capture)
    truth, kernel = float64_logprob(logits, token_id), finish(merged).logprob
    ulp = (torch.nextafter(kernel.abs(), torch.tensor(math.inf)) - kernel.abs()).double()
    beyond_tail = ((kernel.double() - truth).abs() - DROPPED_TAIL) / ulp
    worst = beyond_tail.max().item()
    assert worst <= KERNEL_ERROR_ULP, f"the kernel is off by the dropped tail and {worst:.2f} ulp"
    gap = (tokens.reported.double() - selected.logprob.double()).abs().max().item()
    assert gap <= VLLM_ERROR_NATS, f"vLLM's logprob is {gap:.1e} nats from the kernel's"


def test_provenance_says_what_ran(capture):
    provenance = capture.provenance
    assert (provenance.engine, provenance.topology["tp"]) == ("vllm", capture.layout.tp_size)
    assert provenance.reported.function == "vllm raw_logprobs"
    assert provenance.logits.dtype == "bfloat16"
    assert len(provenance.model.weights_digest) == len(provenance.model.tokenizer_digest) == 64
    assert capture.weights[0]["digest"] == provenance.model.weights_digest
    # every rank names the command that a person typed, not the one that spawned it
    assert "--prompts" in provenance.command
    sampling = capture.sequences.sampling[0]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (1.0, 0, 1.0)
    assert sampling["max_tokens"] == MAX_TOKENS
    # the generation config's second end of sequence
    assert sampling["stop_token_ids"]


def test_token_texts_are_those_of_the_tokenizer(capture):
    texts = capture.sequences.token_texts
    first = capture.sequences.token_ids[0][: capture.sequences.prompt_lengths[0]]
    assert "".join(texts[i] for i in first) == "The capital of France is"


def received_from(capture: Capture) -> list[Sampled]:
    rows, table = capture.tokens(), capture.sequences
    return [
        Sampled(
            label=label,
            prompt_token_ids=table.token_ids[i][: table.prompt_lengths[i]],
            token_ids=table.token_ids[i][table.prompt_lengths[i] :],
            logprobs=rows.reported[rows.sequence == i].tolist(),
        )
        for i, label in enumerate(table.labels)
    ]


def _next_float32(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(-math.inf)).item()


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "prompt_token_ids", "label"])
def test_audit_notices_what_the_driver_did_not_receive(rollout_tp1, field):
    received = received_from(open_capture(rollout_tp1))
    audit(rollout_tp1, received)
    original = getattr(received[3], field)
    changed = {
        "label": "33",
        # one unit in the last place is enough
        "logprobs": [*received[3].logprobs[:-1], _next_float32(received[3].logprobs[-1])],
    }.get(field, [*original[:-1], 7])
    values = {name: getattr(received[3], name) for name in Sampled.__slots__}
    received[3] = Sampled(**{**values, field: changed})
    with pytest.raises(CaptureFailed, match="sequence '3"):
        audit(rollout_tp1, received)


def test_capture_is_exact_under_preemption_chunks_and_mixed_sampling(vllm_session: Session):
    # without both, the test would prove less than it says
    assert vllm_session.counts["resumed"] > 0
    assert vllm_session.counts["discarded"] > 0
    seal_capture(vllm_session.directory / "captured")
    capture = open_capture(vllm_session.directory / "captured")
    rows = capture.tokens()
    assert (capture.lost, capture.incomplete) == ({}, [])
    received = {item["label"]: item for item in vllm_session.received["captured"]}
    assert capture.sequences.labels == sorted(received, key=int)
    for index, label in enumerate(capture.sequences.labels):
        item, ours = received[label], rows.sequence == index
        assert capture.sequences.token_ids[index] == item["prompt_token_ids"] + item["token_ids"]
        assert rows.token_id[ours].tolist() == item["token_ids"]
        if item["logprobs"] is None:
            assert (rows.reported_status[ours] == ReportedStatus.NOT_REQUESTED).all()
        else:
            assert torch.equal(rows.reported[ours], torch.tensor(item["logprobs"]))
    # float32 logits at TP 1: temperature and penalties edit the very tensor that was captured
    gap = finish(rows.state).logprob.double() - rows.reported.double()
    gap = gap[rows.reported_status == ReportedStatus.VALID].abs().max().item()
    assert gap <= VLLM_ERROR_NATS, f"vLLM's logprob is {gap:.1e} nats from the kernel's"


@pytest.mark.parametrize("run", ["not-captured", *BROKEN_RUNS])
def test_outputs_are_byte_identical_with_without_and_with_a_broken_capture(
    vllm_session: Session, run
):
    def outputs(name: str) -> list:
        return [
            (item["token_ids"], item["logprobs"] and [x.hex() for x in item["logprobs"]])
            for item in vllm_session.received[name]
        ]

    assert outputs(run) == outputs("captured")


def test_what_is_sampled_after_the_end_is_said_to_be_missing(vllm_session: Session):
    assert vllm_session.received["captured"][0]["sampled_late"] > 1
    (complaint,) = vllm_session.complaints["captured"]
    assert "sampled after rlk_close: not captured" in complaint


def test_an_engine_shut_down_amid_a_sequence_leaves_no_capture(vllm_session: Session):
    (complaint,) = vllm_session.complaints["shut-down-amid"]
    assert "the engine ended while 1 sequences were being sampled" in complaint
    with pytest.raises(UnusableInput, match="did not finish"):
        seal_capture(vllm_session.directory / "shut-down-amid")


def test_an_engine_shut_down_when_idle_leaves_a_whole_capture(vllm_session: Session):
    assert vllm_session.complaints["shut-down-idle"] == []
    seal_capture(vllm_session.directory / "shut-down-idle")
    capture = open_capture(vllm_session.directory / "shut-down-idle")
    assert [len(ids) for ids in capture.sequences.token_ids] == [3 + 4]


def test_without_the_variable_nothing_is_said_or_written(vllm_session: Session):
    assert vllm_session.complaints["not-captured"] == []
    assert not (vllm_session.directory / "not-captured").exists()


@pytest.mark.parametrize("run", BROKEN_RUNS)
def test_a_broken_capture_is_loud_and_cannot_be_sealed(vllm_session: Session, run):
    (complaint,) = vllm_session.complaints[run]
    status = vllm_session.received[run][0]["status"]
    assert BROKEN_RUNS[run] in complaint
    assert BROKEN_RUNS[run] in status["failure"]
    with pytest.raises(UnusableInput):
        seal_capture(vllm_session.directory / run)
