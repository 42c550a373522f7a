"""Arrow arrays made and read without pandas, which `pyarrow.array` and `to_numpy` import where it is there.

That import takes a third of a second of a program that may never touch pandas. What these functions make is
what pyarrow makes of the same values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_LARGEST_TEXT_BYTES = 2**31 - 1
_LARGEST_NUMBER = 2**63


def of_numbers(values: npt.NDArray[Any], is_null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An array of Booleans or numbers.

    Args:
        values: (n,) of a numpy type of the machine's own byte order.
        is_null: (n,) which of them are NULL; None: none is.
    """
    assert values.ndim == 1 and (is_null is None or is_null.shape == values.shape)
    kind = pa.from_numpy_dtype(values.dtype)
    is_bits = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bits else np.ascontiguousarray(values)
    validity = None if is_null is None else pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(data)])


def to_numbers(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """(n,) the Booleans or numbers of an array without NULL; a view where it has one chunk."""
    if isinstance(array, pa.ChunkedArray):
        parts = [to_numbers(chunk) for chunk in array.chunks if len(chunk)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.zeros(0, _numpy_type(array.type)), *parts])
    assert not array.null_count
    data, start, stop = array.buffers()[1], array.offset, array.offset + len(array)
    if data is None:
        return np.zeros(0, _numpy_type(array.type))
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=stop, bitorder="little")
        return bits[start:stop].view(np.bool_)
    return np.frombuffer(data, _numpy_type(array.type), stop)[start:]


def filled(array: pa.Array | pa.ChunkedArray, value: int) -> pa.Array | pa.ChunkedArray:
    """An array of numbers with a value in the place of each NULL."""
    return pc.fill_null(array, of_numbers(np.array([value], _numpy_type(array.type)))[0])


def _numpy_type(kind: pa.DataType) -> npt.DTypeLike:
    return {"bool": "bool", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


def of_texts(values: Sequence[str | None]) -> pa.Array:
    """An array of strings; None is NULL.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
    parts = [b"" if value is None else value.encode() for value in values]
    stops = list(itertools.accumulate(map(len, parts), initial=0))
    if stops[-1] > _LARGEST_TEXT_BYTES:
        return pa.array(values, pa.string())  # in chunks
    offsets = np.array(stops, dtype=np.int32)
    validity = None
    if None in values:
        is_known = np.fromiter((value is not None for value in values), np.bool_, len(values))
        validity = pa.py_buffer(np.packbits(is_known, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def of_objects(values: Any) -> pa.Array | pa.ChunkedArray:
    """An array of Python values of whatever type, as `pyarrow.array` takes them.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
        pyarrow.ArrowException: they are not of one type.
    """
    if type(values) in (list, tuple):
        kinds = set(map(type, values))
        if not kinds:
            return pa.nulls(0)
        if kinds in ({str}, {str, type(None)}):
            return of_texts(values)
        if kinds == {int} and all(-_LARGEST_NUMBER <= value < _LARGEST_NUMBER for value in values):
            return of_numbers(np.array(values, dtype=np.int64))
        if kinds == {float}:
            return of_numbers(np.array(values, dtype=np.float64))
        if kinds == {bool}:
            return of_numbers(np.array(values, dtype=np.bool_))
    return pa.array(values)
