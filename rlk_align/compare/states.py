"""Rows of kernel states, picked and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import torch

from rlk_kernels import State, empty_state

NAMES = tuple(field.name for field in fields(State))


def state_rows(state: State, at: npt.NDArray[np.int64]) -> State:
    """The rows ``at`` of a state."""
    return State(**{name: getattr(state, name)[at] for name in NAMES})


def concatenated(states: Sequence[State]) -> State:
    """The rows of all states, one after the other."""
    columns = [empty_state(0), *states]
    return State(**{name: torch.cat([getattr(s, name) for s in columns]) for name in NAMES})
