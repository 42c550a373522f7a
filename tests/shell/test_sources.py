"""What may be registered, and that it comes out as it went in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from quail.errors import SourceError
from quail.sources.catalog import Catalog

ROWS = [(1, "a"), (2, None), (3, ""), (4, 'quote " and , comma\nand line')]
TABLE = pa.table({"id": [row[0] for row in ROWS], "text": [row[1] for row in ROWS]})


@pytest.fixture
def catalog() -> Any:
    catalog = Catalog()
    yield catalog
    catalog.close()


def rows_of(catalog: Catalog, name: str = "t") -> list[tuple[Any, ...]]:
    cursor = catalog.cursor()
    try:
        return cursor.execute(f'SELECT * FROM "{name}"').fetchall()
    finally:
        cursor.close()


# -- files -------------------------------------------------------------------------------------------------


def write_parquet(folder: Path) -> Path:
    pq.write_table(TABLE, folder / "t.parquet")
    return folder / "t.parquet"


def write_csv(folder: Path) -> Path:
    pyarrow.csv.write_csv(TABLE, folder / "t.csv")
    return folder / "t.csv"


def write_gzipped_csv(folder: Path) -> Path:
    (folder / "t.csv.gz").write_bytes(gzip.compress(write_csv(folder).read_bytes()))
    return folder / "t.csv.gz"


def write_json_lines(folder: Path) -> Path:
    (folder / "t.jsonl").write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in ROWS))
    return folder / "t.jsonl"


def write_as_parquet(folder: Path, columns: dict[str, list[str]]) -> Path:
    pq.write_table(pa.table(columns), folder / "columns.parquet")
    return folder / "columns.parquet"


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_gzipped_csv, write_json_lines])
def test_files(catalog: Catalog, tmp_path: Path, write: Any) -> None:
    path = write(tmp_path)
    before = path.read_bytes()
    catalog.register("t", path)
    catalog.register("as_text", str(path))
    # As in DuckDB, an empty field of a CSV file is NULL, in quotes or not.
    expected = [(i, text or None) for i, text in ROWS] if ".csv" in path.name else ROWS
    assert rows_of(catalog) == rows_of(catalog, "as_text") == expected
    assert path.read_bytes() == before
    assert catalog.tables["t"].paths == (str(path),)
    assert catalog.tables["t"].columns == (("id", "BIGINT"), ("text", "VARCHAR"))


def test_a_glob_reads_its_files_in_order_of_their_names(catalog: Catalog, tmp_path: Path) -> None:
    for i in (2, 0, 1):
        pq.write_table(pa.table({"i": [i]}), tmp_path / f"part-{i}.parquet")
    catalog.register("t", f"{tmp_path}/*.parquet")
    assert rows_of(catalog) == [(0,), (1,), (2,)]


def test_a_file_whose_name_holds_glob_characters_and_quotes(catalog: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "it's [1]*.parquet"
    pq.write_table(TABLE, path)
    catalog.register("t", path)
    assert rows_of(catalog) == ROWS


def test_a_replaced_file_is_read_anew_by_the_next_query(catalog: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"i": [1, 2]}), path)
    catalog.register("t", path)
    assert rows_of(catalog) == [(1,), (2,)]
    pq.write_table(pa.table({"i": [3, 4]}), path)
    assert rows_of(catalog) == [(3,), (4,)]


def test_a_vanished_file_fails_only_the_queries_that_read_it(catalog: Catalog, tmp_path: Path) -> None:
    path = write_parquet(tmp_path)
    catalog.register("t", path)
    catalog.register("other", TABLE)
    path.unlink()
    assert rows_of(catalog, "other") == ROWS
    with pytest.raises(duckdb.Error, match=r"table 't' can no longer be read: .*t\.parquet"):
        rows_of(catalog)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_large_files_read_by_several_threads_keep_their_rows(
    catalog: Catalog, tmp_path: Path, kind: str
) -> None:
    n = 200_000
    table = pa.table({"i": range(n), "s": [f"document {i} {'x' * (i % 97)}" for i in range(n)]})
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=5_000)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        with path.open("w") as file:
            file.writelines(f'{{"i": {row["i"]}, "s": "{row["s"]}"}}\n' for row in table.to_pylist())
    catalog.register("t", path)
    cursor = catalog.cursor()
    cursor.execute("SET threads = 8")
    read = cursor.sql("SELECT i, s FROM t").to_arrow_table()
    assert read["i"].to_numpy().tolist() == list(range(n))
    assert read["s"].to_pylist() == table["s"].to_pylist()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.parquet", "there is no file"),
        ("*.csv", "no file matches"),
        ("no/such/folder/x.csv", "the nearest folder that exists"),
        (".", "is a folder"),
        ("notes.doc", "no known format"),
        ("broken.parquet", "cannot be read"),
        ("mixed.*", "several formats: csv, parquet"),
        ("https://example.org/x.parquet", "remote address"),
        ("s3://bucket/x.parquet", "remote address"),
    ],
)
def test_files_that_cannot_be_read(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.doc").write_text("text")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing PAR1")
    (tmp_path / "mixed.parquet").write_bytes(b"PAR1")
    pyarrow.csv.write_csv(TABLE, tmp_path / "mixed.csv")
    if source == "*.csv":
        (tmp_path / "mixed.csv").unlink()
    with pytest.raises(SourceError, match=message) as caught:
        catalog.register("mine", source)
    assert "'mine'" in str(caught.value)


# -- objects -----------------------------------------------------------------------------------------------


OBJECTS = {
    "table": lambda: TABLE,
    "slice": lambda: pa.concat_tables([pa.table({"id": [0], "text": ["no"]}), TABLE]).slice(1),
    "chunks": lambda: pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(0, 0), TABLE.slice(1)]),
    "large_string": lambda: TABLE.cast(pa.schema([("id", pa.int64()), ("text", pa.large_string())])),
    "string_view": lambda: TABLE.cast(pa.schema([("id", pa.int64()), ("text", pa.string_view())])),
    "dictionary": lambda: TABLE.set_column(1, "text", TABLE["text"].dictionary_encode()),
    "batch": lambda: TABLE.combine_chunks().to_batches()[0],
    "dataset": lambda: pyarrow.dataset.dataset(TABLE),
    "reader": lambda: TABLE.to_reader(),
    "polars": lambda: pl.from_arrow(TABLE),
    "lazy polars": lambda: pl.from_arrow(TABLE).lazy(),
    "relation": lambda: duckdb.connect().from_arrow(TABLE),
    "rows": lambda: TABLE.to_pylist(),
    "columns": lambda: TABLE.to_pydict(),
    "numpy columns": lambda: {"id": np.array([1, 2, 3, 4]), "text": [row[1] for row in ROWS]},
    "pandas": lambda: pd.DataFrame({"id": [1, 2, 3, 4], "text": [row[1] for row in ROWS]}),
    "pandas objects": lambda: pd.DataFrame(
        {"id": [1, 2, 3, 4], "text": pd.Series([row[1] for row in ROWS], dtype=object)}
    ),
    "pandas categories": lambda: pd.DataFrame(
        {"id": [1, 2, 3, 4], "text": pd.Categorical([row[1] for row in ROWS])}
    ),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS.keys())
def test_objects(catalog: Catalog, make: Any) -> None:
    catalog.register("t", make())
    assert rows_of(catalog) == ROWS
    assert rows_of(catalog) == ROWS, "a second query reads the same"
    assert [kind for _, kind in catalog.tables["t"].columns] == ["BIGINT", "VARCHAR"]


@pytest.mark.parametrize("write", [None, pd.DataFrame, pl.DataFrame, pa.table, write_as_parquet])
def test_text_is_never_changed(catalog: Catalog, tmp_path: Path, write: Any) -> None:
    texts = [
        "NUL \0 within",
        "e\u0301",
        "\u00e9",
        "a\r\nb\n",
        "\ufeffmark",
        "\u200b",
        " ",
        "\U0001f600",
        "x" * 100_000,
    ]
    source: Any = {"text": texts}
    if write is write_as_parquet:
        source = write_as_parquet(tmp_path, source)
    elif write is not None:
        source = write(source)
    catalog.register("t", source)
    assert rows_of(catalog) == [(text,) for text in texts]


def test_hugging_face_dataset_with_its_own_order(catalog: Catalog) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ["a", "b", None]})
    catalog.register("t", dataset.select([2, 0]))
    assert rows_of(catalog) == [(3, None), (1, "a")]


def test_hugging_face_splits_and_streams_are_refused(catalog: Catalog) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["a"]})
    with pytest.raises(SourceError, match=r"'train', 'test'[\s\S]*dataset\['train'\]"):
        catalog.register("t", datasets.DatasetDict(train=dataset, test=dataset))
    with pytest.raises(SourceError, match="streamed"):
        catalog.register("t", dataset.to_iterable_dataset())


def test_nan_in_pandas_text_is_null_and_the_frame_stays_as_it_was(catalog: Catalog) -> None:
    frame = pd.DataFrame({"text": pd.Series(["a", np.nan, None], dtype=object)})
    frame.index = pd.Index([7, 7, 9])
    copy = frame.copy(deep=True)
    catalog.register("t", frame)
    assert rows_of(catalog) == [("a",), (None,), (None,)]
    pd.testing.assert_frame_equal(frame, copy)


@pytest.mark.parametrize(
    "make",
    [
        lambda texts: pd.DataFrame({"text": pd.Series(texts, dtype=object)}),
        lambda texts: pl.DataFrame({"text": pl.Series(texts, dtype=pl.Object)}),
        lambda texts: {"text": texts},
        lambda texts: [{"text": text} for text in texts],
    ],
    ids=["pandas", "polars", "columns", "rows"],
)
def test_lone_surrogates_are_replaced_and_counted(catalog: Catalog, make: Any) -> None:
    with pytest.warns(UserWarning, match="table 't': 3 lone surrogates"):
        catalog.register("t", make(["good", "bad \ud800", "\udfff\udfff", "\U0001f600"]))
    assert rows_of(catalog) == [("good",), ("bad \ufffd",), ("\ufffd\ufffd",), ("\U0001f600",)]
    assert catalog.tables["t"].num_replaced_surrogates == 3


def test_columns_without_a_value_are_text(catalog: Catalog) -> None:
    catalog.register("t", [{"text": None}, {"text": None}])
    assert catalog.tables["t"].columns == (("text", "VARCHAR"),)


def test_rows_with_different_keys(catalog: Catalog) -> None:
    catalog.register("t", [{"a": 1}, {"b": "x"}])
    assert rows_of(catalog) == [(1, None), (None, "x")]


def test_empty_table_keeps_its_columns(catalog: Catalog) -> None:
    catalog.register("t", TABLE.slice(0, 0))
    assert rows_of(catalog) == []
    assert catalog.tables["t"].columns == (("id", "BIGINT"), ("text", "VARCHAR"))


def damaged_text() -> pa.Table:
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    return pa.table(
        {"text": pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab\xff\xfe")])}
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (42, "builtins.int is not a table"),
        (None, "NoneType is not a table"),
        ([], "no columns"),
        (pa.table({}), "no columns"),
        (["text"], "item 0 of the list is a str"),
        ({"a": [1], "b": [1, 2]}, r"differ in length: \{'a': 1, 'b': 2\}"),
        ({"a": "text"}, "column 'a' is a str"),
        ({"a": [1, "x"]}, "column 'a' is not of one type"),
        (pd.Series(["a"]), "Series is one column"),
        (pl.Series(["a"]), "Series is one column"),
        (pa.table([[1], [2]], names=["a", "a"]), "several columns named 'a'"),
        (damaged_text(), "column 'text' is damaged"),
    ],
)
def test_objects_that_are_no_tables(catalog: Catalog, source: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        catalog.register("mine", source)
    assert "mine" not in catalog.tables


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["order", "a b", "x.y", 'say "hi"', "Müller", "SELECT", "it's"])
def test_any_name_that_can_be_quoted(catalog: Catalog, name: str) -> None:
    catalog.register(name, TABLE)
    assert rows_of(catalog, name.replace('"', '""')) == ROWS


@pytest.mark.parametrize("name", ["", "  ", "a\0b", 7, None])
def test_names_that_are_none(catalog: Catalog, name: Any) -> None:
    with pytest.raises(SourceError, match="name"):
        catalog.register(name, TABLE)


def test_registering_again_replaces_whatever_the_case(catalog: Catalog) -> None:
    catalog.register("Reviews", TABLE)
    catalog.register("reviews", [{"a": 1}])
    assert list(catalog.tables) == ["reviews"]
    assert rows_of(catalog, "REVIEWS") == [(1,)]


def test_an_older_query_keeps_what_it_saw(catalog: Catalog, tmp_path: Path) -> None:
    catalog.register("t", write_parquet(tmp_path))
    cursor = catalog.cursor()
    catalog.register("t", [{"a": 1}])
    assert cursor.execute("FROM t").fetchall() == ROWS


def test_a_name_of_a_created_table_is_refused(catalog: Catalog) -> None:
    catalog.cursor().execute("CREATE TABLE made AS SELECT 1 AS a")
    with pytest.raises(SourceError, match="already is a table"):
        catalog.register("MADE", TABLE)


# -- access ------------------------------------------------------------------------------------------------


def test_nothing_but_registered_sources_can_be_read(catalog: Catalog, tmp_path: Path) -> None:
    path = write_parquet(tmp_path)
    catalog.register("t", path)
    local_variable = TABLE  # noqa: F841
    cursor = catalog.cursor()
    for statement in (
        f"FROM '{path}'",
        f"FROM read_text('{path}')",
        "FROM local_variable",
        f"COPY t TO '{tmp_path}/out.csv'",
        f"ATTACH '{tmp_path}/other.duckdb'",
        "SET enable_external_access = true",
        f"SET allowed_directories = ['{tmp_path}']",
    ):
        with pytest.raises(duckdb.Error):
            cursor.execute(statement)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t.parquet"]


def test_registered_files_cannot_be_written(catalog: Catalog, tmp_path: Path) -> None:
    path = write_csv(tmp_path)
    before = path.read_bytes()
    catalog.register("t", path)
    for address in ("quail://0/000000-t.csv", "quail://0/new.csv"):
        with pytest.raises(duckdb.Error):
            catalog.cursor().execute(f"COPY (SELECT 1) TO '{address}' (USE_TMP_FILE false)")
    assert path.read_bytes() == before


def test_allowed_folders_and_files_can_be_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = write_parquet(tmp_path)
    catalog = Catalog(allow=[tmp_path / "in", str(path)])
    cursor = catalog.cursor()
    assert cursor.execute(f"FROM '{path}'").fetchall() == ROWS
    cursor.execute(f"COPY (SELECT 1 AS a) TO '{tmp_path}/in/out.parquet'")
    assert pq.read_table(tmp_path / "in" / "out.parquet").to_pylist() == [{"a": 1}]
    with pytest.raises(duckdb.Error):
        cursor.execute(f"COPY (SELECT 1 AS a) TO '{tmp_path}/out.parquet'")
    catalog.close()


def test_a_database_file_keeps_created_tables_but_not_sources(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "kept.duckdb")
    catalog.register("t", TABLE)
    catalog.cursor().execute("CREATE TABLE kept AS FROM t")
    catalog.close()
    again = Catalog(tmp_path / "kept.duckdb")
    assert again.cursor().execute("FROM kept").fetchall() == ROWS
    assert again.cursor().execute("SELECT count(*) FROM duckdb_views() WHERE NOT internal").fetchone() == (0,)
    again.close()


def test_databases_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database")
    first = Catalog(tmp_path / "open.duckdb")
    for database, message in (
        (tmp_path / "notes.txt", "not a DuckDB file"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.duckdb", "cannot be opened"),
        (tmp_path / "open.duckdb", "open in another session"),
    ):
        with pytest.raises(SourceError, match=message):
            Catalog(database)
    assert first.cursor().execute("SELECT 1").fetchone() == (1,)
    first.close()
