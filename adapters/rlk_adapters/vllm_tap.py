"""Taps one worker of vLLM: its shard of the logits, what was sampled, and what was reported.

Only attributes of live *instances* are replaced; no file, class or config of vLLM changes. Read
from vLLM 0.32: ``LogitsProcessor._get_logits`` and ``_gather_logits``
(``model_executor/layers/logits_processor.py``), ``GPUModelRunner.execute_model`` and ``_sample``
(``v1/worker/gpu_model_runner.py``), which the CPU's runner inherits. All four run eagerly,
outside of compiled code and of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlk_adapters.vllm_recorder import Recorder
from rlk_adapters.vllm_rows import SampledRows, StepRecord


class VllmTap:
    """Follows the steps of one model runner and hands a `StepRecord` of each to the recorder.

    On the engine's thread it takes references and copies a few numbers a row. The logits are
    cloned only at tensor parallelism 1, where the sampler edits the captured tensor in place.
    """

    def __init__(
        self,
        runner: Any,
        processor: Any,
        recorder: Recorder,
        *,
        shard_indices: Any,
        dtype: torch.dtype,
    ) -> None:
        self._runner, self._recorder = runner, recorder
        self._shard_indices, self._dtype = shard_indices, dtype
        self._num_steps = 0
        self._scheduled: Any = None
        self._is_forward = False
        self._local: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self._has_logits = False
        self._replace(runner, "execute_model", self._execute_model)
        self._replace(runner, "_sample", self._sample)
        self._replace(processor, "_gather_logits", self._gather_logits)
        self._replace(processor, "_get_logits", self._get_logits)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self._recorder.has_ended:
                if name == "_sample":
                    self._recorder.say_late()
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, replaced)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        """An error of ours ends the capture and never reaches the engine."""
        try:
            action(*args)
        except Exception as error:
            self._scheduled = None
            self._recorder.fail(error)

    def _execute_model(
        self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._guard(self._begin, scheduler_output)
        try:
            return original(scheduler_output, *args, **kwargs)
        finally:
            self._is_forward = False

    def _gather_logits(self, original: Callable[..., Any], logits: Any) -> Any:
        if self._is_forward:
            self._local = logits
        return original(logits)

    def _get_logits(
        self,
        original: Callable[..., Any],
        hidden_states: Any,
        lm_head: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._local = None
        full = original(hidden_states, lm_head, *args, **kwargs)
        if self._is_forward:
            self._guard(self._take_shard, full, lm_head)
        return full

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._scheduled is not None:
            self._guard(self._finish, output)
        return output

    def _begin(self, scheduler_output: Any) -> None:
        if self._scheduled is not None:
            # the step before sampled nothing, but requests may have begun or finished in it
            self._hand_over(None)
        self._num_steps += 1
        self._scheduled = scheduler_output
        self._shard, self._has_logits = None, False
        self._is_forward = scheduler_output.total_num_scheduled_tokens > 0
        if not self._is_forward:
            # no token, no sample: the engine only says which requests have finished
            self._hand_over(None)

    def _take_shard(self, full: torch.Tensor, lm_head: Any) -> None:
        if self._has_logits:
            raise RuntimeError("the model computed logits twice in one step; one head is known")
        if lm_head.shard_indices != self._shard_indices:
            raise RuntimeError(
                "the logits come from another vocabulary shard than the model's head"
            )
        shard = full if lm_head.tp_size == 1 else self._local
        if shard is None:
            raise RuntimeError("the logits were gathered by other code than _gather_logits")
        if shard.dtype != self._dtype:
            raise RuntimeError(f"the logits are {shard.dtype}, but {self._dtype} was expected")
        self._has_logits, self._local = True, None
        if self._recorder.admit(shard.nbytes):
            # at one rank there is no gather, and masks and penalties edit this very tensor
            self._shard = shard.clone() if lm_head.tp_size == 1 else shard

    def _finish(self, output: Any) -> None:
        if not self._has_logits:
            raise RuntimeError("tokens were sampled without logits of this step")
        batch = self._runner.input_batch
        request_ids = list(batch.req_ids[: batch.num_reqs])
        count, sampled = len(request_ids), output.sampled_token_ids
        if sampled.shape != (count, 1):
            raise RuntimeError(
                f"tokens of shape {tuple(sampled.shape)} were sampled for {count} requests; one "
                "token a request is known"
            )
        last = _on_device(self._runner.query_start_loc)[1 : count + 1] - 1
        reported_ids, reported = _reported(output.logprobs_tensors, sampled)
        self._hand_over(
            SampledRows(
                request_ids=request_ids,
                discarded=self._runner.discard_request_mask.np[:count].copy(),
                position=_on_device(self._runner.positions)[last] + 1,
                token_id=sampled[:, 0].clone(),
                reported_ids=reported_ids,
                reported=reported,
                shard=self._shard,
                ready=_event(sampled.device),
            )
        )

    def _hand_over(self, sample: SampledRows | None) -> None:
        scheduled, self._scheduled, self._shard = self._scheduled, None, None
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self._recorder.put(
            StepRecord(
                step=self._num_steps,
                new_requests=scheduled.scheduled_new_reqs,
                finished_ids=frozenset(scheduled.finished_req_ids),
                computed=computed,
                scheduled=scheduled.num_scheduled_tokens,
                sample=sample,
            )
        )


def _on_device(buffer: Any) -> torch.Tensor:
    """The device's side of one of the runner's buffers, which may be a plain tensor."""
    tensor: torch.Tensor = buffer if isinstance(buffer, torch.Tensor) else buffer.gpu
    return tensor


def _reported(
    logprobs: Any, sampled_N1: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``[N, K]`` ids and values of the reported logprobs, or None where there are none."""
    if logprobs is None:
        return None, None
    if logprobs.logprob_token_ids.numel() == 0:
        # the whole vocabulary was asked for: columns are ids
        return sampled_N1.clone(), logprobs.logprobs.gather(1, sampled_N1.long())
    return logprobs.logprob_token_ids, logprobs.logprobs


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
