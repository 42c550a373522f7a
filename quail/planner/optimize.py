"""The rules of the relational side, in the order in which they are applied.

Each rule takes a block and returns it changed, or the same object where nothing changes. Rules that need the
texts themselves (`order_joins`, `choose_anchors`, prefix sharing) are applied while the statement runs.
"""

from __future__ import annotations

from quail.plan.statement import Block, BoundStatement
from quail.planner.filter_order import order_filters
from quail.planner.pushdown import push_down_predicates

RULES = (push_down_predicates, order_filters)


def optimize(bound: BoundStatement, order: str) -> tuple[Block, ...]:
    """The blocks of a statement with their conjuncts in the order in which they will be decided."""
    return tuple(optimize_block(block, bound, order) for block in bound.blocks)


def optimize_block(block: Block, bound: BoundStatement, order: str) -> Block:
    """One block after all rules."""
    for rule in RULES:
        block = rule(block, bound.calls, order)
    return block
