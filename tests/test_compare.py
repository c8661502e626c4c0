"""The comparator: planted differences land in the right term, and nothing else moves a bit."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from captures import (
    VOCAB,
    Plan,
    kernel_logprob,
    samples,
    with_logits,
    with_provenance,
    with_reported,
    write_capture,
)
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.capture import ReportedStatus
from rlk_align.cli import main
from rlk_align.compare.budget import drift_budget
from rlk_align.compare.comparison import Comparison, compare_captures
from rlk_align.compare.token_table import Side, TokenTable
from rlk_align.compare.verdict import Limits, Outcome, limits_of
from rlk_align.contract import VocabLayout, equal_shards
from rlk_align.provenance import LogitsSemantics, ReportedSemantics

TRAINER = Plan(role="trainer")
UNEVEN = VocabLayout(vocab_size=VOCAB, bounds=((0, 3), (3, 3), (3, 990), (990, 1024)))


def compare(directory: Path, ours, theirs, our_plan=None, their_plan=TRAINER, **options):
    rollout = write_capture(directory / "rollout", ours, our_plan or Plan())
    trainer = write_capture(directory / "trainer", theirs, their_plan)
    return compare_captures(rollout, trainer, **options)


def term(comparison: Comparison, name: str) -> np.ndarray:
    return getattr(comparison.budget, name)


@pytest.mark.parametrize("layout", [equal_shards(VOCAB, 2), UNEVEN], ids=["halves", "uneven"])
def test_equal_logits_under_other_layouts_have_the_same_kernel_bits(tmp_path, layout):
    same = samples()
    result = compare(tmp_path, same, same, Plan(layout=layout))
    assert result.bits["kernel"].equal_count == result.bits["kernel"].numel == 18
    assert result.bits["lse"].mismatch_count == 0
    for name in ("drift", "trainer_function", "logits", "engine_function"):
        assert not term(result, name).any()
    assert result.verdict.outcome == Outcome.ALIGNED
    assert result.inputs.audit.rollout_rows == 18 * layout.tp_size


def test_a_real_vocabulary_in_bfloat16_has_the_same_kernel_bits_at_tp_1_and_2(tmp_path):
    vocab = 151936
    same = samples(1, vocab=vocab, dtype=torch.bfloat16)
    logits = LogitsSemantics(stage="model_output", dtype="bfloat16")
    plan = Plan(provenance=with_provenance(logits=logits))
    one = replace(plan, layout=equal_shards(vocab, 1), role="trainer")
    two = replace(plan, layout=equal_shards(vocab, 2, padded_size=152064))
    result = compare(tmp_path, same, same, two, one)
    assert result.bits["kernel"].mismatch_count == 0
    assert not term(result, "logits").any()


@pytest.mark.parametrize(
    ("side", "name"), [("trainer", "trainer_function"), ("rollout", "engine_function")]
)
def test_a_shift_of_what_is_reported_lands_in_its_own_term(tmp_path, side, name):
    same = samples()
    shifted = with_reported(same, lambda s: s.reported - 0.25)
    result = (
        compare(tmp_path, same, shifted) if side == "trainer" else compare(tmp_path, shifted, same)
    )
    # drift is trainer minus rollout
    sign = -1 if side == "trainer" else 1
    np.testing.assert_array_equal(term(result, name), np.full(18, sign * 0.25))
    np.testing.assert_array_equal(term(result, "drift"), term(result, name))
    others = {"trainer_function", "logits", "engine_function"} - {name}
    assert not any(term(result, other).any() for other in others)
    assert result.verdict.outcome == Outcome.DRIFTED
    assert "mean |d| is 0.25 nats over 18 tokens, above the limit of 0.02" in (
        result.verdict.sentence
    )


def test_other_logits_land_in_the_logits_term_and_equal_k_of_the_two(tmp_path):
    ours = samples()
    theirs = with_logits(ours, lambda s: s.logits * 1.25)
    result = compare(tmp_path, ours, theirs)
    expected = [
        float(b) - float(a)
        for s, t in zip(ours, theirs, strict=True)
        for a, b in zip(
            kernel_logprob(s.logits, s.response), kernel_logprob(t.logits, s.response), strict=True
        )
    ]
    np.testing.assert_array_equal(term(result, "logits"), expected)
    np.testing.assert_array_equal(term(result, "drift"), expected)
    assert not term(result, "engine_function").any()


finite = st.floats(-1e4, 0, width=32)


@given(st.lists(st.tuples(finite, finite, finite, finite), min_size=1, max_size=20))
def test_the_three_terms_add_up_to_drift(rows):
    columns = np.array(rows, dtype=np.float32).T
    budget = drift_budget(_table(*columns))
    for i, row in enumerate(columns.T):
        terms = [t[i] for t in (budget.trainer_function, budget.logits, budget.engine_function)]
        # four float64 subtractions of values up to the largest, each off by half a step at most
        bound = 4 * 2.0**-53 * float(np.abs(row).max())
        assert abs(sum(map(Fraction, terms)) - Fraction(budget.drift[i])) <= bound


@given(st.lists(st.tuples(*[st.integers(2**20, 2**21)] * 4), min_size=1, max_size=20))
def test_for_values_of_like_magnitude_the_terms_add_up_exactly(rows):
    columns = -np.array(rows, dtype=np.float32).T / 2**18
    budget = drift_budget(_table(*columns))
    terms = budget.trainer_function + budget.logits + budget.engine_function
    np.testing.assert_array_equal(terms, budget.drift)


def _table(rollout, rollout_k, trainer, trainer_k):
    def side(reported, kernel):
        zeros = np.zeros(len(reported), dtype=np.int64)
        return Side(
            owner_rank=zeros, weights_epoch=zeros, reported=reported, reported_status=zeros,
            logprob=kernel, lse=kernel, kernel_status=zeros,
        )  # fmt: skip

    index = np.arange(len(rollout))
    return TokenTable(
        labels=["0"], sample_indices=[0], token_texts={}, sequence=index * 0, position=index,
        token_id=index, rollout=side(rollout, rollout_k), trainer=side(trainer, trainer_k),
        basis="reported", token_class=index * 0,
    )  # fmt: skip


BAD_VALUES = {
    "nan": (math.nan, "nan"),
    "minus infinity": (-math.inf, "negative infinity"),
    "vllm's stand-in": (-9999.0, "sentinel"),
    "float32's smallest": (torch.finfo(torch.float32).min, "sentinel"),
    "above zero": (0.5, "positive"),
}


@pytest.mark.parametrize("side", ["rollout", "trainer"])
@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "called valid"])
def test_a_missing_value_is_counted_by_kind_and_enters_no_number(tmp_path, side, kind, declared):
    value, name = BAD_VALUES[kind]
    same = samples()
    bad = with_reported(same, lambda s: torch.cat([torch.tensor([value]), s.reported[1:]]))
    # a third party may call it valid; the value itself is judged
    status = {} if declared else {(s.label, 2): ReportedStatus.VALID for s in same}
    plan = Plan(role=side, status=status)
    sides = (bad, same, plan, TRAINER) if side == "rollout" else (same, bad, Plan(), plan)
    result = compare(tmp_path, *sides)
    assert result.inputs.table.class_counts() == {"compared": 14, f"{side} reported: {name}": 4}
    assert result.spreads["drift"].logp_abs_diff_max == 0
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    assert f"{side} reported: {name} 4" in result.verdict.sentence


def not_requested(given, *, but=()):
    return {
        (s.label, p): ReportedStatus.NOT_REQUESTED
        for s in given
        for p in range(2, 2 + s.num_tokens)
        if (s.label, p) not in but
    }


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_where_a_side_was_asked_for_no_logprob_d_is_the_difference_of_k(tmp_path, side):
    ours = samples()
    theirs = with_logits(ours, lambda s: s.logits * 1.25)
    reported = compare(tmp_path / "reported", ours, theirs)
    silent = Plan(role=side, status=not_requested(ours))
    plans = (silent, TRAINER) if side == "rollout" else (Plan(), silent)
    result = compare(tmp_path / "silent", ours, theirs, *plans)
    assert result.inputs.table.basis == "kernel"
    assert result.inputs.table.class_counts() == {"compared": 18}
    assert result.inputs.notes == ["not both captures hold logprobs, so d is the difference of K"]
    np.testing.assert_array_equal(term(result, "drift"), term(reported, "logits"))
    assert result.spreads["trainer_function"] is None
    assert result.spreads["engine_function"] is None
    assert result.verdict.outcome == Outcome.DRIFTED


def test_one_value_that_was_asked_for_makes_the_others_missed(tmp_path):
    same = samples()
    status = not_requested(same, but=[("1", 3)])
    result = compare(tmp_path, same, same, Plan(status=status))
    assert result.inputs.table.class_counts() == {
        "compared": 1,
        "rollout reported: not requested": 17,
    }
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    assert result.inputs.notes == []


def test_nothing_to_compare_has_no_numbers(tmp_path):
    same = with_reported(samples(), lambda s: torch.full_like(s.reported, math.nan))
    result = compare(tmp_path, same, samples())
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    assert result.verdict.sentence == "no token could be compared (rollout reported: nan 18)"
    assert result.metrics is None
    assert result.spreads["drift"] is None


def test_a_rank_without_a_row_makes_k_not_observed_there(tmp_path):
    same = samples()
    plan = Plan(
        layout=equal_shards(VOCAB, 2), skip=lambda rank, label, at: rank == 1 and label == "1"
    )
    result = compare(tmp_path, same, same, plan)
    assert result.inputs.table.class_counts() == {"compared": 14, "rollout K: shard missing": 4}
    assert result.verdict.outcome == Outcome.INCONCLUSIVE


def test_masked_targets_and_invalid_logits_are_counted_and_never_numbers(tmp_path):
    ours = samples()
    ours[0].logits[0, ours[0].response[0]] = -torch.inf
    ours[1].logits[1, 7] = torch.nan
    ours[2].logits[:2] = -torch.inf
    result = compare(tmp_path, ours, samples())
    assert result.inputs.table.class_counts() == {
        "compared": 14,
        "rollout K: invalid logit": 1,
        "rollout K: no live column": 2,
        "rollout K: target masked": 1,
    }
    assert result.verdict.outcome == Outcome.INCONCLUSIVE


def test_incomplete_sequences_and_lost_rows_are_inconclusive(tmp_path):
    same = samples()
    rollout = Plan(skip=lambda rank, label, at: label == "2" and at == 3)
    result = compare(tmp_path, same, same, rollout)
    # a hole leaves the sequence out, and the manifest says so
    assert result.inputs.coverage.gaps() == {"incomplete sequences in rollout": 1}
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    lost = Plan(role="trainer", lost={"queue full": 3})
    result = compare(tmp_path / "lost", same, same, Plan(), lost)
    assert result.inputs.coverage.gaps() == {"rows lost in trainer: queue full": 3}
    assert result.verdict.outcome == Outcome.INCONCLUSIVE


def test_rows_on_one_side_only_are_counted(tmp_path):
    same = samples(1)
    whole = write_capture(tmp_path / "whole", same, TRAINER)
    partial = write_capture(tmp_path / "partial", same, Plan(part_bytes=1))
    _drop_rows(partial, keep=2)
    result = compare_captures(partial, whole)
    assert result.inputs.coverage.gaps() == {"tokens with a row in trainer only": 1}
    assert result.verdict.outcome == Outcome.INCONCLUSIVE


def _drop_rows(directory: Path, keep: int) -> None:
    """Forget the parts behind the first ``keep`` rows, as a third party's writer might."""
    from rlk_align.capture.seal import manifest_digest

    path = directory / "capture.json"
    manifest = json.loads(path.read_text())
    del manifest["parts"][1:]
    assert sum(part["rows"] for part in manifest["parts"]) == keep
    manifest["seal"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))


