"""Real engine runs that several test files share; each happens once a session."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "fixtures" / "rlk_fixtures" / "prompts.jsonl"
NUM_PROMPTS, MAX_TOKENS = 12, 24
START_SECONDS = 600


def engine_environment() -> dict[str, str]:
    """This environment without what a test process may have set for the capture."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RLK_")}


def rollout(model: Path, directory: Path, tp: int) -> Path:
    """A sealed capture that ``rlk-rollout`` made from the fixture's first prompts."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("\n".join(PROMPTS.read_text().splitlines()[:NUM_PROMPTS]))
    out = directory / "capture"
    subprocess.run(
        [
            sys.executable, "-m", "rlk_adapters.rollout", "--model", str(model),
            "--prompts", str(prompts), "--out", str(out), "--tp", str(tp),
            "--max-tokens", str(MAX_TOKENS), "--temperature", "1", "--top-k", "0", "--top-p", "1",
        ],
        check=True, timeout=START_SECONDS, env=engine_environment(), cwd=directory,
    )  # fmt: skip
    return out


@pytest.fixture(scope="session")
def rollout_tp1(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM at TP 1: 12 prompts, at most 24 tokens each, temperature 1, bfloat16."""
    return rollout(tiny_model_dir, tmp_path_factory.mktemp("rollout-tp1"), 1)


@pytest.fixture(scope="session")
def rollout_tp2(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same at TP 2, two worker processes."""
    return rollout(tiny_model_dir, tmp_path_factory.mktemp("rollout-tp2"), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What vllm_session.py left: several engines in one process."""

    directory: Path
    received: dict[str, list[dict[str, Any]]]
    """What the driver received, by run."""
    complaints: dict[str, list[str]]
    """The lines of ours on stderr, by run."""
    counts: dict[str, int]


@pytest.fixture(scope="session")
def vllm_session(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Engines with the capture, without it, and with a capture that fails."""
    directory = tmp_path_factory.mktemp("vllm-session")
    script = ROOT / "tests" / "vllm_session.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model_dir), str(directory)],
        check=False, timeout=START_SECONDS, env=engine_environment(), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = json.loads((directory / "counts.json").read_text())
    received = {
        path.stem: json.loads(path.read_text())
        for path in directory.glob("*.json")
        if path.stem != "counts"
    }
    complaints: dict[str, list[str]] = {}
    run = ""
    for line in done.stderr.splitlines():
        if line.startswith("== "):
            run = line.removeprefix("== ")
            complaints[run] = []
        elif "rlk-align" in line:
            complaints[run].append(line)
    return Session(directory=directory, received=received, complaints=complaints, counts=counts)
