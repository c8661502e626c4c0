"""The loss has the same bits on every layout, and one rank's fault is every rank's error.

All of it happens in one run of eight gloo processes, on groups of one to eight of them. With
LOSS_RANKS=32 it is one of 32, through all 18 layouts of TP 1/2/4 x DP 1/2/4 x CP 1/2.
"""

import itertools
import os
import re
import time
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_batch import (
    COLUMNS,
    SETTINGS,
    cut_over_data_ranks,
    loss_of,
    part_of,
    whole_batch,
    whole_part,
)
from loss_faults import faults, register_backend_that_fails_on
from ranks import run_on_ranks

from rlk_align.loss import GrpoLoss

NUM_RANKS = int(os.environ.get("LOSS_RANKS", "8"))
LAYOUTS = [
    layout
    for layout in itertools.product((1, 2, 4), (1, 2, 4), (1, 2))
    if layout[0] * layout[1] * layout[2] <= NUM_RANKS
]
DTYPES = {
    "tokens, k3": torch.bfloat16,
    "sequences, k1, mean": torch.float32,
    "constant": torch.float32,
}


def outcome(name: str, part: dict[str, Any], backend: str, **groups: Any) -> dict[str, Any]:
    """All that must not depend on the layout, and this rank's gradient."""
    result = loss_of(part, SETTINGS[name], backend, **groups)
    # a factor, as a loss scaler has one
    (1.7 * result.loss).backward()
    return replicated(result) | {"gradient": part["logits_TL"].grad}


def replicated(result: GrpoLoss) -> dict[str, torch.Tensor]:
    totals = result.totals
    values = {
        "loss": result.loss.detach(),
        "ids": result.sequence_ids_S,
        "advantage": result.advantage_S,
        "num_active": result.num_active_S,
        "policy": totals.policy_S,
        "kl": totals.kl_S,
        "low": totals.num_clipped_low_S,
        "high": totals.num_clipped_high_S,
    }
    return {name: value for name, value in values.items() if value is not None}


@cache
def outcome_alone(name: str) -> dict[str, Any]:
    return outcome(name, whole_part(batch_for(name)), "expsum-cpu")


@cache
def batch_for(name: str) -> Any:
    return whole_batch(DTYPES[name], has_reference="kl" in SETTINGS[name])


def groups_of(rank: int, tp: int, data: int) -> dict[str, dist.ProcessGroup | None]:
    """This rank's groups for a layout, None for those of one; every rank makes all of them."""
    mine: dict[str, dist.ProcessGroup | None] = {}
    by_name = {
        "tp_group": [range(first, first + tp) for first in range(0, tp * data, tp)],
        "data_group": [range(tp_rank, tp * data, tp) for tp_rank in range(tp)],
    }
    for name, members in by_name.items():
        groups = [dist.new_group(ranks) for ranks in members if len(ranks) > 1]
        mine[name] = next((g for g in groups if dist.get_rank(g) >= 0), None)
    return mine


