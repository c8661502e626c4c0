"""How many float32 values are the same 32 bits on both sides, and how far apart the others are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlk_align.compare.token_table import Float32s

# upper end of each bucket; the last one is open
ULP_BUCKETS = {"0": 0, "1": 1, "2-4": 4, "5-16": 16, "17-64": 64, "65-256": 256}
ULP_ABOVE = ">256"


@dataclass(frozen=True, slots=True, kw_only=True)
class BitComparison:
    """Two float32 columns, trainer against rollout, over the compared tokens."""

    numel: int
    mismatch_count: int
    """Values whose bit patterns differ; -0.0 and +0.0 do."""
    signed_zero_count: int
    """Of these, -0.0 against +0.0: 0 ulp apart."""
    max_ulp: int
    """Float32 steps between the two values that are furthest apart."""
    ulp_histogram: dict[str, int]
    first_mismatch: int | None
    """Index of the first mismatch among the compared tokens."""

    @property
    def equal_count(self) -> int:
        """Values that are the same 32 bits."""
        return self.numel - self.mismatch_count


def compare_bits(rollout: Float32s, trainer: Float32s) -> BitComparison:
    """Compare the bit patterns of two columns of finite values."""
    different = rollout.view(np.int32) != trainer.view(np.int32)
    ulp = np.abs(_ordinal(trainer) - _ordinal(rollout))
    places = np.searchsorted(list(ULP_BUCKETS.values()), ulp)
    counts = np.bincount(places, minlength=len(ULP_BUCKETS) + 1).tolist()
    return BitComparison(
        numel=len(rollout),
        mismatch_count=int(different.sum()),
        signed_zero_count=int((different & (ulp == 0)).sum()),
        max_ulp=int(ulp.max(initial=0)),
        ulp_histogram=dict(zip([*ULP_BUCKETS, ULP_ABOVE], counts, strict=True)),
        first_mismatch=int(different.argmax()) if different.any() else None,
    )


def _ordinal(values: Float32s) -> npt.NDArray[np.int64]:
    """Each float32's place on the number line in steps of one ulp; both zeros at 0."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
