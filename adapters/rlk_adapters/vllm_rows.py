"""From steps of vLLM's scheduler to rows: which request and position each sampled token is.

Read from vLLM 0.32 (``v1/core/sched/output.py``, ``v1/worker/gpu_model_runner.py``). Everything
here runs on the side thread of a worker and is the same on every tensor-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from rlk_align.capture.rows import ReportedStatus, classify_reported

# vLLM appends this to the caller's id so that it is unique
RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
NOT_OBSERVED = "prompt token ids not observed"
NO_ROOM = "no room in the queue"
# of SamplingParams: what decides which token is sampled and what is reported of it
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "min_tokens", "ignore_eos", "eos_token_id",
    "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip


class NewRequest(Protocol):
    """What we read of vLLM's ``NewRequestData``."""

    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: Any
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a worker, as the engine's thread hands it over: references, nothing computed."""

    step: int
    new_requests: Sequence[NewRequest]
    finished_ids: frozenset[str]
    computed: Mapping[str, int]
    """Tokens whose keys and values were in the cache when the step began, by request."""
    scheduled: Mapping[str, int]
    """Tokens that the step fed to the model, by request."""
    sample: SampledRows | None
    """None where the step sampled nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The N rows of a step's sampler, in the order of its batch."""

    request_ids: list[str]
    discarded: np.ndarray[Any, np.dtype[np.bool_]]
    """``[N]``: the engine throws the token away (a prompt's chunk that is not its last)."""
    position: torch.Tensor
    """``[N]`` index of the predicted token in its sequence, as the device computed it."""
    token_id: torch.Tensor
    """``[N]`` sampled ids."""
    reported_ids: torch.Tensor | None
    """``[N, K]`` ids of the reported logprobs; None where the engine computed none."""
    reported: torch.Tensor | None
    """``[N, K]`` float32, in nats."""
    shard: torch.Tensor | None
    """``[N, W]`` this rank's columns, padding included; None where it found no room."""
    ready: torch.cuda.Event | None
    """When the tensors hold their values; None on the CPU, where they do at once."""

    def on_host(self) -> SampledRows:
        """The same rows in the memory of the host; waits until the device has computed them."""
        if self.ready is None:
            return self
        self.ready.synchronize()
        names = ("position", "token_id", "reported_ids", "reported", "shard")
        tensors = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {n: None if t is None else t.cpu() for n, t in tensors.items()}
        return replace(self, ready=None, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The rows of a step that are tokens of sequences."""

    index: torch.Tensor
    """``[R]`` int64 into the step's N rows."""
    labels: list[str]
    wants_logprobs: torch.Tensor
    """``[R]`` bool: the row's request asked for logprobs."""
    lost: Mapping[str, int]
    """Rows that are tokens of sequences but cannot be kept, by reason."""


@dataclass(slots=True)
class _Request:
    label: str
    wants_logprobs: bool
    stop_ids: frozenset[int]
    has_ended: bool = False


class RequestTable:
    """The requests in flight on one worker."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._labels: set[str] = set()

    def begin(self, record: StepRecord) -> list[tuple[str, list[int], dict[str, Any]]]:
        """Forget what finished; label, prompt and sampling parameters of what is new.

        Raises:
            RuntimeError: If a request that is in flight begins again (a streaming session).
        """
        for engine_id in record.finished_ids:
            self._requests.pop(engine_id, None)
        announced = []
        for new in record.new_requests:
            if new.req_id in self._requests:
                raise RuntimeError(
                    f"request {new.req_id!r} began twice; sessions whose prompt grows are not known"
                )
            # a prompt of embeddings has no token ids to identify the sequence by
            if new.prompt_token_ids is None or new.sampling_params is None:
                continue
            request = _new_request(self._free_label(new.req_id), new.sampling_params)
            self._requests[new.req_id] = request
            prompt = list(new.prompt_token_ids)
            announced.append((request.label, prompt, effective_sampling(new.sampling_params)))
        return announced

    def keep(self, record: StepRecord, sample: SampledRows) -> KeptRows:
        """The rows that stand in sequences; call it once a step, after `begin`.

        Raises:
            RuntimeError: If the device's position is not the scheduler's.
        """
        index, labels, wanting, lost = [], [], [], 0
        positions, token_ids = sample.position.tolist(), sample.token_id.tolist()
        for row, engine_id in enumerate(sample.request_ids):
            expected = record.computed[engine_id] + record.scheduled[engine_id]
            if positions[row] != expected:
                raise RuntimeError(
                    f"request {engine_id!r}: the model runner predicts position "
                    f"{positions[row]}, the scheduler {expected}"
                )
            if sample.discarded[row]:
                continue
            request = self._requests.get(engine_id)
            if request is None:
                lost += 1
            # async scheduling computes a token more than the engine delivers
            elif not request.has_ended:
                index.append(row)
                labels.append(request.label)
                wanting.append(request.wants_logprobs)
                request.has_ended = token_ids[row] in request.stop_ids
        return KeptRows(
            index=torch.tensor(index, dtype=torch.int64),
            labels=labels,
            wants_logprobs=torch.tensor(wanting, dtype=torch.bool),
            lost={NOT_OBSERVED: lost} if lost else {},
        )

    def num_unfinished(self) -> int:
        """Sequences that began and, as far as the scheduler said, are not finished."""
        return sum(not request.has_ended for request in self._requests.values())

    def _free_label(self, engine_id: str) -> str:
        label = RANDOM_SUFFIX.sub("", engine_id)
        if label in self._labels:
            label = engine_id
        repeat = 1
        # an id is reused only where its caller switched the random suffix off
        while label in self._labels:
            repeat += 1
            label = f"{engine_id}#{repeat}"
        self._labels.add(label)
        return label


def _new_request(label: str, params: Any) -> _Request:
    stop_ids = {*(params.stop_token_ids or ()), params.eos_token_id}
    wants_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
    return _Request(label, wants_logprobs, frozenset(stop_ids - {None}))


def effective_sampling(params: Any) -> dict[str, Any]:
    """The sampling parameters in force on the worker, after vLLM merged its defaults."""
    values = {name: getattr(params, name) for name in SAMPLING_FIELDS}
    if values["logit_bias"] is not None:
        values["logit_bias"] = {str(i): float(bias) for i, bias in values["logit_bias"].items()}
    values["structured_outputs"] = params.structured_outputs is not None
    return values


def reported_of(sample: SampledRows, kept: KeptRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's logprob of each kept row's own token, found by its id.

    Returns:
        ``[R]`` float32 in nats, and ``[R]`` uint8 `ReportedStatus` that says where it counts.
    """
    count = len(kept.labels)
    if sample.reported is None or sample.reported_ids is None:
        status = torch.full((count,), ReportedStatus.NOT_REQUESTED, dtype=torch.uint8)
        return torch.zeros(count), status
    ids, values = sample.reported_ids[kept.index], sample.reported[kept.index]
    is_own = ids == sample.token_id[kept.index, None]
    own = values.gather(1, is_own.int().argmax(1, keepdim=True))[:, 0].to(torch.float32)
    status = classify_reported(own)
    status[~is_own.any(1)] = ReportedStatus.OTHER_TOKEN
    status[~kept.wants_logprobs] = ReportedStatus.NOT_REQUESTED
    # a value that does not count is never written as if it did
    return torch.where(status == ReportedStatus.VALID, own, 0.0), status
