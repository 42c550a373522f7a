"""FROM as a tree of joins: its parts by their path, and columns that tell its rows apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quail.plan import syntax
from quail.plan.syntax import Node

_ONE_SIDED = ("SEMI", "ANTI")
_WHOLE = ("BASE_TABLE", "SUBQUERY", "TABLE_FUNCTION")


def table_at(table: Node, path: Sequence[str]) -> Node:
    """The table at the end of a path of `left` and `right`."""
    for side in path:
        table = table[side]
    return table


def replaced(table: Node, path: Sequence[str], other: Node) -> Node:
    """FROM with another table at the end of a path."""
    if not path:
        return other
    return {**table, path[0]: replaced(table[path[0]], path[1:], other)}


def up_to(table: Node, path: Sequence[str], last: Node) -> Node:
    """The part of FROM to the left of a table, joined with `last` in that table's place."""
    if not path:
        return last
    if path[0] == "left":
        return up_to(table["left"], path[1:], last)
    right = up_to(table["right"], path[1:], last)
    cross: dict[str, Any] = syntax.parse_query("SELECT 1 FROM a CROSS JOIN b")["from_table"]
    return {**cross, "left": table["left"], "right": right}


def can_be_numbered(table: Node) -> bool:
    """Whether columns can be added to a table of FROM that tell its rows apart."""
    return all(leaf["type"] in _WHOLE for leaf in _leaves(table))


def with_row_numbers(table: Node, name: str) -> tuple[Node, tuple[Node, ...]]:
    """A table of FROM with rows numbered, and the columns that together tell its rows apart.

    A joined table has a number for each table that it joins; it is NULL where an outer join found no row.
    SEMI and ANTI joins give rows of their left side alone.

    Args:
        table: that `can_be_numbered`.
        name: of the columns; a number is added to it.
    """
    columns: list[Node] = []
    return _numbered(table, name, columns), tuple(columns)


def _leaves(table: Node) -> Iterator[Node]:
    """The tables whose rows stand in those of a joined one."""
    if table["type"] != "JOIN":
        yield table
        return
    yield from _leaves(table["left"])
    if table["join_type"] not in _ONE_SIDED:
        yield from _leaves(table["right"])


def _numbered(table: Node, name: str, columns: list[Node]) -> Node:
    if table["type"] == "JOIN":
        left = _numbered(table["left"], name, columns)
        is_one_sided = table["join_type"] in _ONE_SIDED
        return {
            **table,
            "left": left,
            "right": table["right"] if is_one_sided else _numbered(table["right"], name, columns),
        }
    number = f"{name}_{len(columns)}"
    alias = table["alias"] or _own_name(table) or f"{number}_rows"
    columns.append(syntax.column(alias, number))
    rows = syntax.query(f'SELECT *, row_number() OVER () AS "{number}" FROM x')
    return syntax.subquery_table({**rows, "from_table": table}, alias)


def _own_name(table: Node) -> str:
    """By which columns of a table without an alias are named; none of a subquery."""
    if table["type"] == "TABLE_FUNCTION":
        return str(table["function"]["function_name"])
    return str(table.get("table_name", ""))
