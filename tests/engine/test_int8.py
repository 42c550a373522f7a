"""`dtype='int8'`: from a statement to its result, and how near its answers are to those of bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import quail
from benchmarks.quality import SENTIMENT, TOPIC, TOPICS, WORDS, sample
from quail.errors import ConfigError
from quail.kernels.choice import KernelChoice
from quail.layouts import area_under_roc
from quail.models.device import dtype_name
from tests.engine.kernel_sets import skip_without
from tests.engine.test_device import margins, opened
from tests.models.tiny import make_tiny


def here() -> KernelChoice:
    config = quail.EngineConfig()
    return KernelChoice.of(config.kernels, "cpu", config.cache_path)


@pytest.fixture(autouse=True)
def with_int8() -> None:
    skip_without(torch.int8, here())


def test_reuse_and_packing_change_no_answer(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", "llama", seed=4, context=512))
    with opened(folder, "cpu", "int8", prefix_sharing="off", retention="off") as session:
        expected = margins(session)
    reusing = {"prefix_sharing": "on", "retention": "keep", "token_budget": 64}
    with opened(folder, "cpu", "int8", **reusing) as session:
        found = margins(session)
    with opened(folder, "cpu", "bfloat16", **reusing) as session:
        other = margins(session)
    is_native = here().build is not None
    assert np.abs(found - expected).max() < (1e-3 if is_native else 0.3)
    assert np.abs(other - expected).max() > 1e-4, "bytes are not bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_reuse_changes_no_bit_before_the_logits(dtype: str) -> None:
    """The default model, reusing all it can, beside the same questions asked alone."""
    config = quail.EngineConfig(
        dtype=dtype, answers="off", prefix_sharing="on", retention="keep", token_budget=512, kv_memory="64MiB"
    )
    if not here().multiplies:
        pytest.skip("products by torch round as their shapes have it")
    with quail.Session(config) as session:
        session.register("reviews", sample(40))
        begins = "The film that everyone has been waiting for, and about which so much was written before. "
        session.register(
            "alike", {"id": list(range(6)), "text": [begins * 8 + f"Number {n}." for n in range(6)]}
        )
        session.register("ends", {"word": ["good", "rather long", "about a whale"]})
        for sql in (
            "SELECT row FROM reviews WHERE AI.SCORE(PROMPT('{0} Good?', text)) >= 0 AND AI.SCORE(PROMPT('{0} Long?', text)) >= 0",
            "SELECT id FROM alike WHERE AI.SCORE(PROMPT('{0} Is it good?', text)) >= 0",
            "SELECT id FROM alike, ends WHERE AI.SCORE(PROMPT('{0} Is it {1}?', text, word)) >= 0",
        ):
            audit = session.sql(sql).run(progress=False, audit=1.0).report.audit
            assert audit["audited"] and audit["greatest_gap"] < 1e-4, (sql, audit)


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


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_it_is_for_cpus(device: str) -> None:
    with pytest.raises(ConfigError, match=f"for CPUs with AVX-512 VNNI; this is device '{device}'"):
        dtype_name("int8", device, KernelChoice(None))


def test_processors_without_its_products_refuse_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUAIL_KERNELS_LEVEL", "AVX2")
    choice = KernelChoice.of("auto", "cpu", tmp_path)
    if choice.build is None:
        pytest.skip("no native kernels here")
    with pytest.raises(ConfigError, match="the kernels here are native AVX2"):
        dtype_name("int8", "cpu", choice)
    assert dtype_name("int8", "cpu", KernelChoice.of("reference", "cpu", tmp_path)) == "int8"


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
