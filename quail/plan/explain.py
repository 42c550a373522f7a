"""What a statement will ask, as a tree of its query blocks.

Explaining asks no model and writes nothing. Candidates of calls that depend on no other call are counted by
DuckDB and marked exact; those behind other calls are estimated from the calls' selectivities.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import duckdb

from quail.config import EngineConfig
from quail.errors import ConfigError, QuailError
from quail.execution.forecast import Forecaster
from quail.execution.join_forecast import JoinForecast, JoinPlans, forecast_joins
from quail.execution.population import AskedSite, NamedForecast, Population
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
from quail.planner.estimate import TokenForecast
from quail.planner.filter_order import selectivity
from quail.planner.optimize import optimize

_WIDTH = 72
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
LEDGER = ("naive", "computed", "reused_rewind", "reused_prefix")


class HasCursor(Protocol):
    """What explaining needs of a catalog."""

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A fresh cursor of the session's DuckDB."""


@dataclass(frozen=True)
class SiteReport:
    """One call where it stands: `questions` is None where nothing is known before the run."""

    call: int
    text: str
    clause: str
    stage: str
    conditions: tuple[str, ...]
    after: tuple[int, ...]
    questions: int | None
    is_exact: bool
    is_barrier: bool = False
    join: JoinForecast | None = None


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
    """What the engine would do: `groups` is empty and `problem` says why where nothing can be said."""

    facts: Mapping[str, str]
    groups: tuple[NamedForecast, ...] = ()
    seconds: float = 0.0
    problem: str = ""

    @property
    def tokens(self) -> TokenForecast:
        """The ledger of all groups."""
        known = (group.forecast.tokens for group in self.groups if group.forecast is not None)
        return sum(known, TokenForecast())

    @property
    def is_whole(self) -> bool:
        """Whether every group is known."""
        return bool(self.groups) and all(group.forecast is not None for group in self.groups)


def explain(
    bound: BoundStatement,
    catalog: HasCursor,
    *,
    format: str = "text",
    order: str = "auto",
    config: EngineConfig | None = None,
    analyze: Callable[[], Mapping[str, Any]] | None = None,
) -> str:
    """The plan of a statement.

    Args:
        bound: the statement.
        catalog: the tables that it reads.
        format: `text` for a tree, `json`.
        order: `auto` or `as_written`, as in a run.
        config: of the engine that would run it; tokens and seconds are predicted for it. None predicts none.
        analyze: runs it and gives the report, to be shown beside what was planned.

    Raises:
        ConfigError: an unknown format.
    """
    if format not in ("text", "json"):
        raise ConfigError(f"explain has no format {format!r}", hint="use 'text' or 'json'")
    cursor = catalog.cursor()
    try:
        explainer = _Explainer(bound, cursor, order, config)
        reports = explainer.blocks()
        engine = explainer.engine(config) if config is not None and _is_forecast(bound) else None
    finally:
        cursor.close()
    done = None if analyze is None else analyze()
    render = _as_json if format == "json" else _as_text
    return render(bound, reports, engine, done)


def _is_forecast(bound: BoundStatement) -> bool:
    """Whether what the engine would do can be predicted: calls over one document."""
    return bool(bound.calls) and all(call.prompt.num_arguments == 1 for call in bound.calls)


