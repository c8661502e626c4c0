"""Run a function on several gloo processes and show a failing rank's own error."""

import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_TIMEOUT = timedelta(seconds=30)


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a gloo group; its results by rank.

    The function is importable by name. Processes meet at a file, not a port, and leave their
    results in files. Whatever still runs after ``timeout_s`` is killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_run_rank, args=(rank, num_ranks, folder, function, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in late:
            processes[rank].kill()
        # the first to fail is the cause: the others fail because they wait for it
        errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise AssertionError(f"{errors[0].stem}:\n{errors[0].read_text()}")
        if late:
            raise AssertionError(f"ranks {late} did not end within {timeout_s} s")
        return [torch.load(folder / f"rank-{rank}.pt") for rank in range(num_ranks)]


def _run_rank(
    rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meet'}",
            rank=rank,
            world_size=num_ranks,
            timeout=COLLECTIVE_TIMEOUT,
        )
        torch.save(function(rank, *args), folder / f"rank-{rank}.pt")
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