def sound_cases(rank: int) -> dict[Any, Any]:
    results = {}
    for tp, data in sorted({(tp, dp * cp) for tp, dp, cp in LAYOUTS}):
        groups = groups_of(rank, tp, data)
        if rank >= tp * data:
            continue
        for (_, dp, cp), cut, name in itertools.product(
            [layout for layout in LAYOUTS if (layout[0], layout[1] * layout[2]) == (tp, data)],
            COLUMNS,
            SETTINGS,
        ):
            rows, ids = cut_over_data_ranks(cut, dp, cp)[rank // tp]
            part = part_of(batch_for(name), rows, ids, edges=COLUMNS[cut][tp], tp_rank=rank % tp)
            # another backend than alone; it also starts faster
            results[tp, dp, cp, cut, name] = outcome(name, part, "expsum-reference", **groups)
    return results


def faulty_cases(rank: int) -> dict[str, tuple[str, str, float]]:
    """Kind and text of the error, and the seconds it took, for each fault."""
    groups = groups_of(rank, 2, 2)
    register_backend_that_fails_on(3, rank)
    results = {}
    for name, (ranks, break_arguments, _) in faults().items():
        if rank >= 4:
            break
        rows, ids = cut_over_data_ranks("even", 1, 2)[rank // 2]
        edges = COLUMNS["even"][2]
        call = part_of(batch_for("tokens, k3"), rows, ids, edges=edges, tp_rank=rank % 2)
        call |= {"settings": dict(SETTINGS["tokens, k3"]), "backend": "expsum-reference"}
        before = time.monotonic()
        try:
            if rank in ranks:
                break_arguments(call)
            loss_of(call, call["settings"], call["backend"], **groups)
            results[name] = ("nothing", "", 0.0)
        except Exception as error:
            results[name] = (type(error).__name__, str(error), time.monotonic() - before)
    return results


def seconds_until_a_missing_rank_is_given_up(rank: int) -> float:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank > 0:
        # there, and silent: a rank that is gone would be noticed at once
        time.sleep(4)
        return 0.0
    rows, ids = cut_over_data_ranks("even", 2, 1)[0]
    part = part_of(batch_for("constant"), rows, ids)
    before = time.monotonic()
    with pytest.raises(RuntimeError):
        loss_of(part, SETTINGS["constant"], data_group=group)
    return time.monotonic() - before


def wrong_groups(rank: int) -> str:
    groups = groups_of(rank, 2, 2)
    if rank >= 4:
        return ""
    groups["data_group"] = groups["tp_group"]
    with pytest.raises(ValueError, match="is in tp_group and in data_group") as caught:
        loss_of(whole_part(batch_for("constant")), SETTINGS["constant"], **groups)
    return str(caught.value)


def all_cases(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {"sound": sound_cases(rank), "faulty": faulty_cases(rank)}
    results["wrong groups"] = wrong_groups(rank)
    dist.barrier()
    results["given_up_s"] = seconds_until_a_missing_rank_is_given_up(rank)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(NUM_RANKS, all_cases, timeout_s=60 + 15 * NUM_RANKS)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("cut", COLUMNS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "TP{} DP{} CP{}".format(*layout))
def test_every_layout_gives_the_same_bits(
    results: list[dict[str, Any]], layout: tuple[int, int, int], cut: str, name: str
) -> None:
    tp, dp, cp = layout
    expected = outcome_alone(name)
    whole = torch.full_like(batch_for(name).logits, torch.nan)
    for rank in range(tp * dp * cp):
        ours = results[rank]["sound"][tp, dp, cp, cut, name]
        for quantity in expected.keys() - {"gradient"}:
            assert torch.equal(ours[quantity], expected[quantity]), quantity
        rows, _ = cut_over_data_ranks(cut, dp, cp)[rank // tp]
        start, end = COLUMNS[cut][tp][rank % tp : rank % tp + 2]
        whole[rows, start:end] = ours["gradient"]
    assert torch.equal(whole[:, :500], expected["gradient"])
    padding = whole[:, 500 : COLUMNS[cut][tp][-1]]
    assert (padding == 0).all()


@pytest.mark.parametrize("fault", faults())
def test_a_fault_of_one_rank_is_the_same_error_on_every_rank(
    results: list[dict[str, Any]], fault: str
) -> None:
    outcomes = [results[rank]["faulty"][fault] for rank in range(4)]
    assert {kind for kind, _, _ in outcomes} == {"UnusableInput"}, outcomes
    # where tensor-parallel ranks fail as one, each data group names its own
    for _, message, _ in outcomes:
        assert re.match(faults()[fault][2], message), message
    assert max(seconds for _, _, seconds in outcomes) < 5


def test_a_missing_rank_is_waited_for_as_long_as_the_group_says(
    results: list[dict[str, Any]],
) -> None:
    assert 1 < results[0]["given_up_s"] < 10


def test_groups_that_overlap_are_refused(results: list[dict[str, Any]]) -> None:
    assert results[3]["wrong groups"].startswith(
        "rank 2 is in tp_group and in data_group of rank 3"
    )
