"""A sum of float32 values is the exact real sum rounded once, whatever the order and the split."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_kernels import sum_state as module
from rlk_kernels.exact_sum import exact_mean, exact_sum
from rlk_kernels.sum_state import MAX_VALUES, SumState, finish_sum, merge_sums, sum_state

finite_bits = st.integers(0, 2**32 - 1).filter(lambda bits: (bits >> 23) & 255 != 255)
# values that cancel, tie or are subnormal are what a sum gets wrong
close_bits = st.sampled_from([0x3F800000, 0xBF800000, 0x33800000, 0x33000000, 1, 0x80000001])
values = st.lists(st.one_of(finite_bits, close_bits), max_size=40).map(
    lambda bits: torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())
)


def exact(numbers: torch.Tensor) -> Fraction:
    return sum((Fraction(x) for x in numbers.double().tolist()), Fraction(0))


def nearest_float32(number: Fraction) -> float:
    """By comparing the neighbours; of two equally near ones the even."""
    guess = np.float32(float(number))
    near = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    return float(
        min(
            (x for x in near if np.isfinite(x)),
            key=lambda x: (abs(Fraction(float(x)) - number), int(x.view(np.uint32)) & 1),
        )
    )


@given(values)
@settings(max_examples=150, deadline=None)
def test_a_sum_is_the_exact_one_rounded_once(numbers: torch.Tensor) -> None:
    state, truth = sum_state(numbers), exact(numbers)
    assert float(finish_sum(state, torch.float64)) == float(truth)
    if abs(truth) < Fraction(2) ** 127:
        assert float(finish_sum(state)) == nearest_float32(truth)


@given(values, st.randoms(use_true_random=False), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_no_order_split_or_tile_moves_a_bit(numbers, random, tile_elements) -> None:
    whole = sum_state(numbers)
    parts = [numbers[random.sample(range(len(numbers)), len(numbers))]]
    while len(parts) < 5:
        part = parts.pop(random.randrange(len(parts)))
        cut = random.randint(0, len(part))
        parts += [part[:cut], part[cut:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_ELEMENTS", tile_elements)
        states = [sum_state(part) for part in parts]
    while len(states) > 1:
        a, b = (states.pop(random.randrange(len(states))) for _ in range(2))
        states.append(merge_sums(a, b))
    assert torch.equal(states[0].bins, whole.bins)
    assert states[0].num_values == whole.num_values == len(numbers)


def test_float_addition_does_move_them() -> None:
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e3
    backwards = numbers.flip(0)
    assert np.cumsum(numbers.numpy())[-1] != np.cumsum(backwards.numpy())[-1]
    assert torch.equal(exact_sum(numbers), exact_sum(backwards))
    assert float(finish_sum(sum_state(numbers), torch.float64)) == math.fsum(numbers.tolist())


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1.0, 2.0**-24], 1.0),  # a tie goes to even
        ([1.0, 2.0**-23, 2.0**-24], 1.0 + 2.0**-22),
        ([1.0, 2.0**-24, 2.0**-149], 1.0 + 2.0**-23),  # a tie only for float64
        ([1.0, 2.0**-24, -(2.0**-149)], 1.0),
        ([-1.0, -(2.0**-24), -(2.0**-100)], -1.0 - 2.0**-23),
        ([3e38, 3e38, -3e38], 3e38),  # no step overflows on the way
        ([2.0**127, 2.0**-149, -(2.0**127)], 2.0**-149),
        ([2.0**-149] * 3, 3 * 2.0**-149),
        ([-0.0, -0.0], 0.0),
        ([], 0.0),
    ],
)
def test_hard_sums(numbers: list[float], expected: float) -> None:
    total = exact_sum(torch.tensor(numbers))
    assert torch.equal(total, torch.tensor(expected))
    assert not total.signbit() or expected < 0


@pytest.mark.parametrize("gap", [54, 60, 61, 62, 63, 64, 66, 75, 90, 93, 95, 96, 110])
def test_whatever_lies_below_a_tie_breaks_it(gap: int) -> None:
    # a leading bit in each place of a digit
    top = 2.0 ** torch.arange(-20.0, 20.0)
    for half, dtype in ((24, torch.float32), (53, torch.float64)):
        numbers = torch.stack([top, top * 2.0**-half, top * 2.0**-gap], dim=1)
        above = top.to(dtype) + top.to(dtype) * 2.0 ** (1 - half)
        assert torch.equal(finish_sum(sum_state(numbers, 1), dtype), above)
        assert torch.equal(finish_sum(sum_state(numbers[:, :2], 1), dtype), top.to(dtype))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", [3.4028234663852886e38, 2.0**-149, 1.9999998807907104])
def test_as_many_values_as_allowed_do_not_overflow(value: float, sign: int) -> None:
    one = sum_state(torch.tensor(sign * value))
    full = SumState(bins=one.bins * MAX_VALUES, num_values=MAX_VALUES)
    truth = Fraction(sign * float(np.float32(value))) * MAX_VALUES
    assert float(finish_sum(full, torch.float64)) == float(truth)
    with pytest.raises(ValueError, match="at most 2147483648 values, got 2147483649"):
        merge_sums(full, one)


def test_full_bins_carry() -> None:
    largest = (2**31 - 2**7) * MAX_VALUES
    for sign in (1, -1):
        state = SumState(bins=torch.full((32,), sign * largest), num_values=MAX_VALUES)
        truth = Fraction(sign * largest * sum(2 ** (8 * k) for k in range(32)), 2**150)
        assert float(finish_sum(state, torch.float64)) == float(truth)


# one value, one tile, one past a tile
@pytest.mark.parametrize("size", [1, module.TILE_ELEMENTS, module.TILE_ELEMENTS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_along_a_dimension(size: int, dtype: torch.dtype) -> None:
    numbers = torch.randn(2, size, 3, generator=torch.Generator().manual_seed(size)).to(dtype)
    along = exact_sum(numbers, dim=1)
    unrounded = finish_sum(sum_state(numbers, 1), torch.float64)
    assert along.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            assert torch.equal(along[row, column], exact_sum(numbers[row, :, column]))
            truth = math.fsum(numbers[row, :, column].tolist())
            assert float(unrounded[row, column]) == truth
    assert torch.equal(exact_sum(numbers, dim=-2), along)


def test_gradients() -> None:
    numbers = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (exact_sum(numbers, dim=1) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None].expand(4, 5)
    assert torch.equal(numbers.grad, expected)
    half = numbers.detach().bfloat16().requires_grad_()
    exact_mean(half).backward()
    assert torch.equal(half.grad, torch.full((4, 5), 1 / 20).bfloat16())


def test_a_mean_is_the_exact_sum_divided_once() -> None:
    numbers = torch.tensor([1e30, 1.0, -1e30, 4.0, 5.0, 6.0, 7.0])
    assert torch.equal(exact_mean(numbers), torch.tensor(23.0 / 7.0))
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    assert torch.equal(exact_mean(largest), largest[0])
    with pytest.raises(ValueError, match="at least one value"):
        exact_mean(torch.empty(0))


@pytest.mark.parametrize(("value", "name"), [(torch.nan, "nan"), (-torch.inf, "-inf")])
def test_values_that_are_not_finite_are_named(value: float, name: str) -> None:
    numbers = torch.zeros(3, 4)
    numbers[1, 2] = value
    with pytest.raises(ValueError, match=rf"values\[1, 2\] is {name}"):
        exact_sum(numbers, dim=0)


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float64; math\.fsum adds float64 exactly"):
        exact_sum(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="at most 2147483648 values"):
        sum_state(torch.zeros(1).expand(MAX_VALUES + 1))
    beyond = torch.tensor([[1.0, 2.0], [3e38, 3e38]])
    with pytest.raises(ValueError, match=r"the sum\[1\] is beyond float32"):
        exact_sum(beyond, dim=1)
    assert float(finish_sum(sum_state(beyond, 1), torch.float64)[1]) == 2 * float(np.float32(3e38))
    with pytest.raises(ValueError, match="one shape"):
        merge_sums(sum_state(beyond, 1), sum_state(beyond))
    with pytest.raises(ValueError, match="finished as float32 or float64"):
        finish_sum(sum_state(beyond), torch.bfloat16)
