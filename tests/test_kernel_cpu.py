"""The CPU backend: no fused multiply-add in its machine code, and safe in threads and forks."""

import multiprocessing as mp
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from numba import njit, types

from rlk_fixtures.logits import benign_rows
from rlk_kernels import backend_id, cpu_kernels, expsum_state, finish, selected_logprob


@pytest.fixture(scope="module")
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return benign_rows(9, vocab_size=40_000), torch.arange(9) * 4000


def lse_of(logits: torch.Tensor, ids: torch.Tensor, backend: str = "cpu") -> torch.Tensor:
    state = expsum_state(logits, token_ids=ids, vocab_size=logits.shape[1], backend=backend)
    return finish(state).lse


@pytest.mark.parametrize("name", ["row_states", "row_gradients", "_bin"])
def test_the_machine_code_holds_no_fused_multiply_add(
    rows: tuple[torch.Tensor, torch.Tensor], name: str
) -> None:
    logits = rows[0].requires_grad_()
    selected_logprob(logits, rows[1], vocab_size=40_000).lse.sum().backward()
    kernel = getattr(cpu_kernels, name)
    # compiled again, as numba shows no code that comes from its cache
    fresh = njit(nogil=True, error_model="numpy")(kernel.py_func)
    fresh.compile((types.float32,) if name == "_bin" else kernel.signatures[0])
    (code,) = fresh.inspect_asm().values()
    assert re.search(r"\bv?f?mul[a-z]*\b", code)
    assert not re.search(r"\bv?fn?m(add|sub|la|ls)\w*", code)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_does_not_show(
    rows: tuple[torch.Tensor, torch.Tensor], num_threads: int
) -> None:
    logits, ids = rows[0].detach(), rows[1]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(lse_of(logits, ids), lse_of(logits, ids, "reference"))
    finally:
        torch.set_num_threads(before)


def test_many_threads_may_call_at_once(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, ids = rows[0].detach(), rows[1]
    expected = lse_of(logits, ids)
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: lse_of(logits, ids), range(24)))
    assert all(torch.equal(result, expected) for result in results)


def test_a_forked_child_may_call(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, ids = rows[0].detach(), rows[1]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # the parent's pool has threads by now, which a child does not inherit
        expected = lse_of(logits, ids)
        with mp.get_context("fork").Pool(1) as child:
            result = child.apply_async(_lse_in_child, (logits.numpy(), ids.numpy())).get(60)
    finally:
        torch.set_num_threads(before)
    assert result == expected.tolist()


def _lse_in_child(logits, ids) -> list[float]:
    # torch's own threads do not survive a fork either, and only torch's operations need them
    return lse_of(torch.from_numpy(logits), torch.from_numpy(ids)).tolist()


BIN_OF_100 = """
import numpy
from rlk_kernels.cpu_kernels import _bin
print(_bin(numpy.float32(100)), sum(_bin.stats.cache_hits.values()))
"""


def test_compiled_code_is_not_kept_when_its_constants_change(tmp_path: Path) -> None:
    package = tmp_path / "rlk_kernels"
    shutil.copytree(
        Path(cpu_kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )

    def bin_and_cache_hits() -> list[int]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environment.pop("NUMBA_CACHE_DIR", None)
        command = [sys.executable, "-c", BIN_OF_100]
        return [int(word) for word in subprocess.check_output(command, env=environment).split()]

    # exp(100) is about 2**144
    assert bin_and_cache_hits() == [144 // 21, 0]
    assert bin_and_cache_hits() == [144 // 21, 1]
    constants = package / "expsum.py"
    constants.write_text(constants.read_text().replace("BIN_WIDTH = 21", "BIN_WIDTH = 12"))
    assert bin_and_cache_hits() == [144 // 12, 0]


def test_all_that_is_compiled_in_is_watched() -> None:
    source = Path(cpu_kernels.__file__).read_text()
    imported = re.findall(r"^from rlk_kernels\.(\w+) import", source, re.MULTILINE)
    assert sorted(f"{name}.py" for name in imported) == sorted(cpu_kernels.SOURCES)


def test_the_choice_of_backend_is_said() -> None:
    assert backend_id("auto", "cpu") == "cpu"
    assert backend_id("reference", "cpu") == "reference"
    assert backend_id("auto", "meta") == "reference"
    with pytest.raises(ValueError, match="backend 'cpu' runs on cpu, the logits are on cuda"):
        backend_id("cpu", "cuda")
