"""Batches, Megatron's logits and DTensors give the bits of one process, gradients included.

All ranks' cases happen in one run of three gloo processes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from rlk_kernels import batch_logprob, dtensor_logprob, megatron_logprob, selected_logprob

BATCH, LENGTH = 2, 3
# even, uneven, an empty last shard, and padding
WIDTHS = {"even": 48, "uneven": 47, "empty last": 4, "padded": 51}
VOCAB_SIZES = {"even": 48, "uneven": 47, "empty last": 4, "padded": 47}


def batch(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, S, V] with NaN in padding and in an inactive row, ids and mask."""
    generator = torch.Generator().manual_seed(WIDTHS[case])
    logits = 3 * torch.randn(BATCH, LENGTH, WIDTHS[case], generator=generator)
    logits[..., VOCAB_SIZES[case] :] = torch.nan
    logits[1, 2] = torch.nan
    ids = torch.randint(0, VOCAB_SIZES[case], (BATCH, LENGTH), generator=generator)
    ids[1, 2] = -100
    return logits, ids, ids >= 0


def loss_of(values: Any) -> Tensor:
    weight = torch.linspace(-1, 2, BATCH * LENGTH).view(BATCH, LENGTH)
    return (weight * values.logprob + (1 - weight) * values.lse).sum()


@cache
def expected(case: str) -> list[Tensor]:
    """logprob and lse [B, S], gradient [B, S, V] from the plain call in one process."""
    logits, ids, active = batch(case)
    logits.requires_grad_()
    values = selected_logprob(
        logits.flatten(0, 1),
        ids.flatten(),
        vocab_size=VOCAB_SIZES[case],
        active_mask=active.flatten(),
    )
    logprob, lse = (v.view(BATCH, LENGTH) for v in (values.logprob, values.lse))
    weight = torch.linspace(-1, 2, BATCH * LENGTH).view(BATCH, LENGTH)
    (weight * logprob + (1 - weight) * lse).sum().backward()
    assert logits.grad is not None
    return [logprob.detach(), lse.detach(), logits.grad]


def dtensor_case(rank: int, mesh: DeviceMesh, case: str, in_place: bool) -> list[Tensor]:
    logits, ids, active = batch(case)
    source = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
    values = dtensor_logprob(
        source * 1.0 if in_place else source,
        ids,
        vocab_size=VOCAB_SIZES[case] if case == "padded" else None,
        active_mask=active,
        inplace_backward=in_place,
    )
    loss_of(values).backward()
    assert source.grad.placements == (Shard(2),)
    return [values.logprob.detach(), values.lse.detach(), source.grad.full_tensor()]


def megatron_case(rank: int, case: str) -> list[Tensor]:
    logits, ids, active = batch(case)
    width = WIDTHS[case] // 3
    shard = logits[..., rank * width : (rank + 1) * width].transpose(0, 1).contiguous()
    shard.requires_grad_()
    group = dist.group.WORLD
    values = megatron_logprob(
        shard, ids, vocab_size=VOCAB_SIZES[case], group=group, active_mask=active
    )
    loss_of(values).backward()
    gradients = [torch.empty_like(shard) for _ in range(3)]
    dist.all_gather(gradients, shard.grad)
    gradient = torch.cat(gradients, dim=2).transpose(0, 1)
    return [values.logprob.detach(), values.lse.detach(), gradient]


def compiled_case(rank: int) -> list[Tensor]:
    logits, ids, active = batch("even")
    shard = logits[..., rank * 16 : (rank + 1) * 16].clone().requires_grad_()
    group = dist.group.WORLD

    def call(shard: Tensor) -> tuple[Tensor, Tensor]:
        values = batch_logprob(
            shard, ids, vocab_size=48, vocab_start=rank * 16, group=group, active_mask=active
        )
        return values.logprob, values.lse

    logprob, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(shard)
    logprob.sum().backward()
    return [logprob.detach(), lse.detach(), shard.grad]


