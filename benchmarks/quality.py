"""How often the default model is right on labelled reviews."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import quail
from benchmarks.lines import Line
from quail import UnsupportedError, col, prompt
from quail.frontend.asking import Prompt
from quail.layouts import area_under_roc

REVIEWS = Path(__file__).parent.parent / "examples" / "data" / "reviews.parquet"
SENTIMENT = prompt("{0}\n\nSentiment:", col("text"))
TOPIC = prompt("{0}\n\nThis review is about a", col("text"))
WORDS = ["positive", "negative"]
TOPICS = {"movie": "imdb", "product": "amazon", "restaurant": "yelp"}


def sample(num_rows: int, seed: int = 1) -> pa.Table:
    """Rows drawn from all reviews."""
    reviews = pq.read_table(REVIEWS)
    order = np.random.default_rng(seed).permutation(reviews.num_rows)[:num_rows]
    return reviews.take(pa.array(order)).append_column("row", pa.array(range(num_rows)))


def classified(docs: quail.Docs, asked: Prompt, labels: list[str]) -> tuple[pa.Table, str]:
    """Columns `raw` and `batch`, and how the second came about."""
    docs = docs.ai_classify(asked, labels, name="raw")
    try:
        docs = docs.ai_classify(asked, labels, name="batch", calibrate="batch")
        return docs.order_by("row").collect(), "calibrate='batch'"
    except UnsupportedError:
        pass
    table = docs.ai_probabilities(asked, labels).order_by("row").collect()
    shares = np.array([[p for _, p in row] for row in table["probabilities"].to_pylist()])
    shifted = np.log(shares) - np.log(shares).mean(axis=0)
    chosen = pa.array(labels).take(pa.array(shifted.argmax(axis=1)))
    return table.append_column("batch", chosen), "from the probabilities, less their mean logarithm"


def share_right(answers: pa.ChunkedArray, truth: np.ndarray) -> float:
    """Share of right answers."""
    return float((np.array(answers.to_pylist()) == truth).mean())


def line(name: str, value: float, least: float, detail: str) -> Line:
    """A figure that must be at least so much."""
    return Line(name, value, f">= {least}", value >= least, detail)


def topic_lines(session: quail.Session, num_rows: int) -> list[Line]:
    """Topics of some rows against where they come from."""
    session.register("some", sample(num_rows))
    table, how = classified(session.docs("some"), TOPIC, list(TOPICS))
    names = {source: topic for topic, source in TOPICS.items()}
    topic = np.array([names[source] for source in table["source"].to_pylist()])
    rows = f"{num_rows} rows"
    return [
        line(f"topic of three, {rows}", share_right(table["raw"], topic), 0.72, "as answered"),
        line(f"topic of three, {rows}, calibrated", share_right(table["batch"], topic), 0.80, how),
    ]


def measure(*, num_rows: int = 1000, num_topic_rows: Sequence[int] = (400, 3000)) -> list[Line]:
    """Sentiment of some rows; topic of few rows, as a share of 400 may miss by 0.04, and of all."""
    with quail.Session() as session:
        session.register("many", sample(num_rows))
        docs = session.docs("many").ai_score(SENTIMENT, answers=WORDS)
        table, how = classified(docs, SENTIMENT, WORDS)
        topics = [each for number in num_topic_rows for each in topic_lines(session, number)]
    is_positive = np.array(table["positive"].to_pylist())
    sentiment = np.where(is_positive, *WORDS)
    area = area_under_roc(np.array(table["score"].to_pylist()), is_positive)
    rows = f"{num_rows} rows"
    return [
        line(f"sentiment, {rows}", share_right(table["raw"], sentiment), 0.85, "as answered"),
        line(f"sentiment, {rows}, calibrated", share_right(table["batch"], sentiment), 0.88, how),
        line(f"sentiment, {rows}, area under ROC", area, 0.94, "of AI.SCORE"),
        *topics,
    ]
