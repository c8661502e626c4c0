"""A backend is chosen openly: each candidate passed over is on record, and nothing falls back."""

import json
from typing import Any

import pytest
import torch

from rlk_align.contract import LogprobContract, MaskContract, ShardingContract, equal_shards
from rlk_align.dispatch import (
    BackendEntry,
    Capability,
    LogprobBackend,
    Platform,
    Registry,
    platform_of,
    register_backend,
    resolve,
)
from rlk_align.dispatch.registry import DEFAULT_REGISTRY
from rlk_align.errors import UnusableInput
from rlk_kernels import SelectedLogprob, selected_logprob


def contract(tp: int = 1, *, padded: int | None = None, **changes: Any) -> LogprobContract:
    fields: dict[str, Any] = {
        "role": "train",
        "logits_dtype": "bf16",
        "sharding": ShardingContract(layout=equal_shards(100, tp, padded_size=padded)),
        "mask": MaskContract(num_tokens=2, active=(True, False)),
    }
    return LogprobContract(**{**fields, **changes})


def zeros(logits_TL: torch.Tensor, *args: Any, **kwargs: Any) -> SelectedLogprob:
    nothing = torch.zeros(len(logits_TL))
    return SelectedLogprob(logprob=nothing, lse=nothing)


def built(platform: Platform) -> LogprobBackend:
    return zeros


def broken(platform: Platform) -> LogprobBackend:
    raise ModuleNotFoundError("No module named 'fast_code'")


def capability(name: str, tier: str = "production", **changes: Any) -> Capability:
    return Capability(backend_id=name, platform="cpu", tier=tier, **changes)


def entry(name: str, *capabilities: Capability, build: Any = built) -> BackendEntry:
    return BackendEntry(
        backend_id=name, build=build, platforms=frozenset({"cpu"}), capabilities=capabilities
    )


def registry(*entries: BackendEntry) -> Registry:
    made = Registry()
    for one in entries:
        made.register(one)
    return made


FAST, SLOW = capability("fast"), capability("slow", "reference")


def test_the_fast_backend_is_taken_and_the_slow_one_is_not_asked() -> None:
    chosen = resolve(
        contract(),
        "auto",
        Platform.CPU,
        registry=registry(entry("slow", SLOW), entry("fast", FAST)),
    )
    assert (chosen.requested, chosen.actual) == ("auto", "fast")
    assert chosen.rejections == ()
    assert not chosen.is_fallback


def test_an_undeclared_capability_is_a_rejection_and_a_fallback() -> None:
    made = registry(entry("mute"), entry("slow", SLOW))
    for policy in ("auto", "reference"):
        chosen = resolve(contract(), policy, Platform.CPU, registry=made)
        assert chosen.actual == "slow"
        assert [(r.backend_id, r.kind) for r in chosen.rejections] == [
            ("mute", "undeclared_capability")
        ]
        assert chosen.is_fallback


def test_what_the_callers_policy_excludes_is_on_record_and_no_fallback() -> None:
    made = registry(entry("fast", FAST), entry("slow", SLOW))
    chosen = resolve(contract(), "reference", Platform.CPU, registry=made)
    assert chosen.actual == "slow"
    (rejection,) = chosen.rejections
    assert rejection.kind == "excluded_by_policy"
    assert rejection.reasons == ("its tier is production, not reference",)
    assert not chosen.is_fallback


def test_an_excluded_backend_is_not_examined_further() -> None:
    # were it asked whether it fits, or built, the record would say incompatible or unavailable
    narrow = capability("fast", logits_dtypes=("fp32",))
    made = registry(entry("fast", narrow, build=broken), entry("slow", SLOW))
    (rejection,) = resolve(contract(), "reference", Platform.CPU, registry=made).rejections
    assert rejection.kind == "excluded_by_policy"


def test_an_incompatible_backend_is_rejected_with_every_reason() -> None:
    narrow = capability(
        "narrow",
        roles=("infer",),
        logits_dtypes=("fp32", "fp16"),
        tp_sizes={1, 4},
        cp_sizes={2},
        supports_padding=False,
        exports_lse=False,
        mask_modes=("ignore_index",),
        determinism_scopes=("fixed_topology",),
    )
    assert narrow.incompatibilities(contract(2, padded=128)) == (
        "role train is asked for, only infer is declared",
        "logits dtype bf16 is asked for, only fp16, fp32 is declared",
        "TP size 2 is asked for, only 1, 4 is declared",
        "CP size 1 is asked for, only 2 is declared",
        "mask mode explicit_active_mask is asked for, only ignore_index is declared",
        "determinism cross_layout_bitwise is asked for, only fixed_topology is declared",
        "padding is not supported, the contract pads 100 columns to 128",
        "the LSE is not exported, the contract asks for it",
    )
    made = registry(entry("narrow", narrow), entry("slow", SLOW))
    chosen = resolve(contract(), "auto", Platform.CPU, registry=made)
    assert chosen.is_fallback
    assert chosen.rejections[0].kind == "incompatible"
    assert len(chosen.rejections[0].reasons) == 6


def test_a_failed_import_is_a_rejection() -> None:
    made = registry(entry("fast", FAST, build=broken), entry("slow", SLOW))
    chosen = resolve(contract(), "auto", Platform.CPU, registry=made)
    assert chosen.is_fallback
    assert chosen.rejections[0].kind == "unavailable"
    assert chosen.rejections[0].reasons == ("ModuleNotFoundError: No module named 'fast_code'",)


