"""Objects as sources: frames, Arrow data, relations and Python data become something DuckDB can scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quail.arrays import of_objects
from quail.errors import SourceError

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Frame:
    """A source in memory.

    Attributes:
        data: what DuckDB scans: a table, or a dataset that is read at each query.
        kind: where it came from, for `SourceInfo`.
        num_replaced_surrogates: lone surrogates that were replaced by U+FFFD.
    """

    data: pa.Table | Dataset
    kind: str
    num_replaced_surrogates: int = 0


def to_frame(name: str, source: object) -> Frame:
    """Takes in a source that is an object; the object itself is never changed.

    Raises:
        SourceError: a type that cannot be read, or columns that are not columns.
    """
    for library, class_names, read in _READERS:
        if any(_is(source, library, class_name) for class_name in class_names):
            frame = read(name, source)
            break
    else:
        frame = _other(name, source)
    if isinstance(frame.data, pa.Table):
        _check(name, frame.data)
        return Frame(_without_null_types(frame.data), frame.kind, frame.num_replaced_surrogates)
    return frame


def _is(source: object, library: str, class_name: str) -> bool:
    """Whether an object is of a library's class, without importing the library."""
    return any(
        cls.__name__ == class_name and cls.__module__.partition(".")[0] == library
        for cls in type(source).__mro__
    )


def _pandas(name: str, source: Any) -> Frame:
    """Columns one by one; the index is not a column. NaN and None are NULL."""
    texts = _TextRepair()
    columns = [
        _column(name, str(label), source.iloc[:, i], texts, from_pandas=True)
        for i, label in enumerate(source.columns)
    ]
    table = pa.Table.from_arrays(columns, names=[texts.repair(str(label)) for label in source.columns])
    return Frame(table, "pandas", texts.num_replaced)


def _polars(name: str, source: Any) -> Frame:
    if _is(source, "polars", "LazyFrame"):
        source = source.collect()
    texts = _TextRepair()
    columns = [
        _column(name, series.name, series.to_list(), texts)
        if str(series.dtype) == "Object"
        else series.to_arrow()
        for series in source.get_columns()
    ]
    return Frame(pa.Table.from_arrays(columns, names=list(source.columns)), "polars", texts.num_replaced)


def _series(name: str, source: Any) -> Frame:
    raise SourceError(
        f"table {name!r}: a {type(source).__module__.partition('.')[0]} Series is one column, not a table",
        hint="register series.to_frame('text')",
    )


def _relation(name: str, source: Any) -> Frame:
    try:
        return Frame(source.to_arrow_table(), "duckdb")
    except Exception as error:
        raise SourceError(f"table {name!r}: its DuckDB relation cannot be read: {error}") from error


def _dataset_dict(name: str, source: Any) -> Frame:
    splits = ", ".join(repr(str(split)) for split in source)
    first = next(iter(source), "train")
    raise SourceError(
        f"table {name!r}: a {type(source).__name__} holds several tables ({splits})",
        hint=f"register one split: dataset[{str(first)!r}]",
    )


def _streamed(name: str, source: Any) -> Frame:
    raise SourceError(
        f"table {name!r}: a streamed Hugging Face dataset has no end to wait for",
        hint="register datasets.Dataset.from_list(list(dataset.take(1000)))",
    )


def _hugging_face(name: str, source: Any) -> Frame:
    return Frame(source.with_format("arrow")[:], "huggingface")


def _dataset(name: str, source: Any) -> Frame:
    return Frame(source, "arrow dataset")


def _reader(name: str, source: Any) -> Frame:
    try:
        return Frame(source.read_all(), "arrow reader")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"table {name!r}: its record batch reader cannot be read: {error}") from error


_READERS: tuple[tuple[str, tuple[str, ...], Callable[[str, Any], Frame]], ...] = (
    ("pandas", ("DataFrame",), _pandas),
    ("polars", ("DataFrame", "LazyFrame"), _polars),
    ("pandas", ("Series",), _series),
    ("polars", ("Series",), _series),
    ("duckdb", ("DuckDBPyRelation",), _relation),
    ("_duckdb", ("DuckDBPyRelation",), _relation),
    ("datasets", ("DatasetDict", "IterableDatasetDict"), _dataset_dict),
    ("datasets", ("IterableDataset",), _streamed),
    ("datasets", ("Dataset",), _hugging_face),
    ("pyarrow", ("RecordBatchReader",), _reader),
    ("pyarrow", ("Dataset",), _dataset),
)


