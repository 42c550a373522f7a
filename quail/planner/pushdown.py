"""Rule `push_down_predicates`: predicates without AI calls are decided before any question is asked.

They come first among the conjuncts of WHERE. For a call in the condition of an outer join, those that read
only the side whose rows the join keeps are decided before the pairs are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quail.plan.logical import AICall
from quail.plan.statement import Block, holds_call
from quail.plan.syntax import Node

_KEEPS_LEFT = frozenset({"INNER", "LEFT", "SEMI", "ANTI"})
_KEEPS_RIGHT = frozenset({"INNER", "RIGHT"})


def push_down_predicates(block: Block, calls: Sequence[AICall], order: str) -> Block:
    """The block with the conjuncts that hold no AI call in front of those that do."""
    free = tuple(conjunct for conjunct in block.conjuncts if not holds_call(conjunct))
    asking = tuple(conjunct for conjunct in block.conjuncts if holds_call(conjunct))
    conjuncts = free + asking
    unchanged = all(a is b for a, b in zip(conjuncts, block.conjuncts, strict=True))
    return block if unchanged else replace(block, conjuncts=conjuncts)


def kept_side(from_table: Node, path: Sequence[str]) -> Node | None:
    """The part of FROM on which WHERE can be decided before a join is made, None where there is none.

    Args:
        from_table: the FROM of the block.
        path: the way to the join.
    """
    table = from_table
    for side in path:
        if table["join_type"] not in (_KEEPS_LEFT if side == "left" else _KEEPS_RIGHT):
            return None
        table = table[side]
    sides: dict[str, Node | None] = {"INNER": table, "RIGHT": table["right"]}
    kind = table["join_type"]
    return sides.get(kind, table["left"] if kind in _KEEPS_LEFT else None)
