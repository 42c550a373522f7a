"""A Python function over the rows of a query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from quail.errors import QuailError
from quail.frontend.composition import Applied
from quail.sources.frames import to_frame


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in messages."""
    return getattr(function, "__name__", type(function).__name__)


def apply_function(applied: Applied, table: pa.Table) -> pa.Table:
    """The function's result over a whole table, batch by batch.

    Raises:
        QuailError: the function failed, or gave no table.
    """
    name = name_of(applied.function)
    batches = table.to_batches(max_chunksize=applied.batch_rows)
    if not batches:
        empty = [pa.array([], type=field.type) for field in table.schema]
        batches = [pa.RecordBatch.from_arrays(empty, schema=table.schema)]
    made = []
    for batch in batches:
        try:
            given = applied.function(batch)
        except Exception as error:
            raise QuailError(f"apply: {name} failed: {type(error).__name__}: {error}") from error
        if given is None:
            raise QuailError(f"apply: {name} gave nothing back", hint="return the batch, changed")
        data = to_frame(f"result of {name}", given).data
        made.append(data if isinstance(data, pa.Table) else data.to_table())
    try:
        return pa.concat_tables(made, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise QuailError(
            f"apply: {name} gave batches of different columns: {error}", hint="give the same schema each time"
        ) from None
