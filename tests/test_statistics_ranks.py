"""Sums, entropies, ranks and top-k are the same on 1 to 3 ranks; one's fault is every rank's error.

All of it happens in one run of three gloo processes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from rlk_kernels.entropy import entropy
from rlk_kernels.exact_sum import FIRST_SUMS, exact_mean, exact_sum
from rlk_kernels.row_statistics import row_statistics

VOCAB_SIZE = 500
NUM_TOKENS = 9
LAYOUTS = {1: [0, 510], 2: [0, 499, 510], 3: [0, 200, 200, 510]}
# split over the ranks unevenly, with none for one of them
SPLITS = {1: [0, 1000], 2: [0, 999, 1000], 3: [0, 13, 13, 1000]}
NUM_SUMS = FIRST_SUMS + 3


def all_values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-30, 30, (NUM_SUMS, 1000), generator=generator)
    return sizes * torch.randn(NUM_SUMS, 1000, generator=generator)


def all_logits(dtype: torch.dtype) -> torch.Tensor:
    """With padding that nobody may read."""
    logits = 4 * torch.randn(NUM_TOKENS, 510, generator=torch.Generator().manual_seed(1))
    logits[:, 3:9] = logits[:, 300:306] = -torch.inf
    logits[:, VOCAB_SIZE:] = torch.nan
    return logits.to(dtype)


def token_ids() -> torch.Tensor:
    return torch.arange(NUM_TOKENS) * 61


def sums(values: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Sums with gradients, of a scalar and of more rows than travel with the header."""
    values = values.clone().requires_grad_()
    rows = exact_sum(values, dim=1, group=group)
    mean = exact_mean(values, group=group)
    total = exact_sum(values[0], group=group)
    (rows.sum() + 3 * mean + total).backward()
    return [rows.detach(), mean.detach(), total.detach(), values.grad]


