"""`dtype='int8'`: from a statement to its result, and how near its answers are to those of bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quail
from benchmarks.quality import SENTIMENT, TOPIC, TOPICS, WORDS, sample
from quail.errors import ConfigError
from quail.layouts import area_under_roc
from tests.engine.test_device import margins, opened
from tests.models.tiny import make_tiny


def test_reuse_and_packing_change_no_answer(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", "llama", seed=4, context=512))
    with opened(folder, "cpu", "int8", prefix_sharing="off", retention="off") as session:
        expected = margins(session)
    reusing = {"prefix_sharing": "on", "retention": "keep", "token_budget": 64}
    with opened(folder, "cpu", "int8", **reusing) as session:
        found = margins(session)
    with opened(folder, "cpu", "bfloat16", **reusing) as session:
        other = margins(session)
    assert np.abs(found - expected).max() < 0.3
    assert np.abs(other - expected).max() > 1e-4, "bytes are not bfloat16"


def test_the_plain_kernels_answer_as_the_compiled_ones(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", "qwen3", seed=4, context=512))
    found = []
    for kernels in ("auto", "reference"):
        with opened(folder, "cpu", "int8", kernels=kernels) as session:
            found.append(margins(session))
    gaps = np.abs(found[0] - found[1])
    assert np.median(gaps) < 0.1 and gaps.max() < 0.5, "bytes round what bfloat16 rounded otherwise before"


def test_reports_name_it_and_stored_answers_are_its_own(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", "llama", seed=4, context=512))
    sql = "SELECT id FROM docs WHERE AI.IF(PROMPT('{0} Good?', body)) ORDER BY id"
    asked = []
    for dtype in ("bfloat16", "int8", "int8"):
        config = quail.EngineConfig(
            model=folder, dtype=dtype, kv_memory="8MiB", answers=str(tmp_path / "answers.db")
        )
        with quail.Session(config) as session:
            session.register("docs", {"id": [1, 2, 3], "body": ["a", "b", "c"]})
            result = session.sql(sql).run(progress=False)
            assert result.report.dtype == dtype and f" on cpu, {dtype} |" in str(result.report)
            assert f" on cpu, {dtype}, " in session.sql(sql).explain()
            asked.append(result.report.tokens["computed"])
    assert asked[0] and asked[1] and not asked[2], "the third run finds the answers of the second"


def test_it_is_for_cpus() -> None:
    from quail.models.device import dtype_name

    with pytest.raises(ConfigError, match="dtype = 'int8' is for CPUs; this is device 'cuda'"):
        dtype_name("int8", "cuda", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "least", "area"),
    [(100, 0.93, 0.02), pytest.param(3000, 0.98, 0.005, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@pytest.mark.timeout(1200)
def test_answers_about_reviews_are_those_of_bfloat16(rows: int, least: float, area: float) -> None:
    scores, topics = [], []
    for dtype in ("bfloat16", "int8"):
        with quail.Session(quail.EngineConfig(dtype=dtype, answers="off")) as session:
            session.register("reviews", sample(rows))
            docs = session.docs("reviews").ai_score(SENTIMENT, answers=WORDS)
            table = docs.ai_classify(TOPIC, list(TOPICS), name="topic").order_by("row").collect()
        scores.append(np.array(table["score"].to_pylist()))
        topics.append(np.array(table["topic"].to_pylist()))
    assert ((scores[0] > 0.5) == (scores[1] > 0.5)).mean() >= least
    assert (topics[0] == topics[1]).mean() >= least
    is_positive = np.array(table["positive"].to_pylist())
    areas = [area_under_roc(each, is_positive) for each in scores]
    assert abs(areas[0] - areas[1]) <= area, areas
    assert 0 < np.abs(scores[0] - scores[1]).mean() < 0.02
