"""Measures one selected-token logprob function: error, rows whose bits move, time, memory.

Prints one JSON line per dtype. ``bench_peers.py`` runs this for every function, each in processes
of its own, so that no library sees what another one has set. Every call gets its own copy of the
logits, as some functions write into theirs; the copy is neither timed nor counted as memory.

Letters: T tokens (rows), V columns of all ranks.

Example:
    python scripts/measure_peer.py "trl selective_log_softmax" --tokens 64
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE, benign_rows, sampled_ids
from rlk_fixtures.peers import PEERS, Layout, Logprob, Peer, usual_logprob
from rlk_kernels import KERNEL_SPEC

DTYPES = (torch.float32, torch.bfloat16)
PADDINGS = (128, 640)
"""Extra columns: what Megatron adds to Qwen3's 151936 at TP 2 or 4, and at TP 8."""
BATCHES = (1, 7)
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
Action = Callable[[Logprob, Tensor], None]


class Subject:
    """A function on this rank with the seeded rows it is asked about."""

    def __init__(
        self, function: Logprob, peer: Peer, dtype: torch.dtype, options: argparse.Namespace
    ) -> None:
        self.function, self.context = function, peer.context
        self.vocab_size: int = options.vocab_size
        logits_TV = benign_rows(options.tokens, vocab_size=self.vocab_size)
        self.ids = sampled_ids(logits_TV)
        self.logits_TV = logits_TV.to(dtype)

    def layout(self, num_columns: int) -> Layout:
        """Of this rank, where every rank has as many columns."""
        start = dist.get_rank() * num_columns // dist.get_world_size()
        return Layout(start=start, num_columns=num_columns, vocab_size=self.vocab_size)

    @torch.no_grad()
    def values(self, logits_TV: Tensor, ids: Tensor) -> Tensor:
        """Logprobs [T]; the logits are copied, as some functions write into theirs."""
        layout = self.layout(logits_TV.shape[1])
        end = layout.start + layout.num_columns // dist.get_world_size()
        with self.context():
            return self.function(logits_TV[:, layout.start : end].clone(), ids, layout)

    def forward(self, function: Logprob, logits_TV: Tensor) -> None:
        """Values alone."""
        with torch.no_grad(), self.context():
            function(logits_TV, self.ids, self.layout(self.vocab_size))

    def step(self, function: Logprob, logits_TV: Tensor) -> None:
        """Values and the gradient of their sum."""
        with self.context():
            logits_TV.requires_grad_()
            function(logits_TV, self.ids, self.layout(self.vocab_size)).sum().backward()

    def max_error(self, values: Tensor) -> float:
        """Largest distance in nats from float64."""
        exact = torch.log_softmax(self.logits_TV.double(), -1).gather(-1, self.ids[:, None])[:, 0]
        return (values.double() - exact).abs().max().item()

    def moved_by_batch(self, whole: Tensor) -> int:
        """Rows whose bits change when they come in other batches, or in the opposite order."""
        moved = whole != self.values(self.logits_TV.flip(0), self.ids.flip(0)).flip(0)
        for size in BATCHES:
            pairs = zip(self.logits_TV.split(size), self.ids.split(size), strict=True)
            moved |= whole != torch.cat([self.values(*pair) for pair in pairs])
        return int(moved.sum())

    def moved_by_padding(self, whole: Tensor) -> dict[str, Tensor]:
        """Which rows' bits change when columns are appended, by what these hold."""
        noise = 2 * torch.randn(len(whole), max(PADDINGS), generator=torch.Generator())
        fills = {"-inf": torch.full_like(noise, -torch.inf), "zero": 0 * noise, "random": noise}
        moved_by_fill = {}
        for name, fill in fills.items():
            moved = torch.zeros(len(whole), dtype=torch.bool)
            for width in PADDINGS:
                padded = torch.cat([self.logits_TV, fill[:, :width].to(self.logits_TV.dtype)], 1)
                moved |= whole != self.values(padded, self.ids)
            moved_by_fill[name] = moved
        return moved_by_fill

    def time_ratio(self, action: Action, rounds: int) -> float:
        """Median time of an action over that of the usual function, alternating."""
        times: dict[Logprob, list[float]] = {usual_logprob: [], self.function: []}
        for turn in range(rounds + 1):
            for function, record in times.items():
                logits_TV = self.logits_TV.clone()
                start = time.perf_counter()
                action(function, logits_TV)
                if turn > 0:
                    record.append(time.perf_counter() - start)
        usual, *peer = (statistics.median(record) for record in times.values())
        return peer[0] / usual if peer else 1.0

    def peak_memory(self, action: Action) -> float:
        """Peak resident memory above that before the action, over the bytes of the logits."""
        logits_TV = self.logits_TV.clone()
        ctypes.CDLL(None).malloc_trim(0)
        # Linux: resets the peak
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        action(self.function, logits_TV)
        return (resident_bytes("VmHWM") - before) / logits_TV.nbytes