def test_drift_beyond_a_limit_beats_what_is_missing(tmp_path):
    same = samples()
    far = with_reported(same, lambda s: s.reported - 3)
    result = compare(tmp_path, same, far, Plan(lost={"queue full": 1}))
    assert result.verdict.outcome == Outcome.DRIFTED


def test_one_token_beyond_the_limit_decides_and_is_named(tmp_path):
    same = samples()
    one = [*same[:3], replace(same[3], reported=same[3].reported.clone())]
    one[3].reported[4] -= 2
    result = compare(tmp_path, same, one, limits=Limits(mean_nats=1))
    assert result.verdict.outcome == Outcome.DRIFTED
    place = f"sequence 3, position 6 (token id {same[3].response[4]})"
    assert f"|d| is 2 nats at {place}, above the limit of 1 for one token" in (
        result.verdict.sentence
    )
    assert (result.worst[0].sequence, result.worst[0].position) == ("3", 6)
    assert result.worst[0].drift == -2


def test_a_limit_for_the_mean_is_not_overruled_by_the_default_for_one_token(tmp_path):
    same = samples()
    far = with_reported(same, lambda s: s.reported - 3)
    result = compare(tmp_path, same, far, limits=limits_of(5.0, None))
    assert result.verdict.outcome == Outcome.ALIGNED
    assert limits_of(5.0, 2.0) == Limits(mean_nats=5.0, max_nats=2.0)
    assert limits_of(0.5, None) == Limits(mean_nats=0.5)


