"""What is known of a plan, before anyone shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quail.execution.join_forecast import JoinForecast
from quail.execution.population import NamedForecast
from quail.execution.rehearsal import CallForecast, Rehearsal
from quail.plan.statement import BoundStatement
from quail.planner.estimate import TokenForecast

LEDGER = ("naive", "computed", "reused_rewind", "reused_prefix", "reused_retained")


@dataclass(frozen=True)
class SiteReport:
    """One call where it stands.

    Attributes:
        call: index of the call.
        text: how it is written.
        clause: the clause that it stands in.
        stage: the rows over which it is asked.
        conditions: what must hold in a row for it to be asked there.
        after: calls whose answers decide that.
        questions: distinct questions; None where nothing is known before the run.
        is_exact: whether that number is certain.
        is_barrier: whether no answer comes before the last question.
        arguments: the SQL text of each document.
        join: how a question about a pair will be asked.
        forecast: what the call is expected to take, at the first of its places.
        ends_early: whether the first match of a row ends its search, so that the others are not asked.
    """

    call: int
    text: str
    clause: str
    stage: str
    conditions: tuple[str, ...]
    after: tuple[int, ...]
    questions: int | None
    is_exact: bool
    is_barrier: bool = False
    arguments: tuple[str, ...] = ()
    join: JoinForecast | None = None
    forecast: CallForecast | None = None
    ends_early: bool = False


@dataclass(frozen=True)
class BlockReport:
    """One query block with what it decides without a model and what it asks, in that order."""

    index: int
    parent: int | None
    label: str
    tables: str
    free_conjuncts: tuple[str, ...]
    sites: tuple[SiteReport, ...]


@dataclass(frozen=True)
class EngineReport:
    """What the engine would do.

    Attributes:
        facts: model, device and so on; empty where nothing can be said.
        groups: the documents of calls over one document each.
        tokens: the ledger of the statement; None where a part of it is unknown.
        seconds: of it, by the roofline.
        rehearsal: the statement gone through without its model; None where it asks too much for that.
        uncertain_calls: calls whose questions an answer may end.
        unknown: what nothing is known of before the run.
        problem: why nothing can be said.
    """

    facts: Mapping[str, str]
    groups: tuple[NamedForecast, ...] = ()
    tokens: TokenForecast | None = None
    seconds: float = 0.0
    rehearsal: Rehearsal | None = None
    uncertain_calls: frozenset[int] = frozenset()
    unknown: tuple[str, ...] = ()
    problem: str = ""

    def told(self, blocks: Sequence[BlockReport]) -> list[BlockReport]:
        """The blocks with what the rehearsal found about their calls."""
        if self.rehearsal is None:
            return list(blocks)
        num_places = Counter(site.call for block in blocks for site in block.sites)
        left = dict(enumerate(self.rehearsal.calls))
        found = []
        for block in blocks:
            sites = []
            for site in block.sites:
                forecast = left.pop(site.call, None)
                if forecast is not None:
                    site = self._told(site, forecast, is_only=num_places[site.call] == 1)
                sites.append(site)
            found.append(replace(block, sites=tuple(sites)))
        return found

    def _told(self, site: SiteReport, forecast: CallForecast, *, is_only: bool) -> SiteReport:
        join, choice = site.join, forecast.anchor
        if join is not None and choice is not None:
            sides = site.arguments[choice.anchor], site.arguments[1 - choice.anchor]
            join = join.chosen(*sides, choice.reason)
        site = replace(site, forecast=forecast, join=join)
        is_certain = site.is_exact and site.call not in self.uncertain_calls
        if not is_only or (is_certain and site.questions == forecast.num_asked):
            return site
        return replace(site, questions=forecast.num_asked, is_exact=False)


@dataclass(frozen=True)
class PlanReport:
    """All that is told of a statement.

    Attributes:
        bound: the statement.
        blocks: its query blocks.
        engine: what the engine would do; None where none was asked of.
        done: the report of a run; None without one.
    """

    bound: BoundStatement
    blocks: tuple[BlockReport, ...]
    engine: EngineReport | None
    done: Mapping[str, Any] | None
