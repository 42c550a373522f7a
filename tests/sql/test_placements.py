"""AI calls wherever an expression may stand: the rows of plain DuckDB over stored values."""

from __future__ import annotations

import pytest

from tests.sql.reference import StoredAnswers, ai_sql, catalog, plain_sql
from tests.sql.stub import Stub, StubCatalog, rows, run

TABLES = (
    "CREATE TABLE r AS SELECT i AS id, CASE WHEN i % 7 <> 3 THEN 'body ' || (i % 11) END AS body, i % 5 AS k,"
    " 'T' || (i % 3) AS title FROM range(30) t(i)",
    "CREATE TABLE u AS SELECT i AS id, CASE WHEN i % 5 <> 2 THEN 'word ' || (i % 6) END AS word, i % 4 AS k"
    " FROM range(12) t(i)",
    "CREATE VIEW v AS SELECT id, body, k FROM r WHERE id > 4",
)

PLACEMENTS = {
    "where": "SELECT id FROM r WHERE @IF[q](body)",
    "where with a free conjunct": "SELECT id FROM r WHERE @IF[q](body) AND k < 3",
    "two filters": "SELECT id FROM r WHERE @IF[q](body) AND @IF[p](title || body)",
    "negated": "SELECT id FROM r WHERE NOT @IF[q](body)",
    "or": "SELECT id FROM r WHERE @IF[q](body) OR k = 1 OR @IF[p](body)",
    "contradiction": "SELECT id FROM r WHERE @IF[q](body) AND NOT @IF[q](body)",
    "is false": "SELECT id FROM r WHERE @IF[q](body) IS FALSE",
    "is null": "SELECT id FROM r WHERE @IF[q](body) IS NULL",
    "is not true": "SELECT id FROM r WHERE @IF[q](body) IS NOT TRUE",
    "compared": "SELECT id FROM r WHERE @SCORE[s](body) > 0.4",
    "in a list": "SELECT id FROM r WHERE @CLASSIFY[c](body) IN ('red', 'blue')",
    "case": "SELECT id, CASE WHEN k < 2 THEN @SCORE[s](body) WHEN @IF[q](body) THEN 7 ELSE -1 END AS x FROM r",
    "simple case": "SELECT id, CASE @CLASSIFY[c](body) WHEN 'red' THEN 1 WHEN 'blue' THEN 2 END AS x FROM r",
    "if": "SELECT id, if(@IF[q](body), @SCORE[s](body), @SCORE[t](body)) AS x FROM r",
    "coalesce": "SELECT id, coalesce(@SCORE[s](body), @SCORE[t](title), 9) AS x FROM r",
    "select": "SELECT id, @IF[q](body) AS a, @CLASSIFY[c](body) AS b FROM r WHERE k <> 2",
    "select distinct": "SELECT DISTINCT @CLASSIFY[c](body) AS x, k FROM r",
    "distinct on": "SELECT DISTINCT ON (@CLASSIFY[c](body)) @CLASSIFY[c](body) AS x, min(id) OVER () AS m FROM r",
    "group by": "SELECT @CLASSIFY[c](body) AS x, count(*) AS n FROM r GROUP BY @CLASSIFY[c](body)",
    "group by alias": "SELECT @CLASSIFY[c](body) AS x, count(*) AS n FROM r GROUP BY x",
    "group by position": "SELECT @CLASSIFY[c](body) AS x, count(*) AS n FROM r GROUP BY 1",
    "group by all": "SELECT @CLASSIFY[c](body) AS x, k, count(*) AS n FROM r GROUP BY ALL",
    "grouping sets": "SELECT k, title, count(*) FILTER (WHERE @IF[q](body)) AS n FROM r"
    " GROUP BY GROUPING SETS ((k), (title), ())",
    "having": "SELECT k FROM r GROUP BY k HAVING @IF[q](k::VARCHAR) AND count(*) > 2",
    "having over an aggregate": "SELECT k FROM r GROUP BY k HAVING @IF[q](string_agg(body, '-' ORDER BY id))",
    "aggregate argument": "SELECT k, sum(@SCORE[s](body)) AS x, max(@CLASSIFY[c](body)) AS y FROM r GROUP BY k",
    "aggregate filter": "SELECT count(*) FILTER (WHERE @IF[q](body)) AS n FROM r",
    "aggregate argument and filter": "SELECT sum(@SCORE[s](body)) FILTER (WHERE k > 1 AND @IF[q](body)) AS n FROM r",
    "over an aggregate": "SELECT k, @IF[q](string_agg(body, '-' ORDER BY id)) AS x FROM r GROUP BY k",
    "window argument": "SELECT id, sum(@SCORE[s](body)) OVER (PARTITION BY k ORDER BY id) AS x FROM r",
    "window partition": "SELECT id, count(*) OVER (PARTITION BY @CLASSIFY[c](body)) AS x FROM r",
    "over a window": "SELECT id, @IF[q](lag(body) OVER (ORDER BY id)) AS x FROM r",
    "qualify": "SELECT id FROM r QUALIFY row_number() OVER (PARTITION BY k ORDER BY id) < 3 AND @IF[q](body)",
    "qualify over a call": "SELECT id FROM r QUALIFY rank() OVER (PARTITION BY k ORDER BY @SCORE[s](body), id) = 1",
    "order by": "SELECT id FROM r ORDER BY @SCORE[s](body) DESC NULLS LAST, id",
    "order by alias": "SELECT id, @SCORE[s](body) AS s FROM r ORDER BY s NULLS FIRST, id LIMIT 7",
    "limit": "SELECT id, @IF[q](body) AS x FROM r ORDER BY id LIMIT 5 OFFSET 3",
    "filter and limit": "SELECT id FROM r WHERE @IF[q](body) LIMIT 4",
    "inner join": "SELECT r.id, u.id AS uid FROM r JOIN u ON r.k = u.k AND @IF[j](r.body, u.word)",
    "join and filter": "SELECT r.id, u.id AS uid FROM r JOIN u ON @IF[j](r.body, u.word) WHERE @IF[q](body) AND r.k = 1",
    "left join": "SELECT r.id, u.id AS uid FROM r LEFT JOIN u ON r.k = u.k AND @IF[j](r.body, u.word)",
    "left join, one side": "SELECT r.id, u.id AS uid FROM r LEFT JOIN u ON r.k = u.k AND @IF[q](r.body)",
    "right join": "SELECT r.id, u.id AS uid FROM r RIGHT JOIN u ON @IF[j](r.body, u.word) AND r.k = u.k",
    "full join": "SELECT r.id, u.id AS uid FROM r FULL JOIN u ON r.k = u.k AND @IF[j](r.body, u.word)",
    "semi join": "SELECT r.id FROM r SEMI JOIN u ON r.k = u.k AND @IF[j](r.body, u.word)",
    "anti join": "SELECT r.id FROM r ANTI JOIN u ON r.k = u.k AND @IF[j](r.body, u.word)",
    "cross join": "SELECT r.id, u.id AS uid FROM r, u WHERE r.id < u.id AND @IF[j](r.body, u.word)",
    "self join": "SELECT a.id, b.id AS bid FROM r a JOIN r b ON a.id < b.id AND a.k = b.k AND @IF[j](a.body, b.body)",
    "three tables": "SELECT r.id, u.id AS uid, w.id AS wid FROM r LEFT JOIN u ON r.k = u.k AND @IF[j](r.body, u.word)"
    " JOIN u w ON w.id = r.id AND @IF[i](r.title, w.word)",
    "using": "SELECT k, r.id FROM r JOIN u USING (k) WHERE @IF[j](r.body, u.word)",
    "exists": "SELECT id FROM r WHERE EXISTS (SELECT 1 FROM u WHERE u.k = r.k AND @IF[j](r.body, u.word))",
    "not exists": "SELECT id FROM r WHERE NOT EXISTS (SELECT 1 FROM u WHERE u.k = r.k AND @IF[j](r.body, u.word))",
    "in a subquery": "SELECT id FROM r WHERE k IN (SELECT k FROM u WHERE @IF[q](word))",
    "not in a subquery": "SELECT id FROM r WHERE id NOT IN (SELECT id FROM u WHERE @IF[q](word))",
    "scalar subquery": "SELECT id, (SELECT max(@SCORE[s](word)) FROM u WHERE u.k = r.k) AS x FROM r",
    "nested exists": "SELECT id FROM r WHERE EXISTS (SELECT 1 FROM u WHERE u.k = r.k AND EXISTS"
    " (SELECT 1 FROM r z WHERE z.id = u.id AND @IF[j](r.body, z.title)))",
    "subquery in from": "SELECT * FROM (SELECT id, @SCORE[s](body) AS s FROM r) x WHERE s > 0.3",
    "lateral": "SELECT r.id, l.x FROM r, LATERAL (SELECT @IF[q](r.body) AS x) l WHERE l.x",
    "cte": "WITH c AS (SELECT id, body FROM r WHERE @IF[q](body)) SELECT id, @CLASSIFY[c](body) AS x FROM c",
    "cte twice": "WITH c AS (SELECT id, @SCORE[s](body) AS s FROM r) SELECT a.id FROM c a JOIN c b ON a.s = b.s AND a.id < b.id",
    "cte that shadows": "WITH r AS (SELECT id + 100 AS id, word AS body FROM u) SELECT id FROM r WHERE @IF[q](body)",
    "cte of a cte": "WITH a AS (SELECT * FROM r WHERE @IF[q](body)), b AS (SELECT * FROM a WHERE @IF[p](title))"
    " SELECT count(*) AS n FROM b",
    "view": "SELECT id FROM v WHERE @IF[q](body)",
    "union": "SELECT id FROM r WHERE @IF[q](body) UNION ALL SELECT id FROM u WHERE @IF[q](word)",
    "except": "SELECT k FROM r EXCEPT SELECT k FROM u WHERE @IF[q](word)",
    "intersect": "SELECT @CLASSIFY[c](body) AS x FROM r INTERSECT SELECT @CLASSIFY[c](word) FROM u",
    "values": "SELECT * FROM (VALUES (1, @IF[q]('a')), (2, @IF[q]('b'))) t(a, b)",
    "without from": "SELECT @IF[q]('x' || 1) AS x",
    "nested call": "SELECT id FROM r WHERE @IF[q](@CLASSIFY[c](body) || title)",
    "over an inner aggregate": "SELECT k FROM (SELECT k, string_agg(body, ' ' ORDER BY id) AS doc FROM r GROUP BY k) g"
    " WHERE @IF[q](doc)",
    "from first": "FROM r SELECT id WHERE @IF[q](body)",
    "correlated group": "SELECT id, (SELECT count(*) FROM u WHERE @IF[j](r.body, u.word)) AS n FROM r",
    "recursive around": "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 9)"
    " SELECT r.id FROM r JOIN n ON r.id = n.i WHERE @IF[q](body)",
    "lateral alias": "SELECT title || body AS doc, @IF[q](doc) AS x FROM r",
    "where on an alias": "SELECT id, @SCORE[s](body) AS s FROM r WHERE s > 0.3",
    "alias of an alias": "SELECT id, @SCORE[s](body) AS s, s * 2 AS d FROM r QUALIFY row_number() OVER (ORDER BY s, id) < 9",
    "star replace": "SELECT * REPLACE (@CLASSIFY[c](body) AS body) FROM r",
    "quantified": "SELECT id FROM r WHERE k = ANY (SELECT k FROM u WHERE @IF[q](word))",
}


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    return catalog(*TABLES)


@pytest.fixture(scope="module")
def stored() -> StoredAnswers:
    return StoredAnswers()


@pytest.mark.parametrize("order", ["auto", "as_written"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_rows_and_names_equal_plain_duckdb(
    name: str, order: str, tables: StubCatalog, stored: StoredAnswers
) -> None:
    template = PLACEMENTS[name]
    result = run(ai_sql(template), tables, Stub(stored), order=order)
    expected = tables.connection.sql(plain_sql(template)).to_arrow_table()
    assert result.schema.names == expected.schema.names
    assert result.schema.types == expected.schema.types
    assert sorted(map(repr, rows(result))) == sorted(map(repr, rows(expected)))
