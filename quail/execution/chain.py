"""A chain of filters over the rows of one WHERE, asked in an order that may change on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quail.execution.anchor_gate import AnchorGate
from quail.execution.answers import CallAnswers, distinct, first_places
from quail.execution.ask_order import AskOrder
from quail.execution.asks import Bools, Int64s
from quail.execution.groups import Due, Group, Inverse
from quail.execution.pilot import Filter, Pilot, Stop

_NOTHING: Int64s = np.zeros(0, dtype=np.int64)


class Chain(Group):
    """Filters over the rows of one WHERE: a row that passes one asks the next, a row that fails is done.

    Which filter is next is decided row by row, when the row gets there: the first in the order of that moment
    that it has not passed. The pairs of an anchor are asked together, once none of them waits for an earlier
    question; not under a row limit, where the first answers may suffice.

    Args:
        answers: the answers by call.
        filters: the filters as planned.
        order: in which order they are asked.
        row_limit: the number of passing rows, in row order, that suffice; None for all.
        documents: (rows,) handles of documents whose KV later questions of the chain may read, -1 for NULL;
            one array for each expression that gives documents.
        keeps_passed: whether a later question may read the document of a row that passed.
    """

    def __init__(
        self,
        answers: Sequence[CallAnswers],
        filters: Sequence[Filter],
        order: AskOrder,
        row_limit: int | None = None,
        documents: Sequence[npt.NDArray[np.integer]] = (),
        keeps_passed: bool = False,
    ) -> None:
        self._answers = answers
        self._filters = filters
        self._order = order
        num_rows = len(filters[0].keys)
        self._at: npt.NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self._has_passed: Bools = np.zeros((len(filters), num_rows), dtype=np.bool_)
        self._decided: Bools = np.zeros(num_rows, dtype=np.bool_)
        self._passed: Bools = np.zeros(num_rows, dtype=np.bool_)
        self._num_open = num_rows
        self._evaluated = np.zeros((len(filters), 2), dtype=np.int64)
        self._row_limit = row_limit
        self._prefix = 0
        self._num_passed_in_prefix = 0
        self._rows_by_key = [Inverse(f.keys, len(answers[f.call])) for f in filters]
        self._documents = tuple(documents)
        self._uses = np.bincount(self._handles(np.arange(num_rows)))
        self._keeps_passed = keeps_passed
        self._gates = {
            place: AnchorGate(f.keys, answers[f.call].handles[:, f.anchor])
            for place, f in enumerate(filters)
            if f.is_paired and row_limit is None and len(filters) > 1
        }
        self._line_up(self._advance(np.arange(num_rows, dtype=np.int64)))
        self._released(np.flatnonzero(self._decided))
        self._extend_prefix()
        self._pilot = self._draw_pilot()

    # -- what is asked
    # ---------------------------------------------------------------------------------------------

    def take(self, limit: int) -> list[Due]:
        if self.is_settled:
            return []
        if self._pilot is not None:
            return self._dues(self._pilot.take(limit))
        rows = self._fresh_rows(self._order.window(limit))
        self._order.took(len(rows))
        return self._dues(self._stops_of(rows))

    def answered(self, call: int, keys: Int64s) -> tuple[list[Due], Int64s]:
        places = [place for place, filter_ in enumerate(self._filters) if filter_.call == call]
        if self.is_settled or not places:
            return [], _NOTHING
        for place in places:
            self._observe(place, keys)
        decided = [self._revise()]
        stops: list[Stop] = []
        for place in places:
            rows = self._rows_by_key[place].rows(keys)
            rows = rows[(self._at[rows] == place) & ~self._decided[rows]]
            stops += self._advance(rows, answered=place)
            decided.append(rows[self._decided[rows]])
        self._extend_prefix()
        released = self._released(np.concatenate(decided))
        return ([] if self._is_over() else self._dues(self._let_through(stops))), released

    def _let_through(self, stops: Sequence[Stop]) -> list[Stop]:
        """Those of some rows, and of rows held so far, whose questions may be asked now."""
        if not self._gates:
            return list(stops)
        by_place: dict[int, list[Int64s]] = {}
        for place, rows in self._sifted(stops):
            by_place.setdefault(place, []).append(rows)
        for place, gate in self._gates.items():
            for _, rows in self._stops_of(gate.opened()):
                by_place.setdefault(place, []).append(rows)
        return [(place, np.sort(np.concatenate(rows))) for place, rows in by_place.items()]

    def _sifted(self, stops: Sequence[Stop]) -> list[Stop]:
        """Those of some rows whose questions may be asked now; the gates hold the others."""
        found = [
            (place, self._gates[place].sift(rows) if place in self._gates else rows) for place, rows in stops
        ]
        return [(place, rows) for place, rows in found if len(rows)]

    def _observe(self, place: int, keys: Int64s) -> None:
        if self._order.is_observed:
            filter_ = self._filters[place]
            keys = keys[self._rows_by_key[place].holds(keys)]
            passed = self._answers[filter_.call].truth[keys] == filter_.passing
            self._order.note(place, len(keys), int(np.count_nonzero(passed)))

    def _revise(self) -> Int64s:
        """Takes a better order, if answers show one: rows whose question nobody asked then line up anew.

        Returns those of them that known answers decide.
        """
        ends_pilot = self._pilot is not None and self._pilot.is_answered
        if self._pilot is not None and not ends_pilot:
            return _NOTHING
        self._pilot = None
        if not self._order.revise(after_pilot=ends_pilot):
            return _NOTHING
        waiting = [rows for _, rows in self._stops_of(np.flatnonzero(~self._decided))]
        rows = np.sort(np.concatenate([_NOTHING, *waiting]))
        self._line_up(self._advance(rows))
        for place, gate in self._gates.items():
            is_there = (self._at == place) | self._has_passed[place]
            gate.start_over(~self._decided & ~is_there, is_there)
        decided: Int64s = rows[self._decided[rows]]
        return decided

    def _draw_pilot(self) -> Pilot | None:
        if not self._order.wants_pilot:
            return None
        observed = {place: self._filters[place] for place in self._order.observed}
        pilot = Pilot(self._answers, observed, np.flatnonzero(~self._decided), self._row_limit)
        self._order.num_pilot_rows = pilot.num_rows
        return None if pilot.is_answered else pilot

    def _line_up(self, stops: Sequence[Stop]) -> None:
        """Queues rows that wait for questions that nobody asked, one row a question, in row order."""
        first = [rows[first_places(self._filters[place].keys[rows])] for place, rows in stops]
        self._fresh = np.sort(np.concatenate([_NOTHING, *first]))
        self._next_fresh = 0

    def _fresh_rows(self, limit: int) -> Int64s:
        """Up to `limit` rows whose questions nobody has asked yet."""
        taken = [_NOTHING]
        while limit > 0 and self._next_fresh < len(self._fresh):
            rows = self._fresh[self._next_fresh : self._next_fresh + limit]
            self._next_fresh += len(rows)
            unasked = [here for _, here in self._sifted(self._stops_of(rows))]
            limit -= sum(map(len, unasked))
            taken += unasked
        return np.sort(np.concatenate(taken))

    def _stops_of(self, rows: Int64s) -> list[Stop]:
        """The rows by the filter at which they wait, without those whose question was asked."""
        rows = rows[~self._decided[rows]]
        stops = []
        for place in distinct(self._at[rows]).tolist():
            filter_ = self._filters[place]
            here = rows[self._at[rows] == place]
            here = here[~self._answers[filter_.call].asked[filter_.keys[here]]]
            if len(here):
                stops.append((place, here))
        return stops

    def _dues(self, stops: Sequence[Stop]) -> list[Due]:
        """The questions at which rows wait, each once."""
        dues = []
        for place, rows in stops:
            filter_ = self._filters[place]
            rows = rows[first_places(filter_.keys[rows])]
            may_follow = np.zeros(len(rows), dtype=np.bool_)
            for other in filter_.same_document:
                may_follow |= self._may_ask(other, rows)
            dues.append(Due(filter_.call, filter_.keys[rows], place, may_follow))
        return dues

    def _may_ask(self, place: int, rows: Int64s) -> Bools:
        """Whether a filter may still be asked of the documents of some rows."""
        filter_ = self._filters[place]
        if filter_.is_paired:  # of other pairs of the document too
            may_be: Bools = ~self._has_passed[place, rows]
            return may_be
        keys = filter_.keys[rows]
        may_be = keys >= 0
        may_be[may_be] = ~self._answers[filter_.call].is_answered(keys[may_be])
        return may_be

    # -- what is known
    # ---------------------------------------------------------------------------------------------

    def num_uses(self, documents: Int64s) -> Int64s:
        uses: Int64s = np.zeros(len(documents), dtype=np.int64)
        is_counted = documents < len(self._uses)
        uses[is_counted] = self._uses[documents[is_counted]]
        return uses

    @property
    def num_passed(self) -> int:
        """Rows that passed in front of the first undecided one, as long as there is a row limit."""
        return self._num_passed_in_prefix

    @property
    def is_settled(self) -> bool:
        return self._is_over()

    def _is_over(self) -> bool:
        enough = self._row_limit is not None and self._num_passed_in_prefix >= self._row_limit
        return enough or self._num_open == 0

    def evaluations(self) -> list[tuple[int, int, int]]:
        counts = self._evaluated.tolist()
        return [
            (f.call, num_rows, num_null)
            for f, (num_rows, num_null) in zip(self._filters, counts, strict=True)
        ]

    def _advance(self, rows: Int64s, answered: int | None = None) -> list[Stop]:
        """Moves rows on as far as answers reach; returns those that stop at questions that nobody asked.

        Args:
            rows: undecided rows.
            answered: the filter whose answer they waited for.
        """
        stops = []
        for place in (*(() if answered is None else (answered,)), *self._order.sequence):
            if not len(rows):
                break
            filter_ = self._filters[place]
            answers = self._answers[filter_.call]
            goes_on = self._has_passed[place, rows]
            is_here = ~goes_on
            here = rows[is_here]
            keys = filter_.keys[here]
            self._at[here] = place
            if place in self._gates:
                self._gates[place].arrived(here)
            is_null = keys < 0
            is_known = ~is_null
            is_known[is_known] = answers.is_answered(keys[is_known])
            passes = is_known.copy()
            passes[is_known] = answers.truth[keys[is_known]] == filter_.passing
            waits = ~is_null & ~is_known
            self._evaluated[place] += (
                len(here) - int(np.count_nonzero(waits)),
                int(np.count_nonzero(is_null)),
            )
            self._decide(here[~waits & ~passes], passed=False)
            self._has_passed[place, here[passes]] = True
            unasked = here[waits]
            unasked = unasked[~answers.asked[keys[waits]]]
            if len(unasked):
                stops.append((place, unasked))
            goes_on[is_here] = passes
            rows = rows[goes_on]
        self._decide(rows, passed=True)
        return stops

    def _decide(self, rows: Int64s, *, passed: bool) -> None:
        self._decided[rows] = True
        self._passed[rows] = passed
        self._num_open -= len(rows)
        for gate in self._gates.values() if not passed else ():
            gate.decided(rows)

    def _extend_prefix(self) -> None:
        """Counts passing rows in front of the first row that is undecided."""
        if self._row_limit is None:
            return
        step = 4096
        while self._prefix < len(self._decided):
            window = slice(self._prefix, self._prefix + step)
            undecided = np.flatnonzero(~self._decided[window])
            stop = self._prefix + (int(undecided[0]) if len(undecided) else step)
            self._num_passed_in_prefix += int(np.count_nonzero(self._passed[self._prefix : stop]))
            self._prefix = min(stop, len(self._decided))
            if len(undecided):
                break

    def _released(self, rows: Int64s) -> Int64s:
        """Documents of rows just decided that nobody reads from now on."""
        if not len(rows):
            return _NOTHING
        handles = self._handles(rows[~self._passed[rows]] if self._keeps_passed else rows)
        np.subtract.at(self._uses, handles, 1)
        handles = distinct(handles)
        unused: Int64s = handles[self._uses[handles] == 0]
        return unused

    def _handles(self, rows: Int64s) -> Int64s:
        """Documents of some rows, one for each row that reads it."""
        if not self._documents:
            return _NOTHING
        handles = np.concatenate([column[rows] for column in self._documents]).astype(np.int64)
        return handles[handles >= 0]
