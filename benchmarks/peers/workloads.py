"""What is measured: statements over the example tables, and the same prompts as token ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.clauses import CLAUSES
from benchmarks.peers.tokens import Compiler, Document, Ids, Step, readout_ids

DATA = Path(__file__).parents[2] / "examples" / "data"
DOCUMENT_TOKENS = 300
LENGTHS = (10, 4000)
"""Tokens of the shortest and the longest of the mixed documents."""
LABELS = ("movie", "product", "restaurant")

Tables = dict[str, dict[str, list[Any]]]
Place = tuple[int, int, int]
"""Document, step, tail."""


@dataclass(frozen=True)
class Part:
    """What one statement of a workload asks.

    Attributes:
        name: short name.
        title: for people.
        sql: the statement.
        steps: the steps of the documents that it stands for.
        answers: its rows to the index of the answer at each place that they tell of.
    """

    name: str
    title: str
    sql: str
    steps: tuple[int, ...]
    answers: Callable[[list[list[Any]]], dict[Place, int]]


@dataclass(frozen=True)
class Workload:
    """Statements over some tables that run one after the other; KV is given up before the first.

    Attributes:
        name: short name.
        tables: by column.
        parts: the statements.
        documents: the same questions as ids.
        readouts: of each step, the ids of each answer.
    """

    name: str
    tables: Tables
    parts: tuple[Part, ...]
    documents: list[Document]
    readouts: list[list[Ids]]


@dataclass(frozen=True)
class Sizes:
    """How much is asked.

    Attributes:
        documents: of about 300 tokens, for one filter and for a chain; the other workloads follow from it.
    """

    documents: int

    @property
    def anchors(self) -> int:
        """Documents of the join, each with 20 clauses."""
        return max(2, self.documents // 2)

    @property
    def streamed(self) -> int:
        """Documents that are filtered in front of a join."""
        return max(2, self.documents // 4)

    @property
    def reviews(self) -> int:
        """Short documents."""
        return 4 * self.documents

    @property
    def calls(self) -> int:
        """Transcripts that begin alike."""
        return min(100, max(2, self.documents // 4))

    @property
    def mixed(self) -> int:
        """Documents of mixed lengths."""
        return max(4, self.documents // 4)


def column(table: str, name: str) -> list[str]:
    """A column of an example table."""
    values: list[str] = pq.read_table(DATA / f"{table}.parquet")[name].to_pylist()
    return values


def numbered(texts: Sequence[str]) -> dict[str, list[Any]]:
    """A table of texts."""
    return {"id": list(range(len(texts))), "text": list(texts)}


def whether(step: int) -> Callable[[list[list[Any]]], dict[Place, int]]:
    """Rows (document, answer) of a question about one document; TRUE is the first answer."""
    return lambda rows: {(int(row[0]), step, 0): 0 if row[1] else 1 for row in rows}


def one_filter(compiler: Compiler, sizes: Sizes) -> Workload:
    """One question about each document."""
    texts = chapters(compiler, [DOCUMENT_TOKENS] * sizes.documents)
    sql = r"SELECT id, AI.IF(PROMPT(E'{0}\n\nIs this about the sea?', text)) FROM docs ORDER BY id"
    part = Part("filter", "one filter, documents of 300 tokens", sql, (0,), whether(0))
    return single(compiler, "docs", texts, part)


def chain(compiler: Compiler, sizes: Sizes) -> Workload:
    """Two filters, the first passed by every other document; then a further question about those.

    Which documents pass is given, so that all engines ask the same: with a threshold of 0 every answer is
    TRUE, and the statement keeps those whose answer equals that to "is the id even".
    """
    tables: Tables = {"docs": numbered(chapters(compiler, [DOCUMENT_TOKENS] * sizes.documents))}
    first = r"AI.IF(PROMPT(E'{0}\n\nIs this about the sea?', text), threshold := 0)"
    second = r"AI.IF(PROMPT(E'{0}\n\nDoes anybody speak in this text?', text))"
    further = r"AI.IF(PROMPT(E'{0}\n\nIs this part of a story about a voyage and its crew?', text))"
    passing = [row for row in range(sizes.documents) if row % 2 == 0]

    def passed(rows: list[list[Any]]) -> dict[Place, int]:
        return {(row, 1, 0): 1 for row in passing} | {(int(row[0]), 1, 0): 0 for row in rows}

    parts = (
        Part(
            "chain",
            "two filters, every other document passes the first",
            f"SELECT id FROM docs WHERE {first} = (id % 2 = 0) AND {second} ORDER BY id",
            (0, 1),
            passed,
        ),
        Part(
            "second",
            "a further question about documents just read",
            f"SELECT id, {further} FROM docs WHERE id % 2 = 0 ORDER BY id",
            (2,),
            whether(2),
        ),
    )
    stages = [stage for part in parts for stage in compiler.stages(part.sql, tables)]
    steps = [compiler.question(stage) for stage in stages]
    documents = [
        compiler.document(text, steps if row % 2 == 0 else steps[:1])
        for row, text in enumerate(tables["docs"]["text"])
    ]
    return Workload("chain", tables, parts, documents, [readout_ids(stage) for stage in stages])


CLAUSE = r"AI.IF(PROMPT('Does {0} agree with {1}?', d.text, c.text), anchor := 'd')"


def join(compiler: Compiler, sizes: Sizes) -> Workload:
    """Each document with each of 20 short clauses."""
    tables: Tables = {
        "docs": numbered(chapters(compiler, [DOCUMENT_TOKENS] * sizes.anchors)),
        "clauses": numbered(CLAUSES),
    }
    sql = f"SELECT d.id, c.id, {CLAUSE} FROM docs d, clauses c ORDER BY d.id, c.id"
    (stage,) = compiler.stages(sql, tables)
    step = compiler.partners(stage, CLAUSES)
    documents = [compiler.document(text, [step]) for text in tables["docs"]["text"]]
    part = Part(
        "join",
        f"join, {sizes.anchors} documents of 300 tokens x {len(CLAUSES)} short clauses",
        sql,
        (0,),
        lambda rows: {(int(row[0]), 0, int(row[1])): 0 if row[2] else 1 for row in rows},
    )
    return Workload("join", tables, (part,), documents, [readout_ids(stage)])


def filter_join(compiler: Compiler, sizes: Sizes) -> Workload:
    """A filter that every other document passes, given as in `chain`, then a join of those that do."""
    partners = CLAUSES[:10]
    tables: Tables = {
        "docs": numbered(chapters(compiler, [DOCUMENT_TOKENS] * sizes.streamed)),
        "clauses": numbered(partners),
    }
    first = r"AI.IF(PROMPT(E'{0}\n\nIs this about the sea?', d.text), threshold := 0)"
    sql = (
        f"SELECT d.id, c.id FROM docs d, clauses c WHERE {first} = (d.id % 2 = 0) AND {CLAUSE} "
        "ORDER BY d.id, c.id"
    )
    stages = compiler.stages(sql, tables)
    steps = [compiler.question(stages[0]), compiler.partners(stages[1], partners)]
    documents = [
        compiler.document(text, steps if row % 2 == 0 else steps[:1])
        for row, text in enumerate(tables["docs"]["text"])
    ]
    pairs = itertools.product(range(0, sizes.streamed, 2), range(len(partners)))
    refused = {(row, 1, tail): 1 for row, tail in pairs}
    part = Part(
        "filter_join",
        f"filter, then join of those that pass with {len(partners)} clauses",
        sql,
        (0, 1),
        lambda rows: refused | {(int(row[0]), 1, int(row[1])): 0 for row in rows},
    )
    return Workload("filter_join", tables, (part,), documents, [readout_ids(stage) for stage in stages])


def classify(compiler: Compiler, sizes: Sizes) -> Workload:
    """One of three label words for short reviews."""
    texts = drawn(column("reviews", "text"), sizes.reviews)
    sql = (
        r"SELECT id, AI.CLASSIFY(PROMPT(E'{0}\n\nThis review is about a', text), "
        f"{list(LABELS)}) FROM docs ORDER BY id"
    )
    part = Part(
        "classify",
        "classify, short reviews, three labels",
        sql,
        (0,),
        lambda rows: {(int(row[0]), 0, 0): LABELS.index(row[1]) for row in rows},
    )
    return single(compiler, "docs", texts, part)


def shared(compiler: Compiler, sizes: Sizes) -> Workload:
    """One question about transcripts, many of which begin alike."""
    question = r"PROMPT(E'{0}\n\nDoes the caller name a favourite dish?', text)"
    sql = f"SELECT id, AI.IF({question}) FROM docs ORDER BY id"
    part = Part("shared", "one filter, transcripts that begin alike", sql, (0,), whether(0))
    return single(compiler, "docs", column("calls", "text")[: sizes.calls], part)


def mixed(compiler: Compiler, sizes: Sizes) -> Workload:
    """One question about documents of 10 to 4,000 tokens, in an order without meaning."""
    lengths = np.geomspace(*LENGTHS, sizes.mixed).astype(int)
    texts = chapters(compiler, np.random.default_rng(1).permutation(lengths).tolist())
    sql = r"SELECT id, AI.IF(PROMPT(E'{0}\n\nIs this about the sea?', text)) FROM docs ORDER BY id"
    part = Part(
        "mixed", f"one filter, documents of {LENGTHS[0]} to {LENGTHS[1]:,} tokens", sql, (0,), whether(0)
    )
    return single(compiler, "docs", texts, part)


def single(compiler: Compiler, table: str, texts: Sequence[str], part: Part) -> Workload:
    """A workload of one statement with one question about each text."""
    tables: Tables = {table: numbered(texts)}
    (stage,) = compiler.stages(part.sql, tables)
    step: Step = compiler.question(stage)
    documents = [compiler.document(text, [step]) for text in texts]
    return Workload(part.name, tables, (part,), documents, [readout_ids(stage)])


def chapters(compiler: Compiler, lengths: Sequence[int]) -> list[str]:
    """Texts of these lengths, cut from the chapters."""
    return compiler.texts_of_tokens(column("chapters", "text"), lengths)


def drawn(texts: Sequence[str], count: int) -> list[str]:
    """Distinct texts drawn without order, always the same; fewer where there are not so many."""
    distinct = list(dict.fromkeys(texts))
    order = np.random.default_rng(1).permutation(len(distinct))[:count]
    return [distinct[place] for place in order]


WORKLOADS: dict[str, Callable[[Compiler, Sizes], Workload]] = {
    "filter": one_filter,
    "chain": chain,
    "join": join,
    "filter_join": filter_join,
    "classify": classify,
    "shared": shared,
    "mixed": mixed,
}
