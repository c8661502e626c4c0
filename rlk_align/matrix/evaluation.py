"""From the ranks' records to named checks, statistics and the fingerprints of the whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_align.contract import LogitsDtype
from rlk_align.matrix.case import MatrixCase
from rlk_align.matrix.differences import Differences, DifferenceStatus, differences, is_within
from rlk_align.matrix.oracle import Exact
from rlk_align.matrix.worker import RankRecord, RankValues

KERNEL_LIMIT_ULP = 1.5
STORAGE_LIMIT_NATS = {LogitsDtype.FP32: 1e-5, LogitsDtype.FP16: 5e-3, LogitsDtype.BF16: 0.06}
"""Absolute, with no relative part: the tolerance contract of storing logits in a dtype."""


class Check(NamedTuple):
    """One thing that has to hold."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Against the two truths: LSE over all rows, dlogp over the active ones."""

    lse: Differences
    dlogp: Differences
    storage_lse: Differences
    storage_dlogp: Differences

    def to_dict(self) -> dict[str, object]:
        """Strict JSON."""
        return {name: getattr(self, name).to_dict() for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Of one case, on global rank 0."""

    checks: tuple[Check, ...]
    per_rank: tuple[Statistics | None, ...]
    """None for a rank that failed."""
    aggregate: Statistics | None
    """None unless every rank has values."""
    logprob_sha256: str | None
    """Of the aggregate's float32 bytes, little endian, in global token order."""
    lse_sha256: str | None

    @property
    def passed(self) -> bool:
        """Every check holds."""
        return all(check.passed for check in self.checks)


def evaluate(case: MatrixCase, records: list[RankRecord]) -> Evaluation:
    """Judge a case by the records of all its ranks."""
    per_rank = tuple(
        None if record.values is None else _statistics(case, record.tokens, record.values)
        for record in records
    )
    ranks = _ranks_check(records)
    coverage = _coverage_check(case, records) if ranks.passed else None
    if coverage is None or not coverage.passed:
        return Evaluation(
            checks=(ranks,) if coverage is None else (ranks, coverage),
            per_rank=per_rank,
            aggregate=None,
            logprob_sha256=None,
            lse_sha256=None,
        )
    values = _aggregate(records)
    statistics = _statistics(case, (0, case.num_tokens), values)
    return Evaluation(
        checks=(
            ranks,
            coverage,
            _backend_check(case, records),
            _replication_check(records),
            _kernel_check(statistics),
            _storage_check(case, statistics),
        ),
        per_rank=per_rank,
        aggregate=statistics,
        logprob_sha256=_sha256(values.logprob),
        lse_sha256=_sha256(values.lse),
    )


def first_failure(records: list[RankRecord]) -> RankRecord | None:
    """The rank that failed first: the others may only have waited for it."""
    failed = [record for record in records if record.error is not None]
    return min(failed, key=lambda record: record.ended_at_s, default=None)


def _aggregate(records: list[RankRecord]) -> RankValues:
    """The values of TP rank 0 of each CP shard, in global token order."""
    parts = [
        record.values
        for record in sorted(records, key=lambda record: record.cp_rank)
        if record.tp_rank == 0 and record.values is not None
    ]

    def joined(truth: str) -> Exact:
        exact = [getattr(part, truth) for part in parts]
        return Exact(
            logprob=torch.cat([part.logprob for part in exact]),
            lse=torch.cat([part.lse for part in exact]),
        )

    return RankValues(
        logprob=torch.cat([part.logprob for part in parts]),
        lse=torch.cat([part.lse for part in parts]),
        rounded=joined("rounded"),
        unrounded=joined("unrounded"),
        targets=[target for part in parts for target in part.targets],
        dispatch=parts[0].dispatch,
    )


def _statistics(case: MatrixCase, tokens: tuple[int, int], values: RankValues) -> Statistics:
    active = torch.tensor(case.active(*tokens), dtype=torch.bool)
    every = torch.ones_like(active)
    layout = case.vocab_layout

    def of(value: Tensor, expected: Tensor, counts: Tensor) -> Differences:
        rows = counts.nonzero()[:, 0].tolist()
        targets = [values.targets[row] for row in rows]
        return differences(
            value[counts],
            expected[counts],
            tokens=[tokens[0] + row for row in rows],
            targets=targets,
            owners=[layout.owner_rank(target) for target in targets],
        )

    return Statistics(
        lse=of(values.lse, values.rounded.lse, every),
        dlogp=of(values.logprob, values.rounded.logprob, active),
        storage_lse=of(values.lse, values.unrounded.lse, every),
        storage_dlogp=of(values.logprob, values.unrounded.logprob, active),
    )


def _ranks_check(records: list[RankRecord]) -> Check:
    failed = first_failure(records)
    if failed is not None:
        return Check("ranks", False, f"rank {failed.rank}: {failed.error}")
    return Check("ranks", True, f"all {len(records)} ranks have values")


def _backend_check(case: MatrixCase, records: list[RankRecord]) -> Check:
    wanted = {"actual": case.backend, "platform": case.platform, "fallback": False}
    for record in records:
        told = record.values.dispatch if record.values else {}
        found = {name: told.get(name) for name in wanted}
        if found != wanted:
            return Check("backend", False, f"rank {record.rank} ran {found}, not {wanted}")
    return Check("backend", True, f"every rank ran {case.backend} on {case.platform}, as requested")


def _coverage_check(case: MatrixCase, records: list[RankRecord]) -> Check:
    """Each token is in one CP shard; that a rank has its shard's tokens, its contract has seen."""
    expected = 0
    for record in sorted(records, key=lambda record: record.cp_rank):
        if record.tp_rank == 0:
            start, end = record.tokens
            if start != expected:
                return Check("coverage", False, f"rank {record.rank} starts at token {start}")
            expected = end
    is_whole = expected == case.num_tokens
    return Check("coverage", is_whole, f"{expected} of {case.num_tokens} tokens, each once")


def _replication_check(records: list[RankRecord]) -> Check:
    firsts = {record.cp_rank: record.values for record in records if record.tp_rank == 0}
    for record in records:
        first, ours = firsts[record.cp_rank], record.values
        assert first is not None
        assert ours is not None
        for name in ("logprob", "lse"):
            if _sha256(getattr(ours, name)) != _sha256(getattr(first, name)):
                return Check(
                    "replication", False, f"rank {record.rank} has another {name} than TP rank 0"
                )
    return Check("replication", True, "the same bits on every TP rank of a CP shard")


def _kernel_check(statistics: Statistics) -> Check:
    checked = [("LSE", statistics.lse), ("dlogp", statistics.dlogp)]
    told, passed = [], True
    for name, one in checked:
        if one.status == DifferenceStatus.COMPARED:
            passed &= is_within(one.max_ulp, KERNEL_LIMIT_ULP)
            worst = one.worst
            told.append(
                f"{name} {_shown(one.max_ulp)} ulp"
                + (f" at token {worst.token}, target {worst.target_id}" if worst else "")
            )
        else:
            told.append(f"{name} {one.status}")
    return Check("kernel", passed, f"{'; '.join(told)}; limit {KERNEL_LIMIT_ULP} ulp")


def _storage_check(case: MatrixCase, statistics: Statistics) -> Check:
    limit = STORAGE_LIMIT_NATS[case.dtype]
    compared = [
        one
        for one in (statistics.storage_lse, statistics.storage_dlogp)
        if one.status == DifferenceStatus.COMPARED
    ]
    passed = all(is_within(one.max_abs, limit) for one in compared)
    told = ", ".join(_shown(one.max_abs) for one in compared)
    return Check("storage", passed, f"{told} nats from unrounded logits; limit {limit} nats")


def _shown(value: float | str | None) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _sha256(values: Tensor) -> str:
    return hashlib.sha256(values.float().numpy().astype("<f4").tobytes()).hexdigest()
