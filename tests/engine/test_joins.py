"""Join stages on the rolling-hash model: an anchor and its frame once, then partners."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.execution.requests import Document, Failure, Request
from quail.execution.scheduler import Scheduler
from quail.kv.pages import PageArena, pages_for
from quail.kv.retention import RetentionPool
from tests.engine.driver import ids_of
from tests.engine.hash_model import HashModel, state_of


class JoinDriver:
    """Asks every (anchor, stage, partner); all partners of an anchor at once, `wave` of them at a time."""

    def __init__(
        self, anchors, frames, partners, *, pages, budget, wave=10**9, pool_pages=0, after=False, depth=1
    ):
        self.depth, self.in_flight = depth, deque()
        self.anchors, self.frames, self.partners, self.wave = anchors, frames, partners, wave
        self.arena = PageArena(pages)
        self.model = HashModel(pages)
        self.pool = RetentionPool(self.arena, pool_pages)
        self.budget, self.after = budget, after
        self.answers: dict[tuple[int, int, int], int] = {}
        self.num_passes = 0
        self.new_scheduler()

    def new_scheduler(self):
        self.scheduler = Scheduler(
            self.arena,
            token_budget=self.budget,
            longest_suffix_tokens=0,
            longest_frame_tokens=max(len(f) for f in self.frames),
            pool=self.pool,
            keeps_after_release=self.after,
        )

    def submit(self, anchor: int, stage: int, partners, keep: bool) -> None:
        known = self.scheduler.document(anchor)
        if known is None:
            known = Document(anchor, self.anchors[anchor], name=f"anchor {anchor}")
            self.scheduler.add(known)
        known.keep = keep
        prefix = len(self.anchors[anchor]) + len(self.frames[stage])
        for partner in partners:
            self.scheduler.submit(
                Request(known, stage, partner, self.partners[partner], prefix, self.frames[stage])
            )

    def drain(self) -> None:
        while (planned := self.scheduler.next_pass()) is not None or self.in_flight:
            self.arena.check_integrity()
            assert not isinstance(planned, Failure), planned
            if planned is not None:
                self.in_flight.append(planned)
                if len(self.in_flight) < self.depth:
                    continue
            states = self.model.forward(self.in_flight[0].chunk)
            self.scheduler.complete()
            done = self.in_flight.popleft()
            self.arena.check_integrity()
            self.num_passes += 1
            for request, state in zip(done.answered, states.tolist(), strict=True):
                triple = (request.document.handle, request.stage, request.key)
                assert triple not in self.answers
                self.answers[triple] = state
                parts = [request.document.ids, request.frame, request.suffix]
                assert state == state_of(np.concatenate(parts)), f"{triple} read wrong KV"

    def run_stage(self, stage: int, *, keep: bool) -> None:
        """All pairs of a stage; anchors stay if a later stage reads them."""
        waves = [range(a, len(self.partners))[: self.wave] for a in range(0, len(self.partners), self.wave)]
        for number, wave in enumerate(waves):
            for anchor in range(len(self.anchors)):
                self.submit(anchor, stage, wave, keep or number + 1 < len(waves))
            self.drain()

    def finish(self) -> None:
        self.scheduler.finish()
        self.scheduler.ledger.check()
        self.arena.check_integrity()
        if not self.after:
            assert self.arena.num_free_pages == self.arena.num_pages
        assert self.scheduler.ledger.wasted == 0


def smallest(anchors, frames, partners, budget) -> int:
    longest = max(map(len, partners))
    spanning = longest if longest > budget else 0
    return max(pages_for(len(a) + max(map(len, frames)) + spanning) for a in anchors)


def test_a_join_computes_anchors_and_frames_once_and_partners_once_each():
    rng = np.random.default_rng(0)
    anchors = [ids_of(rng, int(n)) for n in rng.integers(20, 200, 12)]
    partners = [ids_of(rng, int(n)) for n in rng.integers(1, 30, 9)]
    frame = ids_of(rng, 13)
    for budget in (64, 512, 4096):
        driver = JoinDriver(anchors, [frame], partners, pages=400, budget=budget)
        driver.run_stage(0, keep=False)
        driver.finish()
        expected = sum(len(a) + 13 for a in anchors) + 12 * sum(map(len, partners))
        assert driver.scheduler.ledger.computed == expected
        assert len(driver.answers) == 12 * 9


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    lengths,
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(0, 10),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_random_joins_never_read_wrong_kv(anchors, frames, partners, budget, spare, pool, wave, seed, depth):
    rng = np.random.default_rng(seed)
    documents = [[ids_of(rng, n, vocab=3) for n in group] for group in (anchors, frames, partners)]
    pages = smallest(*documents, budget=budget) + spare
    driver = JoinDriver(
        *documents, pages=pages, budget=budget, wave=wave, pool_pages=min(pool, pages), depth=depth
    )
    for stage in range(len(frames)):
        driver.run_stage(stage, keep=stage + 1 < len(frames))
    driver.finish()
    assert len(driver.answers) == len(anchors) * len(frames) * len(partners)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_tiny_join(depth):
    rng = np.random.default_rng(1)
    for number, (a, b, p, q) in enumerate(itertools.product((0, 1, 15, 16, 17), (1, 16), (1, 5), (3, 17))):
        documents = ([ids_of(rng, a), ids_of(rng, b)], [ids_of(rng, 4)], [ids_of(rng, p), ids_of(rng, q)])
        budget = (2, 8, 16, 64)[number % 4]
        driver = JoinDriver(*documents, pages=smallest(*documents, budget=budget), budget=budget, depth=depth)
        driver.run_stage(0, keep=False)
        driver.finish()
        assert len(driver.answers) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_two_stages_at_once_on_one_anchor_do_not_mix_their_frames(depth):
    rng = np.random.default_rng(2)
    anchors, frames = [ids_of(rng, 37)], [ids_of(rng, 5), ids_of(rng, 9)]
    partners = [ids_of(rng, n) for n in (3, 20, 4)]
    driver = JoinDriver(anchors, frames, partners, pages=10, budget=200, depth=depth)
    for stage, some in ((0, [0, 1]), (1, [2, 0]), (0, [2]), (1, [1])):
        driver.submit(0, stage, some, True)
    driver.drain()
    driver.finish()
    assert len(driver.answers) == 6


def test_a_second_join_over_retained_anchors_computes_none_of_them():
    rng = np.random.default_rng(3)
    anchors = [ids_of(rng, 100) for _ in range(20)]
    frames, partners = [ids_of(rng, 10), ids_of(rng, 12)], [ids_of(rng, 8) for _ in range(5)]
    driver = JoinDriver(anchors, frames, partners, pages=400, budget=256, pool_pages=400 - 32)
    driver.run_stage(0, keep=True)
    first = driver.scheduler.ledger.computed
    driver.run_stage(1, keep=False)
    driver.finish()
    assert driver.scheduler.ledger.computed - first == 20 * 12 + 20 * 5 * 8
    assert driver.scheduler.ledger.reused_retained == 20 * 100


@pytest.mark.parametrize("pages", [10, 20, 40, 80, 160])
def test_retention_costs_no_passes(pages):
    rng = np.random.default_rng(4)
    anchors = [ids_of(rng, int(n)) for n in rng.integers(10, 120, 30)]
    frames, partners = [ids_of(rng, 10), ids_of(rng, 12)], [ids_of(rng, 8) for _ in range(3)]
    passes = {}
    for cap in (0, max(0, pages - 8)):
        driver = JoinDriver(anchors, frames, partners, pages=pages, budget=64, pool_pages=cap)
        driver.run_stage(0, keep=True)
        driver.run_stage(1, keep=False)
        driver.finish()
        passes[cap] = driver.num_passes
    assert passes[max(0, pages - 8)] <= 1.2 * passes[0] + 2


def test_a_later_run_finds_what_an_earlier_one_kept():
    rng = np.random.default_rng(5)
    anchors = [ids_of(rng, 50) for _ in range(4)]
    frames, partners = [ids_of(rng, 10)], [ids_of(rng, 8), ids_of(rng, 9)]
    driver = JoinDriver(anchors, frames, partners, pages=60, budget=64, pool_pages=50, after=True)
    driver.run_stage(0, keep=False)
    driver.finish()
    assert len(driver.pool) == 4
    driver.anchors = [*anchors[:3], anchors[3].copy()]
    driver.anchors[3][7] += 1
    driver.answers.clear()
    driver.new_scheduler()
    driver.run_stage(0, keep=False)
    driver.finish()
    ledger = driver.scheduler.ledger
    assert ledger.reused_retained == 150
    assert ledger.computed == 50 + 4 * (10 + 8 + 9)
    driver.pool.clear()
    assert driver.arena.num_free_pages == 60
