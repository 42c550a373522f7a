"""The Python builder: each step gives the rows of the SQL that one would write for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import quail
from quail import BindError, ConfigError, QuailError, SourceError, col, prompt
from tests.builder.sessions import make_session

PRAISE = prompt("Is this praise?\n\n{0}", col("r.body"))
PRAISE_SQL = r"PROMPT(E'Is this praise?\n\n{0}', r.body)"
ABOUT = prompt("Is {0} about {1}?", col("r.body"), col("t.name"))
ABOUT_SQL = "PROMPT('Is {0} about {1}?', r.body, t.name)"
LABELS = ["good", "bad"]


@pytest.fixture(scope="module")
def session() -> Iterator[quail.Session]:
    with make_session()[0] as session:
        yield session


@pytest.fixture
def r(session: quail.Session) -> quail.Docs:
    return session.docs("reviews").alias("r")


@pytest.fixture
def t(session: quail.Session) -> quail.Docs:
    return session.docs("topics").alias("t")


def rows(table: pa.Table) -> list[str]:
    """The rows, in an order of their own."""
    return sorted(repr(tuple(row.values())) for row in table.to_pylist())


Step = Callable[[Any, Any], Any]

CASES: dict[str, tuple[Step, str]] = {
    "docs": (lambda r, t: r, "FROM reviews r"),
    "where": (lambda r, t: r.where("stars > 2"), "FROM reviews r WHERE stars > 2"),
    "where twice": (
        lambda r, t: r.where("stars > 2 OR id = 2").where("r.id < 6"),
        "FROM reviews r WHERE (stars > 2 OR id = 2) AND id < 6",
    ),
    "where with params": (
        lambda r, t: r.where("stars > ? AND body <> ?", [2, "it's"]),
        "FROM reviews r WHERE stars > 2 AND body <> 'it''s'",
    ),
    "where with named params": (
        lambda r, t: r.where("stars > $least OR id = $least", {"least": 4}),
        "FROM reviews r WHERE stars > 4 OR id = 4",
    ),
    "where with a comment": (
        lambda r, t: r.where("stars > 2 -- not ?").limit(9),
        "FROM reviews r WHERE stars > 2",
    ),
    "where with a call": (
        lambda r, t: r.where("NOT AI.IF('Is this praise? ' || body)"),
        "FROM reviews r WHERE NOT AI.IF('Is this praise? ' || body)",
    ),
    "ai_if": (lambda r, t: r.ai_if(PRAISE), f"FROM reviews r WHERE AI.IF({PRAISE_SQL})"),
    "ai_if with options": (
        lambda r, t: r.ai_if(PRAISE, answers=["yes", "it's no"], selectivity=0.25),
        f"FROM reviews r WHERE AI.IF({PRAISE_SQL}, answers := ['yes', 'it''s no'], selectivity := 0.25)",
    ),
    "ai_if twice and where": (
        lambda r, t: r.ai_if(PRAISE).where("id > 1").ai_if(prompt("Is it long? {0}", "body")),
        f"FROM reviews r WHERE AI.IF({PRAISE_SQL}) AND id > 1 AND AI.IF(PROMPT('Is it long? {{0}}', body))",
    ),
    "ai_if over two columns": (
        lambda r, t: r.ai_if(prompt("{0}: {1}, right?", col("r.stars"), col("r.body"))),
        "FROM reviews r WHERE AI.IF(PROMPT('{0}: {1}, right?', r.stars, r.body))",
    ),
    "ai_if after limit": (
        lambda r, t: r.order_by("id").limit(3).ai_if(PRAISE),
        f"FROM (FROM reviews ORDER BY id LIMIT 3) r WHERE AI.IF({PRAISE_SQL})",
    ),
    "ai_answer": (
        lambda r, t: r.ai_answer(PRAISE, "is_praise"),
        f"SELECT *, AI.IF({PRAISE_SQL}) AS is_praise FROM reviews r",
    ),
    "ai_score": (lambda r, t: r.ai_score(PRAISE), f"SELECT *, AI.SCORE({PRAISE_SQL}) AS score FROM reviews r"),
    "ai_score and where": (
        lambda r, t: r.ai_score(PRAISE).where("score > 0.3"),
        f"FROM (SELECT *, AI.SCORE({PRAISE_SQL}) AS score FROM reviews r) WHERE score > 0.3",
    ),
    "ai_score, where and select": (
        lambda r, t: r.ai_score(PRAISE).where("score > 0.3").select("id"),
        f"SELECT id FROM reviews r WHERE AI.SCORE({PRAISE_SQL}) > 0.3",
    ),
    "ai_classify": (
        lambda r, t: r.ai_classify(PRAISE, LABELS),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) AS label FROM reviews r",
    ),
    "ai_classify with descriptions": (
        lambda r, t: r.ai_classify(PRAISE, [("good", "it's fine"), "bad"], name="c"),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, [('good', 'it''s fine'), ('bad', NULL)]) AS c FROM reviews r",
    ),
    "ai_classify by a mapping": (
        lambda r, t: r.ai_classify(PRAISE, {"good": "fine", "bad": None}),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, [('good', 'fine'), ('bad', NULL)]) AS label FROM reviews r",
    ),
    "ai_classify by dicts": (
        lambda r, t: r.ai_classify(PRAISE, [{"label": "good", "description": "fine"}, {"label": "bad"}]),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, [('good', 'fine'), ('bad', NULL)]) AS label FROM reviews r",
    ),
    "ai_classify by a table": (
        lambda r, t: r.ai_classify(PRAISE, "words"),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, words) AS label FROM reviews r",
    ),
    "ai_classify, then ai_if": (
        lambda r, t: r.ai_classify(PRAISE, LABELS).ai_if(PRAISE),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) FROM reviews r WHERE AI.IF({PRAISE_SQL})",
    ),
    "a question about a label": (
        lambda r, t: r.ai_classify(PRAISE, LABELS).ai_if(prompt("Is {0} good?", col("label"))),
        f"FROM (SELECT *, AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) AS label FROM reviews r) "
        "WHERE AI.IF(PROMPT('Is {0} good?', label))",
    ),
    "label_in": (
        lambda r, t: r.ai_classify(PRAISE, LABELS).label_in(["bad"]),
        f"SELECT *, AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) FROM reviews r "
        f"WHERE AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) = 'bad'",
    ),
    "label_in of a column": (
        lambda r, t: r.ai_classify(PRAISE, LABELS).limit(99).label_in(["bad", "x"], name="label"),
        f"FROM (SELECT *, AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) AS label FROM reviews r) "
        "WHERE label IN ('bad', 'x')",
    ),
    "ai_probabilities": (
        lambda r, t: r.ai_probabilities(PRAISE, LABELS),
        f"SELECT *, AI.PROBABILITIES({PRAISE_SQL}, ['good', 'bad']) FROM reviews r",
    ),
    "select": (
        lambda r, t: r.select("r.id", col("body"), length="length(body)"),
        "SELECT id, body, length(body) FROM reviews r",
    ),
    "select without a computed column": (
        lambda r, t: r.ai_score(PRAISE).ai_classify(PRAISE, LABELS).select("label", "id"),
        f"SELECT AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']), id FROM reviews r",
    ),
    "select all": (
        lambda r, t: r.ai_score(PRAISE).select("*", twice="2 * score"),
        f"SELECT *, 2 * score FROM (SELECT *, AI.SCORE({PRAISE_SQL}) AS score FROM reviews r)",
    ),
    "select, then where": (
        lambda r, t: r.select("id", "body", words="length(body)").where("words > 3").ai_if(PRAISE),
        f"SELECT id, body, length(body) FROM reviews r WHERE length(body) > 3 AND AI.IF({PRAISE_SQL})",
    ),
    "group_by": (
        lambda r, t: r.ai_classify(PRAISE, LABELS).group_by("label").agg(n="count(*)", most="max(stars)"),
        f"SELECT AI.CLASSIFY({PRAISE_SQL}, ['good', 'bad']) l, count(*), max(stars) FROM reviews r GROUP BY l",
    ),
    "group_by with an aggregate of a score": (
        lambda r, t: r.ai_score(PRAISE).group_by("stars").agg(mean="avg(score)"),
        f"SELECT stars, avg(AI.SCORE({PRAISE_SQL})) FROM reviews r GROUP BY stars",
    ),
    "group_by, then where": (
        lambda r, t: r.group_by("stars").agg(n="count(*)").where("n > 1"),
        "SELECT stars, count(*) AS n FROM reviews GROUP BY stars HAVING n > 1",
    ),
    "group_by of nothing": (lambda r, t: r.group_by().agg(n="count(*)"), "SELECT count(*) FROM reviews"),
    "ai_join": (
        lambda r, t: r.ai_join(t, ABOUT),
        f"SELECT * FROM reviews r, topics t WHERE AI.IF({ABOUT_SQL})",
    ),
    "ai_join of filtered sides": (
        lambda r, t: (
            r.where("id > 1").ai_if(PRAISE).ai_join(t.where("name <> 'x'"), ABOUT, on="length(t.name) = stars + ?",
                                                    params=[1])
        ),
        "SELECT * FROM reviews r, topics t WHERE r.id > 1 AND length(t.name) = r.stars + 1 "
        f"AND AI.IF({PRAISE_SQL}) AND AI.IF({ABOUT_SQL})",
    ),
    "ai_join left": (
        lambda r, t: r.ai_join(t, ABOUT, on="r.id < 4", semantics="left"),
        f"SELECT * FROM reviews r LEFT JOIN topics t ON r.id < 4 AND AI.IF({ABOUT_SQL})",
    ),
    "ai_join left of a filtered side": (
        lambda r, t: r.ai_join(t.where("\"group\" = 'a'"), ABOUT, semantics="left"),
        f"SELECT * FROM reviews r LEFT JOIN (FROM topics WHERE \"group\" = 'a') t ON AI.IF({ABOUT_SQL})",
    ),
    "ai_join exists": (
        lambda r, t: r.ai_join(t, ABOUT, semantics="exists"),
        f"SELECT * FROM reviews r WHERE EXISTS (FROM topics t WHERE AI.IF({ABOUT_SQL}))",
    ),
    "ai_join anti": (
        lambda r, t: r.ai_join(t.where("name LIKE 'c%'"), ABOUT, on="t.name <> r.body", semantics="anti"),
        "SELECT * FROM reviews r WHERE NOT EXISTS (FROM topics t WHERE name LIKE 'c%' AND t.name <> r.body "
        f"AND AI.IF({ABOUT_SQL}))",
    ),
    "ai_join by a table's name": (
        lambda r, t: r.ai_join("topics", prompt("{0} {1}", "r.body", "topics.name")),
        "SELECT * FROM reviews r, topics WHERE AI.IF(PROMPT('{0} {1}', r.body, topics.name))",
    ),
    "two ai_joins": (
        lambda r, t: r.ai_join(t, ABOUT).ai_join(
            t.alias("u"), prompt("{0} or {1}?", col("r.body"), col("u.name")), on="t.name < u.name"
        ),
        f"SELECT * FROM reviews r, topics t, topics u WHERE AI.IF({ABOUT_SQL}) AND t.name < u.name "
        "AND AI.IF(PROMPT('{0} or {1}?', r.body, u.name))",
    ),
    "join": (
        lambda r, t: r.join(t, "length(t.name) > r.stars").ai_if(PRAISE),
        f"SELECT * FROM reviews r JOIN topics t ON length(t.name) > r.stars WHERE AI.IF({PRAISE_SQL})",
    ),
    "join left": (
        lambda r, t: r.join(t.where("name = 'plot'"), "r.stars = 5", how="left"),
        "SELECT * FROM reviews r LEFT JOIN (FROM topics WHERE name = 'plot') t ON r.stars = 5",
    ),
    "join cross": (lambda r, t: r.join(t, how="cross"), "SELECT * FROM reviews r, topics t"),
    "join semi": (
        lambda r, t: r.join(t, "length(t.name) = r.stars + ?", how="semi", params=[1]),
        "SELECT * FROM reviews r WHERE r.stars + 1 IN (SELECT length(name) FROM topics)",
    ),
    "join anti": (
        lambda r, t: r.join(t, "length(t.name) = r.id", how="anti"),
        "SELECT * FROM reviews r WHERE NOT EXISTS (FROM topics t WHERE length(t.name) = r.id)",
    ),
    "a join with a name": (
        lambda r, t: r.join(t, how="cross").alias("p").ai_if(prompt("{0} {1}", "p.body", "p.name")),
        "FROM (SELECT * FROM reviews r, topics t) p WHERE AI.IF(PROMPT('{0} {1}', p.body, p.name))",
    ),
    "a query": (
        lambda r, t: r._session.docs("SELECT id, body FROM reviews WHERE id > ?;", [2]).alias("r").ai_if(PRAISE),
        f"SELECT id, body FROM reviews r WHERE id > 2 AND AI.IF({PRAISE_SQL})",
    ),
    "a bound query": (
        lambda r, t: r._session.docs(
            r._session.sql("SELECT id, body FROM reviews WHERE id > $n OR body = $s", {"n": 4, "s": "$n"})
        ).where("id < 6"),
        "SELECT id, body FROM reviews WHERE id = 5",
    ),
    "apply": (
        lambda r, t: r.where("id > 1").apply(lambda batch: batch.slice(0, 2)).ai_if(PRAISE),
        f"FROM reviews r WHERE id IN (2, 3) AND AI.IF({PRAISE_SQL})",
    ),
    "apply after a call, twice, joined": (
        lambda r, t: (
            r.ai_score(PRAISE).apply(lambda batch: batch).apply(lambda batch: batch.select(["id", "score"]))
            .join(t.apply(lambda batch: batch.to_pandas()), how="cross").select("score", "name")
        ),
        f"SELECT AI.SCORE({PRAISE_SQL}), t.name FROM reviews r, topics t",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_step_gives_the_rows_of_its_sql(case: str, r: quail.Docs, t: quail.Docs) -> None:
    r._session.register("words", {"w": LABELS})  # type: ignore[attr-defined]
    step, sql = CASES[case]
    built = step(r, t)
    assert rows(built.collect()) == rows(r._session.sql(sql).collect())


def test_steps_leave_what_they_start_from(r: quail.Docs) -> None:
    before = r.sql()
    r.where("id = 1").ai_score(PRAISE).order_by("score")
    assert r.sql() == before == 'SELECT *\nFROM "reviews" AS "r"'


def test_the_text_is_short_and_says_it(r: quail.Docs) -> None:
    docs = r.where("stars > 2").ai_if(PRAISE).order_by("stars", "id", descending=[True, False]).limit(5, 1)
    assert docs.sql() == (
        'SELECT *\nFROM "reviews" AS "r"\nWHERE (stars > 2)\n'
        '  AND AI.IF(PROMPT(E\'Is this praise?\\n\\n{0}\', "r"."body"))\n'
        'ORDER BY "r"."stars" DESC, "r"."id"\nLIMIT 5 OFFSET 1'
    )
    assert docs.sql() in repr(docs)


def test_order_and_limit(r: quail.Docs) -> None:
    assert r.order_by("id", descending=True).limit(2, offset=1).select("id").collect()["id"].to_pylist() == [
        5,
        4,
    ]
    by_both = r.where("stars IS NOT NULL").order_by("id").order_by("stars", descending=True).select("id")
    assert by_both.collect()["id"].to_pylist() == [1, 6, 3, 5, 2]
    assert r.limit(5).limit(2).group_by().agg(n="count(*)").collect()["n"].to_pylist() == [2]
    assert r.limit(0).collect().num_rows == 0


def test_order_by_a_score_that_is_not_selected(r: quail.Docs) -> None:
    docs = r.ai_score(PRAISE).order_by("score", descending=True)
    scored = docs.select("id", "score").collect()
    assert docs.select("id").collect()["id"].to_pylist() == scored["id"].to_pylist()
    assert docs.select("id", score="-id").collect()["id"].to_pylist() == scored["id"].to_pylist()


def test_calls_are_asked_for_chosen_columns_and_left_rows_only() -> None:
    session, stub = make_session()
    docs = session.docs("reviews").alias("r").ai_score(PRAISE).ai_classify(PRAISE, LABELS).label_in(["good"])
    docs.select("label").run()
    assert {call for call, _ in stub.asked} == {0}
    assert len(stub.asked) == 5


def test_null_documents_and_empty_tables() -> None:
    session, stub = make_session(
        empty=pa.table({"id": pa.array([], pa.int64()), "body": pa.array([], pa.string())}),
        nothing=pa.table({"id": pa.array([1, 2]), "body": pa.array([None, None], pa.string())}),
    )
    for name, num_rows in (("empty", 0), ("nothing", 2)):
        docs = session.docs(name).alias("r")
        table = docs.ai_classify(PRAISE, LABELS).ai_score(PRAISE).ai_probabilities(PRAISE, LABELS).collect()
        assert table.num_rows == num_rows
        assert table.schema.field("label").type == pa.string()
        assert table.schema.field("score").type == pa.float64()
        assert table.schema.field("probabilities").type == pa.map_(pa.string(), pa.float64())
        assert docs.ai_if(PRAISE).collect().num_rows == 0
        assert docs.apply(lambda batch: batch).collect().num_rows == num_rows
    assert stub.asked == []


def test_explain_and_run_options(r: quail.Docs) -> None:
    assert "AI.IF" in r.ai_if(PRAISE).explain()
    assert r.ai_if(PRAISE).explain("json", order="as_written").startswith("{")
    result = r.ai_if(PRAISE).run(order="as_written", on_error="null", progress=False)
    assert result.report.model == "stub"
    assert result.report.stages[0]["evaluated"] == 5
    with pytest.raises(ConfigError, match="order = 'x'"):
        r.run(order="x")


# apply


def test_apply_runs_when_it_is_run_and_each_time(r: quail.Docs) -> None:
    seen: list[int] = []

    def count(batch: pa.RecordBatch) -> dict[str, list[int]]:
        seen.append(batch.num_rows)
        return {"n": [batch.num_rows]}

    docs = r.apply(count, batch_rows=4)
    assert seen == []
    assert docs.collect()["n"].to_pylist() == [4, 2] == docs.collect()["n"].to_pylist()
    assert seen == [4, 2, 4, 2]
    assert not [name for name in r._session.tables if name.startswith("quail_")]  # type: ignore[attr-defined]


def test_apply_shows_in_explain(r: quail.Docs) -> None:
    def shout(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise AssertionError("not run by explain")

    text = r.ai_if(PRAISE).apply(shout).where("id > 1").explain()
    assert "applied_1: shout of the rows above" in text
    assert "id > 1" in text
    with pytest.raises(ConfigError, match="text only"):
        r.apply(shout).explain("json")


def test_apply_adds_up_the_reports() -> None:
    session, _ = make_session()
    report = session.docs("reviews").alias("r").ai_if(PRAISE).apply(lambda batch: batch).run().report
    assert report.model == "stub"
    assert report.tokens["naive"] == 50
    assert [stage["evaluated"] for stage in report.stages] == [5]


def boom(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise ZeroDivisionError("seven")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (boom, "apply: boom failed: ZeroDivisionError: seven"),
        (lambda batch: None, "gave nothing back"),
        (lambda batch: 7, "an object of type builtins.int is not a table"),
        (
            lambda batch: {str(batch["id"][0]): [1], "x": [[1]] if batch["id"][0].as_py() > 3 else ["y"]},
            "different",
        ),
    ],
)
def test_a_failing_function_leaves_the_session_usable(
    function: Callable[[Any], Any], message: str, r: quail.Docs
) -> None:
    with pytest.raises(QuailError, match=message):
        r.apply(function, batch_rows=3).where("id > 1").run()
    assert r.ai_if(PRAISE).collect().num_rows == 2
    assert set(r._session.tables) <= {"reviews", "topics", "words"}  # type: ignore[attr-defined]


# Names and texts

NASTY_NAMES = [
    'a "b" c',
    "a.b",
    "SELECT",
    "Größe ☃",
    "x'; DROP TABLE reviews; --",
    "*",
    " x ",
    "r.body",
    "{0}",
    "a\nb",
]
NASTY_TEXTS = [
    "it's",
    'say "x"',
    "back\\slash",
    "{braces} {}",
    "tab\tnew\nline\r\n",
    "'); DROP TABLE t; --",
    "☃ é",
    "\\n",
]


@pytest.mark.parametrize("name", NASTY_NAMES)
def test_names_are_quoted(name: str) -> None:
    session, stub = make_session(**{name: {name: ["one", "two"], "id": [1, 2]}})
    docs = session.docs(name).ai_classify(prompt("{0}?", col(name, table=name)), LABELS, name=f"{name}!")
    docs = docs.order_by(col(name, table=name)).alias(f"{name}?")
    table = docs.select("*", col(name, f"{name}?")).collect()
    assert table.column(0).to_pylist() == ["one", "two"] == table.column(3).to_pylist()
    assert table.column_names[:3] == [name, "id", f"{name}!"]
    assert {texts for _, texts in stub.asked} == {("one",), ("two",)}
    counted = session.docs(name).group_by(col(name, name)).agg(**{f"n {name}": "count(*)"}).collect()
    assert counted.column_names == [name, f"n {name}"]


@pytest.mark.filterwarnings("ignore:the prompt holds a backslash")
@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_texts_arrive_as_they_are(text: str) -> None:
    session, stub = make_session()
    calls = []
    stub.answer = lambda call, texts: (calls.append(call), text)[1]
    docs = session.docs("reviews").where("id = $id OR body = $text", {"id": 1, "text": text})
    docs = docs.ai_classify(prompt(text + "{0}", "body"), [(text, text), ("other", None)]).label_in([text])
    assert docs.collect()["label"].to_pylist() == [text]
    assert calls[0].prompt.parts[0] == text
    assert (calls[0].categories[0].label, calls[0].categories[0].description) == (text, text)


def test_a_column_is_found_by_alias_or_as_a_whole() -> None:
    session, _ = make_session(odd={"a.b": [1], "a": [2]})
    odd = session.docs("odd")
    assert odd.select("a.b").collect().to_pydict() == {"a.b": [1]}
    assert odd.alias("a").select("a.a").collect().to_pydict() == {"a": [2]}
    assert odd.alias("a").select(col("a.b", table="A")).collect().to_pydict() == {"a.b": [1]}
    with pytest.raises(ConfigError, match="no table 'z' here"):
        odd.select(col("a", table="z"))


def test_tables_of_the_database() -> None:
    session, _ = make_session()
    session.sql("CREATE TABLE kept AS SELECT 1 AS n").run()
    assert session.docs("kept").collect().to_pydict() == {"n": [1]}
    assert session.docs("main.kept").where("kept.n = 1").collect().num_rows == 1


# Mistakes


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda r: r._session.docs("reviws"), SourceError, "no table 'reviws'\n.*Did you mean 'reviews'"),
        (lambda r: r._session.docs("SELECT * FROM nothing"), BindError, "nothing"),
        (lambda r: r._session.docs("SELECT 1; SELECT 2"), BindError, "one statement"),
        (lambda r: r._session.docs("DROP TABLE reviews"), SourceError, "no table"),
        (lambda r: r._session.docs("SELECT ?"), BindError, "parameter 1 has no value"),
        (lambda r: r._session.docs("reviews", [1]), ConfigError, "no params"),
        (lambda r: r._session.docs(7), ConfigError, "docs takes the name of a table"),
        (lambda r: r.alias(""), ConfigError, "not a name"),
        (lambda r: r.alias("a\0b"), ConfigError, "NUL"),
        (lambda r: r.where("no_column = 1"), BindError, "no_column"),
        (lambda r: r.where("1) OR (1"), BindError, "does not belong to an expression"),
        (lambda r: r.where("true; DROP TABLE reviews"), BindError, "does not belong"),
        (lambda r: r.where("id = 'x"), BindError, "where"),
        (lambda r: r.where("id /* open"), BindError, ""),
        (lambda r: r.where(""), ConfigError, "where takes SQL text"),
        (lambda r: r.where("id = ?"), BindError, "parameter 1 has no value"),
        (lambda r: r.where("id = 1", [1]), BindError, "parameter 1 does not stand in"),
        (lambda r: r.where("id = ?", "5"), ConfigError, "not a list or a mapping"),
        (lambda r: r.where("id = ?", [object()]), ConfigError, "a object cannot be written"),
        (lambda r: r.where("body = '\ud800'"), ConfigError, "lone surrogate"),
        (lambda r: r.ai_if("Is it? {0}"), ConfigError, "a prompt is needed"),
        (lambda r: r.ai_if(prompt("Is it? {0}", "r.bdy")), BindError, "bdy"),
        (lambda r: r.ai_if(PRAISE, selectivty=0.1), BindError, "did you mean selectivity"),
        (lambda r: r.ai_if(PRAISE, **{"x) OR (y": 1}), ConfigError, "no option"),
        (lambda r: r.ai_if(PRAISE, answers=["a"]), BindError, "two different words"),
        (lambda r: r.ai_classify(PRAISE, ["one"]), BindError, "2 to 255"),
        (lambda r: r.ai_classify(PRAISE, 7), ConfigError, "categories are a list"),
        (lambda r: r.ai_classify(PRAISE, [1, 2]), ConfigError, "not a category"),
        (lambda r: r.ai_classify(PRAISE, LABELS, name="body"), ConfigError, "already is a column 'body'"),
        (lambda r: r.ai_score(PRAISE).ai_score(PRAISE), ConfigError, "already is a column 'score'"),
        (lambda r: r.label_in(["good"]), ConfigError, "follows ai_classify"),
        (lambda r: r.ai_classify(PRAISE, LABELS).label_in(["god"]), BindError, "Did you mean 'good'"),
        (lambda r: r.ai_classify(PRAISE, LABELS).label_in([]), ConfigError, "at least one"),
        (lambda r: r.select(), ConfigError, "at least one column"),
        (lambda r: r.select("bdy"), BindError, "bdy"),
        (lambda r: r.select(n="id, body FROM reviews --"), BindError, ""),
        (lambda r: r.select(5), ConfigError, "5 is not a column"),
        (lambda r: r.group_by("stars").agg(n="cuont(*)"), BindError, "cuont"),
        (lambda r: r.group_by().agg(), ConfigError, "at least one aggregate"),
        (lambda r: r.order_by(), ConfigError, "at least one column"),
        (lambda r: r.order_by("id DESC"), BindError, "id DESC"),
        (lambda r: r.order_by("id", descending=[True, False]), ConfigError, "1 columns and 2 values"),
        (lambda r: r.limit(-1), ConfigError, "rows = -1"),
        (lambda r: r.limit(True), ConfigError, "rows = True"),
        (lambda r: r.limit(1, "2"), ConfigError, "offset = '2'"),
        (lambda r: r.apply(7), ConfigError, "takes a function"),
        (lambda r: r.apply(len, batch_rows=0), ConfigError, "batch_rows = 0"),
        (lambda r: r.join("topics", how="outer"), ConfigError, "how = 'outer'"),
        (lambda r: r.join("topics"), ConfigError, "takes a condition"),
        (lambda r: r.join("topics", "true", how="cross"), ConfigError, "takes no condition"),
        (lambda r: r.join(r, "true"), ConfigError, "both sides of the join are called 'r'"),
        (lambda r: r.join(r, "true", how="semi"), ConfigError, "both sides"),
        (lambda r: r.join(7, "true"), ConfigError, "got int"),
        (lambda r: r.ai_join("topics", PRAISE), ConfigError, "reads one side only"),
        (lambda r: r.ai_join("topics", prompt("{0}", "topics.name")), ConfigError, "reads one side only"),
        (lambda r: r.ai_join("topics", ABOUT, semantics="outer"), ConfigError, "semantics = 'outer'"),
        (lambda r: r.join("topics", how="cross").select("r.id", "nme"), BindError, "nme"),
        (
            lambda r: r.alias("a").join(r.join("topics", how="cross"), "true"),
            ConfigError,
            "a join without a name",
        ),
        (
            lambda r: r.join("topics", how="cross").ai_score(PRAISE).where("score > 1"),
            ConfigError,
            "computed column of a join",
        ),
        (lambda r: r.join(make_session()[0].docs("topics"), "true"), ConfigError, "of two sessions"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_where_they_are_made(
    make: Callable[[Any], Any], error: type[Exception], message: str, r: quail.Docs
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        make(r)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("Is it?",), BindError, "holds no document"),
        (("{0} {2}", "a", "b"), BindError, "placeholders"),
        (("{0}", "a", "b"), BindError, "2 columns"),
        (("{0}\0", "a"), ConfigError, "NUL"),
        (("{0}\ud800", "a"), ConfigError, "lone surrogate"),
        ((b"{0}", "a"), BindError, "not bytes"),
        (("{0}", 5), ConfigError, "5 is not a column"),
        (("{0}", ""), ConfigError, "not a name"),
    ],
)
def test_prompts_are_checked(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prompt(*arguments)
