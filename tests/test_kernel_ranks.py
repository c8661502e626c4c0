"""Ranks of a group get the same bits as one process, and one rank's fault is every rank's error.

All of it happens in one run of four gloo processes, on groups of one to four of them.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from rlk_kernels import selected_logprob

VOCAB_SIZE = 1000
# below and above the rows that the first all-gather carries
TOKEN_COUNTS = (1, 128, 300)
LAYOUTS = {
    "even": {1: [0, 1000], 2: [0, 500, 1000], 3: [0, 334, 668, 1002], 4: [0, 250, 500, 750, 1000]},
    "uneven and empty": {
        1: [0, 1000],
        2: [0, 1, 1000],
        3: [0, 999, 999, 1000],
        4: [0, 0, 17, 980, 1000],
    },
    "beyond the vocabulary": {
        1: [0, 1024],
        2: [0, 600, 1200],
        3: [0, 512, 1024, 1536],
        4: [0, 400, 800, 1200, 1600],
    },
}


def whole_rows(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with poisoned padding up to column 1600, and ids that touch every shard's edges."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 4 * torch.randn(num_tokens, 1600, generator=generator)
    logits[:, VOCAB_SIZE:] = torch.nan
    edges = torch.tensor([0, 1, 249, 250, 499, 500, 749, 750, 979, 980, 998, 999])
    return logits.to(dtype), edges.repeat(30)[:num_tokens]


def gradients(logits: torch.Tensor, ids: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """logprob, lse and the gradient of a weighted sum of both."""
    logits = logits.clone().requires_grad_()
    values = selected_logprob(logits, ids, vocab_size=VOCAB_SIZE, temperature=0.7, **kwargs)
    weight = torch.linspace(-1, 2, len(ids))
    (weight * values.logprob + (1 - weight) * values.lse).sum().backward()
    return [values.logprob.detach(), values.lse.detach(), logits.grad]


@cache
def reference_results(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    logits, ids = whole_rows(num_tokens, dtype)
    return gradients(logits[:, :VOCAB_SIZE], ids, backend="reference")


def sound_cases(rank: int, group: dist.ProcessGroup, size: int) -> dict[str, list[torch.Tensor]]:
    results = {}
    for name, layout in LAYOUTS.items():
        start, end = layout[size][rank : rank + 2]
        for num_tokens in TOKEN_COUNTS:
            for dtype in (torch.float32, torch.bfloat16):
                logits, ids = whole_rows(num_tokens, dtype)
                results[f"{name}, {num_tokens} tokens, {dtype}"] = gradients(
                    logits[:, start:end], ids, vocab_start=start, group=group
                )
    return results


def faults() -> dict[str, tuple[Callable[[dict[str, Any]], Any], str]]:
    """What rank 1 of 3 does wrong in its arguments, and what every rank must say."""

    def set_logit(call: dict[str, Any], value: float) -> None:
        call["logits_TL"][2, 5] = value

    def one_token_less(call: dict[str, Any]) -> None:
        for name in ("logits_TL", "token_ids_T", "active_mask"):
            call[name] = call[name][1:]

    def other_id(call: dict[str, Any]) -> None:
        call["token_ids_T"][0] += 1

    def bad_id(call: dict[str, Any]) -> None:
        call["token_ids_T"][3] = VOCAB_SIZE

    def other_mask(call: dict[str, Any]) -> None:
        call["active_mask"][0] = False

    def ignored_active_id(call: dict[str, Any]) -> None:
        call["token_ids_T"][3] = -100

    logits = "logits_TL"
    return {
        "bad id": (bad_id, "rank 1: row 3: token id 1000 is outside the vocabulary [0, 1000)"),
        "NaN": (lambda c: set_logit(c, torch.nan), "rank 1: row 2: logit of token id 405 is NaN"),
        "inf": (lambda c: set_logit(c, torch.inf), "rank 1: row 2: logit of token id 405 is NaN"),
        "dtype": (lambda c: c.update(logits_TL=c[logits].double()), "rank 1: logits should be flo"),
        "mixed": (lambda c: c.update(logits_TL=c[logits].half()), "rank 1 has another dtype of lo"),
        "no tensor": (lambda c: c.update(logits_TL=None), "rank 1: logits should be a tensor"),
        "fewer": (one_token_less, "rank 1 has another number of tokens than rank 0 (299, 300)"),
        "other ids": (other_id, "rank 1 has other token ids than rank 0"),
        "lengths": (lambda c: c.update(token_ids_T=c["token_ids_T"][1:]), "rank 1: token ids shou"),
        "vocabulary": (
            lambda c: c.update(vocab_size=1001),
            "rank 1 has another vocabulary si",
        ),
        "temperature": (lambda c: c.update(temperature=0.5), "rank 1 has another temperature than"),
        "overlap": (lambda c: c.update(vocab_start=399), "rank 1 holds token ids [399, 799), but"),
        "gap": (lambda c: c.update(vocab_start=401), "no rank holds token ids [400, 401), between"),
        "twice": (lambda c: c.update(vocab_start=0), "rank 1 holds token ids [0, 400), but rank 0"),
        "full row": (
            lambda c: c.update(logits_TL=torch.zeros(300, 1000)),
            "rank 2 holds token ",
        ),
        "backend": (lambda c: c.update(backend="fast"), "rank 1: no backend 'fast'; pass one of"),
        "other mask": (other_mask, "rank 1 has another active_mask than rank 0; every rank of"),
        "no mask": (lambda c: c.update(active_mask=None), "rank 1 has another active_mask than"),
        "short mask": (
            lambda c: c.update(active_mask=c["active_mask"][1:]),
            "rank 1: active_mask should be bool [300] on cpu",
        ),
        "mask list": (lambda c: c.update(active_mask=[True]), "rank 1: active_mask should be a b"),
        "ignored active id": (ignored_active_id, "rank 1: row 3: token id -100 is outside the voc"),
        "in place": (
            lambda c: c.update(inplace_backward=True, logits_TL=c[logits].requires_grad_()),
            "rank 1: inplace_backward should get logits that an operation made, got a leaf",
        ),
        "no integer": (lambda c: c.update(vocab_start="0"), "rank 1: vocab_start should be an"),
        "bool": (lambda c: c.update(vocab_start=True), "rank 1: vocab_start should be an integer"),
        "far": (lambda c: c.update(vocab_start=2**63), "rank 1: vocab_start should be 0 or above"),
        "long": (lambda c: c.update(vocab_size=10**9999), "rank 1: vocab_size should be 1 to 370"),
        "hot": (lambda c: c.update(temperature=10**400), "rank 1: temperature should be a finite"),
        "ignored": (lambda c: c.update(ignore_index=2**63), "rank 1: ignore_index should be an i"),
        "no choice": (
            lambda c: c.update(inplace_backward=None),
            "rank 1: inplace_backward should be True or False, got None",
        ),
    }


def faulty_cases(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[str, str, float]]:
    """Type and text of the error, and the seconds it took, for each fault."""
    results = {}
    for name, (break_arguments, _) in faults().items():
        logits, ids = whole_rows(300, torch.float32)
        start = 400 * rank
        call = {
            "logits_TL": logits[:, start : start + 400].clone(),
            "token_ids_T": ids.clone(),
            "vocab_start": start,
            "vocab_size": VOCAB_SIZE,
            # the last row is inactive
            "active_mask": torch.arange(300) < 299,
        }
        if rank == 1:
            break_arguments(call)
        before = time.monotonic()
        try:
            selected_logprob(**call, group=group)
            results[name] = ("nothing", "", 0.0)
        except Exception as error:
            results[name] = (type(error).__name__, str(error), time.monotonic() - before)
    return results


def seconds_until_a_missing_rank_is_given_up(rank: int) -> float:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank > 0:
        # there, and silent: a rank that is gone would be noticed at once
        time.sleep(4)
        return 0.0
    logits, ids = whole_rows(3, torch.float32)
    before = time.monotonic()
    with pytest.raises(RuntimeError):
        selected_logprob(logits[:, :500], ids, vocab_size=VOCAB_SIZE, group=group)
    return time.monotonic() - before


def all_cases(rank: int) -> dict[str, Any]:
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3, 4)}
    sound = {size: sound_cases(rank, group, size) for size, group in groups.items() if rank < size}
    faulty = faulty_cases(rank, groups[3]) if rank < 3 else {}
    dist.barrier()
    return {
        "sound": sound,
        "faulty": faulty,
        "given_up_s": seconds_until_a_missing_rank_is_given_up(rank),
    }


@pytest.fixture(scope="session")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(4, all_cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits(
    results: list[dict[str, Any]], size: int, num_tokens: int, dtype: torch.dtype, layout: str
) -> None:
    logprob, lse, gradient = reference_results(num_tokens, dtype)
    shards = []
    for rank in range(size):
        ours = results[rank]["sound"][size][f"{layout}, {num_tokens} tokens, {dtype}"]
        assert torch.equal(ours[0], logprob)
        assert torch.equal(ours[1], lse)
        shards.append(ours[2])
    whole = torch.cat(shards, dim=1)
    assert torch.equal(whole[:, :VOCAB_SIZE], gradient)
    assert (whole[:, VOCAB_SIZE:] == 0).all()


@pytest.mark.parametrize("fault", faults())
def test_a_fault_of_one_rank_is_the_same_error_on_every_rank(
    results: list[dict[str, Any]], fault: str
) -> None:
    outcomes = [results[rank]["faulty"][fault] for rank in range(3)]
    assert {kind for kind, _, _ in outcomes} == {"ValueError"}
    (message,) = {message for _, message, _ in outcomes}
    assert message.startswith(faults()[fault][1])
    assert max(seconds for _, _, seconds in outcomes) < 5


def test_a_missing_rank_is_waited_for_as_long_as_the_group_says(
    results: list[dict[str, Any]],
) -> None:
    assert 1 < results[0]["given_up_s"] < 10
