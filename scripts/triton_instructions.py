"""Print what the Triton kernels become on a GPU: instructions per element, registers, spills.

The kernels are compiled for each target without a device, by the triton wheel alone. An instruction
counts once where it stands in a loop's body, whichever pipe runs it; the elements of a body are the
bytes that a thread's loads bring over the size of a logit. "max" is the loop that finds a piece's
largest logit, "sum" the one that adds up whole tiles. The gradient has no loop: all of the kernel
counts, over the elements of a thread.

    python scripts/triton_instructions.py [sm_80 sm_90 gfx942]
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlk_kernels import triton as backend
from rlk_kernels.triton_kernels import piece_states, row_states, tile_gradients

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KERNELS = {"piece_states": piece_states, "row_states": row_states, "tile_gradients": tile_gradients}
LOGIT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
POINTERS = {
    "top_ptr": "*i32",
    "bins_ptr": "*i64",
    "invalid_ptr": "*i32",
    "piece_top_ptr": "*i32",
    "piece_bins_ptr": "*i64",
    "piece_invalid_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "target_logit_ptr": "*fp32",
    "has_target_ptr": "*i1",
    "inverse_ptr": "*fp32",
    "exponent_ptr": "*i32",
    "grad_logprob_ptr": "*fp32",
    "weight_ptr": "*fp32",
}
SHAPES = ((1024, 4), (2048, 4), (2048, 8))
"""Block and warps."""
CONVERSION = re.compile(r"F2I|v_cvt_[iu]32_f32")
"""Only the sum turns a float into an integer."""
LARGEST_PIECES = 256
"""A power of two that holds the short pieces of the largest vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A kernel in the target's own instructions."""

    instructions: list[str]
    labels: dict[str, int]
    """Where each label stands: the index of the instruction behind it."""
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Local memory of a thread, which only spills would need here."""


def compiled(
    kernel: str,
    target: str,
    dtype: str,
    *,
    has_temperature: bool = False,
    block: int = backend.BLOCK,
    num_warps: int = backend.NUM_WARPS,
    ones: frozenset[str] = frozenset({"column_stride"}),
    is_aligned: bool = True,
) -> Any:
    """The compiled kernel, made without a device.

    Args:
        kernel: A name in `KERNELS`.
        target: A name in `TARGETS`.
        dtype: Of the logits: "bf16", "fp16" or "fp32".
        has_temperature: Whether logits are divided.
        block: Columns that a program works on at a time.
        num_warps: Of a program.
        ones: Arguments that are 1, for which triton compiles a kernel of its own.
        is_aligned: Whether pointers and counts are multiples of 16.
    """
    function = KERNELS[kernel]
    constants = {
        "BLOCK": block,
        "VECTOR": backend.LOAD_BYTES // LOGIT_BYTES[dtype] if is_aligned else 1,
        "HAS_TEMPERATURE": has_temperature,
        "PIECES": LARGEST_PIECES,
        **dict.fromkeys(ones, 1),
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {name: _type(name, dtype) for name in function.arg_names}
    signature.update(dict.fromkeys(constants, "constexpr"))
    places = [i for i, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in places}
    source = ASTSource(function, signature, constants, aligned if is_aligned else {})
    options = {**backend.COMPILE_OPTIONS, "num_warps": num_warps}
    return triton.compile(source, target=TARGETS[target], options=options)


def _type(argument: str, dtype: str) -> str:
    if argument in ("logits_ptr", "out_ptr"):
        return f"*{dtype}"
    if argument == "temperature":
        return "fp32"
    return POINTERS.get(argument, "i32")


def assembly(kernel: Any) -> Assembly:
    """The instructions of a compiled kernel."""
    return _nvidia_assembly(kernel) if "cubin" in kernel.asm else _amd_assembly(kernel)


def _nvidia_assembly(kernel: Any) -> Assembly:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        sass = _tool("nvdisasm", "-c", str(path))
        usage = _tool("cuobjdump", "-res-usage", str(path))
    instructions, labels = _parsed(
        sass, r"\s*(\.L_\w+):", r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S.*?)\s*;"
    )
    # behind the last exit there is padding
    end = max(place for place, text in enumerate(instructions) if text == "EXIT")
    instructions = instructions[: end + 1]
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Assembly(
        instructions=instructions,
        labels=labels,
        registers=numbers["REG"],
        spilled_bytes=numbers["STACK"] + numbers["LOCAL"],
    )


def _amd_assembly(kernel: Any) -> Assembly:
    text = kernel.asm["amdgcn"]
    code = text[: text.index("s_endpgm")]
    instructions, labels = _parsed(code, r"(\.LBB\w+):", r"\t([a-z]+_[a-z]\w+\b.*)")
    numbers = {n: int(v) for n, v in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    return Assembly(
        instructions=instructions,
        labels=labels,
        registers=numbers["vgpr_count"],
        spilled_bytes=numbers["private_segment_fixed_size"],
    )


def _tool(name: str, *arguments: str) -> str:
    """What one of the tools in the triton wheel prints."""
    path = Path(triton.__path__[0]) / "backends/nvidia/bin" / name
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _parsed(text: str, label: str, instruction: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and the places of labels among them."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(label, line):
            labels[match[1]] = len(instructions)
        elif match := re.match(instruction, line):
            instructions.append(match[1])
    return instructions, labels


def loops(code: Assembly) -> list[list[str]]:
    """The bodies of all loops, from a label to the last jump back to it, in the code's order."""
    ends: dict[int, int] = {}
    for place, text in enumerate(code.instructions):
        match = re.match(r"(?:BRA|s_c?branch).*?(\.L\w+)", text)
        start = code.labels.get(match[1], place + 1) if match else place + 1
        if start <= place:
            ends[start] = place
    return [code.instructions[start : ends[start] + 1] for start in sorted(ends)]


