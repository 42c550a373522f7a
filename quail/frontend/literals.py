"""Values and pieces of SQL that others wrote, made safe to stand in a composed statement."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from quail.errors import BindError, ConfigError
from quail.plan import syntax

Parameters = Sequence[Any] | Mapping[str, Any] | None

_ESCAPES = {"\\": "\\\\", "'": "''", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def name(text: str) -> str:
    """A quoted identifier.

    Raises:
        ConfigError: not a name.

    >>> print(name('a "b".c'))
    "a ""b"".c"
    """
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{text!r} is not a name")
    escaped = _checked(text).replace('"', '""')
    return f'"{escaped}"'


def string(text: str) -> str:
    r"""A string literal: plain, or `E'…'` where it holds line breaks or tabs.

    Raises:
        ConfigError: text that no SQL can hold.

    >>> print(string("it's C:\\new"), string("a\n\\b"))
    'it''s C:\new' E'a\n\\b'
    """
    _checked(text)
    if not any(character in text for character in "\n\r\t"):
        return "'" + text.replace("'", "''") + "'"
    return "E'" + "".join(_ESCAPES.get(character, character) for character in text) + "'"


def value(thing: object) -> str:
    """A literal of a Python value.

    Raises:
        ConfigError: a type without a literal.

    >>> print(value(None), value(True), value(-1.5), value(["a", 2]))
    NULL true -1.5 ['a', 2]
    """
    if thing is None:
        return "NULL"
    if isinstance(thing, bool):
        return "true" if thing else "false"
    if isinstance(thing, str):
        return string(thing)
    if isinstance(thing, int):
        return str(int(thing))
    if isinstance(thing, float | decimal.Decimal):
        return str(thing) if math.isfinite(thing) else f"'{float(thing)}'::DOUBLE"
    if isinstance(thing, bytes):
        return "'" + "".join(f"\\x{byte:02X}" for byte in thing) + "'::BLOB"
    if isinstance(thing, datetime.datetime):
        return f"{'TIMESTAMP' if thing.tzinfo is None else 'TIMESTAMPTZ'} '{thing.isoformat(sep=' ')}'"
    if isinstance(thing, datetime.date):
        return f"DATE '{thing.isoformat()}'"
    if isinstance(thing, datetime.time):
        return f"TIME '{thing.isoformat()}'"
    if isinstance(thing, list | tuple):
        return "[" + ", ".join(map(value, thing)) + "]"
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{string(str(key))}: {value(each)}" for key, each in thing.items()) + "}"
    item = getattr(thing, "item", None)  # numbers of numpy
    if callable(item) and getattr(thing, "shape", None) == ():
        return value(item())
    raise ConfigError(
        f"a {type(thing).__name__} cannot be written into a statement",
        hint="text, numbers, booleans, dates, None, and lists and dicts of them can",
    )


def expression(text: str, params: Parameters = None, *, what: str) -> str:
    """An SQL expression in parentheses, with its parameters as literals: one wherever it is put.

    Args:
        text: the expression.
        params: values of `?` (a sequence) or `$name` (a mapping).
        what: where it was given, for messages.

    Raises:
        BindError: not one expression, or a parameter without a value.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{what} takes SQL text, got {text!r}", hint='where("stars < 5")')
    _checked(text)
    _check_closed(text, what)
    head = "SELECT ("
    node = _parse(f"{head}{text}\n)", text, what)
    if len(node["select_list"]) != 1 or node["select_list"][0].get("class") == "STAR":
        raise BindError(f"{what} takes one SQL expression, got {text!r}")
    whole = _with_literals(node, text, params, len(head))
    return f"({whole}\n)" if "--" in whole else f"({whole})"


def query(text: str, params: Parameters = None) -> str:
    """A query that can stand in parentheses, with its parameters as literals.

    Raises:
        BindError: not one query, or a parameter without a value.
    """
    _checked(text)
    return _with_literals(syntax.parse_query(text), text, params, 0)


def words(text: str) -> frozenset[str]:
    """The names in a piece of SQL, in lower case."""
    encoded = text.encode()
    starts = [start for start, _ in duckdb.tokenize(text)] + [len(encoded)]
    pieces = zip(starts, starts[1:], strict=False)
    tokens = (encoded[start:stop].decode(errors="replace").strip() for start, stop in pieces)
    return frozenset(token.strip('"').replace('""', '"').lower() for token in tokens)


def _checked(text: str) -> str:
    if "\0" in text:
        raise ConfigError(f"{text[:40]!r} holds a NUL character, which no SQL text can hold")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{text[:40]!r} holds a lone surrogate at character {error.start}, which is not text"
        ) from None
    return text


def _check_closed(text: str, what: str) -> None:
    """Refuses text that would close a parenthesis around it or end the statement."""
    encoded = text.encode()
    depth = 0
    for start, kind in duckdb.tokenize(text):
        if kind != duckdb.token_type.operator:
            continue
        character = encoded[start : start + 1]
        depth += (character == b"(") - (character == b")")
        if depth < 0 or character == b";":
            raise BindError(
                f"{what}: {character.decode()!r} does not belong to an expression",
                text=text,
                start=len(encoded[:start].decode()),
            )


def _parse(whole: str, text: str, what: str) -> syntax.Node:
    try:
        return syntax.parse_query(whole)
    except BindError as error:
        reason = error.message.split("\n", 1)[0]
        raise type(error)(f"{what}: {reason}", text=text, start=0, hint=error.hint) from None


def _with_literals(node: syntax.Node, text: str, params: Parameters, offset: int) -> str:
    if isinstance(params, str) or not isinstance(params, Sequence | Mapping | None):
        raise ConfigError(f"params is a {type(params).__name__}, not a list or a mapping", hint="params=[5]")
    given = (
        dict(params) if isinstance(params, Mapping) else {str(i): v for i, v in enumerate(params or (), 1)}
    )
    encoded = text.encode()
    pieces, position, used = [], 0, set()
    found = [each for each in syntax.walk(node) if each.get("class") == "PARAMETER"]
    for parameter in sorted(found, key=lambda each: syntax.own_span(each) or (0, 0)):
        span, key = syntax.own_span(parameter), str(parameter["identifier"])
        assert span is not None
        start, stop = span[0] - offset, span[1] - offset
        if key not in given:
            raise BindError(
                f"parameter {key} has no value: {len(given)} given",
                hint="pass it as params=[…] or params={…}",
                text=text,
                start=len(encoded[:start].decode()),
            )
        used.add(key)
        pieces += [encoded[position:start].decode(), f"({value(given[key])})"]
        position = stop
    unused = sorted(set(given) - used)
    if unused:
        raise BindError(f"parameter {unused[0]} does not stand in {text!r}", hint="remove its value")
    return "".join([*pieces, encoded[position:].decode()])
