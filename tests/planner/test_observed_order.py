"""Orders of filters for given selectivities, and which rows a pilot draws."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quail.planner.join_order import FilterOperator, JoinOperator, JoinQuery, Relation
from quail.planner.observed_order import (
    LARGEST_PILOT,
    ROWS_A_QUESTION,
    SMALLEST_PILOT,
    FilterWork,
    JoinWork,
    pilot_rows,
)

shares = st.floats(0.0, 1.0)


@st.composite
def filter_works(draw) -> tuple[FilterWork, list[float]]:
    count = draw(st.integers(1, 5))
    documents = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    lengths = draw(st.lists(st.floats(0, 500), min_size=3, max_size=3))
    tokens = draw(st.lists(st.floats(1, 50), min_size=count, max_size=count))
    work = FilterWork(tuple(tokens), tuple(documents), tuple(lengths[each] for each in documents))
    return work, draw(st.lists(shares, min_size=count, max_size=count))


@settings(max_examples=200, deadline=None)
@given(filter_works())
def test_no_order_takes_less_than_the_cheapest(case):
    work, selectivities = case
    best = work.cheapest(selectivities)
    assert sorted(best) == list(range(len(selectivities)))
    least = min(work.expected(order, selectivities) for order in permutations(best))
    assert work.expected(best, selectivities) == pytest.approx(least)


def test_a_short_document_is_read_before_a_long_one():
    work = FilterWork((10.0, 10.0), (0, 1), (1000.0, 10.0))
    assert work.cheapest([0.5, 0.5]) == (1, 0)
    assert work.cheapest([0.001, 0.999]) == (0, 1)
    same = FilterWork((10.0, 10.0), (0, 0), (1000.0, 1000.0))
    assert same.cheapest([0.5, 0.5]) == (0, 1)


def test_joins_wait_for_the_filters_that_leave_few():
    relations = (Relation(100, 50), Relation(100, 5))
    join = JoinOperator((0, 1), 5, 5, anchors=(0,))
    work = JoinWork(
        JoinQuery(relations, (join, FilterOperator(0, 5), FilterOperator(1, 5))), lambda w: w.tokens
    )
    for selectivities in ([0.5, 0.5, 0.01], [0.5, 0.01, 0.99], [0.0, 1.0, 1.0]):
        best = work.cheapest(selectivities)
        costs = [work.expected(order, selectivities) for order in permutations(range(3))]
        assert work.expected(best, selectivities) == pytest.approx(min(costs))
    assert work.cheapest([0.5, 0.5, 0.01])[-1] == 0


@given(st.integers(0, 5000), st.integers(1, 10))
@example(81, 1)
def test_a_pilot_draws_one_row_from_each_part(num_rows, num_filters):
    rows = pilot_rows(num_rows, num_filters)
    assert (len(rows) > 0) == (num_rows >= ROWS_A_QUESTION * SMALLEST_PILOT * num_filters)
    if len(rows):
        assert SMALLEST_PILOT <= len(rows) <= LARGEST_PILOT
        assert len(rows) * num_filters * ROWS_A_QUESTION <= num_rows
        parts = np.linspace(0, num_rows, len(rows) + 1)
        assert (parts[:-1] - 1 < rows).all()
        assert (rows < parts[1:]).all()
        assert (np.diff(rows) > 0).all()
        assert np.array_equal(rows, pilot_rows(num_rows, num_filters))


def test_a_pilot_of_a_large_table_is_small():
    assert [len(pilot_rows(n, 2)) for n in (127, 128, 400, 1000, 10**6)] == [0, 16, 20, 31, 64]
    assert [len(pilot_rows(n, 250)) for n in (15_999, 16_000, 32_000, 10**6)] == [0, 16, 32, 64]


def test_under_a_row_limit_a_pilot_is_the_first_rows():
    assert pilot_rows(10**6, 2, 20).tolist() == list(range(20))
    assert pilot_rows(10**6, 2, 10**5).tolist() == list(range(64))
    assert len(pilot_rows(10**6, 2, SMALLEST_PILOT - 1)) == 0
