"""The order of joins and filters against every order there is."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from quail.cost.budgets import ModelShape
from quail.cost.device import ASSUMED
from quail.cost.roofline import seconds
from quail.cost.work import Work
from quail.planner.join_order import FilterOperator, JoinOperator, JoinPlan, JoinQuery, Relation, order_joins

SHAPE = ModelShape(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    context_tokens=8192,
    element_bytes=4,
    weight_bytes=0,
)


def roofline(work: Work) -> float:
    return seconds(work, SHAPE, ASSUMED).total


def tokens(work: Work) -> float:
    return work.tokens


State = tuple[tuple[float, ...], frozenset[int]]
"""Documents alive in each relation, and relations whose documents' KV is there."""


def start_of(query: JoinQuery) -> State:
    return tuple(relation.num_documents for relation in query.relations), frozenset()


def num_readers(query: JoinQuery, relation: int) -> int:
    return sum(relation in getattr(o, "relations", (getattr(o, "relation", None),)) for o in query.operators)


def step(query: JoinQuery, state: State, index: int, anchor: int | None) -> tuple[Work, State]:
    """The cost model written out a second time, for one operator."""
    alive, held = list(state[0]), state[1]

    def read(i: int, count: float) -> Work:
        if i in held:
            return Work()
        relation = query.relations[i]
        new = query.label_tokens + relation.tokens - relation.reused_tokens
        old = relation.reused_tokens
        written = new if num_readers(query, i) > 1 else 0
        return Work(count * new, count * (new * old + new * (new + 1) / 2), count * written, count * old)

    operator = query.operators[index]
    if isinstance(operator, FilterOperator):
        i, s, own = operator.relation, operator.suffix_tokens, operator.document_tokens
        n = behind = query.label_tokens + (query.relations[i].tokens if own is None else own)
        work = read(i, alive[i]) if own is None else Work(alive[i] * n, alive[i] * n * (n + 1) / 2)
        work += Work(alive[i] * s, alive[i] * (s * behind + s * (s + 1) / 2), 0, alive[i] * behind)
        alive[i] *= operator.selectivity
    else:
        i, j = operator.relations[anchor], operator.relations[1 - anchor]
        behind = query.label_tokens + query.relations[i].tokens
        asked = alive[i] * (1 - (1 - operator.pair_share) ** alive[j])
        f, s = operator.frame_tokens, query.relations[j].tokens + operator.tail_tokens
        work = read(i, asked)
        work += Work(asked * f, asked * (f * behind + f * (f + 1) / 2), asked * f, asked * behind)
        pairs, behind = alive[i] * alive[j] * operator.pair_share, behind + f
        work += Work(pairs * s, pairs * (s * behind + s * (s + 1) / 2), 0, asked * behind)
        match = operator.pair_share * operator.selectivity
        alive[i], alive[j] = (
            alive[i] * (1 - (1 - match) ** alive[j]),
            alive[j] * (1 - (1 - match) ** alive[i]),
        )
    kept = held if query.retains else frozenset()
    if getattr(operator, "document_tokens", None) is None:
        kept |= {i}
    return work, (tuple(alive), kept)


def cost_of(query: JoinQuery, sequence, cost) -> float:
    """The cost of one order with its anchors."""
    state, total = start_of(query), 0.0
    for index, anchor in sequence:
        work, state = step(query, state, index, anchor)
        total += cost(work)
    return total


def left_deep(query: JoinQuery):
    """Every order in which each join but the first reads a relation joined before, with every anchor."""
    for order in itertools.permutations(range(len(query.operators))):
        joined, is_valid = set(), True
        for index in order:
            operator = query.operators[index]
            if isinstance(operator, JoinOperator):
                is_valid = is_valid and (not joined or bool(joined & set(operator.relations)))
                joined |= set(operator.relations)
        if is_valid:
            choices = [getattr(query.operators[index], "anchors", (None,)) for index in order]
            yield from (list(zip(order, anchors, strict=True)) for anchors in itertools.product(*choices))


def random_query(random_: random.Random, most_operators: int) -> JoinQuery:
    num_tables = random_.randint(2, 4)
    is_star = random_.random() < 0.5
    relations = []
    for _ in range(num_tables):
        length = random_.uniform(2, 800)
        relations.append(
            Relation(random_.choice([1, 3, 20, 150, 1000]), length, random_.choice([0, 0, length / 2]))
        )
    operators = [
        JoinOperator(
            random_.choice([(0 if is_star else i, i + 1), (i + 1, 0 if is_star else i)]),
            random_.uniform(5, 40),
            random_.uniform(1, 10),
            random_.choice([0.001, 0.05, 0.3, 0.9]),
            random_.choice([(0, 1), (0, 1), (0,), (1,)]),
            random_.choice([1.0, 0.2, 0.01]),
        )
        for i in range(num_tables - 1)
    ]
    filters = [
        FilterOperator(
            i,
            random_.uniform(3, 60),
            random_.choice([0.0, 0.05, 0.5, 0.95, 1.0]),
            random_.choice([None, None, None, 30]),
        )
        for i in range(num_tables)
        for _ in range(random_.randint(0, 3))
    ]
    random_.shuffle(filters)
    operators += filters[: most_operators - len(operators)]
    random_.shuffle(operators)
    return JoinQuery(tuple(relations), tuple(operators), random_.choice([0, 4]), random_.random() < 0.7)