def test_an_exact_id_is_taken_or_is_an_error_and_nobody_steps_in() -> None:
    made = registry(entry("fast", FAST, build=broken), entry("mute"), entry("slow", SLOW))
    chosen = resolve(contract(), " slow ", Platform.CPU, registry=made)
    assert (chosen.requested, chosen.actual, chosen.rejections) == ("slow", "slow", ())
    with pytest.raises(UnusableInput, match=r"fast: unavailable \(ModuleNotFoundError"):
        resolve(contract(), "fast", Platform.CPU, registry=made)
    with pytest.raises(UnusableInput, match="mute: undeclared_capability"):
        resolve(contract(), "mute", Platform.CPU, registry=made)
    with pytest.raises(UnusableInput, match=r"slow: undeclared_capability .* on cuda"):
        resolve(contract(), "slow", Platform.CUDA, registry=made)
    with pytest.raises(UnusableInput, match=r"no backend 'swift'; pass auto, .* fast, mute, slow"):
        resolve(contract(), "swift", Platform.CPU, registry=made)


def test_when_nobody_is_left_all_reasons_are_told() -> None:
    made = registry(entry("mute"), entry("fast", FAST, build=broken), entry("slow", SLOW))
    with pytest.raises(UnusableInput) as error:
        resolve(contract(), "production", Platform.CPU, registry=made)
    for told in ("mute: undeclared_capability", "fast: unavailable", "slow: excluded_by_policy"):
        assert told in str(error.value)
    with pytest.raises(UnusableInput, match="none is registered"):
        resolve(contract(), "auto", Platform.CUDA, registry=made)


def test_deterministic_is_no_policy() -> None:
    with pytest.raises(UnusableInput, match="determinism_scope"):
        resolve(contract(), "deterministic", Platform.CPU)


def test_auto_is_refused_for_several_ranks() -> None:
    with pytest.raises(UnusableInput, match="'auto' is refused for 2 TP ranks"):
        resolve(contract(2), "auto", Platform.CPU)
    assert resolve(contract(2), "production", Platform.CPU).actual == "expsum-cpu"


@pytest.mark.parametrize("name", ["auto", " reference", "production", "deterministic", "", "  ", 3])
def test_an_id_is_no_policy_word(name: Any) -> None:
    with pytest.raises(UnusableInput, match="a backend's id should be a word other than auto"):
        capability(name)
    with pytest.raises(UnusableInput, match="a backend's id should be a word other than auto"):
        entry(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tier": "best"}, "tier should be one of reference, production, got 'best'"),
        ({"platform": "tpu"}, "platform should be one of cpu, cuda, rocm, got 'tpu'"),
        ({"roles": ("train", "eval")}, "roles should be one of train, infer, got 'eval'"),
        ({"roles": "train"}, "roles should be several of train, infer, got 'train'"),
        ({"mask_modes": ()}, "mask_modes should hold at least one of"),
        ({"tp_sizes": {True}}, "tp_sizes should be an integer, got True"),
        ({"cp_sizes": {0}}, "cp_sizes should be 1 or more, got 0"),
    ],
)
def test_a_capability_lists_what_is_allowed(changes: Any, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        Capability(**{"backend_id": "one", "platform": "cpu", "tier": "production", **changes})


def test_blanks_around_an_id_are_dropped() -> None:
    assert capability(" fast ").backend_id == "fast"


def test_a_capability_belongs_to_its_backend() -> None:
    with pytest.raises(UnusableInput, match="'slow' is given a capability of 'fast'"):
        entry("slow", FAST)


def test_registering_again_replaces() -> None:
    before = dict(DEFAULT_REGISTRY.entries)
    try:
        register_backend(entry("ours", capability("ours"), build=broken))
        register_backend(entry("ours", capability("ours")))
        assert resolve(contract(), "ours", Platform.CPU).backend is zeros
    finally:
        DEFAULT_REGISTRY.entries = before


def test_provenance_is_strict_json() -> None:
    made = registry(entry("fast", FAST, build=broken), entry("slow", SLOW))
    told = json.loads(
        json.dumps(resolve(contract(), "auto", Platform.CPU, registry=made).to_dict())
    )
    assert (told["requested"], told["actual"], told["fallback"]) == ("auto", "slow", True)
    assert told["platform"] == "cpu"
    assert told["rejections"][0]["backend_id"] == "fast"
    assert told["contract"]["sharding"]["vocab_size"] == 100
    assert told["capability"]["tp_sizes"] is None


@pytest.mark.parametrize("name", ["expsum-cpu", "expsum-reference"])
def test_the_kernels_own_backends_give_its_bits(name: str) -> None:
    logits = torch.linspace(-3, 4, 200).reshape(2, 100).bfloat16()
    ids = torch.tensor([3, 99])
    backend = resolve(contract(), name, Platform.CPU).backend
    ours = backend(logits, ids, vocab_size=100, vocab_start=0, group=None)
    theirs = selected_logprob(logits, ids, vocab_size=100)
    assert torch.equal(ours.logprob, theirs.logprob)
    assert torch.equal(ours.lse, theirs.lse)


def test_a_device_has_a_platform() -> None:
    assert platform_of("cpu") is Platform.CPU
    with pytest.raises(
        UnusableInput, match="platform should be one of cpu, cuda, rocm, got 'meta'"
    ):
        platform_of("meta")
