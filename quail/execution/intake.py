"""Questions in: their texts become token ids, and those whose prompts fit become requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from quail.arrays import of_numbers
from quail.errors import PlanError
from quail.execution.asks import Asks
from quail.execution.documents import DocumentEncoder, PrefixIds
from quail.execution.error_log import NOT_TEXT, TOO_LONG
from quail.execution.failures import Failures
from quail.execution.requests import Document, Request
from quail.execution.scheduler import Scheduler
from quail.execution.stages import Int32s, Pieces, Stage
from quail.models.tokenizer import Tokenizer

MOST_PARTNERS = 2**16
"""Partners of joins whose token ids are kept at hand."""


class Intake:
    """Makes requests of questions.

    Args:
        stages: of the run; `Asks.call` indexes them.
        scheduler: is told of new documents.
        tokenizer: the model's.
        pieces: the fixed ids of the prompt layout.
        context_tokens: longest prompt of the model.
        truncates: whether a document that is too long is cut; otherwise it fails.
        failures: told of prompts that do not fit.

    Attributes:
        encoder: of documents and partners.
        tokenize_seconds: time taken by it.
        num_documents: documents met so far.
        num_requests: questions met so far.
        num_truncated: prompts that were cut.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        pieces: Pieces,
        *,
        context_tokens: int,
        truncates: bool,
        failures: Failures,
    ) -> None:
        self.encoder = DocumentEncoder(tokenizer, pieces, context_tokens)
        self.tokenize_seconds = 0.0
        self.num_documents = self.num_requests = self.num_truncated = 0
        self._stages, self._scheduler, self._failures = stages, scheduler, failures
        self._context_tokens, self._truncates = context_tokens, truncates
        self._num_label_tokens = len(pieces.prefix)
        self._partners: dict[int, PrefixIds] = {}
        self._last_cut = 0

    def is_overlong(self, document: Document) -> bool:
        """Whether a document alone is as long as the model's context."""
        return document.num_tokens >= self._context_tokens

    def requests(self, asks: Asks) -> list[Request]:
        """The requests of some questions; those whose texts cannot be used or do not fit are failed."""
        self._add_documents(asks)
        stage = self._stages[asks.call]
        partners = self._partners_of(asks, stage)
        suffixes = self._suffixes(partners, stage) if partners else [stage.tail] * len(asks)
        document_and_suffix_tokens = self._context_tokens - stage.num_fixed_tokens + len(stage.tail)
        branches = stage.branches
        keys, follows = asks.keys.tolist(), asks.may_follow.tolist()
        self.num_requests += len(keys)
        found = []
        for place, handle in enumerate(asks.documents.tolist()):
            document = self._scheduler.document(handle)
            assert document is not None
            document.keep = follows[place]
            room = document_and_suffix_tokens - len(suffixes[place])
            own_tokens = min(len(document.ids), max(0, room))
            prefix_tokens = own_tokens + len(stage.frame)
            request = Request(
                document,
                asks.call,
                keys[place],
                suffixes[place],
                prefix_tokens,
                stage.frame,
                branches,
                operator=asks.operator,
            )
            partner = partners[place] if partners else None
            fault = document.fault or _fault_of(partner)
            if fault:
                self._failures.note(request, NOT_TEXT, fault)
            elif self._fits(request, room, partner):
                found.append(self._cut_for_frame(request, own_tokens))
        return found

    def _partners_of(self, asks: Asks, stage: Stage) -> list[PrefixIds]:
        """The partner of each question about a pair; none of others."""
        if asks.partners is None:
            return []
        handles = asks.partners.tolist()
        unknown = {handle: place for place, handle in enumerate(handles) if handle not in self._partners}
        if unknown:
            places = np.fromiter(unknown.values(), np.int64, len(unknown))
            texts = asks.arguments[1 - stage.call.anchor].take(of_numbers(places))
            self._partners.update(zip(unknown, self._tokenize(texts, partner=True), strict=True))
        found = [self._partners[handle] for handle in handles]
        while len(self._partners) > MOST_PARTNERS:
            self._partners.pop(next(iter(self._partners)))
        return found

    def _suffixes(self, partners: Sequence[PrefixIds], stage: Stage) -> list[Int32s]:
        """What stands behind each prefix: a partner and the stage's tail.

        Where documents may be cut, a partner that leaves no room for its anchor gets half.
        """
        room = self._context_tokens - stage.num_fixed_tokens - self._num_label_tokens
        found = []
        for partner in partners:
            ids = partner.ids
            if self._truncates and len(ids) >= room:
                self.num_truncated += 1
                ids = ids[: room // 2]
            found.append(np.concatenate([ids, stage.tail]))
        return found

    def _tokenize(self, texts: pa.Array, *, partner: bool = False) -> list[PrefixIds]:
        started = time.perf_counter()
        found = self.encoder.encode_partners(texts) if partner else self.encoder.encode(texts)
        self.tokenize_seconds += time.perf_counter() - started
        return found

    def _cut_for_frame(self, request: Request, own_tokens: int) -> Request:
        """A frame stands right behind its document: a document cut for one request is a document of its
        own.
        """
        document = request.document
        if not len(request.frame) or own_tokens == len(document.ids):
            return request
        self._last_cut -= 1
        ids = document.ids[:own_tokens]
        cut = Document(self._last_cut, ids, name=document.name, source=document.source, row=document.row)
        self._scheduler.add(cut)
        return replace(request, document=cut)

    def _add_documents(self, asks: Asks) -> None:
        """Tokenizes the documents that the scheduler does not know."""
        first: dict[int, int] = {}
        for place, handle in enumerate(asks.documents.tolist()):
            if self._scheduler.document(handle) is None:
                first.setdefault(handle, place)
        if not first:
            return
        anchor = self._stages[asks.call].call.anchor
        texts = asks.arguments[anchor].take(of_numbers(np.fromiter(first.values(), np.int64, len(first))))
        for (handle, place), prefix in zip(first.items(), self._tokenize(texts), strict=True):
            table, row = _source_of(asks), int(asks.rows[place])
            self._scheduler.add(
                Document(
                    handle,
                    prefix.ids,
                    name=f"{table} row {row}",
                    source=table,
                    row=row,
                    num_cut=prefix.num_tokens - len(prefix.ids),
                    is_exact=prefix.is_exact,
                    fault=prefix.fault,
                )
            )
            self.num_documents += 1

    def _fits(self, request: Request, room: int, partner: PrefixIds | None) -> bool:
        """Whether a prompt fits the context, perhaps truncated; if not, the request is failed."""
        document = request.document
        num_tokens = document.num_tokens
        if num_tokens <= room:
            return True
        if self._truncates:
            self.num_truncated += 1
            return True
        is_exact = document.is_exact
        parts = f"{_exactly(is_exact)}{num_tokens} of document, "
        num_question = len(request.frame) + request.num_own_tokens
        if partner is not None:
            num_question -= len(partner.ids)
            num_tokens += partner.num_tokens
            is_exact = is_exact and partner.is_exact
            parts += f"{_exactly(partner.is_exact)}{partner.num_tokens} of second document, "
        self._failures.note(
            request,
            TOO_LONG,
            f"its prompt of {_exactly(is_exact)}{num_tokens + num_question} tokens ({parts}{num_question} of "
            f"question) exceeds the model's context of {self._context_tokens}",
            hint="run(on_long='truncate') cuts such documents, never questions, and counts them",
        )
        return False


def check_question(stage: Stage, pieces: Pieces, *, context_tokens: int, token_budget: int) -> None:
    """Refuses a question that leaves no room for a document, or whose labels do not fit one pass.

    Raises:
        PlanError: with the numbers.
    """
    num_fixed, num_branch = stage.num_fixed_tokens, stage.num_own_tokens - len(stage.tail)
    if len(pieces.prefix) + num_fixed >= context_tokens:
        raise PlanError(
            f"a question of {num_fixed} tokens leaves no room for a document in the model's context of "
            f"{context_tokens} tokens: {stage.call.text}",
            hint="shorten the question; questions are never cut",
        )
    if num_branch >= token_budget:
        raise PlanError(
            f"its {len(stage.call.categories)} labels take {num_branch} tokens in one pass, the token budget "
            f"is {token_budget}: {stage.call.text}",
            hint=f"set token_budget to at least {num_branch + 1}, or shorten the labels",
        )


def _exactly(is_exact: bool) -> str:
    return "" if is_exact else "more than "


def _fault_of(partner: PrefixIds | None) -> str:
    return f"of its second document, {partner.fault}" if partner is not None and partner.fault else ""


def _source_of(asks: Asks) -> str:
    """What to call the source of some questions."""
    return asks.table or ("document" if asks.partners is None else "joined")