def resident_bytes(field: str) -> int:
    """A field of the kernel's account of this process."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def measure_rank(rank: int, size: int, folder: Path, options: argparse.Namespace) -> None:
    """Leaves in a file what this rank has for each dtype: values, rows moved, other measures."""
    torch.set_num_threads(options.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'meet-{size}'}",
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    peer = PEERS[options.peer]
    function, results = peer.load(), []
    for dtype in DTYPES:
        subject = Subject(function, peer, dtype, options)
        values = subject.values(subject.logits_TV, subject.ids)
        measures = whole_row_measures(subject, values, options) if size == 1 else {}
        results.append((values, subject.moved_by_padding(values), measures))
    torch.save(results, folder / f"tp{size}-rank{rank}.pt")
    dist.destroy_process_group()


def whole_row_measures(
    subject: Subject, values: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """The columns of the table that one process can fill."""
    measures = {
        "output_dtype": name_of(values.dtype),
        "max_error_nats": subject.max_error(values),
        "moved_by_batch": subject.moved_by_batch(values),
    }
    actions = {"forward": subject.forward, "step": subject.step}
    for name, action in actions.items():
        skip = PEERS[options.peer].is_interpreted
        measures[f"{name}_time_ratio"] = (
            None if skip else subject.time_ratio(action, options.rounds)
        )
        measures[f"{name}_memory_ratio"] = None if skip else subject.peak_memory(action)
    return measures


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per dtype."""
    sizes = options.tp if PEERS[options.peer].is_sharded else [1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in sizes:
            spawn(measure_rank, (size, folder, options), nprocs=size)
        ranks = {
            size: [torch.load(folder / f"tp{size}-rank{rank}.pt") for rank in range(size)]
            for size in sizes
        }
    return [record(options, ranks, index) for index in range(len(DTYPES))]


def record(options: argparse.Namespace, ranks: dict[int, list[Any]], index: int) -> dict[str, Any]:
    """What all ranks of all sizes found for one dtype."""
    found = {size: [rank[index] for rank in group] for size, group in ranks.items()}
    whole, padding, measures = found[1][0]
    moved = {
        size: num_moved([whole != values for values, *_ in group])
        for size, group in found.items()
        if size > 1
    }
    everywhere = [masks for group in found.values() for _, masks, _ in group]
    return {
        "peer": options.peer,
        "status": "measured",
        "version": peer_version(PEERS[options.peer]),
        "dtype": name_of(DTYPES[index]),
        "num_rows": len(whole),
        "moved_by_tp": moved,
        "moved_by_padding": {fill: num_moved([m[fill] for m in everywhere]) for fill in padding},
        **measures,
    }


def num_moved(masks: list[Tensor]) -> int:
    """Rows that any of the masks has."""
    return int(torch.stack(masks).any(0).sum())


def peer_version(peer: Peer) -> str:
    """Of the package, or the kernel's own name for what it computes."""
    return KERNEL_SPEC if peer.package == "rlk-align" else version(peer.package)


def name_of(dtype: torch.dtype) -> str:
    """Without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def options_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Measure one logprob function.")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--vocab-size", type=int, default=QWEN3_VOCAB_SIZE, metavar="COLUMNS")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], metavar="RANKS")
    options = parser.parse_args(argv)
    if 1 not in options.tp or any(options.vocab_size % size for size in options.tp):
        parser.error(
            f"--tp must hold 1 and divisors of the {options.vocab_size} columns, not {options.tp}"
        )
    return options


def main(argv: list[str] | None = None) -> None:
    """Print the lines."""
    options = options_of(argv)
    if PEERS[options.peer].is_interpreted:
        # triton reads it when it is imported, which only the ranks do
        os.environ["TRITON_INTERPRET"] = "1"
    for line in measure(options):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
