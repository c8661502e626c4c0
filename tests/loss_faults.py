"""What ranks may do wrong when they call the loss, and what every rank must say then."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlk_align.contract import MaskContract
from rlk_align.dispatch import BackendEntry, Capability, register_backend
from rlk_kernels import SelectedLogprob, selected_logprob

Call = dict[str, Any]


def change(name: str, part: str, edit: Callable[[torch.Tensor], Any]) -> Callable[[Call], None]:
    """A fault: an argument's tensor is edited in place, or replaced by what the edit gives."""

    def apply(call: Call) -> None:
        old = getattr(call[name], part) if part else call[name]
        new = old.detach().clone()
        edited = edit(new)
        new = new if edited is None else edited
        call[name] = replace(call[name], **{part: new}) if part else new

    return apply


def put(index: Any, value: Any) -> Callable[[torch.Tensor], None]:
    def edit(tensor: torch.Tensor) -> None:
        tensor[index] = value

    return edit


def set_to(**changes: Any) -> Callable[[Call], None]:
    """A fault: other settings."""
    return lambda call: call["settings"].update(changes)


def first_active(call: Call) -> int:
    return call["mask"].active.index(True)


def at_first_active(name: str, part: str, value: Any) -> Callable[[Call], None]:
    return lambda call: change(name, part, put(first_active(call), value))(call)


def mask_target(call: Call) -> None:
    row = first_active(call)
    call["logits_TL"] = call["logits_TL"].detach().clone()
    column = int(call["token_ids_T"][row]) - call["sharding"].bounds[0]
    if 0 <= column < call["logits_TL"].shape[1]:
        call["logits_TL"][row, column] = -torch.inf


def set_active(call: Call, active: list[bool]) -> None:
    call["mask"] = MaskContract(num_tokens=len(active), active=tuple(active))


def lose_a_token(call: Call) -> None:
    active = list(call["mask"].active)
    active[first_active(call)] = False
    set_active(call, active)


def nothing_active(call: Call) -> None:
    set_active(call, [False] * call["mask"].num_tokens)
    change("sequences", "num_active", lambda t: torch.zeros_like(t))(call)


def feed_rows_twice(call: Call) -> None:
    for part in ("sequence_ids_T", "old_logprob_T", "ref_logprob_T"):
        change("rows", part, lambda t: torch.cat([t, t]))(call)
    call["token_ids_T"] = torch.cat([call["token_ids_T"]] * 2)
    call["logits_TL"] = torch.cat([call["logits_TL"].detach()] * 2)
    set_active(call, [*call["mask"].active] * 2)


