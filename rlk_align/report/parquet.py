"""The token table as Parquet: one row for each token that both sides have."""

from __future__ import annotations

import io
from enum import IntEnum
from typing import Any

import numpy as np

from rlk_align.capture.rows import ReportedStatus
from rlk_align.compare.budget import Budget, Float64s
from rlk_align.compare.token_table import (
    TOKEN_CLASSES,
    Flags,
    Float32s,
    Integers,
    KernelStatus,
    Side,
    TokenTable,
)
from rlk_align.errors import UnusableInput


def check_parquet() -> None:
    """Say so before the work is done, where pyarrow is not installed.

    Raises:
        UnusableInput: Naming the extra to install.
    """
    try:
        import pyarrow.parquet  # noqa: F401 (an optional dependency)
    except ImportError as error:
        raise UnusableInput(
            f"tokens.parquet needs pyarrow ({error}); install rlk-align[report], or pass "
            "--no-parquet"
        ) from None


def parquet_bytes(table: TokenTable, budget: Budget) -> bytes:
    """The file's content: logprobs and terms in nats; null where a value is not valid."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sequence = table.sequence
    columns: dict[str, Any] = {
        "sequence": pa.array(_named(table.labels, sequence)),
        "sample_index": np.array(table.sample_indices, dtype=np.int64)[sequence],
        "position": table.position,
        "token_id": table.token_id,
        "text": pa.array([table.token_texts.get(i) for i in table.token_id.tolist()], pa.string()),
        "class": pa.array(_named(TOKEN_CLASSES, table.token_class)),
    }
    for name, side in (("rollout", table.rollout), ("trainer", table.trainer)):
        columns |= {f"{name}_{k}": v for k, v in _side(side).items()}
    for name, values in budget.terms():
        columns[name] = _spread_out(values, table.compared)
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def _side(side: Side) -> dict[str, Any]:
    import pyarrow as pa

    def valid(values: Float32s, status: Integers) -> Any:
        return pa.array(values, mask=status != 0)

    return {
        "rank": side.owner_rank,
        "weights_epoch": side.weights_epoch,
        "reported": valid(side.reported, side.reported_status),
        "reported_status": pa.array(_status_names(ReportedStatus, side.reported_status)),
        "kernel": valid(side.logprob, side.kernel_status),
        "lse": valid(side.lse, side.kernel_status),
        "kernel_status": pa.array(_status_names(KernelStatus, side.kernel_status)),
    }


def _status_names(names: type[IntEnum], status: Integers) -> list[str]:
    return [names(code).name.lower() for code in status.tolist()]


def _named(names: list[str] | tuple[str, ...], index: Integers) -> list[str]:
    return [names[i] for i in index.tolist()]


def _spread_out(values: Float64s | None, compared: Flags) -> Any:
    """A term's values at the compared rows, null at the others."""
    import pyarrow as pa

    whole = np.zeros(len(compared))
    if values is not None:
        whole[compared] = values
    return pa.array(whole, mask=~compared if values is not None else np.ones_like(compared))
