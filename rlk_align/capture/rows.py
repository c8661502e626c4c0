"""Rows: predictions of one rank for some tokens, and their tensors on disk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from rlk_kernels import State

SCHEMA = "rlk-capture/1"


class ReportedStatus(IntEnum):
    """Why a reported logprob is there or is not; only `VALID` values are ever read."""

    VALID = 0
    NOT_REQUESTED = 1
    """The engine was not asked for logprobs."""
    OTHER_TOKEN = 2
    """The engine's entry belongs to another token id."""
    NAN = 3
    NEGATIVE_INFINITY = 4
    POSITIVE = 5
    """Above 0, so not a logprob."""
    SENTINEL = 6
    """An engine's stand-in for a missing value, such as vLLM's -9999.0."""


SENTINELS = (-9999.0, torch.finfo(torch.float32).min)


def classify_reported(values: torch.Tensor) -> torch.Tensor:
    """`ReportedStatus` of each reported logprob by its value alone.

    Args:
        values: ``[R]`` float32 as the engine gave them.

    Returns:
        ``[R]`` uint8.
    """
    status = torch.full(values.shape, ReportedStatus.VALID, dtype=torch.uint8)
    status[values > 0] = ReportedStatus.POSITIVE
    for sentinel in SENTINELS:
        status[values == sentinel] = ReportedStatus.SENTINEL
    status[values == -torch.inf] = ReportedStatus.NEGATIVE_INFINITY
    status[values.isnan()] = ReportedStatus.NAN
    return status


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """R predictions on one tensor-parallel rank.

    A row is a prediction: its logits predicted the token that stands at ``position`` (0-based in
    the whole sequence). Nobody shifts anything after capture.
    """

    labels: list[str]
    """The engine's name of the sequence of each row; registered with the writer before."""
    position: torch.Tensor
    """``[R]`` int32."""
    token_id: torch.Tensor
    """``[R]`` int32, in the real vocabulary."""
    step: torch.Tensor
    """``[R]`` int64, growing with time; of two rows for one token the later step counts."""
    state: State
    """expsum state of this rank's real columns, on the CPU."""
    reported: torch.Tensor
    """``[R]`` float32, in nats; read only where ``reported_status`` is `ReportedStatus.VALID`."""
    reported_status: torch.Tensor
    """``[R]`` uint8 `ReportedStatus`."""
    weights_epoch: torch.Tensor
    """``[R]`` int32, counting the engine's weight updates."""
    is_prompt: torch.Tensor
    """``[R]`` bool."""
    logits: torch.Tensor | None
    """``[R, L]`` this rank's real columns in the engine's dtype, or None where only states are
    kept."""

    def __post_init__(self) -> None:
        count = len(self.labels)
        for name in ("position", "token_id", "step", "reported", "reported_status",
                     "weights_epoch", "is_prompt"):  # fmt: skip
            if getattr(self, name).shape != (count,):
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}, but there are "
                    f"{count} rows; give one value a row"
                )
        if self.state.num_tokens != count:
            raise ValueError(f"the state holds {self.state.num_tokens} tokens, not {count} rows")

    def tensors(self) -> dict[str, torch.Tensor]:
        """The columns as they stand in a part, without the sequence column."""
        columns = {
            "position": self.position.to(torch.int32),
            "token_id": self.token_id.to(torch.int32),
            "step": self.step.to(torch.int64),
            "reported": self.reported.to(torch.float32),
            "reported_status": self.reported_status.to(torch.uint8),
            "weights_epoch": self.weights_epoch.to(torch.int32),
            "is_prompt": self.is_prompt.to(torch.bool),
            **state_tensors(self.state),
        }
        if self.logits is not None:
            columns["logits"] = self.logits
        return columns


def state_tensors(state: State) -> dict[str, torch.Tensor]:
    """The state's tensors under their names on disk."""
    return {
        "state_top": state.top,
        "state_bins": state.bins,
        "state_invalid_column": state.invalid_column,
        "target_logit": state.target_logit,
        "has_target": state.has_target,
    }


def state_from_tensors(columns: dict[str, torch.Tensor]) -> State:
    """The inverse of `state_tensors`."""
    return State(
        top=columns["state_top"],
        bins=columns["state_bins"],
        target_logit=columns["target_logit"],
        has_target=columns["has_target"],
        invalid_column=columns["state_invalid_column"],
    )


# name -> (dtype, shape of one row); logits come on top where a capture keeps them
SMALL_COLUMNS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "sequence": (torch.int32, ()),
    "position": (torch.int32, ()),
    "token_id": (torch.int32, ()),
    "step": (torch.int64, ()),
    "reported": (torch.float32, ()),
    "reported_status": (torch.uint8, ()),
    "weights_epoch": (torch.int32, ()),
    "is_prompt": (torch.bool, ()),
    "state_top": (torch.int32, ()),
    "state_bins": (torch.int64, (3,)),
    "state_invalid_column": (torch.int32, ()),
    "target_logit": (torch.float32, ()),
    "has_target": (torch.bool, ()),
}
