"""Rule `order_joins`: in which order AI filters and AI joins run, and which side of each join is the anchor.

Left-deep dynamic programming over sets of operators that are done. What an operator costs depends on the
documents still alive and on the documents whose KV is there, and both depend on what ran before it; so each
set keeps every plan that no other plan of the set dominates: none that costs no more, has no more documents
alive in any relation, and has the KV of at least the same relations. A plan that costs more already than a
whole one is dropped; a beam search finds that one first.

The order of joins by dynamic programming is that of P. Selinger et al., "Access path selection in a
relational database management system", SIGMOD 1979; keeping undominated plans rather than one is that of
S. Ganguly, W. Hasan, R. Krishnamurthy, "Query optimization for parallel execution", SIGMOD 1992.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from quail.cost.work import Work, rows, stacked_rows

BEAM_STATES = 64
"""Plans of equally many operators, the cheapest so far, that the beam search goes on with."""

MOST_EXACT_OPERATORS = 15
"""With more operators the beam's plan stands; an exact search of as many took up to 150,000 steps."""

MOST_STEPS = 2**18
"""An exact search that looks at more plans than this is given up, and the beam's plan stands."""

MOST_RUNNER_UP_OPERATORS = 10
"""With more operators, the cost of the second-best plan is not looked for."""

Cost: TypeAlias = Callable[[Work], float]


@dataclass(frozen=True)
class Relation:
    """Distinct documents of one relation.

    Attributes:
        num_documents: how many.
        tokens: mean tokens of one, without the label in front of an anchor.
        reused_tokens: those of them that need not be computed: borrowed from a document that begins alike, or
            retained from an earlier query.
    """

    num_documents: float
    tokens: float
    reused_tokens: float = 0.0


@dataclass(frozen=True)
class FilterOperator:
    """A question about each document of one relation.

    Attributes:
        relation: index of the relation.
        suffix_tokens: tokens behind the document.
        selectivity: share of documents that pass.
        document_tokens: tokens of the document that it reads where that is another than the relation's, whose
            KV then serves nothing else; None where it is the same.
    """

    relation: int
    suffix_tokens: float
    selectivity: float = 0.5
    document_tokens: float | None = None


@dataclass(frozen=True)
class JoinOperator:
    """A question about pairs of documents of two relations.

    Attributes:
        relations: indices of the relations of argument 0 and argument 1.
        frame_tokens: tokens between an anchor and its partners.
        tail_tokens: tokens behind a partner.
        selectivity: share of pairs that match.
        anchors: arguments that may be the anchor; one of them alone under a hint.
        pair_share: share of all pairs that relational conditions leave.
    """

    relations: tuple[int, int]
    frame_tokens: float
    tail_tokens: float
    selectivity: float = 0.5
    anchors: tuple[int, ...] = (0, 1)
    pair_share: float = 1.0


Operator: TypeAlias = FilterOperator | JoinOperator


@dataclass(frozen=True)
class JoinQuery:
    """What is to be ordered.

    Attributes:
        relations: the relations.
        operators: filters and joins, in the order in which they are written.
        label_tokens: tokens in front of each document or anchor.
        retains: whether KV outlives the operator that wrote it. Without, only the documents of the operator
            just before are still there: a filter streams into what follows.
    """

    relations: tuple[Relation, ...]
    operators: tuple[Operator, ...]
    label_tokens: float = 0.0
    retains: bool = True


@dataclass(frozen=True)
class PlanStep:
    """One operator of a plan.

    Attributes:
        operator: index in `JoinQuery.operators`.
        anchor: argument that is the anchor; None for a filter.
        work: expected.
        num_questions: expected number of questions.
        prompt_tokens: mean tokens of the whole prompt of one.
    """

    operator: int
    anchor: int | None
    work: Work
    num_questions: float
    prompt_tokens: float


@dataclass(frozen=True)
class JoinPlan:
    """An order of all operators.

    Attributes:
        steps: the operators in order.
        cost: of all their work.
        runner_up: cost of the best plan with another order or anchor; None where there is none, or where it
            was not looked for.
    """

    steps: tuple[PlanStep, ...]
    cost: float
    runner_up: float | None

    @property
    def work(self) -> Work:
        """Of all steps."""
        return sum((step.work for step in self.steps), Work())


