"""Random documents, budgets and arenas, with allocations that fail and passes that do not fit, at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.kv.pages import PageArena
from tests.engine.driver import Driver, ids_of, smallest_arena


class Shaky(PageArena):
    """An arena whose allocations fail at some calls."""

    def __init__(self, num_pages: int, failing: set[int], raises: bool) -> None:
        super().__init__(num_pages)
        self._failing, self._raises, self._calls = failing, raises, 0

    def _fails(self) -> bool:
        self._calls += 1
        if self._calls in self._failing and self._raises:
            raise MemoryError
        return self._calls in self._failing

    def open(self, *arguments, **named):
        return None if self._fails() else super().open(*arguments, **named)

    def extend(self, *arguments, **named):
        return False if self._fails() else super().extend(*arguments, **named)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=8),
    st.integers(64, 200),
    st.integers(0, 12),
    st.sets(st.integers(1, 30), max_size=6),
    st.sets(st.integers(0, 12), max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_random_faults(parts, budget, spare, failing, lost, raises, shares, seed, depth):
    rng = np.random.default_rng(seed)
    stems = [ids_of(rng, 16 * n, vocab=3) for n in range(4)]
    documents = [np.concatenate([stems[stem], ids_of(rng, n + 1, vocab=3)]) for stem, n in parts]
    suffixes = [ids_of(rng, n) for n in (3, 9, 2)]
    pages = smallest_arena(documents, suffixes, 64) + spare
    driver = Driver(documents, suffixes, num_pages=pages, budget=budget, shares=shares, depth=depth)
    arena = driver.arena = Shaky(pages, failing, raises)
    driver.scheduler.pages = driver.scheduler.pool.pages = driver.scheduler._lending._pages = arena
    passes = iter(range(1000))

    def interrupt():
        if next(passes) in lost:
            raise BufferError  # stands for a pass that does not fit

    driver.submit_all()
    while True:
        try:
            if not driver.step(interrupt):
                break
        except BufferError:
            driver.scheduler.start_over(max(64, driver.lose_passes() // 2))
            arena.check_integrity()
        except MemoryError:
            driver.scheduler.abandon()
            arena.check_integrity()
            assert arena.num_free_pages == pages
            return
    driver.check_end()
    failed = {failure.request.document.handle for failure in driver.failures}
    answered = {document for document, question in driver.answers if question == 2}
    assert answered | failed == set(range(len(documents)))
    if not failing:
        assert not failed


def test_the_sweep_meets_faults():
    """The arena above does fail, so the property is not empty."""
    arena = Shaky(4, {1, 3}, raises=False)
    assert [arena.open("a", 1) is None for _ in range(3)] == [True, False, True]
    with pytest.raises(MemoryError):
        Shaky(4, {1}, raises=True).open("a", 1)