def test_two_rollouts_are_compared_and_the_report_says_which_is_which(tmp_path):
    same = samples()
    result = compare(tmp_path, same, same, Plan(), Plan(layout=equal_shards(VOCAB, 2)))
    assert result.verdict.outcome == Outcome.ALIGNED
    assert "d = second - first" in result.inputs.notes[0]


def test_tokens_of_other_weights_are_not_compared_unless_asked_for(tmp_path):
    same = samples()
    old, new = "a" * 64, "c" * 64
    updated = Plan(weights={0: old, 1: new}, epoch_from={"2": 4})
    trainer = Plan(role="trainer", weights={0: old})
    result = compare(tmp_path, same, same, updated, trainer)
    assert result.inputs.table.class_counts() == {
        "compared": 15,
        "weights differ between the sides": 3,
    }
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    options = {"allow_different_weights": True}
    result = compare_captures(tmp_path / "rollout", tmp_path / "trainer", **options)
    assert result.inputs.table.class_counts() == {"compared": 18}


@pytest.mark.parametrize("weights", [{0: "a" * 64}, {}], ids=["listed", "none listed"])
@pytest.mark.parametrize("allowed", [False, True])
def test_tokens_of_an_epoch_that_is_not_listed_are_not_compared(tmp_path, weights, allowed):
    same = samples()
    rollout = Plan(weights=weights, epoch_from={"2": 4})
    result = compare(tmp_path, same, same, rollout, allow_different_weights=allowed)
    assert result.inputs.table.class_counts() == {"compared": 15, "weights epoch not listed": 3}
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    assert "weights epoch not listed 3" in result.verdict.sentence


