"""What a distributed logprob promises, stated once and compared between ranks: docs/contract.md."""

from rlk_align.contract.layout import VocabLayout, equal_shards, layout_from_bounds
from rlk_align.contract.logprob import DeterminismScope, LogitsDtype, LogprobContract, Role
from rlk_align.contract.mask import MaskContract, MaskMode
from rlk_align.contract.output import OutputContract
from rlk_align.contract.reduction import ReductionContract
from rlk_align.contract.sharding import ShardingContract

__all__ = [
    "DeterminismScope",
    "LogitsDtype",
    "LogprobContract",
    "MaskContract",
    "MaskMode",
    "OutputContract",
    "ReductionContract",
    "Role",
    "ShardingContract",
    "VocabLayout",
    "equal_shards",
    "layout_from_bounds",
]