@dataclass(frozen=True)
class _State:
    """A plan of some of the operators.

    Attributes:
        done: bit set of operators.
        alive: documents of each relation that may still matter.
        held: bit set of relations whose documents' KV is there.
        joined: bit set of relations joined so far.
        cost: of the steps.
        steps: the steps.
    """

    done: int
    alive: tuple[float, ...]
    held: int = 0
    joined: int = 0
    cost: float = 0.0
    steps: tuple[PlanStep, ...] = ()

    def dominates(self, other: _State) -> bool:
        """Whether no way to finish the other plan can be better than the same way to finish this one."""
        return (
            self.cost <= other.cost
            and self.held | other.held == self.held
            and all(mine <= theirs for mine, theirs in zip(self.alive, other.alive, strict=True))
        )


def order_joins(
    query: JoinQuery, cost: Cost, order: str = "auto", *, with_runner_up: bool = True
) -> JoinPlan:
    """The cheapest left-deep plan of some filters and joins.

    A join reads a relation joined before it, as long as there is such a join left; filters run before,
    between and after joins.

    Args:
        query: relations and operators.
        cost: of some work, linear in it: seconds by the roofline, or tokens.
        order: `as_written` keeps the order and chooses anchors only.
        with_runner_up: whether to look for the second-best plan.
    """
    search = _Search(query, cost, as_written=order == "as_written")
    start = _State(0, tuple(relation.num_documents for relation in query.relations))
    beam = search.best(start, num_kept=BEAM_STATES)
    assert beam is not None, "every operator can be next once those before it are done"
    is_small = len(query.operators) <= MOST_EXACT_OPERATORS
    best = (search.best(start, at_most=beam.cost) if is_small else None) or beam
    is_sought = with_runner_up and len(query.operators) <= MOST_RUNNER_UP_OPERATORS
    return JoinPlan(best.steps, best.cost, search.runner_up(start, best) if is_sought else None)


