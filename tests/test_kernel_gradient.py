"""The gradient is elementwise and recomputed: the same bits on every cut, within two roundings."""

import pytest
import torch

from rlk_fixtures.logits import benign_rows, sampled_ids
from rlk_kernels import selected_logprob
from rlk_kernels.reference import _scaled as scaled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def upstream(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    grad_logprob, grad_lse = torch.randn(2, num_tokens, generator=generator)
    return grad_logprob, grad_lse


def kernel_gradient(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, backend: str = "auto"
) -> torch.Tensor:
    logits = logits.detach().requires_grad_()
    values = selected_logprob(
        logits, ids, vocab_size=logits.shape[1], temperature=temperature, backend=backend
    )
    torch.autograd.backward([values.logprob, values.lse], upstream(len(ids)))
    assert logits.grad is not None
    assert logits.grad.dtype == logits.dtype
    return logits.grad


def exact_gradient(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    grad_logprob, grad_lse = upstream(len(ids))
    logits = logits.detach().double().requires_grad_()
    scaled_logits = logits / temperature
    logprob = scaled_logits.log_softmax(1).gather(1, ids[:, None])[:, 0]
    (grad_logprob * logprob + grad_lse * scaled_logits.logsumexp(1)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.fixture(scope="module")
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    # one past two tiles of 4096 columns, with a row far down, a masked column and a spike
    logits = benign_rows(6, vocab_size=8193, seed=3)
    # probabilities on both sides of 2**-126, which is exp(-87.3)
    logits[0, 100:200] = logits[0].max() - torch.linspace(83, 91, 100)
    logits[1] -= 300
    logits[2, 5] = -torch.inf
    logits[3, 4096] += 40
    # a finite masked logit, not far below the others
    logits[4] -= 8150
    logits[4, 7] = -8200
    return logits, sampled_ids(logits)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_backends_give_the_same_gradient(
    rows: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, temperature: float
) -> None:
    logits, ids = rows[0].to(dtype), rows[1]
    if temperature != 1:
        # 8192 is the limit after the division
        logits = torch.cat([logits[:4], logits[4:] / 2])
    ours = [kernel_gradient(logits, ids, temperature, b) for b in ("reference", "cpu")]
    assert torch.equal(ours[0], ours[1])
    assert ours[1][2, 5] == 0
    if temperature == 1:
        assert ours[1][4, 7] == 0
    if dtype == torch.float32 and temperature == 1:
        is_kept = ours[0][0, 100:200] != 0
        assert is_kept.any()
        assert not is_kept.all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_near_float64(
    rows: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, temperature: float
) -> None:
    logits, ids = rows[0][:4].to(dtype), rows[1][:4]
    ours = kernel_gradient(logits, ids, temperature).double()
    if temperature == 1:
        exact = exact_gradient(logits, ids, 1.0)
    else:
        # the kernel divides in float32, and those are the logits it answers for
        divided = logits.float() / torch.tensor(temperature)
        exact = exact_gradient(divided, ids, 1.0) / torch.tensor(temperature).double()
    # a polynomial within 3.4 * 2**-24 and four roundings of float32, then the step of the dtype;
    # at the target a difference of two such terms, of the size of the upstream gradient
    float32_error = 8 * 2.0**-24
    step = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    largest = max(gradient.abs().max().item() for gradient in upstream(6)) / temperature
    # a probability below 2**-126 is 0, and half a step of the smallest float16
    tiny = 2 * largest * 2.0**-126 + (2.0**-25 if dtype == torch.float16 else 0.0)
    allowed = exact.abs() * (float32_error + step) + tiny
    allowed.scatter_add_(1, ids[:, None], torch.full((4, 1), 2 * largest * float32_error).double())
    assert ((ours - exact).abs() <= allowed).all()


def test_logprob_gradients_of_a_row_add_up_to_about_zero() -> None:
    logits = benign_rows(8).requires_grad_()
    ids = sampled_ids(logits.detach())
    selected_logprob(logits, ids, vocab_size=logits.shape[1]).logprob.sum().backward()
    assert logits.grad is not None
    # the relative error of each probability is under 8 * 2**-24, and they add up to 1
    assert logits.grad.double().sum(1).abs().max() < 8 * 2.0**-24


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_padding_has_gradient_zero_and_is_never_read(backend: str) -> None:
    logits = torch.full((3, 40), torch.nan)
    logits[:, :30] = torch.randn(3, 30)
    logits.requires_grad_()
    ids = torch.tensor([0, 29, 7])
    selected_logprob(logits, ids, vocab_size=30, backend=backend).logprob.sum().backward()
    assert logits.grad is not None
    assert (logits.grad[:, 30:] == 0).all()
    assert (logits.grad[:, :30] != 0).all()


def test_only_one_of_the_outputs_may_be_used() -> None:
    logits = torch.randn(2, 50, requires_grad=True)
    ids = torch.tensor([4, 5])
    selected_logprob(logits, ids, vocab_size=50).lse.sum().backward()
    assert logits.grad is not None
    expected = logits.detach().double().softmax(1)
    assert torch.allclose(logits.grad.double(), expected, rtol=8 * 2.0**-24, atol=0)


def test_logits_changed_after_the_forward_pass_are_noticed() -> None:
    logits = torch.randn(2, 50, requires_grad=True)
    scaled_logits = logits * 1.0
    values = selected_logprob(scaled_logits, torch.tensor([4, 5]), vocab_size=50)
    scaled_logits.sub_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.logprob.sum().backward()


def test_scaling_is_exact_down_to_the_smallest_normal_number_and_zero_below() -> None:
    t = torch.tensor([1.0, 1.99, 0.5, 2.0, 0.99])
    power = torch.tensor([-126.0, -126.0, -125.0, -127.0, -126.0]).double()
    assert torch.equal(scaled(t, power), torch.tensor([1.0, 1.99, 1.0, 1.0, 0.0]) * 2.0**-126)
