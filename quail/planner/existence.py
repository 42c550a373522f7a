"""Sites of which one TRUE answer decides: conditions of SEMI and ANTI joins, and of EXISTS."""

from __future__ import annotations

from collections.abc import Sequence

from quail.plan import syntax
from quail.plan.functions import aggregate_names
from quail.plan.statement import Block, Clause, ExpressionPlace, Site, calls_in
from quail.plan.syntax import Node
from quail.planner.from_tables import can_be_numbered, table_at

_MATCHING_JOINS = ("SEMI", "ANTI")


def decides_existence(site: Site, blocks: Sequence[Block]) -> bool:
    """Whether a TRUE answer of the site alone, among its candidates, makes the other answers needless."""
    place = site.place
    block = blocks[place.block]
    if place.clause is Clause.ON:
        join = table_at(block.from_table, place.join or ())
        return join.get("join_type") in _MATCHING_JOINS and _is_operand_of_and(site)
    if place.clause is not Clause.WHERE or place.root is not site.node or len(site.places) < 2:
        return False
    return is_existence(block) and sum(1 for _ in calls_in(list(block.conjuncts))) == 1


def may_end_early(site: Site, blocks: Sequence[Block]) -> bool:
    """Whether a row's search ends with its first TRUE answer, if its rows can be told apart."""
    place = site.place
    if not decides_existence(site, blocks):
        return False
    if place.clause is not Clause.ON:
        return True
    return can_be_numbered(table_at(blocks[place.block].from_table, place.join or ())["left"])


def is_existence(block: Block) -> bool:
    """Whether a block is the subquery of an EXISTS that is TRUE once one row passes WHERE."""
    place = block.places[-1] if block.places else None
    if not isinstance(place, ExpressionPlace):
        return False
    node = block.node
    is_plain = (
        not node["modifiers"]
        and not node["group_expressions"]
        and node["aggregate_handling"] == "STANDARD_HANDLING"
        and node["having"] is None
        and node["qualify"] is None
        and not any(map(_may_gather_rows, syntax.walk(node["select_list"])))
    )
    return is_plain and any(
        below.get("class") == "SUBQUERY"
        and below.get("subquery_type") in ("EXISTS", "NOT_EXISTS")
        and below["subquery"]["node"] is node
        for below in syntax.walk(place.root)
    )


def _may_gather_rows(node: Node) -> bool:
    if node.get("class") == "FUNCTION":
        return not node["schema"] and node["function_name"].lower() in aggregate_names()
    return node.get("class") == "WINDOW" or "quail_call" in node


def _is_operand_of_and(site: Site) -> bool:
    """Whether a site is the whole condition or an operand of its AND, and its only call."""
    place = site.place
    if sum(1 for _ in calls_in(place.root)) != 1:
        return False
    nodes = [place.root]
    for step in place.steps:
        if step.kind != "AND" or step.node is not nodes[-1]:
            return False
        nodes.append(step.node["children"][step.operand])
    return nodes[-1] is site.node
