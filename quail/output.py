"""Writing a table to a file or to standard output, in the format that was asked for."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet

from quail.errors import QuailError
from quail.rendering import box, csv_text, json_rows, markdown


def write_table(table: pa.Table, format: str, output: Path | None, *, max_rows: int = 40) -> None:
    """Writes a table.

    Args:
        table: the rows.
        format: `table`, `csv`, `json`, `jsonl`, `parquet` or `markdown`.
        output: file to write, whole or not at all; None is standard output.
        max_rows: rows that `table` shows.

    Raises:
        QuailError: the file cannot be written.
    """
    if output is None:
        _write(table, format, sys.stdout.buffer, max_rows)
        return
    try:
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                _write(table, format, file, max_rows)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, output)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise QuailError(f"cannot write {str(output)!r}: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(table: pa.Table, format: str, file: BinaryIO, max_rows: int) -> None:
    if format == "parquet":
        pyarrow.parquet.write_table(table, file)
    elif format == "jsonl":
        for row in json_rows(table):
            file.write(row.encode() + b"\n")
    elif format == "json":
        file.write(b"[")
        for i, row in enumerate(json_rows(table)):
            file.write((b",\n " if i else b"") + row.encode())
        file.write(b"]\n")
    else:
        text = {"csv": csv_text, "markdown": markdown}.get(format, lambda rows: box(rows, max_rows=max_rows))(
            table
        )
        file.write(text.encode() + (b"" if text.endswith("\n") else b"\n"))
    file.flush()
