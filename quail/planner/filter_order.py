"""Rule `order_filters`: which AI predicates of an AND or OR are asked first.

A predicate that costs little and decides much goes first: predicates of an AND are asked in the order of
cost / (1 - selectivity), those of an OR in the order of cost / selectivity. Both orders are optimal for
independent predicates whose costs do not depend on each other (Hanani 1977, "An optimal evaluation of Boolean
expressions").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quail.plan.logical import AICall
from quail.plan.statement import Block, calls_in, holds_call
from quail.plan.syntax import Node

DEFAULT_SELECTIVITY = 0.5
_CHARACTERS_PER_TOKEN = 4
_CUE_TOKENS = 8
_PAIR_FACTOR = 100
_SMALLEST = 1e-6


def order_filters(block: Block, calls: Sequence[AICall], order: str) -> Block:
    """The block with its AI conjuncts in the order in which they should be asked."""
    if order == "as_written":
        return block
    ranks = operand_order(block.conjuncts, calls, order, is_and=True)
    conjuncts = tuple(block.conjuncts[i] for i in ranks)
    unchanged = all(a is b for a, b in zip(conjuncts, block.conjuncts, strict=True))
    return block if unchanged else replace(block, conjuncts=conjuncts)


def operand_order(
    operands: Sequence[Node], calls: Sequence[AICall], order: str, *, is_and: bool
) -> list[int]:
    """Positions of the operands of an AND or OR in the order in which they are decided, free ones first."""

    def rank(position: int) -> tuple[int, float]:
        operand = operands[position]
        if not holds_call(operand):
            return 0, 0.0
        if order == "as_written":
            return 1, 0.0
        share = selectivity(operand, calls)
        deciding = 1 - share if is_and else share
        return 1, cost(operand, calls) / max(deciding, _SMALLEST)

    return sorted(range(len(operands)), key=rank)


def cost(node: Node, calls: Sequence[AICall]) -> float:
    """Question tokens of the calls in an expression, as far as they are known without a model."""
    return sum(call_cost(calls[index]) for index in set(calls_in(node)))


def call_cost(call: AICall) -> float:
    """Question tokens of one call; a call over two relations is asked once a pair."""
    texts = [part for part in call.prompt.parts if isinstance(part, str)]
    texts += [category.label for category in call.categories]
    tokens = sum(map(len, texts)) / _CHARACTERS_PER_TOKEN + _CUE_TOKENS
    return tokens * (_PAIR_FACTOR if call.prompt.num_arguments > 1 else 1)


def selectivity(node: Node, calls: Sequence[AICall]) -> float:
    """Estimated share of rows for which a predicate is TRUE."""
    if "quail_call" in node:
        hint = calls[node["quail_call"]].options.selectivity
        return DEFAULT_SELECTIVITY if hint is None else hint
    if node.get("type") == "OPERATOR_NOT":
        return 1 - selectivity(node["children"][0], calls)
    if node.get("class") == "CONJUNCTION":
        product = 1.0
        is_and = node["type"] == "CONJUNCTION_AND"
        for child in node["children"]:
            share = selectivity(child, calls)
            product *= share if is_and else 1 - share
        return product if is_and else 1 - product
    return DEFAULT_SELECTIVITY
