"""Which documents a statement may read, group by group, and what its questions over them will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import duckdb
import pyarrow as pa

from quail.execution.forecast import Forecaster, GroupForecast
from quail.plan import syntax
from quail.plan.logical import AICall
from quail.plan.statement import BoundStatement, Clause, Site, Stage
from quail.planner.ask_groups import row_limits
from quail.planner.candidates import CandidatePlanner, CandidateQuery
from quail.planner.existence import may_end_early
from quail.planner.filter_order import selectivity

EXACT_DOCUMENTS = 4_000
EXACT_BYTES = 2**23
"""Up to so many documents, of so many bytes together, are all counted."""

SAMPLE_DOCUMENTS = 1_024
SAMPLE_BYTES = 2**22
NEIGHBOURS = 32
"""A sample is made of runs of neighbours in the order of the texts, since neighbours share beginnings."""


@dataclass(frozen=True)
class AskedSite:
    """A site, and how many questions it will ask.

    Attributes:
        site: the site.
        query: its candidate query.
        num_questions: distinct questions; None where nothing is known before the run.
        is_exact: whether that number is certain.
        share: share of the rows of its block that reach it, as estimated.
    """

    site: Site
    query: CandidateQuery
    num_questions: int | None
    is_exact: bool
    share: float


@dataclass(frozen=True)
class NamedForecast:
    """A group of questions over the same documents.

    Attributes:
        documents: the SQL expression that gives the documents.
        forecast: what the questions will take; None where the documents are unknown before the run.
        calls: indices of the calls.
    """

    documents: str
    forecast: GroupForecast | None
    calls: tuple[int, ...]


class Population:
    """The documents of one statement.

    Args:
        bound: the statement.
        planner: of its candidate queries.
        cursor: DuckDB, where the tables are.
        forecaster: counts tokens.
    """

    def __init__(
        self,
        bound: BoundStatement,
        planner: CandidatePlanner,
        cursor: duckdb.DuckDBPyConnection,
        forecaster: Forecaster,
    ) -> None:
        self._bound, self._planner, self._cursor = bound, planner, cursor
        self._forecaster = forecaster
        self._row_limits = row_limits(bound, planner)

    def groups(self, asked: Sequence[AskedSite]) -> list[NamedForecast]:
        """What the questions about one document each take: a group for each block and document expression."""
        by_document: dict[tuple[int, str], list[AskedSite]] = {}
        for each in asked:
            if len(each.site.arguments) > 1:
                continue
            expression = syntax.to_sql({**each.site.arguments[0], "alias": ""})
            by_document.setdefault((each.site.place.block, expression), []).append(each)
        return [self._group(expression, sites, asked) for (_, expression), sites in by_document.items()]

    def _group(
        self, expression: str, sites: Sequence[AskedSite], asked: Sequence[AskedSite]
    ) -> NamedForecast:
        calls = {each.site.call: each for each in reversed(sites)}
        sites = sorted(calls.values(), key=sites.index)
        numbers = tuple(each.site.call for each in sites)
        first = sites[0]
        documents = self._documents(first, asked)
        if documents is None:
            return NamedForecast(expression, None, numbers)
        source, is_certain = documents
        num_documents, num_bytes = self._measure(source)
        texts = self._texts(source, num_documents, num_bytes)
        counted = self._forecaster.documents(texts, num_documents, [self._call(each) for each in sites])
        questions = []
        for each in sites:
            known = each.num_questions if each.is_exact else None
            number = round(num_documents * each.share) if known is None else known
            is_exact = known is not None and not may_end_early(each.site, self._planner.blocks)
            questions.append(self._forecaster.question(self._call(each), number, is_exact=is_exact))
        if not is_certain:
            counted = replace(counted, num_documents=max(question.num_asked for question in questions))
        limit = self._row_limits.get(first.site.place.block)
        forecast = self._forecaster.group(
            counted,
            questions,
            row_limit=limit,
            selectivities=self._selectivities(first, asked),
            is_follow_up=not is_certain and first.site.is_conjunct,
        )
        return NamedForecast(expression, forecast, numbers)

    def _selectivities(self, first: AskedSite, asked: Sequence[AskedSite]) -> list[float]:
        """Those of the filters of a block."""
        block = first.site.place.block
        filters = [each.site for each in asked if each.site.is_conjunct and each.site.place.block == block]
        return [selectivity(site.place.root, self._bound.calls) for site in filters]

    def _documents(self, site: AskedSite, asked: Sequence[AskedSite]) -> tuple[str, bool] | None:
        """A query `t` of the distinct documents that a site may read; and whether it reads all of them.

        None where they depend on answers.
        """
        if site.is_exact:
            return self._distinct(site.query, site.query.arguments[0]), True
        block = self._planner.blocks[site.site.place.block]
        lead = next(
            (
                each
                for each in asked
                if each.is_exact and each.site.is_conjunct and each.site.place.block == block.index
            ),
            None,
        )
        if lead is None or lead.site.place.clause is not Clause.WHERE:
            return None
        if site.site.place.stage is Stage.RESULT:
            return None
        query = self._planner.chain(block, [lead.site, site.site])
        if query is None or query.sites_read - {site.site.index, lead.site.index}:
            return None
        return self._distinct(query, query.arguments[len(lead.site.arguments)]), False

    def _distinct(self, query: CandidateQuery, name: str) -> str:
        sql = syntax.to_sql(query.node)
        return f'SELECT DISTINCT "{name}" AS t FROM ({sql}) WHERE "{name}" IS NOT NULL'

    def _measure(self, source: str) -> tuple[int, int]:
        (row,) = self._cursor.sql(f"SELECT count(*), coalesce(sum(strlen(t)), 0) FROM ({source})").fetchall()
        return int(row[0]), int(row[1])

    def _texts(self, source: str, num_documents: int, num_bytes: int) -> pa.Array:
        """All documents, or runs of neighbours drawn evenly from them."""
        if num_documents <= EXACT_DOCUMENTS and num_bytes <= EXACT_BYTES:
            sql = f"SELECT t FROM ({source}) ORDER BY t"
        else:
            num_sampled = min(SAMPLE_DOCUMENTS, SAMPLE_BYTES * num_documents // num_bytes)
            stride = max(1, num_documents // max(NEIGHBOURS, num_sampled))
            numbered = f"SELECT t, row_number() OVER (ORDER BY t) - 1 AS n FROM ({source})"
            sql = f"SELECT t FROM ({numbered}) WHERE (n // {NEIGHBOURS}) % {stride} = 0 ORDER BY n"
        column = self._cursor.sql(sql).to_arrow_table().column(0)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def _call(self, asked: AskedSite) -> AICall:
        return self._bound.calls[asked.site.call]
