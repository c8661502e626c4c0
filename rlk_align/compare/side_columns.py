"""One side's columns of the token table, from what was reported and from the kernel's states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rlk_align.capture.rows import ReportedStatus, classify_reported
from rlk_align.compare.token_table import Integers, KernelStatus, Side
from rlk_align.errors import UnusableInput
from rlk_kernels import State, finish_where_valid


def side_columns(
    *,
    state: State,
    reported: torch.Tensor,
    reported_status: torch.Tensor,
    owner_rank: torch.Tensor,
    weights_epoch: torch.Tensor,
    all_ranks: torch.Tensor,
    where: str,
) -> Side:
    """Finish the states and judge every value: is it there, and if not, why.

    Args:
        state: Of N whole rows.
        reported: ``[N]`` float32.
        reported_status: ``[N]`` what the writer said of it; a value that is no logprob is not
            believed even where it says valid.
        owner_rank: ``[N]``.
        weights_epoch: ``[N]``.
        all_ranks: ``[N]`` bool; false where a shard is missing from the state.
        where: Names the side in errors.

    Raises:
        UnusableInput: If a state gives no logprob although it claims to be a valid row.
    """
    values, row_status = finish_where_valid(state)
    logprob = values.logprob.numpy()
    status = row_status.numpy().copy()
    status[(status == KernelStatus.OK) & np.isneginf(logprob)] = KernelStatus.TARGET_MASKED
    status[~all_ranks.numpy()] = KernelStatus.SHARD_MISSING
    impossible = (status == KernelStatus.OK) & ~(np.isfinite(logprob) & (logprob <= 0))
    if impossible.any():
        raise UnusableInput(
            f"{where}: token {int(impossible.argmax())} has a state that is no sum of "
            "exponentials; write the states as docs/capture-format.md says"
        )
    return Side(
        owner_rank=_integers(owner_rank),
        weights_epoch=_integers(weights_epoch),
        reported=reported.numpy(),
        reported_status=observed_status(reported, reported_status),
        logprob=logprob,
        lse=values.lse.numpy(),
        kernel_status=status,
    )


def observed_status(reported: torch.Tensor, declared: torch.Tensor) -> Integers:
    """The declared `ReportedStatus`, or what the value itself shows where it is called valid."""
    by_value = classify_reported(reported)
    observed = torch.where(declared == ReportedStatus.VALID, by_value, declared)
    return np.asarray(observed.numpy())


def _integers(values: torch.Tensor) -> npt.NDArray[np.int64]:
    return np.asarray(values.numpy(), dtype=np.int64)
