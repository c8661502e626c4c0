"""One rank's fault is every rank's error, named, within the group's timeout; sound ranks agree.

All of it happens in one run of four gloo processes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from rlk_align import preflight as preflight_module
from rlk_align.contract import (
    LogprobContract,
    MaskContract,
    ShardingContract,
    VocabLayout,
    equal_shards,
)
from rlk_align.contract_logprob import contract_logprob
from rlk_align.dispatch import (
    BackendEntry,
    Capability,
    LogprobBackend,
    Platform,
    register_backend,
    resolve,
)
from rlk_align.errors import UnusableInput
from rlk_align.preflight import Announcement, group_fault
from rlk_kernels import SelectedLogprob, selected_logprob

VOCAB_SIZE = 100
LAYOUT = VocabLayout(vocab_size=VOCAB_SIZE, bounds=((0, 30), (30, 30), (30, 110)))
ACTIVE = (True, True, False, True, True)
TIMEOUT = timedelta(seconds=2)
Call = dict[str, Any]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned beyond the vocabulary."""
    logits = 3 * torch.randn(5, 110, generator=torch.Generator().manual_seed(3))
    logits[:, VOCAB_SIZE:] = torch.nan
    return logits.bfloat16(), torch.tensor([0, 29, -100, 30, 99])


def sound_call(tp_rank: int) -> Call:
    logits, ids = rows()
    start, end = LAYOUT.bounds[tp_rank]
    return {
        "role": "train",
        "logits_dtype": "bf16",
        "sharding": ShardingContract(layout=LAYOUT, tp_rank=tp_rank),
        "mask": MaskContract(num_tokens=5, active=ACTIVE, ignore_index=-100),
        "logits_TL": logits[:, start:end].clone(),
        "token_ids_T": ids,
        "backend": "expsum-reference",
        "kernel_spec": "expsum-1",
    }


def computed(call: Call, group: dist.ProcessGroup | None) -> Any:
    arguments = {name: call.pop(name) for name in ("logits_TL", "token_ids_T", "backend")}
    preflight_module.KERNEL_SPEC = call.pop("kernel_spec")
    return contract_logprob(lambda: LogprobContract(**call), **arguments, group=group)


def change(**changes: Any) -> Callable[[Call], None]:
    return lambda call: call.update(changes)


def change_part(part: str, **changes: Any) -> Callable[[Call], None]:
    return lambda call: call.update({part: replace(call[part], **changes)})


def change_id(row: int, token_id: int) -> Callable[[Call], None]:
    return lambda call: call["token_ids_T"].__setitem__(row, token_id)


