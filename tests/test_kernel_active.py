"""Inactive rows are exactly zero, whatever they hold, and change no bit of the others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlk_kernels import selected_logprob

ACTIVE = torch.tensor([True, False, True, False, True, False])


def results(logits: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, lse and gradient."""
    logits = logits.clone().requires_grad_()
    values = selected_logprob(logits, ids, vocab_size=40, **options)
    upstream = torch.linspace(-1, 2, len(ids))
    torch.autograd.backward([values.logprob, values.lse], [upstream, 1 - upstream])
    assert logits.grad is not None
    return values.logprob.detach(), values.lse.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_inactive_rows_are_zero_and_the_others_as_ever(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    sound = torch.randn(6, 40, generator=generator).to(dtype)
    ids = torch.randint(0, 40, (6,), generator=generator)
    expected = results(sound, ids, backend=backend)
    logits = sound.clone()
    logits[1] = torch.nan
    logits[3, ::2], logits[3, 1::2] = torch.inf, torch.finfo(dtype).max
    logits[5] = -torch.inf
    masked_ids = torch.where(torch.tensor([True, False, True, True, True, False]), ids, -100)
    ours = results(logits, masked_ids, backend=backend, active_mask=ACTIVE)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a[ACTIVE], b[ACTIVE])
        assert (a[~ACTIVE] == 0).all()
        assert not torch.signbit(a[~ACTIVE]).any()


def test_a_gradient_that_is_no_number_does_not_reach_inactive_rows() -> None:
    logits = torch.randn(6, 40, requires_grad=True)
    values = selected_logprob(logits, torch.arange(6), vocab_size=40, active_mask=ACTIVE)
    values.logprob.backward(torch.where(ACTIVE, 1.0, torch.nan))
    assert logits.grad is not None
    assert (logits.grad[~ACTIVE] == 0).all()


def test_all_rows_may_be_inactive() -> None:
    ours = results(
        torch.full((6, 40), torch.nan),
        torch.full((6,), -100),
        active_mask=torch.zeros(6, dtype=torch.bool),
    )
    assert all((values == 0).all() for values in ours)


def test_int32_ids_and_another_ignore_index_are_taken() -> None:
    ids = torch.tensor([1, -1, 2, 3, 4, -1], dtype=torch.int32)
    logits = torch.randn(6, 40)
    ours = results(logits, ids, active_mask=ACTIVE, ignore_index=-1)
    plain = results(logits, ids.clamp(min=0), active_mask=ACTIVE)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("row", "token_id", "message"),
    [
        (2, -100, r"row 2: token id -100 is outside the vocabulary \[0, 40\); ignore_index stands"),
        (2, 40, r"row 2: token id 40 is outside the vocabulary \[0, 40\)$"),
        (3, 40, r"row 3: token id 40 is outside the vocabulary \[0, 40\)$"),
        (3, -1, r"row 3: token id -1 is outside the vocabulary \[0, 40\)$"),
    ],
)
def test_ids_without_a_place_are_refused_with_their_row(
    row: int, token_id: int, message: str
) -> None:
    ids = torch.tensor([1, -100, 2, 3, 4, -100])
    ids[row] = token_id
    with pytest.raises(ValueError, match=message):
        selected_logprob(torch.zeros(6, 40), ids, vocab_size=40, active_mask=ACTIVE)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_active_rows_are_checked_as_ever(backend: str) -> None:
    logits = torch.zeros(6, 40)
    logits[3], logits[4] = torch.nan, -torch.inf
    with pytest.raises(ValueError, match="row 4: every logit is masked"):
        selected_logprob(
            logits, torch.arange(6), vocab_size=40, active_mask=ACTIVE, backend=backend
        )
    logits[4, 7] = torch.nan
    with pytest.raises(ValueError, match="row 4: logit of token id 7 is NaN"):
        selected_logprob(
            logits, torch.arange(6), vocab_size=40, active_mask=ACTIVE, backend=backend
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"active_mask": ACTIVE[1:]},
            r"bool \[6\] on cpu, one per row of the logits, got torch.bo",
        ),
        ({"active_mask": ACTIVE.long()}, r"got torch.int64 \[6\] on cpu"),
        ({"active_mask": ACTIVE.tolist()}, "bool tensor or None, got list"),
        ({"ignore_index": 39}, r"outside the vocabulary \[0, 40\), got 39"),
        ({"ignore_index": None}, "ignore_index should be an integer, got None"),
        ({"temperature": "hot"}, "temperature should be a number, got 'hot'"),
        ({"backend": None}, "backend should be a name, got None"),
        ({"vocab_start": 0.0}, r"vocab_start should be an integer, got 0\.0"),
    ],
)
def test_a_broken_argument_is_one_clear_sentence(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"vocab_size": 40, "active_mask": ACTIVE, **change}
    with pytest.raises(ValueError, match=message):
        selected_logprob(torch.zeros(6, 40), torch.arange(6), **call)
