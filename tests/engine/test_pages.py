"""Page accounting: all or nothing, no page owned twice, everything comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quail.kv.pages import PageArena, pages_for


def test_short_of_pages_changes_nothing():
    arena = PageArena(3)
    table = arena.open("a", 32)
    assert arena.open("b", 17) is None
    assert arena.num_free_pages == 1
    arena.close(table)
    assert arena.num_free_pages == 3


def test_closing_twice_raises():
    arena = PageArena(2)
    table = arena.open("a", 20)
    arena.close(table)
    with pytest.raises(ValueError, match="closed already"):
        arena.close(table)
    arena.check_integrity()


def test_rewind_past_the_end_raises_and_to_zero_keeps_nothing():
    arena = PageArena(4)
    table = arena.open("a", 40)
    first = table.append(33)
    with pytest.raises(ValueError, match="33 tokens to 34"):
        table.rewind(34)
    table.rewind(0)
    assert (table.append(33) == first).all()


def test_releasing_a_page_that_is_not_held_raises():
    arena = PageArena(2)
    table = arena.open("a", 16)
    with pytest.raises(ValueError, match="is not held"):
        arena.release(table.pages)


def test_borrowed_pages_cannot_be_written_or_rewound_into():
    arena = PageArena(4)
    owner = arena.open("owner", 32)
    owner.append(32)
    child = arena.open("child", 40, borrowed=owner.pages[:1])
    with pytest.raises(ValueError):
        child.rewind(15)
    assert set(child.append(24).tolist()).isdisjoint(range(owner.pages[0] * 16, owner.pages[0] * 16 + 16))
    arena.close(owner)
    assert arena.num_free_pages == 1
    assert arena.num_live_pages == 3
    arena.check_integrity()


def test_held_pages_outlive_their_table_and_count_once():
    arena = PageArena(4)
    table = arena.open("a", 48)
    other = arena.open("b", 40, borrowed=table.pages[:2])
    arena.hold(table.pages[:2])
    arena.close(table)
    arena.close(other)
    assert (arena.num_live_pages, arena.num_retained_pages, arena.num_free_pages) == (0, 2, 2)
    arena.check_integrity()


class ArenaMachine(RuleBasedStateMachine):
    """Random calls against a model that only counts holders."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = PageArena(12)
        self.tables, self.held = [], []

    @rule(tokens=st.integers(0, 80))
    def open(self, tokens):
        free = self.arena.num_free_pages
        table = self.arena.open("t", tokens)
        assert (table is None) == (pages_for(tokens) > free)
        if table is not None:
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 80))
    def borrow(self, data, tokens):
        parent = data.draw(st.sampled_from(self.tables))
        whole = data.draw(st.integers(0, parent.num_tokens // 16))
        table = self.arena.open("child", tokens, borrowed=parent.pages[:whole])
        if table is not None:
            assert table.num_tokens == whole * 16
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def append_and_rewind(self, data):
        table = data.draw(st.sampled_from(self.tables))
        slots = table.append(data.draw(st.integers(0, table.capacity_tokens - table.num_tokens)))
        assert len(set(slots.tolist())) == len(slots)
        table.rewind(data.draw(st.integers(table.num_borrowed_pages * 16, table.num_tokens)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.arena.close(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def trim(self, data):
        self.arena.trim(data.draw(st.sampled_from(self.tables)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def hold(self, data):
        pages = list(data.draw(st.sampled_from(self.tables)).pages)
        self.arena.hold(pages)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule()
    def release(self):
        self.arena.release(self.held.pop())

    @invariant()
    def balanced(self):
        self.arena.check_integrity()
        used = {page for table in self.tables for page in table.pages} | {
            p for pages in self.held for p in pages
        }
        assert self.arena.num_free_pages == 12 - len(used)

    def teardown(self):
        for table in self.tables:
            self.arena.close(table)
        for pages in self.held:
            self.arena.release(pages)
        assert self.arena.num_free_pages == 12


ArenaMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestArena = ArenaMachine.TestCase
