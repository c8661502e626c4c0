"""Teacher-force captured sequences through transformers, and capture its logits too.

Run: ``torchrun --nproc-per-node 2 -m rlk_adapters.replay --capture DIR --model DIR --out DIR``.
All ranks make one tensor-parallel group; ``python -m rlk_adapters.replay`` is the whole model in
one process. Semantics: eval mode, no gradient, every position of a batch computed at once,
sequences padded on the right.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import torch

from rlk_adapters.ranks import Ranks, RanksFailed, open_ranks
from rlk_adapters.replay_rows import Batch, check_sequences, make_batches, replay_batch
from rlk_adapters.token_text import TokenTexts, texts_of_model
from rlk_adapters.transformers_tp import (
    ShardedModel,
    check_tensor_parallel,
    load_model,
    read_config,
)
from rlk_align.capture import (
    Capture,
    CaptureWriter,
    SequenceTable,
    WorkerIdentity,
    open_capture,
    seal_capture,
)
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json
from rlk_align.model_identity import identify_model
from rlk_align.progress import bars, silent
from rlk_align.provenance import (
    LogitsSemantics,
    ModelIdentity,
    Provenance,
    ReportedSemantics,
    git_state,
    launch_command,
    numeric_environment,
    software_versions,
)
from rlk_kernels import KERNEL_SPEC, backend_id

EPILOG = """Example:
torchrun --nproc-per-node 2 -m rlk_adapters.replay --capture rollout --model Qwen3-0.6B --out new
"""
DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What the command line says."""

    capture: Path
    model: Path
    out: Path
    dtype: str
    batch_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What only rank 0 looks up."""

    model: ModelIdentity
    git: str
    command: list[str]


def replay(options: ReplayOptions) -> Path:
    """Write a sealed trainer capture of the captured sequences; on every rank of the launch.

    Returns:
        The path of its manifest.

    Raises:
        UnusableInput: On every rank, if the capture, the model or the directory of any rank
            cannot be used, naming the rank where only some are affected.
        RanksFailed: On every rank, if a rank failed otherwise.
    """
    with open_ranks(timedelta(seconds=options.timeout_s)) as ranks:
        capture, config = ranks.attempt(lambda: _inputs(options, ranks))
        ranks.require_same("a capture with sequences", _fingerprint(capture))
        # before any rank writes: a capture inside a checkout would be a change in it
        origin = ranks.on_first(
            lambda: Origin(
                model=_identify(options.model), git=git_state(), command=launch_command()
            )
        )
        sharded = ranks.attempt(
            lambda: load_model(options.model, config, ranks=ranks, dtype=DTYPES[options.dtype])
        )
        writer = ranks.attempt(
            lambda: _writer(options.out, sharded, _provenance(options, sharded, origin))
        )
        # what cannot be read is said before the work is done
        texts = ranks.attempt(lambda: texts_of_model(options.model))
        _replay_all(options, capture.sequences, sharded, writer)
        ranks.attempt(writer.close)
        return ranks.on_first(lambda: _seal(options.out, texts, capture))


def _replay_all(
    options: ReplayOptions, table: SequenceTable, sharded: ShardedModel, writer: CaptureWriter
) -> None:
    progress = bars if sharded.ranks.rank == 0 else silent
    for batch in progress("replaying")(make_batches(table, options.batch_size)):
        sharded.ranks.attempt(partial(_append, writer, sharded, table, batch))


def _append(
    writer: CaptureWriter, sharded: ShardedModel, table: SequenceTable, batch: Batch
) -> None:
    for i in batch.sequences:
        writer.register(table.labels[i], table.token_ids[i][: table.prompt_lengths[i]])
    writer.append(replay_batch(sharded, table, batch))


def _inputs(options: ReplayOptions, ranks: Ranks) -> tuple[Capture, Any]:
    """The capture and the model's config, once both fit each other and the ranks."""
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UnusableInput(f"{options.out} exists already; give the new capture its own directory")
    capture = open_capture(options.capture)
    config = read_config(options.model)
    check_tensor_parallel(config, ranks.size)
    if config.vocab_size != capture.layout.vocab_size:
        raise UnusableInput(
            f"{options.model} has a vocabulary of {config.vocab_size} columns, but the capture "
            f"has {capture.layout.vocab_size}; give the model that the capture was made with"
        )
    check_sequences(capture.sequences, getattr(config, "max_position_embeddings", None))
    return capture, config