def test_captures_without_any_sequence_are_inconclusive(tmp_path):
    result = compare(tmp_path, [], [])
    assert result.verdict.outcome == Outcome.INCONCLUSIVE
    assert result.verdict.sentence == "no token could be compared (there are none)"


def test_prompt_tokens_enter_no_statistic_and_are_not_missed(tmp_path):
    same = samples()
    with_prompts = Plan(prompt_rows=True)
    result = compare(tmp_path, same, same, with_prompts)
    assert result.inputs.table.class_counts() == {"compared": 18}
    assert result.inputs.coverage.prompt_rows_on_one_side == 8
    assert result.verdict.outcome == Outcome.ALIGNED
    both = replace(with_prompts, role="trainer")
    result = compare(tmp_path / "both", same, same, with_prompts, both)
    assert result.inputs.table.class_counts() == {"compared": 18, "prompt token": 8}
    assert result.verdict.outcome == Outcome.ALIGNED


def test_another_reported_distribution_is_usable_and_marked(tmp_path):
    same = samples()
    processed = ReportedSemantics(function="vllm processed_logprobs", distribution="processed")
    result = compare(tmp_path, same, same, Plan(provenance=with_provenance(reported=processed)))
    assert "processed" in result.inputs.notes[0]


def test_sequences_with_equal_tokens_are_joined_by_sample_index(tmp_path):
    first = samples(1)[0]
    twins = [
        replace(first, label=label, reported=first.reported - shift)
        for label, shift in (("9", 0), ("10", 0.5))
    ]
    result = compare(tmp_path, twins, twins)
    assert not term(result, "drift").any()
    assert [token.sample_index for token in result.worst] == [0, 0, 0, 1, 1, 1]


def test_workers_parts_and_order_of_rows_leave_every_byte_of_the_report(tmp_path, monkeypatch):
    ours = samples(6)
    theirs = with_logits(ours, lambda s: s.logits * 1.01)
    reports = []
    for name, plan in {
        "one": Plan(),
        "split": Plan(dp=3, rows_per_append=1, part_bytes=1),
        "backwards": Plan(dp=2, rows_per_append=3, part_bytes=1 << 20, backwards=True),
    }.items():
        directory = tmp_path / name
        write_capture(directory / "rollout", ours, plan)
        write_capture(directory / "trainer", theirs, replace(plan, role="trainer"))
        monkeypatch.chdir(directory)
        assert main(["compare", "rollout", "trainer"]) == 1
        report = directory / "rlk-report"
        reports.append([(report / f).read_bytes() for f in ("report.json", "tokens.parquet")])
    assert reports[0] == reports[1] == reports[2]
