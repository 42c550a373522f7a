"""A filter, a classification of the survivors and a score of them compute each document once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quail
from quail import col, prompt
from quail.config import EngineConfig
from quail.execution.stages import compile_stage
from tests.engine.engines import TinyEngine
from tests.models.tiny import make_tiny

WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]
LABELS = ["ship", "town", "town music"]
KEEP = prompt("Is this about the sea? {0}", col("l.body"))
PAIR = prompt("Does {0} speak of the same thing as {1}?", col("l.body"), col("r.word"))
KIND = prompt("{0}\n\nThis is about a", col("l.body"))
MOOD = prompt("{0}\n\nMood:", col("l.body"))


def texts(count: int, length: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    folder = make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=7, context=512)
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def session(oracle: TinyEngine, tmp_path: Path) -> Iterator[quail.Session]:
    config = EngineConfig(
        model=str(oracle.folder), dtype="float32", layout="completion", cache_dir=tmp_path, kv_memory="16MiB",
        prefix_sharing="off",
    )  # fmt: skip
    with quail.Session(config) as session:
        session.register("l", {"id": list(range(9)), "body": texts(9, 30, seed=1)})
        session.register("r", {"word": texts(4, 5, seed=2)})
        yield session


def own_tokens(docs: quail.Docs, oracle: TinyEngine) -> list[int]:
    """Tokens that each call of a statement adds to a prompt, documents aside."""
    calls = docs._session.sql(docs.sql())._bound.calls  # type: ignore[attr-defined]
    return [compile_stage(call, oracle.pieces, oracle.tokenizer).num_own_tokens for call in calls]


def num_prefix_tokens(bodies: list[str], oracle: TinyEngine) -> int:
    return sum(len(oracle.prefix(body)) for body in bodies)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_table(session: quail.Session, oracle: TinyEngine) -> None:
    docs = (
        session.docs("l")
        .ai_if(KEEP, answers=["sea", "town"])
        .ai_classify(KIND, LABELS)
        .ai_score(MOOD, answers=["dull", "story"])
    )
    report = docs.run().report
    kept = {stage["call"]: stage["evaluated"] for stage in report.stages}
    assert 0 < report.rows < 9
    assert list(kept.values()).count(report.rows) == 2
    evaluated = [stage["evaluated"] for stage in report.stages]
    questions = sum(own * n for own, n in zip(own_tokens(docs, oracle), evaluated, strict=True))
    bodies = session.sql("SELECT body FROM l").collect()["body"].to_pylist()
    assert report.tokens["computed"] == num_prefix_tokens(bodies, oracle) + questions
    assert report.tokens["recomputed"] == report.tokens["wasted"] == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_join(session: quail.Session, oracle: TinyEngine) -> None:
    docs = session.docs("l").ai_if(KEEP, answers=["sea", "town"])
    docs = docs.ai_join("r", PAIR, answers=["sea", "town"])
    docs = docs.ai_classify(KIND, LABELS).ai_score(MOOD, answers=["dull", "story"])
    report = docs.run().report
    assert report.rows > 0
    by_call = dict(zip(range(4), report.stages, strict=True))
    filtered, paired, classified, scored = (by_call[i]["evaluated"] for i in range(4))
    assert filtered == 9 and paired == 4 * by_call[0]["passed"] and classified == scored
    pair = docs._session.sql(docs.sql())._bound.calls[1]  # type: ignore[attr-defined]
    frame = len(compile_stage(pair, oracle.pieces, oracle.tokenizer).frame)
    words = session.sql("SELECT word FROM r").collect()["word"].to_pylist()
    partner = sum(len(oracle.tokenizer.encode_plain([word])[0]) for word in words)
    own = own_tokens(docs, oracle)
    anchors = by_call[0]["passed"]
    bodies = session.sql("SELECT body FROM l").collect()["body"].to_pylist()
    assert report.tokens["computed"] == (
        num_prefix_tokens(bodies, oracle)
        + own[0] * filtered
        + anchors * (frame + partner)
        + own[1] * paired
        + own[2] * classified
        + own[3] * scored
    )
    assert report.tokens["recomputed"] == report.tokens["wasted"] == 0
