"""Puts the capture on one worker whose model is loaded: writer, side thread, tap, controls."""

from __future__ import annotations

from typing import Any

from rlk_adapters.vllm_identity import layout_of, logits_dtype, provenance_of
from rlk_adapters.vllm_numba import give_library_a_dict
from rlk_adapters.vllm_recorder import Recorder
from rlk_adapters.vllm_settings import CaptureSettings
from rlk_adapters.vllm_support import check_supported, find_head, find_processor
from rlk_adapters.vllm_tap import VllmTap
from rlk_align.capture.writer import CaptureWriter, WorkerIdentity
from rlk_kernels import backend_id

# each of them changes the weights, and with them what epoch 0 stands for
WEIGHT_UPDATES = ("load_model", "reload_weights", "update_weights", "finish_weight_update")


def install(worker: Any, settings: CaptureSettings) -> Recorder:
    """Capture everything that ``worker`` samples from now on.

    Raises:
        UnsupportedEngine: If the engine runs in a way that the capture does not know.
        UnusableInput: If the worker's folder exists already, or the model has no digest.
    """
    give_library_a_dict()
    check_supported(worker)
    model = worker.model_runner.get_model()
    processor = find_processor(model)
    head = find_head(model, processor.org_vocab_size)
    layout, dtype = layout_of(head), logits_dtype(worker, processor)
    # the side thread computes on the host, wherever the engine runs
    provenance = provenance_of(worker, dtype, backend_id("auto", "cpu"))
    identity = WorkerIdentity(tp_rank=head.tp_rank)
    writer = CaptureWriter(
        settings.directory, role="rollout", layout=layout, worker=identity, provenance=provenance
    )
    writer.note_weights(0, digest=provenance.model.weights_digest)
    recorder = Recorder(
        writer,
        settings,
        name=identity.name,
        columns=layout.real_bounds(head.tp_rank),
        vocab_size=layout.vocab_size,
        backend=provenance.kernel["backend"],
    )
    VllmTap(worker.model_runner, processor, recorder, shard_indices=head.shard_indices, dtype=dtype)
    _add_controls(worker, recorder)
    return recorder


def _add_controls(worker: Any, recorder: Recorder) -> None:
    """Attributes of the instance are what ``collective_rpc`` calls by name."""
    worker.rlk_status = recorder.status
    worker.rlk_flush = recorder.flush
    worker.rlk_close = recorder.close
    shutdown = worker.shutdown

    def close_and_shutdown(*args: Any, **kwargs: Any) -> Any:
        recorder.shutdown()
        return shutdown(*args, **kwargs)

    worker.shutdown = close_and_shutdown
    for owner, name in [(worker, name) for name in WEIGHT_UPDATES] + [
        (worker.model_runner, "reload_weights"),
        (worker.model_runner.get_model(), "load_weights"),
    ]:
        if hasattr(owner, name):
            _fail_before(owner, name, recorder)


def _fail_before(owner: Any, name: str, recorder: Recorder) -> None:
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        recorder.fail(RuntimeError(f"{name} changed the weights, which this capture cannot follow"))
        return original(*args, **kwargs)

    setattr(owner, name, changed)
