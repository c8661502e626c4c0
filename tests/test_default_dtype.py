"""Torch's default dtype, which engines set while they load a model, moves no bit."""

from collections.abc import Iterator

import pytest
import torch
from loss_batch import SETTINGS, loss_of, whole_batch, whole_part
from torch import Tensor

from rlk_kernels import divergence, entropy, exact_mean, row_statistics, selected_logprob

IDS = torch.tensor([3, 4, 46])


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def every_door(logits: Tensor) -> list[Tensor]:
    logits = logits.clone().requires_grad_()
    other = logits.detach().flip(0)
    results = []
    for backend in ("reference", "cpu"):
        values = selected_logprob(logits, IDS, vocab_size=47, temperature=0.7, backend=backend)
        (gradient,) = torch.autograd.grad((values.logprob + 2 * values.lse).sum(), logits)
        results += [values.logprob, values.lse, gradient]
    value = entropy(logits, vocab_size=47)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    rows = row_statistics(logits, IDS, vocab_size=47, top_k=3)
    pair = divergence([(0, logits)], [(0, other)], vocab_size=47)
    statistics = [rows.entropy, rows.target_rank, rows.top_logits, rows.top_ids]
    mean = exact_mean(logits, dim=1)
    return [*results, value, gradient, *statistics, pair.kl_pq, pair.kl_qp, pair.js, pair.tv, mean]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_every_door_gives_the_same_bits(default_dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    expected = every_door(logits)
    torch.set_default_dtype(default_dtype)
    assert_same(every_door(logits), expected)


@pytest.mark.parametrize(("setting", "has_reference"), [("tokens, k3", True), ("constant", False)])
def test_a_loss_has_the_same_bits(
    default_dtype: torch.dtype, setting: str, has_reference: bool
) -> None:
    part = whole_part(whole_batch(has_reference=has_reference))
    expected = loss_of(part, SETTINGS[setting])
    torch.set_default_dtype(default_dtype)
    assert_same([loss_of(part, SETTINGS[setting]).loss], [expected.loss])