def faults(rank: int, mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    """Calls in which rank 1 alone, or every rank, does something wrong."""
    logits, ids, active = batch("even")
    shard = logits[..., rank * 16 : (rank + 1) * 16].transpose(0, 1).contiguous()
    group = dist.group.WORLD
    is_bad = rank == 1
    sharded = distribute_tensor(logits, mesh, [Shard(2)])

    def megatron(ids: Any = ids, shard: Any = shard, active: Any = active) -> Any:
        return megatron_logprob(shard, ids, vocab_size=48, group=group, active_mask=active)

    def compiled_complaint() -> Any:
        def call(shard: Tensor, ids: Tensor) -> Tensor:
            values = megatron_logprob(shard, ids, vocab_size=48, group=group, active_mask=active)
            return values.logprob

        compiled = torch.compile(call, fullgraph=True, backend="eager")
        return compiled(shard, ids[:1] if is_bad else ids)

    return {
        "transposed ids": lambda: megatron(ids.t() if is_bad else ids),
        "flat ids": lambda: megatron(ids.flatten() if is_bad else ids),
        "no logits": lambda: megatron(shard=None if is_bad else shard),
        "other mask shape": lambda: megatron(active=active.t() if is_bad else active),
        "narrow shard": lambda: megatron(shard=shard[..., :15] if is_bad else shard),
        "compiled": compiled_complaint,
        "dtensor ids": lambda: dtensor_logprob(
            sharded, ids[:1] if is_bad else ids, active_mask=active
        ),
        "dtensor ids are a dtensor": lambda: dtensor_logprob(
            sharded, distribute_tensor(ids, mesh, [Replicate()])
        ),
        "plain door": lambda: selected_logprob(sharded, ids, vocab_size=48, group=group),
        "replicated": lambda: dtensor_logprob(sharded.redistribute(mesh, [Replicate()]), ids),
        "rows": lambda: dtensor_logprob(sharded.redistribute(mesh, [Shard(1)]), ids),
        "no dtensor": lambda: dtensor_logprob(logits, ids),
        "leaf": lambda: dtensor_logprob(
            sharded.detach().requires_grad_(), ids, active_mask=active, inplace_backward=True
        ),
    }


MESSAGES = {
    "transposed ids": "rank 1: logits [..., columns] and token ids [...] should have the same",
    "flat ids": "rank 1: logits [..., columns] and token ids [...] should have the same",
    "no logits": "rank 1: logits and token ids should be tensors, got NoneType and Tensor",
    "other mask shape": "rank 1: active_mask should have the token ids' shape, got [2, 3] and",
    "narrow shard": "rank 1 holds token ids [15, 30), but rank 0 already holds those",
    "compiled": "rank 1: logits [..., columns] and token ids [...] should have the same",
    "dtensor ids": "rank 1: logits [..., columns] and token ids [...] should have the same",
    "dtensor ids are a dtensor": "rank 0: logits, token ids and mask should be plain tensors",
    "plain door": "rank 0: logits, token ids and mask should be plain tensors, got a DTensor; "
    "pass the logits to rlk_kernels.dtensor_logprob",
    "replicated": "logits should be Shard(2) on a mesh of one dimension, got (Replicate(),) on 1",
    "rows": "logits should be Shard(2) on a mesh of one dimension, got (Shard(dim=1),) on 1",
    "no dtensor": "dtensor_logprob takes a DTensor, got Tensor",
    "leaf": "rank 0: inplace_backward should get logits that an operation made, got a leaf",
}


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def all_cases(rank: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(3))
    dtensor = {
        (case, in_place): dtensor_case(rank, mesh, case, in_place)
        for case in WIDTHS
        for in_place in (False, True)
    }
    megatron = {case: megatron_case(rank, case) for case in ("even", "padded")}
    messages = {name: message_of(call) for name, call in faults(rank, mesh).items()}
    compiled = compiled_case(rank)
    return {"dtensor": dtensor, "megatron": megatron, "faults": messages, "compiled": compiled}


@pytest.fixture(scope="session")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(3, all_cases)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", WIDTHS)
def test_a_dtensor_gives_the_same_bits(
    results: list[dict[str, Any]], case: str, in_place: bool
) -> None:
    for rank in range(3):
        for ours, theirs in zip(
            results[rank]["dtensor"][case, in_place], expected(case), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", ["even", "padded"])
def test_megatrons_logits_give_the_same_bits(results: list[dict[str, Any]], case: str) -> None:
    for rank in range(3):
        for ours, theirs in zip(results[rank]["megatron"][case], expected(case), strict=True):
            assert torch.equal(ours, theirs)


def test_a_compiled_call_talks_to_its_group(results: list[dict[str, Any]]) -> None:
    logits, ids, active = batch("even")
    logits.requires_grad_()
    values = batch_logprob(logits, ids, vocab_size=48, active_mask=active)
    values.logprob.sum().backward()
    for rank in range(3):
        logprob, lse, gradient = results[rank]["compiled"]
        assert torch.equal(logprob, values.logprob)
        assert torch.equal(lse, values.lse)
        assert torch.equal(gradient, logits.grad[..., rank * 16 : (rank + 1) * 16])


@pytest.mark.parametrize("fault", MESSAGES)
def test_a_fault_is_the_same_error_on_every_rank(results: list[dict[str, Any]], fault: str) -> None:
    (message,) = {results[rank]["faults"][fault] for rank in range(3)}
    assert message.startswith(MESSAGES[fault])


def test_a_batch_of_any_leading_shape_gives_the_same_bits() -> None:
    logits, ids, active = batch("padded")
    logprob, lse, gradient = expected("padded")
    for shape in ((2, 3), (1, 2, 3), (6,)):
        given = logits.view(*shape, -1).clone().requires_grad_()
        values = batch_logprob(
            given, ids.view(shape), vocab_size=47, active_mask=active.view(shape)
        )
        assert values.logprob.shape == values.lse.shape == shape
        loss_of(
            type(values)(logprob=values.logprob.view(2, 3), lse=values.lse.view(2, 3))
        ).backward()
        assert torch.equal(values.logprob.detach().view(2, 3), logprob)
        assert torch.equal(values.lse.detach().view(2, 3), lse)
        assert torch.equal(given.grad.view_as(gradient), gradient)


def test_rows_that_are_no_view_are_copied_and_get_their_gradient() -> None:
    logits = torch.randn(2, 4, 9, requires_grad=True)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch_logprob(logits[:, :-1], ids, vocab_size=9).logprob.sum().backward()
    assert logits.grad is not None
    whole = logits.detach()[:, :-1].reshape(6, 9).requires_grad_()
    selected_logprob(whole, ids.flatten(), vocab_size=9).logprob.sum().backward()
    assert torch.equal(logits.grad[:, :-1].reshape(6, 9), whole.grad)
    assert (logits.grad[:, -1] == 0).all()
