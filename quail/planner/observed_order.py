"""In which order filters are asked once their selectivities are observed, and on which rows that is done.

The rule is that of `order_filters`: expected tokens, filters independent of each other. It knows more: the
selectivities of the run's own answers, and how long the documents are where filters read different ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quail.planner.join_order import Cost, JoinPlan, JoinQuery, order_joins

SMALLEST_PILOT = 16
LARGEST_PILOT = 64
ROWS_A_QUESTION = 4
"""Rows of the table for each question of the pilot, at least.

If nothing is known of the selectivities of two filters, knowing their order saves a sixth of a question a
row, and a pilot row asks about half a question more than it would have; with more filters about all of them
but two more, to save less than one a row. So the pilot asks no more questions than a quarter of the rows,
which costs less than it is likely to save. Its answers count like all others.
"""

MOST_EXACT_FILTERS = 6
"""With more filters, those over different documents are ranked as if they were over the same."""


class OrderWork(Protocol):
    """What it takes to ask some filters one after another, for given shares of rows that pass each."""

    def cheapest(self, selectivities: Sequence[float]) -> tuple[int, ...]:
        """The order that takes least; of equals the one that is planned."""

    def expected(self, sequence: Sequence[int], selectivities: Sequence[float]) -> float:
        """What an order takes, in any unit."""


@dataclass(frozen=True)
class FilterWork:
    """Tokens that filters of one row take.

    Attributes:
        question_tokens: (filters,) tokens of each question.
        documents: (filters,) equal numbers for filters that read the same document.
        document_tokens: (filters,) mean tokens of the document, computed by the first filter that reads it.
    """

    question_tokens: tuple[float, ...]
    documents: tuple[int, ...]
    document_tokens: tuple[float, ...]

    def cheapest(self, selectivities: Sequence[float]) -> tuple[int, ...]:
        """By trying all sets of filters asked before, or by cost / (1 - selectivity)."""
        places = range(len(self.question_tokens))
        if len(set(self.documents)) > 1 and len(places) <= MOST_EXACT_FILTERS:
            return self._cheapest_of_all(selectivities)
        ratios = [self.question_tokens[i] / max(1e-6, 1 - selectivities[i]) for i in places]
        return tuple(sorted(places, key=ratios.__getitem__))

    def expected(self, sequence: Sequence[int], selectivities: Sequence[float]) -> float:
        """Tokens a row."""
        total, share = 0.0, 1.0
        asked: frozenset[int] = frozenset()
        for place in sequence:
            total += share * self._tokens(place, asked)
            share *= selectivities[place]
            asked |= {place}
        return total

    def _tokens(self, place: int, asked: frozenset[int]) -> float:
        """Tokens of one filter behind others; a document that all filters read is the same in any order."""
        is_there = len(set(self.documents)) == 1 or any(
            self.documents[place] == self.documents[other] for other in asked
        )
        return self.question_tokens[place] + (0.0 if is_there else self.document_tokens[place])

    def _cheapest_of_all(self, selectivities: Sequence[float]) -> tuple[int, ...]:
        num_filters = len(self.question_tokens)

        @functools.cache
        def best(asked: frozenset[int]) -> tuple[float, tuple[int, ...]]:
            found: tuple[float, tuple[int, ...]] = (math.inf, ())
            for place in range(num_filters):
                if place not in asked:
                    behind, following = best(asked | {place})
                    tokens = self._tokens(place, asked) + selectivities[place] * behind
                    if tokens < found[0]:
                        found = tokens, (place, *following)
            return found if len(asked) < num_filters else (0.0, ())

        return best(frozenset())[1]


@dataclass(frozen=True)
class JoinWork:
    """Work of filters and joins that stand together, over whole tables.

    Attributes:
        query: the operators in the order that is planned, their anchors chosen.
        cost: of some work.
    """

    query: JoinQuery
    cost: Cost

    def cheapest(self, selectivities: Sequence[float]) -> tuple[int, ...]:
        """By `order_joins`."""
        return tuple(step.operator for step in self._plan(range(len(selectivities)), selectivities).steps)

    def expected(self, sequence: Sequence[int], selectivities: Sequence[float]) -> float:
        """Cost of all documents and pairs."""
        return self._plan(sequence, selectivities, "as_written").cost

    def _plan(self, sequence: Sequence[int], selectivities: Sequence[float], order: str = "auto") -> JoinPlan:
        operators = [
            replace(self.query.operators[place], selectivity=selectivities[place]) for place in sequence
        ]
        query = replace(self.query, operators=tuple(operators))
        return order_joins(query, self.cost, order, with_runner_up=False)


def pilot_rows(num_rows: int, num_filters: int, row_limit: int | None = None) -> npt.NDArray[np.int64]:
    """Positions of the rows on which selectivities are observed first.

    The square root of their number, 16 to 64 of them: the error of a share falls with the root of the pilot,
    and what an error costs grows with the table. One is drawn from each of as many equal parts, with a fixed
    seed: a table that is sorted, or that repeats itself, misleads neither. Where a row limit may end the run
    early, they are the first rows, no more than the limit wants: those are read in any case, and each row
    that counts is asked all filters.

    Args:
        num_rows: of the table.
        num_filters: that are asked of each row drawn.
        row_limit: passing rows that suffice; None for all.
    """
    size = min(LARGEST_PILOT, max(SMALLEST_PILOT, math.isqrt(num_rows)))
    size = min(size, num_rows // (ROWS_A_QUESTION * num_filters))
    if row_limit is not None:
        size = min(size, row_limit)
    if size < SMALLEST_PILOT:
        return np.zeros(0, dtype=np.int64)
    if row_limit is not None:
        return np.arange(size, dtype=np.int64)
    bounds = np.arange(size + 1, dtype=np.int64) * num_rows // size
    return np.random.default_rng(0).integers(bounds[:-1], bounds[1:])
