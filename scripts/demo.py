"""The whole line on real engines: vLLM samples, a tensor-parallel trainer recomputes, we compare.

Everything is written below ``demo/`` and replaced by the next run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# every command runs in ROOT, so that what is printed can be typed there
BIN = Path(os.path.relpath(Path(sys.executable).parent, ROOT))
DEMO = Path("demo")
PROMPTS = "fixtures/rlk_fixtures/prompts.jsonl"
TRAINER_TP = 2


def run(what: str, *command: str, accept: tuple[int, ...] = (0,)) -> None:
    """Print and run one command from the checkout's root; stop the demo if it fails."""
    shown = " ".join(command).replace(f"{BIN}/", "")
    print(f"\n# {what}\n$ {shown}", flush=True)
    started = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    print(f"({time.monotonic() - started:.0f} s)", flush=True)
    if status not in accept:
        raise SystemExit(f"demo: `{shown}` ended with status {status}")


def compare_with_trainer(rollout_tp: int) -> None:
    """Sample with vLLM at ``rollout_tp``, recompute with transformers at TP 2, compare."""
    rollout, trainer = DEMO / f"rollout-tp{rollout_tp}", DEMO / f"trainer-of-tp{rollout_tp}"
    model = str(DEMO / "model")
    run(
        f"vLLM at TP {rollout_tp} samples; its logits are captured on every worker",
        str(BIN / "rlk-rollout"), "--model", model, "--prompts", PROMPTS,
        "--out", str(rollout), "--tp", str(rollout_tp), "--max-tokens", "32",
        "--temperature", "1",
    )  # fmt: skip
    run(
        f"transformers at TP {TRAINER_TP} recomputes the same tokens; its logits are captured too",
        str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(TRAINER_TP),
        "-m", "rlk_adapters.replay",
        "--capture", str(rollout), "--model", model, "--out", str(trainer),
    )  # fmt: skip
    run(
        f"how far apart, and where from: vLLM TP {rollout_tp} and transformers TP {TRAINER_TP}",
        str(BIN / "rlk-align"), "compare", str(rollout), str(trainer),
        "--out", str(DEMO / f"report-tp{rollout_tp}"),
        accept=(0, 1),
    )  # fmt: skip


def main() -> None:
    """Make the tiny model, then compare at vLLM TP 2 and TP 1."""
    shutil.rmtree(ROOT / DEMO, ignore_errors=True)
    (ROOT / DEMO).mkdir()
    run(
        "a tiny Qwen3 with the real vocabulary of 151936 columns",
        str(BIN / "python"), "-m", "rlk_fixtures.tiny_qwen3", "--out", str(DEMO / "model"),
    )  # fmt: skip
    compare_with_trainer(rollout_tp=2)
    compare_with_trainer(rollout_tp=1)
    print(f"\nreports: {DEMO}/report-tp2, {DEMO}/report-tp1")


if __name__ == "__main__":
    main()
