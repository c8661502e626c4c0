"""The compiler sees none of the arithmetic of the doors that are no operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlk_kernels import (
    divergence,
    entropy,
    exact_mean,
    exact_sum,
    expsum_state,
    finish,
    finish_where_valid,
    row_statistics,
)

IDS = torch.tensor([3, 4, 46])


def state_of(logits: Tensor) -> Any:
    return expsum_state(logits, token_ids=IDS, vocab_size=47, backend="reference")


DOORS: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": lambda z: entropy(z, vocab_size=47),
    "row_statistics": lambda z: row_statistics(z, IDS, vocab_size=47).entropy,
    "exact_sum": lambda z: exact_sum(z, dim=1),
    "exact_mean": exact_mean,
    "divergence": lambda z: divergence([(0, z)], [(0, z)], vocab_size=47).js,
    "expsum_state": lambda z: state_of(z).bins,
    "finish": lambda z: finish(state_of(z)).lse,
    "finish_where_valid": lambda z: finish_where_valid(state_of(z))[0].lse,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_is_run_as_it_stands_between_compiled_code(door: str) -> None:
    def call(logits: Tensor) -> Tensor:
        # one operation before and one behind
        return DOORS[door](logits.sin()).cos()

    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in module.graph.nodes if node.op.startswith("call"))
        return module.forward

    torch.compiler.reset()
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.compile(call, backend=backend)(logits), call(logits))
    assert seen == ["sin", "cos"]


def test_the_gradient_passes_through() -> None:
    def gradient_of(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).requires_grad_()
        function(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def loss(logits: Tensor) -> Tensor:
        return exact_mean(entropy(logits.sin(), vocab_size=47))

    torch.compiler.reset()
    expected = gradient_of(loss)
    assert torch.equal(gradient_of(torch.compile(loss, backend="aot_eager")), expected)
    assert (expected != 0).any()
