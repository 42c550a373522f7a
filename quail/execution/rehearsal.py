"""A run without its model: the same questions, passes and pages, with answers drawn by their selectivities.

What a statement computes depends on which rows pass, which documents' KV is still there and what fits a pass.
All of that is the run's own code; only the model and its tensors are left out. So where no answer decides
what is asked the ledger is that of the run, and where the answers are those of the run it is too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quail.arrays import of_numbers
from quail.cost.work import Work
from quail.execution.asks import Asks, Feed, FollowUp, Int64s, RunControl
from quail.execution.chunk import Chunk
from quail.execution.forecast import Forecaster
from quail.execution.ledger import TokenLedger
from quail.execution.pair_planning import AnchorChoice
from quail.execution.readout import values_of
from quail.execution.reads import Answered, Read
from quail.execution.relational import HasCursor, RelationalRun
from quail.execution.run import Run
from quail.kv.pages import PageArena
from quail.plan.logical import AICall, Operator
from quail.plan.statement import BoundStatement
from quail.planner.estimate import TokenForecast
from quail.planner.filter_order import DEFAULT_SELECTIVITY

MOST_QUESTIONS = 2**15
"""A statement that asks more than this is not rehearsed: each takes about 15 microseconds."""

MOST_BYTES = 2**22
"""Documents of more bytes than this are not all tokenized for a rehearsal."""

MOST_SOURCE_ROWS = 2**18
"""A run copies the relations that it reads; one with more rows than this is not copied for a rehearsal."""


class AnswerSource(Protocol):
    """Gives the answers of a rehearsal."""

    def asked(self, asks: Asks) -> None:
        """Told of questions before they are answered."""

    def values(self, call: AICall, keys: Int64s) -> pa.Array:
        """(len(keys),) answers of questions of one call, each asked once."""


class DrawnAnswers:
    """Answers drawn by lot: as many TRUE ones as the selectivity says, to a rounding; labels evenly.

    Matches of pairs are spread over both sides: each anchor has its share of them, each partner as many as
    any other. So no document is without a match unless there are too few.

    Args:
        calls: of the statement.
    """

    def __init__(self, calls: Sequence[AICall]) -> None:
        self._calls = calls
        self._random = np.random.default_rng(0)
        self._num_drawn: Counter[int] = Counter()
        self._num_matches: dict[int, Counter[int]] = defaultdict(Counter)
        self._matches: dict[tuple[int, int], bool] = {}

    def asked(self, asks: Asks) -> None:
        """Draws the matches of pairs, as all pairs of an anchor are known when they are asked."""
        call = self._calls[asks.call]
        if asks.partners is not None and call.operator is Operator.IF:
            self._match(call, asks.keys.tolist(), asks.documents.tolist(), asks.partners.tolist())

    def values(self, call: AICall, keys: Int64s) -> pa.Array:
        """Drawn answers."""
        if call.operator is Operator.IF and call.prompt.num_arguments == 2:
            found = [self._matches.pop((call.index, key)) for key in keys.tolist()]
            return of_numbers(np.array(found, dtype=np.bool_))
        if call.operator is Operator.IF:
            return of_numbers(self._truths(call, len(keys)))
        if call.operator is Operator.SCORE:
            return of_numbers(self._random.random(len(keys)))
        logits = np.zeros((len(keys), len(call.categories)), dtype=np.float32)
        if call.operator is Operator.CLASSIFY:
            logits[np.arange(len(keys)), self._random.integers(0, len(call.categories), len(keys))] = 1.0
        return values_of(call, logits)

    def _truths(self, call: AICall, count: int) -> npt.NDArray[np.bool_]:
        """So many TRUE ones that all drawn so far hold the call's share of them, at random places."""
        truths = np.zeros(count, dtype=np.bool_)
        truths[self._random.permutation(count)[: self._num_true(call, count)]] = True
        return truths

    def _num_true(self, call: AICall, count: int) -> int:
        """How many of the next answers are TRUE."""
        hint = call.options.selectivity
        share = DEFAULT_SELECTIVITY if hint is None else hint
        before = self._num_drawn[call.index]
        self._num_drawn[call.index] = before + count
        return math.floor((before + count) * share + 0.5) - math.floor(before * share + 0.5)

    def _match(self, call: AICall, keys: list[int], anchors: list[int], partners: list[int]) -> None:
        """Anchor by anchor, those partners match that have the fewest matches so far."""
        of_anchor: dict[int, list[int]] = {}
        for place, anchor in enumerate(anchors):
            of_anchor.setdefault(anchor, []).append(place)
        num_matches = self._num_matches[call.index]
        for places in of_anchor.values():
            places.sort(key=lambda place: num_matches[partners[place]])
            num_true = self._num_true(call, len(places))
            num_matches.update(partners[place] for place in places[:num_true])
            self._matches |= {(call.index, keys[p]): rank < num_true for rank, p in enumerate(places)}


@dataclass(frozen=True)
class CallForecast:
    """What a call is expected to take.

    Attributes:
        num_asked: questions.
        num_passed: TRUE answers; None of calls that answer something else.
        tokens: its part of the ledger, and its work.
        seconds: of that work by the roofline.
        anchor: of a call over two relations the argument that is computed once, and why.
    """

    num_asked: int
    num_passed: int | None
    tokens: TokenForecast
    seconds: float
    anchor: AnchorChoice | None = None


