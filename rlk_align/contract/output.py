"""What comes back."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlk_align.contract.fields import require_fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputContract:
    """Float32 logprob and log-sum-exp (LSE) in nats, on every rank of the TP group.

    Raises:
        UnusableInput: Naming the field that asks for anything else.
    """

    logprob_dtype: str = "fp32"
    lse_dtype: str = "fp32"
    is_replicated: bool = True
    exports_lse: bool = True

    def __post_init__(self) -> None:
        require_fixed("logprob_dtype", self.logprob_dtype, "fp32")
        require_fixed("lse_dtype", self.lse_dtype, "fp32")
        require_fixed("is_replicated", self.is_replicated, True)
        require_fixed("exports_lse", self.exports_lse, True)

    def to_dict(self) -> dict[str, object]:
        """Strict JSON."""
        return asdict(self)
