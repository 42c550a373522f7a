"""Nothing is asked twice: not by another call of a run, not by a later run, not after a change beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import quail
from quail.answers.store import AnswerStore
from quail.config import EngineConfig
from tests.models.tiny import make_tiny

WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]
LABELS = "['ship', 'town', 'town music']"
KIND = f"AI.CLASSIFY(PROMPT('{{0}}\n\nThis is about a', body), {LABELS})"
SHARES = f"AI.PROBABILITIES(PROMPT('{{0}}\n\nThis is about a', body), {LABELS})"


def texts(count: int, length: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=7, context=256)


Opener = Callable[..., quail.Session]


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Iterator[Opener]:
    sessions = []

    def open_session(**settings) -> quail.Session:
        fixed = {"dtype": "float32", "layout": "completion", "cache_dir": tmp_path, "kv_memory": "16MiB"}
        config = EngineConfig(**{"model": str(folder), **fixed, **settings})
        session = quail.Session(config)
        session.register("l", {"id": list(range(12)), "body": texts(12, 30, seed=1)})
        session.register("r", {"word": texts(4, 5, seed=2)})
        sessions.append(session)
        return session

    yield open_session
    for session in sessions:
        session.close()


def counts(result: quail.QueryResult) -> tuple[int, int, int]:
    answers = result.report.answers
    return answers["asked"], answers["stored"], answers["shared"]


@pytest.mark.parametrize("answers", ["off", "memory"])
def test_one_evaluation_serves_classify_probabilities_and_comparisons(opened, answers):
    session = opened(answers=answers)
    batch = KIND.replace(LABELS, f"{LABELS}, calibrate := 'batch'")
    statement = (
        f"SELECT id, {KIND} AS kind, {SHARES} AS shares, {batch} AS batch, {KIND} = 'ship' AS is_ship FROM l "
        f"WHERE {SHARES}['ship'] >= 0 ORDER BY id"
    )
    result = session.sql(statement).run()
    asked, stored, shared = counts(result)
    assert (asked, stored + shared) == (12, 24)
    assert result.report.tokens["naive"] == result.report.tokens["computed"]
    for _, kind, shares, _, is_ship in result:
        assert kind == max(dict(shares), key=dict(shares).get)
        assert is_ship == (kind == "ship")
    alone = session.sql(f"SELECT {SHARES} FROM l ORDER BY id").run()
    for row, (shares,) in zip(result, alone, strict=True):
        assert dict(row[2]) == pytest.approx(dict(shares), abs=1e-5)


def test_if_and_score_of_the_same_question_are_one_evaluation(opened):
    result = (
        opened(answers="off")
        .sql("""
        SELECT id, AI.SCORE(PROMPT('Is this about the sea? {0}', body)) AS score,
               AI.IF(PROMPT('Is this about the sea? {0}', body)) AS sea,
               AI.IF(PROMPT('Is this about the sea? {0}', body), threshold := 0.9) AS surely
        FROM l ORDER BY id""")
        .run()
    )
    assert counts(result) == (12, 0, 24)
    for _, score, sea, surely in result:
        assert sea == (score > 0.5)
        assert surely == (score > 0.9)


def test_pairs_are_shared_too(opened):
    pair = "PROMPT('Does {0} speak of {1}?', body, word)"
    result = opened().sql(f"SELECT id, word, AI.SCORE({pair}) AS s FROM l, r WHERE AI.IF({pair})").run()
    assert counts(result)[0] == 48
    assert counts(result)[2] == 0, "a score is asked once the condition is known: it was stored by then"
    assert counts(result)[1] == len(result)
    assert all(row[2] > 0.5 for row in result)


def test_a_second_run_asks_nothing_and_a_changed_one_only_what_is_missing(opened, tmp_path):
    path = tmp_path / "answers"
    keep = "AI.IF(PROMPT('Is this about the sea? {0}', body))"
    first = opened(answers=path).sql(f"SELECT id, {KIND} AS kind FROM l WHERE {keep} ORDER BY id").run()
    session = opened(answers=path, kv_memory="8MiB", token_budget=64, prefix_sharing="off", retention="off")
    again = session.sql(f"SELECT id, {KIND} AS kind FROM l WHERE {keep} ORDER BY id").run()
    assert again.fetchall() == first.fetchall()
    assert counts(again) == (0, counts(first)[0], 0)
    assert again.report.tokens["naive"] == 0
    without = session.sql(f"SELECT id, {KIND} AS kind FROM l ORDER BY id").run()
    assert counts(without) == (12 - len(first), len(first), 0)
    threshold = keep.replace("body))", "body), threshold := 0.4, calibrate := 'batch')")
    assert counts(session.sql(f"SELECT id FROM l WHERE {threshold}").run()) == (0, 12, 0)
    bodies = texts(12, 30, seed=1)
    bodies[3] += "."
    session.register("changed", {"id": range(13), "body": [*bodies[::-1], "one more"]})
    assert counts(session.sql(f"SELECT id FROM changed WHERE {keep}").run()) == (2, 11, 0)


@pytest.mark.parametrize("change", ["model", "dtype", "label", "words", "question", "order of labels"])
def test_what_answers_depend_on_is_part_of_their_key(opened, folder, tmp_path, change):
    path = tmp_path / "answers"
    statement = f"SELECT {KIND}, AI.SCORE(PROMPT('Is this about the sea? {{0}}', body)) FROM l"
    opened(answers=path).sql(statement).run()
    settings = {"answers": path}
    if change == "model":
        settings["model"] = str(make_tiny(tmp_path / "other", "llama", seed=8, context=256))
    elif change == "dtype":
        settings["dtype"] = "bfloat16"
    elif change == "label":
        settings["label"] = "TEXT:"
    elif change == "words":
        statement = statement.replace("body)) FROM", "body), answers := ['yes', 'no']) FROM")
    elif change == "question":
        statement = statement.replace("the sea", "the rain")
    else:
        statement = statement.replace(LABELS, "['ship', 'town music', 'town']")
    both = change in ("model", "dtype", "label")
    expected = (24, 0, 0) if both else (12, 12, 0)
    assert counts(opened(**settings).sql(statement).run()) == expected


def test_labels_in_another_order_give_the_same_labels(opened):
    session = opened()
    calls = [KIND.replace(LABELS, f"{labels}, calibrate := 'content'") for labels in
             ("['town music', 'town', 'ship']", "['town', 'town music', 'ship']", "['ship', 'town', 'town music']")]  # fmt: skip
    rows = session.sql(f"SELECT {', '.join(calls)} FROM l").run().fetchall()
    assert all(len(set(row)) == 1 for row in rows)


def test_a_cut_document_is_not_taken_for_a_whole_one(opened):
    session = opened()
    session.register("long", {"body": ["rain " * 400, "ship"]})
    query = session.sql("SELECT AI.SCORE(PROMPT('Is this about the sea? {0}', body)) FROM long")
    assert counts(query.run(on_long="truncate")) == (2, 0, 0)
    assert counts(query.run(on_long="truncate")) == (0, 2, 0)
    with pytest.raises(quail.RowError, match="exceeds the model's context"):
        query.run()


def test_a_failed_row_is_asked_again_and_its_twin_fails_with_it(opened):
    session = opened()
    session.register("long", {"id": [0, 1], "body": ["rain " * 400, "ship"]})
    query = session.sql(f"SELECT {KIND}, {SHARES} FROM long ORDER BY id")
    result = query.run(on_error="null")
    assert result.fetchall()[0] == (None, None)
    assert result.fetchall()[1][0] is not None
    assert counts(query.run(on_error="null"))[0] == 1


def test_the_anchor_side_with_answers_is_kept(opened, tmp_path):
    pair = "AI.IF(PROMPT('Does {0} speak of {1}?', body, word)%s)"
    free = opened(answers="off").sql(f"SELECT count(*) FROM l, r WHERE {pair % ''}").run()
    chosen = free.report.stages[0]["anchor"]
    forced = 1 - chosen
    path = tmp_path / "other"
    hinted = pair % f", anchor := '{['l', 'r'][forced]}'"
    first = opened(answers=path).sql(f"SELECT count(*) FROM l, r WHERE {hinted}").run()
    assert first.report.stages[0]["anchor"] == forced
    again = opened(answers=path).sql(f"SELECT count(*) FROM l, r WHERE {pair % ''}").run()
    assert again.report.stages[0]["anchor"] == forced
    assert counts(again) == (0, 48, 0)


def test_the_file_lies_beside_the_database(opened, folder, tmp_path):
    config = EngineConfig(model=str(folder), dtype="float32", layout="completion", cache_dir=tmp_path)
    for expected in ((12, 0, 0), (0, 12, 0)):
        with quail.Session(config, database=tmp_path / "my.duckdb") as session:
            session.register("l", {"body": texts(12, 30, seed=1)})
            assert counts(session.sql(f"SELECT {KIND} FROM l").run()) == expected
    store = AnswerStore(tmp_path / "my.duckdb.answers")
    assert [each["answers"] for each in store.questions()] == [12]
    store.close()


@pytest.mark.parametrize(
    ("wave", "budget"),
    [(4, 256), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 48), (16, 48), (16, 256)))],
)
@pytest.mark.parametrize("search", ["EXISTS", "NOT EXISTS", "SEMI", "ANTI"])
def test_a_search_in_parts_stores_the_answers_of_its_own_pairs(
    opened, tmp_path, monkeypatch, search, wave, budget
):
    """Rows find their match while others of their pairs wait for a pass, with the next part behind them."""
    pair = "PROMPT('Does {0} speak of {1}?', body, word)"
    plain = opened(answers="off")
    plain.register("r", {"word": texts(17, 5, seed=3)})
    scores = {
        (body, word): s for body, word, s in plain.sql(f"SELECT body, word, AI.SCORE({pair}) FROM l, r").run()
    }
    threshold = round(float(np.quantile(list(scores.values()), 0.75)), 4)
    assert min(abs(score - threshold) for score in scores.values()) > 1e-6
    condition = f"AI.IF({pair}, threshold := {threshold})"
    matched = {body for (body, _), score in scores.items() if score > threshold}
    is_negated = search in ("NOT EXISTS", "ANTI")
    expected = [i for i, body in enumerate(texts(12, 30, seed=1)) if (body in matched) != is_negated]
    assert matched
    sql = (
        f"SELECT id FROM l WHERE {search} (SELECT 1 FROM r WHERE {condition}) ORDER BY id"
        if "EXISTS" in search
        else f"SELECT id FROM l {search} JOIN r ON {condition} ORDER BY id"
    )
    monkeypatch.setattr("quail.execution.reading.BLOCK_ROWS", 20)
    session = opened(answers=tmp_path / "answers", token_budget=budget)
    session.register("r", {"word": texts(17, 5, seed=3)})
    first = session.sql(sql).run(exists_wave=wave)
    assert [row[0] for row in first] == expected
    again = session.sql(sql).run(exists_wave=wave)
    assert [row[0] for row in again] == expected
    assert counts(again)[0] == 0
    stored = session.sql(f"SELECT body, word, AI.SCORE({pair}) FROM l, r").run()
    assert counts(stored)[1] == counts(first)[0]
    for body, word, score in stored:
        assert score == pytest.approx(scores[body, word], abs=1e-5)
