"""How often the default model is right on labelled reviews."""

from __future__ import annotations

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


def measure(*, num_rows: int = 1000, num_topic_rows: int = 400) -> list[Line]:
    """Sentiment of many rows, topic of fewer."""
    with quail.Session() as session:
        session.register("many", sample(num_rows))
        session.register("few", sample(num_topic_rows))
        many = session.docs("many").ai_score(SENTIMENT, answers=WORDS)
        table, how = classified(many, SENTIMENT, WORDS)
        topics, _ = classified(session.docs("few"), TOPIC, list(TOPICS))
    is_positive = np.array(table["positive"].to_pylist())
    sentiment = np.where(is_positive, *WORDS)
    names = {source: topic for topic, source in TOPICS.items()}
    topic = np.array([names[source] for source in topics["source"].to_pylist()])
    area = area_under_roc(np.array(table["score"].to_pylist()), is_positive)
    many_rows, few_rows = f"{num_rows} rows", f"{num_topic_rows} rows"
    return [
        line("sentiment, share right", share_right(table["raw"], sentiment), 0.85, many_rows),
        line("sentiment, calibrated", share_right(table["batch"], sentiment), 0.88, f"{many_rows}; {how}"),
        line("sentiment, area under ROC of AI.SCORE", area, 0.94, many_rows),
        line("topic of three, share right", share_right(topics["raw"], topic), 0.72, few_rows),
        line("topic of three, calibrated", share_right(topics["batch"], topic), 0.80, f"{few_rows}; {how}"),
    ]
