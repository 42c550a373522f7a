"""Byte ranges of a statement: where names, parentheses and clauses begin and end."""

from __future__ import annotations

import re

import duckdb


def balanced(encoded: bytes, start: int, stop: int) -> tuple[int, int]:
    """The range with the parentheses in front of it that are closed in it."""
    depth = lowest = 0
    for offset, kind in duckdb.tokenize(encoded[start:stop].decode()):
        if kind == duckdb.token_type.operator:
            character = encoded[start:stop].decode()[offset : offset + 1]
            depth += (character == "(") - (character == ")")
            lowest = min(lowest, depth)
    for _ in range(-lowest):
        before = _skip_back(encoded, start)
        if encoded[before : before + 1] != b"(":
            break
        start = before
    return start, stop


def after_parentheses(encoded: bytes, start: int, stop: int) -> int:
    """The end of `stop` moved behind the closing parentheses that pair with those in front of `start`."""
    while True:
        before = _skip_back(encoded, start)
        after = _skip_forward(encoded, stop)
        if before < 0 or encoded[before : before + 1] != b"(" or encoded[after : after + 1] != b")":
            return stop
        start, stop = before, after + 1


def _skip_back(encoded: bytes, position: int) -> int:
    position -= 1
    while position >= 0:
        if encoded[position : position + 1].isspace():
            position -= 1
        elif encoded[position - 1 : position + 1] == b"*/":
            position = encoded.rfind(b"/*", 0, position - 1) - 1
        else:
            break
    return position


def _skip_forward(encoded: bytes, position: int) -> int:
    while position < len(encoded):
        if encoded[position : position + 1].isspace():
            position += 1
        elif encoded[position : position + 2] == b"/*":
            position = encoded.find(b"*/", position) + 2
        elif encoded[position : position + 2] == b"--":
            position = encoded.find(b"\n", position) + 1 or len(encoded)
        else:
            break
    return position


def limit_start(encoded: bytes, position: int) -> int | None:
    """Where the LIMIT or OFFSET begins that follows a byte of its block."""
    depth = 0
    text = encoded[position:].decode(errors="ignore")
    starts = [offset for offset, kind in duckdb.tokenize(text) if kind != duckdb.token_type.comment]
    for start in starts:
        rest = encoded[position + start :]
        if rest[:1] in (b"(", b")"):
            depth += 1 if rest[:1] == b"(" else -1
        elif depth <= 0 and re.match(rb"(limit|offset|fetch)\b", rest, re.IGNORECASE):
            return position + start
    return None


def name_stop(encoded: bytes, start: int) -> int:
    """The byte behind a possibly qualified name."""
    text = encoded[start:].decode()
    starts = [offset for offset, _ in duckdb.tokenize(text)]
    position = 0
    while position + 2 < len(starts) and encoded[start + starts[position + 1] :].startswith(b"."):
        position += 2
    stop = start + starts[position + 1] if position + 1 < len(starts) else len(encoded)
    return len(encoded[:stop].rstrip())


def closing_parenthesis(encoded: bytes, start: int) -> int:
    """The byte behind the parenthesis that closes the first one opened at or after `start`."""
    depth = 0
    for offset, kind in duckdb.tokenize(encoded[start:].decode()):
        if kind == duckdb.token_type.operator:
            character = encoded[start + offset : start + offset + 1]
            depth += (character == b"(") - (character == b")")
            if depth == 0 and character == b")":
                return start + offset + 1
    raise AssertionError("no closing parenthesis")
