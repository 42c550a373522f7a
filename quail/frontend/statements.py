"""Kinds of statements: where the SELECT stands in a CREATE TABLE AS, an INSERT or a COPY."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from quail.errors import UnsupportedError
from quail.plan.syntax import Span, encode

_QUERY_STARTS = ("select", "with", "from", "values", "(", "describe", "summarize", "show")
_AI_CALL = re.compile(
    r"\bai\s*\.\s*\"?\w+\"?\s*\(|\bai_(filter|if|score|classify|probabilities)\s*\(", re.IGNORECASE
)


@dataclass(frozen=True)
class _Token:
    start: int
    text: str
    depth: int


def query_span(text: str) -> Span | None:
    """Byte range of the SELECT of a statement, None where it has none.

    Raises:
        UnsupportedError: a statement with AI calls that is neither a query nor writes one's rows.
    """
    encoded = encode(text)
    tokens = _tokens(text)
    stop = _statement_stop(encoded, tokens)
    tokens = [token for token in tokens if token.start < stop]
    first = tokens[0].text if tokens else ""
    if not tokens or first in _QUERY_STARTS:
        return 0, stop
    span = None
    words = [token.text for token in tokens[:5]]
    if first == "create" and "table" in words and not {"temp", "temporary"} & set(words):
        span = _after_as(tokens, stop)
    elif first == "insert":
        span = _inserted(tokens, stop)
    elif first == "copy" and len(tokens) > 1 and tokens[1].text == "(":
        close = next((t.start for t in tokens[2:] if t.text == ")" and t.depth == 1), None)
        span = None if close is None else (tokens[1].start + 1, close)
    if span is None:
        is_temporary = bool({"temp", "temporary"} & set(words))
        _refuse_calls(text, ["CREATE TEMP"] if is_temporary else [first.upper()])
    return span


def _refuse_calls(text: str, words: Sequence[str]) -> None:
    match = _AI_CALL.search(text)
    if match is not None:
        raise UnsupportedError(
            f"AI functions in {' '.join(words)} are not supported",
            hint="use them in SELECT, CREATE TABLE AS, INSERT … SELECT or COPY (SELECT …) TO",
            text=text,
            start=match.start(),
        )


def _after_as(tokens: Sequence[_Token], stop: int) -> Span | None:
    for token, following in zip(tokens, tokens[1:], strict=False):
        if token.text == "as" and token.depth == 0:
            end = next((t.start for t in _pairs_with_data(tokens)), stop)
            return following.start, end
    return None


def _pairs_with_data(tokens: Sequence[_Token]) -> list[_Token]:
    """The WITH of a closing WITH [NO] DATA."""
    texts = [token.text for token in tokens]
    for tail in (["with", "no", "data"], ["with", "data"]):
        if texts[-len(tail) :] == tail:
            return [tokens[-len(tail)]]
    return []


def _inserted(tokens: Sequence[_Token], stop: int) -> Span | None:
    outer = [token for token in tokens if token.depth == 0]
    start = next((t.start for t in outer[1:] if t.text in ("select", "with", "from", "values")), None)
    if start is None:
        return None
    for token, following in zip(outer, outer[1:], strict=False):
        if token.start > start and (
            token.text == "returning" or (token.text, following.text) == ("on", "conflict")
        ):
            return start, token.start
    return start, stop


def _statement_stop(encoded: bytes, tokens: Sequence[_Token]) -> int:
    """The byte behind the statement, without semicolons at its end."""
    last = len(tokens)
    while last and tokens[last - 1].text == ";":
        last -= 1
    return tokens[last].start if last < len(tokens) else len(encoded)


def _tokens(text: str) -> list[_Token]:
    encoded = encode(text)
    found = duckdb.tokenize(text)
    starts = [start for start, _ in found] + [len(encoded)]
    tokens, depth = [], 0
    for i, (start, kind) in enumerate(found):
        if kind == duckdb.token_type.comment:
            continue
        word = encoded[start : starts[i + 1]].decode(errors="replace").strip().lower()
        if kind == duckdb.token_type.operator:
            word = word[:1]
        elif kind == duckdb.token_type.string_const:
            word = "'"
        depth -= word == ")"
        tokens.append(_Token(start, word, depth + (word == ")")))
        depth += word == "("
    return tokens
