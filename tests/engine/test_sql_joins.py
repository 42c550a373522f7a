"""SQL joins on a tiny model: rows, answers and tokens are those of the pairs' prompts asked one by one."""

from __future__ import annotations

import json
from dataclasses import replace

import duckdb
import numpy as np
import pytest

import quail
from quail.config import EngineConfig
from quail.execution.stages import compile_stage
from tests.engine.engines import TinyEngine
from tests.models.tiny import make_tiny

TEMPLATE = "Does {0} speak of the same thing as {1}?"
PAIR = f"AI.IF(PROMPT('{TEMPLATE}', l.body, r.word))"
SCORE = f"AI.SCORE(PROMPT('{TEMPLATE}', l.body, r.word))"
FILTER = "AI.IF(PROMPT('Is this about the sea? {0}', l.body))"
WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]


def texts(count: int, length: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=7, context=512)


@pytest.fixture(scope="module")
def oracle(folder, tmp_path_factory) -> TinyEngine:
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def open_session(folder, tmp_path):
    sessions = []

    def open_it(**settings) -> quail.Session:
        settings = {"model": str(folder), "dtype": "float32", "layout": "completion", **settings}
        settings = {"cache_dir": tmp_path, "kv_memory": "16MiB", "prefix_sharing": "off", **settings}
        session = quail.Session(EngineConfig(**settings))
        session.register("l", {"id": list(range(6)), "k": [0, 1] * 3, "body": texts(6, 30, seed=1)})
        session.register("r", {"id": list(range(5)), "k": [0, 1, 0, 1, 0], "word": texts(5, 6, seed=2)})
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


def pair_call(session: quail.Session, anchor: int):
    (call,) = session.sql(f"SELECT {SCORE} FROM l, r")._bound.calls
    return replace(call, anchor=anchor)


def probability(oracle: TinyEngine, call, left: str, right: str) -> float:
    anchor, partner = (left, right) if call.anchor == 0 else (right, left)
    yes, no = oracle.oracle_answer(call, anchor, partner)
    return float(1 / (1 + np.exp(no - yes)))


@pytest.mark.parametrize("anchor", [0, 1])
@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("memory", ["300KiB", "16MiB"])
def test_scores_of_pairs_are_those_of_their_prompts(open_session, oracle, anchor, budget, memory):
    session = open_session(token_budget=budget, kv_memory=memory)
    session.register("r", {"id": list(range(5)), "word": texts(5, 6 if anchor == 0 else 60, seed=2)})
    result = session.sql(f"SELECT l.body, r.word, {SCORE} AS s FROM l, r").run(progress=False)
    assert result.report.stages[0]["anchor"] == anchor
    call = pair_call(session, anchor)
    found = result.fetchall()
    assert len(found) == 30
    for left, right, score in found:
        assert score == pytest.approx(probability(oracle, call, left, right), abs=1e-4)


