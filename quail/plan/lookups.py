"""The SQL functions that stand in the calls' places."""

from __future__ import annotations

import duckdb

from quail.plan.logical import AICall, Operator

SQL_TYPES = {
    Operator.IF: "BOOLEAN",
    Operator.SCORE: "DOUBLE",
    Operator.CLASSIFY: "VARCHAR",
    Operator.PROBABILITIES: "MAP(VARCHAR, DOUBLE)",
}


def lookup_name(nonce: str, call: int | str) -> str:
    """Name of the SQL function that looks up a call's answers by the hashes of its argument texts."""
    return f"quail_{nonce}_answer_{call}"


def stand_in(nonce: str, call: AICall) -> str:
    """A macro of that name that knows no answer, for binding a statement without running it."""
    parameters = [f"h{i}" for i in range(call.prompt.num_arguments)]
    is_absent = " OR ".join(f"{name} IS NULL" for name in parameters)
    return (
        f"CREATE TEMP MACRO {lookup_name(nonce, call.index)}({', '.join(parameters)}) AS "
        f"CASE WHEN {is_absent} THEN CAST(NULL AS {SQL_TYPES[call.operator]}) END"
    )


def readable(error: duckdb.Error, nonce: str) -> str:
    """DuckDB's message in terms of the statement that the user wrote."""
    message = str(error).split("\n\nLINE", 1)[0].strip()
    if "Traceback (most recent call last)" in message:  # of the file system that serves registered files
        message = message.splitlines()[-1].strip()
    return message.replace(f"quail_{nonce}_", "")
