"""One-call helpers: answers come back as what was given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import polars as pl
import pytest

import quail
from quail import BindError, ConfigError, frames
from tests.builder.sessions import make_session

TEXTS = ["good", None, "", "bad film", "good"]
QUESTION = "Is this praise? {0}"
LABELS = ["good", "bad"]


@pytest.fixture(scope="module")
def session() -> Iterator[quail.Session]:
    with make_session()[0] as session:
        yield session


@pytest.fixture(scope="module")
def expected(session: quail.Session) -> dict[str, list[Any]]:
    """The answers by hand-written SQL."""
    session.register("expected", {"row": list(range(5)), "text": TEXTS})
    table = session.sql(
        "SELECT AI.IF('Is this praise? ' || text) AS is_praise, AI.SCORE('Is this praise? ' || text) AS score, "
        "AI.CLASSIFY('Is this praise? ' || text, ['good', 'bad']) AS label, "
        "AI.PROBABILITIES('Is this praise? ' || text, ['good', 'bad']) AS shares FROM expected ORDER BY row"
    ).collect()
    return table.to_pydict()


CALLS = {
    "is_praise": lambda data, **more: quail.ai_if(data, QUESTION, **more),
    "score": lambda data, **more: quail.ai_score(data, QUESTION, **more),
    "label": lambda data, **more: quail.ai_classify(data, QUESTION, LABELS, **more),
}
PANDAS_TYPES = {"is_praise": "boolean", "score": "float64", "label": "string"}
POLARS_TYPES = {"is_praise": pl.Boolean, "score": pl.Float64, "label": pl.String}


@pytest.mark.parametrize("call", CALLS)
def test_lists(call: str, session: quail.Session, expected: dict[str, list[Any]]) -> None:
    assert CALLS[call](TEXTS, session=session) == expected[call]
    assert expected[call][1] is None


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("index", [[7, 7, 3, 1, -1], list("abcde"), pd.date_range("2026-01-01", periods=5)])
def test_pandas(call: str, index: Any, session: quail.Session, expected: dict[str, list[Any]]) -> None:
    frame = pd.DataFrame({"body": TEXTS, "n": range(5)}, index=pd.Index(index, name="key"))
    wanted = pd.Series(expected[call], index=frame.index, name="body", dtype=PANDAS_TYPES[call])
    pd.testing.assert_series_equal(CALLS[call](frame["body"], session=session), wanted)
    pd.testing.assert_series_equal(CALLS[call](frame, column="body", session=session), wanted)
    picked = frame.iloc[[3, 0]]
    pd.testing.assert_series_equal(CALLS[call](picked["body"], session=session), wanted.iloc[[3, 0]])
    frame["answer"] = CALLS[call](frame, column="body", session=session)
    assert frame["answer"].isna().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("dtype", ["object", "string", "str", "category", "string[pyarrow]"])
def test_pandas_text_types_and_missing_values(dtype: str, session: quail.Session) -> None:
    series = pd.Series(["good", None, pd.NA, float("nan"), "bad film"], dtype=dtype)
    answers = quail.ai_classify(series, QUESTION, LABELS, session=session)
    assert answers.isna().tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("call", CALLS)
def test_polars(call: str, session: quail.Session, expected: dict[str, list[Any]]) -> None:
    frame = pl.DataFrame({"body": TEXTS, "n": range(5)})
    for answers in (
        CALLS[call](frame["body"], session=session),
        CALLS[call](frame, column="body", session=session),
    ):
        assert isinstance(answers, pl.Series)
        assert (answers.name, answers.dtype) == ("body", POLARS_TYPES[call])
        assert answers.to_list() == expected[call]
    assert frame.with_columns(CALLS[call](frame["body"], session=session).alias("x"))["x"].null_count() == 1


def test_probabilities(session: quail.Session, expected: dict[str, list[Any]]) -> None:
    shares = [None if row is None else dict(row) for row in expected["shares"]]
    assert quail.ai_probabilities(TEXTS, QUESTION, LABELS, session=session) == shares
    series = pd.Series(TEXTS, index=[5, 4, 3, 2, 1], name="body")
    wide = quail.ai_probabilities(series, QUESTION, LABELS, session=session)
    assert wide.columns.tolist() == LABELS
    assert wide.index.tolist() == [5, 4, 3, 2, 1]
    assert wide.dtypes.tolist() == ["float64", "float64"]
    assert wide.isna().all(axis=1).tolist() == [False, True, False, False, False]
    assert wide["bad"].tolist()[3] == shares[3]["bad"]
    frame = pl.DataFrame({"body": TEXTS})
    wide = quail.ai_probabilities(
        frame, QUESTION, {"good": "fine", "bad": None}, column="body", session=session
    )
    assert wide.columns == LABELS
    assert wide["good"].null_count() == 1


@pytest.mark.parametrize("texts", [[], [None, None]])
def test_no_texts(texts: list[None], session: quail.Session) -> None:
    for call, ask in CALLS.items():
        assert ask(texts, session=session) == texts
        series = pd.Series(texts, dtype="object", index=list("ab")[: len(texts)], name="x")
        answers = ask(series, session=session)
        assert (answers.dtype, answers.name, answers.index.tolist()) == (
            PANDAS_TYPES[call], "x", series.index.tolist(),
        )  # fmt: skip
        assert answers.isna().all()
        polars = ask(pl.Series("x", texts, dtype=pl.String), session=session)
        assert (polars.dtype, len(polars)) == (POLARS_TYPES[call], len(texts))
    wide = quail.ai_probabilities(pd.Series(texts, dtype="object"), QUESTION, LABELS, session=session)
    assert (wide.shape, wide.columns.tolist()) == ((len(texts), 2), LABELS)
    assert quail.ai_probabilities(pl.Series(texts), QUESTION, LABELS, session=session).columns == LABELS


def test_several_columns_and_options(session: quail.Session) -> None:
    frame = pd.DataFrame({"title": ["A", "B"], "body": ["good", "bad"]}, index=[9, 8])
    answers = quail.ai_if(
        frame, "{0}: {1}, is it?", column=["title", "body"], session=session, answers=["yes", "no"], selectivity=0.5
    )  # fmt: skip
    session.register("titled", frame)
    by_hand = session.sql("SELECT AI.IF(PROMPT('{0}: {1}, is it?', title, body)) AS a FROM titled").collect()
    assert answers.tolist() == by_hand["a"].to_pylist()
    assert answers.name == "title"


def test_nothing_stays_in_the_session(session: quail.Session) -> None:
    before = set(session.tables)
    quail.ai_if(TEXTS, QUESTION, session=session)
    with pytest.raises(BindError, match="did you mean selectivity"):
        quail.ai_if(TEXTS, QUESTION, session=session, selectivty=0.2)
    assert set(session.tables) == before


def test_lone_surrogates_are_warned_of(session: quail.Session) -> None:
    with pytest.warns(UserWarning, match="1 lone surrogates"):
        assert quail.ai_if(["a\ud800b"], QUESTION, session=session) == quail.ai_if(
            ["a�b"], QUESTION, session=session
        )


def test_the_shared_session_is_kept_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make() -> quail.Session:
        made.append(make_session()[0])
        return made[-1]

    monkeypatch.setattr(frames, "Session", make)
    monkeypatch.setattr(frames, "_shared", [])
    assert quail.ai_if(["good"], QUESTION) == quail.ai_if(["good"], QUESTION)
    assert len(made) == 1
    frames._close_shared()
    with pytest.raises(quail.QuailError, match="closed"):
        made[0].sql("SELECT 1")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: quail.ai_if("good", QUESTION), ConfigError, "not a builtins str"),
        (lambda: quail.ai_if(pl.LazyFrame({"a": ["x"]}), QUESTION), ConfigError, "not a polars LazyFrame"),
        (lambda: quail.ai_if(["x", 5], QUESTION), ConfigError, "item 1 of the list is a int"),
        (lambda: quail.ai_if(["x"], QUESTION, column="a"), ConfigError, "a list is one column"),
        (lambda: quail.ai_if(pd.Series(["x"]), QUESTION, column="a"), ConfigError, "a Series is one column"),
        (lambda: quail.ai_if(pd.DataFrame({"ab": ["x"]}), QUESTION), ConfigError, "it has 'ab'"),
        (lambda: quail.ai_if(pd.DataFrame({"body": ["x"]}), QUESTION, column="bdy"), ConfigError, "Did you mean 'body'"),
        (lambda: quail.ai_if(pl.DataFrame({"body": ["x"]}), QUESTION, column="bdy"), ConfigError, "Did you mean 'body'"),
        (lambda: quail.ai_if(["x"], "Is it?"), BindError, "holds no document"),
        (lambda: quail.ai_if(["x"], "{0} {1}"), BindError, "1 columns"),
        (lambda: quail.ai_classify(["x"], QUESTION, ["a"]), BindError, "2 to 255"),
        (lambda: quail.ai_if(pl.Series([["x"]]), QUESTION), BindError, "not text"),
    ],
)  # fmt: skip
def test_mistakes(make: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_shared", [make_session()[0]])
    with pytest.raises(error, match=message):
        make()
