"""`quail demo`: real questions about real tables, with plan, rows, score and ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from quail.config import EngineConfig
from quail.errors import QuailError
from quail.models.registry import list_models
from quail.rendering import box
from quail.session import Session

SENTIMENT = """\
SELECT id, source, positive, text
FROM reviews
WHERE AI.IF(PROMPT(E'{0}\\n\\nSentiment:', text), answers := ['positive', 'negative'])"""

TOPIC = """\
SELECT id, source, text
FROM reviews
WHERE AI.IF(PROMPT(E'{0}\\n\\nThis review is about a', text), answers := ['movie', 'product'])"""

LICENCES = """\
SELECT id, name
FROM licences
WHERE AI.IF(PROMPT(E'{0}\\n\\nThis license is for', text), answers := ['code', 'fonts'])
  AND AI.IF(PROMPT(E'{0}\\n\\nThis software was developed at a', text), answers := ['university', 'company'])
ORDER BY id"""

CALLS = """\
SELECT id
FROM calls
WHERE AI.IF(PROMPT(E'{0}\\n\\nThis call is about', text), answers := ['business', 'family'])"""


@dataclass(frozen=True)
class Question:
    """One query of the demo.

    Attributes:
        title: what it asks.
        statement: the query.
        table: the table it reads.
        truth: SQL condition that says which rows should come back.
        measure: what that condition is, in words.
        shown: rows that are printed.
    """

    title: str
    statement: str
    table: str
    truth: str
    measure: str
    shown: int = 6


QUESTIONS = (
    Question("Which reviews are positive?", SENTIMENT, "reviews", "positive", "the table's own labels"),
    Question(
        "Which reviews are about a movie?", TOPIC, "reviews", "source = 'imdb'", "where the reviews come from"
    ),
    Question(
        "Which licences are for code, not fonts, and come from a university?",
        LICENCES,
        "licences",
        "NOT contains(lower(text), 'font') AND regexp_matches(text, 'Universit|Institut')",
        "a search for the words font, University and Institute",
        shown=12,
    ),
    Question(
        "Which of twelve calls, long and beginning alike, are about business?",
        CALLS,
        "calls",
        "true",
        "reading them: all are sales calls",
        shown=12,
    ),
)


def example_path(name: str) -> Path:
    """A file of the example data: in the source tree, or inside an installed package.

    Raises:
        QuailError: there is no such file.
    """
    package = Path(__file__).parent
    for folder in (package.parent / "examples" / "data", package / "_example_data"):
        if (folder / name).is_file():
            return folder / name
    raise QuailError(f"there is no example file {name!r}")


def run_demo(config: EngineConfig, *, num_reviews: int = 300) -> None:
    """Runs the questions and prints what they give.

    Args:
        config: settings of the engine.
        num_reviews: reviews that are read; they are drawn evenly from the table.
    """
    started = time.perf_counter()
    for known in list_models(config.cache_path):
        if known.name == config.model and known.path is None:
            print(f"the model {known.name} is fetched once: {known.num_bytes / 1e6:.0f} MB")
    with Session(config) as session:
        _register(session, num_reviews)
        for number, question in enumerate(QUESTIONS, start=1):
            _ask(session, number, question)
    print(f"\n{len(QUESTIONS)} queries in {time.perf_counter() - started:.0f} s")


def _register(session: Session, num_reviews: int) -> None:
    session.register("all_reviews", example_path("reviews.parquet"))
    session.register("all_licences", example_path("licences.parquet"))
    reviews = session.sql(
        f"SELECT * FROM all_reviews ORDER BY hash(id) LIMIT {num_reviews}",
    ).collect()
    licences = session.sql(
        "SELECT * FROM all_licences WHERE length(text) BETWEEN 1000 AND 4000 ORDER BY hash(id) LIMIT 60",
    ).collect()
    session.register("reviews", reviews)
    session.register("licences", licences)
    session.register("all_calls", example_path("calls.parquet"))
    session.register("calls", session.sql("SELECT * FROM all_calls ORDER BY text LIMIT 12").collect())


def _ask(session: Session, number: int, question: Question) -> None:
    print(f"\n{number}. {question.title}\n\n{question.statement}\n")
    query = session.sql(question.statement)
    print(query.explain())
    result = query.run()
    print("\n" + box(result.arrow(), max_rows=question.shown))
    print(_score(session, question, result.arrow()))
    print(result.report)


def _score(session: Session, question: Question, answer: pa.Table) -> str:
    """How many rows were told apart rightly, by the labels of the table."""
    session.register("answer", answer)
    counts = session.sql(
        "SELECT count(*), count(*) FILTER (WHERE found = truth), count(*) FILTER (WHERE found AND truth), "
        "count(*) FILTER (WHERE found), count(*) FILTER (WHERE truth) FROM "
        f"(SELECT id IN (SELECT id FROM answer) AS found, {question.truth} AS truth FROM {question.table})"
    ).run()
    ((rows, right, both, found, true),) = counts
    return (
        f"measured by {question.measure}: {right} of {rows} rows right ({right / rows:.0%}), "
        f"precision {both / max(1, found):.0%}, recall {both / max(1, true):.0%}"
    )
