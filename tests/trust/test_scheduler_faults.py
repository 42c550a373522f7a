"""The scheduler with failures between any two of its steps: pages are back, and no answer read wrong KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from quail.cost.work import Work
from quail.execution.label_tree import LabelTree
from quail.execution.requests import Document, Failure, Request
from quail.execution.scheduler import Scheduler
from quail.kv.pages import PageArena
from quail.kv.retention import RetentionPool
from tests.engine.driver import Driver, ids_of
from tests.engine.hash_model import HashModel, state_of
from tests.engine.test_joins import JoinDriver
from tests.trust.faults import every, fail_in_pages, only, raising, refuse_pages

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
SHARING = pytest.mark.parametrize("shares", [False, True], ids=["apart", "sharing"])


def corpus(seed: int, *, num: int = 14) -> list[np.ndarray]:
    """Documents of 1 to 90 tokens; every second begins as the first does."""
    rng = np.random.default_rng(seed)
    common = ids_of(rng, 40)
    documents = [ids_of(rng, int(n)) for n in rng.integers(1, 90, num)]
    return [np.concatenate([common[:34], d]) if number % 2 else d for number, d in enumerate(documents)]


def chain(seed: int, *, budget: int, pages: int, shares: bool, depth: int = 1) -> Driver:
    rng = np.random.default_rng(seed)
    suffixes = [ids_of(rng, n) for n in (3, 25, 4)]
    return Driver(
        corpus(seed),
        suffixes,
        num_pages=pages,
        budget=budget,
        shares=shares,
        passes=lambda d, q: (d + q) % 3 > 0,
        depth=depth,
    )


def expected_pairs(driver: Driver) -> set[tuple[int, int]]:
    pairs = set()
    for document in range(len(driver.documents)):
        for question in range(len(driver.suffixes)):
            pairs.add((document, question))
            if not driver.passes(document, question):
                break
    return pairs


@SHARING
@DEPTHS
@pytest.mark.parametrize("budget", [20, 64, 512])
@pytest.mark.parametrize("step", [2, 3, 5, 7])
def test_an_arena_that_refuses_now_and_then(
    monkeypatch: pytest.MonkeyPatch, step: int, budget: int, shares: bool, depth: int
) -> None:
    refuse_pages(monkeypatch, every(step))
    driver = chain(step, budget=budget, pages=30, shares=shares, depth=depth)
    driver.run()
    lost = {(f.request.document.handle, f.request.stage) for f in driver.failures}
    reached = expected_pairs(driver)
    for document, question in lost:
        reached -= {(document, later) for later in range(question, 3)}
    assert set(driver.answers) == reached


@SHARING
@DEPTHS
@pytest.mark.parametrize("number", range(1, 15))
def test_an_arena_that_raises_at_any_call(
    monkeypatch: pytest.MonkeyPatch, number: int, shares: bool, depth: int
) -> None:
    driver = chain(number, budget=48, pages=14, shares=shares, depth=depth)
    with monkeypatch.context() as patch:
        faults = fail_in_pages(patch, only(number), raising(MemoryError))
        driver.submit_all()
        try:
            while driver.step():
                pass
        except MemoryError:
            driver.scheduler.abandon()
        assert any(fault.num_failed for fault in faults)
    driver.arena.check_integrity()
    assert driver.arena.num_free_pages == driver.arena.num_pages
    driver.scheduler.ledger.check()


@SHARING
@DEPTHS
@pytest.mark.parametrize("budget", [96, 200, 4096])
def test_a_pass_that_does_not_fit_is_run_again_in_smaller_ones(budget: int, shares: bool, depth: int) -> None:
    stop_at, reached_end = 0, False
    while not reached_end:
        driver = chain(stop_at, budget=budget, pages=40, shares=shares, depth=depth)
        reached_end = not run_with_lost_pass(driver, lambda number, stop_at=stop_at: number == stop_at)
        driver.check_end()
        assert not driver.failures
        assert set(driver.answers) == expected_pairs(driver)
        check_work(driver, shares=shares)
        stop_at += 1
    assert stop_at > 2


@SHARING
@DEPTHS
def test_every_second_pass_that_does_not_fit(shares: bool, depth: int) -> None:
    driver = chain(3, budget=4096, pages=40, shares=shares, depth=depth)
    assert run_with_lost_pass(driver, lambda number: number % 2 == 0 and number < 12)
    driver.check_end()
    assert set(driver.answers) == expected_pairs(driver)
    check_work(driver, shares=shares)


def check_work(driver: Driver, *, shares: bool) -> None:
    """What passes that ran computed, less what is booked as computed again, is each token once."""
    scheduler = driver.scheduler
    needed = sum(scheduler.works.values(), Work()) + scheduler.repeated * -1
    questions = sum(len(driver.suffixes[question]) for _, question in driver.answers)
    once = sum(map(len, driver.documents)) + questions
    assert questions < needed.tokens <= once if shares else needed.tokens == once
    assert scheduler.ledger.recomputed <= scheduler.repeated.tokens


@SHARING
@DEPTHS
@pytest.mark.parametrize("ends", ["start_over", "finish", "abandon"])
def test_what_never_ran_is_not_computed_again(ends: str, shares: bool, depth: int) -> None:
    """The first passes do not fit: they computed nothing, so nothing of them is lost."""
    driver = chain(5, budget=200, pages=400, shares=shares, depth=depth)
    driver.submit_all()
    for _ in range(depth - 1):
        driver.step()
    with pytest.raises(MemoryError):
        driver.step(raising(MemoryError))
    assert driver.scheduler.num_passes == depth
    if ends != "start_over":
        getattr(driver.scheduler, ends)()
        assert driver.scheduler.repeated == Work()
        assert not driver.scheduler.works
        return
    driver.scheduler.start_over(driver.lose_passes() // 2)
    while driver.step():
        pass
    driver.check_end()
    assert driver.scheduler.repeated == Work()
    assert driver.scheduler.ledger.recomputed == 0
    check_work(driver, shares=shares)


def run_with_lost_pass(driver: Driver, is_lost: Callable[[int], bool]) -> bool:
    """Runs to the end, losing some passes; whether any was lost."""
    count = itertools.count()
    lost = False

    def interrupt() -> None:
        if is_lost(next(count)):
            raise MemoryError

    driver.submit_all()
    while True:
        try:
            if not driver.step(interrupt):
                return lost
        except MemoryError:
            lost = True
            driver.scheduler.start_over(max(30, driver.lose_passes() // 2))
            driver.arena.check_integrity()
            assert driver.arena.num_free_pages == driver.arena.num_pages, "a run that begins anew holds pages"


# -- joins, with KV that is retained


def join(seed: int, *, budget: int, pool: int = 12, depth: int = 1) -> JoinDriver:
    rng = np.random.default_rng(seed)
    anchors = [ids_of(rng, int(n), vocab=3) for n in rng.integers(1, 60, 6)]
    frames = [ids_of(rng, 9), ids_of(rng, 5)]
    partners = [ids_of(rng, int(n)) for n in rng.integers(1, 40, 5)]
    return JoinDriver(
        anchors,
        frames,
        partners,
        pages=20,
        budget=budget,
        pool_pages=pool,
        after=True,
        wave=2,
        depth=depth,
    )


@DEPTHS
@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("number", range(1, 16))
def test_joins_go_on_after_an_arena_that_raised(
    monkeypatch: pytest.MonkeyPatch, number: int, budget: int, depth: int
) -> None:
    driver = join(number, budget=budget, depth=depth)
    with monkeypatch.context() as patch:
        fail_in_pages(patch, only(number), raising(MemoryError))
        try:
            for stage in (0, 1):
                driver.run_stage(stage, keep=stage == 0)
        except MemoryError:
            pass
        driver.scheduler.abandon()
        driver.in_flight.clear()
    driver.arena.check_integrity()
    assert driver.arena.num_live_pages == 0
    driver.answers.clear()
    driver.new_scheduler()  # the next query, on what the pool still has
    for stage in (0, 1):
        driver.run_stage(stage, keep=stage == 0)
    driver.finish()
    assert len(driver.answers) == 6 * 2 * 5


@DEPTHS
@pytest.mark.parametrize("lost_at", range(14))
def test_joins_run_again_in_smaller_passes(lost_at: int, depth: int) -> None:
    driver = join(lost_at, budget=256, depth=depth)
    forward, count, drain = driver.model.forward, itertools.count(), driver.drain

    def failing(chunk: object) -> np.ndarray:
        if next(count) == lost_at:
            raise MemoryError
        return forward(chunk)

    def drain_again() -> None:
        try:
            drain()
        except MemoryError:
            driver.in_flight.clear()
            driver.scheduler.start_over(64)
            driver.arena.check_integrity()
            drain()

    driver.model.forward, driver.drain = failing, drain_again  # type: ignore[method-assign]
    for stage in (0, 1):
        driver.run_stage(stage, keep=stage == 0)
    driver.scheduler.finish()
    driver.scheduler.ledger.check()
    assert len(driver.answers) == 6 * 2 * 5
    assert driver.arena.num_live_pages == 0
    assert driver.scheduler.token_budget == (64 if next(count) > lost_at + 1 else 256)


# -- label trees


@pytest.mark.parametrize("lost_at", range(6))
def test_label_trees_run_again_in_smaller_passes(lost_at: int) -> None:
    rng = np.random.default_rng(lost_at)
    tree = LabelTree.build([[5, 6, 7], [5, 6], [5, 8], [9]], 0)
    arena = PageArena(30)
    scheduler = Scheduler(
        arena, token_budget=256, longest_suffix_tokens=6 + tree.num_tokens, pool=RetentionPool(arena, 8)
    )
    model = HashModel(30)
    expected = {}
    for number in range(5):
        document = Document(number, ids_of(rng, int(rng.integers(1, 70))), keep=True)
        scheduler.add(document)
        for stage in range(3):
            suffix = ids_of(rng, 6)
            scheduler.submit(Request(document, stage, 0, suffix, len(document.ids), branches=tree.branches))
            paths = [np.concatenate([document.ids, suffix])]
            for branch in tree.branches:
                paths.append(np.concatenate([paths[branch.parent + 1], branch.ids]))
            expected[number, stage] = [state_of(path) for path in paths]
    for number in itertools.count():
        planned = scheduler.next_pass()
        if planned is None:
            break
        assert not isinstance(planned, Failure)
        if number == lost_at:
            scheduler.start_over(32)
            continue
        states = model.forward(planned.chunk)
        scheduler.complete()
        arena.check_integrity()
        for request, first in zip(planned.answered, planned.first_reads, strict=True):
            found = states[first : first + 1 + len(tree.branches)].tolist()
            assert found == expected.pop((request.document.handle, request.stage))
    assert not expected
    scheduler.finish()
    scheduler.ledger.check()
    assert arena.num_live_pages == 0