class _Search:
    def __init__(self, query: JoinQuery, cost: Cost, *, as_written: bool) -> None:
        self._query, self._cost, self._as_written = query, cost, as_written
        operators = query.operators
        self._everything = (1 << len(operators)) - 1
        self._readers = [0] * len(query.relations)
        for index, operator in enumerate(operators):
            for relation in _relations_of(operator):
                self._readers[relation] |= 1 << index

    def best(
        self,
        start: _State,
        *,
        avoid: PlanStep | None = None,
        at_most: float = math.inf,
        num_kept: int | None = None,
    ) -> _State | None:
        """The cheapest way to finish a plan, None if there is none or if too many would have to be kept.

        Args:
            start: the plan.
            avoid: its next step is another than this.
            at_most: cost of a whole plan that is known; of those that cost more none is kept.
            num_kept: plans of equally many operators to go on with, the cheapest so far; None: all.
        """
        layer = {start.done: [start]}
        at_most, num_steps = at_most * (1 + 1e-9), 0
        for _ in range((self._everything & ~start.done).bit_count()):
            following: dict[int, list[_State]] = {}
            for states in layer.values():
                for state in states:
                    for reached in self._steps(state):
                        num_steps += 1
                        if state is start and avoid is not None and _is_same(reached.steps[-1], avoid):
                            continue
                        if reached.cost <= at_most:
                            _keep_undominated(following.setdefault(reached.done, []), reached)
            layer = following if num_kept is None else _cheapest(following, num_kept)
            if num_steps > MOST_STEPS:
                return None
        finished = layer.get(self._everything, [])
        return min(finished, key=lambda state: state.cost) if finished else None

    def runner_up(self, start: _State, best: _State) -> float | None:
        """Cost of the second-best plan: the best of those that leave the best one after 0, 1, 2, … steps.

        E. Lawler, "A procedure for computing the K best solutions to discrete optimization problems and its
        application to the shortest path problem", Management Science 18(7), 1972.
        """
        costs = []
        state = start
        for step in best.steps:
            other = self.best(state, avoid=step)
            if other is not None:
                costs.append(other.cost)
            state = next(s for s in self._steps(state) if _is_same(s.steps[-1], step))
        return min(costs, default=None)

    def _steps(self, state: _State) -> Iterator[_State]:
        """The plan with one more operator, in every way allowed."""
        for index, operator in enumerate(self._query.operators):
            bit = 1 << index
            if state.done & bit:
                continue
            if self._as_written and state.done != bit - 1:
                continue
            if isinstance(operator, FilterOperator):
                yield self._filtered(state, index, operator)
                continue
            if not self._as_written and self._is_apart(state, operator):
                continue
            for anchor in operator.anchors:
                yield self._joined(state, index, operator, anchor)

    def _is_apart(self, state: _State, join: JoinOperator) -> bool:
        """Whether a join reads no relation joined so far although another that is left does."""
        if not state.joined or _bits(join) & state.joined:
            return False
        return any(
            isinstance(other, JoinOperator) and _bits(other) & state.joined and not state.done >> index & 1
            for index, other in enumerate(self._query.operators)
        )

    def _filtered(self, state: _State, index: int, operator: FilterOperator) -> _State:
        relation = operator.relation
        documents = state.alive[relation]
        own = operator.document_tokens
        prefix = self._query.label_tokens + (self._query.relations[relation].tokens if own is None else own)
        document = self._prefix(state, relation) if own is None else rows(prefix)
        question = document + rows(operator.suffix_tokens, behind=prefix)
        alive = list(state.alive)
        alive[relation] = documents * operator.selectivity
        step = PlanStep(index, None, documents * question, documents, prefix + operator.suffix_tokens)
        return self._after(state, step, relation if own is None else None, alive, 0)

    def _joined(self, state: _State, index: int, operator: JoinOperator, anchor: int) -> _State:
        mine, other = operator.relations[anchor], operator.relations[1 - anchor]
        own, others = state.alive[mine], state.alive[other]
        share = operator.pair_share
        prefix = self._query.label_tokens + self._query.relations[mine].tokens
        frame = rows(operator.frame_tokens, behind=prefix, written=operator.frame_tokens)
        suffix = self._query.relations[other].tokens + operator.tail_tokens
        pairs = own * others * share
        behind = prefix + operator.frame_tokens
        work = own * _any_of(share, others) * (self._prefix(state, mine) + frame + Work(kv_read=behind))
        work += pairs * stacked_rows(suffix, behind=behind)
        alive = list(state.alive)
        alive[mine] = own * _any_of(share * operator.selectivity, others)
        alive[other] = others * _any_of(share * operator.selectivity, own)
        step = PlanStep(index, anchor, work, pairs, behind + suffix)
        return self._after(state, step, mine, alive, _bits(operator))

    def _prefix(self, state: _State, relation: int) -> Work:
        """Work of a document's own tokens, nothing where its KV is there."""
        if state.held >> relation & 1:
            return Work()
        reused = self._query.relations[relation].reused_tokens
        fresh = self._query.label_tokens + self._query.relations[relation].tokens - reused
        return rows(fresh, behind=reused, written=fresh if self._readers[relation].bit_count() > 1 else 0.0)

    def _after(
        self, state: _State, step: PlanStep, relation: int | None, alive: list[float], joined: int
    ) -> _State:
        held = (state.held if self._query.retains else 0) | (0 if relation is None else 1 << relation)
        done = state.done | 1 << step.operator
        for finished, readers in enumerate(self._readers):
            if not readers & ~done:  # what is left of it matters no more: more plans dominate others
                alive[finished], held = 0.0, held & ~(1 << finished)
        return _State(
            done,
            tuple(alive),
            held,
            state.joined | joined,
            state.cost + self._cost(step.work),
            (*state.steps, step),
        )


def _relations_of(operator: Operator) -> tuple[int, ...]:
    return (operator.relation,) if isinstance(operator, FilterOperator) else operator.relations


def _bits(join: JoinOperator) -> int:
    return 1 << join.relations[0] | 1 << join.relations[1]


def _is_same(step: PlanStep, other: PlanStep) -> bool:
    return (step.operator, step.anchor) == (other.operator, other.anchor)


def _any_of(probability: float, count: float) -> float:
    """Probability that at least one of `count` independent events happens."""
    return 1.0 - (1.0 - min(1.0, probability)) ** count if count else 0.0


def _keep_undominated(states: list[_State], state: _State) -> None:
    if any(other.dominates(state) for other in states):
        return
    states[:] = [other for other in states if not state.dominates(other)]
    states.append(state)


def _cheapest(layer: dict[int, list[_State]], num_kept: int) -> dict[int, list[_State]]:
    """The cheapest plans of a layer, by the operators that are done."""
    kept: dict[int, list[_State]] = {}
    for state in sorted((s for states in layer.values() for s in states), key=lambda s: s.cost)[:num_kept]:
        kept.setdefault(state.done, []).append(state)
    return kept
