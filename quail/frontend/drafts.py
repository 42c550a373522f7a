"""A block while it is bound, and what its tree says about where its expressions are computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quail.plan import syntax
from quail.plan.functions import aggregate_names, volatile_names
from quail.plan.statement import Clause, ExpressionPlace, Place, Stage, Step
from quail.plan.syntax import Node


@dataclass(eq=False)
class Draft:
    """A block while it is bound."""

    index: int
    node: Node
    places: tuple[Place, ...]
    is_aggregated: bool
    group_signatures: frozenset[str]
    grouped_items: frozenset[int]
    limited_items: frozenset[int]
    items: list[tuple[str, Node]] = field(default_factory=list)
    columns: dict[int, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Where the walk through an expression stands."""

    block: Draft
    clause: Clause
    root: Node
    item: int | None = None
    steps: tuple[Step, ...] = ()
    in_aggregate: bool = False
    in_window: bool = False
    is_grouped: bool = False
    join: tuple[str, ...] | None = None
    is_conjunct: bool = False


def deeper(context: Context, node: Node, kind: str, operand: int) -> Context:
    """The context one node further down."""
    return replace(context, steps=(*context.steps, Step(node, kind, operand)))


def place_of(context: Context) -> ExpressionPlace:
    """The place that a context stands for."""
    return ExpressionPlace(
        context.block.index,
        context.clause,
        stage_of(context),
        context.root,
        context.steps,
        context.in_window,
        context.join,
    )


def stage_of(context: Context) -> Stage:
    """Over which rows of its block an expression is computed."""
    draft, clause = context.block, context.clause
    if context.in_aggregate or clause in (Clause.WHERE, Clause.ON, Clause.GROUP_BY, Clause.VALUES):
        return Stage.ROWS
    if context.is_grouped or (clause is Clause.SELECT and context.item in draft.grouped_items):
        return Stage.ROWS
    if clause is Clause.SELECT and context.item in draft.limited_items and not context.in_window:
        return Stage.LIMITED
    if draft.is_aggregated or (draft.node["qualify"] is not None and not context.in_window):
        return Stage.RESULT
    if any(below.get("class") == "WINDOW" for below in syntax.walk(context.root)):
        return Stage.RESULT
    return Stage.ROWS


def draft_block(index: int, node: Node, places: tuple[Place, ...]) -> Draft:
    """A block of which nothing is bound yet."""
    items = node["select_list"]
    groups = node["group_expressions"]
    is_forced = node["aggregate_handling"] == "FORCE_AGGREGATES"
    roots = [*items, node["having"], *node["modifiers"], node["qualify"]]
    has_aggregate = any(is_aggregate(below) for root in roots for below in _walk_block(root))
    grouped = set()
    aliases = {item["alias"].lower(): i for i, item in enumerate(items) if item["alias"]}
    for group in groups:
        grouped.add(_referenced_item(group, aliases))
    if is_forced:
        grouped |= {i for i, item in enumerate(items) if not any(map(is_aggregate, _walk_block(item)))}
    return Draft(
        index,
        node,
        places,
        is_aggregated=bool(groups) or is_forced or has_aggregate,
        group_signatures=frozenset(signature(group) for group in groups),
        grouped_items=frozenset(i for i in grouped if i is not None),
        limited_items=frozenset(_limited_items(node, aliases)),
    )


def select_names(node: Node) -> frozenset[str] | None:
    """Lower-case names of a query's columns, None where they are not all spelt out."""
    if node["type"] != "SELECT_NODE":
        return None
    names = set()
    for item in node["select_list"]:
        if item["alias"]:
            names.add(item["alias"].lower())
        elif item["class"] == "COLUMN_REF":
            names.add(item["column_names"][-1].lower())
        else:
            return None
    return frozenset(names)


def last_byte(node: Node) -> int:
    """The last byte of a block in front of its LIMIT that is known to belong to it."""
    parts = [node["select_list"], node["from_table"], node["where_clause"], node["group_expressions"]]
    parts += [node["having"], node["qualify"]]
    parts += [modifier for modifier in node["modifiers"] if modifier["type"] == "ORDER_MODIFIER"]
    spans = [
        span for part in parts if part for below in syntax.walk(part) if (span := syntax.own_span(below))
    ]
    return max((stop for _, stop in spans), default=0)


def _limited_items(node: Node, aliases: dict[str, int]) -> set[int]:
    """Select items that only rows left after LIMIT need."""
    kinds = {modifier["type"] for modifier in node["modifiers"]}
    if "DISTINCT_MODIFIER" in kinds or not kinds & {"LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER"}:
        return set()
    limited = {
        index
        for index, item in enumerate(node["select_list"])
        if not any(below.get("class") == "SUBQUERY" for below in syntax.walk(item))
    }
    orders = [
        o["expression"] for m in node["modifiers"] if m["type"] == "ORDER_MODIFIER" for o in m["orders"]
    ]
    for order in orders:
        if order["class"] == "STAR":
            return set()
        limited.discard(_referenced_item(order, aliases) or 0 if order["class"] == "CONSTANT" else -1)
    for root in (*orders, node["qualify"]):
        for below in _walk_block(root):
            if below.get("class") == "COLUMN_REF" and len(below["column_names"]) == 1:
                limited.discard(aliases.get(below["column_names"][0].lower(), -1))
    return limited


def _referenced_item(node: Node, aliases: dict[str, int]) -> int | None:
    """The select item that a position or an alias in GROUP BY or ORDER BY names."""
    if node["class"] == "CONSTANT" and node["literal"]["kind"] == "INTEGER":
        return int(node["literal"]["text"]) - 1
    if node["class"] == "COLUMN_REF" and len(node["column_names"]) == 1:
        return aliases.get(node["column_names"][0].lower())
    return None


def _walk_block(node: Any) -> Iterator[Node]:
    """Every node of an expression, without the queries in it."""
    if isinstance(node, dict):
        if node.get("type") in syntax.QUERY_NODES:
            return
        yield node
        for child in syntax.children(node):
            yield from _walk_block(child)


def conjuncts_of(node: Node | None) -> list[Node]:
    """The operands of a tree of ANDs."""
    if node is None:
        return []
    if node["type"] == "CONJUNCTION_AND":
        return [conjunct for child in node["children"] for conjunct in conjuncts_of(child)]
    return [node]


def signature(node: Node) -> str:
    """Text that is equal for equal expressions, wherever they stand."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: strip(v) for k, v in value.items() if k != "alias" and not k.startswith("query_location")
            }
        return [strip(entry) for entry in value] if isinstance(value, list) else value

    return json.dumps(strip(node)).lower()


def is_aggregate(node: Node) -> bool:
    """Whether a node is a call of an aggregate."""
    return (
        node.get("class") == "FUNCTION"
        and not node["schema"]
        and node["function_name"].lower() in aggregate_names()
    )


def is_constant(node: Node) -> bool:
    """Whether an expression reads no row and is the same each time."""
    return not any(
        below.get("class") in ("COLUMN_REF", "SUBQUERY", "STAR", "WINDOW", "LAMBDA", "POSITIONAL_REFERENCE")
        or (below.get("class") == "FUNCTION" and _is_changing(below))
        for below in syntax.walk(node)
    )


def _is_changing(function: Node) -> bool:
    name = function["function_name"].lower()
    return (
        bool(function["schema"])
        or name.startswith("ai_")
        or name in volatile_names()
        or name in aggregate_names()
    )
