"""The feed of a run: which questions are due, given the answers so far."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from quail.execution import reading
from quail.execution.answers import CallAnswers, Texts, distinct
from quail.execution.ask_order import AskOrder
from quail.execution.asks import Asks, FollowUp, Int64s, RunControl
from quail.execution.chain import Chain
from quail.execution.groups import Due, Group, Wave
from quail.execution.pair_planning import AnchorChoice, KeptAnchor, PairPlanner
from quail.execution.pairs import FirstMatch, Stream, counts_of, last_of_anchor, places_in_group
from quail.execution.pilot import Filter
from quail.execution.reading import CandidateReader, Candidates
from quail.plan import syntax
from quail.plan.logical import AICall, Operator
from quail.plan.lookups import lookup_name
from quail.plan.statement import BoundStatement, Site
from quail.plan.syntax import Node
from quail.planner.anchors import TokenCounter
from quail.planner.ask_groups import AskGroup, operators_of, plan_groups
from quail.planner.candidates import CandidatePlanner
from quail.planner.filter_order import call_cost, selectivity
from quail.planner.observed_order import FilterWork, OrderWork
from quail.planner.optimize import optimize


class RunNames:
    """Names of the lookups in one run: two runs of one statement may go on at once."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._run = secrets.token_hex(4)

    def lookup(self, call: int) -> str:
        """Name of a call's lookup."""
        return lookup_name(self._run, call)

    def in_run(self, sql: str) -> str:
        """A query of the statement with this run's lookups."""
        return sql.replace(lookup_name(self._nonce, ""), lookup_name(self._run, ""))


