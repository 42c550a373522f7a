"""What `explain` says about tokens, sharing and time; its text is stable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quail
from quail.config import EngineConfig
from quail.cost.gpus import SourcedRates
from quail.cost.grants import DeviceMemory, device_grant
from quail.cost.roofline import Rates
from quail.execution import forecast, population
from quail.execution.forecast import Forecaster
from quail.execution.runner import Room
from quail.explain import explain
from tests.models.tiny import make_tiny

RATES = Rates(matmul_flops=1e9, attention_flops=1e9, memory_bytes=1e9)
START = "The ship left the harbour before dawn, and nobody on the pier waved. "


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama", hidden=16, layers=1, heads=2)
    return EngineConfig(
        model=str(folder), dtype="float32", layout="completion", cache_dir=tmp_path_factory.mktemp("cache")
    )


@pytest.fixture
def session(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("quail.execution.forecast.kept_rates", lambda *args: RATES)
    with quail.Session(config) as found:
        rows = [{"id": n, "name": f"ship {n}", "log": START * 2 + "Rain. " * n} for n in range(6)]
        found.register("logs", [*rows, {"id": 9, "name": None, "log": None}])
        yield found


ONE = r"SELECT id FROM logs WHERE id < 9 AND AI.IF(PROMPT(E'{0}\n\nIs it raining?', log))"


def test_one_filter(session: quail.Session) -> None:
    assert session.sql(ONE).explain() == (
        "call 0: AI.IF(PROMPT(E'{0}\\n\\nIs it raining?', log))\n"
        "query from logs\n"
        "├─ decide (id < 9)\n"
        "└─ ask call 0 in WHERE: 6 questions (exact)\n"
        "      3 pass, 405 tokens = 181 computed + 224 prefix, 0.00139 s\n"
        "documents of call 0: log\n"
        "   6 distinct, 321 tokens (exact), label included\n"
        "   224 tokens stand in common beginnings, 224 are saved\n"
        "   prefix sharing on: it saves 0.00128 s of compute, costs 1.23e-05 s of extra KV writes\n"
        "tokens (exact): 405 naive = 181 computed + 0 rewind + 224 prefix + 0 retained\n"
        "time (estimated): 0.00139 s of tiny on cpu, float32, completion layout, by measured rates"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_passes_and_pages_are_those_of_the_engine(
    session: quail.Session, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """What a GPU will have free is not known before the engine takes its memory, and less afterwards."""
    if device == "cuda":
        monkeypatch.setattr(
            forecast, "_device_and_rates", lambda config: ("cuda", "float32", SourcedRates(RATES, "a test's"))
        )
        monkeypatch.setattr(forecast, "device_of", lambda name: None)
    monkeypatch.setattr(
        forecast, "grant_of", lambda device: device_grant(DeviceMemory(2**30, 2**30)), raising=False
    )
    before = session.sql(ONE).explain()
    assert f"tokens ({'exact' if device == 'cpu' else 'estimated'}): 405 naive" in before
    session.sql("SELECT AI.IF(PROMPT('{0}?', 'x'))").run(progress=False)
    engine: Any = session._engine
    rooms = []
    dry_run = Forecaster.dry_run

    def watched(self: Forecaster, model: Any, *rest: Any) -> Any:
        run = dry_run(self, model, *rest)
        rooms.append(Room(run.limits.token_budget, model.pages.num_pages))
        return run

    def taken(*arguments: Any) -> Any:
        raise AssertionError("memory is asked for again")

    monkeypatch.setattr(Forecaster, "dry_run", watched)
    monkeypatch.setattr(Forecaster, "_grant", taken)
    assert "tokens (exact): 405 naive" in session.sql(ONE).explain()
    assert rooms == [engine.room] == [Room(engine.describe()["token_budget"], engine.model.pages.num_pages)]


def test_two_filters_and_json(session: quail.Session) -> None:
    statement = ONE + r" AND AI.IF(PROMPT(E'{0}\n\nIs it day?', log), selectivity := 0.5)"
    plan = json.loads(session.sql(statement).explain("json"))
    (group,) = plan["groups"]
    assert [question["num_asked"] for question in group["questions"]] == [6, 3]
    assert group["is_exact"] is True
    predicted = plan["predicted"]["tokens"]
    assert predicted["is_exact"] is False
    reused = ("reused_rewind", "reused_prefix", "reused_retained")
    assert predicted["naive"] == predicted["computed"] + sum(predicted[kind] for kind in reused)
    assert predicted["reused_rewind"] == pytest.approx(group["tokens"] / 2, rel=0.1)


def test_filters_over_different_columns(session: quail.Session) -> None:
    statement = ONE + r" AND AI.IF(PROMPT(E'{0}\n\nIs it a good name for a ship of the line?', name))"
    text = session.sql(statement).explain()
    assert 'documents of call 1: "name"\n   3 distinct' in text
    assert "prefix sharing off: the documents become known one by one, as earlier answers come" in text


def test_a_row_limit_shows_sharing_off(session: quail.Session) -> None:
    text = session.sql(ONE + " LIMIT 2").explain()
    assert "224 tokens stand in common beginnings, 0 are saved" in text
    assert "prefix sharing off: a row limit keeps the order of rows" in text
    assert "tokens (estimated): 405 naive = 405 computed" in text, "all fit the pass that is under way"


@pytest.mark.parametrize("where", ["", "logs.id = l.id AND "])
def test_a_search_that_ends_with_the_first_match_is_no_exact_number(
    session: quail.Session, where: str
) -> None:
    condition = r"AI.IF(PROMPT(E'{0}\n\nIs it raining?', log))"
    statement = f"SELECT id FROM logs l WHERE EXISTS (SELECT 1 FROM logs WHERE {where}{condition})"
    assert json.loads(session.sql(statement).explain("json"))["predicted"]["tokens"]["is_exact"] is False


def test_a_configured_mode_is_shown(config: EngineConfig, session: quail.Session) -> None:
    from dataclasses import replace

    for mode in ("on", "off"):
        with quail.Session(replace(config, prefix_sharing=mode)) as other:
            other.register("logs", [{"id": n, "log": START * 2 + "Rain. " * n} for n in range(6)])
            assert f"prefix sharing {mode}: configured; it saves 0.00128 s" in other.sql(ONE).explain()


def test_a_sample_is_marked_and_near(session: quail.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logs = [
        START * int(rng.integers(1, 6)) + "Rain. " * int(rng.integers(1, 40)) + str(n) for n in range(900)
    ]
    session.register("many", {"id": [*range(900)], "log": logs})
    query = session.sql(ONE.replace("logs", "many").replace("id < 9", "id >= 0"))
    exact = json.loads(query.explain("json"))["groups"][0]
    monkeypatch.setattr(population, "EXACT_DOCUMENTS", 100)
    monkeypatch.setattr(population, "SAMPLE_DOCUMENTS", 256)
    sampled = json.loads(query.explain("json"))["groups"][0]
    assert exact["is_exact"]
    assert not sampled["is_exact"]
    assert sampled["num_documents"] == exact["num_documents"] == 900
    assert sampled["num_counted"] < 400
    assert sampled["tokens"] == pytest.approx(exact["tokens"], rel=0.1)
    assert sampled["saved_tokens"] == pytest.approx(exact["saved_tokens"], rel=0.15)
    assert "(estimated), label included" in query.explain()


def test_documents_too_long_are_counted(session: quail.Session) -> None:
    session.register("long", {"id": [1, 2], "log": ["Rain. " * 2000, "Rain."]})
    text = session.sql(ONE.replace("logs", "long")).explain()
    assert "1 documents are too long for the model's context" in text


def test_a_model_that_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    with quail.Session(EngineConfig(cache_dir=tmp_path)) as session:
        session.register("logs", {"id": [1], "log": ["Rain."]})
        text = session.sql(ONE).explain()
    assert "ask call 0 in WHERE: 1 question (exact)" in text
    assert text.endswith(
        "tokens unknown: the model smollm2-135m is not here yet; quail models fetch smollm2-135m brings it"
    )
    assert not list(tmp_path.iterdir())


def test_explain_imports_no_torch(config: EngineConfig) -> None:
    import subprocess
    import sys

    code = f"""
import sys, quail
with quail.Session(quail.EngineConfig(model={config.model!r}, cache_dir={str(config.cache_path)!r})) as session:
    session.register("logs", {{"id": [1], "log": ["Rain."]}})
    assert "distinct" in session.sql({ONE!r}).explain()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_a_configuration_no_tokens_are_counted(session: quail.Session) -> None:
    query = session.sql(ONE)
    text = explain(query._bound, session._catalog)
    assert "distinct" not in text
    assert "groups" not in json.loads(explain(query._bound, session._catalog, format="json"))
