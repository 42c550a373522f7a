"""The pilot of a chain: a few rows of which filters are asked before the rest, to see what each lets pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quail.execution.answers import CallAnswers, first_places
from quail.execution.asks import Int64s
from quail.planner.observed_order import pilot_rows


@dataclass(frozen=True)
class Filter:
    """One filter of a chain.

    Attributes:
        call: the call.
        keys: (rows,) key of each row's question, -1 where an argument is NULL.
        passing: the truth that lets a row pass: 1, or 0 under NOT.
        same_document: places of the chain's other filters that read the same document.
        is_paired: whether it is about pairs of documents.
        anchor: argument whose document's KV is kept.
    """

    call: int
    keys: Int64s
    passing: int
    same_document: tuple[int, ...] = ()
    is_paired: bool = False
    anchor: int = 0


Stop = tuple[int, Int64s]
"""Place of a filter, and rows that wait for its answer."""


class Pilot:
    """Rows of which several filters are asked, those over one document of the same rows.

    Questions about pairs are not asked: their selectivity shows when they have their turn. Most often filters
    make them fewer first, and a pair asked in vain costs a partner.

    Args:
        answers: the answers by call.
        filters: those to be observed, by their place.
        rows: all rows that are undecided, in their order.
        row_limit: passing rows that suffice; None for all.

    Attributes:
        num_rows: rows drawn, of each document expression.
    """

    def __init__(
        self,
        answers: Sequence[CallAnswers],
        filters: Mapping[int, Filter],
        rows: Int64s,
        row_limit: int | None,
    ) -> None:
        self._answers, self._filters = answers, filters
        self.num_rows = 0
        self._waiting: list[tuple[list[int], Int64s]] = []
        left = [place for place, filter_ in filters.items() if not filter_.is_paired]
        while left:
            places = [place for place in left if place in (left[0], *filters[left[0]].same_document)]
            left = [place for place in left if place not in places]
            keys = filters[places[0]].keys[rows]
            distinct = rows[keys >= 0][first_places(keys[keys >= 0])]
            drawn = distinct[pilot_rows(len(distinct), len(places), row_limit)]
            self.num_rows = max(self.num_rows, len(drawn))
            self._waiting.append((places, drawn))
        self._questions = [
            (filters[place].call, self._keys(place, drawn))
            for places, drawn in self._waiting
            for place in places
        ]

    @property
    def is_answered(self) -> bool:
        """Whether all its questions have their answers."""
        return all(self._answers[call].is_answered(keys).all() for call, keys in self._questions)

    def take(self, limit: int) -> list[Stop]:
        """The filters of the next rows, as many rows as have about `limit` questions that nobody asked."""
        stops: list[Stop] = []
        while self._waiting and not stops:
            places, rows = self._waiting.pop(0)
            num_rows = max(1, limit // len(places))
            if len(rows) > num_rows:
                self._waiting.insert(0, (places, rows[num_rows:]))
            for place in places:
                here = rows[:num_rows]
                here = here[self._filters[place].keys[here] >= 0]
                here = here[~self._answers[self._filters[place].call].asked[self._keys(place, here)]]
                if len(here):
                    stops.append((place, here))
        return stops

    def _keys(self, place: int, rows: Int64s) -> Int64s:
        keys = self._filters[place].keys[rows]
        return keys[keys >= 0]
