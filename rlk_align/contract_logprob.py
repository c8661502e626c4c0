"""The door to a logprob under contract: checked here, agreed on by the group, computed, returned.

Letters: T tokens (rows), L this rank's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_align.contract import LogprobContract, MaskContract, ShardingContract
from rlk_align.dispatch import Dispatch, Registry, platform_of, resolve
from rlk_align.dispatch.registry import DEFAULT_REGISTRY
from rlk_align.errors import UnusableInput
from rlk_align.preflight import preflight
from rlk_kernels import SelectedLogprob
from rlk_kernels.shard_input import checked_input


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractLogprob:
    """Values under a contract, and how they came to be."""

    logprob: Tensor
    """float32 [T], in nats, the same bits on every rank of the TP group; inactive rows have +0."""
    lse: Tensor
    """float32 [T], in nats, of every row, active or not."""
    dispatch: Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRank:
    """A rank's input that keeps its contract."""

    logits_TL: Tensor
    token_ids_T: Tensor
    """Real ids only: ignored rows have id 0."""
    active_T: Tensor
    """bool [T]."""
    dispatch: Dispatch


def contract_logprob(
    make_contract: Callable[[], LogprobContract],
    logits_TL: Tensor,
    token_ids_T: Tensor,
    *,
    backend: str,
    group: dist.ProcessGroup | None = None,
    registry: Registry = DEFAULT_REGISTRY,
) -> ContractLogprob:
    """Logprob of each active row's token and LSE of each row, differentiable, under a contract.

    Args:
        make_contract: Builds this rank's contract. It is called here, so that what it raises
            reaches the other ranks instead of leaving them waiting.
        logits_TL: ``[T, L]`` this rank's columns, of the contract's dtype. Inactive rows have an
            LSE, so theirs must be valid, too.
        token_ids_T: ``[T]`` int64 or int32, the same on every rank; ``ignore_index`` in inactive
            rows and only there, if the contract has one.
        backend: An exact id; "reference" or "production"; "auto" for one rank only.
        group: The TP group; None for one rank.
        registry: Where backends are looked up.

    Raises:
        UnusableInput: On every rank of the group alike, naming the rank at fault.
        GroupSilent: If a rank did not come within the group's timeout.
    """
    prepared = preflight(
        lambda: _prepared(make_contract(), logits_TL, token_ids_T, backend, group, registry), group
    )
    sharding = prepared.dispatch.contract.sharding
    try:
        values = prepared.dispatch.backend(
            prepared.logits_TL,
            prepared.token_ids_T,
            vocab_size=sharding.layout.vocab_size,
            vocab_start=sharding.bounds[0],
            group=group,
        )
    except ValueError as error:
        # the kernel's own collective has told every rank the same
        raise UnusableInput(str(error)) from error
    _check_output(values, prepared)
    return ContractLogprob(
        logprob=torch.where(prepared.active_T, values.logprob, 0.0),
        lse=values.lse,
        dispatch=prepared.dispatch,
    )


def _prepared(
    contract: LogprobContract,
    logits_TL: Tensor,
    token_ids_T: Tensor,
    backend: str,
    group: dist.ProcessGroup | None,
    registry: Registry,
) -> PreparedRank:
    """This rank's input, held against its contract; no collective."""
    if not isinstance(contract, LogprobContract):
        raise UnusableInput(f"make_contract should return a LogprobContract, got {contract!r}")
    _check_group(contract.sharding, group)
    _check_logits(contract, logits_TL)
    active_T = torch.tensor(contract.mask.active, dtype=torch.bool, device=logits_TL.device)
    shard = checked_input(
        logits_TL,
        _real_ids(contract.mask, token_ids_T, active_T),
        vocab_start=contract.sharding.bounds[0],
        vocab_size=contract.sharding.layout.vocab_size,
        temperature=1.0,
        backend="reference",
    )
    return PreparedRank(
        logits_TL=logits_TL,
        token_ids_T=shard.token_ids,
        active_T=active_T,
        dispatch=resolve(contract, backend, platform_of(logits_TL.device), registry=registry),
    )


def _check_group(sharding: ShardingContract, group: dist.ProcessGroup | None) -> None:
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if (size, rank) != (sharding.tp_world, sharding.tp_rank):
        raise UnusableInput(
            f"the contract is of TP rank {sharding.tp_rank} of {sharding.tp_world}, but the group "
            f"has it as rank {rank} of {size}; pass the TP group of the contract"
        )


def _check_logits(contract: LogprobContract, logits_TL: Tensor) -> None:
    if not isinstance(logits_TL, Tensor):
        raise UnusableInput(f"logits should be a tensor, got {type(logits_TL).__name__}")
    start, end = contract.sharding.bounds
    expected = (contract.mask.num_tokens, end - start)
    shape = tuple(logits_TL.shape)
    if shape != expected:
        raise UnusableInput(
            f"the contract says {expected[0]} tokens and the columns [{start}, {end}), so logits "
            f"should be {list(expected)}, got {list(shape)}; pass the shard that the contract names"
        )
    if logits_TL.dtype != contract.logits_dtype.torch_dtype:
        raise UnusableInput(
            f"the contract says logits of {contract.logits_dtype}, got {logits_TL.dtype}; "
            "pass them as the contract says, or change it"
        )


def _real_ids(mask: MaskContract, token_ids_T: Tensor, active_T: Tensor) -> Tensor:
    """The ids with 0 in ignored rows."""
    is_tensor = isinstance(token_ids_T, Tensor)
    if mask.ignore_index is None or not is_tensor or token_ids_T.shape != active_T.shape:
        # a wrong type or shape is the kernel's to tell
        return token_ids_T
    wrong = (token_ids_T == mask.ignore_index) == active_T
    if wrong.any():
        row = int(wrong.nonzero()[0])
        state = "active" if active_T[row] else "inactive"
        raise UnusableInput(
            f"row {row} is {state} and has token id {int(token_ids_T[row])}; inactive rows, and "
            f"only they, carry ignore_index {mask.ignore_index}"
        )
    return torch.where(active_T, token_ids_T, 0)


def _check_output(values: SelectedLogprob, prepared: PreparedRank) -> None:
    for name, value in (("logprob", values.logprob), ("lse", values.lse)):
        if value.dtype != torch.float32 or value.shape != prepared.active_T.shape:
            raise UnusableInput(
                f"backend {prepared.dispatch.actual} returned {name} as {value.dtype} "
                f"{list(value.shape)}; the contract's output is float32 "
                f"{list(prepared.active_T.shape)}"
            )
