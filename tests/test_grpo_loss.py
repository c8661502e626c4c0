"""Loss and gradient are those of plain float64, within the roundings that are stated.

Plain float64 is written here from the formulas, with torch's autograd. Letters: T rows, V columns,
S sequences.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loss_batch import (
    GROUPS,
    REWARDS,
    SETTINGS,
    VOCAB_SIZE,
    Batch,
    loss_contract,
    loss_of,
    selected,
    whole_batch,
    whole_part,
)

from rlk_align.loss import GrpoLoss, LossContract
from rlk_align.loss.batch import CheckedRows, checked_rows
from rlk_align.loss.token_terms import token_terms

STEP = 2.0**-24
"""Relative error of one rounding to float32."""


class Plain(NamedTuple):
    """The formulas in float64."""

    policy_T: torch.Tensor
    kl_T: torch.Tensor
    weight_T: torch.Tensor
    """1 over the normalizer, 0 in inactive rows."""
    scale_T: torch.Tensor
    """Sum of the sizes of what the derivative by the logprob is made of."""
    loss: torch.Tensor


def plain_advantages(contract: LossContract) -> torch.Tensor:
    rewards, advantages = torch.tensor(REWARDS).double(), torch.zeros(10, dtype=torch.float64)
    for group in set(GROUPS):
        own = torch.tensor(GROUPS) == group
        deviation = rewards[own] - rewards[own].mean()
        if contract.advantage == "mean_and_std":
            deviation = deviation / (deviation.square().mean().sqrt() + contract.std_epsilon)
        advantages[own] = deviation
    return advantages


def plain_loss(logprob_T: torch.Tensor, batch: Batch, contract: LossContract) -> Plain:
    rows, active = batch.rows, batch.is_active
    sequence = rows.sequence_ids_T
    advantage = plain_advantages(contract)[sequence]
    ratio = (logprob_T - torch.where(active, rows.old_logprob_T, 0.0)).exp()
    clipped = ratio.clamp(1 - contract.clip_low, 1 + contract.clip_high)
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    kl, scale = torch.zeros_like(policy), (ratio * advantage).abs()
    if rows.ref_logprob_T is not None:
        x = rows.ref_logprob_T - logprob_T
        kl = x.exp() - x - 1 if contract.kl == "k3" else -x
        scale = scale + contract.kl_weight * (x.exp() + 1)
    count = torch.zeros(10, dtype=torch.float64).index_add(0, sequence, active.double())
    divisor = {
        "active_tokens": count.sum().expand(10),
        "sequence_mean": count * (count > 0).sum(),
        "constant": torch.full((10,), contract.constant or 0.0, dtype=torch.float64),
    }[contract.normalizer]
    weight = active / divisor[sequence].clamp(min=1)
    loss = ((policy + contract.kl_weight * kl) * weight).sum()
    return Plain(policy, kl, weight, scale * weight, loss)


def run(batch: Batch, *, rows: Any = None, sequences: Any = None, **settings: Any) -> GrpoLoss:
    part = whole_part(batch)
    part |= {"rows": rows or batch.rows, "sequences": sequences or batch.sequences}
    return loss_of(part, settings)


def rows_of(batch: Batch, contract: LossContract) -> CheckedRows:
    return checked_rows(batch.rows, batch.is_active, needs_reference=contract.kl is not None)


@pytest.fixture(params=SETTINGS)
def contract(request: pytest.FixtureRequest) -> LossContract:
    return loss_contract(**SETTINGS[request.param])


@pytest.fixture
def batch(contract: LossContract) -> Batch:
    return whole_batch(has_reference=contract.kl is not None)


@pytest.fixture
def result(batch: Batch, request: pytest.FixtureRequest) -> GrpoLoss:
    return run(batch, **SETTINGS[request.node.callspec.params["contract"]])


def test_loss_of_the_same_logprobs_is_float64s(
    batch: Batch, contract: LossContract, result: GrpoLoss
) -> None:
    plain = plain_loss(result.logprob_T.double(), batch, contract)
    # each token is rounded to float32 once, and the loss at the end
    rounding = plain.policy_T.abs() + contract.kl_weight * plain.kl_T.abs()
    allowed = STEP * ((rounding * plain.weight_T).sum() + plain.loss.abs()) + 1e-15
    assert (result.loss - plain.loss).abs() <= allowed
    active = batch.is_active
    for sequence in range(10):
        own = active & (batch.rows.sequence_ids_T == sequence)
        exact = math.fsum(plain.policy_T[own].float().double().tolist())
        assert float(result.totals.policy_S[sequence]) == pytest.approx(exact, rel=1e-7, abs=1e-7)
        if result.totals.kl_S is not None:
            kl = float(plain.kl_T[own].sum())
            assert float(result.totals.kl_S[sequence]) == pytest.approx(kl, rel=1e-6, abs=1e-7)


def test_gradient_of_the_logits_is_float64s(
    batch: Batch, contract: LossContract, request: pytest.FixtureRequest
) -> None:
    part = whole_part(batch)
    settings = SETTINGS[request.node.callspec.params["contract"]]
    loss_of(part, settings, "expsum-cpu").loss.backward()
    logits = batch.logits[:, :VOCAB_SIZE].double().requires_grad_()
    ids = torch.where(batch.is_active, batch.token_ids, 0)
    logprob = logits.log_softmax(1).gather(1, ids[:, None])[:, 0]
    plain = plain_loss(logprob, batch, contract)
    plain.loss.backward()
    error = (part["logits_TL"].grad - logits.grad).abs().amax(1)
    # 1.5 float32 steps of a logprob below 16 nats move the ratio by 1.5 * 2**-20 of itself; a
    # rounding of the slope and a few of the probability come on top
    assert logprob[batch.is_active].min() > -16
    assert (error <= 2.0**-19 * plain.scale_T.detach()).all()
    assert (logits.grad.abs().amax(1) > 0).sum() > 80


def test_slope_is_the_derivative(batch: Batch, contract: LossContract, result: GrpoLoss) -> None:
    wide = result.logprob_T.double().requires_grad_()
    plain = plain_loss(wide, batch, contract)
    (plain.policy_T + contract.kl_weight * plain.kl_T)[batch.is_active].sum().backward()
    rows = rows_of(batch, contract)
    advantage = plain_advantages(contract)[rows.sequence_ids_T]
    terms = token_terms(result.logprob_T, rows, advantage, contract)
    torch.testing.assert_close(terms.slope_T, wide.grad, rtol=1e-13, atol=1e-13)
    clipped = terms.is_clipped_low_T | terms.is_clipped_high_T
    assert clipped.any()
    assert not (clipped & ~batch.is_active).any()


# exp(0.3) is above both bounds' upper one, exp(-0.3) below the lower one
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "policy", "slope"),
    [
        (0.0, 1.0, -1.0, -1.0),
        (0.0, -1.0, 1.0, 1.0),
        (0.3, 1.0, -1.28, 0.0),
        (0.3, -1.0, math.exp(0.3), math.exp(0.3)),
        (-0.3, 1.0, -math.exp(-0.3), -math.exp(-0.3)),
        (-0.3, -1.0, 0.8, 0.0),
        (0.3, 0.0, 0.0, 0.0),
        (-800.0, 1.0, 0.0, 0.0),
    ],
)
def test_clipping(log_ratio: float, advantage: float, policy: float, slope: float) -> None:
    rows = CheckedRows(
        sequence_ids_T=torch.zeros(1, dtype=torch.int64),
        is_active_T=torch.ones(1, dtype=torch.bool),
        old_logprob_T=torch.tensor([-1.0]),
        ref_logprob_T=None,
    )
    logprob = torch.tensor([-1.0 + log_ratio])
    contract = loss_contract(clip_high=0.28)
    terms = token_terms(logprob, rows, torch.tensor([advantage]).double(), contract)
    assert float(terms.policy_T) == pytest.approx(policy, rel=1e-6)
    assert float(terms.slope_T) == pytest.approx(slope, rel=1e-6)
    assert bool(terms.is_clipped_high_T) == (policy == -1.28)
    assert bool(terms.is_clipped_low_T) == (policy == 0.8)


def test_at_the_old_policy_the_ratio_is_one() -> None:
    batch, settings = whole_batch(has_reference=False), SETTINGS["constant"]
    old = run(batch, **settings).logprob_T
    result = run(batch, rows=replace(batch.rows, old_logprob_T=old), **settings)
    expected = -(result.num_active_S * plain_advantages(loss_contract(**settings)))
    torch.testing.assert_close(result.totals.policy_S, expected, rtol=1e-6, atol=1e-6)
    assert not result.totals.num_clipped_low_S.any()
    assert not result.totals.num_clipped_high_S.any()


def test_a_constant_of_all_tokens_is_the_mean_over_tokens() -> None:
    batch = whole_batch(has_reference=False)
    num_active = float(batch.is_active.sum())
    constant = run(batch, normalizer="constant", constant=num_active)
    assert torch.equal(run(batch).loss, constant.loss)


def test_a_weight_of_zero_reports_the_kl_and_leaves_it_out() -> None:
    with_kl, without = run(whole_batch(), kl="k3"), run(whole_batch(has_reference=False))
    assert torch.equal(with_kl.loss, without.loss)
    assert with_kl.totals.kl_S is not None
    assert (with_kl.totals.kl_S[with_kl.num_active_S > 0] > 0).all()
    assert without.totals.kl_S is None


def test_sequences_without_active_token_count_in_their_group_and_not_in_the_mean() -> None:
    result = run(whole_batch(has_reference=False), normalizer="sequence_mean")
    assert result.num_active_S.tolist()[4] == result.num_active_S.tolist()[8] == 0
    assert result.advantage_S[8] != 0
    mean = result.totals.policy_S / result.num_active_S.clamp(min=1)
    torch.testing.assert_close(result.loss.double(), mean.sum() / 8, rtol=1e-6, atol=1e-9)


def test_no_order_of_rows_and_sequences_moves_a_bit() -> None:
    batch, settings = whole_batch(), SETTINGS["tokens, k3"]
    order = torch.randperm(len(batch.token_ids), generator=torch.Generator().manual_seed(1))
    table_order = torch.randperm(10, generator=torch.Generator().manual_seed(2))
    shuffled = Batch(
        *(tensor[order] for tensor in (batch.logits, batch.token_ids, batch.is_active)),
        selected(batch.rows, order),
        batch.sequences,
    )
    first = run(batch, **settings)
    second = run(shuffled, sequences=selected(batch.sequences, table_order), **settings)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.totals.policy_S, second.totals.policy_S)
    assert torch.equal(first.totals.kl_S, second.totals.kl_S)


def test_float32_addition_does_move_them() -> None:
    batch, settings = whole_batch(), SETTINGS["tokens, k3"]
    logprob = run(batch, **settings).logprob_T
    plain = plain_loss(logprob.double(), batch, loss_contract(**settings))
    terms = plain.policy_T[batch.is_active].float()
    sums = {float(np.cumsum(terms.roll(n).numpy())[-1]) for n in range(len(terms))}
    assert len(sums) > 3


def test_errors_of_a_process_alone_name_no_rank() -> None:
    batch = whole_batch()
    with pytest.raises(ValueError, match=r"^ref_logprob_T is given, but the contract has no KL"):
        run(batch)
    nobody = batch._replace(is_active=torch.zeros(206, dtype=torch.bool))
    nobody.token_ids.fill_(-100)
    empty = replace(batch.sequences, num_active=torch.zeros(10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^no token of the batch is active"):
        run(nobody, kl="k3", sequences=empty)
    batch = whole_batch()
    large = {"normalizer": "constant", "constant": 1.0, "kl": "k3", "kl_weight": 2.0**32}
    far = replace(batch.rows, ref_logprob_T=run(batch, **large).logprob_T + 63)
    with pytest.raises(ValueError, match=r"^the loss is beyond float32"):
        run(batch, rows=far, **large)


def test_the_example_of_the_docs_runs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "loss.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert names["logits"].grad.abs().sum() > 0
    assert not names["logits"].grad[2].any()
