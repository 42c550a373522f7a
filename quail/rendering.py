"""A table as text: boxes for terminals, Markdown, HTML, CSV and JSON."""

from __future__ import annotations

import html
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

_MIN_COLUMN_WIDTH = 8


def box(table: pa.Table, *, max_rows: int = 20, width: int | None = None) -> str:
    """The first rows in a box with names and types.

    Args:
        table: what to show.
        max_rows: rows shown; the last line counts all.
        width: columns of text; None takes the terminal's.
    """
    from rich.cells import cell_len, set_cell_size

    names = [_plain(name) for name in table.column_names]
    kinds = [_type_name(field.type) for field in table.schema]
    shown = table.slice(0, max_rows)
    rows = [[_cell(value) for value in row] for row in iterate(shown)]
    right = [_is_number(field.type) for field in table.schema]
    widths = [max(map(cell_len, (names[i], kinds[i], *(row[i] for row in rows)))) for i in range(len(names))]
    widths = _fit(widths, width or shutil.get_terminal_size((120, 24)).columns)

    def line(cells: Sequence[str], *, centred: bool = False) -> str:
        padded = []
        for cell, size, is_right in zip(cells, widths, right, strict=True):
            if cell_len(cell) > size:
                cell = set_cell_size(cell, size - 1).rstrip() + "…"
            gap = size - cell_len(cell)
            left = gap // 2 if centred else gap if is_right else 0
            padded.append(" " * left + cell + " " * (gap - left))
        return "│ " + " │ ".join(padded) + " │"

    def rule(left: str, middle: str, end: str) -> str:
        return left + middle.join("─" * (size + 2) for size in widths) + end

    count = f"{table.num_rows:,} row" + ("" if table.num_rows == 1 else "s")
    if table.num_rows > len(rows):
        count += f" ({len(rows):,} shown)"
    head = [rule("┌", "┬", "┐"), line(names, centred=True), line(kinds, centred=True), rule("├", "┼", "┤")]
    return "\n".join([*head, *map(line, rows), rule("└", "┴", "┘"), count])


def markdown(table: pa.Table) -> str:
    """The whole table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---:" if _is_number(field.type) else "---" for field in table.schema]
    rows = [line([_cell(value) for value in row]) for row in iterate(table)]
    return "\n".join([line([_plain(name) for name in table.column_names]), line(rule), *rows])


def html_table(table: pa.Table, *, max_rows: int = 20) -> str:
    """The first rows as an HTML table, everything escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.column_names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value)[:300])}</td>" for value in row) + "</tr>"
        for row in iterate(table.slice(0, max_rows))
    )
    count = (
        f"<p>{table.num_rows:,} rows"
        + (f", {max_rows:,} shown" if table.num_rows > max_rows else "")
        + "</p>"
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{count}"


def csv_text(table: pa.Table) -> str:
    """The whole table as CSV; NULL is an empty field, an empty text is two quotes."""
    lines = [",".join(map(_csv_field, table.column_names))]
    lines.extend(",".join(map(_csv_field, row)) for row in iterate(table))
    return "\n".join(lines) + "\n"


def json_rows(table: pa.Table) -> Iterator[str]:
    """One JSON object a row."""
    for row in iterate(table):
        values = {name: _json_value(value) for name, value in zip(table.column_names, row, strict=True)}
        yield json.dumps(values, ensure_ascii=False, allow_nan=False)


def iterate(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The rows as tuples of Python values, a batch at a time."""
    if not table.num_columns:
        return
    for batch in table.to_batches(max_chunksize=4096):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _fit(widths: list[int], limit: int) -> list[int]:
    """Narrows the widest columns, a character at a time, until the box fits."""
    widths = list(widths)
    room = limit - 3 * len(widths) - 1
    while sum(widths) > room and (widest := max(widths)) > _MIN_COLUMN_WIDTH:
        widths[widths.index(widest)] -= 1
    return widths


def _plain(text: str) -> str:
    """Text on one line without characters that steer a terminal."""
    text = text.replace("\r\n", "\n").replace("\n", "↵").replace("\t", " ")
    return text if text.isprintable() else "".join(each if each.isprintable() else "·" for each in text)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return _plain(str(value)[:2000])


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


_TYPE_NAMES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_string, "varchar"),
    (pa.types.is_large_string, "varchar"),
    (pa.types.is_float64, "double"),
    (pa.types.is_float32, "float"),
    (pa.types.is_timestamp, "timestamp"),
    (pa.types.is_list, "list"),
    (pa.types.is_map, "map"),
    (pa.types.is_struct, "struct"),
)


def _type_name(kind: pa.DataType) -> str:
    return next((name for test, name in _TYPE_NAMES if test(kind)), str(kind))


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = (
        json.dumps(_json_value(value), ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    )
    needs_quotes = text == "" or any(each in text for each in ',"\r\n')
    return '"' + text.replace('"', '""') + '"' if needs_quotes else text


def _json_value(value: Any) -> Any:
    """A value as JSON can say it; what is no number there (NaN, infinity) becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    return value if isinstance(value, str | int | bool | None) else str(value)
