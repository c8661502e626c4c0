"""Metrics against numbers worked out by hand, and bits against what float32 steps are."""

import math

import numpy as np
import pytest
from test_compare import _table

from rlk_align.compare.bits import compare_bits
from rlk_align.compare.budget import drift_budget
from rlk_align.compare.metrics import drift_metrics, spread


def floats(*values):
    return np.array(values, dtype=np.float32)


def test_a_spread_is_what_its_names_say():
    values = spread(np.array([-3.0, 1.0, 0.0, 4.0]))
    assert values.logp_diff_mean == 0.5
    assert values.logp_abs_diff_mean == 2
    assert values.logp_diff_rms == math.sqrt(26 / 4)
    assert values.logp_abs_diff_p50 == 2
    assert values.logp_abs_diff_p95 == pytest.approx(3.85)
    assert values.logp_abs_diff_max == 4


def test_sums_are_exact_in_any_order():
    values = np.array([1e16, 1.0, -1e16, 1.0] * 5)
    assert spread(values).logp_diff_mean == spread(values[::-1]).logp_diff_mean == 0.5


def metrics_of(rollout, trainer, *, sequence=None):
    table = _table(rollout, rollout, trainer, trainer)
    if sequence is not None:
        object.__setattr__(table, "sequence", np.array(sequence))
    return drift_metrics(table, drift_budget(table).drift)


def test_estimates_by_hand():
    d = (0.5, -1.0, 0.0, 0.25)
    metrics = metrics_of(floats(-2, -2, -2, -2), floats(*(x - 2 for x in d)), sequence=[0, 0, 1, 2])
    assert metrics.ratio_mean == pytest.approx(sum(map(math.exp, d)) / 4, rel=1e-15)
    assert metrics.kl_k1 == 0.0625
    assert metrics.kl_k3 == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 4, rel=1e-14)
    # sequences: (0.5 + 1) / 2, 0, 0.25
    assert metrics.logp_abs_diff_sample_mean == pytest.approx(1 / 3)
    assert metrics.diff_frac_gt == {"1e-6": 0.75, "1e-3": 0.75, "ln1.1": 0.75, "ln2": 0.25, "2": 0}


def test_k3_of_a_tiny_difference_keeps_its_digits():
    # exp(d) - 1 - d in float64 would be off by a tenth here
    d = 3 * 2.0**-27
    metrics = metrics_of(floats(-0.0625 - d), floats(-0.0625))
    assert metrics.kl_k3 == pytest.approx(d * d / 2, rel=1e-6, abs=0)


def test_confident_disagreements_are_counted():
    rollout = floats(math.log(0.6), math.log(0.6), -1, math.log(0.6))
    metrics = metrics_of(rollout, floats(-2, -5, -9, -0.5))
    assert metrics.confident_disagreement_count == 1


def test_a_ratio_beyond_float64_is_none_and_not_infinity():
    metrics = metrics_of(floats(-2000), floats(-1))
    assert metrics.ratio_mean is None
    assert metrics.kl_k3 is None
    assert metrics.kl_k1 == -1999


def test_bits_count_float32_steps():
    base = np.float32(-1.5)
    steps = [0, 1, 2, 4, 5, 16, 17, 64, 65, 256, 257]
    ours = np.repeat(base, len(steps))
    theirs = (base.view(np.int32) + np.array(steps, dtype=np.int32)).view(np.float32)
    bits = compare_bits(ours, theirs)
    assert bits.ulp_histogram == {
        "0": 1, "1": 1, "2-4": 2, "5-16": 2, "17-64": 2, "65-256": 2, ">256": 1,
    }  # fmt: skip
    assert (bits.numel, bits.equal_count, bits.max_ulp, bits.first_mismatch) == (11, 1, 257, 1)


def test_zeros_of_either_sign_differ_in_bits_but_not_in_steps():
    bits = compare_bits(floats(0.0, -0.0), floats(-0.0, -0.0))
    assert (bits.mismatch_count, bits.signed_zero_count, bits.max_ulp) == (1, 1, 0)
    tiny = np.array([1], dtype=np.int32).view(np.float32)
    # one step on either side of zero
    assert compare_bits(-tiny, tiny).max_ulp == 2


def test_equal_columns_have_no_mismatch():
    bits = compare_bits(floats(-1, -2), floats(-1, -2))
    assert (bits.mismatch_count, bits.first_mismatch) == (0, None)
