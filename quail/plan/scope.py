"""Which CTEs a query may read, by where it stands."""

from __future__ import annotations

from collections.abc import Sequence

from quail.plan import syntax
from quail.plan.statement import Block, OperandPlace, Place, TablePlace
from quail.plan.syntax import Node


def tables_of_place(place: Place, blocks: Sequence[Block | None]) -> list[Node]:
    """The CTEs that a query at this place may read, besides those of the queries further out."""
    if isinstance(place, TablePlace):
        return list(place.node["cte_map"]["map"][: place.position])
    if isinstance(place, OperandPlace):
        return list(place.node["cte_map"]["map"])
    block = blocks[place.block]
    assert block is not None
    return list(block.node["cte_map"]["map"])


def with_visible_tables(node: Node, places: Sequence[Place], blocks: Sequence[Block | None]) -> Node:
    """A query with all CTEs in front of it that are in sight at the end of the way."""
    for place in reversed(places):
        node = syntax.with_tables(node, tables_of_place(place, blocks))
    return node


def is_visible_table(name: str, places: Sequence[Place], blocks: Sequence[Block | None]) -> bool:
    """Whether a name means a CTE at the end of the way."""
    return any(
        entry["key"].lower() == name.lower() for place in places for entry in tables_of_place(place, blocks)
    )
