"""What DuckDB's functions are: aggregates, functions of a row, functions whose value changes."""

from __future__ import annotations

import functools
from typing import Any

import duckdb

_ORDERED_AGGREGATES = frozenset(
    {"any_value", "arbitrary", "array_agg", "first", "group_concat", "last", "list", "listagg", "string_agg"}
)


def aggregate_names() -> frozenset[str]:
    """Aggregate functions."""
    return _names("function_type = 'aggregate'")


def scalar_names() -> frozenset[str]:
    """Functions and macros of one row."""
    return _names("function_type IN ('scalar', 'macro')")


def is_unordered_aggregate(node: dict[str, Any]) -> bool:
    """Whether a node is an aggregate whose value depends on the order in which DuckDB reads rows."""
    return (
        node.get("class") == "FUNCTION"
        and node["function_name"].lower() in _ORDERED_AGGREGATES
        and not node["order_bys"]["orders"]
    )


def volatile_names() -> frozenset[str]:
    """Functions whose value is another each time."""
    return _names("stability = 'VOLATILE'")


@functools.cache
def _names(condition: str) -> frozenset[str]:
    sql = f"SELECT DISTINCT lower(function_name) FROM duckdb_functions() WHERE {condition}"
    with duckdb.connect() as connection:
        return frozenset(name for (name,) in connection.execute(sql).fetchall())
