"""Sealing: what the workers wrote becomes one capture, or nothing does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlk_align.capture.header import header_from_json
from rlk_align.capture.parts import (
    PartColumns,
    PartEntry,
    check_token_ids,
    read_columns,
    verify_part,
)
from rlk_align.capture.rows import SCHEMA
from rlk_align.capture.sequences import SEQUENCES_FILE, SequenceTable, natural_order
from rlk_align.capture.writer import WORKER_FILE, Prompt, WorkerIdentity
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json, read_json, sha256_of_file, write_atomically
from rlk_align.json_fields import from_json

MANIFEST_FILE = "capture.json"
WORKER_FIELDS = {
    "role", "worker", "layout", "provenance", "weights", "parts", "lost", "closed",
}  # fmt: skip
Progress = Callable[[Iterable[Any]], Iterable[Any]]
TokenTexts = Callable[[Iterable[int]], Mapping[int, str]]


def seal_capture(
    directory: Path, *, token_texts: TokenTexts | None = None, progress: Progress = iter
) -> Path:
    """Verify every part, assemble the sequences, and write the manifest last.

    Args:
        directory: Holds one folder a worker, as `CaptureWriter` leaves them.
        token_texts: Gives the printable text of token ids, for reports; optional.
        progress: May wrap the iteration over parts, to show how far it is.

    Returns:
        The path of the manifest.

    Raises:
        UnusableInput: If a worker is missing, unfinished or disagrees with another, or a part is
            not what its worker wrote.
    """
    workers = _read_workers(directory)
    entries = [PartEntry(**part) for worker in workers for part in worker["parts"]]
    assembly = _Assembly()
    for entry in progress(entries):
        verify_part(directory, entry)
        part = read_columns(directory, entry)
        check_token_ids(entry, part, workers[0]["layout"]["vocab_size"])
        assembly.add(entry, part)
    table, incomplete = assembly.sequences(token_texts)
    write_atomically(directory / SEQUENCES_FILE, table.to_bytes())
    first = workers[0]
    manifest = {
        "schema": SCHEMA,
        "role": first["role"],
        "layout": first["layout"],
        "provenance": {**first["provenance"], "environment": _merged_environment(workers)},
        "weights": first["weights"],
        "workers": [worker["worker"] for worker in workers],
        "parts": [asdict(entry) for entry in entries],
        "sequences": {
            "path": SEQUENCES_FILE,
            "sha256": sha256_of_file(directory / SEQUENCES_FILE),
            "count": len(table),
        },
        "incomplete": incomplete,
        "lost": _total_lost(workers),
    }
    manifest["seal"] = manifest_digest(manifest)
    write_atomically(directory / MANIFEST_FILE, canonical_json(manifest, indent=1))
    return directory / MANIFEST_FILE


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest's canonical JSON without its own ``seal``."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(canonical_json(rest)).hexdigest()


class _Assembly:
    """Token ids of every sequence, put together from the rows of all workers."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        # label -> position -> (step, token id)
        self._tokens: dict[str, dict[int, tuple[int, int]]] = {}
        self._dp_ranks: dict[str, int] = {}

    def add(self, entry: PartEntry, part: PartColumns) -> None:
        for label in (*part.prompts, *part.labels):
            replica = self._dp_ranks.setdefault(label, entry.dp_rank)
            if replica != entry.dp_rank:
                raise UnusableInput(
                    f"label {label!r} is used by data-parallel ranks {replica} and "
                    f"{entry.dp_rank}; labels are unique in a capture"
                )
        for label, prompt in part.prompts.items():
            if self._prompts.setdefault(label, prompt) != prompt:
                raise UnusableInput(
                    f"{entry.path}: another prompt for {label!r} than other workers"
                )
        if not entry.rows:
            return
        columns = (
            part.columns[name].tolist() for name in ("sequence", "position", "step", "token_id")
        )
        for sequence, position, step, token_id in zip(*columns, strict=True):
            tokens = self._tokens.setdefault(part.labels[sequence], {})
            known = tokens.get(position, (-1, -1))
            if known[0] == step and known[1] != token_id:
                raise UnusableInput(
                    f"{entry.path}: {part.labels[sequence]!r} position {position} has token "
                    f"{token_id}, another rank has {known[1]}; ranks must agree on every token"
                )
            if step > known[0]:
                tokens[position] = (step, token_id)

    def sequences(
        self, token_texts: TokenTexts | None
    ) -> tuple[SequenceTable, list[dict[str, str]]]:
        """The table of the whole sequences, and those that have a hole, with the place."""
        incomplete, whole = [], {}
        for label in sorted(self._prompts, key=natural_order):
            ids = list(self._prompts[label].token_ids)
            sampled = {p: t for p, (_, t) in self._tokens.get(label, {}).items() if p >= len(ids)}
            if not sampled:
                continue
            hole = next((p for p in range(len(ids), max(sampled) + 1) if p not in sampled), None)
            if hole is None:
                whole[label] = ids + [sampled[p] for p in sorted(sampled)]
            else:
                incomplete.append({"label": label, "reason": f"no row at position {hole}"})
        occurring = {i for ids in whole.values() for i in ids}
        return SequenceTable(
            token_ids=list(whole.values()),
            prompt_lengths=[len(self._prompts[label].token_ids) for label in whole],
            labels=list(whole),
            sampling=[self._prompts[label].sampling for label in whole],
            token_texts=token_texts(occurring) if token_texts else {},
        ), incomplete