class _Explainer:
    def __init__(
        self,
        bound: BoundStatement,
        cursor: duckdb.DuckDBPyConnection,
        order: str,
        config: EngineConfig | None,
    ) -> None:
        self._bound = bound
        self._cursor = cursor
        for name, value in bound.parameters.items() if bound.query is not None else ():
            cursor.execute(f"SET VARIABLE {name} = ?", [value])
        for source in bound.sources:
            if source.is_renamed:
                kind = "TABLE" if source.is_pinned else "VIEW"
                cursor.execute(f"CREATE TEMP {kind} {source.name} AS {source.sql}")
        for call in bound.calls:
            cursor.execute(stand_in(bound.nonce, call))
        self._asked: list[AskedSite] = []
        self._planner = CandidatePlanner(
            bound, optimize(bound, order), order, self._binds, has_row_numbers=False
        )
        self._joins = JoinPlans({}, {}, {})
        if any(call.prompt.num_arguments == 2 for call in bound.calls):
            self._joins = self._plan_joins(config)

    def blocks(self) -> list[BlockReport]:
        return [self._block(block) for block in self._planner.blocks]

    def engine(self, config: EngineConfig) -> EngineReport:
        """What the engine would do, once the blocks are known."""
        try:
            forecaster = Forecaster.of(config)
            if forecaster is None:
                where = f"the model {config.model} is not here yet"
                return EngineReport({}, problem=f"{where}; quail models fetch {config.model} brings it")
            groups = Population(self._bound, self._planner, self._cursor, forecaster).groups(self._asked)
        except (QuailError, duckdb.Error) as error:
            return EngineReport({}, problem=str(error).partition("\n")[0])
        facts = {
            "model": forecaster.model,
            "layout": forecaster.layout,
            "device": forecaster.device,
            "dtype": forecaster.dtype,
            "rates": "measured" if forecaster.are_rates_measured else "assumed",
        }
        known = [group.forecast for group in groups if group.forecast is not None]
        return EngineReport(facts, tuple(groups), sum(forecast.seconds for forecast in known))

    def _block(self, block: Block) -> BlockReport:
        free = [conjunct for conjunct in block.conjuncts if not holds_call(conjunct)]
        positions = {id(conjunct): i for i, conjunct in enumerate(block.conjuncts)}
        own = [site for site in self._bound.sites if site.place.block == block.index]
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
        return forecast_joins(self._bound, self._planner, self._cursor, counter, LengthCounter())

    def _in_chain_order(self, sites: list[Site]) -> list[Site]:
        """The sites with those of a chain of joins and filters in the order planned for them."""
        places = self._joins.places
        chained = [site for site in sites if site.index in places]
        following = iter(sorted(chained, key=lambda site: places[site.index]))
        return [next(following) if site.index in places else site for site in sites]

    def _sites(self, block: Block, sites: Sequence[Site]) -> tuple[SiteReport, ...]:
        reports: list[SiteReport] = []
        candidates: float | None = None
        share = 1.0
        for site in sites:
            query = self._planner.site(site)
            reads = query.sites_read - {site.index}
            questions = None if reads else self._count(query.node, query.arguments)
            is_exact = questions is not None
            reaching = share
            if site.is_conjunct and site.place.clause is Clause.WHERE:
                if questions is not None:
                    candidates, share, reaching = float(questions), 1.0, 1.0
                share *= selectivity(site.place.root, self._bound.calls)
            if questions is None and candidates and site.place.stage is not Stage.RESULT:
                if site.place.stage is Stage.LIMITED:
                    reaching = min(reaching, _limit(block) / candidates)
                questions = round(candidates * reaching)
            if not is_exact:
                questions = self._joins.questions.get(site.index, questions)
            self._asked.append(AskedSite(site, query, questions, is_exact, reaching))
            is_barrier = self._bound.call_of(site).options.calibrate == "batch"
            conditions = [] if is_barrier else self._planner.conditions(site.place)
            reports.append(
                SiteReport(
                    site.call,
                    " ".join(self._bound.text.encode()[slice(*site.span)].decode().split()),
                    site.place.clause.value,
                    site.place.stage.value,
                    tuple(f"{self._shown(condition.node)} {condition.test}" for condition in conditions),
                    tuple(sorted({self._bound.sites[index].call for index in reads} - {site.call})),
                    questions,
                    is_exact,
                    is_barrier,
                    self._joins.joins.get(site.index),
                )
            )
        return tuple(reports)

    def _count(self, node: Node, names: Sequence[str]) -> int | None:
        columns = ", ".join(f'"{name}"' for name in names)
        present = " AND ".join(f'"{name}" IS NOT NULL' for name in names)
        sql = f"SELECT count(*) FROM (SELECT DISTINCT {columns} FROM ({syntax.to_sql(node)}) WHERE {present})"
        try:
            ((count,),) = self._cursor.execute(sql).fetchall()
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
        for call in self._bound.calls:
            text = text.replace(f'"call {call.index}"', f"call {call.index}")
        return " ".join(text.replace(f"quail_{self._bound.nonce}_", "").split())

    def _parent(self, block: Block) -> int | None:
        if not block.places:
            return None
        place = block.places[-1]
        if isinstance(place, (ExpressionPlace, FromPlace)):
            return place.block
        owner = next((other for other in self._bound.blocks if other.node is place.node), None)
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
            self._cursor.sql(syntax.to_sql(node))
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


