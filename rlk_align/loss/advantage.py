"""A sequence's reward, measured by the rewards of its group."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from rlk_align.errors import UnusableInput
from rlk_align.loss.contract import MAX_WEIGHT, AdvantageScale, LossContract


def group_advantages(rewards_S: Tensor, group_ids_S: Tensor, contract: LossContract) -> Tensor:
    """float64 [S]: the advantage of each sequence, in the same bits for any order of sequences.

    Mean and variance are exact sums (`math.fsum`) rounded to float64 and divided once; the variance
    is the population's (divided by the group's size), and the two steps of Shao et al., 2024
    (arXiv 2402.03300), section 4.1.2, are (reward - mean) / (std + std_epsilon). A group whose
    rewards are all equal has advantage 0, whatever std_epsilon is; so has a group of one, which has
    nothing to be measured by.

    Args:
        rewards_S: float32 [S], finite.
        group_ids_S: int64 [S]; sequences with one id are a group.
        contract: For ``advantage``, ``std_epsilon`` and ``group_size``.

    Raises:
        UnusableInput: If a group has another size than the contract says, or an advantage is beyond
            2**32.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(group_ids_S.tolist()):
        members[group].append(index)
    rewards = rewards_S.tolist()
    advantages = [0.0] * len(rewards)
    for group, indices in members.items():
        _check_size(group, len(indices), contract.group_size)
        values = _scaled([rewards[i] for i in indices], contract)
        if max(map(abs, values)) > MAX_WEIGHT:
            raise UnusableInput(
                f"group {group}: an advantage is beyond 2**32; scale the rewards down"
            )
        for i, value in zip(indices, values, strict=True):
            advantages[i] = value
    return torch.tensor(advantages, dtype=torch.float64)


def _scaled(rewards: list[float], contract: LossContract) -> list[float]:
    """The advantages of one group."""
    # of equal float32 rewards the mean is exact, and every deviation 0
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    if contract.advantage == AdvantageScale.MEAN or not any(deviations):
        return deviations
    std = math.sqrt(math.fsum(d * d for d in deviations) / len(rewards))
    return [d / (std + contract.std_epsilon) for d in deviations]


def _check_size(group: int, size: int, expected: int | None) -> None:
    if expected is not None and size != expected:
        raise UnusableInput(
            f"group {group} has {size} sequences, but group_size is {expected}; "
            "pass every sequence of each group"
        )