def faults() -> dict[str, tuple[Callable[[Call], None], str]]:
    """What TP rank 1 of 3 does wrong, and how every rank's error begins."""
    other = equal_shards(VOCAB_SIZE, 3, padded_size=110)
    rank_1 = "TP rank 1: "
    another = "TP rank 1 has another contract than TP rank 0 in "
    return {
        "wide shard": (
            lambda c: c.update(logits_TL=torch.zeros(5, 1, dtype=torch.bfloat16)),
            rank_1 + "the contract says 5 tokens and the columns [30, 30), so logits should be [5,",
        ),
        "dtype": (
            lambda c: c.update(logits_TL=c["logits_TL"].half()),
            rank_1 + "the contract says logits of bf16, got torch.float16",
        ),
        "contract's dtype": (
            lambda c: c.update(logits_TL=c["logits_TL"].half(), logits_dtype="fp16"),
            another + "logits_dtype; give every rank of the group the same",
        ),
        "fewer tokens": (
            lambda c: c.update(logits_TL=c["logits_TL"][1:], token_ids_T=c["token_ids_T"][1:]),
            rank_1 + "the contract says 5 tokens",
        ),
        "contract of fewer tokens": (
            lambda c: c.update(
                logits_TL=c["logits_TL"][:3],
                token_ids_T=c["token_ids_T"][:3],
                mask=MaskContract(num_tokens=3, active=ACTIVE[:3], ignore_index=-100),
            ),
            another + "mask;",
        ),
        "fewer ids": (
            lambda c: c.update(token_ids_T=c["token_ids_T"][1:]),
            rank_1 + "token ids should be [5], one per row of the logits, got [4]",
        ),
        "id beyond the vocabulary": (
            change_id(1, 100),
            rank_1 + "row 1: token id 100 is outside the vocabulary [0, 100)",
        ),
        "active row ignored": (
            change_id(0, -100),
            rank_1 + "row 0 is active and has token id -100; inactive rows, and only they,",
        ),
        "inactive row with a token": (
            change_id(2, 5),
            rank_1 + "row 2 is inactive and has token id 5",
        ),
        # equal contracts and other rows: the kernel's own collective tells
        "other ids": (change_id(0, 1), "rank 1 has other token ids than rank 0"),
        "backend": (
            change(backend="expsum-cpu"),
            "TP rank 1 runs backend expsum-cpu, TP rank 0 expsum-reference; run the same on every",
        ),
        "no such backend": (change(backend="fast"), rank_1 + "no backend 'fast'; pass auto, ref"),
        "broken backend": (change(backend="broken"), rank_1 + "no backend keeps the contract for"),
        "auto": (change(backend="auto"), rank_1 + "'auto' is refused for 3 TP ranks"),
        "kernel": (
            change(kernel_spec="expsum-2"),
            "TP rank 1 runs kernel expsum-2, TP rank 0 expsum-1",
        ),
        "role": (change(role="infer"), another + "role;"),
        "invalid role": (change(role="both"), rank_1 + "role should be one of train, infer, got"),
        "scope": (change(determinism_scope="fixed_topology"), another + "determinism_scope;"),
        "mask": (
            lambda c: c.update(
                mask=MaskContract(num_tokens=5, active=(True,) * 5, ignore_index=-100),
                token_ids_T=torch.tensor([0, 29, 1, 30, 99]),
            ),
            another + "mask;",
        ),
        "mask mode": (
            lambda c: c.update(
                mask=MaskContract(num_tokens=5, active=ACTIVE),
                token_ids_T=torch.tensor([0, 29, 1, 30, 99]),
            ),
            another + "mask;",
        ),
        "ignore_index": (
            change_part("mask", ignore_index=5),
            rank_1 + "ignore_index 5 is a real token of the vocabulary",
        ),
        "table": (
            lambda c: c.update(
                sharding=ShardingContract(layout=other, tp_rank=1),
                logits_TL=torch.zeros(5, 37, dtype=torch.bfloat16),
            ),
            another + "sharding;",
        ),
        "CP rank": (change_part("sharding", cp_world=2, cp_rank=1), another + "sharding;"),
        "TP rank": (
            change_part("sharding", tp_rank=2),
            rank_1 + "the contract is of TP rank 2 of 3, but the group has it as rank 1 of 3",
        ),
        "no contract": (change(sharding=None), rank_1 + "sharding should be a ShardingContract"),
        "no field": (lambda c: c.pop("role"), rank_1 + "LogprobContract.__init__() missing 1 req"),
        "no tensor": (change(logits_TL=None), rank_1 + "logits should be a tensor, got NoneType"),
        "no ids": (change(token_ids_T=None), rank_1 + "token ids should be an int64 or int32"),
        "no backend": (change(backend=None), rank_1 + "a policy should be a word or a backend's"),
    }


def outcome(call: Call, group: dist.ProcessGroup) -> tuple[str, str, float]:
    """Type and text of the error, and the seconds it took."""
    before = time.monotonic()
    try:
        computed(call, group)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - before
    return "nothing", "", 0.0


def fault_outcomes(tp_rank: int, group: dist.ProcessGroup) -> dict[str, tuple[str, str, float]]:
    outcomes = {}
    for name, (break_call, _) in faults().items():
        call = sound_call(tp_rank)
        if tp_rank == 1:
            break_call(call)
        outcomes[name] = outcome(call, group)
    return outcomes


