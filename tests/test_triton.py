"""The Triton backend gives the reference's bits, and its machine code does what those bits need.

Without a GPU its arithmetic runs in triton's interpreter, once for all tests, and its kernels are
compiled for GPUs that are not there and read as assembly. With one, the same rows run on it.
"""

import os
import re
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from rlk_fixtures.logits import benign_rows, expsum_vectors
from rlk_kernels import backend_id, finish, reference
from rlk_kernels.expsum import State

# torch for the CPU comes without triton
pytest.importorskip("triton", reason="triton is not installed")

import triton_rows
from triton_rows import CASES, STATE_FIELDS, WITH_GRADIENT, Case

from rlk_kernels import triton as backend
from scripts.triton_instructions import LOGIT_BYTES, assembly, compiled, per_element

INTERPRETER_TIMEOUT_S = 300
FUSED = re.compile(r"FFMA|DFMA|v_(pk_)?(fma|mad|mac|fmac)\w*_f")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    path = tmp_path_factory.mktemp("triton") / "results.pt"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", triton_rows.__file__, str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=INTERPRETER_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def bits(values: Tensor) -> Tensor:
    """Integers, so that NaN equals itself and -0.0 is not 0.0."""
    integer = {4: torch.int32, 2: torch.int16}.get(values.element_size())
    return values.cpu().view(integer) if values.is_floating_point() else values.cpu()


def assert_same_state(ours: State, expected: State) -> None:
    for part in STATE_FIELDS:
        assert torch.equal(bits(getattr(ours, part)), bits(getattr(expected, part))), part


@pytest.mark.parametrize("name", CASES)
def test_states_have_the_bits_of_the_reference(name: str, interpreted: dict[str, Tensor]) -> None:
    ours = State(**{part: interpreted[f"{name}/{part}"] for part in STATE_FIELDS})
    assert_same_state(ours, triton_rows.state(CASES[name](), reference))


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradients_have_the_bits_of_the_reference(
    name: str, interpreted: dict[str, Tensor]
) -> None:
    case = CASES[name]()
    expected = triton_rows.gradient(case, reference, torch.empty(case.logits_TL.shape))
    assert torch.equal(bits(interpreted[f"{name}/gradient"]), bits(expected))


def test_a_gradient_may_replace_its_logits(interpreted: dict[str, Tensor]) -> None:
    name = "language model fp16"
    case = CASES[name]()
    expected = triton_rows.gradient(case, reference, torch.empty_like(case.logits_TL))
    assert torch.equal(bits(interpreted[f"{name}/in place"]), bits(expected))


@pytest.mark.parametrize("vector", expsum_vectors(), ids=lambda vector: vector.name)
def test_a_vector_is_reproduced_bit_for_bit(vector, interpreted: dict[str, Tensor]) -> None:
    state = State(**{part: interpreted[f"{vector.name}/{part}"] for part in STATE_FIELDS})
    values = finish(state)
    assert (state.top.tolist(), state.bins.tolist()) == ([vector.top], [list(vector.bins)])
    found = [f"{int(bits(v)) & 0xFFFFFFFF:08x}" for v in (values.logprob, values.lse)]
    assert found == [vector.logprob_bits, vector.lse_bits]


@pytest.mark.parametrize(
    ("target", "dtype"),
    # sm_80 once: it differs by its instructions, not by what is asked of it
    [("sm_80", "bf16"), *product(["sm_90", "gfx942"], LOGIT_BYTES)],
)
def test_machine_code_fuses_nothing_and_spills_nothing(target: str, dtype: str) -> None:
    for kernel in ("piece_states", "tile_gradients"):
        built = compiled(kernel, target, dtype)
        code = assembly(built)
        assert [text for text in code.instructions if FUSED.match(text)] == []
        assert "fma" not in built.asm.get("ptx", "")
        assert code.spilled_bytes == 0
        if kernel == "piece_states":
            count = per_element(code, dtype)
            print(f"{target} {dtype}: {count} instructions per element")
            # measured with triton 3.9: 37.6 to 39.1 on NVIDIA, 26.1 to 26.5 on AMD
            assert count["sum"] < 40