def sequence_of(plan: JoinPlan):
    return [(step.operator, step.anchor) for step in plan.steps]


@pytest.mark.parametrize("seed", range(120))
def test_the_plan_costs_the_least_of_all_left_deep_ones(seed):
    random_ = random.Random(seed)
    query = random_query(random_, 5 if seed % 10 else 6)
    cost = roofline if seed % 2 else tokens
    costs = sorted(cost_of(query, sequence, cost) for sequence in left_deep(query))
    plan = order_joins(query, cost)
    assert plan.cost == pytest.approx(costs[0], rel=1e-9)
    assert cost_of(query, sequence_of(plan), cost) == pytest.approx(plan.cost, rel=1e-9)
    assert cost(plan.work) == pytest.approx(plan.cost, rel=1e-9)
    if len(costs) > 1:
        assert plan.runner_up == pytest.approx(costs[1], rel=1e-9)
    else:
        assert plan.runner_up is None


def least_cost(query: JoinQuery, cost, at_most: float) -> float:
    """The least cost of all left-deep plans, infinite if all cost more than `at_most`.

    Nothing is dropped but what costs more already, and of the ways to the very same state all but the cheapest.
    """
    layer = {(frozenset(), frozenset(), start_of(query)): 0.0}
    for _ in query.operators:
        following: dict[tuple, float] = {}
        for (done, joined, state), so_far in layer.items():
            for index, operator in enumerate(query.operators):
                both = frozenset(getattr(operator, "relations", ()))
                if index in done or (both and joined and not both & joined):
                    continue
                for anchor in getattr(operator, "anchors", (None,)):
                    work, reached = step(query, state, index, anchor)
                    total = so_far + cost(work)
                    key = (done | {index}, joined | both, reached)
                    if total <= at_most and total < following.get(key, math.inf):
                        following[key] = total
        layer = following
    return min(layer.values(), default=math.inf)


def four_tables(random_: random.Random, num_filters: int | None) -> JoinQuery:
    """Four tables with so many filters each, or with up to three."""
    while True:
        query = random_query(random_, most_operators=99)
        filters = [o.relation for o in query.operators if isinstance(o, FilterOperator)]
        counts = {filters.count(relation) for relation in range(4)}
        if len(query.relations) == 4 and (num_filters is None or counts == {num_filters}):
            return query


@pytest.mark.parametrize(
    ("seed", "num_filters"), [*((seed, None) for seed in range(20)), (0, 3), (1, 3), (2, 3)]
)
def test_four_tables_with_up_to_three_filters_each(seed, num_filters):
    query = four_tables(random.Random(1000 + seed), num_filters)
    plan = order_joins(query, roofline)
    assert least_cost(query, roofline, plan.cost * (1 + 1e-9)) == pytest.approx(plan.cost, rel=1e-9)


def test_a_long_anchor_is_computed_once_and_a_short_partner_many_times():
    query = JoinQuery((Relation(20, 800), Relation(20, 12)), (JoinOperator((0, 1), 20, 4),), 4)
    plan = order_joins(query, tokens)
    assert sequence_of(plan) == [(0, 0)]
    assert plan.cost == 20 * (4 + 800 + 20) + 400 * (12 + 4)
    assert plan.runner_up == 20 * (4 + 12 + 20) + 400 * (800 + 4)


def test_a_filter_that_streams_into_its_join_leaves_the_frame_alone_to_compute():
    for retains in (True, False):
        operators = (FilterOperator(0, 10, 0.5), JoinOperator((0, 1), 20, 4, anchors=(0,)))
        query = JoinQuery((Relation(20, 800), Relation(10, 12)), operators, 4, retains=retains)
        plan = order_joins(query, tokens)
        assert sequence_of(plan) == [(0, None), (1, 0)]
        assert plan.steps[1].work.tokens == 10 * 20 + 100 * 16


def test_as_written_keeps_the_order_and_chooses_anchors():
    operators = (JoinOperator((0, 1), 20, 4), FilterOperator(0, 10, 0.01))
    query = JoinQuery((Relation(200, 80), Relation(100, 12)), operators, 4)
    assert sequence_of(order_joins(query, tokens, "as_written")) == [(0, 0), (1, None)]
    assert sequence_of(order_joins(query, tokens)) == [(1, None), (0, 0)]


def test_eight_relations_with_two_filters_each_are_planned_fast():
    random_ = random.Random(3)
    relations = tuple(Relation(random_.randint(10, 500), random_.randint(5, 500)) for _ in range(8))
    joins = [JoinOperator((i, i + 1), 20, 4, 0.05) for i in range(7)]
    filters = [FilterOperator(i, 12, 0.3) for i in range(8) for _ in range(2)]
    plan = order_joins(JoinQuery(relations, (*joins, *filters), 4), roofline)
    assert len(plan.steps) == 23
    assert plan.runner_up is None


def test_joins_that_share_no_relation_follow_each_other():
    relations = tuple(Relation(10, n) for n in (100, 5, 7, 300))
    plan = order_joins(JoinQuery(relations, (JoinOperator((0, 1), 9, 2), JoinOperator((2, 3), 9, 2))), tokens)
    assert {step.operator: step.anchor for step in plan.steps} == {0: 0, 1: 1}
