"""Small captures with known logits and known reported values, for tests of the comparator."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlk_align.capture import CaptureWriter, ReportedStatus, Rows, WorkerIdentity, seal_capture
from rlk_align.capture.rows import classify_reported
from rlk_align.contract import VocabLayout, equal_shards
from rlk_align.provenance import (
    LogitsSemantics,
    ModelIdentity,
    Provenance,
    ReportedSemantics,
)
from rlk_kernels import KERNEL_SPEC, expsum_state, selected_logprob

VOCAB = 1000
PROVENANCE = Provenance(
    engine="engine",
    engine_version="1",
    engine_settings={},
    model=ModelIdentity(
        name="tiny",
        architecture={"vocab_size": VOCAB, "num_hidden_layers": 2},
        weights_digest="a" * 64,
        tokenizer_digest="b" * 64,
    ),
    topology={"tp": 1, "pp": 1, "dp": 1, "cp": 1},
    logits=LogitsSemantics(stage="model_output", dtype="float32"),
    reported=ReportedSemantics(function="log_softmax(float32)", distribution="raw"),
    kernel={"spec": KERNEL_SPEC, "backend": "cpu"},
    software={"torch": "2"},
    environment={},
    git="not observed",
    command=["python", "run.py"],
)


@dataclass(frozen=True)
class Sample:
    """A sequence: prompt and response ids, the response's logits and reported logprobs."""

    label: str
    prompt: list[int]
    response: list[int]
    logits: torch.Tensor
    reported: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.response)


def kernel_logprob(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return selected_logprob(logits, torch.tensor(ids), vocab_size=logits.shape[1]).logprob


def samples(
    count: int = 4, *, vocab: int = VOCAB, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """Sequences of 3 to 3 + count - 1 sampled tokens; what is reported is K, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = 3 + index
        ids = torch.randint(vocab, (2 + length,), generator=generator).tolist()
        logits = (torch.randn(length, vocab, generator=generator) * 3).to(dtype)
        made.append(Sample(str(index), ids[:2], ids[2:], logits, kernel_logprob(logits, ids[2:])))
    return made


@dataclass
class Plan:
    """How a capture is written; the faults that a test plants go in here."""

    role: str = "rollout"
    layout: VocabLayout = field(default_factory=lambda: equal_shards(VOCAB, 1))
    provenance: Provenance = PROVENANCE
    dp: int = 1
    rows_per_append: int = 2
    part_bytes: int = 1 << 20
    keep_logits: bool = True
    skip: Callable[[int, str, int], bool] = lambda tp_rank, label, position: False
    """Rows that a rank does not write."""
    status: dict[tuple[str, int], ReportedStatus] = field(default_factory=dict)
    """``(label, position)`` -> status, instead of what the value shows."""
    lost: dict[str, int] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    token_texts: bool = False
    prompt_rows: bool = False
    """Write rows for the prompt's tokens, too."""
    weights: dict[int, str] = field(default_factory=dict)
    """Epoch -> digest, as noted by every worker."""
    epoch_from: dict[str, int] = field(default_factory=dict)
    """Label -> the position from which its rows are of epoch 1."""
    backwards: bool = False
    """Write the last sequence and its last row first."""


def write_capture(directory: Path, given: list[Sample], plan: Plan | None = None) -> Path:
    """Write all workers' parts and seal them."""
    plan = plan or Plan()
    write_workers(directory, given, plan)
    seal_capture(directory, token_texts=texts if plan.token_texts else None)
    return directory


def texts(ids: Any) -> dict[int, str]:
    return {i: f"t{i}" for i in ids}


def write_workers(directory: Path, given: list[Sample], plan: Plan) -> None:
    for dp_rank in range(plan.dp):
        for tp_rank in range(plan.layout.tp_size):
            writer = CaptureWriter(
                directory,
                role=plan.role,  # type: ignore[arg-type]
                layout=plan.layout,
                worker=WorkerIdentity(tp_rank=tp_rank, dp_rank=dp_rank),
                provenance=plan.provenance,
                part_bytes=plan.part_bytes,
            )
            for sample in given[dp_rank :: plan.dp][:: -1 if plan.backwards else 1]:
                writer.register(sample.label, sample.prompt, plan.sampling)
                write_sample(writer, sample, plan, tp_rank)
            for epoch, digest in plan.weights.items():
                writer.note_weights(epoch, digest=digest)
            for reason, count in plan.lost.items():
                writer.note_lost(reason, count)
            writer.close()


def write_sample(writer: CaptureWriter, sample: Sample, plan: Plan, tp_rank: int) -> None:
    if plan.prompt_rows:
        writer.append(prompt_rows_of(sample, plan, tp_rank))
    first = len(sample.prompt)
    kept = [
        row for row in range(sample.num_tokens) if not plan.skip(tp_rank, sample.label, first + row)
    ]
    if plan.backwards:
        kept.reverse()
    for at in range(0, len(kept), plan.rows_per_append):
        writer.append(rows_of(sample, kept[at : at + plan.rows_per_append], plan, tp_rank))


def rows_of(sample: Sample, index: list[int], plan: Plan, tp_rank: int) -> Rows:
    first, count = len(sample.prompt), len(index)
    start, end = plan.layout.real_bounds(tp_rank)
    shard = sample.logits[index, start:end].contiguous()
    ids = torch.tensor([sample.response[i] for i in index])
    status = classify_reported(sample.reported[index])
    for row, i in enumerate(index):
        status[row] = plan.status.get((sample.label, first + i), ReportedStatus(int(status[row])))
    return Rows(
        labels=[sample.label] * count,
        position=torch.tensor([first + i for i in index]),
        token_id=ids,
        step=torch.full((count,), plan.step),
        state=expsum_state(
            shard, token_ids=ids, vocab_start=start, vocab_size=plan.layout.vocab_size
        ),
        reported=sample.reported[index],
        reported_status=status,
        weights_epoch=torch.tensor(
            [int(first + i >= plan.epoch_from.get(sample.label, 1 << 30)) for i in index]
        ),
        is_prompt=torch.zeros(count, dtype=torch.bool),
        logits=shard if plan.keep_logits else None,
    )


def prompt_rows_of(sample: Sample, plan: Plan, tp_rank: int) -> Rows:
    """Rows of the prompt's tokens, as if the response's first logits had predicted them."""
    count = len(sample.prompt)
    prompt = replace(
        sample,
        prompt=[],
        response=sample.prompt,
        logits=sample.logits[:count],
        reported=kernel_logprob(sample.logits[:count], sample.prompt),
    )
    rows = rows_of(prompt, list(range(count)), plan, tp_rank)
    return replace(rows, is_prompt=torch.ones(count, dtype=torch.bool))


def with_reported(given: list[Sample], change: Callable[[Sample], torch.Tensor]) -> list[Sample]:
    return [replace(sample, reported=change(sample)) for sample in given]


def with_logits(given: list[Sample], change: Callable[[Sample], torch.Tensor]) -> list[Sample]:
    """Other logits, and K of them as the reported values."""
    changed = []
    for sample in given:
        logits = change(sample)
        changed.append(
            replace(sample, logits=logits, reported=kernel_logprob(logits, sample.response))
        )
    return changed


def with_provenance(**changes: Any) -> Provenance:
    return replace(PROVENANCE, **changes)


def with_model(**changes: Any) -> Provenance:
    return replace(PROVENANCE, model=replace(PROVENANCE.model, **changes))