def loaded_elements(body: list[str], dtype: str) -> int:
    """Elements that a thread loads in one run through a loop's body."""
    sizes = {".128": 16, ".64": 8, ".U16": 2, "dwordx4": 16, "dwordx2": 8, "short": 2}
    names = [text.split()[0] for text in body if re.match(r"LDG|global_load", text)]
    found = [[size for mark, size in sizes.items() if mark in name] for name in names]
    return sum(size[0] if size else 4 for size in found) // LOGIT_BYTES[dtype]


def per_element(code: Assembly, dtype: str) -> dict[str, float]:
    """Instructions per element of the two loops of ``piece_states``."""
    bodies = [body for body in loops(code) if loaded_elements(body, dtype)]
    largest = bodies[0]
    added = next(body for body in bodies if any(map(CONVERSION.match, body)))
    return {
        "max": len(largest) / loaded_elements(largest, dtype),
        "sum": len(added) / loaded_elements(added, dtype),
    }


def main(targets: list[str]) -> None:
    """Print one line for each target, dtype, block and number of warps."""
    print(f"triton {triton.__version__}; instructions per element, registers, spilled bytes")
    print("target  dtype  block  warps    max    sum   regs  spill   gradient   regs  spill")
    for target in targets or TARGETS:
        for dtype in LOGIT_BYTES:
            for block, num_warps in SHAPES:
                shape: dict[str, Any] = {"block": block, "num_warps": num_warps}
                states = assembly(compiled("piece_states", target, dtype, **shape))
                count = per_element(states, dtype)
                gradient = assembly(compiled("tile_gradients", target, dtype, **shape))
                elements = block / (num_warps * TARGETS[target].warp_size)
                print(
                    f"{target:6}  {dtype:5}  {block:5}  {num_warps:5}  {count['max']:5.1f}  "
                    f"{count['sum']:5.1f}  {states.registers:5}  {states.spilled_bytes:5}  "
                    f"{len(gradient.instructions) / elements:9.1f}  {gradient.registers:5}  "
                    f"{gradient.spilled_bytes:5}"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
