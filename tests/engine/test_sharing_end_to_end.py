"""Prefix sharing in whole runs: the plan says what the run counts, and the answers do not change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import quail
from quail.config import EngineConfig
from quail.cost.budgets import ModelShape
from quail.cost.roofline import Rates, Seconds
from quail.execution.asks import RunControl
from quail.execution.run import Limits
from quail.kv.pages import PAGE_TOKENS
from quail.models.decoder import PagedDecoder
from quail.models.outline import read_outline
from quail.models.registry import fetch
from quail.planner.prefix_sharing import decide
from tests.engine.engines import RecordingRun, TinyEngine, assert_equal_answers
from tests.engine.feeds import ChainFeed, question
from tests.engine.test_prefix_sharing import optimum
from tests.models.tiny import make_tiny

DATA = Path(__file__).parent.parent.parent / "examples" / "data"
RATES = Rates(matmul_flops=1e11, attention_flops=4e10, memory_bytes=1e10)
DISH = "SELECT id FROM calls WHERE AI.IF(PROMPT(E'{0}\\n\\nDoes the caller name a dish?', text))"


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch):
    monkeypatch.setattr("quail.cost.device.rates_of", lambda *args, **kwargs: RATES)
    monkeypatch.setattr("quail.execution.forecast.kept_rates", lambda *args, **kwargs: RATES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model so small that whole transcripts take seconds."""
    place = tmp_path_factory.mktemp("model")
    return make_tiny(place, "llama", hidden=16, layers=1, heads=2, kv_heads=1, context=2**14)


@pytest.fixture
def open_session(folder, tmp_path):
    sessions = []

    def open_it(**settings) -> quail.Session:
        settings = {"model": str(folder), "dtype": "float32", "layout": "completion", **settings}
        settings = {"cache_dir": tmp_path, "kv_memory": "64MiB", "retention": "off", **settings}
        session = quail.Session(EngineConfig(**settings))
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


def run_and_plan(session: quail.Session, statement: str) -> tuple[list, dict, dict]:
    """Rows, report and plan of a statement."""
    query = session.sql(statement)
    plan = json.loads(query.explain("json"))
    result = query.run(progress=False)
    return result.fetchall(), dict(result.report), plan


def assert_planned_is_done(report: dict, plan: dict) -> None:
    planned = plan["predicted"]["tokens"]
    assert planned.pop("is_exact") is True
    assert planned == {name: report["tokens"][name] for name in planned}
    assert report["tokens"]["recomputed"] == 0


@pytest.mark.parametrize(("is_included", "computed"), [(True, 1916), (False, 1934)])
def test_snapshots_of_a_trace_compute_each_token_once(open_session, is_included, computed):
    """Digits are a token each, so documents can be cut to exact lengths."""
    session = open_session(label="12345")
    label = 6 if is_included else 0
    trace = "".join(str(n) for n in np.random.default_rng(0).integers(0, 10, 1900))
    session.register("traces", {"id": [1, 2, 3], "text": [trace[: n - label] for n in (1000, 1400, 1900)]})
    _, report, plan = run_and_plan(session, "SELECT id FROM traces WHERE AI.IF(PROMPT('{0}. Good?', text))")
    (group,) = plan["groups"]
    questions = 3 * group["questions"][0]["suffix_tokens"]
    assert group["tokens"] == (4300 if is_included else 4318)
    assert group["sharing"]["shared_tokens"] == 992 + 1392
    assert report["tokens"]["computed"] - questions == computed
    assert_planned_is_done(report, plan)


def prefixes_of(folder: Path | str, cache: Path, texts: list[str]) -> list[list[int]]:
    """Ids in front of the question, of distinct texts, without the engine."""
    outline = read_outline(str(folder), cache)
    assert outline is not None
    label, _ = outline.tokenizer.encode_plain(["DOCUMENT:\n"])
    flat, offsets = outline.tokenizer.encode_plain(list(dict.fromkeys(texts)))
    return [[*label, *flat[offsets[i] : offsets[i + 1]]] for i in range(len(offsets) - 1)]


