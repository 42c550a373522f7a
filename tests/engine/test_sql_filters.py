"""Filters whose order is observed, on a tiny model: the rows do not change, and no document is computed twice."""

from __future__ import annotations

import numpy as np
import pytest

import quail
from quail.config import EngineConfig
from quail.execution.stages import compile_stage
from tests.engine.engines import TinyEngine
from tests.models.tiny import make_tiny

WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]
NUM_ROWS = 400
QUESTIONS = ("Is this about the sea?", "Does anybody laugh?", "Is it dull?")
SQL = "SELECT id FROM t WHERE " + " AND ".join(f"AI.IF(PROMPT('{q} {{0}}', body))" for q in QUESTIONS)


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(3)
    return [f"{number} " + " ".join(rng.choice(WORDS, rng.integers(1, 20))) for number in range(count)]


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
        settings = {"answers": "off", **settings}
        session = quail.Session(EngineConfig(**settings))
        session.register("t", {"id": list(range(NUM_ROWS)), "body": texts(NUM_ROWS)})
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


@pytest.mark.parametrize("budget", [64, 2048])
@pytest.mark.parametrize("retention", ["auto", "off"])
def test_each_document_is_computed_once_and_each_question_asked(open_session, oracle, budget, retention):
    session = open_session(token_budget=budget, retention=retention)
    query = session.sql(SQL)
    result = query.run(progress=False)
    (order,) = result.report.order
    assert order["pilot_rows"] == 20
    calls = query._bound.calls
    suffixes = [len(compile_stage(call, oracle.pieces, oracle.tokenizer).tail) for call in calls]
    asked = [stage["evaluated"] for stage in result.report.stages]
    assert asked[order["calls"][0]] == NUM_ROWS
    prefixes = sum(len(oracle.prefix(text)) for text in texts(NUM_ROWS))
    tokens = result.report.tokens
    assert tokens["computed"] == prefixes + sum(n * s for n, s in zip(asked, suffixes, strict=True))
    assert tokens["recomputed"] == tokens["wasted"] == 0
    assert result.fetchall() == query.run(progress=False, order="as_written").fetchall()


@pytest.mark.parametrize(
    "settings",
    [{"kv_memory": "300KiB", "token_budget": 64}, {"prefix_sharing": "on"}, {"retention": "keep"}],
)
@pytest.mark.parametrize("tail", ["", " LIMIT 20"])
def test_rows_do_not_depend_on_the_order(open_session, settings, tail):
    session = open_session(**settings)
    found = session.sql(SQL + tail).run(progress=False)
    written = session.sql(SQL + tail).run(progress=False, order="as_written")
    assert found.fetchall() == written.fetchall()
    tokens = found.report.tokens
    assert tokens["naive"] == sum(
        tokens[name] for name in ("computed", "reused_rewind", "reused_prefix", "reused_retained")
    )
    assert written.report.order == (
        {"planned": [0, 1, 2], "calls": [0, 1, 2], "pilot_rows": 0, "revisions": 0},
    )


@pytest.mark.parametrize("sharing", ["off", "auto"])
def test_answers_that_are_kept_count_for_the_pilot(open_session, sharing):
    """A pilot, or a window, all of whose answers are known ends where it was asked."""
    session = open_session(answers="memory", prefix_sharing=sharing)
    first = session.sql(SQL).run(progress=False)
    assert first.report.order[0]["pilot_rows"] == 20
    again = session.sql(SQL).run(progress=False)
    assert again.fetchall() == first.fetchall()
    assert again.report.tokens["computed"] == 0
    assert again.report.order[0]["pilot_rows"] == 20
    half = session.sql(f"{SQL} AND AI.IF(PROMPT('Is it raining? {{0}}', body))").run(progress=False)
    assert set(half.fetchall()) <= set(first.fetchall())
    assert half.report.stages[0]["evaluated"] <= NUM_ROWS


def test_rows_that_fail_in_the_pilot_are_null_and_the_run_goes_on(open_session):
    session = open_session()
    bodies = texts(NUM_ROWS)
    for row in range(0, NUM_ROWS, 3):
        bodies[row] = bodies[row] + " 1" * 600
    session.register("t", {"id": list(range(NUM_ROWS)), "body": bodies})
    found = session.sql(SQL).run(progress=False, on_error="null")
    written = session.sql(SQL).run(progress=False, on_error="null", order="as_written")
    assert found.fetchall() == written.fetchall()
    assert not {row for (row,) in found.fetchall() if row % 3 == 0}
    assert len({error["row"] for error in found.report.errors}) == len(range(0, NUM_ROWS, 3))