KINDS = {
    "inner": f"SELECT l.id, r.id FROM l JOIN r ON l.k = r.k AND {PAIR}",
    "where": f"SELECT l.id, r.id FROM l, r WHERE l.id <> r.id AND NOT {PAIR}",
    "left": f"SELECT l.id, r.id FROM l LEFT JOIN r ON {PAIR}",
    "right": f"SELECT l.id, r.id FROM l RIGHT JOIN r ON l.k = r.k AND {PAIR}",
    "full": f"SELECT l.id, r.id FROM l FULL JOIN r ON {PAIR}",
    "semi": f"SELECT l.id FROM l SEMI JOIN r ON {PAIR}",
    "anti": f"SELECT l.id FROM l ANTI JOIN r ON {PAIR}",
    "exists": f"SELECT l.id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE {PAIR})",
    "not exists": f"SELECT l.id FROM l WHERE NOT EXISTS (SELECT 1 FROM r WHERE r.k = l.k AND {PAIR})",
    "counted": f"SELECT l.id, (SELECT count(*) FROM r WHERE {PAIR}) AS n FROM l",
    "self": "SELECT a.id, b.id FROM l a JOIN l b ON a.id < b.id"
    f" AND AI.IF(PROMPT('{TEMPLATE}', a.body, b.body))",
    "or": f"SELECT l.id, r.id FROM l, r WHERE {PAIR} OR l.k = 0",
    "filtered": f"SELECT l.id, r.id FROM l JOIN r ON {PAIR} WHERE l.k = 1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_join_has_the_rows_of_its_pairs(open_session, oracle, kind):
    session = open_session()
    result = session.sql(KINDS[kind]).run(progress=False, exists_wave=2)
    anchor = result.report.stages[0]["anchor"]
    left, right = texts(6, 30, seed=1), texts(5, 6, seed=2)
    call = pair_call(session, anchor)
    others = left if kind == "self" else right
    truth = [(a, b, probability(oracle, call, a, b) > 0.5) for a in left for b in others]
    assert {value for _, _, value in truth} == {True, False}, "the model tells pairs apart"
    plain = duckdb.connect()
    plain.execute("CREATE TABLE truth(a VARCHAR, b VARCHAR, v BOOLEAN)")
    plain.executemany("INSERT INTO truth VALUES (?, ?, ?)", truth)
    for name, column, some in (("l", "body", left), ("r", "word", right)):
        plain.execute(f"CREATE TABLE {name}(id INT, k INT, {column} VARCHAR)")
        plain.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", [(i, i % 2, t) for i, t in enumerate(some)])
    sql = KINDS[kind]
    for sides in ("l.body, r.word", "a.body, b.body"):
        x, y = sides.split(", ")
        called = f"AI.IF(PROMPT('{TEMPLATE}', {sides}))"
        sql = sql.replace(
            called, f"((hash({x}), hash({y})) IN (SELECT (hash(a), hash(b)) FROM truth WHERE v))"
        )
    assert sorted(map(repr, result.fetchall())) == sorted(map(repr, plain.sql(sql).fetchall()))


def expected_tokens(oracle: TinyEngine, call, anchors: list[str], partners: list[str]) -> tuple[int, int]:
    """Tokens of anchors with their frames, and of the partners of one anchor."""
    stage = compile_stage(call, oracle.pieces, oracle.tokenizer)
    prefixes = sum(len(oracle.prefix(text)) + len(stage.frame) for text in anchors)
    suffixes = sum(len(oracle.tokenizer.encode_plain([text])[0]) + len(stage.tail) for text in partners)
    return prefixes, suffixes


@pytest.mark.parametrize("budget", [64, 256, 2048])
@pytest.mark.parametrize("retention", ["auto", "off"])
def test_computed_is_each_anchor_and_frame_once_and_each_partner(open_session, oracle, budget, retention):
    session = open_session(token_budget=budget, retention=retention)
    query = session.sql(f"SELECT count(*) FROM l, r WHERE {PAIR}")
    planned = json.loads(query.explain("json"))["blocks"][0]["asks"][0]["join"]
    report = query.run(progress=False).report
    call = pair_call(session, report.stages[0]["anchor"])
    assert call.anchor == 0
    assert planned["anchor"] == "l.body"
    assert planned["tokens"] == report.tokens["computed"] < planned["other_tokens"]
    prefixes, suffixes = expected_tokens(oracle, call, texts(6, 30, seed=1), texts(5, 6, seed=2))
    assert report.tokens["computed"] == prefixes + 6 * suffixes
    assert report.tokens["recomputed"] == 0
    assert report.tokens["reused_rewind"] == report.tokens["naive"] - report.tokens["computed"]


@pytest.mark.parametrize("budget", [64, 2048])
@pytest.mark.parametrize("retention", ["auto", "off"])
def test_behind_a_filter_anchors_cost_their_frame_alone(open_session, oracle, budget, retention):
    session = open_session(token_budget=budget, retention=retention)
    result = session.sql(f"SELECT l.id, r.id FROM l JOIN r ON {PAIR} WHERE {FILTER}").run(progress=False)
    stages = {("anchor" in stage): stage for stage in result.report.stages}
    passed = stages[False]["passed"]
    assert 0 < passed < 6
    (asked,) = session.sql(f"SELECT id FROM l WHERE {FILTER}")._bound.calls
    question = compile_stage(asked, oracle.pieces, oracle.tokenizer)
    call = pair_call(session, 0)
    frame = len(compile_stage(call, oracle.pieces, oracle.tokenizer).frame)
    documents = sum(len(oracle.prefix(text)) + len(question.tail) for text in texts(6, 30, seed=1))
    _, suffixes = expected_tokens(oracle, call, [], texts(5, 6, seed=2))
    assert stages[True]["anchor"] == 0
    assert result.report.tokens["computed"] == documents + passed * (frame + suffixes)


@pytest.mark.parametrize("budget", [64, 2048])
def test_two_joins_on_the_same_anchors_compute_them_once(open_session, oracle, budget):
    session = open_session(token_budget=budget)
    session.register("s", {"id": list(range(4)), "word": texts(4, 6, seed=9)})
    other = PAIR.replace("Does {0}", "Would {0}").replace("r.word", "s.word")
    sql = f"SELECT (SELECT count(*) FROM r WHERE {PAIR}), (SELECT count(*) FROM s WHERE {other}) FROM l"
    report = session.sql(sql).run(progress=False).report
    assert [(stage["anchor"], stage["evaluated"]) for stage in report.stages] == [(0, 30), (0, 24)]
    expected = sum(len(oracle.prefix(text)) for text in texts(6, 30, seed=1))
    for call, partners in zip(session.sql(sql)._bound.calls, (texts(5, 6, 2), texts(4, 6, 9)), strict=True):
        frame = len(compile_stage(call, oracle.pieces, oracle.tokenizer).frame)
        expected += 6 * (frame + expected_tokens(oracle, call, [], partners)[1])
    assert report.tokens["computed"] == expected
    assert report.tokens["recomputed"] == 0


def test_a_later_query_reuses_what_an_earlier_one_kept(open_session, oracle):
    session = open_session(retention="keep")
    first = session.sql(f"SELECT id FROM l WHERE {FILTER}").run(progress=False).report
    assert first.tokens["reused_retained"] == 0
    bodies = texts(6, 30, seed=1)
    documents = [len(oracle.prefix(text)) for text in bodies]
    other = FILTER.replace("the sea", "a town")
    second = session.sql(f"SELECT id FROM l WHERE {other}").run(progress=False).report
    assert second.tokens["reused_retained"] == sum(documents)
    changed = [*bodies[:3], bodies[3].replace("a", "e", 1), *bodies[4:]]
    session.register("l", {"id": list(range(6)), "body": changed})
    third = (
        session.sql(f"SELECT id FROM l WHERE {FILTER.replace('the sea', 'rain')}").run(progress=False).report
    )
    assert third.tokens["reused_retained"] == sum(documents) - documents[3]
    questions = third.tokens["computed"] - len(oracle.prefix(changed[3]))
    assert (
        questions
        == 6
        * compile_stage(
            session.sql(f"SELECT id FROM l WHERE {FILTER.replace('the sea', 'rain')}")._bound.calls[0],
            oracle.pieces,
            oracle.tokenizer,
        ).num_fixed_tokens
    )


def test_a_join_after_a_kept_filter_computes_no_anchor(open_session, oracle):
    session = open_session(retention="keep")
    session.sql(f"SELECT id FROM l WHERE {FILTER}").run(progress=False)
    report = session.sql(f"SELECT count(*) FROM l, r WHERE {PAIR}").run(progress=False).report
    call = pair_call(session, 0)
    frame = len(compile_stage(call, oracle.pieces, oracle.tokenizer).frame)
    _, suffixes = expected_tokens(oracle, call, [], texts(5, 6, seed=2))
    assert report.stages[0]["anchor"] == 0
    assert report.tokens["computed"] == 6 * (frame + suffixes)
    assert report.tokens["reused_retained"] == sum(len(oracle.prefix(t)) for t in texts(6, 30, seed=1))


@pytest.mark.parametrize("retention", ["auto", "off"])
def test_the_first_match_ends_the_search(open_session, oracle, retention):
    session = open_session(retention=retention)
    partners = texts(300, 6, seed=3)
    session.register("r", {"id": list(range(300)), "word": partners})
    call = pair_call(session, 0)
    body = texts(1, 30, seed=1)[0]
    session.register("l", {"id": [0], "body": [body]})
    first = next(i for i, word in enumerate(partners) if probability(oracle, call, body, word) > 0.5)
    result = session.sql(f"SELECT id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE {PAIR})").run(progress=False)
    assert result.fetchall() == [(0,)]
    assert result.report.stages[0]["anchor"] == 0
    assert result.report.stages[0]["evaluated"] == min(300, 16 * (first // 16 + 1))