def test_transcripts_compute_what_was_planned(open_session, folder, tmp_path):
    """Transcripts twice over: the doubled ones are answered once."""
    session = open_session()
    calls = pq.read_table(DATA / "calls.parquet").to_pylist()
    texts = [call["text"][:3000] for call in calls]
    session.register("calls", {"id": [*range(len(texts))] * 2, "text": texts * 2})
    rows, report, plan = run_and_plan(session, DISH)
    assert_planned_is_done(report, plan)
    prefixes = prefixes_of(folder, tmp_path, texts)
    assert report["tokens"]["reused_prefix"] == optimum(prefixes, PAGE_TOKENS) > 0
    assert report["stages"][0]["evaluated"] == len(prefixes)
    alone = open_session(prefix_sharing="off")
    alone.register("calls", {"id": [*range(len(texts))] * 2, "text": texts * 2})
    unshared, other, _ = run_and_plan(alone, DISH)
    assert rows == unshared
    assert other["tokens"]["naive"] == other["tokens"]["computed"] == report["tokens"]["naive"]


def shares(engine: TinyEngine, budget: int):
    """A run of an engine in which documents share whenever they can."""
    config = engine.loaded.config
    shape = ModelShape(config.num_layers, config.hidden_size, 4, 2, 16, 128, config.context_tokens, 4, 0)

    def rule(tree, lengths, kept):
        return decide(tree, lengths, kept, shape=shape, rates=RATES, mode="on")

    def run(calls, feed, pages) -> RecordingRun:
        model = PagedDecoder(engine.decoder, engine.arena(pages))
        limits = Limits(budget, engine.context_tokens)
        found = RecordingRun(model, engine.tokenizer, engine.pieces, limits, calls, feed, RunControl(), rule)
        found.run()
        model.pages.check_integrity()
        assert model.pages.num_free_pages == model.pages.num_pages
        return found

    return run


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", ["completion", "chat"])
def test_shared_answers_equal_the_oracle(tmp_path, family, layout):
    engine = TinyEngine(make_tiny(tmp_path / "model", family, seed=3), tmp_path, layout=layout)
    calls = (question(0, "\n\nIs the mood good?"), question(1, "\n\nIs it about rain?"))
    rng = np.random.default_rng(1)
    trunks = ["".join(map(str, rng.integers(0, 10, 150))) for _ in range(3)]
    texts = [trunks[n % 3][: int(rng.integers(1, 150))] + " and rain" * (n % 4) for n in range(25)]
    texts = list(dict.fromkeys(texts))
    expected = {
        (d, q): engine.oracle_answer(call, text)
        for d, text in enumerate(texts)
        for q, call in enumerate(calls)
    }
    for budget in (32, 128, 4096):
        for pages in (20, 1000):
            found = shares(engine, budget)(calls, ChainFeed(texts, 2), pages)
            assert_equal_answers(found, expected)
            ledger = found.scheduler.ledger
            if pages == 1000:
                assert ledger.reused_prefix == optimum(
                    [engine.prefix(t).tolist() for t in texts], PAGE_TOKENS
                )
                assert ledger.recomputed == 0


def test_reviews_do_not_share_and_transcripts_do(open_session):
    """With the default model's tokenizer; the model itself is not loaded."""
    fetch("smollm2-135m", EngineConfig().cache_path)
    session = open_session(model="smollm2-135m", cache_dir=EngineConfig().cache_path)
    for name in ("reviews", "calls"):
        session.register(name, DATA / f"{name}.parquet")
    reviews = session.sql("SELECT id FROM reviews WHERE AI.IF(PROMPT('Is it good? {0}', text))")
    (group,) = json.loads(reviews.explain("json"))["groups"]
    assert not group["sharing"]["shares"]
    assert group["sharing"]["reason"] in reviews.explain()
    assert "saves 0 s of compute, costs 0 s of extra KV writes" in group["sharing"]["reason"]
    (group,) = json.loads(session.sql(DISH).explain("json"))["groups"]
    sharing = group["sharing"]
    assert sharing["shares"]
    assert sharing["saved_seconds"] > sharing["write_seconds"] > 0
    assert "prefix sharing on: it saves" in session.sql(DISH).explain()


