"""The retention pool evicts by priority and never keeps more than its cap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.kv.pages import PageArena, pages_for
from quail.kv.retention import RetentionPool, cap_pages


def ids(number: int, length: int) -> np.ndarray:
    return np.full(length, number, dtype=np.int32)


def put(arena: PageArena, pool: RetentionPool, number: int, length: int, probability: float) -> None:
    table = arena.open(number, length)
    table.append(length)
    pool.put(ids(number, length), table, probability)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.1, 0.5, 1.0])), min_size=1, max_size=15),
    st.integers(0, 12),
)
def test_evictions_follow_the_priority(entries, cap):
    arena = PageArena(100)
    pool = RetentionPool(arena, cap, recompute_seconds=lambda n: n**1.5)
    kept: dict[int, tuple[float, int, int]] = {}
    for number, (length, probability) in enumerate(entries):
        put(arena, pool, number, length, probability)
        kept[number] = (probability * length**1.5 / pages_for(length), number, pages_for(length))
        while sum(pages for _, _, pages in kept.values()) > cap:
            del kept[min(kept, key=lambda n: kept[n][:2])]
        arena.check_integrity()
        assert arena.num_retained_pages <= cap
        assert {n for n, (length, _) in enumerate(entries[: number + 1]) if ids(n, length) in pool} == set(
            kept
        )
    pool.clear()
    assert arena.num_free_pages == 100


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(17, 80),
            st.booleans(),
            st.sampled_from([0.1, 0.5, 1.0]),
            st.integers(0, 9),
            st.booleans(),
        ),
        min_size=2,
        max_size=20,
    )
)
def test_the_lowest_priority_goes_first_also_where_pages_are_shared_and_expectations_change(steps):
    arena = PageArena(200)
    pool = RetentionPool(arena, 200, recompute_seconds=lambda n: n**1.5)
    documents: dict[int, np.ndarray] = {}
    lender = None
    for number, (length, borrows, probability, other, evicts) in enumerate(steps):
        borrowed = lender.pages[:1] if borrows and lender is not None and not lender.closed else []
        lender = arena.open(number, length, borrowed=borrowed)
        lender.append(length - lender.num_tokens)
        documents[number] = ids(number, length)
        pool.put(documents[number], lender, probability)
        pool.expect(documents[other % (number + 1)], probability)
        if evicts:
            present = [n for n, each in documents.items() if each in pool]
            least = min(present, key=lambda n: (pool.priority(documents[n]), n))
            pool.make_room(arena.num_free_pages + 1)
            assert documents[least] not in pool
        arena.check_integrity()


def test_taking_back_gives_the_same_pages_and_forgets_the_entry():
    arena = PageArena(10)
    pool = RetentionPool(arena, 10)
    table = arena.open("a", 40)
    table.append(40)
    pages = list(table.pages)
    pool.put(ids(1, 40), table, 1.0)
    with pytest.raises(ValueError, match="closed already"):
        arena.close(table)
    assert pool.take(ids(2, 40)) is None
    assert pool.take(ids(1, 40)).pages == pages
    assert pool.take(ids(1, 40)) is None
    arena.close(table)
    arena.check_integrity()


def test_make_room_evicts_no_more_than_needed():
    arena = PageArena(6)
    pool = RetentionPool(arena, 6)
    for number in range(3):
        put(arena, pool, number, 32, 0.1 + number)
    assert pool.make_room(2)
    assert [ids(n, 32) in pool for n in range(3)] == [False, True, True]
    assert not pool.make_room(7)


def test_the_cap_leaves_two_passes():
    assert cap_pages(1000, 2048, 16) == 1000 - 256
    assert cap_pages(100, 2048, 16) == 0
    assert cap_pages(257, 2041, 16) == 1


def test_shared_pages_count_once():
    arena = PageArena(10)
    pool = RetentionPool(arena, 10)
    first = arena.open("first", 48)
    first.append(48)
    second = arena.open("second", 48, borrowed=first.pages[:2])
    second.append(16)
    pool.put(ids(1, 48), first, 1.0)
    pool.put(ids(2, 48), second, 1.0)
    assert arena.num_retained_pages == 4
    assert pool.priority(ids(1, 48)) == 48.0
    pool.clear()
    assert arena.num_free_pages == 10
