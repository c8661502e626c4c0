"""Rows for the Triton backend, and the program that sends them through triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET when kernels are defined, for a whole process. So this
runs as a process of its own, and no other test and no engine sees the variable. Tiles and pieces
are larger here than on a GPU, as the interpreter pays by the operation and no size changes a bit;
the case "tiles as on a GPU" keeps the real ones.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE, benign_rows, expsum_vectors, peaked_row
from rlk_kernels import reference
from rlk_kernels import triton as backend
from rlk_kernels.expsum import State
from rlk_kernels.finish import row_sum

V = QWEN3_VOCAB_SIZE
STATE_FIELDS = ("top", "bins", "target_logit", "has_target", "invalid_column")
FAST_IN_THE_INTERPRETER = {"BLOCK": 16384, "LONG_PIECE": 65536, "SHORT_PIECE": 65536}


@dataclass(frozen=True, kw_only=True)
class Case:
    logits_TL: Tensor
    token_ids: list[int]
    vocab_start: int = 0
    temperature: float = 1.0
    sizes: dict[str, int] = field(default_factory=lambda: FAST_IN_THE_INTERPRETER)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, float]:
        ids = torch.tensor(self.token_ids, device=self.logits_TL.device)
        return self.logits_TL, ids, self.vocab_start, self.temperature


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def language_model(dtype: torch.dtype) -> Case:
    return Case(logits_TL=benign_rows(1).to(dtype), token_ids=[V - 1])


def shapes_of_rows() -> Case:
    rows = [peaked_row(0.9999999), torch.full((V,), 3.25), 30 * noise(V), noise(V) + 8000]
    return Case(logits_TL=torch.stack(rows), token_ids=[0, 5, 70000, V - 1])


def masked() -> Case:
    logits_TL = 4 * noise(4, V)
    logits_TL[0, 1::2] = -torch.inf
    logits_TL[1] -= 8185  # some columns are masked, and would fall into a bin
    logits_TL[2, :100] = -1e4
    logits_TL[2, 100:] = -3e38
    logits_TL[3, : V - 1] = -torch.inf
    return Case(logits_TL=logits_TL, token_ids=[1, 7, 50, V - 1])


def invalid(dtype: torch.dtype) -> Case:
    logits_TL = (4 * noise(6, 16400)).to(dtype)
    logits_TL[0, [16399, 10000]] = torch.nan
    logits_TL[1, [8, 16399]] = torch.inf
    logits_TL[2, 16399] = 8200
    logits_TL[3, 17] = -torch.nan
    logits_TL[4] -= 8170
    logits_TL[4, 9] = torch.nan
    logits_TL[5] = torch.nan
    return Case(logits_TL=logits_TL, token_ids=[10000, 8, 3, 4, 5, 6])


def divided(temperature: float, dtype: torch.dtype) -> Case:
    logits_TL = benign_rows(3, vocab_size=20000)
    logits_TL[1, 5] = 8000.0
    logits_TL[2] -= 6000
    return Case(logits_TL=logits_TL.to(dtype), token_ids=[9, 9, 9], temperature=temperature)


def shard_in_poison() -> Case:
    poisoned = torch.full((3, 50021), torch.nan, dtype=torch.bfloat16)
    shard = poisoned[:, 7 : 7 + 33333]
    shard.copy_(6 * noise(3, 33333))
    ids = [118602, 118601, 151934]  # one before, the first and the last column
    return Case(logits_TL=shard, token_ids=ids, vocab_start=118602)


def columns_apart() -> Case:
    return Case(logits_TL=(5 * noise(20001, 3)).t(), token_ids=[0, 20000, 500])


def beyond_int32() -> Case:
    stride = 2**31 + 7
    # never touched between the two rows, so it costs no memory
    logits_TL = torch.empty(stride + 100, dtype=torch.float16).as_strided((2, 100), (stride, 1))
    logits_TL.copy_(noise(2, 100))
    return Case(logits_TL=logits_TL, token_ids=[3, 99])


def tiles_as_on_a_gpu() -> Case:
    # three whole tiles and a part, long pieces, two launches
    sizes = {"FEW_ROWS": 1, "LONG_PIECE": 2 * backend.BLOCK, "MAX_PROGRAMS": 4}
    return Case(logits_TL=9 * noise(3, 3 * 2048 + 5), token_ids=[0, 6148, 77], sizes=sizes)


def one_column() -> Case:
    return Case(logits_TL=torch.tensor([[2.5], [-torch.inf]]), token_ids=[0, 0])


CASES: dict[str, Callable[[], Case]] = {
    "language model bf16": lambda: language_model(torch.bfloat16),
    "language model fp16": lambda: language_model(torch.float16),
    "language model fp32": lambda: language_model(torch.float32),
    "peaked, flat, wide, high": shapes_of_rows,
    "masked": masked,
    "invalid bf16": lambda: invalid(torch.bfloat16),
    "invalid fp32": lambda: invalid(torch.float32),
    "temperature 0.7": lambda: divided(0.7, torch.float32),
    "temperature 1.7 bf16": lambda: divided(1.7, torch.bfloat16),
    "shard in poison": shard_in_poison,
    "columns apart": columns_apart,
    "beyond int32": beyond_int32,
    "tiles as on a GPU": tiles_as_on_a_gpu,
    "one column": one_column,
}
WITH_GRADIENT = [
    "language model fp16",
    "language model fp32",
    "masked",
    "temperature 0.7",
    "temperature 1.7 bf16",
    "shard in poison",
    "columns apart",
    "tiles as on a GPU",
    "one column",
]


def state(case: Case, implementation: object) -> State:
    return implementation.expsum_state(*case.arguments)


def gradient(case: Case, implementation: object, out_TL: Tensor) -> Tensor:
    """Write it to ``out_TL``, from the reference's sums."""
    total = row_sum(reference.expsum_state(*case.arguments))
    device = case.logits_TL.device
    grad_logprob, grad_lse = noise(2, len(case.token_ids), seed=1).to(device)
    implementation.logits_gradient(
        *case.arguments,
        **total._asdict(),
        grad_logprob=grad_logprob,
        grad_lse=grad_lse,
        out_TL=out_TL,
    )
    return out_TL


def main(path: Path) -> None:
    """Save the backend's states and gradients of all cases and golden vectors."""
    own_sizes = {name: getattr(backend, name) for name in (*FAST_IN_THE_INTERPRETER, "FEW_ROWS")}
    own_sizes["MAX_PROGRAMS"] = backend.MAX_PROGRAMS
    results: dict[str, Tensor] = {}
    cases = {name: make() for name, make in CASES.items()}
    for vector in expsum_vectors():
        cases[vector.name] = Case(logits_TL=vector.logits[None], token_ids=[vector.target])
    for name, case in cases.items():
        for constant, value in {**own_sizes, **case.sizes}.items():
            setattr(backend, constant, value)
        found = state(case, backend)
        results |= {f"{name}/{part}": getattr(found, part) for part in STATE_FIELDS}
        if name in WITH_GRADIENT:
            # the interpreter cuts float32 to bfloat16 where a GPU rounds: see it before the cast
            out_TL = torch.full(case.logits_TL.shape, torch.nan)
            results[f"{name}/gradient"] = gradient(case, backend, out_TL)
            if case.logits_TL.dtype == torch.float16:
                results[f"{name}/in place"] = gradient(case, backend, case.logits_TL).clone()
    torch.save(results, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
