"""The main loop: one run of a feed on a model, pass by pass."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quail.errors import PlanError, QueryCancelled, RowError
from quail.execution.asks import Asks, Feed, FollowUp, RunControl
from quail.execution.calibration import CONTENT_FREE, HeldAnswers, Means, content_mean, stage_key
from quail.execution.chunk import Chunk
from quail.execution.documents import DocumentEncoder, PrefixIds
from quail.execution.packing import Pass
from quail.execution.readout import calibrated, values_of
from quail.execution.requests import Document, Failure, Request, in_tree_order
from quail.execution.scheduler import Scheduler
from quail.execution.stages import Float32s, Int32s, Int64s, Pieces, Stage, compile_stage
from quail.kv.pages import PageArena
from quail.kv.prefix_sharing import PrefixTree
from quail.kv.retention import RetentionPool
from quail.models.tokenizer import Tokenizer
from quail.plan.logical import AICall
from quail.planner.prefix_sharing import SharingDecision

SharingRule = Callable[[PrefixTree, Sequence[int], Sequence[bool]], SharingDecision]

SHARING_WINDOW_TOKENS = 2**24
"""Tokens of documents that one sharing plan covers; a larger table is planned in several windows."""

MOST_PARTNERS = 2**16
"""Partners of joins whose token ids are kept at hand."""

MASS_ROWS = 16
"""Rows at which the probability of a question's answers is looked at."""

FIRST_TAKE = 16
"""Fresh questions taken from the feed before the length of its documents is known."""


class Model(Protocol):
    """What a run needs of a model: the decoder on its arena, or a fake."""

    @property
    def pages(self) -> PageArena:
        """The accounting of its KV."""

    def forward(self, chunk: Chunk) -> Any:
        """Runs one pass; returns one state a read row."""

    def logits(self, states: Any, rows: Int64s, vocab_ids: Int64s) -> npt.NDArray[np.float32]:
        """(len(rows), len(vocab_ids)) float32 logits of some of the states."""

    def answer_mass(self, states: Any, rows: Int64s, vocab_ids: Int64s) -> npt.NDArray[np.float32]:
        """(len(rows),) share of the probability that some vocabulary rows hold together."""


@dataclass(frozen=True)
class Limits:
    """What a run must stay within.

    Attributes:
        token_budget: most rows a pass.
        context_tokens: longest prompt of the model.
    """

    token_budget: int
    context_tokens: int


@dataclass(frozen=True)
class Retention:
    """KV kept between the operators of a query, and between queries.

    Attributes:
        pool: where it is.
        writes_all: whether the KV of documents with a single question is written for it too.
    """

    pool: RetentionPool
    writes_all: bool = False


@dataclass
class RunStats:
    """What happened in a run, beside the ledger."""

    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    num_requests: int = 0
    num_documents: int = 0
    num_truncated: int = 0
    num_calibration_tokens: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sharing: list[SharingDecision] = field(default_factory=list)


