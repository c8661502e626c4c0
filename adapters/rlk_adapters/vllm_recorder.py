"""The side thread of a worker: steps become rows, rows get their states, rows are written."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from rlk_adapters.vllm_rows import (
    NO_ROOM,
    KeptRows,
    RequestTable,
    SampledRows,
    StepRecord,
    reported_of,
)
from rlk_adapters.vllm_settings import CaptureSettings
from rlk_align.capture.rows import Rows
from rlk_align.capture.writer import CaptureWriter
from rlk_kernels import expsum_state

MEGABYTE = 1 << 20
JOIN_SECONDS = 600


class Recorder:
    """Takes step records from the engine's thread and writes them on a thread of its own.

    `admit` and `put` are called on the engine's thread and do no work there. The first failure,
    wherever it happens, is printed once and ends the capture: later rows are counted as lost and
    the worker is never marked as complete.
    """

    def __init__(
        self,
        writer: CaptureWriter,
        settings: CaptureSettings,
        *,
        name: str,
        columns: tuple[int, int],
        vocab_size: int,
        backend: str,
    ) -> None:
        self._writer, self._settings, self._name = writer, settings, name
        self._start, self._end = columns
        self._vocab_size, self._backend = vocab_size, backend
        self._table = RequestTable()
        self._queue: queue.SimpleQueue[StepRecord | threading.Event | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._rows = 0
        self._lost: dict[str, int] = {}
        self._is_closed = False
        self._has_said_late = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="rlk-capture", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    @property
    def has_ended(self) -> bool:
        """Closed or failed: nothing is captured any more."""
        return self._is_closed or self.failure is not None

    def admit(self, num_bytes: int) -> bool:
        """Reserve room for a step's shard; False where it must be dropped."""
        limit = self._settings.queue_mb * MEGABYTE
        with self._room:

            def fits() -> bool:
                # a shard larger than the whole queue may wait alone
                return self._waiting_bytes == 0 or self._waiting_bytes + num_bytes <= limit

            if self._settings.when_full == "wait":
                self._room.wait_for(lambda: fits() or self.has_ended)
            if not fits() or self.has_ended:
                return False
            self._waiting_bytes += num_bytes
            return True

    def put(self, record: StepRecord) -> None:
        """Hand over one step."""
        self._queue.put(record)

    def say_late(self) -> None:
        """Say once that the engine samples although the capture was closed."""
        if self.failure is None and not self._has_said_late:
            self._has_said_late = True
            print(
                f"rlk-align: worker {self._name}: sampled after rlk_close: not captured",
                file=sys.stderr,
                flush=True,
            )

    def fail(self, error: BaseException, *, then: str = "generation goes on, but") -> None:
        """End the capture and say why, once; the engine goes on."""
        with self._room:
            if self.failure is not None:
                return
            self.failure = " ".join(str(error).split()) or type(error).__name__
            self._room.notify_all()
        print(
            f"rlk-align: the vLLM capture of worker {self._name} stopped: {self.failure}; "
            f"{then} this capture cannot be sealed",
            file=sys.stderr,
            flush=True,
        )

    def flush(self) -> dict[str, Any]:
        """Write all that was handed over so far; returns `status`."""
        done = threading.Event()
        self._queue.put(done)
        while self._thread.is_alive() and not done.wait(timeout=1):
            pass
        return self.status()

    def close(self) -> dict[str, Any]:
        """Write the rest and mark the worker as complete, unless it failed; returns `status`."""
        return self._stop(lambda: "")

    def shutdown(self) -> dict[str, Any]:
        """`close`, but half of a sequence does not pass for a whole one; returns `status`.

        vLLM shuts a worker down when it is done, and also when its driver failed or was
        interrupted. A worker that was sampling sequences then is left unfinished.
        """
        return self._stop(self._why_unfinished)

    def _at_exit(self) -> None:
        # whoever leaves without a word may have been stopped anywhere
        self._stop(lambda: "the process ended without rlk_close")

    def _why_unfinished(self) -> str:
        count = self._table.num_unfinished()
        return f"the engine ended while {count} sequences were being sampled" if count else ""

    def _stop(self, why_unfinished: Callable[[], str]) -> dict[str, Any]:
        with self._room:
            if self._is_closed:
                return self.status()
            self._is_closed = True
            # an engine that waited for room would wait for a thread that has ended
            self._room.notify_all()
        self._queue.put(None)
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            self.fail(TimeoutError(f"writing did not end within {JOIN_SECONDS} s"))
            return self.status()
        atexit.unregister(self._at_exit)
        if reason := why_unfinished():
            self.fail(RuntimeError(reason), then="call rlk_close once all is sampled;")
        try:
            if self.failure is None:
                self._writer.close()
            else:
                self._writer.flush()
        except Exception as error:
            self.fail(error)
        return self.status()

    def status(self) -> dict[str, Any]:
        """Worker, rows written or pending, rows lost by reason, failure or None."""
        return {
            "worker": self._name,
            "rows": self._rows,
            "lost": dict(self._lost),
            "failure": self.failure,
        }

    def _run(self) -> None:
        # rows of an inference tensor may only be touched in inference mode
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                try:
                    if isinstance(item, StepRecord):
                        self._record(item)
                    elif self.failure is None:
                        self._writer.flush()
                except Exception as error:
                    self.fail(error)
                finally:
                    if isinstance(item, StepRecord):
                        self._release(item.sample)
                    else:
                        item.set()

    def _record(self, record: StepRecord) -> None:
        if self.failure is not None:
            self._lose("capture stopped", len(record.sample.request_ids) if record.sample else 0)
            return
        for label, prompt_token_ids, sampling in self._table.begin(record):
            self._writer.register(label, prompt_token_ids, sampling)
        if record.sample is None:
            return
        sample = record.sample.on_host()
        kept = self._table.keep(record, sample)
        for reason, rows in kept.lost.items():
            self._lose(reason, rows)
        if sample.shard is None:
            self._lose(NO_ROOM, len(kept.labels))
        elif kept.labels:
            self._writer.append(self._rows_of(record.step, sample, sample.shard, kept))
            self._rows += len(kept.labels)

    def _rows_of(
        self, step: int, sample: SampledRows, shard_NW: torch.Tensor, kept: KeptRows
    ) -> Rows:
        # padding stands behind the real columns of a shard
        logits_RL = shard_NW[:, : self._end - self._start]
        if len(kept.labels) < shard_NW.shape[0]:
            logits_RL = logits_RL[kept.index]
        token_id = sample.token_id[kept.index]
        state = expsum_state(
            logits_RL,
            token_ids=token_id.long(),
            vocab_start=self._start,
            vocab_size=self._vocab_size,
            backend=self._backend,
        )
        reported, reported_status = reported_of(sample, kept)
        return Rows(
            labels=kept.labels,
            position=sample.position[kept.index],
            token_id=token_id,
            step=torch.full_like(kept.index, step),
            state=state,
            reported=reported,
            reported_status=reported_status,
            weights_epoch=torch.zeros_like(kept.index),
            is_prompt=torch.zeros_like(kept.index, dtype=torch.bool),
            logits=logits_RL if self._settings.level == "logits" else None,
        )

    def _lose(self, reason: str, rows: int) -> None:
        if rows:
            self._lost[reason] = self._lost.get(reason, 0) + rows
            self._writer.note_lost(reason, rows)

    def _release(self, sample: SampledRows | None) -> None:
        if sample is not None and sample.shard is not None:
            with self._room:
                self._waiting_bytes -= sample.shard.nbytes
                self._room.notify_all()