def _fingerprint(capture: Capture) -> str:
    """The same on ranks that read the same sequences under the same labels."""
    table = capture.sequences
    content = [table.labels, table.prompt_lengths, table.token_ids]
    return sha256(canonical_json(content)).hexdigest()[:16]


def _identify(model: Path) -> ModelIdentity:
    return identify_model(model, progress=bars("hashing the checkpoint"))


def _provenance(options: ReplayOptions, sharded: ShardedModel, origin: Origin) -> Provenance:
    """Where the numbers come from; the same on every rank but for the environment."""
    import transformers

    config, dtype = sharded.model.config, str(sharded.dtype).removeprefix("torch.")
    return Provenance(
        engine="transformers",
        engine_version=transformers.__version__,
        engine_settings={
            "model_class": type(sharded.model).__name__,
            "attention_implementation": config._attn_implementation,
            "dtype": dtype,
            "device": sharded.device.type,
            "tp_plan_head": sharded.head_style,
            "batch_size": options.batch_size,
            "padding": "right",
            "grad": False,
            "threads": torch.get_num_threads(),
        },
        model=origin.model,
        topology={"tp": sharded.ranks.size, "pp": 1, "dp": 1, "cp": 1},
        logits=LogitsSemantics(stage="model_output", dtype=dtype),
        reported=ReportedSemantics(
            function="log_softmax(float32) of gathered logits", distribution="raw"
        ),
        kernel={"spec": KERNEL_SPEC, "backend": backend_id("auto", "cpu")},
        software=software_versions("transformers", "accelerate"),
        environment=numeric_environment(),
        git=origin.git,
        command=origin.command,
    )


def _writer(out: Path, sharded: ShardedModel, provenance: Provenance) -> CaptureWriter:
    writer = CaptureWriter(
        out,
        role="trainer",
        layout=sharded.layout,
        worker=WorkerIdentity(tp_rank=sharded.ranks.rank),
        provenance=provenance,
    )
    writer.note_weights(0, digest=provenance.model.weights_digest)
    return writer


def _seal(out: Path, texts: TokenTexts | None, capture: Capture) -> Path:
    """Without a tokenizer, the replayed capture's texts of the same tokens are kept."""
    return seal_capture(
        out,
        token_texts=texts or (lambda _: capture.sequences.token_texts),
        progress=bars("sealing"),
    )


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--capture", type=Path, required=True, metavar="DIR", help="Sealed; is replayed.")
@click.option("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint.")
@click.option("--out", type=Path, required=True, metavar="DIR", help="The capture; must be new.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="auto",
              help="Of weights and logits [auto: the checkpoint's].")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=8, metavar="N",
              help="Sequences in one forward [8].")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=300, metavar="SECONDS",
              help="The longest that a rank waits for another [300].")  # fmt: skip
def command(**options: Any) -> None:
    """Recompute captured sequences with a tensor-parallel trainer, and capture its logits."""
    out = replay(ReplayOptions(**options)).parent
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"{out}: sealed; next: rlk-align compare {options['capture']} {out}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for unusable input, 1 where a rank failed otherwise.

    Every rank says why, since ranks may log to different places.
    """
    try:
        command.main(args=argv, prog_name="rlk-replay", standalone_mode=False)
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except UnusableInput as error:
        return _complain(str(error), 2)
    except RanksFailed as error:
        return _complain(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; the capture is not sealed", 130)
    return 0


def _complain(sentence: str, status: int) -> int:
    print(f"rlk-replay: {sentence}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