class Run:
    """One run of a feed on a model. When it ends, however it ends, only the pool of `retention` holds pages.

    Args:
        model: answers passes.
        tokenizer: the model's.
        pieces: the fixed ids of the prompt layout.
        limits: budget and context.
        calls: of the plan; `Asks.call` indexes them.
        feed: the relational side.
        control: how the run is watched and stopped.
        sharing: decides whether fresh documents share prefixes; None never does.
        retention: KV kept between operators and queries; None keeps none.
        means: content-free measurements of earlier runs, added to.

    Raises:
        PlanError: a question that does not fit the model's context.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        pieces: Pieces,
        limits: Limits,
        calls: Sequence[AICall],
        feed: Feed,
        control: RunControl,
        sharing: SharingRule | None = None,
        retention: Retention | None = None,
        means: Means | None = None,
    ) -> None:
        self.sharing = sharing
        self.model, self.feed, self.control, self.limits = model, feed, control, limits
        self.stages = [compile_stage(call, pieces, tokenizer) for call in calls]
        for stage in self.stages:
            _check_question(stage, pieces, limits)
        self.encoder = DocumentEncoder(tokenizer, pieces, limits.context_tokens)
        self._num_label_tokens = len(pieces.prefix)
        self.scheduler = Scheduler(
            model.pages,
            token_budget=limits.token_budget,
            longest_suffix_tokens=max((stage.num_own_tokens for stage in self.stages), default=0),
            longest_frame_tokens=max((len(stage.frame) for stage in self.stages), default=0),
            pool=retention.pool if retention is not None else None,
            keeps_after_release=retention is not None,
            writes_for_pool=retention is not None and retention.writes_all,
        )
        self.stats = RunStats()
        self._overlong: dict[int, PrefixIds] = {}
        self.means: Means = {} if means is None else means
        self._held = HeldAnswers()
        self._watched: set[Stage] = set()
        self._failed: list[Request] = []
        self._partners: dict[int, PrefixIds] = {}
        self._last_cut = 0
        self._num_taken = self._num_taken_tokens = 0
        self._started = time.perf_counter()

    def run(self) -> None:
        """Answers until the feed is done.

        Raises:
            PlanError: the arena has no room to calibrate a question.
            RowError: a row that cannot be answered, unless errors become NULL.
            QueryCancelled: `control.cancelled()` said so.
        """
        in_flight: Pass | None = None
        try:
            self._measure_content_free()
            while not self.feed.done:
                self._stop_if_cancelled()
                self._refill()
                planned = self.scheduler.next_pass()
                if isinstance(planned, Failure):
                    self._fail(planned.request, planned.reason)
                elif planned is not None:
                    in_flight = planned
                    answers = self._forward(planned, self.stages)
                    self.scheduler.complete(planned)
                    in_flight = None
                    self._hand_over(planned.answered, answers)
                    self._report_progress()
                elif self._held and not self._failed:
                    self._hand_over_held()
                else:
                    assert self._failed, "the feed waits for answers although no question is left"
                self._hand_over_failures()
            self.scheduler.finish()
        finally:
            self.scheduler.abandon(in_flight)
        self.scheduler.ledger.check()

    def _stop_if_cancelled(self) -> None:
        if self.control.cancelled():
            raise QueryCancelled("the query was cancelled")

    # -- questions in
    # --------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Takes fresh questions until they fill a pass.

        Without sharing few more are taken, since a row limit may end the run at any answer; with sharing as
        many as one sharing plan covers.
        """
        shares = self.sharing is not None and not self.feed.row_limited
        wanted = SHARING_WINDOW_TOKENS if shares else self.limits.token_budget
        if self.scheduler.num_fresh_tokens >= self.limits.token_budget:
            return
        taken: list[Request] = []
        missing = wanted - self.scheduler.num_fresh_tokens
        while missing > 0 and (batches := self.feed.take(self._num_to_take(missing))):
            self._stop_if_cancelled()
            for asks in batches:
                requests = self._requests(asks)
                missing -= self._note_taken(requests)
                if shares:
                    taken += requests
                else:
                    self._submit(requests)
        self._submit(self._in_sharing_order(taken))

    def _note_taken(self, requests: list[Request]) -> int:
        """Tokens that fresh questions add: documents that are new, and what follows those that are not."""
        added, new = 0, set()
        for request in requests:
            document = request.document
            if document.table is None and not document.requests and document not in new:
                new.add(document)
                added += len(document.ids)
            else:
                added += request.num_own_tokens
        self._num_taken += len(requests)
        self._num_taken_tokens += added
        return added

    def _num_to_take(self, num_tokens: int) -> int:
        """Fresh questions that add about so many tokens."""
        if not self._num_taken:
            return FIRST_TAKE
        return max(1, math.ceil(num_tokens * self._num_taken / max(1, self._num_taken_tokens)))

    def _in_sharing_order(self, requests: list[Request]) -> list[Request]:
        """Plans sharing among the fresh documents of some requests, if it pays; parents come first."""
        if self.sharing is None:
            return requests
        of_document: dict[Document, list[Request]] = {}
        for request in requests:
            of_document.setdefault(request.document, []).append(request)
        fresh = [
            document
            for document in of_document
            if document.table is None and not document.requests and document.handle not in self._overlong
        ]
        if not fresh:
            return requests
        tree = PrefixTree.build([document.ids for document in fresh], self.scheduler.pages.page_tokens)
        kept = [document.keep or len(of_document[document]) > 1 for document in fresh]
        decision = self.sharing(tree, [len(document.ids) for document in fresh], kept)
        self.stats.sharing.append(decision)
        if not decision.shares:
            return requests
        first = in_tree_order(fresh, tree)
        return [r for d in dict.fromkeys([*first, *of_document]) for r in of_document[d]]

    def _requests(self, asks: Asks) -> list[Request]:
        """The requests of some questions; those whose prompts do not fit are failed."""
        self._add_documents(asks)
        stage = self.stages[asks.call]
        suffixes = self._suffixes(asks, stage)
        document_and_suffix_tokens = self.limits.context_tokens - stage.num_fixed_tokens + len(stage.tail)
        branches = stage.branches
        keys, follows = asks.keys.tolist(), asks.may_follow.tolist()
        self.stats.num_requests += len(keys)
        found = []
        for place, handle in enumerate(asks.documents.tolist()):
            document = self.scheduler.document(handle)
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
            )
            if self._fits(request, room):
                found.append(self._cut_for_frame(request, own_tokens))
        return found

    def _suffixes(self, asks: Asks, stage: Stage) -> list[Int32s]:
        """What stands behind each prefix: the stage's tail, behind a partner if there is one."""
        if asks.partners is None:
            return [stage.tail] * len(asks)
        handles = asks.partners.tolist()
        unknown = {handle: place for place, handle in enumerate(handles) if handle not in self._partners}
        if unknown:
            texts = asks.arguments[1 - stage.call.anchor].take(pa.array(unknown.values(), type=pa.int64()))
            self._partners.update(zip(unknown, self._tokenize(texts, partner=True), strict=True))
        found = [np.concatenate([self._partner_ids(handle, stage), stage.tail]) for handle in handles]
        while len(self._partners) > MOST_PARTNERS:
            self._partners.pop(next(iter(self._partners)))
        return found

    def _partner_ids(self, handle: int, stage: Stage) -> Int32s:
        """Ids of a partner; where documents may be cut, one that leaves no room for its anchor gets half."""
        ids = self._partners[handle].ids
        room = self.limits.context_tokens - stage.num_fixed_tokens - self._num_label_tokens
        if self.control.on_long != "truncate" or len(ids) < room:
            return ids
        self.stats.num_truncated += 1
        return ids[: room // 2]

    def _tokenize(self, texts: pa.Array, *, partner: bool = False) -> list[PrefixIds]:
        started = time.perf_counter()
        found = self.encoder.encode_partners(texts) if partner else self.encoder.encode(texts)
        self.stats.tokenize_seconds += time.perf_counter() - started
        return found

    def _cut_for_frame(self, request: Request, own_tokens: int) -> Request:
        """A frame stands right behind its document: a document cut for one request is a document of its
        own.
        """
        document = request.document
        if not len(request.frame) or own_tokens == len(document.ids):
            return request
        self._last_cut -= 1
        cut = Document(self._last_cut, document.ids[:own_tokens], name=document.name)
        self.scheduler.add(cut)
        return replace(request, document=cut)

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.submit(request)

    def _add_documents(self, asks: Asks) -> None:
        """Tokenizes the documents that the scheduler does not know."""
        first: dict[int, int] = {}
        for place, handle in enumerate(asks.documents.tolist()):
            if self.scheduler.document(handle) is None:
                first.setdefault(handle, place)
        if not first:
            return
        anchor = self.stages[asks.call].call.anchor
        texts = asks.arguments[anchor].take(pa.array(first.values(), type=pa.int64()))
        for (handle, place), prefix in zip(first.items(), self._tokenize(texts), strict=True):
            self.scheduler.add(Document(handle, prefix.ids, name=_row_name(asks, place)))
            if prefix.num_tokens >= self.limits.context_tokens:
                self._overlong[handle] = prefix
            self.stats.num_documents += 1

    def _fits(self, request: Request, room: int) -> bool:
        """Whether a prompt fits the context, perhaps truncated; if not, the request is failed."""
        document = request.document
        overlong = self._overlong.get(document.handle)
        num_tokens = len(document.ids) if overlong is None else overlong.num_tokens
        if num_tokens <= room:
            return True
        if self.control.on_long == "truncate":
            self.stats.num_truncated += 1
            return True
        exactly = "" if overlong is None or overlong.is_exact else "more than "
        num_question = len(request.frame) + request.num_own_tokens
        self._note_failure(
            request,
            f"its prompt of {exactly}{num_tokens + num_question} tokens ({exactly}{num_tokens} of document, "
            f"{num_question} of question) exceeds the model's context of {self.limits.context_tokens}",
            hint="run(on_long='truncate') cuts such documents, never questions, and counts them",
        )
        return False

    # -- answers out
    # ---------------------------------------------------------------------------------------------

    def _forward(
        self, planned: Pass, stages: Sequence[Stage], *, watches_mass: bool = True
    ) -> list[Float32s]:
        """Runs a pass; returns the answer logits of each request in it, as its stage reads them."""
        started = time.perf_counter()
        states = self.model.forward(planned.chunk)
        found: list[Float32s] = [np.zeros(0, dtype=np.float32)] * len(planned.answered)
        first_reads = np.array(planned.first_reads, dtype=np.int64)
        for index in {request.stage for request in planned.answered}:
            places = [place for place, request in enumerate(planned.answered) if request.stage == index]
            readout = stages[index].readout
            logits = [
                self.model.logits(states, first_reads[places] + node, vocab_ids)
                for node, vocab_ids in enumerate(readout.wanted)
            ]
            for place, answer in zip(places, readout.answers(logits), strict=True):
                found[place] = answer
            if watches_mass:
                self._watch_mass(stages[index], states, first_reads[places])
        self.stats.forward_seconds += time.perf_counter() - started
        return found

    def _watch_mass(self, stage: Stage, states: Any, read_rows: Int64s) -> None:
        """Looks once, at a few rows, whether a question's answers are what the model would say at all."""
        wanted = stage.readout.wanted[0]
        if stage in self._watched or not len(wanted):
            return
        self._watched.add(stage)
        mass = float(self.model.answer_mass(states, read_rows[:MASS_ROWS], wanted).mean())
        if mass < 0.5:
            self.stats.warnings.append(
                f"the answers of {stage.call.text} hold {_percent(mass)} of the probability, less than half: "
                "the model would rather say something else. They may be right all the same; `quail layouts` "
                "compares layouts and answer words on labelled rows"
            )

    def _hand_over(self, answered: Sequence[Request], answers: list[Float32s]) -> None:
        """Gives answers to the feed, a batch a call, and queues what follows from them."""
        by_call: dict[int, list[int]] = {}
        for place, request in enumerate(answered):
            by_call.setdefault(request.stage, []).append(place)
        for index, places in by_call.items():
            call = self.stages[index].call
            logits = np.stack([answers[place] for place in places])
            is_finite = np.isfinite(logits).all(axis=1)
            if not is_finite.all():
                for place in np.flatnonzero(~is_finite).tolist():
                    self._note_failure(answered[places[place]], "the model's logits are not finite")
                places = [places[place] for place in np.flatnonzero(is_finite).tolist()]
                logits = logits[is_finite]
            if not places:
                continue
            keys = np.array([answered[place].key for place in places], dtype=np.int64)
            if call.options.calibrate == "batch":
                self._held.add(index, keys, logits)
                continue
            if call.options.calibrate == "content":
                logits = calibrated(logits, self.means[stage_key(self.stages[index])])
            self._follow(self.feed.answered(index, keys, values_of(call, logits)))

    def _measure_content_free(self) -> None:
        """Measures questions on content-free documents, each once; the means are kept for later runs."""
        for stage in self.stages:
            if stage.call.options.calibrate != "content" or stage_key(stage) in self.means:
                continue
            texts = pa.array(CONTENT_FREE)
            partners = self.encoder.encode_partners(texts) if stage.is_join else []
            mean, num_tokens = content_mean(
                stage,
                [prefix.ids for prefix in self.encoder.encode(texts)],
                [partner.ids for partner in partners] or [stage.frame[:0]] * len(texts),
                pool=self.scheduler.pool,
                token_budget=self.limits.token_budget,
                forward=functools.partial(self._forward, stages=[stage], watches_mass=False),
            )
            self.means[stage_key(stage)] = mean
            self.stats.num_calibration_tokens += num_tokens

    def _hand_over_held(self) -> None:
        """No question is left that could run: the answers that waited for their mean are complete."""
        for index, keys, logits, mean in self._held.take():
            values = values_of(self.stages[index].call, calibrated(logits, mean))
            self._follow(self.feed.answered(index, keys, values))

    def _hand_over_failures(self) -> None:
        """Answers failed requests with NULL."""
        failed, self._failed = self._failed, []
        for request in failed:
            key = np.array([request.key], dtype=np.int64)
            null = values_of(self.stages[request.stage].call, None)
            self._follow(self.feed.answered(request.stage, key, null))

    def _follow(self, follow_up: FollowUp) -> None:
        for asks in follow_up.asks:
            self._submit(self._requests(asks))
        self.scheduler.release(follow_up.released.tolist())
        for handle in follow_up.released.tolist() if self._overlong else ():
            self._overlong.pop(handle, None)

    def _fail(self, request: Request, reason: str, hint: str | None = None) -> None:
        """Takes out a request that was not answered."""
        self.scheduler.fail(request)
        self._note_failure(request, reason, hint)

    def _note_failure(self, request: Request, reason: str, hint: str | None = None) -> None:
        """Raises, or notes the request for a NULL answer."""
        name = request.document.name
        if self.control.on_error == "raise":
            raise RowError(f"{name}: {reason}", hint=hint)
        self.stats.errors.append({"row": name, "reason": reason})
        self._failed.append(request)

    def _report_progress(self) -> None:
        if self.control.on_progress is not None:
            self.control.on_progress(
                {
                    "documents": self.scheduler.num_finished,
                    "num_documents": self.feed.num_documents,
                    "tokens": self.scheduler.ledger.computed,
                    "passes": self.scheduler.num_passes,
                    "seconds": time.perf_counter() - self._started,
                }
            )


def _check_question(stage: Stage, pieces: Pieces, limits: Limits) -> None:
    num_fixed, num_branch = stage.num_fixed_tokens, stage.num_own_tokens - len(stage.tail)
    if len(pieces.prefix) + num_fixed >= limits.context_tokens:
        raise PlanError(
            f"a question of {num_fixed} tokens leaves no room for a document in the model's context of "
            f"{limits.context_tokens} tokens: {stage.call.text}",
            hint="shorten the question; questions are never cut",
        )
    if num_branch >= limits.token_budget:
        raise PlanError(
            f"its {len(stage.call.categories)} labels take {num_branch} tokens in one pass, the token budget "
            f"is {limits.token_budget}: {stage.call.text}",
            hint=f"set token_budget to at least {num_branch + 1}, or shorten the labels",
        )


def _percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"


def _row_name(asks: Asks, place: int) -> str:
    return f"{asks.table or 'document'} row {int(asks.rows[place])}"
