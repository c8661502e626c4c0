"""Random cuts, paddings, batches, dtypes and temperatures move no bit on groups of 1 to 4 ranks.

Hypothesis runs on every rank with the same derandomized examples, so that the ranks stay in step.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks

from rlk_kernels import selected_logprob

MAX_RANKS = 4
EXAMPLES = 25
# no shrinking: a rank that shrinks alone would leave the others waiting
IN_STEP = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=EXAMPLES,
    phases=[Phase.generate],
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, list[int], torch.dtype, float]:
    """Seed, rows, vocabulary, padding, sorted cuts, dtype and temperature."""
    vocab_size = draw(st.integers(1, 700))
    padding = draw(st.integers(0, 200))
    cuts = draw(
        st.lists(st.integers(0, vocab_size + padding), min_size=MAX_RANKS, max_size=MAX_RANKS)
    )
    return (
        draw(st.integers(0, 2**20)),
        # below and above the 128 rows that the first all-gather carries
        draw(st.sampled_from([1, 3, 128, 129, 200])),
        vocab_size,
        padding,
        sorted(cuts),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from([1.0, 0.6])),
    )


def bits(
    logits: torch.Tensor, ids: torch.Tensor, vocab_size: int, temperature: float, **where: object
) -> list[torch.Tensor]:
    logits = logits.clone().requires_grad_()
    values = selected_logprob(logits, ids, vocab_size=vocab_size, temperature=temperature, **where)
    (values.logprob.sum() + 0.5 * values.lse.sum()).backward()
    assert logits.grad is not None
    return [values.logprob.detach(), values.lse.detach(), logits.grad]


def every_example(rank: int) -> dict[int, int]:
    """How many examples each size of group held; raises at the first bit that moved."""
    held = {}
    for size in range(1, MAX_RANKS + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            held[size] = examples_of(rank, size, group)
    return held


def examples_of(rank: int, size: int, group: dist.ProcessGroup) -> int:
    count = 0

    @IN_STEP
    @given(cases())
    def check(case: tuple[int, int, int, int, list[int], torch.dtype, float]) -> None:
        nonlocal count
        seed, rows, vocab_size, padding, cuts, dtype, temperature = case
        generator = torch.Generator().manual_seed(seed)
        logits = (6 * torch.randn(rows, vocab_size + padding, generator=generator)).to(dtype)
        logits[:, vocab_size:] = torch.nan
        ids = torch.randint(0, vocab_size, (rows,), generator=generator)
        whole = bits(logits[:, :vocab_size], ids, vocab_size, temperature, backend="reference")
        edges = [0, *cuts[: size - 1], vocab_size + padding]
        start, end = edges[rank], edges[rank + 1]
        ours = bits(
            logits[:, start:end], ids, vocab_size, temperature, vocab_start=start, group=group
        )
        assert torch.equal(ours[0], whole[0])
        assert torch.equal(ours[1], whole[1])
        real = max(0, min(end, vocab_size) - start)
        assert torch.equal(ours[2][:, :real], whole[2][:, start : start + real])
        assert not ours[2][:, real:].any()
        count += 1

    check()
    return count


@pytest.fixture(scope="module")
def held() -> list[dict[int, int]]:
    return run_on_ranks(MAX_RANKS, every_example)


@pytest.mark.parametrize("size", range(1, MAX_RANKS + 1))
def test_no_example_moves_a_bit(held: list[dict[int, int]], size: int) -> None:
    assert [counts.get(size) for counts in held] == [
        EXAMPLES if rank < size else None for rank in range(MAX_RANKS)
    ]
