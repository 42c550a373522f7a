"""What `quail layouts` measures: how often a model is right with each layout, cue and pair of answer words.

Small models answer well in one form and no better than chance in another; rows whose answer is known tell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quail.config import EngineConfig, did_you_mean
from quail.errors import ConfigError, PlanError
from quail.frontend.asking import col, prompt
from quail.rendering import box
from quail.session import Session

LAYOUTS = ("completion", "chat")
_BOOLEAN_WORDS = ("TRUE,FALSE", "true,false", "yes,no")
_TEXT_NAMES = ("text", "body", "content", "document")


@dataclass(frozen=True)
class Rows:
    """Labelled rows: what a measurement reads.

    Attributes:
        path: Parquet, CSV or JSON-lines file.
        label: column of the right answers.
        text: column of the documents; None finds it.
        num_rows: most rows to use.
        seed: of the choice of rows.
    """

    path: str
    label: str
    text: str | None = None
    num_rows: int = 200
    seed: int = 1


@dataclass(frozen=True)
class Measured:
    """One way of asking and how it did.

    Attributes:
        layout: `completion` or `chat`.
        cue: the prompt's template.
        answers: the answer words.
        accuracy: share of rows whose likeliest answer is the right one.
        area: area under the ROC curve of the first answer; over three or more answers, the mean of each
            against the rest.
        rows: how many were asked about.
    """

    layout: str
    cue: str
    answers: str
    accuracy: float
    area: float
    rows: int


def measure_layouts(
    config: EngineConfig,
    rows: Rows,
    *,
    layouts: Sequence[str] = LAYOUTS,
    cues: Sequence[str] = (),
    answers: Sequence[str] = (),
) -> list[Measured]:
    r"""Asks about labelled rows in every combination.

    Args:
        config: the engine; its layout is not used.
        rows: the rows.
        layouts: those to try. A chat layout of a model without a chat template is left out.
        cues: templates such as `'{0}\n\nSentiment:'`, or what follows the document, such as `'Sentiment:'`.
        answers: each `'positive,negative'` (of a boolean label the word for true first) or
            `'movie=imdb,restaurant=yelp'` (word = value of the label).

    Returns:
        The best first, by area.

    Raises:
        ConfigError: columns, words or labels that cannot be used.
    """
    found: list[Measured] = []
    templates = [_template(cue) for cue in cues or _default_cues(rows.label)]
    for layout in layouts:
        with Session(replace(config, layout=layout)) as session:
            session.register("labelled", rows.path)
            texts, labels = _chosen(session, rows)
            words = [_words(each, labels) for each in answers or _default_answers(labels)]
            try:
                found += _measure(session, layout, texts, labels, templates, words)
            except PlanError as error:
                if layout != "chat" or "chat template" not in error.message or len(layouts) == 1:
                    raise
    return sorted(found, key=lambda each: (-each.area, -each.accuracy))


def print_layouts(found: Sequence[Measured], format: str = "table") -> None:
    """Prints what was measured, as a `table` or as `json`."""
    if format == "json":
        print(json.dumps([asdict(each) for each in found], indent=2, ensure_ascii=False))
        return
    records = [
        asdict(each)
        | {"cue": each.cue.replace("\n", "\\n")}
        | {"accuracy": f"{each.accuracy:.3f}", "area": f"{each.area:.3f}"}
        for each in found
    ]
    encoding = sys.stdout.encoding or "utf-8"
    print(
        box(pa.Table.from_pylist(records), max_rows=len(records)).encode(encoding, "replace").decode(encoding)
    )


def area_under_roc(scores: npt.NDArray[np.float64], is_positive: npt.NDArray[np.bool_]) -> float:
    """The chance that a positive row scores above a negative one, equals counting half; NaN without both.

    >>> area_under_roc(np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False]))
    0.875
    """
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def _measure(
    session: Session,
    layout: str,
    texts: list[str],
    labels: list[str],
    templates: Sequence[str],
    words: Sequence[dict[str, str]],
) -> list[Measured]:
    """All combinations in one statement, so that each document is computed once."""
    session.register("chosen", {"row": list(range(len(texts))), "document": texts})
    docs = session.docs("chosen")
    asked = [(template, each) for template in templates for each in words]
    for i, (template, each) in enumerate(asked):
        docs = docs.ai_probabilities(prompt(template, col("document")), list(each), name=f"p{i}")
    table = docs.order_by("row").collect()
    found = []
    for i, (template, each) in enumerate(asked):
        kept = np.array([label in each.values() for label in labels], dtype=bool)
        truth = np.array([label for label, is_kept in zip(labels, kept, strict=True) if is_kept])
        shares = np.array([[p for _, p in row] for row in table[f"p{i}"].to_pylist()], dtype=np.float64)[kept]
        values = np.array(list(each.values()))
        areas = [area_under_roc(shares[:, j], truth == value) for j, value in enumerate(values)]
        found.append(
            Measured(
                layout,
                template,
                ",".join(each),
                float((values[shares.argmax(axis=1)] == truth).mean()),
                areas[0] if len(values) == 2 else float(np.nanmean(areas)),
                len(truth),
            )
        )
    return found


def _chosen(session: Session, rows: Rows) -> tuple[list[str], list[str]]:
    """Texts and labels of some rows that have both."""
    columns = dict(session.tables["labelled"].columns)
    if rows.label not in columns:
        raise ConfigError(
            f"{rows.path} has no column {rows.label!r}",
            hint=did_you_mean(rows.label, list(columns)) or f"it has {', '.join(columns)}",
        )
    text = rows.text or _text_column(columns, rows)
    if text not in columns:
        raise ConfigError(f"{rows.path} has no column {text!r}", hint=f"it has {', '.join(columns)}")
    pairs = session.docs("labelled").select(col(text, "labelled"), col(rows.label, "labelled")).collect()
    both = [
        (str(document), _label(label))
        for document, label in zip(pairs[0].to_pylist(), pairs[1].to_pylist(), strict=True)
        if document is not None and label is not None
    ]
    order = np.random.default_rng(rows.seed).permutation(len(both))[: rows.num_rows]
    if not len(order):
        raise ConfigError(f"{rows.path} has no row with both {text!r} and {rows.label!r}")
    return [both[i][0] for i in order], [both[i][1] for i in order]


def _text_column(columns: dict[str, str], rows: Rows) -> str:
    texts = [name for name, kind in columns.items() if kind == "VARCHAR" and name != rows.label]
    usual = [name for name in texts if name.lower() in _TEXT_NAMES]
    found = usual if len(usual) == 1 else texts
    if len(found) != 1:
        raise ConfigError(
            f"which column of {rows.path} is the document: {', '.join(texts) or 'none is text'}?",
            hint="--text names it",
        )
    return found[0]


def _label(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _template(cue: str) -> str:
    cue = cue.replace("\\n", "\n")
    return cue if "{0}" in cue else f"{{0}}\n\n{cue}"


def _default_cues(label: str) -> list[str]:
    name = label.replace("_", " ")
    return [f"{name[:1].upper()}{name[1:]}:", f"Is this {name}?", "This text is"]


def _default_answers(labels: Sequence[str]) -> tuple[str, ...]:
    values = sorted(set(labels))
    if set(values) <= {"true", "false"}:
        return _BOOLEAN_WORDS
    return (",".join(values),)


def _words(answers: str, labels: Sequence[str]) -> dict[str, str]:
    """Answer words and the label that each means."""
    pairs = [each.strip().partition("=") for each in answers.split(",")]
    words = {word.strip(): value.strip() if mark else word.strip() for word, mark, value in pairs}
    known = sorted(set(labels))
    if set(known) <= {"true", "false"} and len(words) == 2 and not any(mark for _, mark, _ in pairs):
        words = dict(zip(words, ("true", "false"), strict=True))
    if len(words) != len(pairs) or len(words) < 2 or not all(words):
        raise ConfigError(f"answers = {answers!r} are not two or more words", hint="'positive,negative'")
    strange = [value for value in words.values() if value not in known]
    if strange:
        raise ConfigError(
            f"no row has the label {strange[0]!r}",
            hint=f"write word=label for the labels {', '.join(known[:10])}",
        )
    return words