def _read_workers(directory: Path) -> list[dict[str, Any]]:
    if (directory / MANIFEST_FILE).exists():
        raise UnusableInput(f"{directory} is sealed already")
    paths = sorted(directory.glob(f"*/{WORKER_FILE}"))
    if not paths:
        raise UnusableInput(
            f"{directory}: no worker wrote a capture here; was the capture switched on?"
        )
    workers: list[dict[str, Any]] = [read_json(path) for path in paths]
    for path, worker in zip(paths, workers, strict=True):
        name = path.parent.name
        _check_worker(worker, name)
        for field in ("role", "layout", "weights"):
            if worker[field] != workers[0][field]:
                raise UnusableInput(f"{name}: its {field} is not that of {paths[0].parent.name}")
        for field, value in worker["provenance"].items():
            if field != "environment" and value != workers[0]["provenance"][field]:
                raise UnusableInput(f"{name}: its {field} is not that of {paths[0].parent.name}")
    _check_all_ranks(workers)
    return sorted(workers, key=lambda w: (w["worker"]["dp_rank"], w["worker"]["tp_rank"]))


def _check_worker(worker: dict[str, Any], name: str) -> None:
    """What is sealed must open again, so a worker's index is held to what the reader asks."""
    if worker.get("schema") != SCHEMA:
        raise UnusableInput(
            f"{name}: schema {worker.get('schema')!r}; this version reads {SCHEMA!r}"
        )
    if absent := sorted(WORKER_FIELDS - worker.keys()):
        raise UnusableInput(f"{name}: {WORKER_FILE} has no field {absent[0]!r}")
    if not worker["closed"]:
        raise UnusableInput(
            f"{name}: the worker did not finish; flush and close it, or run it again"
        )
    where = f"{name}/{WORKER_FILE}"
    try:
        header_from_json(worker, where)
        from_json(WorkerIdentity, worker["worker"], f"{where}: worker")
        canonical_json(worker)
    except UnusableInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableInput(f"{where}: incomplete ({error!r})") from None


def _check_all_ranks(workers: list[dict[str, Any]]) -> None:
    found = {(w["worker"]["dp_rank"], w["worker"]["tp_rank"]) for w in workers}
    tp_size = len(workers[0]["layout"]["bounds"])
    for dp_rank in sorted({dp for dp, _ in found}):
        for tp_rank in range(tp_size):
            if (dp_rank, tp_rank) not in found:
                raise UnusableInput(
                    f"tensor-parallel rank {tp_rank} of {tp_size} wrote nothing (data-parallel "
                    f"rank {dp_rank}); switch the capture on for every worker"
                )


def _merged_environment(workers: list[dict[str, Any]]) -> dict[str, str]:
    """One value a variable; where workers differ, every value that occurs."""
    environments = [worker["provenance"]["environment"] for worker in workers]
    names = sorted({name for environment in environments for name in environment})
    values = {
        name: list(dict.fromkeys(e.get(name, "unset") for e in environments)) for name in names
    }
    return {name: " | ".join(found) for name, found in values.items()}


def _total_lost(workers: list[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for worker in workers:
        for reason, rows in worker["lost"].items():
            total[reason] = total.get(reason, 0) + rows
    return total
