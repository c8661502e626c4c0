"""Advantages and exponentials have all their digits; contracts refuse what cannot be meant."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batch import SETTINGS, loss_contract

from rlk_align.files import canonical_json
from rlk_align.loss import LossContract
from rlk_align.loss.advantage import group_advantages
from rlk_align.loss.exponential import exponential

rewards = st.lists(
    st.floats(-100, 100, width=32) | st.sampled_from([0.0, 1.0, 0.1]), min_size=1, max_size=12
)


@given(rewards)
@settings(max_examples=200, deadline=None)
def test_advantages_are_those_of_exact_sums(values: list[float]) -> None:
    contract = loss_contract(std_epsilon=0.0)
    given_rewards = torch.tensor(values, dtype=torch.float32)
    ids = torch.zeros(len(values), dtype=torch.int64)
    ours = group_advantages(given_rewards, ids, contract)
    exact = [Fraction(value) for value in given_rewards.tolist()]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    if not variance:
        assert not ours.any()
        return
    with mpmath.workdps(40):
        std = mpmath.sqrt(mpmath.mpf(variance.numerator) / variance.denominator)
        for value, advantage in zip(exact, ours.tolist(), strict=True):
            deviation = value - mean
            truth = float(mpmath.mpf(deviation.numerator) / deviation.denominator / std)
            # a deviation is taken from a mean that is rounded to float64
            allowed = 1e-14 + float(abs(mean) * Fraction(2) ** -52) / float(std)
            assert advantage == pytest.approx(truth, rel=1e-14, abs=allowed)
    flipped = group_advantages(given_rewards.flip(0), ids, contract)
    assert torch.equal(flipped.flip(0), ours)


def test_flat_groups_and_groups_of_one_have_no_advantage() -> None:
    rewards_S = torch.tensor([0.1, 0.1, 0.1, 7.0, 0.0, 2.0])
    ids = torch.tensor([1, 1, 1, 2, 3, 3])
    for scale, last in (("mean_and_std", 1.0), ("mean", 1.0)):
        contract = loss_contract(advantage=scale, std_epsilon=0.0)
        advantages = group_advantages(rewards_S, ids, contract)
        assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0, -last, last]


def test_exponential_is_right_to_the_last_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(400, generator=generator, dtype=torch.float64)
    x = torch.cat([near, near * 1e-3, near * 1e-7, near * 30, torch.tensor([0.0, 64, -690])])
    ours = exponential(x)
    with mpmath.workdps(60):
        for point, value, above in zip(*(t.tolist() for t in (x, *ours)), strict=True):
            exact = mpmath.exp(point)
            assert abs(value - exact) <= 4e-16 * exact
            truth = exact - 1 - mpmath.mpf(point)
            assert abs(above - truth) <= 2e-15 * truth
    assert exponential(torch.tensor([-5000.0, -torch.inf]).double()).value.tolist()[0] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_low": 1.5}, "clip_low should be a number from 0 to 1, got 1.5"),
        ({"clip_high": -0.1}, "clip_high should be a number from 0"),
        ({"clip_high": math.nan}, "clip_high should be a number"),
        ({"clip_low": True}, "clip_low should be a number from 0 to 1, got True"),
        ({"kl": "k2"}, "kl should be one of k3, k1, got 'k2'"),
        ({"kl_weight": 0.1}, "kl_weight is 0.1, but kl is None"),
        ({"advantage": "std"}, "advantage should be one of mean_and_std, mean, got 'std'"),
        ({"normalizer": "tokens"}, "normalizer should be one of active_tokens, sequence_mean, con"),
        ({"normalizer": "constant"}, "constant should be a number from 1 to .*, got None"),
        ({"normalizer": "constant", "constant": 0.5}, "constant should be a number from 1"),
        ({"constant": 5.0}, "constant is 5.0, but the normalizer is active_tokens"),
        ({"group_size": True}, "group_size should be an integer, got True"),
        ({"group_size": 0}, "group_size should be 1 or more, got 0"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_contract(**changes)


def test_the_contract_of_the_logprobs_must_fit() -> None:
    logprob = loss_contract().logprob
    for changes, message in (
        ({"role": "infer"}, "have role train, got infer"),
        ({"determinism_scope": "fixed_topology"}, "promised for fixed_topology"),
    ):
        with pytest.raises(ValueError, match=message):
            LossContract(logprob=replace(logprob, **changes))
    with pytest.raises(ValueError, match="logprob should be a LogprobContract, got None"):
        LossContract(logprob=None)


def test_contracts_are_told_apart() -> None:
    contracts = [loss_contract(**settings) for settings in ({}, *SETTINGS.values())]
    assert len({contract.settings_fingerprint() for contract in contracts}) == 4
    again = loss_contract(kl="k3", clip_high=0.28, kl_weight=0.04)
    assert again.settings_fingerprint() == contracts[1].settings_fingerprint()
    told = json.loads(canonical_json(contracts[2].to_dict()))
    assert told["normalizer"] == "sequence_mean"
    assert told["logprob"]["role"] == "train"