def faults() -> dict[str, tuple[tuple[int, ...], Callable[[Call], Any], str]]:
    """Which of the ranks of TP 2 x CP 2 do what wrong, and what all four must say.

    Ranks 0 and 1 share rows, as do 2 and 3; all list every sequence.
    """
    one, pair, everyone = (3,), (2, 3), (0, 1, 2, 3)
    group = r"tensor-parallel ranks \[2, 3\], counted from 0: "
    return {
        "no rows": (one, lambda c: c.update(rows=None), "rank 3: 'NoneType'"),
        "no table": (one, lambda c: c.update(sequences=None), "rank 3: 'NoneType'"),
        "bad contract": (
            one,
            set_to(clip_low=2.0),
            "rank 3: clip_low should be a number from 0 to 1, got 2.0",
        ),
        "bad logprob contract": (
            one,
            lambda c: c.update(logits_dtype="fp8"),
            "rank 3: logits_dtype should be one of bf16, fp16, fp32, got 'fp8'",
        ),
        "rollout's contract": (
            one,
            lambda c: c.update(role="infer"),
            "rank 3: the logprobs of a loss have role train, got infer",
        ),
        "mask too short": (
            one,
            lambda c: set_active(c, [True] * 102),
            r"rank 3: sequence_ids_T should be torch.int64 \[102\], got torch.int64 \[103\]",
        ),
        "float64 logprobs": (
            one,
            change("rows", "old_logprob_T", lambda t: t.double()),
            "rank 3: old_logprob_T should be torch.float32",
        ),
        "NaN where active": (
            one,
            at_first_active("rows", "old_logprob_T", torch.nan),
            r"rank 3: row \d+: old_logprob_T is nan at an active token",
        ),
        "unknown sequence": (
            one,
            change("rows", "sequence_ids_T", put(5, 99)),
            "rank 3: row 5 belongs to sequence 99, which the SequenceTable",
        ),
        "no reference": (
            one,
            lambda c: c.update(rows=replace(c["rows"], ref_logprob_T=None)),
            "rank 3: the contract has a KL, but ref_logprob_T is None",
        ),
        "listed twice": (
            one,
            change("sequences", "ids", put(1, 0)),
            "rank 3: sequence 0 is listed twice",
        ),
        "negative id": (
            one,
            change("sequences", "ids", put(0, -1)),
            "rank 3: sequence -1 has a negative id",
        ),
        "reward NaN": (
            one,
            change("sequences", "rewards", put(2, torch.nan)),
            "rank 3: sequence 2 has a reward that is not finite",
        ),
        "negative count": (
            one,
            change("sequences", "num_active", put(2, -1)),
            "rank 3: sequence 2 has a negative num_active",
        ),
        "other old logprob": (
            one,
            at_first_active("rows", "old_logprob_T", -1.0),
            "rank 3 passes other old_logprob_T than rank 2",
        ),
        "other reference": (
            one,
            at_first_active("rows", "ref_logprob_T", -1.0),
            "rank 3 passes other ref_logprob_T than rank 2",
        ),
        "other mask": (one, lose_a_token, "rank 3 passes other mask than rank 2"),
        "other sequences": (
            one,
            change("rows", "sequence_ids_T", put(0, 9)),
            "rank 3 passes other sequence_ids_T than rank 2",
        ),
        "other reward": (
            one,
            change("sequences", "rewards", put(2, 0.5)),
            "rank 3 passes other SequenceTable than rank 2",
        ),
        "other clip": (one, set_to(clip_high=0.3), "rank 3 passes other settings than rank 2"),
        "other KL": (one, set_to(kl="k1"), "rank 3 passes other settings than rank 2"),
        "other clip of a pair": (
            pair,
            set_to(clip_high=0.3),
            "rank [23] passes other settings than rank [01]",
        ),
        "other reward of a pair": (
            pair,
            change("sequences", "rewards", put(2, 0.5)),
            "rank [23] has another reward of sequence 2 than rank [01]",
        ),
        "other group of a pair": (
            pair,
            change("sequences", "group_ids", put(2, 3)),
            "rank [23] has another group id of sequence 2 than rank [01]",
        ),
        "lost token": (pair, lose_a_token, r"sequence \d has \d+ active tokens on all ranks"),
        "rows fed twice": (pair, feed_rows_twice, r"sequence \d has \d+ active tokens on all"),
        "no active token": (everyone, nothing_active, "no token of the batch is active"),
        "group size": (
            everyone,
            set_to(group_size=4),
            "group 7 has 3 sequences, but group_size is 4",
        ),
        "huge rewards": (
            everyone,
            lambda c: (
                change("sequences", "rewards", lambda t: t * 1e12)(c),
                set_to(advantage="mean")(c),
            ),
            "group 7: an advantage is beyond",
        ),
        "no ids": (one, lambda c: c.update(token_ids_T=None), group + "TP rank 1: "),
        "a list": (one, lambda c: c.update(token_ids_T=[1] * 103), group + "TP rank 1: "),
        "no logits": (one, lambda c: c.update(logits_TL=None), group + "TP rank 1: "),
        "logits of float64": (
            one,
            change("logits_TL", "", lambda t: t.double()),
            group + "TP rank 1: the contract says logits of bf16, got torch.float64",
        ),
        "other backend": (
            one,
            lambda c: c.update(backend="expsum-cpu"),
            group + "TP rank 1 runs backend expsum-cpu, TP rank 0 expsum-reference",
        ),
        "id outside": (
            one,
            lambda c: change("token_ids_T", "", put(first_active(c), 500))(c),
            group + r"TP rank 1: row \d+: token id 500 is outside",
        ),
        "NaN logit": (
            one,
            change("logits_TL", "", put((4, 7), torch.nan)),
            group + "rank 1: row 4: logit of token id 257 is NaN",
        ),
        "other ids": (
            one,
            lambda c: change("token_ids_T", "", put(first_active(c), 0))(c),
            group + "rank 1 has other token ids than rank 0",
        ),
        "fails alone": (
            everyone,
            lambda c: c.update(backend="alone"),
            group + "backend alone returned logprob as torch.float64",
        ),
        "masked target": (
            pair,
            mask_target,
            group + r"row \d+, of sequence \d: logprob - old_logprob is -inf nats",
        ),
        "far below": (
            pair,
            at_first_active("rows", "old_logprob_T", -90.0),
            group + r"row \d+, of sequence \d: logprob - old_logprob is 8\d(\.\d+)? nats",
        ),
    }


def register_backend_that_fails_on(faulty_rank: int, rank: int) -> None:
    """Called "alone": once its collective is over, one rank has another dtype."""

    def compute(*args: Any, **kwargs: Any) -> SelectedLogprob:
        values = selected_logprob(*args, **kwargs, backend="reference")
        return replace(values, logprob=values.logprob.double()) if rank == faulty_rank else values

    capability = Capability(backend_id="alone", platform="cpu", tier="production")
    register_backend(
        BackendEntry(
            backend_id="alone",
            build=lambda platform: compute,
            platforms=frozenset([capability.platform]),
            capabilities=(capability,),
        )
    )
