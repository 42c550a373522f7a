"""Whole statements on a device give the answers of the CPU in float32. `pytest -m gpu` runs them on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quail
from quail.config import EngineConfig
from tests.engine.test_engine import texts_of
from tests.models.tiny import make_tiny

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

SCORES = {
    "filter": "SELECT AI.SCORE(PROMPT('{0} Is this about the sea?', body)) FROM l ORDER BY id",
    "chain": "SELECT AI.SCORE(PROMPT('{0} Dull?', body)) FROM l WHERE AI.SCORE(PROMPT('{0} Sea?', body)) >= 0 ORDER BY id",
    "join": "SELECT AI.SCORE(PROMPT('Does {0} fit {1}?', l.body, r.body)) FROM l, r WHERE l.id < 9 ORDER BY l.id, r.id",
    "labels": """SELECT map_extract_value(AI.PROBABILITIES(PROMPT('{0} This is', body), ['good', 'bad', 'badly made']), 'bad')
                 FROM l ORDER BY id""",
    "calibrated": "SELECT AI.SCORE(PROMPT('{0} Good?', body), calibrate := 'content') FROM l ORDER BY id",
}
ROWS = {
    "limit": "SELECT count(*) FROM (SELECT id FROM l WHERE AI.SCORE(PROMPT('{0} Sea?', body)) >= 0 LIMIT 5)",
    "exists": "SELECT id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE AI.IF(PROMPT('Is {0} as {1}?', l.body, r.body))) ORDER BY id",
}


def opened(model: str, device: str, dtype: str, **settings: Any) -> quail.Session:
    given = {"kv_memory": "8MiB", "token_budget": 256, "answers": "off"} | settings
    session = quail.Session(EngineConfig(model=model, device=device, dtype=dtype, **given))
    texts = texts_of(30, 40, seed=5)
    session.register("l", {"id": list(range(45)), "body": texts + [f"{t} again" for t in texts[:15]]})
    session.register("r", {"id": list(range(12)), "body": texts_of(12, 12, seed=6)})
    return session


def margins(session: quail.Session) -> np.ndarray:
    """Log-odds of all scores."""
    found = [
        row[0]
        for sql in SCORES.values()
        for row in session.sql(sql).run(progress=False, audit=0.1).fetchall()
    ]
    odds = np.clip(np.array(found), 1e-9, 1 - 1e-9)
    return np.asarray(np.log(odds) - np.log1p(-odds))


def assert_sound(session: quail.Session) -> None:
    engine: Any = session._engine
    assert engine.is_sound
    assert engine.limits.passes_in_flight == (2 if session.config.device == "cuda" else 1)


@DEVICES
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("settings", [{}, {"prefix_sharing": "on", "retention": "keep", "token_budget": 64}])
def test_tiny_models_in_float32(tmp_path: Path, device: str, family: Any, settings: dict[str, Any]) -> None:
    folder = str(make_tiny(tmp_path / "model", family, seed=4, context=512))
    with opened(
        folder, "cpu", "float32", kernels="reference", prefix_sharing="off", retention="off"
    ) as session:
        expected = margins(session)
        rows = [session.sql(sql).run(progress=False).fetchall() for sql in ROWS.values()]
    with opened(folder, device, "float32", **settings) as session:
        found = margins(session)
        assert [session.sql(sql).run(progress=False).fetchall() for sql in ROWS.values()] == rows
        assert_sound(session)
    assert np.abs(found - expected).max() < 1e-3
    clear = np.abs(expected) > 1e-3
    assert ((found > 0) == (expected > 0))[clear].all()


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model(device: str, dtype: str) -> None:
    with opened("smollm2-135m", "cpu", "float32", kv_memory="128MiB") as session:
        expected = margins(session)
    with opened("smollm2-135m", device, dtype, kv_memory="128MiB") as session:
        found = margins(session)
        assert_sound(session)
    allowed = 1e-3 if dtype == "float32" else 0.25
    is_other = (found > 0) != (expected > 0)
    assert not (is_other & (np.abs(expected) > allowed)).any()
    assert np.median(np.abs(found - expected)) < (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.gpu
def test_a_card_by_itself_takes_its_memory_and_says_how_fast_it_was(tmp_path: Path) -> None:
    import torch

    folder = str(make_tiny(tmp_path / "model", "llama", seed=4, context=512))
    with opened(folder, "auto", "auto", kv_memory=None, token_budget=None) as session:
        report = session.sql(SCORES["filter"]).run(progress=False).report
        assert report["device"] == "cuda"
        engine: Any = session._engine
        assert engine.describe()["token_budget"] == 2**14
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        assert report.memory["limit_bytes"] <= total_bytes
        assert free_bytes < total_bytes - report.memory["kv_bytes"]
        assert report.speed_of_light is None or 0 < report.speed_of_light <= 1
