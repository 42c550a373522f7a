from __future__ import annotations

import json
from decimal import Decimal

import pyarrow as pa

from quail.rendering import box, csv_text, html_table, json_rows, markdown

TABLE = pa.table(
    {
        "id": [1, 2, 3],
        "text": ["plain", None, 'a, "b"\nc'],
        "ok": [True, None, False],
        "share": [0.5, float("nan"), None],
    }
)


def test_box_is_as_it_is() -> None:
    assert box(TABLE, width=80) == (
        "┌───────┬──────────┬─────────┬────────┐\n"
        "│  id   │   text   │   ok    │ share  │\n"
        "│ int64 │ varchar  │ boolean │ double │\n"
        "├───────┼──────────┼─────────┼────────┤\n"
        "│     1 │ plain    │ true    │    0.5 │\n"
        "│     2 │ NULL     │ NULL    │    nan │\n"
        '│     3 │ a, "b"↵c │ false   │   NULL │\n'
        "└───────┴──────────┴─────────┴────────┘\n"
        "3 rows"
    )


def test_box_shows_no_more_than_asked_and_counts_all() -> None:
    text = box(TABLE, max_rows=1, width=80)
    assert "plain" in text
    assert "NULL" not in text
    assert text.endswith("3 rows (1 shown)")


def test_box_fits_its_width_with_wide_characters() -> None:
    from rich.cells import cell_len

    table = pa.table({"a": ["漢字" * 50], "b": ["x" * 300], "c": [1]})
    lines = box(table, width=60).splitlines()
    assert {cell_len(line) for line in lines[:-1]} == {60}
    assert "…" in lines[4]


def test_box_disarms_control_characters() -> None:
    assert "\x1b" not in box(pa.table({"a": ["\x1b[31mred\x07\x00"]}))


def test_box_of_an_empty_table() -> None:
    assert box(TABLE.slice(0, 0), width=80).endswith("0 rows")


def test_csv_tells_null_from_empty() -> None:
    table = pa.table({"a": ["", None, "x,y", 'q"'], "b": [True, False, None, True]})
    assert csv_text(table) == 'a,b\n"",true\n,false\n"x,y",\n"q""",true\n'


def test_json_is_valid_whatever_the_types() -> None:
    table = pa.table(
        {
            "n": [float("nan"), 1.5],
            "d": [Decimal("1.10"), None],
            "t": pa.array([0, None], pa.timestamp("us")),
            "l": [[1, None], []],
            "s": [{"x": "ü"}, None],
            "b": [b"\xff", None],
        }
    )
    assert [json.loads(row) for row in json_rows(table)] == [
        {"n": None, "d": "1.10", "t": "1970-01-01T00:00:00", "l": [1, None], "s": {"x": "ü"}, "b": "ff"},
        {"n": 1.5, "d": None, "t": None, "l": [], "s": None, "b": None},
    ]


def test_markdown_escapes_bars() -> None:
    table = pa.table({"a|b": ["x|y"], "n": [1]})
    assert markdown(table) == "| a\\|b | n |\n| --- | ---: |\n| x\\|y | 1 |"


def test_html_escapes_everything() -> None:
    text = html_table(pa.table({"<a>": ["<script>"]}))
    assert "<script>" not in text
    assert "&lt;a&gt;" in text
