"""Statements of unusual shape are answered as DuckDB would answer them."""

from __future__ import annotations

import pytest

import quail
from tests.shell.stub import StubEngine

CALL = "AI.IF(PROMPT('Good? {0}', text))"


@pytest.mark.parametrize(
    "statement",
    [
        f"SELECT id FROM docs, LATERAL (SELECT {CALL} AS f) WHERE f ORDER BY id",
        f"SELECT id FROM docs, LATERAL (SELECT {CALL} AS f) t WHERE t.f ORDER BY id",
        f"SELECT id FROM docs WHERE (SELECT {CALL}) ORDER BY id",
        f"SELECT id FROM docs WHERE EXISTS (SELECT 1 WHERE {CALL}) ORDER BY id",
    ],
)
def test_a_call_in_a_select_without_from(statement: str) -> None:
    engine = StubEngine(lambda call, arguments: "good" in arguments[0])
    with quail.Session(engine=engine) as session:
        session.register(
            "docs", [{"id": 1, "text": "good"}, {"id": 2, "text": "bad"}, {"id": 3, "text": None}]
        )
        assert session.sql(statement).run().fetchall() == [(1,)]
