"""The scheduler on the rolling-hash model: no wrong read, integrity after every step, all pages back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.cost.work import Work
from quail.execution.requests import Document, Request
from quail.execution.scheduler import Scheduler
from quail.kv.pages import PageArena
from quail.kv.retention import RetentionPool
from tests.engine.driver import Driver, ids_of, smallest_arena
from tests.engine.hash_model import HashModel, state_of


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_questions", [1, 2, 3])
def test_every_pair_of_lengths_on_the_tightest_arena(num_questions, depth):
    rng = np.random.default_rng(num_questions)
    suffixes = [ids_of(rng, length) for length in (3, 18, 1)[:num_questions]]
    for first, second in itertools.product(range(0, 41), range(-1, 41)):
        documents = [ids_of(rng, length) for length in (first, second) if length >= 0]
        budget = (7, 19, 64)[(first + second) % 3]
        pages = smallest_arena(documents, suffixes, budget)
        driver = Driver(documents, suffixes, num_pages=pages, budget=budget, depth=depth)
        driver.run()
        assert len(driver.answers) == len(documents) * num_questions, f"lengths {first}, {second}"
        assert not driver.failures


cases = st.tuples(
    st.lists(st.integers(0, 70), min_size=1, max_size=9),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 90),
    st.integers(0, 12),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)


@settings(max_examples=1000, deadline=None)
@given(cases)
def test_random_corpora_never_read_wrong_kv(case):
    lengths, suffix_lengths, budget, spare_pages, seed, depth = case
    rng = np.random.default_rng(seed)
    documents = [ids_of(rng, n, vocab=3) for n in lengths]
    suffixes = [ids_of(rng, n, vocab=3) for n in suffix_lengths]
    passing = rng.random((len(documents), len(suffixes))) < 0.7
    pages = smallest_arena(documents, suffixes, budget) + spare_pages
    driver = Driver(
        documents,
        suffixes,
        num_pages=pages,
        budget=budget,
        passes=lambda d, q: bool(passing[d, q]),
        depth=depth,
    )
    driver.run()
    expected = {(d, q) for d in range(len(documents)) for q in range(len(suffixes)) if passing[d, :q].all()}
    assert set(driver.answers) == expected
    assert not driver.failures


def test_a_single_question_writes_no_kv_unless_it_spans_passes():
    rng = np.random.default_rng(0)
    documents = [ids_of(rng, n) for n in (10, 20, 30)]
    driver = Driver(documents, [ids_of(rng, 5)], num_pages=20, budget=64)
    driver.run()
    assert driver.arena.peak_used_pages == 0
    driver = Driver([*documents, ids_of(rng, 100)], [ids_of(rng, 5)], num_pages=20, budget=64)
    driver.run()
    assert driver.arena.peak_used_pages == 7


def test_the_second_question_of_a_thousand_documents_computes_only_itself():
    rng = np.random.default_rng(1)
    documents = [ids_of(rng, 300) for _ in range(1000)]
    driver = Driver(documents, [ids_of(rng, 30), ids_of(rng, 50)], num_pages=400, budget=4096)
    driver.run()
    ledger = driver.scheduler.ledger
    assert ledger.computed == 1000 * (300 + 30) + 1000 * 50
    assert ledger.naive == 1000 * (300 + 30) + 1000 * 350
    assert ledger.reused_rewind == 300_000
    assert ledger.recomputed == 0


def test_two_questions_at_once_share_a_fresh_document_in_one_pass():
    rng = np.random.default_rng(2)
    documents, suffixes = [ids_of(rng, 33)], [ids_of(rng, 4), ids_of(rng, 6), ids_of(rng, 2)]
    driver = Driver(documents, suffixes, num_pages=3, budget=64, passes=lambda d, q: False)
    for question in range(3):
        driver.submit(0, question)
    while driver.step():
        pass
    driver.check_end()
    assert len(driver.passes_run) == 1
    assert driver.scheduler.ledger.computed == 33 + 4 + 6 + 2


def test_an_item_larger_than_the_arena_fails_alone():
    rng = np.random.default_rng(3)
    documents = [ids_of(rng, 200), *(ids_of(rng, 20) for _ in range(9))]
    driver = Driver(documents, [ids_of(rng, 5), ids_of(rng, 5)], num_pages=8, budget=64)
    driver.run()
    (failure,) = driver.failures
    assert failure.request.document.name == "row 0"
    assert "200 tokens need 13 KV pages" in failure.reason
    assert "the arena has 8" in failure.reason
    assert {d for d, _ in driver.answers} == set(range(1, 10))


def test_idle_kv_gives_way_and_is_computed_again():
    rng = np.random.default_rng(4)
    arena = PageArena(4)
    pool = RetentionPool(arena, cap_pages=4)
    scheduler = Scheduler(arena, token_budget=64, longest_suffix_tokens=2, pool=pool)
    suffix = ids_of(rng, 2)
    documents = [Document(i, ids_of(rng, 40), keep=True) for i in range(3)]
    for document in documents:
        scheduler.add(document)
        scheduler.submit(Request(document, 0, document.handle, suffix, 40))
    for _ in range(3):
        scheduler.next_pass()
        scheduler.complete()
        arena.check_integrity()
    assert scheduler.next_pass() is None
    assert [d.ids in pool for d in documents] == [False, False, True]
    scheduler.submit(Request(documents[0], 1, 0, suffix, 40))
    scheduler.next_pass()
    scheduler.complete()
    assert scheduler.ledger.recomputed == 40
    assert scheduler.repeated == Work(tokens=40, pairs=40 * 41 / 2)
    scheduler.ledger.check()
    scheduler.release([0, 1, 2])
    assert arena.num_free_pages == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_are_back_after_an_interruption_at_any_step(depth):
    class Stop(Exception):
        pass

    rng = np.random.default_rng(5)
    documents = [ids_of(rng, int(n)) for n in rng.integers(1, 80, 12)]
    suffixes = [ids_of(rng, n) for n in (3, 25, 4)]
    for stop_at in range(60):
        driver = Driver(documents, suffixes, num_pages=9, budget=20, depth=depth)
        count = itertools.count()

        def interrupt(count=count, stop_at=stop_at):
            if next(count) == stop_at:
                raise Stop

        for document in range(len(documents)):
            driver.submit(document, 0)
        try:
            while driver.step(interrupt):
                pass
        except Stop:
            driver.scheduler.abandon()
            driver.lose_passes()
            driver.arena.check_integrity()
        driver.check_end()
    assert next(count) < 60, "the sweep never reached the end of the run"


def test_a_shorter_prefix_reads_the_same_pages():
    rng = np.random.default_rng(6)
    arena = PageArena(10)
    pool = RetentionPool(arena, cap_pages=10)
    scheduler = Scheduler(arena, token_budget=16, longest_suffix_tokens=20, pool=pool)
    document = Document(0, ids_of(rng, 50), keep=True)
    scheduler.add(document)
    model = HashModel(10)
    for stage, (prefix, length) in enumerate([(50, 5), (37, 20), (50, 4), (10, 3)]):
        scheduler.submit(Request(document, stage, 0, ids_of(rng, length), prefix))
    num_answers = 0
    while (planned := scheduler.next_pass()) is not None:
        states = model.forward(planned.chunk)
        scheduler.complete()
        for request, state in zip(planned.answered, states.tolist(), strict=True):
            assert state == state_of(np.concatenate([document.ids[: request.prefix_tokens], request.suffix]))
            num_answers += 1
    assert num_answers == 4
    scheduler.ledger.check()
    assert scheduler.ledger.recomputed == 13
    scheduler.release([0])
    assert arena.num_free_pages == 10
