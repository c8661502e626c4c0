"""The whole contract of a logprob, and its fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from rlk_align.contract.fields import checked_member
from rlk_align.contract.mask import MaskContract
from rlk_align.contract.output import OutputContract
from rlk_align.contract.reduction import ReductionContract
from rlk_align.contract.sharding import ShardingContract
from rlk_align.errors import UnusableInput
from rlk_align.files import canonical_json

SCHEMA = "logprob-contract-1"


class Role(StrEnum):
    """Who asks."""

    TRAIN = "train"
    INFER = "infer"


class LogitsDtype(StrEnum):
    """What the logits are stored as."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same in torch's words."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self]


class DeterminismScope(StrEnum):
    """Where the same logits give the same bits."""

    FIXED_TOPOLOGY = "fixed_topology"
    """Between runs with the same ranks and bounds."""
    CROSS_LAYOUT_BITWISE = "cross_layout_bitwise"
    """Between any ranks and bounds, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobContract:
    """What the ranks of one TP group agree on before they compute. Enums take their strings.

    Raises:
        UnusableInput: If a field is out of range or two fields contradict each other.
    """

    role: Role
    logits_dtype: LogitsDtype
    sharding: ShardingContract
    mask: MaskContract
    reduction: ReductionContract = field(default_factory=ReductionContract)
    determinism_scope: DeterminismScope = DeterminismScope.CROSS_LAYOUT_BITWISE
    output: OutputContract = field(default_factory=OutputContract)

    def __post_init__(self) -> None:
        for name, enum in (
            ("role", Role),
            ("logits_dtype", LogitsDtype),
            ("determinism_scope", DeterminismScope),
        ):
            object.__setattr__(self, name, checked_member(name, enum, getattr(self, name)))
        for name, part in (
            ("sharding", ShardingContract),
            ("mask", MaskContract),
            ("reduction", ReductionContract),
            ("output", OutputContract),
        ):
            if not isinstance(getattr(self, name), part):
                raise UnusableInput(
                    f"{name} should be a {part.__name__}, got {getattr(self, name)!r}"
                )
        ignored, vocab_size = self.mask.ignore_index, self.sharding.layout.vocab_size
        if ignored is not None and 0 <= ignored < vocab_size:
            raise UnusableInput(
                f"ignore_index {ignored} is a real token of the vocabulary [0, {vocab_size}); "
                "take one outside, such as -100"
            )

    def to_dict(self) -> dict[str, object]:
        """Everything as strict JSON, for provenance."""
        return {
            "schema": SCHEMA,
            "role": self.role,
            "logits_dtype": self.logits_dtype,
            "sharding": self.sharding.to_dict(),
            "mask": self.mask.to_dict(),
            "reduction": self.reduction.to_dict(),
            "determinism_scope": self.determinism_scope,
            "output": self.output.to_dict(),
        }

    def cross_rank_dict(self) -> dict[str, object]:
        """`to_dict` without what is this rank's own: the same on every rank of a TP group."""
        sharding = self.sharding.to_dict()
        # cp_rank stays: it is the same inside a TP group, and tells a wrong group
        del sharding["tp_rank"]
        return {**self.to_dict(), "sharding": sharding}

    def cross_rank_fingerprint(self) -> str:
        """SHA-256 of `cross_rank_dict` as canonical JSON; equal inside one TP group."""
        return hashlib.sha256(canonical_json(self.cross_rank_dict())).hexdigest()