def gradients(tp_rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    call = sound_call(tp_rank)
    logits = call["logits_TL"].requires_grad_()
    values = computed(call, group)
    values.logprob.sum().backward()
    return [values.logprob.detach(), values.lse.detach(), logits.grad]


def wrong_group_outcome(rank: int) -> tuple[str, str, float]:
    """Rank 1 of the TP group {0, 1} passes {1, 2}, where nobody comes."""
    right = dist.new_group([0, 1], timeout=TIMEOUT)
    wrong = dist.new_group([1, 2], timeout=TIMEOUT)
    if rank > 1:
        # there, and silent: a process that is gone would be noticed at once
        time.sleep(2 * TIMEOUT.total_seconds())
        return "nothing", "", 0.0
    sharding = ShardingContract(layout=equal_shards(VOCAB_SIZE, 2), tp_rank=rank)
    logits = rows()[0][:, :VOCAB_SIZE]
    call = {
        **sound_call(0),
        "sharding": sharding,
        "logits_TL": logits[:, slice(*sharding.bounds)],
    }
    return outcome(call, right if rank == 0 else wrong)


def broken(platform: Platform) -> LogprobBackend:
    raise ImportError("not built")


def all_cases(rank: int) -> dict[str, Any]:
    register_backend(
        BackendEntry(
            backend_id="broken",
            build=broken,
            platforms=frozenset({Platform.CPU}),
            capabilities=(Capability(backend_id="broken", platform="cpu", tier="production"),),
        )
    )
    group = dist.new_group([0, 1, 2], timeout=TIMEOUT)
    results: dict[str, Any] = {}
    if rank < 3:
        results["faults"] = fault_outcomes(rank, group)
        results["sound"] = gradients(rank, group)
    else:
        results["outsider"] = outcome(sound_call(0), group)
    dist.barrier()
    results["wrong group"] = wrong_group_outcome(rank)
    return results


@pytest.fixture(scope="session")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(4, all_cases)


@pytest.mark.parametrize("fault", faults())
def test_a_fault_of_one_rank_is_the_same_error_on_every_rank(
    results: list[dict[str, Any]], fault: str
) -> None:
    outcomes = [results[rank]["faults"][fault] for rank in range(3)]
    assert {kind for kind, _, _ in outcomes} == {"UnusableInput"}
    (message,) = {message for _, message, _ in outcomes}
    assert message.startswith(faults()[fault][1])
    assert max(seconds for _, _, seconds in outcomes) < TIMEOUT.total_seconds()


def test_sound_ranks_get_the_bits_of_one_process(results: list[dict[str, Any]]) -> None:
    logits, ids = rows()
    logits = logits[:, :VOCAB_SIZE].clone().requires_grad_()
    active = torch.tensor(ACTIVE)
    whole = selected_logprob(logits, ids.where(active, 0), vocab_size=VOCAB_SIZE)
    whole.logprob[active].sum().backward()
    for rank in range(3):
        logprob, lse, _ = results[rank]["sound"]
        assert torch.equal(logprob[active], whole.logprob[active])
        assert (logprob[~active] == 0).all()
        assert torch.equal(lse, whole.lse)
    gradient = torch.cat([results[rank]["sound"][2] for rank in range(3)], dim=1)
    assert torch.equal(gradient[:, :VOCAB_SIZE], logits.grad)
    assert (gradient[:, VOCAB_SIZE:] == 0).all()


def test_a_wrong_group_is_told_by_the_rank_that_passed_it_and_nobody_hangs(
    results: list[dict[str, Any]],
) -> None:
    kinds, messages, seconds = zip(*(results[rank]["wrong group"] for rank in (0, 1)), strict=True)
    assert kinds == ("GroupSilent", "UnusableInput")
    assert messages[0].startswith("not all 2 ranks of the TP group came to the preflight; a rank")
    assert messages[1].startswith(
        "the contract is of TP rank 1 of 2, but the group has it as rank 0 of 2"
    )
    assert max(seconds) < 3 * TIMEOUT.total_seconds()


def test_a_process_outside_the_group_is_told_at_once(results: list[dict[str, Any]]) -> None:
    kind, message, _ = results[3]["outsider"]
    assert (kind, message[:44]) == ("UnusableInput", "this process is no member of the group it pa")


class LaterContract(LogprobContract):
    """Has a field that no section of the preflight names."""

    def cross_rank_dict(self) -> dict[str, object]:
        return {**super().cross_rank_dict(), "later": 1}


def test_a_field_that_no_section_names_still_tells_ranks_apart() -> None:
    call = sound_call(0)
    fields = {name: call[name] for name in ("role", "logits_dtype", "sharding", "mask")}
    told = [
        Announcement.of(resolve(made, "expsum-reference", Platform.CPU)).words()
        for made in (LogprobContract(**fields), LaterContract(**fields))
    ]
    first, later = (Announcement.from_words(words) for words in told)
    assert group_fault([first, first]) is None
    assert group_fault([first, later]) == (
        "TP rank 1 has another contract than TP rank 0 in a field of no section; "
        "give every rank of the group the same"
    )


def single_call() -> Call:
    return {
        **sound_call(0),
        "sharding": ShardingContract(layout=equal_shards(30, 1)),
        "token_ids_T": torch.tensor([0, 29, -100, 3, 9]),
    }


@pytest.mark.parametrize(
    ("break_call", "message"),
    [
        (change_id(1, 30), r"row 1: token id 30 is outside the vocabulary \[0, 30\)"),
        (change(logits_TL=None), "logits should be a tensor, got NoneType"),
        (change(token_ids_T=None), "token ids should be an int64 or int32 tensor, got NoneType"),
        (change(backend=None), "a policy should be a word or a backend's id, got None"),
        (lambda c: c.pop("role"), r"LogprobContract.__init__\(\) missing 1 required"),
    ],
)
def test_one_process_raises_what_a_group_would(
    break_call: Callable[[Call], None], message: str
) -> None:
    call = single_call()
    break_call(call)
    with pytest.raises(UnusableInput, match=f"^{message}"):
        computed(call, None)


def test_an_inactive_row_has_an_lse_and_therefore_needs_valid_logits() -> None:
    call = single_call()
    logits, ids = call["logits_TL"], call["token_ids_T"]
    values = computed(dict(call), None)
    whole = selected_logprob(logits, ids.where(torch.tensor(ACTIVE), 0), vocab_size=30)
    assert torch.equal(values.lse, whole.lse)
    logits[2, 7] = torch.nan
    with pytest.raises(UnusableInput, match="row 2"):
        computed(dict(call), None)


def test_a_function_that_returns_no_contract_is_told() -> None:
    make: Any = dict
    with pytest.raises(UnusableInput, match=r"should return a LogprobContract, got {}$"):
        contract_logprob(make, *rows(), backend="expsum-cpu")


def test_several_ranks_need_their_group() -> None:
    with pytest.raises(UnusableInput, match="TP rank 0 of 3, but the group has it as rank 0 of 1"):
        computed(sound_call(0), None)


def test_a_backend_that_returns_another_dtype_is_found_out() -> None:
    def half(logits_TL: torch.Tensor, *args: Any, **kwargs: Any) -> SelectedLogprob:
        nothing = torch.zeros(len(logits_TL), dtype=torch.bfloat16)
        return SelectedLogprob(logprob=nothing, lse=nothing)

    register_backend(
        BackendEntry(
            backend_id="half",
            build=lambda platform: half,
            platforms=frozenset({Platform.CPU}),
            capabilities=(Capability(backend_id="half", platform="cpu", tier="production"),),
        )
    )
    call = {**single_call(), "backend": "half"}
    with pytest.raises(UnusableInput, match=r"backend half returned logprob as torch\.bfloat16"):
        computed(call, None)
