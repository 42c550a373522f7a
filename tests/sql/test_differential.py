"""Random statements: the rows of plain DuckDB over stored values, whatever the order of questions."""

from __future__ import annotations

import duckdb
import pytest

from tests.sql.generate import TABLES, Generator
from tests.sql.reference import StoredAnswers, ai_sql, catalog, plain_sql
from tests.sql.stub import Stub, StubCatalog, rows, run

NUM_CHUNKS = 20
NUM_STATEMENTS = 105


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return catalog(*TABLES)


@pytest.fixture(scope="module")
def stored() -> StoredAnswers:
    return StoredAnswers()


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, NUM_CHUNKS))]
)
def test_random_statements(chunk: int, tables: StubCatalog, stored: StoredAnswers) -> None:
    generator = Generator(chunk)
    num_compared = 0
    for number in range(NUM_STATEMENTS):
        template = generator.statement()
        try:
            expected = tables.connection.sql(plain_sql(template)).to_arrow_table()
        except duckdb.Error:
            continue
        order = "as_written" if number % 2 else "auto"
        result = run(ai_sql(template), tables, Stub(stored, batch=1 + number % 50), order=order)
        assert result.schema == expected.schema, template
        found, wanted = map(repr, rows(result)), map(repr, rows(expected))
        if " ORDER BY " in template and " LIMIT " in template.rsplit(" ORDER BY ", 1)[1]:
            assert list(found) == list(wanted), template
        else:
            assert sorted(found) == sorted(wanted), template
        num_compared += 1
    assert num_compared > 100
