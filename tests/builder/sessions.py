"""Sessions whose answers come from the texts."""

from __future__ import annotations

from typing import Any

import quail
from quail.plan.logical import AICall, Operator
from tests.shell.stub import StubEngine

REVIEWS = {
    "id": [1, 2, 3, 4, 5, 6],
    "body": ["good", "bad film", None, "", "so so, really", "great"],
    "stars": [5, 1, 3, None, 3, 5],
}
TOPICS = {"name": ["plot", "cast", None], "group": ["a", "b", "b"]}


def answer(call: AICall, texts: tuple[str, ...]) -> Any:
    """An answer that depends on the question and on every text."""
    seed = sum(map(ord, "".join(map(str, call.prompt.parts)) + "|".join(texts)))
    labels = [category.label for category in call.categories]
    if call.operator is Operator.IF:
        return seed % 3 != 0
    if call.operator is Operator.SCORE:
        return (seed % 7) / 7
    if call.operator is Operator.CLASSIFY:
        return labels[seed % len(labels)]
    weights = [1 + (seed + i) % 5 for i in range(len(labels))]
    return [(label, weight / sum(weights)) for label, weight in zip(labels, weights, strict=True)]


def make_session(**tables: Any) -> tuple[quail.Session, StubEngine]:
    """A session with the tables, and reviews and topics."""
    stub = StubEngine(answer)
    session = quail.Session(engine=stub)
    for name, data in ({"reviews": REVIEWS, "topics": TOPICS} | tables).items():
        session.register(name, data)
    return session, stub
