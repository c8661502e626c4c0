"""The side thread: bounded memory, nothing lost in silence, no failure that looks like success."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_vllm_rows import new_request, step_record

from rlk_adapters import vllm_recorder
from rlk_adapters.vllm_recorder import MEGABYTE, Recorder
from rlk_adapters.vllm_rows import NO_ROOM
from rlk_adapters.vllm_settings import CaptureSettings
from rlk_align.capture import CaptureWriter, WorkerIdentity, open_capture, seal_capture
from rlk_align.contract import equal_shards
from rlk_align.errors import UnusableInput
from rlk_align.provenance import LogitsSemantics, ModelIdentity, Provenance, ReportedSemantics
from rlk_kernels import expsum_state

VOCAB = 100
PADDED = 128
SECONDS = 20


def provenance() -> Provenance:
    return Provenance(
        engine="vllm", engine_version="0", engine_settings={},
        model=ModelIdentity(name="m", architecture={}, weights_digest="w", tokenizer_digest="t"),
        topology={"tp": 1}, logits=LogitsSemantics(stage="model_output", dtype="float32"),
        reported=ReportedSemantics(function="f", distribution="raw"), kernel={}, software={},
        environment={}, git="g", command=[],
    )  # fmt: skip


def recorder(directory, **settings) -> Recorder:
    writer = CaptureWriter(
        directory,
        role="rollout",
        layout=equal_shards(VOCAB, 1, padded_size=PADDED),
        worker=WorkerIdentity(tp_rank=0),
        provenance=provenance(),
    )
    return Recorder(
        writer,
        CaptureSettings(directory=directory, **settings),
        name="dp0-tp0",
        columns=(0, VOCAB),
        vocab_size=VOCAB,
        backend="reference",
    )


def put_step(recorder: Recorder, step: int, shard: torch.Tensor | None = None) -> bool:
    """One request's ``step``-th token, as the tap hands it over; False where there was no room."""
    new = [new_request("a", [1])] if step == 1 else []
    record = step_record([("a", step - 1, 1, False, 7)], new=new, step=step)
    shard = torch.full((1, PADDED), float(step)) if shard is None else shard
    has_room = recorder.admit(shard.nbytes)
    object.__setattr__(record.sample, "shard", shard if has_room else None)
    recorder.put(record)
    return has_room


def test_rows_arrive_with_padding_cut_and_states_computed(tmp_path):
    capture = recorder(tmp_path)
    shard = torch.randn(1, PADDED, generator=torch.Generator().manual_seed(0))
    assert put_step(capture, 1, shard)
    assert capture.close() == {"worker": "dp0-tp0", "rows": 1, "lost": {}, "failure": None}
    seal_capture(tmp_path)
    (block,) = open_capture(tmp_path).logits_blocks()
    expected = expsum_state(shard[:, :VOCAB], token_ids=torch.tensor([7]), vocab_size=VOCAB)
    assert torch.equal(block.logits, shard[:, :VOCAB])
    assert torch.equal(block.state.bins, expected.bins)


def test_level_state_keeps_no_logits(tmp_path):
    capture = recorder(tmp_path, level="state")
    put_step(capture, 1)
    capture.close()
    seal_capture(tmp_path)
    assert list(open_capture(tmp_path).logits_blocks()) == []
    assert len(open_capture(tmp_path).tokens()) == 1


@pytest.fixture
def blocked_kernel(monkeypatch):
    """The side thread stands at the kernel until the event is set."""
    go_on = threading.Event()

    def waiting(*args, **kwargs):
        assert go_on.wait(SECONDS)
        return expsum_state(*args, **kwargs)

    monkeypatch.setattr(vllm_recorder, "expsum_state", waiting)
    return go_on


def test_what_finds_no_room_is_dropped_and_counted(tmp_path):
    capture = recorder(tmp_path, queue_mb=1)
    assert capture.admit(MEGABYTE)
    assert not put_step(capture, 1)
    assert capture.close()["lost"] == {NO_ROOM: 1}
    assert json.loads((tmp_path / "dp0-tp0" / "worker.json").read_text())["lost"] == {NO_ROOM: 1}


