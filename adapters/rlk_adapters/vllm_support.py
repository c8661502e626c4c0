"""What of vLLM the capture knows; everything else is refused with one sentence."""

from __future__ import annotations

from typing import Any

RUNNER_ATTRIBUTES = (
    "execute_model", "_sample", "get_model", "input_batch", "positions", "query_start_loc",
    "discard_request_mask",
)  # fmt: skip
REPORTED_DISTRIBUTIONS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


class UnsupportedEngine(ValueError):
    """The engine runs in a way that the capture does not know; the message says what to change."""


def check_supported(worker: Any) -> None:
    """Refuse what the capture does not know.

    Raises:
        UnsupportedEngine: Naming the first such feature.
    """
    config, runner = worker.vllm_config, worker.model_runner
    parallel, mode = config.parallel_config, config.model_config.logprobs_mode
    refusals = {
        "the V2 model runner; set VLLM_USE_V2_MODEL_RUNNER=0": not hasattr(runner, "_sample"),
        "pipeline parallelism; use tensor parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism; start one engine a replica": parallel.data_parallel_size > 1,
        "batch-sharded sampling; leave enable_batch_sharded_sampling off": bool(
            getattr(parallel, "enable_batch_sharded_sampling", False)
        ),
        "LoRA; merge the adapter into the checkpoint": config.lora_config is not None,
        "speculative decoding; leave it off": config.speculative_config is not None,
        "a model that does not generate": config.model_config.runner_type != "generate",
        f"logprobs_mode={mode}, whose values are not logprobs; use raw_logprobs": (
            mode not in REPORTED_DISTRIBUTIONS
        ),
    }
    for feature, is_there in refusals.items():
        if is_there:
            raise UnsupportedEngine(f"the capture does not know {feature}")
    for name in RUNNER_ATTRIBUTES:
        if not hasattr(runner, name):
            raise UnsupportedEngine(
                f"this vLLM's model runner has no {name}; the capture was written for 0.32"
            )


def find_processor(model: Any) -> Any:
    """The one ``LogitsProcessor`` of the target model.

    Raises:
        UnsupportedEngine: If there is not exactly one, or it changes the logits after the gather.
    """
    processors = [
        module
        for module in model.modules()
        if hasattr(module, "_get_logits") and hasattr(module, "_gather_logits")
    ]
    if len(processors) != 1:
        raise UnsupportedEngine(
            f"the model has {len(processors)} logits processors; the capture knows one"
        )
    processor = processors[0]
    if processor.soft_cap is not None or processor.scale != 1.0 or processor.logits_as_input:
        raise UnsupportedEngine(
            f"the model's logits are changed after the gather (soft cap {processor.soft_cap}, "
            f"scale {processor.scale}); the capture does not know such models"
        )
    if not processor.use_all_gather:
        raise UnsupportedEngine(
            "this platform gathers the logits on one rank; the capture needs an all-gather"
        )
    return processor


def find_head(model: Any, vocab_size: int) -> Any:
    """A module that holds this rank's columns; every vocabulary-parallel module shares them.

    Raises:
        UnsupportedEngine: If there are none, or they differ between modules.
    """
    heads = [
        module
        for module in model.modules()
        if hasattr(module, "shard_indices") and module.org_vocab_size == vocab_size
    ]
    if not heads or any(head.shard_indices != heads[0].shard_indices for head in heads):
        raise UnsupportedEngine(
            f"the model's {len(heads)} vocabulary-parallel modules of {vocab_size} columns do not "
            "share one layout; the capture knows one"
        )
    return heads[0]
