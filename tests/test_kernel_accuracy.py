"""Logprob and LSE are within 1.5 ulp of exact on real vocabularies, and 3 ulp on any row.

Two things add to that, and no more than they may: the tail that three bins drop, and the rougher
exponential of logits beyond 1000. The oracle is float64, checked against 50-digit arithmetic.
"""

from itertools import pairwise

import mpmath
import pytest
import torch

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE, benign_rows, peaked_row, sampled_ids
from rlk_kernels import SelectedLogprob, expsum_state, finish, merge, selected_logprob

NOTHING_CLAIMED_BELOW = 2.0**-30
MODERATE = [0.0, -1000.0, 1000.0, -300.0, 20.25]
"""Offsets at which an exponential is within 1.5 * 2**-24."""


def exact_logprob(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Float64 [T]; from the odds against the target, so that -1e-7 keeps its digits."""
    logits = logits.double()
    difference = logits - logits.gather(1, token_ids[:, None])
    difference.scatter_(1, token_ids[:, None], -torch.inf)
    odds = difference.logsumexp(1)
    return -torch.nn.functional.softplus(odds, threshold=700)


def exact_lse(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().logsumexp(1)


def ulps(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance in steps of float32 at the exact value."""
    step = torch.exp2(exact.abs().log2().floor() - 23)
    distance = ((value.double() - exact) / step).abs()
    return torch.where(exact.abs() >= NOTHING_CLAIMED_BELOW, distance, 0)


def dropped_share(logits: torch.Tensor) -> torch.Tensor:
    """Float64 [T]: the share of the row's sum that lies below its third bin, or just above."""
    logits = logits.double()
    power = (logits * 1.4426950408889634).round()
    lowest = (power.amax(1, keepdim=True) / 21).floor() * 21 - 42
    shares = (logits - exact_lse(logits)[:, None]).exp()
    return torch.where(power <= lowest, shares, 0.0).sum(1)


def assert_within(
    value: torch.Tensor, exact: torch.Tensor, logits: torch.Tensor, limit_ulps: float
) -> None:
    step = torch.exp2(exact.abs().log2().floor() - 23)
    allowed = limit_ulps * step + dropped_share(logits)
    is_claimed = exact.abs() >= NOTHING_CLAIMED_BELOW
    assert ((value.double() - exact).abs() <= allowed)[is_claimed].all()


def kernel(logits: torch.Tensor, token_ids: torch.Tensor) -> SelectedLogprob:
    return selected_logprob(logits, token_ids, vocab_size=logits.shape[1])


@pytest.fixture(scope="module")
def f0() -> torch.Tensor:
    return benign_rows(24)


@pytest.mark.parametrize("width", [2, 40])
def test_the_float64_oracle_agrees_with_fifty_digits(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = 12 * torch.randn(40, width, generator=generator)
    ids = torch.randint(0, width, (40,), generator=generator)
    ours = exact_logprob(logits, ids)
    with mpmath.workdps(50):
        for row, target, value in zip(logits.tolist(), ids.tolist(), ours.tolist(), strict=True):
            total = mpmath.fsum(mpmath.exp(mpmath.mpf(z)) for z in row)
            true = mpmath.mpf(row[target]) - mpmath.log(total)
            assert abs(value - true) <= abs(true) * 1e-13 + mpmath.mpf(10) ** -40


def test_the_oracle_sees_an_error_of_two_ulp(f0: torch.Tensor) -> None:
    exact = exact_logprob(f0, sampled_ids(f0))
    value = exact.float()
    for _ in range(2):
        value = torch.nextafter(value, torch.tensor(-torch.inf))
    assert ulps(value, exact).min() > 1.5


@pytest.mark.parametrize("offset", MODERATE)
def test_rows_of_a_language_model_are_within_a_step_and_a_half(
    f0: torch.Tensor, offset: float
) -> None:
    # the shifted logits are rounded to float32 first: they are the row whose logprob is asked
    logits = f0 + offset
    likely, unlikely = sampled_ids(f0), torch.arange(24) * 6000
    for ids in (likely, unlikely):
        values = kernel(logits, ids)
        assert ulps(values.logprob, exact_logprob(logits, ids)).max() < 1.5
        assert ulps(values.lse, exact_lse(logits)).max() < 1.5


@pytest.mark.parametrize("offset", [-8000.0, -4000.0, 4000.0, 8000.0])
def test_far_rows_are_within_twice_the_error_of_their_exponentials(
    f0: torch.Tensor, offset: float
) -> None:
    logits = f0 + offset
    ids = sampled_ids(f0)
    values = kernel(logits, ids)
    # 3.4 * 2**-24 for the target and for what stands against it, in steps of 2**-24, and a rounding
    assert ulps(values.logprob, exact_logprob(logits, ids)).max() < 2 * 3.4 + 0.5
    assert ulps(values.lse, exact_lse(logits)).max() < 1


@pytest.mark.parametrize("probability", [0.9999, 0.999, 0.9, 0.5, 0.01])
def test_confident_rows_keep_their_digits(probability: float) -> None:
    rows = torch.stack([peaked_row(probability, seed=seed) for seed in range(6)])
    ids = torch.zeros(6, dtype=torch.int64)
    exact = exact_logprob(rows, ids)
    assert exact.exp().mean().item() == pytest.approx(probability, rel=1e-5)
    assert ulps(kernel(rows, ids).logprob, exact).max() < 1.5


@pytest.mark.parametrize("doubt", [1e-5, 1e-6, 1e-7, 1e-8])
def test_very_confident_rows_lose_only_what_three_bins_drop(doubt: float) -> None:
    # the share that is dropped depends on where in its bin the largest logit falls
    rows = peaked_row(1 - doubt)[None] + torch.arange(0, 15)[:, None]
    ids = torch.zeros(len(rows), dtype=torch.int64)
    exact = exact_logprob(rows, ids)
    assert exact.mean().item() == pytest.approx(-doubt, rel=1e-3)
    logprob = kernel(rows, ids).logprob
    assert_within(logprob, exact, rows, 1.5)
    # 151936 columns of 2**-42
    assert (logprob.double() - exact).abs().max() < 2.0**-24.8


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1, 1.0])
def test_flat_rows(spread: float) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = spread * torch.randn(4, QWEN3_VOCAB_SIZE, generator=generator) + 3
    ids = torch.tensor([0, 75968, 7, QWEN3_VOCAB_SIZE - 1])
    values = kernel(rows, ids)
    assert ulps(values.logprob, exact_logprob(rows, ids)).max() < 1.5
    assert ulps(values.lse, exact_lse(rows)).max() < 1.5