class RunFeed:
    """The feed of a run: groups of questions, each started once the answers that it reads are there."""

    def __init__(
        self,
        bound: BoundStatement,
        cursor: duckdb.DuckDBPyConnection,
        names: RunNames,
        texts: Texts,
        answers: Sequence[CallAnswers],
        control: RunControl,
        counter: TokenCounter,
        kept_anchor: KeptAnchor = lambda call: None,
    ) -> None:
        self._bound = bound
        self._cursor = cursor
        self._names = names
        self._answers = answers
        self._texts = texts
        self._reader = CandidateReader(cursor, names.in_run, texts)
        self._pairs = PairPlanner(bound.calls, texts, counter, control.order, kept_anchor)
        self._exists_wave = control.exists_wave
        self._keeps_order = control.order == "as_written"
        self._orders: list[tuple[AskGroup, AskOrder]] = []
        blocks = optimize(bound, control.order)
        self._planner = CandidatePlanner(bound, blocks, control.order, self._binds)
        self._pending = plan_groups(bound, self._planner)
        self._operators = operators_of(self._pending)
        self._active: list[tuple[AskGroup, Group]] = []
        self._settled: set[int] = set()
        self._evaluations = np.zeros((len(answers), 2), dtype=np.int64)
        self._start_ready()
        self._estimate_anchors()

    @property
    def calls(self) -> tuple[AICall, ...]:
        """The calls with their anchors."""
        return tuple(self._pairs.calls)

    @property
    def anchors(self) -> dict[int, AnchorChoice]:
        """Why each call over two relations has the anchor that it has."""
        return self._pairs.choices

    @property
    def done(self) -> bool:
        return not self._pending and not self._active

    @property
    def num_documents(self) -> int | None:
        return len(self._texts) if not self._pending else None

    @property
    def row_limited(self) -> bool:
        return any(planned.row_limit is not None for planned, _ in self._active)

    def take(self, limit: int) -> tuple[Asks, ...]:
        asks: list[Asks] = []
        for planned, group in self._active:
            for due in group.take(limit):
                found = self._asks(planned, group, due)
                if found is not None:
                    asks.append(found)
                    limit -= len(found)
            if limit <= 0:
                break
        return tuple(asks)

    def answered(self, call: int, keys: Int64s, values: pa.Array) -> FollowUp:
        self._answers[call].store(keys, as_array(values))
        asks: list[Asks] = []
        released: list[Int64s] = []
        for planned, group in self._active:
            dues, handles = group.answered(call, keys)
            asks += [found for due in dues if (found := self._asks(planned, group, due)) is not None]
            released.append(handles)
        self._settle()
        self._start_ready()
        return FollowUp(tuple(asks), distinct(np.concatenate([np.zeros(0, dtype=np.int64), *released])))

    def evaluations(self, call: int) -> tuple[int, int]:
        """Rows that needed a call, and rows of those in which an argument was NULL."""
        return int(self._evaluations[call, 0]), int(self._evaluations[call, 1])

    def orders(self) -> list[dict[str, Any]]:
        """How the filters and joins of each WHERE with several of them were ordered, for the report."""
        return [order.report([site.call for site in planned.sites]) for planned, order in self._orders]

    # Groups

    def _settle(self) -> None:
        for planned, group in self._active:
            if group.is_settled:
                self._settled.update(site.index for site in planned.sites)
                for call, num_rows, num_null in group.evaluations():
                    self._evaluations[call] += (num_rows, num_null)
        self._active = [(planned, group) for planned, group in self._active if not group.is_settled]

    def _start_ready(self) -> None:
        """Starts every group whose candidate query reads settled calls only."""
        while True:
            ready = [planned for planned in self._pending if planned.sites_read <= self._settled]
            if not ready:
                break
            for planned in ready:
                self._pending.remove(planned)
                self._active.append(self._start(planned))
            self._settle()
        assert self._active or not self._pending, "calls of the statement depend on each other in a circle"

    def _start(self, planned: AskGroup) -> tuple[AskGroup, Group]:
        if planned.query.group:
            return self._start_waves(planned)
        if planned.is_paired:
            return self._start_pairs(planned)
        candidates = self._reader.read(planned.query)
        return planned, self._group(planned, self._order(planned, candidates), candidates, planned.row_limit)

    def _start_pairs(self, planned: AskGroup) -> tuple[AskGroup, Group]:
        """A group about pairs: they are looked at a part at a time, those of an anchor one after another."""
        if planned.row_limit is not None:
            windows = self._reader.windows(planned.query)
            first = next(windows, None)
            if first is not None:
                planned = self._pairs.plan(planned, first)
            parts = itertools.chain([] if first is None else [first], windows)
            make = functools.partial(self._group, planned, self._order(planned, first))
            return planned, Stream(parts, make, planned.row_limit)
        candidates = self._reader.read_pairs(planned.query)
        planned = self._pairs.plan(planned, candidates)
        if any(self._bound.call_of(site).options.calibrate == "batch" for site in planned.sites):
            return planned, self._group(planned, self._order(planned, candidates), candidates, None)
        name = self._anchor_column(planned)
        blocks = candidates.by_anchor(name).blocks(name)
        is_one_part = len(candidates) <= reading.BLOCK_ROWS
        order = self._order(planned, candidates)
        make = functools.partial(self._group, planned, order, is_one_part=is_one_part)
        forgets = [] if is_one_part else self._forgettable(planned, name)
        return planned, Stream(blocks, make, None, forgets)

    def _start_waves(self, planned: AskGroup) -> tuple[AskGroup, Group]:
        """A group about rows of which one TRUE answer each is wanted, a few of its candidates at a time."""
        if not planned.is_paired:
            return planned, self._first_match(planned, self._reader.read(planned.query))
        candidates = self._reader.read_pairs(planned.query)
        assert candidates.groups is not None
        first = candidates.taken(np.flatnonzero(places_in_group(candidates.groups) < self._exists_wave))
        planned = self._pairs.plan(planned, first)
        name = self._anchor_column(planned)
        if len(candidates) <= reading.BLOCK_ROWS or not candidates.has_one_in_group(name):
            return planned, self._first_match(planned, candidates)
        blocks = candidates.by_anchor(name).blocks(name)
        make = functools.partial(self._first_match, planned)
        forgets = [(answers, 1) for answers, _ in self._forgettable(planned, name)]
        return planned, Stream(blocks, make, None, forgets)

    def _first_match(
        self, planned: AskGroup, candidates: Candidates, row_limit: int | None = None
    ) -> FirstMatch:
        (site,), (names,) = planned.sites, planned.columns
        assert candidates.groups is not None
        return FirstMatch(
            site.call,
            self._answers[site.call],
            self._register(site, candidates, names),
            candidates.groups,
            wave=self._exists_wave,
            anchor=self._pairs.calls[site.call].anchor,
            releases=not self._is_read_later(planned, 0),
        )

    def _group(
        self,
        planned: AskGroup,
        order: AskOrder,
        candidates: Candidates,
        row_limit: int | None,
        *,
        is_one_part: bool = True,
    ) -> Group:
        stages = range(len(planned.sites))
        columns = [self._document_column(planned, stage) for stage in stages]
        filters = []
        for stage, (site, names) in enumerate(zip(planned.sites, planned.columns, strict=True)):
            keys = self._register(site, candidates, names)
            passing = 0 if planned.is_negated(site) else 1
            others = tuple(o for o in stages if o != stage and columns[o] == columns[stage])
            anchor = self._pairs.calls[site.call].anchor
            filters.append(Filter(site.call, keys, passing, others, is_paired=len(names) == 2, anchor=anchor))
        if not planned.is_chain:
            call = filters[0].call
            releases = not self._is_read_later(planned, 0)
            anchor = self._pairs.calls[call].anchor
            return Wave(call, self._answers[call], filters[0].keys, releases=releases, anchor=anchor)
        kept = self._kept_columns(planned, is_one_part=is_one_part)
        return Chain(
            self._answers,
            filters,
            order,
            row_limit,
            [candidates.documents[name] for name in kept],
            keeps_passed=any(
                columns[stage] in kept and self._is_read_later(planned, stage) for stage in stages
            ),
        )

    def _order(self, planned: AskGroup, candidates: Candidates | None) -> AskOrder:
        """The order of a group's questions, as planned or as observed."""
        sites = planned.sites
        calls = [self._pairs.calls[site.call] for site in sites]
        hints = [
            None if call.options.selectivity is None else selectivity(site.place.root, self._bound.calls)
            for site, call in zip(sites, calls, strict=True)
        ]
        work = None
        if planned.is_chain and candidates is not None and not self._keeps_order:
            work = self._work(planned, candidates)
        order = AskOrder(len(sites), hints, work)
        if planned.is_chain and len(sites) > 1:
            self._orders.append((planned, order))
        return order

    def _work(self, planned: AskGroup, candidates: Candidates) -> OrderWork | None:
        """What it takes to ask the questions of a chain in some order."""
        if planned.is_paired:
            return self._pairs.works.get(planned.sites[0].place.block)
        columns = [names[0] for names in planned.columns]
        lengths = {name: self._texts.mean_tokens(candidates.documents[name]) for name in set(columns)}
        return FilterWork(
            tuple(call_cost(self._bound.call_of(site)) for site in planned.sites),
            tuple(columns.index(name) for name in columns),
            tuple(lengths[name] for name in columns),
        )

    def _kept_columns(self, planned: AskGroup, *, is_one_part: bool) -> list[str]:
        """Columns of documents that later questions of a chain may read, but no other block."""
        stages = range(len(planned.sites))
        if any(self._is_read_later(planned, stage, elsewhere=True) for stage in stages):
            return []
        columns = [self._document_column(planned, stage) for stage in stages]
        if not planned.is_paired:
            return columns if len(columns) == 1 else sorted({n for n in columns if columns.count(n) > 1})
        if not is_one_part:
            return [self._anchor_column(planned)]
        paired = {columns[stage] for stage in stages if len(planned.columns[stage]) == 2}
        return sorted(name for name in set(columns) if name in paired or columns.count(name) > 1)

    def _forgettable(self, planned: AskGroup, name: str) -> list[tuple[CallAnswers, int | None]]:
        """Answers of conditions on pairs with documents of a column that no other group asks, and the truth
        that counts.

        Of a condition that is not a filter all count.
        """
        num_sites = Counter(site.call for site in self._bound.sites)
        return [
            (self._answers[site.call], (0 if planned.is_negated(site) else 1) if planned.is_chain else None)
            for site, names in zip(planned.sites, planned.columns, strict=True)
            if len(names) == 2 and name in names and num_sites[site.call] == 1
            if self._bound.call_of(site).operator is Operator.IF
        ]

    def _document_column(self, planned: AskGroup, stage: int) -> str:
        """The column whose documents a stage computes."""
        return planned.columns[stage][self._pairs.calls[planned.sites[stage].call].anchor]

    def _anchor_column(self, planned: AskGroup) -> str:
        """The anchors of the first question about pairs."""
        stage = next(stage for stage, names in enumerate(planned.columns) if len(names) == 2)
        return self._document_column(planned, stage)

    def _is_read_later(self, planned: AskGroup, stage: int, *, elsewhere: bool = False) -> bool:
        """Whether a group that has not started may read the same documents; in another block, if so asked."""
        block = planned.sites[stage].place.block
        document = planned.signatures[stage][self._pairs.calls[planned.sites[stage].call].anchor]
        return any(
            document in self._documents_read(other, place)
            and not (elsewhere and other.sites[place].place.block == block)
            for other in self._pending
            for place in range(len(other.sites))
        )

    def _documents_read(self, planned: AskGroup, stage: int) -> list[str]:
        """Signatures of the documents that a stage computes; of both, while its anchor is not chosen."""
        return [planned.signatures[stage][side] for side in self._pairs.anchors(planned.sites[stage].call)]

    def _estimate_anchors(self) -> None:
        """Chooses the anchors of pairs that are known only once other questions are answered."""
        for planned in self._pending:
            for site in planned.sites:
                if len(site.arguments) == 2 and site.call not in self._pairs.choices:
                    sides = [self._reader.measured(queries) for queries in self._planner.spread(site)]
                    self._pairs.estimate(site, *zip(*sides, strict=True))

    # Questions

    def _register(self, site: Site, candidates: Candidates, names: Sequence[str]) -> Int64s:
        """The key of the site's question in each row, -1 where an argument is NULL."""
        handles = np.stack([candidates.documents[name] for name in names], axis=1).astype(np.int64)
        is_present = (handles >= 0).all(axis=1)
        keys = np.full(len(handles), -1, dtype=np.int64)
        rows = candidates.rows[is_present]
        keys[is_present] = self._answers[site.call].register(handles[is_present], rows)
        return keys

    def _asks(self, planned: AskGroup, group: Group, due: Due) -> Asks | None:
        answers = self._answers[due.call]
        is_new = ~answers.asked[due.keys]
        keys = due.keys[is_new]
        if not len(keys):
            return None
        answers.asked[keys] = True
        handles = answers.handles[keys]
        anchor = self._pairs.calls[due.call].anchor
        documents = handles[:, anchor]
        is_paired = handles.shape[1] == 2
        follows = np.full(len(keys), self._is_read_later(planned, due.place))
        if due.may_follow is not None:
            follows |= due.may_follow[is_new]
        if is_paired:
            follows |= ~last_of_anchor(documents) | (group.num_uses(documents) > counts_of(documents))
        return Asks(
            due.call,
            keys,
            tuple(self._texts.take(handles[:, i]) for i in range(handles.shape[1])),
            documents,
            follows,
            answers.rows[keys],
            self._planner.blocks[planned.sites[due.place].place.block].table,
            handles[:, 1 - anchor] if is_paired else None,
            self._operators[planned.sites[0].index],
        )

    def _binds(self, node: Node) -> bool:
        try:
            self._cursor.sql(self._names.in_run(syntax.to_sql(node)))
        except (duckdb.BinderException, duckdb.CatalogException):
            return False
        return True


def as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column in one piece."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
