"""How the parts of a row become one number: by integers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlk_align.contract.fields import require_fixed
from rlk_kernels import KERNEL_SPEC


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionContract:
    """The only reduction there is; a field that could be otherwise would be another kernel.

    Raises:
        UnusableInput: Naming the field that asks for anything else.
    """

    merge: str = f"exact_integer_{KERNEL_SPEC}"
    axis: str = "tp_vocabulary"
    cp_is_merge_axis: bool = False
    """A row lives whole in one CP shard: nothing of it is ever added over CP."""
    transport: str = "integer_all_gather"
    """Moves the ranks' integers; each rank adds them."""
    finish: str = "float64"
    num_roundings: int = 1
    """From float64 to float32, at the end."""

    def __post_init__(self) -> None:
        require_fixed("merge", self.merge, f"exact_integer_{KERNEL_SPEC}")
        require_fixed("axis", self.axis, "tp_vocabulary")
        require_fixed("cp_is_merge_axis", self.cp_is_merge_axis, False)
        require_fixed("transport", self.transport, "integer_all_gather")
        require_fixed("finish", self.finish, "float64")
        require_fixed("num_roundings", self.num_roundings, 1)

    def to_dict(self) -> dict[str, object]:
        """Strict JSON."""
        return asdict(self)