# Output


def _as_json(
    bound: BoundStatement,
    reports: Sequence[BlockReport],
    engine: EngineReport | None,
    done: Mapping[str, Any] | None,
) -> str:
    plan: dict[str, Any] = {
        "statement": bound.text,
        "calls": [
            {"index": call.index, "operator": call.operator.value, "text": call.text} for call in bound.calls
        ],
        "blocks": [
            {
                "index": report.index,
                "parent": report.parent,
                "label": report.label,
                "from": report.tables,
                "decided_first": list(report.free_conjuncts),
                "asks": [
                    {
                        "call": site.call,
                        "clause": site.clause,
                        "over": site.stage,
                        "needed_if": list(site.conditions),
                        "after_calls": list(site.after),
                        "questions": site.questions,
                        "is_exact": site.is_exact,
                        "is_barrier": site.is_barrier,
                    }
                    | ({} if site.join is None else {"join": site.join.as_dict()})
                    for site in report.sites
                ],
            }
            for report in reports
        ],
        "warnings": list(bound.warnings),
    }
    if engine is not None:
        plan["engine"] = dict(engine.facts) or None
        plan["groups"] = [_group_json(group) for group in engine.groups]
        plan["predicted"] = _predicted_json(engine)
        if engine.problem:
            plan["problem"] = engine.problem
    if done is not None:
        plan["done"] = {
            "tokens": dict(done["tokens"]),
            "seconds": dict(done["seconds"]),
            "calls": [dict(stage) for stage in done["stages"]],
        }
    return json.dumps(plan, indent=2, ensure_ascii=False)


def _group_json(group: NamedForecast) -> dict[str, Any]:
    found: dict[str, Any] = {"documents": group.documents, "calls": list(group.calls)}
    if group.forecast is None:
        return found | {"num_documents": None}
    counted, decision = group.forecast.documents, group.forecast.decision
    return found | {
        "num_documents": counted.num_documents,
        "num_counted": len(counted.lengths),
        "tokens": counted.num_tokens,
        "is_exact": counted.is_exact,
        "num_too_long": counted.num_too_long,
        "sharing": asdict(decision),
        "saved_tokens": group.forecast.tokens.reused_prefix,
        "questions": [asdict(question) for question in group.forecast.questions],
        "predicted": _tokens_json(group.forecast.tokens),
        "seconds": group.forecast.seconds,
    }


def _predicted_json(engine: EngineReport) -> dict[str, Any] | None:
    if not engine.is_whole:
        return None
    return {"tokens": _tokens_json(engine.tokens), "seconds": engine.seconds}


def _tokens_json(tokens: TokenForecast) -> dict[str, Any]:
    return {name: getattr(tokens, name) for name in (*LEDGER, "is_exact")}


def _as_text(
    bound: BoundStatement,
    reports: Sequence[BlockReport],
    engine: EngineReport | None,
    done: Mapping[str, Any] | None,
) -> str:
    lines = []
    for call in bound.calls:
        lines.append(f"call {call.index}: {_cut(call.text)}")
    if not bound.calls:
        lines.append("no AI calls: DuckDB runs the statement as it stands")
    roots = [report for report in reports if report.parent is None]
    for root in roots:
        lines += _block_lines(root, reports, "")
    lines += _engine_lines(engine) if engine is not None else []
    lines += _done_lines(engine, done) if done is not None else []
    lines += [f"warning: {warning}" for warning in bound.warnings]
    return "\n".join(lines)


