"""The query blocks of a statement and what each asks.

Candidates of calls that depend on no other call are counted by DuckDB and marked exact; those behind other
calls are estimated from the calls' selectivities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import duckdb

from quail.config import EngineConfig
from quail.errors import QuailError
from quail.execution.forecast import Forecaster
from quail.execution.join_forecast import JoinPlans, forecast_joins
from quail.execution.population import AskedSite
from quail.explain.report import BlockReport, SiteReport
from quail.plan import syntax
from quail.plan.lookups import stand_in
from quail.plan.statement import (
    Block,
    BoundStatement,
    Clause,
    ExpressionPlace,
    FromPlace,
    OperandPlace,
    Place,
    Site,
    Stage,
    TablePlace,
    holds_call,
)
from quail.plan.syntax import Node
from quail.planner.anchors import LengthCounter
from quail.planner.candidates import CandidatePlanner
from quail.planner.existence import may_end_early
from quail.planner.filter_order import selectivity
from quail.planner.optimize import optimize

_CLAUSES = (
    Clause.VALUES,
    Clause.ON,
    Clause.WHERE,
    Clause.GROUP_BY,
    Clause.HAVING,
    Clause.QUALIFY,
    Clause.SELECT,
    Clause.DISTINCT_ON,
    Clause.ORDER_BY,
)


class Explainer:
    """Looks at a statement without running it.

    Args:
        bound: the statement.
        cursor: DuckDB; gets stand-ins for the calls.
        order: `auto` or `as_written`, as in a run.
        config: of the engine whose tokenizer counts; None estimates tokens from lengths.

    Attributes:
        asked: every place of a call with its questions, once `blocks` was called.
        joins: anchors and orders of questions about pairs.
    """

    def __init__(
        self,
        bound: BoundStatement,
        cursor: duckdb.DuckDBPyConnection,
        order: str,
        config: EngineConfig | None,
    ) -> None:
        self.bound = bound
        self.cursor = cursor
        for name, value in bound.parameters.items() if bound.query is not None else ():
            cursor.execute(f"SET VARIABLE {name} = ?", [value])
        for source in bound.sources:
            if source.is_renamed:
                kind = "TABLE" if source.is_pinned else "VIEW"
                cursor.execute(f"CREATE TEMP {kind} {source.name} AS {source.sql}")
        for call in bound.calls:
            cursor.execute(stand_in(bound.nonce, call))
        self.asked: list[AskedSite] = []
        self.planner = CandidatePlanner(
            bound, optimize(bound, order), order, self._binds, has_row_numbers=False
        )
        self.joins = JoinPlans()
        if any(call.prompt.num_arguments == 2 for call in bound.calls):
            self.joins = self._plan_joins(config)

    def blocks(self) -> list[BlockReport]:
        """The blocks, the outermost first, with what each asks in that order."""
        return [self._block(block) for block in self.planner.blocks]

    def _block(self, block: Block) -> BlockReport:
        free = [conjunct for conjunct in block.conjuncts if not holds_call(conjunct)]
        positions = {id(conjunct): i for i, conjunct in enumerate(block.conjuncts)}
        own = [site for site in self.bound.sites if site.place.block == block.index]
        own.sort(key=lambda site: (_CLAUSES.index(site.place.clause), positions.get(id(site.place.root), 0)))
        own = self._in_chain_order(own)
        return BlockReport(
            block.index,
            self._parent(block),
            self._label(block),
            self._shown(block.from_table, is_table=True),
            tuple(self._shown(conjunct) for conjunct in free),
            self._sites(block, own),
        )

    def _plan_joins(self, config: EngineConfig | None) -> JoinPlans:
        counter: Forecaster | None = None
        with suppress(QuailError):
            counter = Forecaster.of(config) if config is not None else None
        return forecast_joins(self.bound, self.planner, self.cursor, counter, LengthCounter())

    def _in_chain_order(self, sites: list[Site]) -> list[Site]:
        """The sites with those of a chain of joins and filters in the order planned for them."""
        places = self.joins.places
        chained = [site for site in sites if site.index in places]
        following = iter(sorted(chained, key=lambda site: places[site.index]))
        return [next(following) if site.index in places else site for site in sites]

    def _sites(self, block: Block, sites: Sequence[Site]) -> tuple[SiteReport, ...]:
        reports: list[SiteReport] = []
        candidates: float | None = None
        share = 1.0
        for site in sites:
            query = self.planner.site(site)
            reads = query.sites_read - {site.index}
            questions = None if reads else self._count(query.node, query.arguments)
            is_exact = questions is not None
            before = self._before(site, sites) if site.index in self.joins.questions else reads
            reaching = share
            if site.is_conjunct and site.place.clause is Clause.WHERE:
                if questions is not None:
                    candidates, share, reaching = float(questions), 1.0, 1.0
                share *= selectivity(site.place.root, self.bound.calls)
            if questions is None and candidates and site.place.stage is not Stage.RESULT:
                if site.place.stage is Stage.LIMITED:
                    reaching = min(reaching, _limit(block) / candidates)
                questions = round(candidates * reaching)
            if not is_exact:
                questions = self.joins.questions.get(site.index, questions)
            self.asked.append(AskedSite(site, query, questions, is_exact, reaching))
            is_barrier = self.bound.call_of(site).options.calibrate == "batch"
            conditions = [] if is_barrier else self.planner.conditions(site.place)
            reports.append(
                SiteReport(
                    site.call,
                    " ".join(self.bound.text.encode()[slice(*site.span)].decode().split()),
                    site.place.clause.value,
                    site.place.stage.value,
                    tuple(f"{self._shown(condition.node)} {condition.test}" for condition in conditions),
                    tuple(sorted({self.bound.sites[index].call for index in before} - {site.call})),
                    questions,
                    is_exact,
                    is_barrier,
                    tuple(
                        " ".join(syntax.to_sql({**argument, "alias": ""}).split())
                        for argument in site.arguments
                    ),
                    self.joins.joins.get(site.index),
                    ends_early=not is_barrier and may_end_early(site, self.planner.blocks),
                )
            )
        return tuple(reports)

    def _before(self, site: Site, sites: Sequence[Site]) -> list[int]:
        """The places of calls in front of one in its chain of joins and filters."""
        in_front = sites[: sites.index(site)]
        return [each.index for each in in_front if each.index in self.joins.questions]

    def _count(self, node: Node, names: Sequence[str]) -> int | None:
        columns = ", ".join(f'"{name}"' for name in names)
        present = " AND ".join(f'"{name}" IS NOT NULL' for name in names)
        sql = f"SELECT count(*) FROM (SELECT DISTINCT {columns} FROM ({syntax.to_sql(node)}) WHERE {present})"
        try:
            ((count,),) = self.cursor.execute(sql).fetchall()
        except duckdb.Error:
            return None
        return int(count)

    def _shown(self, node: Node, *, is_table: bool = False) -> str:
        """The text of a tree with calls by their number and subqueries left out."""

        def replace(below: Node) -> Node | None:
            if "quail_call" in below:
                return syntax.column(f"call {below['quail_call']}")
            if is_table and below.get("type") == "SUBQUERY" and "subquery" in below:
                name = f"{below['alias']} (subquery)" if below["alias"] else "(subquery)"
                return {**syntax.parse_query("SELECT * FROM x")["from_table"], "table_name": name}
            return None

        if is_table:
            table = syntax.transform(node, replace)
            text = syntax.to_sql({**syntax.parse_query("SELECT * FROM x"), "from_table": table})
            text = text.removeprefix("SELECT *").strip().removeprefix("FROM ")
        else:
            text = syntax.to_sql(syntax.transform({**node, "alias": ""}, replace))
        for call in self.bound.calls:
            text = text.replace(f'"call {call.index}"', f"call {call.index}")
        return " ".join(text.replace(f"quail_{self.bound.nonce}_", "").split())

    def _parent(self, block: Block) -> int | None:
        if not block.places:
            return None
        place = block.places[-1]
        if isinstance(place, (ExpressionPlace, FromPlace)):
            return place.block
        owner = next((other for other in self.bound.blocks if other.node is place.node), None)
        if owner is not None:
            return owner.index
        return self._parent_of(block.places[:-1])

    def _parent_of(self, places: tuple[Place, ...]) -> int | None:
        for place in reversed(places):
            if isinstance(place, (ExpressionPlace, FromPlace)):
                return place.block
        return None

    def _label(self, block: Block) -> str:
        if not block.places:
            return "query"
        place = block.places[-1]
        if isinstance(place, TablePlace):
            return f"WITH {place.node['cte_map']['map'][place.position]['key']}"
        if isinstance(place, OperandPlace):
            return f"operand of {place.node.get('setop_type', 'a recursive term').replace('_', ' ')}"
        if isinstance(place, FromPlace):
            return "subquery in FROM"
        return f"subquery in {place.clause.value}"

    def _binds(self, node: Node) -> bool:
        try:
            self.cursor.sql(syntax.to_sql(node))
        except (duckdb.BinderException, duckdb.CatalogException):
            return False
        return True


def _limit(block: Block) -> float:
    """The constant row limit of a block, infinite without one."""
    limit = block.limit
    if limit is None or limit["limit_type"] != "ROW_COUNT" or limit["limit"] is None:
        return math.inf
    value = limit["limit"]
    return float(value["literal"]["text"]) if value["class"] == "CONSTANT" else math.inf
