"""What a run would decide about its joins: anchors and orders, with the work behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import numpy as np

from quail.cost.work import Work
from quail.execution.answers import Texts
from quail.execution.pair_planning import PairPlanner, PairSums
from quail.execution.pairs import places_in_group
from quail.execution.reading import CandidateReader, Candidates
from quail.plan import syntax
from quail.plan.statement import BoundStatement, Site
from quail.planner.anchors import TokenCounter
from quail.planner.ask_groups import AskGroup, plan_groups
from quail.planner.candidates import CandidatePlanner
from quail.planner.estimate import TokenForecast
from quail.planner.existence import may_end_early
from quail.planner.join_order import JoinPlan

MOST_PAIRS = 2**22
"""More pairs than this are not read to explain a statement; their anchor is estimated."""

EXISTS_WAVE = 16


@dataclass(frozen=True)
class JoinForecast:
    """How a call over two relations will be asked at one of its sites.

    Attributes:
        anchor: SQL text of the side that is computed once.
        partner: of the other side.
        reason: why, in words.
        tokens: computed with this anchor, if all its pairs are asked; None where that is unknown.
        other_tokens: computed with the other side as the anchor.
        seconds: of the best order of the filters and joins around it, if there are several; None otherwise.
        runner_up_seconds: of the second-best order.
        ends_early: whether the first match of a row ends its search, so that its other pairs are not asked.
    """

    anchor: str
    partner: str
    reason: str
    tokens: int | None = None
    other_tokens: int | None = None
    seconds: float | None = None
    runner_up_seconds: float | None = None
    ends_early: bool = False

    def chosen(self, argument: str, other: str, reason: str) -> JoinForecast:
        """The same with what a run chose, which may look at fewer pairs before it decides."""
        if argument == self.anchor:
            return self
        return replace(self, anchor=argument, partner=other, reason=reason, tokens=None, other_tokens=None)

    def as_dict(self) -> dict[str, Any]:
        """As explain shows it."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def as_text(self) -> str:
        """In one line."""
        text = f"anchor {self.anchor} ({self.reason})"
        if self.tokens is not None:
            text += f": {self.tokens:,} tokens, {self.other_tokens:,} with {self.partner} as the anchor"
        if self.seconds is not None:
            text += f": {self.seconds:.3g} s in this order"
            if self.runner_up_seconds is not None:
                text += f", {self.runner_up_seconds:.3g} s in the next best"
        return text + ("; the first match of a row ends its search" if self.ends_early else "")


@dataclass(frozen=True)
class JoinPlans:
    """All joins of a statement.

    Attributes:
        joins: by the index of their site.
        places: place of a site in the order of its chain, by its index.
        questions: expected number of questions at a site of such a chain.
        tokens: expected ledger and work of what stands together with joins, by the call that comes first.
        counted_calls: the calls in `tokens`.
    """

    joins: Mapping[int, JoinForecast] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)
    questions: Mapping[int, int] = field(default_factory=dict)
    tokens: Mapping[int, TokenForecast] = field(default_factory=dict)
    counted_calls: frozenset[int] = frozenset()


def forecast_joins(
    bound: BoundStatement,
    planner: CandidatePlanner,
    cursor: duckdb.DuckDBPyConnection,
    counter: TokenCounter | None,
    fallback: TokenCounter,
) -> JoinPlans:
    """Decides as a run would.

    Args:
        bound: the statement.
        planner: of its candidate queries.
        cursor: DuckDB, where the tables and stand-ins of the calls are.
        counter: counts tokens as the engine will; None where the model is not here.
        fallback: estimates them.
    """
    ((null_hash,),) = cursor.sql("SELECT hash(NULL::VARCHAR)").fetchall()
    texts = Texts(null_hash)
    pairs = PairPlanner(bound.calls, texts, counter or fallback, planner.order)
    reader = CandidateReader(cursor, lambda sql: sql, texts)
    planned: list[_Planned] = []
    for group in plan_groups(bound, planner):
        if group.is_paired:
            candidates = None if group.sites_read else _candidates(reader, cursor, group)
            ordered = group if candidates is None else pairs.plan(group, candidates)
            planned.append(_Planned(ordered, candidates))
    for group in (each.group for each in planned):
        for site in group.sites:
            if len(site.arguments) == 2 and site.call not in pairs.choices:
                sides = [reader.measured(queries) for queries in planner.spread(site)]
                pairs.estimate(site, [count for count, _ in sides], [size for _, size in sides])
    joins: dict[int, JoinForecast] = {}
    places: dict[int, int] = {}
    questions: dict[int, int] = {}
    tokens: dict[int, TokenForecast] = {}
    counted: set[int] = set()
    for each in planned:
        group = each.group
        places |= {site.index: place for place, site in enumerate(group.sites)}
        ends_early = any(may_end_early(site, planner.blocks) for site in group.sites)
        sums = each.sums(pairs) if counter is not None and not ends_early else None
        for site in group.sites:
            if len(site.arguments) == 2:
                joins[site.index] = _forecast(
                    site, group, pairs, sums, is_counted=counter is not None, ends_early=ends_early
                )
        plan = each.plan(pairs)
        if plan is not None:
            steps = zip(group.sites, plan.steps, strict=True)
            questions |= {site.index: round(step.num_questions) for site, step in steps}
        forecast = each.tokens(pairs, plan, sums)
        if forecast is not None:
            tokens[group.sites[0].call] = forecast
            counted |= {site.call for site in group.sites}
    return JoinPlans(joins, places, questions, tokens, frozenset(counted))