def test_an_engine_that_was_told_to_wait_waits_for_room(tmp_path, blocked_kernel):
    capture = recorder(tmp_path, queue_mb=1, when_full="wait")
    wide = torch.zeros(1, MEGABYTE // 4)
    assert put_step(capture, 1, wide)
    second = threading.Thread(target=put_step, args=(capture, 2, wide), daemon=True)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    blocked_kernel.set()
    second.join(SECONDS)
    assert capture.close()["rows"] == 2


def test_flush_makes_everything_so_far_durable(tmp_path):
    capture = recorder(tmp_path)
    put_step(capture, 1)
    capture.flush()
    index = json.loads((tmp_path / "dp0-tp0" / "worker.json").read_text())
    assert ([part["rows"] for part in index["parts"]], index["closed"]) == ([1], False)
    capture.close()


@pytest.mark.parametrize("where", ["kernel", "disk"])
def test_a_failure_is_said_once_and_leaves_the_worker_unfinished(
    tmp_path, monkeypatch, capfd, where
):
    capture = recorder(tmp_path)
    put_step(capture, 1)
    capture.flush()

    def failing(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if where == "kernel":
        monkeypatch.setattr(vllm_recorder, "expsum_state", failing)
    put_step(capture, 2)
    if where == "disk":
        monkeypatch.setattr("rlk_align.capture.writer.write_atomically", failing)
    capture.flush()
    put_step(capture, 3)
    assert "No space left" in capture.close()["failure"]
    assert "No space left" in capture.close()["failure"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left on device; generation goes on" in line
    # what was flushed before is there, but it does not pass for a whole capture
    assert (tmp_path / "dp0-tp0" / "part-00000.safetensors").exists()
    with pytest.raises(UnusableInput, match="did not finish"):
        seal_capture(tmp_path)


def test_a_failed_capture_takes_no_more_room(tmp_path, capfd):
    capture = recorder(tmp_path, queue_mb=1, when_full="wait")
    assert capture.admit(MEGABYTE)
    capture.fail(RuntimeError("broken"))
    # an engine that waited for a dead thread would hang
    assert not capture.admit(MEGABYTE)
    capture.close()
    assert "broken" in capfd.readouterr().err


def is_closed(directory) -> bool:
    return json.loads((directory / "dp0-tp0" / "worker.json").read_text())["closed"]


def test_a_closed_capture_takes_no_more_room_and_says_so_once(tmp_path, blocked_kernel, capfd):
    capture = recorder(tmp_path, queue_mb=1, when_full="wait")
    wide = torch.zeros(1, MEGABYTE // 4)
    assert put_step(capture, 1, wide)
    waiting = threading.Thread(target=put_step, args=(capture, 2, wide), daemon=True)
    waiting.start()
    closing = threading.Thread(target=capture.close, daemon=True)
    closing.start()
    # the engine that waits is let go before the side thread has made room
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    blocked_kernel.set()
    closing.join(SECONDS)
    assert capture.has_ended
    assert not capture.admit(1)
    capture.say_late()
    capture.say_late()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "rlk-align: worker dp0-tp0: sampled after rlk_close: not captured"


def test_an_engine_that_ends_amid_a_sequence_leaves_the_worker_unfinished(tmp_path, capfd):
    capture = recorder(tmp_path)
    put_step(capture, 1)
    assert "while 1 sequences were being sampled" in capture.shutdown()["failure"]
    assert "this capture cannot be sealed" in capfd.readouterr().err
    # the rows are there all the same
    assert (tmp_path / "dp0-tp0" / "part-00000.safetensors").exists()
    with pytest.raises(UnusableInput, match="did not finish"):
        seal_capture(tmp_path)


def test_an_engine_that_ends_when_all_is_sampled_closes_the_worker(tmp_path):
    capture = recorder(tmp_path)
    put_step(capture, 1)
    capture.put(step_record([], finished=["a"], step=2))
    assert capture.shutdown()["failure"] is None
    assert is_closed(tmp_path)


def test_a_process_that_just_ends_leaves_the_worker_unfinished(tmp_path):
    code = (
        "import sys; from pathlib import Path; from test_vllm_recorder import *;"
        "put_step(recorder(Path(sys.argv[1])), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "the process ended without rlk_close" in done.stderr
    assert (tmp_path / "dp0-tp0" / "part-00000.safetensors").exists()
    assert not is_closed(tmp_path)