@pytest.mark.parametrize("kernel", ["piece_states", "row_states", "tile_gradients"])
def test_temperature_is_one_ieee_division_and_nothing_else_is_fused(kernel: str) -> None:
    # looked at where a division is one operation: further down it is made of fused ones
    nvidia = compiled(kernel, "sm_90", "fp32", has_temperature=True).asm["ptx"]
    assert set(re.findall(r"\bdiv\.\S*f32", nvidia)) == {"div.rn.f32"}
    assert "fma" not in nvidia
    amd = compiled(kernel, "gfx942", "fp32", has_temperature=True).asm["llir"]
    # no flag before the type, no metadata that allows an error
    assert set(re.findall(r"fdiv (\S+)", amd)) <= {"float", "<2", "<4", "<8", "<16"}
    assert "fdiv" in amd
    assert not re.search(r"fpmath|llvm\.fma|fmuladd", amd)


def test_a_gpu_rounds_bfloat16_to_nearest_even() -> None:
    for target in ("sm_80", "sm_90"):
        assert "cvt.rn.bf16x2.f32" in compiled("tile_gradients", target, "bf16").asm["ptx"]
    # gfx942 has no such instruction; triton adds 0x7fff and the last kept bit in integers
    amd = compiled("tile_gradients", "gfx942", "bf16").asm["amdgcn"]
    assert "0x7fff" in amd
    assert "v_add3_u32" in amd


def test_every_argument_may_be_one_and_nothing_need_be_aligned() -> None:
    # triton compiles a kernel of its own where an integer argument is 1
    ones = {"row_stride", "column_stride", "num_columns", "vocab_start", "num_pieces"}
    ones |= {"out_row_stride", "out_column_stride"}
    for kernel in ("piece_states", "row_states", "tile_gradients"):
        for some in (frozenset(ones), frozenset({"column_stride"}), frozenset[str]()):
            code = assembly(compiled(kernel, "sm_90", "bf16", ones=some, is_aligned=False))
            assert code.spilled_bytes == 0


def test_only_a_gpu_gets_this_backend() -> None:
    assert backend_id("auto", "cuda") == "triton"
    assert backend_id("auto", "cpu") == "cpu"
    with pytest.raises(ValueError, match="'triton' runs on cuda, the logits are on cpu"):
        backend_id("triton", "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [name for name in CASES if name != "beyond int32"])
def test_a_gpu_has_the_bits_of_the_reference(name: str) -> None:
    case = CASES[name]()
    on_gpu = Case(**{**vars(case), "logits_TL": case.logits_TL.cuda()})
    assert_same_state(triton_rows.state(on_gpu, backend), triton_rows.state(case, reference))
    expected = triton_rows.gradient(case, reference, torch.empty_like(case.logits_TL))
    ours = triton_rows.gradient(on_gpu, backend, torch.empty_like(on_gpu.logits_TL))
    assert torch.equal(bits(ours), bits(expected))


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_reads_beyond_int32_and_ten_thousand_rows() -> None:
    # 14336 rows of 151936 columns pass 2**31 elements
    rows = benign_rows(64).bfloat16()
    logits_TL = rows.cuda().repeat(224, 1)
    ids = torch.arange(len(logits_TL)) % rows.shape[1]
    ours = backend.expsum_state(logits_TL, ids.cuda(), 0, 1.0)
    for first in (0, len(logits_TL) - 64):
        some = slice(first, first + 64)
        expected = reference.expsum_state(rows, ids[some], 0, 1.0)
        assert_same_state(
            State(**{part: getattr(ours, part)[some] for part in STATE_FIELDS}), expected
        )
