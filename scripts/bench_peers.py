"""Side by side with what people use: error, rows whose bits move, time, memory, in one run.

Each function is measured by ``measure_peer.py``, one after the other. A package that is not
installed has a row that says so. The table goes to stdout, progress to stderr.

    pip install 'trl==1.16.0' 'verl==0.9.1' megatron-core liger-kernel triton

Example:
    python scripts/bench_peers.py --tokens 64 --rounds 9 --json peers.jsonl
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE
from rlk_fixtures.peers import PEERS, Peer

MEASURE = Path(__file__).with_name("measure_peer.py")
TIMEOUT_S = 1800
LEGEND = """\
error: largest distance from float64 log_softmax of the same logits, in nats.
moved: rows with other bits at another TP (2 / 4 against 1; on any rank), in batches of 1 or 7 or in
the opposite order, and with 128 or 640 columns appended that hold -inf / zeros / random logits, at
any TP against the same TP without (padding moves the cuts between ranks). rlk_kernels is told
where the vocabulary ends; the others' softmax includes the padding.
time: median over that of log_softmax(fp32) + gather, alternating in one process; below 1 is faster.
memory: peak resident memory above that before the call, over the bytes of the logits (Linux VmHWM).
-: takes whole rows only, or runs in Triton's interpreter, whose time and memory say nothing.
"""


def records_of(name: str, peer: Peer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What was measured, or one record that says why nothing was."""
    if not is_installed(peer):
        return [{"peer": name, "status": "not installed"}]
    tokens = options.interpreted_tokens if peer.is_interpreted else options.tokens
    flags = {"tokens": tokens, "vocab-size": options.vocab_size, "rounds": options.rounds}
    command = [sys.executable, str(MEASURE), name, "--threads", str(options.threads)]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    command += ["--tp", *map(str, options.tp)]
    try:
        # its complaints go to our stderr
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return [{"peer": name, "status": f"not done in {TIMEOUT_S} s"}]
    if done.returncode != 0:
        return [{"peer": name, "status": "failed, see stderr"}]
    # a library may print as well
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    return [json.loads(line) for line in lines]


def is_installed(peer: Peer) -> bool:
    """Whether its package is; ours may also be on the path without one."""
    try:
        return peer.package == "rlk-align" or bool(version(peer.package))
    except PackageNotFoundError:
        return False


def table_of(records: Sequence[dict[str, Any]], style: box.Box) -> Table:
    """One line per function and dtype."""
    table = Table(box=style)
    table.add_column("function")
    table.add_column("version")
    table.add_column("dtype, in > out")
    for heading in ("rows", "error, nats", "moved: TP", "batch", "padding", "time: fwd"):
        table.add_column(heading, justify="right")
    for heading in ("fwd+bwd", "memory: fwd", "fwd+bwd"):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(*cells_of(record))
    return table


def cells_of(record: dict[str, Any]) -> list[str]:
    """A record as text."""
    if record["status"] != "measured":
        return [record["peer"], record["status"]]
    ratios = ("forward_time", "step_time", "forward_memory", "step_memory")
    return [
        record["peer"],
        record["version"],
        f"{record['dtype']} > {record['output_dtype']}",
        str(record["num_rows"]),
        f"{record['max_error_nats']:.1e}",
        " / ".join(map(str, record["moved_by_tp"].values())) or "-",
        str(record["moved_by_batch"]),
        " / ".join(map(str, record["moved_by_padding"].values())),
        *(f"{r:.2f}" if (r := record[f"{name}_ratio"]) is not None else "-" for name in ratios),
    ]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare the kernel with other functions.")
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--interpreted-tokens", type=int, default=8, metavar="N")
    parser.add_argument("--vocab-size", type=int, default=QWEN3_VOCAB_SIZE, metavar="COLUMNS")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], metavar="RANKS")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the records, one per line")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    options = parser.parse_args(argv)
    machine = {
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": options.threads,
        "num_columns": options.vocab_size,
    }
    records: list[dict[str, Any]] = []
    for name in options.only:
        print(f"bench_peers: {name}", file=sys.stderr, flush=True)
        records += records_of(name, PEERS[name], options)
    if options.json:
        options.json.write_text("".join(json.dumps(r | machine) + "\n" for r in records))
    console = Console()
    if options.markdown or not console.is_terminal:
        console = Console(width=200)
    print(", ".join(f"{key} {value}" for key, value in machine.items()) + "\n")
    console.print(table_of(records, box.MARKDOWN if options.markdown else box.SIMPLE))
    print(LEGEND)


if __name__ == "__main__":
    main()
