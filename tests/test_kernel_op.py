"""The operator of trainers: opaque to the compiler, recomputed by checkpoints, in place if asked.

Each way gives the bits of the plain call; each misuse is an error and never a wrong number.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlk_kernels import batch_logprob, selected_logprob

VOCAB_SIZE = 47
IDS = torch.tensor([3, 4, -100, 46, 0])
ACTIVE = torch.tensor([True, True, False, True, True])
COMPLAINT = ""
Losses = tuple[Tensor, Tensor]


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def loss_of(hidden: Tensor, inplace_backward: bool = False) -> Tensor:
    """Of a layer with three padding columns, an inactive row, and both values used."""
    weight = torch.linspace(-2, 3, 8 * 50).reshape(8, 50).sin()
    values = selected_logprob(
        hidden @ weight,
        IDS,
        vocab_size=VOCAB_SIZE,
        temperature=0.7,
        active_mask=ACTIVE,
        inplace_backward=inplace_backward,
    )
    return (values.logprob * torch.linspace(-1, 2, 5) + values.lse).sum()


def loss_and_gradient(function: Any, hidden: Tensor, *args: Any) -> Losses:
    hidden = hidden.detach().requires_grad_()
    loss = function(hidden, *args)
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


def assert_same(ours: Losses, expected: Losses) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def operator_arguments(logits: Tensor) -> tuple[Any, ...]:
    numbers = (VOCAB_SIZE, 0, 0.7, "auto", -100)
    return (logits, IDS, ACTIVE, *numbers, None, False, COMPLAINT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_torchs_rules(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 50).to(dtype).requires_grad_()
    operators = torch.ops.rlk_kernels
    arguments = operator_arguments(logits)
    torch.library.opcheck(operators.selected_logprob.default, arguments)
    _, _, mantissa, exponent = operators.selected_logprob(*arguments)
    per_row = (mantissa, exponent, torch.ones(5), None)
    rest = (*arguments[1:7], *per_row)
    torch.library.opcheck(
        operators.logits_gradient.default,
        (logits.detach(), *rest),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        operators.logits_gradient_.default,
        (logits.detach().clone(), *rest),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_has_the_same_bits(
    hidden: Tensor, backend: str, inplace_backward: bool
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    expected = loss_and_gradient(loss_of, hidden)
    assert_same(loss_and_gradient(compiled, hidden, inplace_backward), expected)


def test_a_compiled_batch_has_the_same_bits() -> None:
    def loss(logits: Tensor) -> Tensor:
        ids = torch.tensor([[3, 4, 5], [46, 0, 1]])
        return batch_logprob(logits * 1.0, ids, vocab_size=VOCAB_SIZE).logprob.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits = torch.randn(2, 3, 50)
    assert_same(loss_and_gradient(compiled, logits), loss_and_gradient(loss, logits))


@pytest.mark.parametrize(
    ("make_logits", "message"),
    [
        (lambda: torch.full((5, 50), torch.nan), "row 0: logit of token id 0 is NaN"),
        (lambda: torch.zeros(5, 50).double(), "bfloat16 or float16, got torch.float64"),
        (lambda: torch.zeros(4, 50), r"active_mask should be bool \[4\]"),
        (lambda: torch.zeros(5, 46), r"no rank holds token ids \[46, 47\)"),
    ],
)
def test_a_compiled_call_raises_the_same_sentence(make_logits: Any, message: str) -> None:
    def call(logits: Tensor) -> Tensor:
        return selected_logprob(logits, IDS, vocab_size=VOCAB_SIZE, active_mask=ACTIVE).logprob

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for function in (call, compiled):
        with pytest.raises(ValueError, match=message):
            function(make_logits())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_a_checkpoint_recomputes_the_same_bits(
    hidden: Tensor, use_reentrant: bool, inplace_backward: bool
) -> None:
    def checkpointed(hidden: Tensor) -> Any:
        return checkpoint(loss_of, hidden, inplace_backward, use_reentrant=use_reentrant)

    assert_same(loss_and_gradient(checkpointed, hidden), loss_and_gradient(loss_of, hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_gradient_takes_the_logits_place(dtype: torch.dtype, backend: str) -> None:
    # one past two tiles of 4096 columns, of which the last three are padding
    given = torch.randn(5, 8193, generator=torch.Generator().manual_seed(2)).to(dtype)
    given[2] = torch.nan
    results = []
    for inplace_backward in (False, True):
        source = given.clone().requires_grad_()
        logits = source * 1.0
        place = logits.data_ptr()
        values = selected_logprob(
            logits,
            IDS,
            vocab_size=8190,
            active_mask=ACTIVE,
            backend=backend,
            inplace_backward=inplace_backward,
        )
        (gradient,) = torch.autograd.grad(values.logprob.sum(), logits)
        assert (gradient.data_ptr() == place) == inplace_backward
        results.append(gradient)
    assert torch.equal(*results)
    assert (results[0][ACTIVE, :8190] != 0).any()


def inplace_logprob(hidden: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden * 1.0
    values = selected_logprob(
        logits, torch.arange(5), vocab_size=8, vocab_start=0, inplace_backward=True
    )
    return logits, values.logprob.sum()


def test_logits_that_hold_their_gradient_are_not_used_again(hidden: Tensor) -> None:
    _, loss = inplace_logprob(hidden)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits, loss = inplace_logprob(hidden)
    other = (logits * logits).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("other_first", [False, True])
def test_another_use_of_the_logits_gets_its_own_gradient_or_an_error(
    hidden: Tensor, other_first: bool
) -> None:
    def loss(hidden: Tensor, inplace_backward: bool) -> Tensor:
        logits = hidden * 1.0
        squares = (logits * logits).sum() if other_first else 0.0
        ids = torch.arange(5)
        values = selected_logprob(logits, ids, vocab_size=8, inplace_backward=inplace_backward)
        return values.logprob.sum() + (squares if other_first else (logits * logits).sum())

    expected = loss_and_gradient(loss, hidden, False)
    if other_first:
        # its backward comes last, when the logits are gone
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_and_gradient(loss, hidden, True)
    else:
        assert_same(loss_and_gradient(loss, hidden, True), expected)


@pytest.mark.parametrize("inplace_backward", [False, True])
def test_there_is_no_second_gradient(hidden: Tensor, inplace_backward: bool) -> None:
    def second_gradient() -> None:
        loss = loss_of(hidden, inplace_backward)
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        gradient.sum().backward()

    with pytest.raises(RuntimeError, match="has no gradient of its own"):
        second_gradient()


def test_leaves_and_overlapping_rows_are_not_overwritten() -> None:
    ids = torch.zeros(2).long()
    leaf = torch.zeros(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="got a leaf"):
        selected_logprob(leaf, ids, vocab_size=8, inplace_backward=True)
    with pytest.raises(ValueError, match="got a leaf"):
        batch_logprob(
            leaf[None].detach().requires_grad_(), ids[None], vocab_size=8, inplace_backward=True
        )
    rows = (torch.zeros(1, 8, requires_grad=True) * 1.0).expand(2, 8)
    with pytest.raises(ValueError, match="got 8 columns in rows 0 apart"):
        selected_logprob(rows, ids, vocab_size=8, inplace_backward=True)