def test_sharing_is_weighed_against_its_writes(open_session, monkeypatch):
    """Where writing KV takes longer than computing rows, sharing does not pay, and says so."""
    dear = Seconds(matmul=0.0, attention=0.0, rows=0.0, memory=1.0)
    free = Seconds(0.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(
        "quail.planner.prefix_sharing.seconds", lambda work, *_: dear if work.kv_written else free
    )
    session = open_session()
    start = "The ship left the harbour before dawn, and nobody on the pier waved. " * 3
    session.register("calls", {"id": [1, 2], "text": [start + "Soup!", start + "No."]})
    _, report, plan = run_and_plan(session, DISH)
    sharing = plan["groups"][0]["sharing"]
    assert sharing["reason"] == "off: it saves 0 s of compute, costs 1 s of extra KV writes"
    assert not sharing["shares"]
    assert report["tokens"]["reused_prefix"] == 0
    assert_planned_is_done(report, plan)


def test_lending_kv_that_is_written_anyway_costs_nothing(open_session):
    session = open_session()
    start = "The ship left the harbour before dawn, and nobody on the pier waved. " * 3
    session.register("calls", {"id": [1, 2], "text": [start + "Soup!", start + "No."]})
    both = DISH + " AND AI.IF(PROMPT(E'{0}\\n\\nIs the caller happy?', text), selectivity := 0.9)"
    (one,), (two,) = (json.loads(session.sql(s).explain("json"))["groups"] for s in (DISH, both))
    assert one["sharing"]["write_seconds"] > 0
    assert two["sharing"]["write_seconds"] == 0
    assert session.sql(both).run(progress=False).report["tokens"]["reused_prefix"] == one["saved_tokens"] > 0


def test_forcing_gives_the_same_answers(open_session):
    found = {}
    for mode in ("auto", "on", "off"):
        session = open_session(prefix_sharing=mode)
        calls = pq.read_table(DATA / "calls.parquet").slice(0, 20).to_pylist()
        session.register(
            "calls", {"id": [c["id"] for c in calls], "text": [c["text"][-2500:] for c in calls]}
        )
        rows, report, plan = run_and_plan(session, DISH)
        found[mode] = rows
        assert_planned_is_done(report, plan)
        reason = plan["groups"][0]["sharing"]["reason"]
        assert reason.startswith({"auto": "o", "on": "on: configured", "off": "off: configured"}[mode])
    assert found["on"] == found["off"] == found["auto"]


def test_a_row_limit_keeps_the_order_of_rows(open_session):
    session = open_session()
    calls = pq.read_table(DATA / "calls.parquet").slice(0, 30).to_pylist()
    # Every row passes an AI.IF or its negation, so what comes first is known to DuckDB.
    session.register("calls", {"id": [c["id"] for c in calls], "text": [c["text"][:1500] for c in calls]})
    passing = session.sql(DISH).run(progress=False).fetchall()
    negated = DISH.replace("WHERE", "WHERE NOT")
    failing = session.sql(negated).run(progress=False).fetchall()
    statement = DISH if len(passing) > len(failing) else negated
    expected = max(passing, failing, key=len)[:5]
    rows, report, plan = run_and_plan(session, statement + " LIMIT 5")
    assert rows == expected
    assert plan["groups"][0]["sharing"]["reason"] == "off: a row limit keeps the order of rows"
    assert report["tokens"]["reused_prefix"] == 0
    assert report["stages"][0]["evaluated"] < 30


def test_labels_are_planned_too(open_session):
    session = open_session()
    start = "The ship left the harbour before dawn, and nobody on the pier waved. " * 3
    session.register("calls", {"id": [1, 2, 3], "text": [start + "Soup!", start + "No.", "Rain."]})
    statement = (
        "SELECT id, AI.CLASSIFY(PROMPT(E'{0}\\n\\nMood:', text), ['good', 'very bad', 'very']) FROM calls"
    )
    _, report, plan = run_and_plan(session, statement)
    assert_planned_is_done(report, plan)
    assert report["tokens"]["reused_prefix"] > 0


def test_analyze_shows_planned_beside_done(open_session):
    session = open_session(answers="off")
    session.register("calls", {"id": [1, 2], "text": ["Soup, please.", "Soup, please, and bread."]})
    text = session.sql(DISH).explain(analyze=True)
    figures = {words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 3}
    for name in ("naive", "computed", "reused_rewind", "reused_prefix"):
        assert figures[name][0] == figures[name][1]
    assert "done: 2 questions" in text
    done = json.loads(session.sql(DISH).explain("json", analyze=True))["done"]
    assert done["tokens"]["computed"] == int(figures["computed"][1])


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_model_answers_the_same_with_and_without_sharing(tmp_path):
    calls = pq.read_table(DATA / "calls.parquet").slice(0, 8).to_pylist()
    texts = [call["text"] for call in calls]
    found = {}
    for mode in ("on", "off"):
        with quail.Session(EngineConfig(prefix_sharing=mode, dtype="float32")) as session:
            session.register("calls", {"id": [*range(8)], "text": texts})
            found[mode], report, plan = run_and_plan(session, DISH)
            assert_planned_is_done(report, plan)
            prefixes = prefixes_of("smollm2-135m", EngineConfig().cache_path, texts)
            shared = optimum(prefixes, PAGE_TOKENS)
            assert report["tokens"]["reused_prefix"] == (shared if mode == "on" else 0)
    assert found["on"] == found["off"]
