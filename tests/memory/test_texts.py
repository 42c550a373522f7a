"""Texts of a run are handed on without copies where they lie right, and rightly where they do not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from quail.execution.answers import Texts

WORDS = [f"text {i}" for i in range(40)]


@pytest.fixture
def texts() -> Texts:
    made = Texts(0)
    numbers = np.arange(1, 41, dtype=np.uint64)
    for start, stop in ((0, 20), (20, 40)):
        chunks = [WORDS[i : i + 7] for i in range(start, stop, 7)]
        column = pa.chunked_array([chunk[: stop - start] for chunk in chunks], pa.string())
        made.add(numbers[start : start + len(column)], numbers[start : start + len(column)], column)
    return made


@pytest.mark.parametrize("seed", range(30))
def test_texts_of_any_handles(seed: int, texts: Texts) -> None:
    known = texts.take(np.arange(len(texts))).to_pylist()
    handles = np.random.default_rng(seed).integers(0, len(texts), seed)
    assert texts.take(handles).to_pylist() == [known[i] for i in handles]
    assert texts.take(handles).type == pa.string()
    stop = seed % len(texts)
    assert texts.take(np.arange(stop)).to_pylist() == known[:stop]


def test_neighbours_of_a_chunk_are_not_copied(texts: Texts) -> None:
    before = pa.total_allocated_bytes()
    taken = texts.take(np.arange(2, 6))
    assert taken.to_pylist() == WORDS[2:6]
    assert pa.total_allocated_bytes() == before