@dataclass(frozen=True)
class _Planned:
    """A group with pairs, and its candidates where they are known before the run."""

    group: AskGroup
    candidates: Candidates | None

    def plan(self, pairs: PairPlanner) -> JoinPlan | None:
        """The order of several filters and joins."""
        return pairs.plans.get(self.group.sites[0].place.block) if self.group.is_chain else None

    def sums(self, pairs: PairPlanner) -> tuple[PairSums, PairSums] | None:
        """What a join that stands alone takes with either anchor, if all its pairs are asked."""
        is_known = self.candidates is not None and self.group.row_limit is None
        if len(self.group.sites) > 1 or self.group.query.group or not is_known:
            return None
        assert self.candidates is not None
        return pairs.sums(pairs.calls[self.group.sites[0].call], self.group.columns[0], self.candidates)

    def tokens(
        self, pairs: PairPlanner, plan: JoinPlan | None, sums: tuple[PairSums, PairSums] | None
    ) -> TokenForecast | None:
        """The ledger that follows from numbers and lengths, nothing shared; None where a row may end it."""
        if self.group.row_limit is not None:
            return None
        if plan is not None:
            naive = round(sum(step.num_questions * step.prompt_tokens for step in plan.steps))
            return _ledger(naive, plan.work)
        if sums is None:
            return None
        chosen = sums[pairs.choices[self.group.sites[0].call].anchor]
        return _ledger(chosen.prompt_tokens, chosen.work)


def _ledger(naive: int, work: Work) -> TokenForecast:
    computed = round(work.tokens)
    return TokenForecast(naive, computed, naive - computed, work=work, is_exact=False)


def _candidates(
    reader: CandidateReader, cursor: duckdb.DuckDBPyConnection, group: AskGroup
) -> Candidates | None:
    """What a run looks at before it decides; None where that is too much."""
    if group.row_limit is not None:
        return next(reader.windows(group.query), None)
    ((count,),) = cursor.sql(f"SELECT count(*) FROM ({syntax.to_sql(group.query.node)})").fetchall()
    if count > MOST_PAIRS:
        return None
    if not group.query.group:
        return reader.read_pairs(group.query)
    candidates = reader.read(group.query)
    assert candidates.groups is not None
    return candidates.taken(np.flatnonzero(places_in_group(candidates.groups) < EXISTS_WAVE))


def _forecast(
    site: Site,
    group: AskGroup,
    pairs: PairPlanner,
    sums: tuple[PairSums, PairSums] | None,
    *,
    is_counted: bool,
    ends_early: bool,
) -> JoinForecast:
    choice = pairs.choices[site.call]
    shown = [" ".join(syntax.to_sql({**argument, "alias": ""}).split()) for argument in site.arguments]
    anchor, partner = shown[choice.anchor], shown[1 - choice.anchor]
    plan = pairs.plans.get(site.place.block) if group.is_chain else None
    if plan is not None:
        seconds = (plan.cost, plan.runner_up) if is_counted else (None, None)
        return JoinForecast(anchor, partner, choice.reason, None, None, *seconds)
    if sums is None:
        return JoinForecast(anchor, partner, choice.reason, ends_early=ends_early)
    tokens = [round(each.work.tokens) for each in sums]
    return JoinForecast(anchor, partner, choice.reason, tokens[choice.anchor], tokens[1 - choice.anchor])
