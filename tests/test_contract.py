"""A contract refuses what it cannot keep, and its fingerprint moves with all that ranks share."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rlk_align.contract import (
    DeterminismScope,
    LogitsDtype,
    LogprobContract,
    MaskContract,
    OutputContract,
    ReductionContract,
    Role,
    ShardingContract,
    VocabLayout,
    equal_shards,
    layout_from_bounds,
)
from rlk_align.errors import UnusableInput

LAYOUT = VocabLayout(vocab_size=10, bounds=((0, 3), (3, 3), (3, 10), (10, 12)))


def contract(**changes: Any) -> LogprobContract:
    fields: dict[str, Any] = {
        "role": "train",
        "logits_dtype": "bf16",
        "sharding": ShardingContract(layout=LAYOUT, tp_rank=2, cp_rank=1, cp_world=2),
        "mask": MaskContract(num_tokens=3, active=(True, False, True)),
    }
    return LogprobContract(**{**fields, **changes})


def test_strings_become_enums_and_the_scope_is_the_wider_one() -> None:
    made = contract()
    assert made.role is Role.TRAIN
    assert made.logits_dtype is LogitsDtype.BF16
    assert made.determinism_scope is DeterminismScope.CROSS_LAYOUT_BITWISE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "both"}, "role should be one of train, infer, got 'both'"),
        ({"role": None}, "role should be one of train, infer, got None"),
        ({"logits_dtype": "fp8"}, "logits_dtype should be one of bf16, fp16, fp32, got 'fp8'"),
        (
            {"determinism_scope": "always"},
            "determinism_scope should be one of fixed_topology, cross_layout_bitwise, got 'always'",
        ),
        ({"mask": (True,)}, r"mask should be a MaskContract, got \(True,\)"),
        ({"sharding": LAYOUT}, "sharding should be a ShardingContract"),
        (
            {"mask": MaskContract(num_tokens=1, active=(True,), ignore_index=9)},
            r"ignore_index 9 is a real token of the vocabulary \[0, 10\); take one outside",
        ),
    ],
)
def test_a_contract_that_cannot_be_kept_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        contract(**changes)


@pytest.mark.parametrize("ignored", [-100, 10, 11])
def test_ignore_index_may_be_anything_outside_the_real_vocabulary(ignored: int) -> None:
    mask = MaskContract(num_tokens=1, active=(False,), ignore_index=ignored)
    assert contract(mask=mask).mask.mode == "ignore_index"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_rank": True}, "tp_rank should be an integer, got True"),
        ({"tp_rank": 4}, "tp_rank should be below the 4 ranks of its world, got 4"),
        ({"tp_rank": -1}, "tp_rank should be 0 or more, got -1"),
        ({"cp_rank": 1}, "cp_rank should be below the 1 ranks of its world, got 1"),
        ({"cp_world": 0}, "cp_world should be 1 or more, got 0"),
        ({"cp_world": 2.0}, "cp_world should be an integer, got 2.0"),
        ({"layout": 4}, "layout should be a VocabLayout, got 4"),
    ],
)
def test_coordinates_lie_inside_their_world(fields: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        ShardingContract(**{"layout": LAYOUT, **fields})


@pytest.mark.parametrize(
    ("vocab_size", "bounds", "message"),
    [
        (10, ((0, 5), (6, 10)), "rank 1's shard must start at 5"),
        (10, ((0, 5), (4, 10)), "rank 1's shard must start at 5"),
        (10, ((1, 10),), "rank 0's shard must start at 0"),
        (10, ((0, 6), (6, 5)), "rank 1 holds columns"),
        (10, ((0, 9),), "the shards end at column 9, but the vocabulary has 10"),
        (10, (), "the shards end at column 0"),
        (10, ((False, 10),), "start of rank 0 should be an integer, got False"),
        (10, ((0, 10.0),), "end of rank 0 should be an integer, got 10.0"),
        (10, None, r"bounds should be a \(start, end\) for each rank, got None"),
        (10, ((0, 5), (5, 7, 10)), r"bounds of rank 1 should be \(start, end\), got \(5, 7, 10\)"),
        (10, (0, 10), r"bounds of rank 0 should be \(start, end\), got 0"),
        (0, ((0, 10),), "vocab_size should be 1 or more, got 0"),
        (370_001, ((0, 370_001),), "vocab_size should be at most 370000, the columns that the"),
        (True, ((0, 10),), "vocab_size should be an integer, got True"),
    ],
)
def test_the_table_is_contiguous_from_zero(vocab_size: Any, bounds: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        VocabLayout(vocab_size=vocab_size, bounds=bounds)


def test_bounds_from_json_are_frozen_with_the_layout() -> None:
    bounds: Any = [[0, 3], [3, 3], [3, 10], [10, 12]]
    layout = VocabLayout(vocab_size=10, bounds=bounds)
    assert layout == layout_from_bounds(10, bounds) == LAYOUT
    assert hash(layout) == hash(LAYOUT)
    bounds[0][1] = 4
    assert layout == LAYOUT


@pytest.mark.parametrize(
    ("sizes", "padded_size", "message"),
    [
        ((10, 0), None, "tp_size should be 1 or more, got 0"),
        ((10, 2.0), None, "tp_size should be an integer, got 2.0"),
        ((None, 2), None, "vocab_size should be an integer, got None"),
        ((0, 2), None, "vocab_size should be 1 or more, got 0"),
        ((10, 2), 9, "padded_size should be 10 or more, got 9"),
    ],
)
def test_equal_shards_need_a_rank_and_a_column(sizes: Any, padded_size: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        equal_shards(*sizes, padded_size=padded_size)


def test_every_real_id_has_the_owner_whose_bounds_hold_it() -> None:
    sharding = ShardingContract(layout=LAYOUT)
    for token_id in range(10):
        start, end = LAYOUT.bounds[sharding.owner_rank(token_id)]
        assert start <= token_id < end
    for token_id in (-1, 10, 11):
        with pytest.raises(UnusableInput, match=f"token id {token_id} is outside the vocabulary"):
            sharding.owner_rank(token_id)
    with pytest.raises(UnusableInput, match="token_id should be an integer, got True"):
        sharding.owner_rank(True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": 2, "active": (True,)}, "one bool for each of 2 tokens, got 1"),
        ({"num_tokens": 1, "active": (1,)}, r"active\[0\] should be True or False, got 1"),
        ({"num_tokens": 1, "active": True}, "active should be a tuple of bools, got True"),
        ({"num_tokens": True, "active": (True,)}, "num_tokens should be an integer, got True"),
        ({"num_tokens": -1, "active": ()}, "num_tokens should be 0 or more, got -1"),
        (
            {"num_tokens": 0, "active": (), "ignore_index": False},
            "ignore_index should be an integer, got False",
        ),
    ],
)
def test_a_mask_is_one_bool_for_each_row(fields: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        MaskContract(**fields)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (ReductionContract, "merge", "logaddexp"),
        (ReductionContract, "axis", "cp"),
        (ReductionContract, "cp_is_merge_axis", True),
        (ReductionContract, "cp_is_merge_axis", 0),
        (ReductionContract, "finish", "float32"),
        (ReductionContract, "num_roundings", 2),
        (ReductionContract, "num_roundings", True),
        (ReductionContract, "transport", "float_all_reduce"),
        # the kernel gathers: what is said is what runs
        (ReductionContract, "transport", "integer_all_reduce"),
        (OutputContract, "logprob_dtype", "bf16"),
        (OutputContract, "lse_dtype", "fp64"),
        (OutputContract, "is_replicated", False),
        (OutputContract, "exports_lse", False),
    ],
)
def test_there_is_no_other_reduction_and_no_other_output(part: Any, field: str, value: Any) -> None:
    with pytest.raises(UnusableInput, match=field):
        part(**{field: value})


def test_provenance_is_strict_json_without_the_mask_itself() -> None:
    text = json.dumps(contract().to_dict(), allow_nan=False)
    mask = json.loads(text)["mask"]
    assert mask["num_active"] == 2
    # of the bytes 1, 0, 1
    assert mask["active_sha256"].startswith("85f90dfea1d8")
    assert "active" not in mask


def test_the_fingerprint_is_equal_inside_a_tp_group() -> None:
    sharding = contract().sharding
    prints = {
        contract(sharding=replace(sharding, tp_rank=rank)).cross_rank_fingerprint()
        for rank in range(4)
    }
    assert len(prints) == 1


def test_the_fingerprint_moves_with_everything_else() -> None:
    base = contract()
    sharding, mask = base.sharding, base.mask
    others = [
        contract(role="infer"),
        contract(logits_dtype="fp16"),
        contract(determinism_scope="fixed_topology"),
        contract(sharding=replace(sharding, cp_rank=0)),
        contract(sharding=replace(sharding, cp_world=3)),
        contract(sharding=replace(sharding, layout=equal_shards(10, 4))),
        contract(sharding=replace(sharding, layout=replace(LAYOUT, vocab_size=11))),
        contract(mask=replace(mask, active=(True, True, False))),
        contract(mask=replace(mask, num_tokens=4, active=(True, False, True, False))),
        contract(mask=replace(mask, ignore_index=-100)),
    ]
    prints = {other.cross_rank_fingerprint() for other in [base, *others]}
    assert len(prints) == len(others) + 1


def test_a_contract_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        contract().role = Role.INFER  # type: ignore[misc]
