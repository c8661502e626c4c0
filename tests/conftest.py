"""Heavy parts that tests share, made once a session."""

import os
from pathlib import Path

import pytest

# before anything imports transformers: tests never ask a network
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3, untied, bfloat16."""
    from rlk_fixtures.tiny_qwen3 import write_tiny_qwen3

    directory = tmp_path_factory.mktemp("tiny-qwen3")
    write_tiny_qwen3(directory, tied=False, dtype="bfloat16", seed=0)
    return directory


# engines: started once, used by several files
from engine_runs import rollout_tp1, rollout_tp2, vllm_session  # noqa: E402, F401