@dataclass(frozen=True)
class Rehearsal:
    """What a statement is expected to take.

    Attributes:
        calls: of each call, by its index.
        num_passes: forward passes.
        num_failed: questions whose documents are too long for the model, or for the memory.
    """

    calls: tuple[CallForecast, ...]
    num_passes: int
    num_failed: int

    @property
    def tokens(self) -> TokenForecast:
        """The ledger of all calls."""
        return sum((call.tokens for call in self.calls), TokenForecast())

    @property
    def seconds(self) -> float:
        """Of all calls."""
        return sum(call.seconds for call in self.calls)


def rehearse(
    bound: BoundStatement,
    catalog: HasCursor,
    forecaster: Forecaster,
    *,
    order: str = "auto",
    answers: AnswerSource | None = None,
) -> Rehearsal | None:
    """Runs a statement without its model; nothing is written.

    Args:
        bound: the statement.
        catalog: the tables that it reads.
        forecaster: of the model and the machine.
        order: as in a run.
        answers: gives the answers; None draws them.

    Returns:
        None where the statement asks too much to go through all of it.

    Raises:
        PlanError: a question that cannot be asked of this model, or no room for KV.
    """
    control = RunControl(order=order, on_error="null")
    if not _is_small(bound, catalog):
        return None
    relational = RelationalRun(bound, catalog, control, forecaster)
    try:
        feed = _RehearsedFeed(relational.feed, relational.calls, answers or DrawnAnswers(relational.calls))
        run = forecaster.dry_run(DryModel(forecaster.num_pages), relational.calls, feed, control)
        run.run()
        return _found(run, relational, forecaster)
    except _TooMuch:
        return None
    finally:
        relational.close()


def _found(run: Run, relational: RelationalRun, forecaster: Forecaster) -> Rehearsal:
    scheduler = run.scheduler
    calls = [
        CallForecast(
            stage["evaluated"],
            stage["passed"],
            _forecast(scheduler.ledgers[index], scheduler.works[index]),
            forecaster.seconds(scheduler.works[index]),
            relational.anchors.get(index),
        )
        for index, stage in enumerate(relational.stages())
    ]
    return Rehearsal(tuple(calls), scheduler.num_passes, run.failures.log.num_errors)


def _forecast(ledger: TokenLedger, work: Work) -> TokenForecast:
    return TokenForecast(
        naive=ledger.naive,
        computed=ledger.computed,
        reused_rewind=ledger.reused_rewind,
        reused_prefix=ledger.reused_prefix,
        reused_retained=ledger.reused_retained,
        work=work,
    )


def _is_small(bound: BoundStatement, catalog: HasCursor) -> bool:
    """Whether the copies that a run makes of its sources are small."""
    cursor = catalog.cursor()
    try:
        for source in bound.sources:
            (row,) = cursor.sql(f"SELECT count(*) FROM ({source.sql})").fetchall()
            if row[0] > MOST_SOURCE_ROWS:
                return False
    finally:
        cursor.close()
    return True


class _TooMuch(Exception):
    """The statement asks more than is gone through."""


class DryModel:
    """Pages without tensors, and logits that nobody reads.

    Args:
        num_pages: of the arena.
    """

    def __init__(self, num_pages: int) -> None:
        self._pages = PageArena(num_pages)

    @property
    def pages(self) -> PageArena:
        """The accounting of its KV."""
        return self._pages

    def start(self, chunk: Chunk, reads: Sequence[Read]) -> Answered:
        """Zeros for logits, and ones for probabilities: nothing to warn of."""
        return Answered(
            [
                np.ones(len(read.rows), dtype=np.float32)
                if read.is_mass
                else np.zeros((len(read.rows), len(read.vocab_ids)), dtype=np.float32)
                for read in reads
            ]
        )


class _RehearsedFeed:
    """A feed whose questions get the answers of a source in place of the model's.

    Raises:
        _TooMuch: once more is asked than is gone through.
    """

    def __init__(self, feed: Feed, calls: Sequence[AICall], answers: AnswerSource) -> None:
        self._feed, self._calls, self._answers = feed, calls, answers
        self._num_questions = self._num_bytes = 0
        self._known: set[int] = set()

    @property
    def done(self) -> bool:
        return self._feed.done

    @property
    def num_documents(self) -> int | None:
        return self._feed.num_documents

    @property
    def row_limited(self) -> bool:
        return self._feed.row_limited

    def take(self, limit: int) -> tuple[Asks, ...]:
        asks = self._feed.take(limit)
        self._note(asks)
        return asks

    def answered(self, call: int, keys: Int64s, values: pa.Array) -> FollowUp:
        if not values.null_count:  # NULL is the answer of a row that failed
            values = self._answers.values(self._calls[call], keys)
        found = self._feed.answered(call, keys, values)
        self._note(found.asks)
        return found

    def _note(self, batches: Sequence[Asks]) -> None:
        for asks in batches:
            self._num_questions += len(asks)
            new = [handle for handle in asks.documents.tolist() if handle not in self._known]
            if new:
                self._known.update(new)
                texts = asks.arguments[self._calls[asks.call].anchor]
                mean = (pc.sum(pc.binary_length(texts)).as_py() or 0) / len(texts)
                self._num_bytes += round(mean * len(set(new)))
            if self._num_questions > MOST_QUESTIONS or self._num_bytes > MOST_BYTES:
                raise _TooMuch
            self._answers.asked(asks)