def _block_lines(report: BlockReport, reports: Sequence[BlockReport], indent: str) -> list[str]:
    source = f" from {report.tables}" if report.tables else ""
    lines = [f"{indent}{report.label}{source}"]
    entries: list[list[str]] = []
    if report.free_conjuncts:
        entries.append([f"decide {_cut(' AND '.join(report.free_conjuncts))}"])
    entries += [_site_lines(site) for site in report.sites]
    inner = [other for other in reports if other.parent == report.index]
    entries += [_block_lines(other, reports, "") for other in inner]
    for position, entry in enumerate(entries):
        is_last = position == len(entries) - 1
        lines.append(f"{indent}{'└─ ' if is_last else '├─ '}{entry[0]}")
        lines += [f"{indent}{'   ' if is_last else '│  '}{line}" for line in entry[1:]]
    return lines


def _site_lines(site: SiteReport) -> list[str]:
    if site.questions is None:
        count = f"after call {', '.join(map(str, site.after))}" if site.after else "questions unknown"
    else:
        noun = "question" if site.questions == 1 else "questions"
        certainty = (
            "(at most)" if site.join is not None and site.join.ends_early else _certainty(site.is_exact)
        )
        count = f"{site.questions:,} {noun} {certainty}"
        if site.after and not site.is_exact:
            count += f" after call {', '.join(map(str, site.after))}"
    lines = [f"ask call {site.call} in {site.clause}: {count}"]
    if site.join is not None:
        lines.append(f"   {site.join.as_text()}")
    if site.is_barrier:
        lines.append("   calibrated by batch: no answer before the last question, over all rows")
    elif site.stage != Stage.ROWS.value:
        lines.append(f"   over {site.stage}")
    if site.conditions:
        lines.append(f"   if {_cut(' AND '.join(site.conditions))}")
    return lines


def _engine_lines(engine: EngineReport) -> list[str]:
    if engine.problem:
        return [f"tokens unknown: {engine.problem}"]
    lines = []
    for group in engine.groups:
        lines += _group_lines(group)
    if not engine.is_whole:
        return lines
    tokens, facts = engine.tokens, engine.facts
    lines.append(
        f"tokens {_certainty(tokens.is_exact)}: {tokens.naive:,} naive = {tokens.computed:,} computed"
        f" + {tokens.reused_rewind:,} rewind + {tokens.reused_prefix:,} prefix"
    )
    lines.append(
        f"time (estimated): {engine.seconds:.3g} s of {facts['model']} on {facts['device']}, "
        f"{facts['dtype']}, {facts['layout']} layout, by {facts['rates']} rates"
    )
    return lines


def _group_lines(group: NamedForecast) -> list[str]:
    calls = ", ".join(map(str, group.calls))
    head = f"documents of call {calls}: {_cut(group.documents)}"
    if group.forecast is None:
        return [head, "   unknown before the run"]
    counted, decision = group.forecast.documents, group.forecast.decision
    lines = [
        head,
        f"   {counted.num_documents:,} distinct, {counted.num_tokens:,} tokens "
        f"{_certainty(counted.is_exact)}, label included",
        f"   {decision.shared_tokens:,} tokens stand in common beginnings, "
        f"{group.forecast.tokens.reused_prefix:,} are saved",
        f"   prefix sharing {decision.reason}",
    ]
    if counted.num_too_long:
        lines.append(f"   {counted.num_too_long:,} documents are too long for the model's context")
    return lines


def _done_lines(engine: EngineReport | None, done: Mapping[str, Any]) -> list[str]:
    """What was planned beside what was done."""
    planned: dict[str, str] = {}
    if engine is not None and engine.is_whole:
        planned = {name: f"{getattr(engine.tokens, name):,}" for name in LEDGER}
        planned["seconds"] = f"{engine.seconds:.1f}"
    lines = [f"{'':<16}{'planned':>14}{'done':>14}"]
    figures = {name: f"{done['tokens'].get(name, 0):,}" for name in (*LEDGER, "recomputed")}
    figures["seconds"] = f"{done['seconds'].get('run', 0.0):.1f}"
    lines += [f"{name:<16}{planned.get(name, '-'):>14}{figure:>14}" for name, figure in figures.items()]
    for number, stage in enumerate(done["stages"]):
        passed = stage.get("passed")
        tail = "" if passed is None else f", {passed:,} passed"
        lines.append(f"call {number}: {stage.get('evaluated', 0):,} questions asked{tail}")
    return lines


def _certainty(is_exact: bool) -> str:
    return "(exact)" if is_exact else "(estimated)"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
