"""What `quail answers` does: looks into an answer store, prunes it, writes it out."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from quail.answers.store import AnswerStore
from quail.errors import StoreError

_DAY_SECONDS = 86_400.0


def open_store(path: Path) -> AnswerStore:
    """An existing store.

    Raises:
        StoreError: there is no such file, or it is no answer store.
    """
    if not path.exists():
        raise StoreError(
            f"{path}: there is no such file",
            hint="name the file that EngineConfig(answers=…), QUAIL_ANSWERS or DATABASE.answers names",
        )
    return AnswerStore(path)


def questions_table(store: AnswerStore) -> pa.Table:
    """A row for each question: number, count of answers, model, dtype, layout, when first asked, text."""
    rows = [
        {
            "question": each["question"],
            "answers": each["answers"],
            "model": each["model"],
            "dtype": each["dtype"],
            "layout": each["layout"],
            "since": datetime.fromtimestamp(each["since"]).replace(microsecond=0),
            "text": each["text"],
        }
        for each in store.questions()
    ]
    types = {
        "question": pa.int64(),
        "answers": pa.int64(),
        "model": pa.string(),
        "dtype": pa.string(),
        "layout": pa.string(),
        "since": pa.timestamp("s"),
        "text": pa.string(),
    }
    return pa.Table.from_pylist(rows, schema=pa.schema(list(types.items())))


def facts(store: AnswerStore) -> dict[str, Any]:
    """Path, size, counts, and whether the file is sound."""
    questions = store.questions()
    damage = store.check()
    return {
        "file": str(store.path),
        "bytes": store.size_bytes(),
        "questions": len(questions),
        "answers": sum(each["answers"] for each in questions),
        "models": ", ".join(sorted({each["model"] for each in questions})) or "none",
        "state": "sound" if not damage else "; ".join(damage),
    }


def answers_table(store: AnswerStore) -> pa.Table:
    """A row for each answer: question number, its text, digest of the content in hexadecimal, raw logits."""
    texts = {each["question"]: each["text"] for each in store.questions()}
    numbers, contents, logits = [], [], []
    for number, content, row in store.rows():
        numbers.append(number)
        contents.append(content.hex())
        logits.append(row)
    return pa.table(
        {
            "question": pa.array(numbers, pa.int64()),
            "text": pa.array([texts[number] for number in numbers], pa.string()),
            "content": pa.array(contents, pa.string()),
            "logits": pa.array(logits, pa.list_(pa.float32())),
        }
    )


def to_prune(
    store: AnswerStore, *, questions: list[int], model: str | None, days: float | None, everything: bool
) -> list[int]:
    """Numbers of the questions that match all that is given.

    Args:
        store: the store.
        questions: their numbers; empty means any.
        model: name of their model.
        days: they are older than that.
        everything: all of them; must be said where nothing else is.

    Raises:
        StoreError: nothing is given, or there is no such question.
    """
    if not (questions or model is not None or days is not None or everything):
        raise StoreError(
            "nothing says what to prune", hint="--question NUMBER, --model NAME, --older-than DAYS or --all"
        )
    known = store.questions()
    missing = sorted(set(questions) - {each["question"] for each in known})
    if missing:
        raise StoreError(f"{store.path}: has no question {missing[0]}", hint="quail answers ls lists them")
    latest = time.time() - (days or 0.0) * _DAY_SECONDS
    return [
        each["question"]
        for each in known
        if (not questions or each["question"] in questions)
        and (model is None or each["model"] == model)
        and (days is None or each["since"] <= latest)
    ]