def _other(name: str, source: object) -> Frame:
    """Arrow data, plain Python data, or anything else that exports Arrow."""
    if isinstance(source, pa.Table):
        return Frame(source, "arrow")
    if isinstance(source, pa.RecordBatch):
        return Frame(pa.Table.from_batches([source]), "arrow")
    if isinstance(source, Mapping):
        return _columns_of_lists(name, source)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return _list_of_rows(name, source)
    if hasattr(source, "__arrow_c_stream__"):
        return Frame(pa.table(source), "arrow")
    cls = type(source)
    raise SourceError(
        f"table {name!r}: an object of type {cls.__module__}.{cls.__qualname__} is not a table",
        hint="register a path or glob (Parquet, CSV, JSON lines), Arrow, pandas or polars data, "
        "a DuckDB relation, a Hugging Face dataset, a list of dicts or a dict of lists",
    )


def _list_of_rows(name: str, rows: Sequence[Any]) -> Frame:
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise SourceError(
                f"table {name!r}: item {i} of the list is a {type(row).__name__}, not a dict",
                hint="a list holds one dict a row: [{'id': 1, 'text': '…'}, …]",
            )
    labels = list(dict.fromkeys(label for row in rows for label in row))
    return _columns_of_lists(name, {label: [row.get(label) for row in rows] for label in labels})


def _columns_of_lists(name: str, source: Mapping[Any, Any]) -> Frame:
    lengths: dict[str, int] = {}
    for label, values in source.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise SourceError(
                f"table {name!r}: column {label!r} is a {type(values).__name__}, not a list of values"
            )
        lengths[str(label)] = len(values)
    if len(set(lengths.values())) > 1:
        raise SourceError(f"table {name!r}: columns differ in length: {lengths}")
    texts = _TextRepair()
    columns = [_column(name, str(label), values, texts) for label, values in source.items()]
    table = pa.Table.from_arrays(columns, names=[texts.repair(label) for label in lengths])
    return Frame(table, "python", texts.num_replaced)


def _column(
    name: str, label: str, values: Any, texts: _TextRepair, *, from_pandas: bool = False
) -> pa.Array | pa.ChunkedArray:
    try:
        return pa.array(values, from_pandas=True) if from_pandas else of_objects(values)
    except UnicodeEncodeError:
        repaired = [
            texts.repair(value) for value in (values.tolist() if hasattr(values, "tolist") else values)
        ]
        return _column(name, label, repaired, texts, from_pandas=from_pandas)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise SourceError(
            f"table {name!r}: column {label!r} is not of one type: {error}",
            hint="convert it, for example with str()",
        ) from None


class _TextRepair:
    """Replaces lone surrogates, which no UTF-8 text can hold, and counts them."""

    def __init__(self) -> None:
        self.num_replaced = 0

    def repair(self, value: Any) -> Any:
        if isinstance(value, str):
            num_lone = sum("\ud800" <= character <= "\udfff" for character in value)
            if not num_lone:
                return value
            self.num_replaced += num_lone
            return "".join(REPLACEMENT if "\ud800" <= each <= "\udfff" else each for each in value)
        if isinstance(value, Mapping):
            return {self.repair(key): self.repair(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.repair(each) for each in value]
        return value


def _check(name: str, table: pa.Table) -> None:
    if table.num_columns == 0:
        raise SourceError(f"table {name!r} has no columns")
    repeated = sorted({label for label in table.column_names if table.column_names.count(label) > 1})
    if repeated:
        raise SourceError(
            f"table {name!r} has several columns named {', '.join(map(repr, repeated))}",
            hint="rename them first",
        )
    for label, column in zip(table.column_names, table.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise SourceError(f"table {name!r}: column {label!r} is damaged: {error}") from None


def _without_null_types(table: pa.Table) -> pa.Table:
    """Columns without any value become text, so that they can be a document."""
    for i, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            table = table.set_column(i, field.name, pa.nulls(table.num_rows, pa.string()))
    return table
