"""Rows that cannot be answered: the others are, and the bad ones are NULL, counted and listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import quail
from quail.execution.chunk import Chunk
from quail.execution.error_log import ERROR_SCHEMA, MOST_LISTED, ErrorLog
from quail.execution.reads import AnsweringAtOnce
from quail.execution.run import Limits
from quail.execution.runner import Engine
from quail.execution.stages import compile_stage
from quail.kv.pages import PageArena
from quail.models.tokenizer import Tokenizer, TokenizerSource
from quail.plan.prompts import PromptLayout
from tests.models.tiny import tiny_tokenizer

NAN, INFINITE, CRASH, PANIC = "\u2460", "\u2461", "\u2462", "\u2463"
"""Signs in a text: for logits that are no numbers, and for tokenizers that fail."""

CONTEXT, BUDGET, PAGES = 4000, 512, 60


class PanicException(BaseException):
    """As the tokenizers package raises when it panics."""


class Brittle:
    """A tokenizer that fails on some texts, and takes the batch with it."""

    def __init__(self) -> None:
        self._right = Tokenizer(TokenizerSource(json=tiny_tokenizer(512).to_str()))
        self.max_token_bytes, self.bos_ids = self._right.max_token_bytes, self._right.bos_ids

    def encode_control(self, text: str) -> list[int]:
        return self._right.encode_control(text)

    def encode_plain(self, texts: Any) -> Any:
        items = texts.to_pylist() if hasattr(texts, "to_pylist") else texts
        if any(CRASH in text for text in items):
            raise RuntimeError("no merge for this text")
        if any(PANIC in text for text in items):
            raise PanicException("index out of bounds")
        return self._right.encode_plain(items)


class SumModel(AnsweringAtOnce):
    """Says TRUE where the ids of the prompt sum to an odd number."""

    def __init__(self, tokenizer: Brittle) -> None:
        self.pages = PageArena(PAGES)
        self._marks = {mark: tokenizer.encode_plain([mark])[0].tolist() for mark in (NAN, INFINITE)}

    def forward(self, chunk: Chunk) -> np.ndarray:
        starts = chunk.segments.q_start
        states = np.add.reduceat(chunk.ids.astype(np.int64), starts).astype(np.float64) % 2
        for mark, value in ((NAN, np.nan), (INFINITE, np.inf)):
            ids = self._marks[mark]
            windows = np.lib.stride_tricks.sliding_window_view(chunk.ids, len(ids))
            for place in np.flatnonzero((windows == ids).all(axis=1)).tolist():
                states[np.searchsorted(starts, place, side="right") - 1] = value
        return states[np.searchsorted(starts, chunk.read_rows, side="right") - 1]

    def logits(self, states: np.ndarray, rows: np.ndarray, vocab_ids: np.ndarray) -> np.ndarray:
        found = np.zeros((len(rows), len(vocab_ids)), dtype=np.float32)
        found[:, 0] = states[rows] - 0.5
        return found

    def answer_mass(self, states: np.ndarray, rows: np.ndarray, vocab_ids: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), dtype=np.float32)


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = Brittle()
    about = {"model": "sum", "device": "cpu", "dtype": "float32", "memory": {}}
    layout = PromptLayout("completion", label="")
    return Engine(SumModel(tokenizer), tokenizer, layout, Limits(BUDGET, CONTEXT), about)  # type: ignore[arg-type]


@pytest.fixture
def session(engine: Engine) -> Iterator[quail.Session]:
    with quail.Session(engine=engine) as opened:
        yield opened
    engine.model.pages.check_integrity()
    assert engine.model.pages.num_free_pages == PAGES


BAD = {
    "too_long": lambda number: f"{number} " * 3000,
    "no_room": lambda number: f"{number % 10}" * 1500 + f" {number}",
    "not_finite": lambda number: f"text {number} {(NAN, INFINITE)[number % 2]}",
    "not_text": lambda number: f"text {number} {(CRASH, PANIC)[number % 2]}",
}
STATEMENT = "SELECT id, AI.IF(PROMPT('Odd? {0}', text)) AS odd FROM docs"


def texts_with(bad: dict[int, str], num: int) -> list[str]:
    return [BAD[bad[row]](row) if row in bad else f"document {row}" for row in range(num)]


def register(session: quail.Session, bad: dict[int, str], num: int) -> None:
    session.register("docs", {"id": list(range(num)), "text": texts_with(bad, num)})


# -- at size


@pytest.mark.parametrize("num", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_hundred_bad_rows_among_many(session: quail.Session, engine: Engine, num: int) -> None:
    share = 100 / num
    rng = np.random.default_rng(0)
    bad = dict(zip(rng.choice(num, 100, replace=False).tolist(), 25 * list(BAD), strict=True))
    register(session, bad, num)
    query = session.sql(STATEMENT)
    result = query.run(on_error="details", max_error_ratio=10 * share)
    table, report = result.arrow(), result.report
    assert {row for row, odd in zip(*table.to_pydict().values(), strict=True) if odd is None} == set(bad)
    assert (report.num_errors, len(report.errors), report.nulls) == (100, 100, 100)
    assert {(error["row"], error["kind"]) for error in report.errors} == set(bad.items())
    assert {error["table"] for error in report.errors} == {"docs"}
    assert result.errors.schema == ERROR_SCHEMA
    assert result.errors.to_pylist() == list(report.errors)
    assert "  100 questions failed, the first docs row " in str(report)
    stage = compile_stage(query._bound.calls[0], engine.pieces, engine.tokenizer)
    for row, odd in zip(*table.slice(0, 300).to_pydict().values(), strict=True):
        if row not in bad:
            ids, _ = engine.tokenizer.encode_plain([f"document {row}"])
            assert odd == ((int(ids.sum()) + int(stage.tail.sum())) % 2 == 1)

    with pytest.raises(quail.RowError, match=r"^docs row \d+: ") as raised:
        query.run()
    assert int(str(raised.value).split()[2].rstrip(":")) in bad
    with pytest.raises(
        quail.TooManyErrors,
        match=rf"\d+ of {num:,} questions failed .*exceeds max_error_ratio = {share / 2}; the first: docs row",
    ):
        query.run(on_error="null", max_error_ratio=share / 2)
    assert query.run(on_error="null", max_error_ratio=share).report.num_errors == 100


# -- each kind


MESSAGES = {
    "too_long": r"^docs row 1: its prompt of \d+ tokens \(\d+ of document, \d+ of question\) exceeds .* 4000\n.*truncate",
    "no_room": r"^docs row 1: its \d+ tokens need \d+ KV pages of 16 tokens, the arena has 60 .*\n.*kv_memory",
    "not_finite": r"^docs row 1: the model's logits are not finite\n.*on_error='null'",
    "not_text": r"^docs row 1: the text cannot be tokenized: index out of bounds\n.*on_error='null'",
}


@pytest.mark.parametrize("kind", BAD)
def test_raise_names_table_row_numbers_and_the_way_out(session: quail.Session, kind: str) -> None:
    register(session, {1: kind}, 3)
    with pytest.raises(quail.RowError, match=MESSAGES[kind]):
        session.sql(STATEMENT).run()


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("on_error", ["null", "details"])
def test_the_others_are_answered(session: quail.Session, kind: str, on_error: str) -> None:
    register(session, {1: kind, 4: kind}, 6)
    result = session.sql(STATEMENT).run(on_error=on_error)
    assert [row for row, odd in result.fetchall() if odd is None] == [1, 4]
    assert [(error["row"], error["kind"]) for error in result.report.errors] == [(1, kind), (4, kind)]
    assert result.errors.to_pylist() == list(result.report.errors)
    assert result.report.errors[0]["call"] == "AI.IF(PROMPT('Odd? {0}', text))"


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_dropped_by_a_filter_and_asked_nothing_more(session: quail.Session, kind: str) -> None:
    register(session, {1: kind}, 8)
    call = "AI.SCORE(PROMPT('Odd? {0}', text)) >= 0"
    statement = f"SELECT id FROM docs WHERE {call} AND AI.SCORE(PROMPT('Even? {{0}}', text)) >= 0 ORDER BY id"
    result = session.sql(statement).run(on_error="null")
    assert [row for (row,) in result.fetchall()] == [0, *range(2, 8)]
    assert result.report.num_errors == 1


@pytest.mark.parametrize(
    ("kind", "side"), [("not_text", "docs"), ("not_text", "notes"), ("not_finite", "notes")]
)
def test_a_bad_text_of_a_join_fails_its_pairs(session: quail.Session, kind: str, side: str) -> None:
    for name in ("docs", "notes"):
        texts = texts_with({1: kind} if name == side else {}, 3)
        session.register(name, {"id": [0, 1, 2], "text": texts})
    statement = """
        SELECT d.id, n.id, AI.SCORE(PROMPT('Is {0} of {1}?', d.text, n.text)) AS s
        FROM docs d CROSS JOIN notes n ORDER BY 1, 2"""
    result = session.sql(statement).run(on_error="null")
    bad = [(d, n) for d, n, score in result.fetchall() if score is None]
    assert bad == ([(1, 0), (1, 1), (1, 2)] if side == "docs" else [(0, 1), (1, 1), (2, 1)])
    assert result.report.num_errors == 3
    assert {error["kind"] for error in result.report.errors} == {kind}


def test_bytes_that_are_no_text_are_refused_when_they_are_registered(session: quail.Session) -> None:
    """Arrow lets a string column hold any bytes."""
    texts = [b"document 0", b"bad \xff\xfe", b"document 2"]
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    column = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(texts))]
    )
    with pytest.raises(
        quail.SourceError, match="column 'text' is damaged: .*Invalid UTF8 sequence at string index 1"
    ):
        session.register("docs", pa.table({"id": [0, 1, 2], "text": column}))


# -- counts


@pytest.mark.parametrize(
    ("num", "num_bad", "ratio", "fails"),
    [(10, 2, 0.1, True), (10, 2, 0.2, False), (10, 1, 0.0, True), (10, 0, 0.0, False), (10, 10, 1.0, False)],
)
def test_the_ratio_of_a_small_table_is_judged_at_the_end(
    session: quail.Session, num: int, num_bad: int, ratio: float, fails: bool
) -> None:
    register(session, dict.fromkeys(range(num_bad), "not_text"), num)
    query = session.sql(STATEMENT)
    if not fails:
        assert query.run(on_error="null", max_error_ratio=ratio).report.num_errors == num_bad
        return
    with pytest.raises(
        quail.TooManyErrors, match=f"^{num_bad} of {num} questions failed \\({num_bad} not_text\\)"
    ):
        query.run(on_error="null", max_error_ratio=ratio)


def test_a_run_does_not_wait_for_its_end_where_too_many_fail(session: quail.Session) -> None:
    register(session, dict.fromkeys(range(0, 20_000, 2), "not_finite"), 20_000)
    seen: list[int] = []
    with pytest.raises(quail.TooManyErrors, match=r"\d+ of [\d,]+ questions failed"):
        session.sql(STATEMENT).run(
            on_error="null", max_error_ratio=0.1, progress=lambda progress: seen.append(progress["documents"])
        )
    assert 3_900 < seen[-1] < 5_000, "2,000 errors are a tenth of all questions"


@pytest.mark.parametrize("ratio", [-0.1, 1.1, "few", True, float("nan")])
def test_ratios_that_are_none(session: quail.Session, ratio: Any) -> None:
    register(session, {}, 1)
    with pytest.raises(quail.ConfigError, match="max_error_ratio = .* must be a number from 0 to 1"):
        session.sql(STATEMENT).run(on_error="null", max_error_ratio=ratio)


def test_a_ratio_needs_a_run_that_goes_on(session: quail.Session) -> None:
    register(session, {}, 1)
    with pytest.raises(quail.ConfigError, match="has no meaning where the first error stops the run"):
        session.sql(STATEMENT).run(max_error_ratio=0.5)


def test_a_run_without_errors_has_an_empty_table_of_them(session: quail.Session) -> None:
    register(session, {}, 3)
    for on_error in ("raise", "null", "details"):
        result = session.sql(STATEMENT).run(on_error=on_error)
        assert (result.errors.num_rows, result.errors.schema) == (0, ERROR_SCHEMA)
        assert result.report.num_errors == 0


@pytest.mark.parametrize("kind", BAD)
def test_the_helpers_go_on_and_warn(session: quail.Session, kind: str) -> None:
    texts = texts_with({1: kind, 3: kind}, 5)
    with pytest.raises(quail.RowError, match="row 1: "):
        quail.ai_if(texts, "Odd? {0}", session=session)
    with pytest.warns(UserWarning, match="2 texts could not be answered; the first, number 1: "):
        answers = quail.ai_score(texts, "Odd? {0}", session=session, on_error="null")
    assert [answer is None for answer in answers] == [False, True, False, True, False]


def test_a_calibration_without_numbers_never_becomes_an_answer(
    session: quail.Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(session, {}, 3)
    monkeypatch.setattr(
        engine.model, "logits", lambda states, rows, ids: np.full((len(rows), len(ids)), np.nan)
    )
    call = "AI.IF(PROMPT('Odd? {0}', text), calibrate := 'content')"
    with pytest.raises(quail.PlanError, match="logits on content-free documents are not finite: AI.IF"):
        session.sql(f"SELECT {call} FROM docs").run(on_error="null")


def test_errors_of_all_parts_of_a_builder_query_are_told(session: quail.Session) -> None:
    register(session, {1: "not_text"}, 3)
    docs = (
        session.docs("docs")
        .ai_score(quail.prompt("Odd? {0}", quail.col("text")), name="s")
        .apply(lambda batch: batch)
    )
    result = docs.run(on_error="details")
    assert result.report.num_errors == result.errors.num_rows == 1


def test_a_million_errors_do_not_fill_memory() -> None:
    log = ErrorLog(lists_all=False)
    for row in range(50_000):
        log.add("docs", row, "AI.IF(…)", "too_long" if row % 5 else "not_text", f"message {row}")
    assert (log.num_errors, log.kinds["not_text"], log.table().num_rows) == (50_000, 10_000, MOST_LISTED)
    assert len(log._first) == MOST_LISTED
    assert not log._rows
    every = ErrorLog(lists_all=True)
    for row in range(50_000):
        every.add("docs", row, "AI.IF(…)", "too_long" if row % 5 else "not_text", f"message {row}")
    table = every.table()
    assert table.column("row").to_pylist() == list(range(50_000))
    assert table.schema == ERROR_SCHEMA
    assert table.nbytes < 50_000 * 60