def statistics(logits: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    logits = logits.clone().requires_grad_()
    values = entropy(logits, vocab_size=VOCAB_SIZE, temperature=0.9, **kwargs)
    (values * torch.linspace(-1, 1, NUM_TOKENS)).sum().backward()
    rows = row_statistics(
        logits.detach(), token_ids(), vocab_size=VOCAB_SIZE, top_k=4, temperature=0.9, **kwargs
    )
    whole = [rows.entropy, rows.target_rank, rows.top_logits, rows.top_ids]
    return [values.detach(), *whole, logits.grad]


def sound_cases(rank: int, group: dist.ProcessGroup, size: int) -> dict[str, list[torch.Tensor]]:
    start, end = SPLITS[size][rank : rank + 2]
    results = {"sums": sums(all_values()[:, start:end], group)}
    start, end = LAYOUTS[size][rank : rank + 2]
    for dtype in (torch.float32, torch.bfloat16):
        shard = all_logits(dtype)[:, start:end]
        results[str(dtype)] = statistics(shard, vocab_start=start, group=group)
    return results


def faults() -> dict[str, tuple[Callable[[int, dist.ProcessGroup], Any], str]]:
    """A call in which rank 1 does something wrong, and what every rank must say."""

    def nan(rank: int, group: dist.ProcessGroup) -> None:
        values = torch.zeros(3, 4)
        values[2, 1] = torch.nan if rank == 1 else 0
        exact_sum(values, group=group)

    def dtype(rank: int, group: dist.ProcessGroup) -> None:
        exact_sum(torch.zeros(3, dtype=[torch.float32, torch.float64][rank]), dim=0, group=group)

    def shape(rank: int, group: dist.ProcessGroup) -> None:
        exact_sum(torch.zeros(20 + rank, 4), dim=1, group=group)

    def whole_or_rows(rank: int, group: dist.ProcessGroup) -> None:
        exact_sum(torch.zeros(4, 4), dim=[1, None][rank], group=group)

    def beyond(rank: int, group: dist.ProcessGroup) -> None:
        exact_sum(torch.tensor([3e38]), group=group)

    def no_value(rank: int, group: dist.ProcessGroup) -> None:
        exact_mean(torch.empty(0), group=group)

    def shard(rank: int) -> dict[str, Any]:
        start, end = LAYOUTS[2][rank : rank + 2]
        logits = all_logits(torch.float32)[:, start:end].clone()
        return {"logits_TL": logits, "vocab_start": start, "vocab_size": VOCAB_SIZE}

    def bad_logit(rank: int, group: dist.ProcessGroup) -> None:
        call = shard(rank)
        if rank == 1:
            call["logits_TL"][4, 0] = torch.inf
        entropy(**call, group=group)

    def no_tensor(rank: int, group: dist.ProcessGroup) -> None:
        entropy(**(shard(rank) | ({"logits_TL": None} if rank == 1 else {})), group=group)

    def masked_row(rank: int, group: dist.ProcessGroup) -> None:
        call = shard(rank)
        call["logits_TL"][2] = -torch.inf
        entropy(**call, group=group)

    def top_k(rank: int, group: dist.ProcessGroup) -> None:
        row_statistics(**shard(rank), token_ids_T=token_ids(), top_k=3 + rank, group=group)

    def large_top_k(rank: int, group: dist.ProcessGroup) -> None:
        row_statistics(**shard(rank), token_ids_T=token_ids(), top_k=501, group=group)

    def top_k_of_one(value: Any) -> Callable[[int, dist.ProcessGroup], None]:
        def call(rank: int, group: dist.ProcessGroup) -> None:
            top_k = value if rank == 1 else 2
            row_statistics(**shard(rank), token_ids_T=token_ids(), top_k=top_k, group=group)

        return call

    def entropy_with(name: str, value: Any) -> Callable[[int, dist.ProcessGroup], None]:
        def call(rank: int, group: dist.ProcessGroup) -> None:
            entropy(**(shard(rank) | ({name: value} if rank == 1 else {})), group=group)

        return call

    return {
        "nan": (nan, "rank 1: values[2, 1] is nan; an exact sum takes finite values"),
        "dtype": (dtype, "rank 1: values should be float32, bfloat16 or float16"),
        "shape": (shape, "rank 1 has sums of shape [21], rank 0 [20]"),
        "whole or rows": (whole_or_rows, "rank 1 has sums of shape [], rank 0 [4]"),
        "beyond": (beyond, "the sum is beyond float32"),
        "no value": (no_value, "a mean needs at least one value"),
        "bad logit": (bad_logit, "rank 1: row 4: logit of token id 499 is NaN, +inf or above"),
        "no tensor": (no_tensor, "rank 1: logits should be a tensor"),
        "masked row": (masked_row, "row 2: every logit is masked"),
        "top_k": (top_k, "rank 1 has another top_k than rank 0 (4, 3); every rank"),
        "large top_k": (large_top_k, "rank 0: top_k should be 1 to 500, the vocabulary, got 501"),
        "no top_k": (top_k_of_one(None), "rank 1: top_k should be 1 to 500, the vocabulary, got N"),
        "top_k 2.5": (top_k_of_one(2.5), "rank 1: top_k should be 1 to 500, the vocabulary, got 2"),
        "float vocabulary": (
            entropy_with("vocab_size", 500.0),
            "rank 1: vocab_size should be an integer, got 500.0",
        ),
        "far start": (
            entropy_with("vocab_start", 2**70),
            "rank 1: vocab_start should be 0 or above and at most 2147483647, got an integer beyo",
        ),
    }


def faulty_cases(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    results = {}
    for name, (call, _) in faults().items():
        try:
            call(rank, group)
            results[name] = "nothing was raised"
        except ValueError as error:
            results[name] = str(error)
    return results


def all_cases(rank: int) -> dict[str, Any]:
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    return {
        "sound": {n: sound_cases(rank, group, n) for n, group in groups.items() if rank < n},
        "faulty": faulty_cases(rank, groups[2]) if rank < 2 else {},
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(3, all_cases, timeout_s=300)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_are_those_of_one_process(results: list[dict[str, Any]], size: int) -> None:
    *expected, gradient = sums(all_values(), None)
    shards = [results[rank]["sound"][size]["sums"] for rank in range(size)]
    for shard in shards:
        for ours, theirs in zip(shard, expected, strict=False):
            assert torch.equal(ours, theirs)
    assert torch.equal(torch.cat([shard[-1] for shard in shards], 1), gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_statistics_are_those_of_one_process(
    results: list[dict[str, Any]], size: int, dtype: torch.dtype
) -> None:
    *expected, gradient = statistics(all_logits(dtype))
    shards = [results[rank]["sound"][size][str(dtype)] for rank in range(size)]
    for shard in shards:
        for ours, theirs in zip(shard, expected, strict=False):
            assert torch.equal(ours, theirs)
    assert torch.equal(torch.cat([shard[-1] for shard in shards], 1), gradient)


@pytest.mark.parametrize("fault", faults())
def test_a_fault_is_every_ranks_error(results: list[dict[str, Any]], fault: str) -> None:
    said = [results[rank]["faulty"][fault] for rank in range(2)]
    assert said[0].startswith(faults()[fault][1])
    assert said[0] == said[1]
