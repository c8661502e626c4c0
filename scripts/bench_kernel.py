"""How long the CPU kernel takes against ``log_softmax(fp32) + gather``, and how far both are off.

The two sides alternate in one process; medians. A ratio above 1 means that the kernel is faster.

Example:
    python scripts/bench_kernel.py --tokens 64 --rounds 15
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numba
import torch
from torch import Tensor

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE, benign_rows, sampled_ids
from rlk_kernels import KERNEL_SPEC, backend_id, selected_logprob


def kernel_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """The kernel's logprob of each row's id."""
    return selected_logprob(logits, ids, vocab_size=logits.shape[1]).logprob


def usual_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """The usual code's."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, None])[:, 0]


def medians_ms(actions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median time of each action, one after the other in every round, after a warm-up."""
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        for action, record in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            if turn > 0:
                record.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(record) for record in times]


def forward_and_backward(
    logprob: Callable[[Tensor, Tensor], Tensor], logits: Tensor, ids: Tensor
) -> None:
    """One training step's worth."""
    logits = logits.detach().requires_grad_()
    logprob(logits, ids).sum().backward()


def row(logits: Tensor, ids: Tensor, rounds: int) -> str:
    """One line of the table."""
    sides = (kernel_logprob, usual_logprob)
    ours, usual = medians_ms([partial(side, logits, ids) for side in sides], rounds)
    steps = [partial(forward_and_backward, side, logits, ids) for side in sides]
    our_step, usual_step = medians_ms(steps, rounds)
    exact = torch.log_softmax(logits.double(), dim=-1).gather(-1, ids[:, None])[:, 0]
    errors = [(side(logits, ids).double() - exact).abs().max().item() for side in sides]
    per_row = 1e3 / len(ids)
    return (
        f"{torch.get_num_threads():>7}  {str(logits.dtype).removeprefix('torch.'):<9}"
        f"{ours * per_row:>8.0f}{usual * per_row:>7.0f}{usual / ours:>7.2f}"
        f"{our_step * per_row:>10.0f}{usual_step * per_row:>8.0f}{usual_step / our_step:>7.2f}"
        f"{errors[0]:>11.1e}{errors[1]:>10.1e}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time the CPU kernel against log_softmax.")
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    options = parser.parse_args()
    logits = benign_rows(options.tokens)
    ids = sampled_ids(logits)
    print(
        f"{KERNEL_SPEC}, backend {backend_id('auto', 'cpu')}, {options.tokens} rows of "
        f"{QWEN3_VOCAB_SIZE} columns; torch {torch.__version__}, numba {numba.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
    print("us per row              forward              forward + backward        max error, nats")
    print(
        "threads  dtype      kernel   usual  ratio    kernel   usual  ratio      kernel     usual"
    )
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for dtype in (torch.float32, torch.bfloat16):
            print(row(logits.to(dtype), ids, options.rounds), flush=True)


if __name__ == "__main__":
    main()
