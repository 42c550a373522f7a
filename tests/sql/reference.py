"""Plain DuckDB over stored values: what a statement with AI calls must return.

A template writes a call as `@IF[question](text)`, `@IF[question](text, text)`, `@SCORE[…]` or `@CLASSIFY[…]`. It becomes
an AI statement, and a plain statement in which a macro gives the stored nullable value of (question, texts).
"""

from __future__ import annotations

import re
from typing import Any

import duckdb

from quail.plan.logical import AICall, Operator
from tests.sql.stub import Key, StubCatalog

LABELS = ("red", "green", "blue")
_CALL = re.compile(r"@(IF|SCORE|CLASSIFY)\[(\w+)\]\(")

MACROS = (
    "CREATE MACRO stored(q, t) AS CASE WHEN t IS NOT NULL THEN hash(q || '|' || t) END",
    "CREATE MACRO stored_if(q, t) AS CASE stored('if' || q, t) % 7 WHEN 0 THEN NULL "
    "WHEN 1 THEN false WHEN 2 THEN false WHEN 3 THEN false WHEN 4 THEN true WHEN 5 THEN true WHEN 6 THEN true END",
    "CREATE MACRO stored_score(q, t) AS CASE stored('score' || q, t) % 7 WHEN 0 THEN NULL "
    "ELSE (stored('score' || q, t) % 8)::DOUBLE / 8 END",
    "CREATE MACRO stored_classify(q, t) AS CASE stored('classify' || q, t) % 4 "
    "WHEN 0 THEN 'red' WHEN 1 THEN 'green' WHEN 2 THEN 'blue' END",
)


def catalog(*statements: str) -> StubCatalog:
    """A catalog with the stored values and some tables."""
    return StubCatalog(*MACROS, *statements)


def ai_sql(template: str) -> str:
    """The template with AI calls."""
    return _expand(template, _ai_call)


def plain_sql(template: str) -> str:
    """The template with stored values."""
    return _expand(template, _stored)


def _expand(template: str, write: Any) -> str:
    while True:
        found = list(_CALL.finditer(template))
        if not found:
            return template
        call = found[-1]
        depth, stop, splits = 1, call.end(), [call.end()]
        while depth:
            character = template[stop]
            depth += (character == "(") - (character == ")")
            if depth == 1 and character == ",":
                splits.append(stop + 1)
            stop += 1
        bounds = [*splits, stop]
        arguments = [template[a : b - 1].strip() for a, b in zip(bounds, bounds[1:], strict=False)]
        template = template[: call.start()] + write(call[1], call[2], arguments) + template[stop:]


def _ai_call(operator: str, question: str, arguments: list[str]) -> str:
    places = " and ".join(f"{{{i}}}" for i in range(len(arguments)))
    prompt = f"PROMPT('{question}? {places}', {', '.join(arguments)})"
    if operator == "CLASSIFY":
        return f"AI.CLASSIFY({prompt}, {list(LABELS)})"
    return f"AI.{operator}({prompt})"


def _stored(operator: str, question: str, arguments: list[str]) -> str:
    text = " || '&' || ".join(f"({argument})::VARCHAR" for argument in arguments)
    return f"stored_{operator.lower()}('{question}', {text})"


class StoredAnswers:
    """Gives a stub the stored values."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], Any] = {}
        self._connection = duckdb.connect()
        for macro in MACROS:
            self._connection.execute(macro)

    def __call__(self, call: AICall, key: Key) -> Any:
        if len(key) == 1 and " and " in "".join(str(p) for p in call.prompt.parts):
            raise AssertionError("a document over two relations")
        question = str(call.prompt.parts[0]).removesuffix("? ")
        name = {Operator.IF: "if", Operator.SCORE: "score", Operator.CLASSIFY: "classify"}[call.operator]
        text = "&".join(key)
        if (name, question, text) not in self._known:
            row = self._connection.execute(f"SELECT stored_{name}($1, $2)", [question, text]).fetchone()
            assert row is not None
            self._known[name, question, text] = row[0]
        return self._known[name, question, text]
