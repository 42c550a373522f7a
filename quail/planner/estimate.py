"""What some questions over the same documents will compute: the ledger and the work, before anything runs.

With the token counts of all documents and nothing unknown about the answers the numbers are exact: those of
the run's own ledger, as long as its memory holds what it keeps. Otherwise they are estimates, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quail.cost.work import Work
from quail.kv.prefix_sharing import PrefixTree
from quail.planner.prefix_sharing import SharingDecision

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DocumentCounts:
    """Tokens of some distinct documents: of all of them, or of a sample.

    Attributes:
        lengths: (n,) tokens of each counted document, everything in front of the question included.
        tree: what the counted documents share.
        num_documents: all of them.
        num_too_long: counted documents that leave no room for the question in the model's context.
    """

    lengths: Int64s
    tree: PrefixTree
    num_documents: int
    num_too_long: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether every document was counted."""
        return len(self.lengths) == self.num_documents

    @property
    def scale(self) -> float:
        """Documents that each counted one stands for."""
        return self.num_documents / len(self.lengths) if len(self.lengths) else 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return round(int(self.lengths.sum()) * self.scale)


@dataclass(frozen=True)
class QuestionCount:
    """One question and how often it will be asked.

    Attributes:
        call: index of the call.
        num_asked: documents of which it is asked.
        suffix_tokens: tokens behind the document.
        is_exact: whether `num_asked` is certain.
    """

    call: int
    num_asked: int
    suffix_tokens: int
    is_exact: bool


@dataclass(frozen=True)
class TokenForecast:
    """The ledger as planned, and the work behind it; the names are those of a run's report.

    Attributes:
        naive: every prompt in full.
        computed: rows that the model computes.
        reused_rewind: rows of documents that an earlier question computed.
        reused_prefix: rows borrowed from another document.
        reused_retained: rows held from an earlier operator.
        work: of all of it.
        is_exact: whether the run will count the same.
    """

    naive: int = 0
    computed: int = 0
    reused_rewind: int = 0
    reused_prefix: int = 0
    reused_retained: int = 0
    work: Work = Work()
    is_exact: bool = True

    def __add__(self, other: TokenForecast) -> TokenForecast:
        return TokenForecast(
            self.naive + other.naive,
            self.computed + other.computed,
            self.reused_rewind + other.reused_rewind,
            self.reused_prefix + other.reused_prefix,
            self.reused_retained + other.reused_retained,
            self.work + other.work,
            self.is_exact and other.is_exact,
        )


def forecast_tokens(
    documents: DocumentCounts, questions: Sequence[QuestionCount], decision: SharingDecision
) -> TokenForecast:
    """The ledger of a group: every document meets the first question, some meet the later ones.

    Args:
        documents: distinct documents that the first question reads.
        questions: in the order in which they are asked.
        decision: whether the documents share beginnings.
    """
    lengths = documents.lengths
    shared = np.asarray(documents.tree.shared if decision.shares else np.zeros(len(lengths)), dtype=np.int64)
    own = lengths - shared
    num_shared = round(int(shared.sum()) * documents.scale)
    naive, suffix_tokens, is_exact = 0, 0, documents.is_exact
    written_tokens = decision.written_tokens / documents.scale if decision.shares else 0.0
    work = prefix_work(own, shared, kept=len(questions) > 1, written_tokens=written_tokens)
    for place, question in enumerate(questions):
        share = question.num_asked / documents.num_documents if documents.num_documents else 0.0
        naive += round(documents.num_tokens * share) + question.num_asked * question.suffix_tokens
        suffix_tokens += question.num_asked * question.suffix_tokens
        work += share * suffix_work(lengths, question.suffix_tokens, reads=place > 0)
        is_exact = is_exact and question.is_exact and question.num_asked == documents.num_documents
    computed = documents.num_tokens - num_shared + suffix_tokens
    return TokenForecast(
        naive=naive,
        computed=computed,
        reused_rewind=max(0, naive - computed - num_shared),
        reused_prefix=num_shared,
        work=work * documents.scale,
        is_exact=is_exact,
    )


def prefix_work(own: Int64s, shared: Int64s, *, kept: bool, written_tokens: float) -> Work:
    """Work of documents that compute `own` tokens behind `shared` borrowed ones."""
    tokens, behind = own.astype(np.float64), shared.astype(np.float64)
    return Work(
        tokens=float(tokens.sum()),
        pairs=float((tokens * behind + tokens * (tokens + 1) / 2).sum()),
        kv_written=float(tokens.sum()) if kept else written_tokens,
        kv_read=float(behind.sum()),
    )


def suffix_work(lengths: Int64s, suffix_tokens: int, *, reads: bool) -> Work:
    """Work of a question behind each document, whose KV is read from pages or computed in the same pass."""
    num_tokens = float(suffix_tokens * len(lengths))
    total = float(lengths.sum())
    pairs = total * suffix_tokens + len(lengths) * suffix_tokens * (suffix_tokens + 1) / 2
    return Work(tokens=num_tokens, pairs=pairs, kv_read=total if reads else 0.0)


def until_row_limit(
    documents: DocumentCounts,
    questions: Sequence[QuestionCount],
    row_limit: int,
    selectivities: Sequence[float],
) -> tuple[DocumentCounts, tuple[QuestionCount, ...]]:
    """The documents and questions that a run needs until `row_limit` rows have passed.

    Args:
        documents: all that could be read.
        questions: of a chain of filters.
        row_limit: rows that suffice.
        selectivities: share of rows that pass each filter.
    """
    passing = math.prod(selectivities)
    needed = documents.num_documents
    if passing * needed > row_limit:
        needed = min(needed, math.ceil(row_limit / passing))
    factor = needed / documents.num_documents if documents.num_documents else 0.0
    fewer = tuple(replace(q, num_asked=round(q.num_asked * factor), is_exact=False) for q in questions)
    return replace(documents, num_documents=needed), fewer
