"""Arrays made without pandas are those that pyarrow makes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quail.arrays import filled, of_numbers, of_objects, of_texts, to_numbers

NUMBERS = [np.bool_, np.int8, np.int32, np.int64, np.uint64, np.float32, np.float64]


def assert_same(found: pa.Array, expected: pa.Array) -> None:
    found.validate(full=True)
    assert found.type == expected.type
    assert len(found) == len(expected) and found.null_count == expected.null_count
    # NaN equals nothing, in lists too; as text it does.
    assert found.equals(expected) or str(found.to_pylist()) == str(expected.to_pylist())


@pytest.mark.parametrize("dtype", NUMBERS)
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 70), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_numbers(dtype: type, count: int, stride: int, has_nulls: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = (draw.integers(-300, 300, count * stride) % 128).astype(dtype)[::stride]
    if np.issubdtype(dtype, np.floating) and count:
        values[draw.integers(count)] = np.nan
    is_null = draw.random(count) < 0.3 if has_nulls else None
    assert_same(of_numbers(values, is_null), pa.array(values, mask=is_null))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.text(max_size=5), max_size=40))
def test_texts(values: list[str | None]) -> None:
    assert_same(of_texts(values), pa.array(values, pa.string()))
    assert_same(of_objects(values), pa.array(values))


scalars = st.one_of(
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(scalars, max_size=4), st.lists(st.integers(-(2**64), 2**64), max_size=4)))
def test_objects(values: list[object]) -> None:
    for each in (values, tuple(values), [values], np.array([1, 2])):
        try:
            expected = pa.array(each)
        except (pa.ArrowException, OverflowError) as error:
            with pytest.raises(type(error)):
                of_objects(each)
        else:
            assert_same(of_objects(each), expected)


class Word(str):
    """A subclass may be anything."""


def test_subclasses_are_left_to_pyarrow() -> None:
    assert_same(of_objects([Word("a"), "b"]), pa.array([Word("a"), "b"]))
    assert_same(of_objects([True, 1.5, None][:1]), pa.array([True]))


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        of_texts(["a", "\ud800"])


def test_texts_beyond_the_offsets_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quail.arrays._LARGEST_TEXT_BYTES", 3)
    assert of_texts(["ab", "cd"]).to_pylist() == ["ab", "cd"]


def test_the_text_of_another_type_is_a_fault() -> None:
    with pytest.raises(AttributeError):
        of_texts(["a", 1])  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", NUMBERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=3), st.integers(0, 5), st.integers(0, 99))
def test_numbers_are_read_back(dtype: type, lengths: list[int], start: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts = [draw.integers(0, 100, length).astype(dtype) for length in lengths]
    for part in parts:
        array = pa.array(part).slice(start, 4)
        found = to_numbers(array)
        assert found.dtype == dtype and found.tolist() == array.to_pylist()
    chunked = pa.chunked_array([pa.array(part) for part in parts], pa.from_numpy_dtype(dtype))
    found = to_numbers(chunked)
    assert found.dtype == dtype and found.tolist() == chunked.to_pylist()


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32()])
def test_nulls_are_filled(kind: pa.DataType) -> None:
    for array in (pa.array([3, None, 5], kind), pa.chunked_array([[None], [], [4, 5]], kind)):
        assert filled(array, 7).to_pylist() == [7 if each is None else each for each in array.to_pylist()]


def test_nulls_are_no_numbers() -> None:
    with pytest.raises(AssertionError):
        to_numbers(pa.array([1, None]))
