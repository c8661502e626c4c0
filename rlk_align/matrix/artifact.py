"""What is archived of a case: strict JSON that a reviewer can hold against another machine's."""

from __future__ import annotations

from pathlib import Path

import torch

from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json, read_json, write_atomically
from rlk_align.matrix.case import INPUT_FIELDS, MatrixCase
from rlk_align.matrix.evaluation import Evaluation, Statistics
from rlk_align.matrix.grid import Grid
from rlk_align.matrix.worker import RankRecord
from rlk_align.provenance import (
    git_state,
    launch_command,
    numeric_environment,
    software_versions,
)
from rlk_kernels import KERNEL_SPEC

SCHEMA_VERSION = 1
KIND = "rlk-align matrix case"


def artifact_of(
    case: MatrixCase, grid: Grid, records: list[RankRecord], evaluation: Evaluation
) -> dict[str, object]:
    """The whole case as strict JSON, failed or not."""
    values = next((record.values for record in records if record.values is not None), None)
    told = {} if values is None else dict(values.dispatch)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "case_id": case.case_id,
        "case": case.to_dict(),
        "launch_command": launch_command(),
        "environment": _environment(grid),
        "kernel_spec": KERNEL_SPEC,
        "contract": case.contract(0).to_dict(),
        "capability": told.get("capability"),
        "backend": {
            "requested": case.backend,
            **{name: told.get(name) for name in ("actual", "platform", "fallback", "rejections")},
        },
        "ranks": [
            _rank(record, statistics)
            for record, statistics in zip(records, evaluation.per_rank, strict=True)
        ],
        "aggregate": None if evaluation.aggregate is None else evaluation.aggregate.to_dict(),
        "fingerprints": {
            "logprob_sha256": evaluation.logprob_sha256,
            "lse_sha256": evaluation.lse_sha256,
        },
        "checks": [check._asdict() for check in evaluation.checks],
        "passed": evaluation.passed,
    }


def artifact_path(directory: Path, case: MatrixCase) -> Path:
    """Where a case's artifact lies."""
    return directory / f"{case.name}-{case.case_id}.json"


def write_artifact(path: Path, artifact: dict[str, object]) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, canonical_json(artifact, indent=1))


def read_artifact(path: Path) -> dict[str, object]:
    """An artifact of this schema.

    Raises:
        UnusableInput: If the file holds anything else, or no check was made.
    """
    content = read_json(path)
    found = (content.get("kind"), content.get("schema_version"))
    if found != (KIND, SCHEMA_VERSION):
        raise UnusableInput(
            f"{path}: {KIND!r} of schema {SCHEMA_VERSION} is expected, not {found[0]!r} of "
            f"{found[1]!r}; read it with the version that wrote it"
        )
    if not content.get("checks"):
        raise UnusableInput(f"{path}: no check was made, so nothing is proved; run the case again")
    return content


def inputs_key(artifact: dict[str, object]) -> str:
    """What the rows were made from; artifacts of one key must have one pair of fingerprints."""
    case = artifact["case"]
    assert isinstance(case, dict)
    return canonical_json({name: case[name] for name in INPUT_FIELDS}).decode()


def _environment(grid: Grid) -> dict[str, object]:
    is_gpu = grid.device != "cpu"
    return {
        "software": software_versions(),
        "variables": numeric_environment(),
        "git": git_state(),
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "transport": grid.transport,
        "torch_threads": torch.get_num_threads(),
    }


def _rank(record: RankRecord, statistics: Statistics | None) -> dict[str, object]:
    return {
        "rank": record.rank,
        "tp_rank": record.tp_rank,
        "cp_rank": record.cp_rank,
        "tokens": list(record.tokens),
        "error": record.error,
        "statistics": None if statistics is None else statistics.to_dict(),
    }
