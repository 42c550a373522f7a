"""`run(audit=…)` computes answers again without reuse, and notices where reuse made them wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quail
from quail.execution.audit import Audit, _number_of
from quail.execution.chunk import Chunk
from quail.execution.reads import AnsweringAtOnce
from tests.models.tiny import make_tiny

FILTERS = """
    SELECT id FROM docs
    WHERE AI.IF(PROMPT('Good? {0}', text), threshold := 0.0001) AND AI.IF(PROMPT('Bad? {0}', text)) ORDER BY id
"""
SCORES = "SELECT id, AI.SCORE(PROMPT('Good? {0}', text)), AI.SCORE(PROMPT('Bad? {0}', text)) FROM docs"
CLASSES = (
    "SELECT id, AI.CLASSIFY(PROMPT('{0} This is about', text), ['the ship', 'the town', 'rain']) FROM docs"
)
PAIRS = "SELECT a.id, b.id FROM docs a JOIN notes b ON AI.IF(PROMPT('Does {0} go with {1}?', a.text, b.text))"
ROWS = [{"id": n, "text": f"row {n}: the ship left the harbour " + "at dawn " * (n % 40)} for n in range(60)]
NOTES = [{"id": n, "text": f"note {n} " + "rain " * n} for n in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def opened(folder: Path, **settings: Any) -> quail.Session:
    given = {
        "dtype": "float32",
        "kv_memory": "8MiB",
        "token_budget": 64,
        "prefix_sharing": "on",
        "answers": "off",
    } | settings
    session = quail.Session(quail.EngineConfig(model=str(folder), device="cpu", threads=1, **given))
    session.register("docs", ROWS)
    session.register("notes", NOTES)
    return session


@pytest.fixture
def session(folder: Path) -> Iterator[quail.Session]:
    with opened(folder) as made:
        yield made


class Forgetful(AnsweringAtOnce):
    """A model whose answers are wrong wherever they read KV from pages."""

    def __init__(self, right: Any, by: float = 1.05) -> None:
        self._right, self._by = right, by

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def forward(self, chunk: Chunk) -> torch.Tensor:
        states: torch.Tensor = self._right.forward(chunk).clone()
        segments = chunk.segments
        for place, row in enumerate(chunk.read_rows.tolist()):
            segment = int(segments.q_start.searchsorted(row, side="right")) - 1
            if segments.paged_tokens[segment]:
                states[place] *= self._by
        return states

    def logits(self, *arguments: Any) -> Any:
        return self._right.logits(*arguments).numpy()

    def answer_mass(self, *arguments: Any) -> Any:
        return self._right.answer_mass(*arguments).numpy()


@pytest.mark.parametrize("statement", [FILTERS, CLASSES, PAIRS], ids=["filters", "classes", "pairs"])
def test_every_answer_of_a_right_engine_stands(session: quail.Session, statement: str) -> None:
    query = session.sql(statement)
    plain = query.run()
    session._engine.retention.pool.clear()  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = query.run(audit=1.0)
    found = result.report.audit
    num_questions = sum(stage["evaluated"] for stage in result.report.stages)
    assert result.fetchall() == plain.fetchall()
    assert found["audited"] == num_questions > 50
    assert found["beyond_tolerance"] == found["flips"] == 0
    assert 0 < found["greatest_gap"] < found["tolerance"]
    assert result.report.tokens == plain.report.tokens, "an audit is in no other count"
    assert found["audit_tokens"] == plain.report.tokens["naive"]
    assert plain.report.audit == {}


def test_wrong_answers_under_reuse_are_noticed(folder: Path) -> None:
    with opened(folder, token_budget=256) as session:
        check_that_wrong_answers_are_noticed(session)


def check_that_wrong_answers_are_noticed(session: quail.Session) -> None:
    query = session.sql(SCORES)
    query.run()
    engine: Any = session._engine
    engine.retention.pool.clear()
    engine.model = Forgetful(engine.model)
    with pytest.warns(
        UserWarning, match=r"the audit found [\d,]+ of [\d,]+ answers that differ .* docs row \d+, AI"
    ):
        report = query.run(audit=1.0).report
    assert report.audit["audited"] == 120
    assert report.audit["beyond_tolerance"] >= 60, "every second question at least reads KV from pages"
    assert report.audit["greatest_gap"] > report.audit["tolerance"]
    assert any("Do not trust this result" in warning for warning in report.warnings)
    assert "the audit found" in str(report)


def test_retained_kv_that_was_overwritten_is_noticed(folder: Path) -> None:
    with opened(folder, retention="keep") as session:
        query = session.sql(FILTERS)
        assert query.run(audit=1.0).report.audit["beyond_tolerance"] == 0
        engine: Any = session._engine
        engine.model.arena._kv.mul_(0.5)
        with pytest.warns(UserWarning, match="the audit found"):
            report = query.run(audit=1.0).report
        assert report.tokens["reused_retained"] > 0


def test_the_same_questions_are_audited_in_any_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    compare = Audit._compare

    def note(self: Audit, request: Any, answer: Any) -> None:
        seen.add(_number_of(request))
        compare(self, request, answer)

    monkeypatch.setattr(Audit, "_compare", note)
    statement = "SELECT id FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))"
    found = []
    for rows, settings in ((ROWS, {}), (ROWS[::-1], {"token_budget": 512, "prefix_sharing": "off"})):
        with opened(folder, **settings) as session:
            session.register("docs", rows)
            assert session.sql(statement).run(audit=0.25).report.audit["audited"] == len(seen)
        found.append(set(seen))
        seen.clear()
    assert found[0] == found[1]
    assert 5 < len(found[0]) < 26, "about a quarter of 60"


def test_documents_longer_than_a_pass_are_audited_too(session: quail.Session) -> None:
    session.register(
        "docs", [{"id": n, "text": f"{n} " + "the ship left the harbour " * 30} for n in range(6)]
    )
    report = session.sql(FILTERS).run(audit=1.0).report
    assert report.audit["audited"] >= 6
    assert report.audit["beyond_tolerance"] == 0
    engine: Any = session._engine
    assert engine.is_sound


def test_bfloat16_has_its_own_tolerance(folder: Path) -> None:
    with opened(folder, dtype="bfloat16") as session:
        report = session.sql(FILTERS).run(audit=1.0).report
    assert report.audit["tolerance"] == 0.25
    assert report.audit["audited"] > 50


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", True, float("nan")])
def test_shares_that_are_none(session: quail.Session, share: Any) -> None:
    with pytest.raises(quail.ConfigError, match="audit = .* must be a number from 0 to 1"):
        session.sql(FILTERS).run(audit=share)
