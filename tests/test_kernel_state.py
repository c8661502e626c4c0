"""A state is a commutative monoid of columns: no cut, order, batch or backend shows in it."""

import random
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_kernels import (
    EMPTY_TOP,
    RowStatus,
    State,
    empty_state,
    expsum_state,
    finish,
    finish_where_valid,
    merge,
    reference,
    selected_logprob,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one, a vector of 16 lanes and its neighbours, a tile of 4096 columns and its neighbours
WIDTHS = [1, 2, 15, 16, 17, 100, 4095, 4096, 4097, 9001]
BACKENDS = ["reference", "cpu"]


def assert_same(a: State, b: State) -> None:
    for name in ("top", "bins", "has_target", "invalid_column"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    # as bits, so that NaN equals itself
    assert torch.equal(a.target_logit.view(torch.int32), b.target_logit.view(torch.int32))


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and token ids of every kind: spread, offset, masked, at the limits."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_tokens, width = draw(st.integers(1, 5)), draw(st.sampled_from(WIDTHS))
    logits = torch.randn(num_tokens, width, generator=generator)
    logits *= draw(st.sampled_from([0.0, 0.1, 2.0, 30.0, 3000.0]))
    # -8150 and -8190: the third bin reaches down to masked columns
    logits += draw(st.sampled_from([0, -40, 60, 700, 8000, -8000, -8150, -8190]))
    if draw(st.booleans()):
        # each tile raises the top of the one before, by one bin or by many
        logits = logits.sort(1, descending=draw(st.booleans())).values
    if draw(st.booleans()):
        logits[torch.rand(num_tokens, width, generator=generator) < 0.2] = -torch.inf
    if draw(st.booleans()):
        logits[:, draw(st.integers(0, width - 1))] += draw(st.sampled_from([15, 45, 1000]))
    token_ids = torch.randint(0, width, (num_tokens,), generator=generator)
    return logits.clamp(max=8192).to(draw(st.sampled_from(DTYPES))), token_ids


def state_of(
    logits: torch.Tensor, token_ids: torch.Tensor, backend: str = "cpu", **kwargs: float
) -> State:
    return expsum_state(
        logits, token_ids=token_ids, vocab_size=logits.shape[1], backend=backend, **kwargs
    )


@given(rows(), st.sampled_from([1.0, 0.6, 1.7]))
@settings(max_examples=60, deadline=None)
def test_both_backends_give_the_same_state(rows, temperature: float) -> None:
    assert_same(*(state_of(*rows, backend, temperature=temperature) for backend in BACKENDS))


@given(rows())
@settings(max_examples=30, deadline=None)
def test_narrow_logits_are_widened_exactly(rows) -> None:
    logits, token_ids = rows
    assert_same(state_of(logits, token_ids), state_of(logits.float(), token_ids))


@given(rows(), st.randoms(use_true_random=False), st.sampled_from(BACKENDS), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_shards_cut_anywhere_merge_in_any_tree(
    rows, choose: random.Random, backend: str, padding: int
) -> None:
    logits, token_ids = rows
    num_tokens, width = logits.shape
    poisoned = torch.full((num_tokens, width + padding), torch.nan, dtype=logits.dtype)
    poisoned[:, :width] = logits
    cuts = sorted(choose.randint(0, width + padding) for _ in range(choose.randint(1, 6)))
    bounds = [0, *cuts, cuts[-1], width + padding]
    states = [
        expsum_state(
            poisoned[:, start:end],
            token_ids=token_ids,
            vocab_start=start,
            vocab_size=width,
            backend=backend,
        )
        for start, end in pairwise(bounds)
    ]
    while len(states) > 1:
        first = states.pop(choose.randrange(len(states)))
        second = states.pop(choose.randrange(len(states)))
        states.append(merge(first, second))
    assert_same(states[0], state_of(logits, token_ids, "reference"))


@given(rows(), st.sampled_from(BACKENDS), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_depend_on_the_batch_around_it(rows, backend: str, seed: int) -> None:
    logits, token_ids = rows
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    batch = finish_where_valid(state_of(logits[order], token_ids[order], backend))[0]
    for place, row in enumerate(order.tolist()):
        alone = state_of(logits[row : row + 1], token_ids[row : row + 1], backend)
        alone = finish_where_valid(alone)[0]
        assert torch.equal(batch.logprob[place], alone.logprob[0])
        assert torch.equal(batch.lse[place], alone.lse[0])


@given(rows(), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_the_chunking_of_the_reference_does_not_show(rows, chunk: int) -> None:
    logits, token_ids = rows
    whole = state_of(logits, token_ids, "reference")
    before, reference.CHUNK_ELEMENTS = reference.CHUNK_ELEMENTS, max(chunk, logits.numel() // 50)
    try:
        assert_same(state_of(logits, token_ids, "reference"), whole)
    finally:
        reference.CHUNK_ELEMENTS = before


@pytest.mark.parametrize("bins_up", [0, 1, 2, 3, 40, -1, -2, -3])
def test_a_tile_may_raise_the_top_by_any_number_of_bins(bins_up: int) -> None:
    # three tiles of 4096 columns, each so many bins above the one before, 21 powers of two a bin
    tile = torch.arange(3).repeat_interleave(4096)
    logits = (torch.randn(2, 3 * 4096) + tile * bins_up * 21 * 0.6931).clamp(-8191, 8192)
    ids = torch.tensor([0, 5000])
    assert_same(*(state_of(logits, ids, backend) for backend in BACKENDS))


def test_every_column_of_a_wide_row_may_be_the_largest_possible() -> None:
    # 370,000 equal columns: the sum that int64 must hold
    logits = torch.full((1, 370_000), 14.2)
    states = [state_of(logits, torch.tensor([0]), backend) for backend in BACKENDS]
    assert_same(*states)
    assert finish(states[0]).logprob.item() == pytest.approx(-12.8213, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_lie_apart_and_int32_ids_are_taken(backend: str) -> None:
    wide = torch.randn(4, 50)
    ids = torch.tensor([3, 9, 0, 19])
    apart = expsum_state(
        wide[:, 7:27], token_ids=ids.int(), vocab_start=0, vocab_size=20, backend=backend
    )
    assert_same(apart, state_of(wide[:, 7:27].contiguous(), ids, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", ["nan", "-nan", "inf", "9000"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 16, 4095, 4096, 4100])
def test_an_invalid_logit_is_reported_with_its_coordinates(
    backend: str, bad: str, dtype: torch.dtype, column: int
) -> None:
    logits = torch.randn(3, 4101).to(dtype)
    sign = torch.tensor(-1.0 if bad == "-nan" else 1.0, dtype=dtype)
    logits[1, column:] = torch.tensor(float(bad.strip("-")), dtype=dtype).copysign(sign)
    assert torch.signbit(logits[1, column]) == (bad == "-nan")
    ids = torch.tensor([0, 1, 2])
    state = expsum_state(logits, token_ids=ids, vocab_start=100, vocab_size=5000, backend=backend)
    # the target lies outside these columns, and the rows beside are sound
    assert state.invalid_column.tolist() == [-1, 100 + column, -1]
    whole = state_of(logits, ids, backend)
    values, status = finish_where_valid(whole)
    assert status.tolist() == [RowStatus.OK, RowStatus.INVALID_LOGIT, RowStatus.OK]
    assert values.logprob[1] == 0
    assert values.lse[1] == 0
    with pytest.raises(ValueError, match=rf"row 1: logit of token id {column} is NaN, \+inf or"):
        finish(whole)


def test_the_limits_themselves() -> None:
    just_above = torch.nextafter(torch.tensor(8192.0), torch.tensor(torch.inf)).item()
    logits = torch.tensor(
        [[8192.0, 0.0], [-8192.0, -8191.0], [-torch.inf, -8192.0], [just_above, 0.0]]
    )
    for backend in BACKENDS:
        state = state_of(logits, torch.tensor([0, 1, 0, 1]), backend)
        values, status = finish_where_valid(state)
        assert [RowStatus(code).name for code in status.tolist()] == [
            "OK",
            "OK",
            "NO_LIVE_COLUMN",
            "INVALID_LOGIT",
        ]
        assert values.logprob.tolist() == [0, 0, 0, 0]
        assert values.lse.tolist() == [8192, -8191, 0, 0]
        with pytest.raises(ValueError, match="row 2: every logit is masked"):
            finish(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_target_is_seen_and_has_logprob_minus_infinity(backend: str) -> None:
    logits = torch.tensor([[-9999.0, 0.0, 1.0], [-torch.inf, 0.0, 1.0]])
    state = state_of(logits, torch.tensor([0, 0]), backend)
    assert state.has_target.all()
    assert state.target_logit.tolist() == [-9999, -torch.inf]
    assert finish(state).logprob.tolist() == [-torch.inf, -torch.inf]


def test_a_target_that_nobody_holds_is_reported() -> None:
    logits = torch.randn(2, 10)
    state = expsum_state(logits, token_ids=torch.tensor([3, 12]), vocab_size=20)
    assert finish_where_valid(state)[1].tolist() == [RowStatus.OK, RowStatus.TARGET_NOT_SEEN]
    with pytest.raises(ValueError, match="row 1: no state holds the target's column"):
        finish(state)


def test_overlapping_shards_do_not_merge() -> None:
    state = state_of(torch.randn(2, 10), torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="row 0: both states hold the target"):
        merge(state, state)
    with pytest.raises(ValueError, match="2 and 3 tokens"):
        merge(state, empty_state(3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 7), (3, 0), (0, 0)])
def test_no_rows_and_no_columns_are_an_empty_state(
    backend: str, num_tokens: int, width: int
) -> None:
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    state = expsum_state(
        torch.empty(num_tokens, width), token_ids=ids, vocab_start=3, vocab_size=9, backend=backend
    )
    assert_same(state, empty_state(num_tokens))
    assert (state.top == EMPTY_TOP).all()


def test_merging_keeps_the_smallest_invalid_column() -> None:
    logits = torch.zeros(1, 12)
    logits[0, [4, 9]] = torch.nan
    shards = [
        expsum_state(logits[:, s:e], token_ids=torch.tensor([0]), vocab_start=s, vocab_size=12)
        for s, e in ((8, 12), (0, 3), (3, 8))
    ]
    assert reduce(merge, shards).invalid_column.tolist() == [4]


@pytest.mark.parametrize("token_id", [-1, -100, 151936, 152063, 2**31])
def test_ids_outside_the_vocabulary_are_refused_with_their_row(token_id: int) -> None:
    ids = torch.tensor([0, 5, token_id])
    message = rf"row 2: token id {token_id} is outside the vocabulary \[0, 151936\)"
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=message):
            expsum_state(torch.zeros(3, 8), token_ids=ids, vocab_size=151936, backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_TL": torch.zeros(6)}, r"\[tokens, columns\], got \[6\]"),
        ({"logits_TL": torch.zeros(2, 6).double()}, "got torch.float64"),
        ({"token_ids_T": torch.zeros(3).long()}, r"should be \[2\], one per row"),
        ({"token_ids_T": torch.zeros(2)}, "int64 or int32 tensor, got torch.float32"),
        ({"token_ids_T": [0, 0]}, "got list"),
        ({"temperature": 0.0}, "finite float32 above 0, got 0.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": 1e-60}, "got 1e-60"),
        ({"vocab_size": 0}, "vocab_size should be 1 to 370000"),
        ({"vocab_size": 400_000}, "got 400000"),
        ({"vocab_start": -1}, "vocab_start should be 0 or above"),
        ({"backend": "fast"}, "no backend 'fast'; pass one of auto, reference, cpu"),
        ({"logits_TL": torch.zeros(6, 2).T}, "column stride of 2"),
        ({"vocab_size": 7}, r"no rank holds token ids \[6, 7\), between rank 0 and the end"),
        ({"vocab_start": 2, "vocab_size": 8}, r"no rank holds token ids \[0, 2\)"),
    ],
)
def test_a_broken_contract_is_one_clear_sentence(change: dict, message: str) -> None:
    arguments = {"logits_TL": torch.zeros(2, 6), "token_ids_T": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=message):
        selected_logprob(**{**arguments, "vocab_size": 6, **change})
