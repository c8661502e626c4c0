"""Whatever stops one rank stops all, with its own sentence and name, within the timeout."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from rlk_adapters.ranks import PATIENCE, Ranks, RanksFailed
from rlk_adapters.transformers_tp import ShardedModel
from rlk_align.contract import equal_shards
from rlk_align.errors import UnusableInput

TIMEOUT = timedelta(seconds=2)
NUM_RANKS = 3


def said(work) -> tuple[str, str]:
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail_on(ranks: Ranks, bad_ranks: tuple[int, ...]) -> tuple[str, str]:
    def work() -> None:
        if ranks.rank in bad_ranks:
            raise UnusableInput("no config.json")

    return said(lambda: ranks.attempt(work))


def fail_inside_a_collective(ranks: Ranks, model: dist.ProcessGroup) -> tuple[str, str]:
    def work() -> None:
        if ranks.rank == 1:
            raise MemoryError("no memory for the logits")
        dist.all_reduce(torch.ones(1), group=model)

    return said(lambda: ranks.attempt(work))


def work_long(ranks: Ranks) -> int:
    time.sleep(2.5 * TIMEOUT.total_seconds())
    return ranks.rank + 7


def leave_rank_2_silent(ranks: Ranks) -> tuple[str, str]:
    timeout = timedelta(seconds=0.5)
    talk = dist.new_group(backend="gloo", timeout=2 * timeout)
    hasty = replace(ranks, timeout=timeout, talk=talk)
    return said(lambda: hasty.gather(0) if ranks.rank < 2 else None)


def gather_rows(ranks: Ranks, vocab_size: int) -> torch.Tensor:
    layout = equal_shards(vocab_size, ranks.size)
    start, end = layout.bounds[ranks.rank]
    row = torch.arange(vocab_size, dtype=torch.bfloat16)
    sharded = ShardedModel(model=None, layout=layout, ranks=ranks)
    return sharded.gathered(torch.stack([row, -row])[:, start:end])


def every_case(rank: int) -> dict[str, Any]:
    # one start of processes serves all cases: starting takes longer than they do
    talk = dist.new_group(backend="gloo", timeout=2 * TIMEOUT)
    model = dist.new_group(timeout=TIMEOUT)
    patient_talk = dist.new_group(backend="gloo", timeout=PATIENCE)
    ranks = Ranks(rank=rank, size=NUM_RANKS, timeout=TIMEOUT, talk=talk, patient_talk=patient_talk)
    ranks.require_same("a batch size of", 8)
    return {
        "succeeded": (ranks.attempt(lambda: rank), ranks.gather(rank)),
        "on_first": ranks.on_first(lambda: work_long(ranks)),
        "first_is_bad": said(lambda: ranks.on_first(lambda: 1 // 0)),
        "gathered": [gather_rows(ranks, vocab_size) for vocab_size in (6, 7, 4)],
        "one_bad": fail_on(ranks, (1,)),
        "all_bad": fail_on(ranks, (0, 1, 2)),
        "differs": said(lambda: ranks.require_same("a batch size of", 8 if rank < 2 else 4)),
        "inside": fail_inside_a_collective(ranks, model),
        "silent": leave_rank_2_silent(ranks),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(NUM_RANKS, every_case)


def test_one_bad_rank_stops_all_with_its_name(results):
    for result in results:
        assert result["one_bad"] == ("UnusableInput", "rank 1: no config.json")


def test_what_is_wrong_everywhere_is_nobodys_fault(results):
    for result in results:
        assert result["all_bad"] == ("UnusableInput", "no config.json")


def test_a_rank_that_fails_while_others_wait_for_it_is_named_after_the_timeout(results):
    for result in results:
        assert result["inside"] == ("RanksFailed", "rank 1: no memory for the logits")


def test_a_rank_that_differs_is_named(results):
    sentence = "rank 2 has a batch size of 4, but rank 0 has 8; give every rank the same"
    for result in results:
        assert result["differs"] == ("UnusableInput", sentence)


def test_what_succeeds_on_every_rank_is_given_back(results):
    for rank, result in enumerate(results):
        assert result["succeeded"] == (rank, [0, 1, 2])


def test_rank_0_may_work_alone_for_longer_than_ranks_wait_for_another(results):
    for result in results:
        assert result["on_first"] == 7
        assert result["first_is_bad"] == (
            "RanksFailed",
            "rank 0: integer division or modulo by zero",
        )


def test_a_rank_that_does_not_answer_ends_the_others_with_one_sentence(results):
    sentence = "a rank died or did not answer within 1 s; if it only needs longer, raise --timeout"
    for result in results[:2]:
        assert result["silent"] == ("RanksFailed", sentence)


def test_shards_of_unequal_width_are_gathered_in_order(results):
    for result in results:
        # 2, 2, 2 columns; 3, 3, 1; 2, 2, 0
        for vocab_size, gathered in zip((6, 7, 4), result["gathered"], strict=True):
            row = torch.arange(vocab_size, dtype=torch.bfloat16)
            assert torch.equal(gathered, torch.stack([row, -row]))


def test_one_process_needs_no_group():
    ranks = Ranks()
    assert ranks.attempt(lambda: 3) == ranks.on_first(lambda: 3) == 3
    with pytest.raises(RanksFailed, match="division"):
        ranks.attempt(lambda: 1 // 0)