@pytest.mark.parametrize("width", [2, 3, 10, 100])
def test_small_rows_are_never_off_by_more_than_three_steps(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    count = 40_000 // width
    for spread, offset in ((0.5, 0), (4.0, 0), (30.0, 0), (4.0, 950), (4.0, -950)):
        rows = spread * torch.randn(count, width, generator=generator) + offset
        ids = torch.randint(0, width, (count,), generator=generator)
        exact = exact_logprob(rows, ids)
        logprob = kernel(rows, ids).logprob
        assert_within(logprob, exact, rows, 3)
        assert ulps(logprob, exact).median() < 0.5


def test_phantom_columns_of_zeros_never_count_at_any_shift(f0: torch.Tensor) -> None:
    # 640 padding columns that a tile loads as 0 would win once the real logits are shifted down
    rows = f0[:6]
    ids = sampled_ids(rows)
    for shift in (0.0, -20.0, -40.0):
        shifted = rows + shift
        padded = torch.nn.functional.pad(shifted, (0, 640), value=0.0)
        ours = selected_logprob(padded, ids, vocab_size=QWEN3_VOCAB_SIZE)
        bare = kernel(shifted, ids)
        assert torch.equal(ours.logprob, bare.logprob)
        assert torch.equal(ours.lse, bare.lse)
        exact = exact_logprob(shifted, ids)
        assert ulps(ours.logprob, exact).max() < 1.5
        if shift == -40.0:
            assert (exact_logprob(padded, ids) - exact).abs().min() > 8


def test_a_shift_that_is_exact_in_float32_leaves_every_logprob_as_it_is() -> None:
    # on a grid of 1/256 within +-16 these shifts round nothing, so the exact logprob is the same;
    # the polynomial's error moves, so the bits may differ by the steps of accuracy
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(8, QWEN3_VOCAB_SIZE, generator=generator) * 512).round() / 256
    ids = sampled_ids(rows)
    exact = exact_logprob(rows, ids)
    for shift in (-1024.0, -20.0, 0.0, 64.0, 2000.0):
        assert torch.equal((rows + shift) - shift, rows)
        assert ulps(kernel(rows + shift, ids).logprob, exact).max() < 1.5


@pytest.mark.parametrize("cuts", [[38016, 76032, 114048], [1, 151935], [75968], [18944, 100000]])
def test_every_id_at_a_shard_s_edge_has_one_owner(f0: torch.Tensor, cuts: list[int]) -> None:
    bounds = [0, *cuts, 152064]
    edges = {0, 151935, *cuts, *(cut - 1 for cut in cuts)}
    ids = torch.tensor(sorted(edge for edge in edges if edge < QWEN3_VOCAB_SIZE))
    rows = torch.nn.functional.pad(f0[: len(ids)], (0, 128), value=torch.nan)
    states = [
        expsum_state(rows[:, s:e], token_ids=ids, vocab_start=s, vocab_size=QWEN3_VOCAB_SIZE)
        for s, e in pairwise(bounds)
    ]
    owners = torch.stack([state.has_target for state in states]).sum(0)
    assert (owners == 1).all()
    merged = states[0]
    for state in states[1:]:
        merged = merge(merged, state)
    exact = exact_logprob(rows[:, :QWEN3_VOCAB_SIZE], ids)
    assert ulps(finish(merged).logprob, exact).max() < 1.5


def test_a_logprob_is_never_above_zero_and_zero_is_positive() -> None:
    rows = torch.full((3, 100), -60.0)
    rows[:, 0] = torch.tensor([0.0, 60.0, 8000.0])
    logprob = kernel(rows, torch.zeros(3, dtype=torch.int64)).logprob
    assert (logprob <= 0).all()
    assert logprob[2].item() == 0
    assert not torch.signbit(logprob[2])


def test_probabilities_add_up_to_one() -> None:
    row = benign_rows(1, vocab_size=3000)
    logprobs = kernel(row.expand(3000, -1).contiguous(), torch.arange(3000)).logprob
    assert logprobs.double().exp().sum().item() == pytest.approx(1, abs=1e-6)
