"""Orders and anchors of the pair questions of one run, decided on the texts that they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quail.cost.work import Work
from quail.execution.answers import Texts, distinct
from quail.execution.asks import Int64s
from quail.execution.reading import Candidates
from quail.plan.logical import AICall
from quail.plan.statement import Site
from quail.planner.anchors import Numbers, PairTokens, TokenCounter, pair_work
from quail.planner.ask_groups import AskGroup
from quail.planner.filter_order import selectivity
from quail.planner.join_order import (
    FilterOperator,
    JoinOperator,
    JoinPlan,
    JoinQuery,
    Operator,
    Relation,
    order_joins,
)
from quail.planner.observed_order import JoinWork

KeptAnchor = Callable[[AICall], int | None]

_MOST_FLAGS = 2**26
"""Pairs are told apart in an array with a byte for each possible one, up to so many."""

_PAIRS_AT_A_TIME = 2**20
_TEXTS_AT_A_TIME = 2**12


@dataclass(frozen=True)
class AnchorChoice:
    """Why a side is the anchor.

    Attributes:
        call: index of the call.
        anchor: argument that is computed once.
        reason: in words.
        works: of the join with argument 0 or 1 as anchor; None where they were not needed.
    """

    call: int
    anchor: int
    reason: str
    works: tuple[Work, Work] | None = None


@dataclass(frozen=True)
class PairSums:
    """What all distinct pairs of a join take with one side as the anchor.

    Attributes:
        work: an anchor and its frame once, then its partners.
        num_pairs: how many there are.
        prompt_tokens: of all their prompts in full.
    """

    work: Work = Work()
    num_pairs: int = 0
    prompt_tokens: int = 0

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(
            self.work + other.work,
            self.num_pairs + other.num_pairs,
            self.prompt_tokens + other.prompt_tokens,
        )


class PairPlanner:
    """Chooses anchors, each once, and the order of what is asked about pairs.

    Args:
        calls: of the plan; those over two relations get their anchors as they are chosen.
        texts: of the run.
        counter: of tokens.
        order: `auto` or `as_written`.
        kept: the anchor of a call whose answers are stored, None of others.

    Attributes:
        choices: the anchors chosen so far, by call.
        plans: the orders of filters and joins that stand together, by block.
        works: what other orders of them would take, by block.
    """

    def __init__(
        self,
        calls: Sequence[AICall],
        texts: Texts,
        counter: TokenCounter,
        order: str,
        kept: KeptAnchor = lambda call: None,
    ) -> None:
        self.calls = list(calls)
        self.choices: dict[int, AnchorChoice] = {}
        self.plans: dict[int, JoinPlan] = {}
        self.works: dict[int, JoinWork] = {}
        self._texts, self._counter, self._order = texts, counter, order
        self._tokens: Int64s = np.zeros(0, dtype=np.int64)
        for call in calls:
            if call.prompt.num_arguments != 2:
                continue
            if call.options.anchor is not None:
                self._fix(AnchorChoice(call.index, call.options.anchor, "as the statement says"))
            elif (anchor := kept(call)) is not None:
                self._fix(AnchorChoice(call.index, anchor, "its answers are stored"))

    def anchors(self, call: int) -> tuple[int, ...]:
        """The arguments that may still be the anchor, for a call over one document its only one."""
        if self.calls[call].prompt.num_arguments == 1:
            return (0,)
        return (self.choices[call].anchor,) if call in self.choices else (0, 1)

    def plan(self, group: AskGroup, candidates: Candidates) -> AskGroup:
        """The group with its sites in the order in which they should be asked; their anchors are chosen.

        Args:
            group: sites of which one at least is about pairs.
            candidates: its rows, or the first of them.
        """
        if len(group.sites) > 1:
            return self._ordered(group, candidates)
        (site,), (names,) = group.sites, group.columns
        if site.call not in self.choices:
            first, second = self.sums(self.calls[site.call], names, candidates)
            works = (first.work, second.work)
            costs = [self._counter.cost(work) for work in works]
            self._fix(AnchorChoice(site.call, int(costs[1] < costs[0]), "less work", works))
        return group

    def estimate(self, site: Site, num_documents: Sequence[int], num_bytes: Sequence[int]) -> None:
        """Chooses an anchor before its pairs are known, as if every document met every other.

        Args:
            site: a call over two relations.
            num_documents: of each argument.
            num_bytes: of all of them.
        """
        if site.call in self.choices:
            return
        tokens = [num_bytes[side] / max(1, num_documents[side]) / 4 for side in (0, 1)]
        relations = tuple(Relation(num_documents[side], tokens[side]) for side in (0, 1))
        frame, tail = self._counter.fixed_tokens(self.calls[site.call])
        query = JoinQuery(relations, (JoinOperator((0, 1), frame, tail),), self._counter.label_tokens)
        anchor = order_joins(query, self._counter.cost).steps[0].anchor
        assert anchor is not None
        self._fix(AnchorChoice(site.call, anchor, "less work, as estimated"))

    def _fix(self, choice: AnchorChoice) -> None:
        self.choices[choice.call] = choice
        self.calls[choice.call] = replace(self.calls[choice.call], anchor=choice.anchor)

    # -- one join

    def sums(self, call: AICall, names: Sequence[str], candidates: Candidates) -> tuple[PairSums, PairSums]:
        """What the distinct pairs take with argument 0 and with argument 1 as the anchor."""
        sides = [candidates.documents[name] for name in names]
        handles, numbers = zip(*(_numbered(side) for side in sides), strict=True)
        tokens = [self._tokens_of(some) for some in handles]
        found = []
        for anchor in (0, 1):
            frame, tail = self._counter.fixed_tokens(replace(call, anchor=anchor))
            fixed = PairTokens(self._counter.label_tokens, frame, tail)
            mine, other = anchor, 1 - anchor
            pairs = _distinct_pairs(numbers[mine], numbers[other], len(handles[mine]), len(handles[other]))
            parts = (
                PairSums(
                    pair_work(a, p, tokens[mine], tokens[other], fixed),
                    len(a),
                    len(a) * (fixed.label + frame + tail)
                    + int(tokens[mine][a].sum() + tokens[other][p].sum()),
                )
                for a, p in pairs
            )
            found.append(sum(parts, PairSums()))
        return found[0], found[1]

    def _tokens_of(self, handles: Int64s) -> Int64s:
        """Tokens of some texts, each counted once a run."""
        missing = len(self._texts) - len(self._tokens)
        self._tokens = np.concatenate([self._tokens, np.full(missing, -1, dtype=np.int64)])
        unknown = handles[self._tokens[handles] < 0]
        for start in range(0, len(unknown), _TEXTS_AT_A_TIME):
            some = unknown[start : start + _TEXTS_AT_A_TIME]
            self._tokens[some] = self._counter.text_tokens(self._texts.take(some))
        return self._tokens[handles]

    # -- several operators

    def _ordered(self, group: AskGroup, candidates: Candidates) -> AskGroup:
        columns = list(dict.fromkeys(name for names in group.columns for name in names))
        columns.sort(key=lambda name: not any(name in names for names in group.columns if len(names) == 2))
        handles = {name: _numbered(candidates.documents[name])[0] for name in columns}
        tokens = {name: self._tokens_of(found) for name, found in handles.items()}
        home = self._homes(columns, handles, group, candidates)
        relations = [
            Relation(len(handles[name]), float(tokens[name].mean()) if len(tokens[name]) else 0.0)
            for name in columns
        ]
        operators: list[Operator] = []
        for site, names in zip(group.sites, group.columns, strict=True):
            call = self.calls[site.call]
            share = selectivity(site.place.root, self.calls)
            frame, tail = self._counter.fixed_tokens(call)
            if len(names) == 1:
                place = home[names[0]]
                own = None if columns[place] == names[0] else relations[columns.index(names[0])].tokens
                operators.append(FilterOperator(place, tail, share, own))
                continue
            sides = [candidates.documents[name] for name in names]
            possible = len(handles[names[0]]) * len(handles[names[1]])
            pairs = _num_distinct_pairs(sides[0], sides[1])
            operators.append(
                JoinOperator(
                    (columns.index(names[0]), columns.index(names[1])),
                    frame,
                    tail,
                    share,
                    self.anchors(site.call),
                    pairs / possible if possible else 1.0,
                )
            )
        query = JoinQuery(tuple(relations), tuple(operators), self._counter.label_tokens)
        plan = order_joins(query, self._counter.cost, self._order)
        self.plans[group.sites[0].place.block] = plan
        for step in plan.steps:
            call_index = group.sites[step.operator].call
            if step.anchor is not None and call_index not in self.choices:
                self._fix(AnchorChoice(call_index, step.anchor, "less work in this order"))
        sequence = [step.operator for step in plan.steps]
        self.works[group.sites[0].place.block] = self._work(query, group, sequence)
        return group.reordered(sequence)

    def _work(self, query: JoinQuery, group: AskGroup, sequence: Sequence[int]) -> JoinWork:
        """What the operators take in other orders; their anchors stay."""
        operators = [
            replace(operator, anchors=self.anchors(group.sites[place].call))
            if isinstance(operator := query.operators[place], JoinOperator)
            else operator
            for place in sequence
        ]
        return JoinWork(replace(query, operators=tuple(operators)), self._counter.cost)

    @staticmethod
    def _homes(
        columns: list[str], handles: dict[str, Int64s], group: AskGroup, candidates: Candidates
    ) -> dict[str, int]:
        """For each column the column whose documents a filter on it thins out.

        That is itself where a join reads it, else one that a join reads and each document of which stands
        beside one document of the column only: both are columns of one relation.
        """
        joined = {name for names in group.columns if len(names) == 2 for name in names}
        found = {}
        for place, name in enumerate(columns):
            found[name] = place
            for other in sorted(joined - {name}) if name not in joined else ():
                pairs = _num_distinct_pairs(candidates.documents[other], candidates.documents[name])
                if pairs == len(handles[other]):
                    found[name] = columns.index(other)
                    break
        return found


def _numbered(handles: Numbers) -> tuple[Int64s, Int64s]:
    """The distinct handles of a column, and for each row which it holds, -1 of NULL."""
    found = distinct(handles[handles >= 0].astype(np.int64))
    numbers = np.searchsorted(found, handles) if len(found) else np.zeros(len(handles), dtype=np.int64)
    return found, np.where(handles >= 0, numbers, -1)


def _distinct_pairs(
    anchors: Int64s, partners: Int64s, num_anchors: int, num_partners: int
) -> Iterator[tuple[Int64s, Int64s]]:
    """The distinct pairs of numbers without NULL, a part at a time; no anchor is in two parts."""
    is_whole = (anchors >= 0) & (partners >= 0)
    if num_anchors * num_partners > _MOST_FLAGS:
        pairs = distinct(anchors[is_whole] * num_partners + partners[is_whole])
        yield pairs // num_partners, pairs % num_partners
        return
    flags = np.zeros((num_anchors, num_partners), dtype=np.bool_)
    for start in range(0, len(anchors), _PAIRS_AT_A_TIME):
        part = slice(start, start + _PAIRS_AT_A_TIME)
        flags[anchors[part][is_whole[part]], partners[part][is_whole[part]]] = True
    step = max(1, _PAIRS_AT_A_TIME // max(1, num_partners))
    for start in range(0, num_anchors, step):
        some, others = np.nonzero(flags[start : start + step])
        yield some + start, others


def _num_distinct_pairs(left: Numbers, right: Numbers) -> int:
    (lefts, left_numbers), (rights, right_numbers) = _numbered(left), _numbered(right)
    parts = _distinct_pairs(left_numbers, right_numbers, len(lefts), len(rights))
    return sum(len(pairs) for pairs, _ in parts)
