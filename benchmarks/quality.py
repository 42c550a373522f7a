"""How often the default model is right on labelled reviews."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import quail
from benchmarks.lines import Line
from quail import col, prompt
from quail.frontend.asking import Prompt
from quail.layouts import area_under_roc

REVIEWS = Path(__file__).parent.parent / "examples" / "data" / "reviews.parquet"
SENTIMENT = prompt("{0}\n\nSentiment:", col("text"))
TOPIC = prompt("{0}\n\nThis review is about a", col("text"))
WORDS = ["positive", "negative"]
BATCH = "calibrate='batch'"
TOPICS = {"movie": "imdb", "product": "amazon", "restaurant": "yelp"}


def sample(num_rows: int, seed: int = 1) -> pa.Table:
    """Rows drawn from all reviews."""
    reviews = pq.read_table(REVIEWS)
    order = np.random.default_rng(seed).permutation(reviews.num_rows)[:num_rows]
    return reviews.take(pa.array(order)).append_column("row", pa.array(range(num_rows)))


def classified(docs: quail.Docs, asked: Prompt, labels: list[str]) -> pa.Table:
    """Columns `raw` and `batch`: labels as answered, and less their mean over the rows; one evaluation."""
    docs = docs.ai_classify(asked, labels, name="raw")
    return docs.ai_classify(asked, labels, name="batch", calibrate="batch").order_by("row").collect()


def share_right(answers: pa.ChunkedArray, truth: np.ndarray) -> float:
    """Share of right answers."""
    return float((np.array(answers.to_pylist()) == truth).mean())


def line(name: str, value: float, least: float, detail: str) -> Line:
    """A figure that must be at least so much."""
    return Line(name, value, f">= {least}", value >= least, detail)


def topic_lines(session: quail.Session, num_rows: int) -> list[Line]:
    """Topics of some rows against where they come from."""
    session.register("some", sample(num_rows))
    table = classified(session.docs("some"), TOPIC, list(TOPICS))
    topic = topics_of(table)
    rows = f"{num_rows} rows"
    return [
        line(f"topic of three, {rows}", share_right(table["raw"], topic), 0.72, "as answered"),
        line(f"topic of three, {rows}, calibrated", share_right(table["batch"], topic), 0.80, BATCH),
    ]


def topics_of(table: pa.Table) -> np.ndarray:
    """The right topic of each row."""
    names = {source: topic for topic, source in TOPICS.items()}
    return np.array([names[source] for source in table["source"].to_pylist()])


def draw_lines(session: quail.Session, num_rows: int, num_draws: int) -> list[Line]:
    """Mean share of right topics over many draws of some rows: a single draw of 400 may miss by 0.04."""
    session.register("every", sample(pq.read_metadata(REVIEWS).num_rows))
    table = session.docs("every").ai_probabilities(TOPIC, list(TOPICS)).order_by("row").collect()
    logs = np.log([[share for _, share in row] for row in table["probabilities"].to_pylist()])
    right = np.searchsorted(sorted(TOPICS), topics_of(table))
    order = [sorted(TOPICS).index(topic) for topic in TOPICS]
    rng = np.random.default_rng(1)
    draws = [rng.permutation(len(logs))[:num_rows] for _ in range(num_draws)]
    found = []
    for name, least, is_batch in (("", 0.72, False), (", calibrated", 0.80, True)):
        shares = []
        for draw in draws:
            shifted = logs[draw] - (logs[draw].mean(axis=0) if is_batch else 0.0)
            shares.append(float((np.take(order, shifted.argmax(axis=1)) == right[draw]).mean()))
        reached = np.mean(np.array(shares) >= least)
        detail = f"from {min(shares):.3f} to {max(shares):.3f}; {reached:.0%} of the draws reach the bar"
        label = f"topic of three, mean of {num_draws} draws of {num_rows} rows{name}"
        found.append(line(label, float(np.mean(shares)), least, detail))
    return found


def measure(*, num_rows: int = 1000, num_topic_rows: Sequence[int] = (400, 3000)) -> list[Line]:
    """Sentiment of some rows; topic of few rows, of all, and of many draws of few."""
    with quail.Session(quail.EngineConfig(answers="memory")) as session:
        session.register("many", sample(num_rows))
        docs = session.docs("many").ai_score(SENTIMENT, answers=WORDS)
        table = classified(docs, SENTIMENT, WORDS)
        topics = [each for number in num_topic_rows for each in topic_lines(session, number)]
        topics += draw_lines(session, num_topic_rows[0], 1000)
    is_positive = np.array(table["positive"].to_pylist())
    sentiment = np.where(is_positive, *WORDS)
    area = area_under_roc(np.array(table["score"].to_pylist()), is_positive)
    rows = f"{num_rows} rows"
    return [
        line(f"sentiment, {rows}", share_right(table["raw"], sentiment), 0.85, "as answered"),
        line(f"sentiment, {rows}, calibrated", share_right(table["batch"], sentiment), 0.88, BATCH),
        line(f"sentiment, {rows}, area under ROC", area, 0.94, "of AI.SCORE"),
        *topics,
    ]
