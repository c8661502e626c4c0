"""``rlk-rollout``: vLLM samples from a model, and its logits are captured on every worker."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from rlk_align.errors import UnusableInput
from rlk_align.files import read_json

EPILOG = """Example:
rlk-rollout --model Qwen3-0.6B --prompts prompts.jsonl --out captures/rollout --tp 2
"""
COUNT, AMOUNT, SHARE = click.IntRange(1), click.FloatRange(0), click.FloatRange(0, 1)
SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p")


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint.")
@click.option(
    "--prompts", type=Path, required=True, metavar="FILE",
    help='.jsonl: {"prompt"}, {"messages"} or {"prompt_token_ids"} a line; else plain text lines.',
)  # fmt: skip
@click.option("--out", type=Path, required=True, metavar="DIR", help="The capture; must be new.")
@click.option("--tp", type=COUNT, default=1, metavar="N", help="Tensor-parallel workers [1].")
@click.option("--n", type=COUNT, default=1, metavar="N", help="Samples of each prompt [1].")
@click.option("--max-tokens", type=COUNT, default=64, metavar="N", help="Of each sample [64].")
@click.option("--temperature", type=AMOUNT, metavar="T", help="[generation_config.json, then 1]")
@click.option("--top-p", type=SHARE, metavar="P", help="[generation_config.json, then 1]")
@click.option("--top-k", type=int, metavar="K", help="[generation_config.json, then 0: all]")
@click.option("--min-p", type=SHARE, metavar="P", help="[generation_config.json, then 0]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the engine [0].")
@click.option("--dtype", default="auto", metavar="DTYPE", help="[auto: the checkpoint's]")
@click.option("--level", type=click.Choice(["logits", "state"]), default="logits",
              help="state: 67 bytes a token and worker instead of all logits.")  # fmt: skip
@click.option("--max-model-len", type=COUNT, metavar="N", help="[longest prompt + max tokens]")
@click.option("--max-num-seqs", type=COUNT, default=16, metavar="N", help="Batch size [16].")
@click.option("--enforce-eager/--compile", default=True, help="[eager]")
def command(model: Path, prompts: Path, out: Path, tp: int, **options: Any) -> None:
    """Sample with vLLM and capture the logits of every sampled token on every worker."""
    started = time.monotonic()
    vocab_size = _check_paths(model, out)
    from rlk_adapters.rollout_environment import set_environment
    from rlk_adapters.rollout_prompts import encode_prompts, read_prompts
    from rlk_adapters.vllm_settings import CaptureSettings

    lines = read_prompts(prompts)
    settings = CaptureSettings(directory=out, level=options["level"], when_full="wait")
    set_environment(tp, settings)
    # sample j of prompt i is sequence i * n + j
    encoded = [ids for ids in encode_prompts(lines, model, vocab_size) for _ in range(options["n"])]
    capture = _run(model, out, tp, encoded, options)
    tokens = sum(map(len, capture.sequences.token_ids)) - sum(capture.sequences.prompt_lengths)
    megabytes = sum(part.bytes for part in capture.parts) / 1e6
    click.echo(
        f"{out}: {len(capture.sequences)} sequences, {tokens} sampled tokens, "
        f"{len(capture.parts)} parts, {megabytes:.1f} MB, {time.monotonic() - started:.0f} s; "
        f"next: torchrun --nproc-per-node 2 -m rlk_adapters.replay --capture {out} "
        f"--model {model} --out {out}-trainer"
    )


def _check_paths(model: Path, out: Path) -> int:
    """The model's vocabulary size, once both directories are as they must be."""
    if not model.is_dir():
        raise UnusableInput(f"{model}: no such directory; give a Hugging Face checkpoint")
    config: dict[str, Any] = read_json(model / "config.json")
    vocab_size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(vocab_size, int):
        raise UnusableInput(f"{model}/config.json: no vocab_size")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UnusableInput(f"{out} exists already; give every capture a directory of its own")
    return vocab_size


def _run(model: Path, out: Path, tp: int, prompts: list[list[int]], options: dict[str, Any]) -> Any:
    """Sample, close the workers, seal, audit; returns the capture."""
    from rlk_adapters.rollout_audit import audit
    from rlk_adapters.rollout_engine import CaptureFailed, Engine, EngineOptions
    from rlk_adapters.rollout_environment import stdout_to_stderr
    from rlk_adapters.token_text import texts_of_model
    from rlk_align.capture.seal import seal_capture
    from rlk_align.progress import bars

    longest = max(map(len, prompts)) + options["max_tokens"]
    engine_options = EngineOptions(
        model=model,
        tp=tp,
        dtype=options["dtype"],
        seed=options["seed"],
        max_model_len=options["max_model_len"] or longest,
        enforce_eager=options["enforce_eager"],
        max_num_seqs=min(options["max_num_seqs"], len(prompts)),
    )
    sampling = {name: options[name] for name in SAMPLING_FLAGS if options[name] is not None}
    with stdout_to_stderr(), Engine(engine_options) as engine:
        received = engine.generate(prompts, sampling)
        engine.finish_capture()
    manifest = seal_capture(out, token_texts=texts_of_model(model), progress=bars("sealing"))
    try:
        return audit(out, received)
    except CaptureFailed:
        # what is not what the driver received must not pass for a capture
        manifest.unlink()
        raise


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for unusable input, or 3 where the capture is not whole."""
    from rlk_adapters.rollout_engine import CaptureFailed

    try:
        command.main(args=argv, prog_name="rlk-rollout", standalone_mode=False)
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except UnusableInput as error:
        return _complain(str(error), 2)
    except CaptureFailed as error:
        return _complain(str(error), 3)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; the capture is not sealed", 130)
    return 0


def _complain(sentence: str, status: int) -> int:
    print(f"rlk-rollout: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
