"""The switch: inert without its variable, and a sentence for whatever the capture does not know."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from engine_runs import engine_environment

from rlk_adapters.vllm_plugin import WorkerExtension, install_or_complain, register
from rlk_adapters.vllm_settings import CaptureSettings, settings_from_environment
from rlk_adapters.vllm_support import RUNNER_ATTRIBUTES, UnsupportedEngine, check_supported

ASK = """
import sys
from rlk_adapters.vllm_plugin import register
register()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "vllm", "numba"}))
"""


def test_without_the_variable_not_even_torch_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=engine_environment(), check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_bad_variable_never_reaches_vllm_and_is_loud(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("RLK_CAPTURE_DIR", str(tmp_path))
    monkeypatch.setenv("RLK_CAPTURE_LEVEL", "everything")
    register()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "rlk-align: nothing is captured: level is 'everything', but must be one of logits, state"
    )


def test_settings_survive_the_environment(monkeypatch, tmp_path):
    settings = CaptureSettings(directory=tmp_path, level="state", queue_mb=7, when_full="wait")
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    assert settings_from_environment() == settings
    monkeypatch.delenv("RLK_CAPTURE_DIR")
    assert settings_from_environment() is None


def worker(**changed):
    """What `check_supported` reads of a worker, as it stands where nothing is refused."""
    parallel = {
        "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "enable_batch_sharded_sampling": False,
    }  # fmt: skip
    model = {"logprobs_mode": "raw_logprobs", "runner_type": "generate"}
    config = {"lora_config": None, "speculative_config": None}
    for values in (parallel, model, config):
        values.update({name: changed[name] for name in changed if name in values})
    attributes = {name: None for name in RUNNER_ATTRIBUTES if name != changed.get("without")}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(**model),
            **config,
        ),
        model_runner=SimpleNamespace(**attributes),
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"without": "_sample"}, "V2 model runner"),
        ({"without": "discard_request_mask"}, "no discard_request_mask"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"enable_batch_sharded_sampling": True}, "batch-sharded"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"runner_type": "pooling"}, "does not generate"),
        ({"logprobs_mode": "raw_logits"}, "not logprobs"),
    ],
)
def test_what_the_capture_does_not_know_is_refused(changed, sentence):
    check_supported(worker())
    with pytest.raises(UnsupportedEngine, match=sentence):
        check_supported(worker(**changed))


def test_a_refused_worker_says_so_to_whoever_asks(tmp_path, capfd):
    refused = worker(pipeline_parallel_size=2)
    status = install_or_complain(refused, CaptureSettings(directory=tmp_path))
    assert "pipeline parallelism" in status["failure"]
    assert refused.rlk_status() == refused.rlk_flush() == refused.rlk_close() == status
    assert "nothing is captured: the capture does not know pipeline" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_extension_needs_to_know_where_to():
    os.environ.pop("RLK_CAPTURE_DIR", None)
    with pytest.raises(ValueError, match="RLK_CAPTURE_DIR is not set"):
        WorkerExtension().rlk_install()
