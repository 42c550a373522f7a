"""The main loop: one run of a feed on a model, pass by pass."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from quail.arrays import of_texts
from quail.errors import QueryCancelled
from quail.execution.asks import Asks, Feed, FollowUp, RunControl
from quail.execution.audit import Audit
from quail.execution.calibration import CONTENT_FREE, Means, content_mean, stage_key
from quail.execution.delivery import Delivery
from quail.execution.error_log import NO_ROOM, NOT_FINITE
from quail.execution.failures import GO_ON, Failures
from quail.execution.in_flight import Collected, PassesInFlight, run_alone
from quail.execution.intake import Intake, check_question
from quail.execution.packing import Pass
from quail.execution.reads import Model
from quail.execution.recall import Known, Memory, Recall
from quail.execution.requests import Document, Failure, Request, in_tree_order
from quail.execution.scheduler import Scheduler
from quail.execution.shrinking import is_out_of_memory, smaller_budget
from quail.execution.stages import Float32s, Pieces, Stage, compile_stage
from quail.kv.prefix_sharing import PrefixTree
from quail.kv.retention import RetentionPool
from quail.models.tokenizer import Tokenizer
from quail.plan.logical import AICall
from quail.planner.prefix_sharing import SharingDecision

SharingRule = Callable[[PrefixTree, Sequence[int], Sequence[bool]], SharingDecision]

SHARING_WINDOW_TOKENS = 2**24
"""Tokens of documents that one sharing plan covers; a larger table is planned in several windows."""

FIRST_TAKE = 16
"""Fresh questions first taken from the feed; twice as many each time, as long as the length of its documents
is not known because every answer was."""


@dataclass(frozen=True)
class Limits:
    """What a run must stay within.

    Attributes:
        token_budget: most rows a pass.
        context_tokens: longest prompt of the model.
        passes_in_flight: passes that are started before the first of them is waited for.
    """

    token_budget: int
    context_tokens: int
    passes_in_flight: int = 1


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
    """What happened in a run, beside the ledger.

    Attributes:
        forward_seconds: that the host spent starting passes and waiting for them, audits left out.
        num_calibration_tokens: computed to measure questions without content.
        warnings: for the report.
        sharing: what was decided of each set of fresh documents.
        audit: the report of one.
    """

    forward_seconds: float = 0.0
    num_calibration_tokens: int = 0
    warnings: list[str] = field(default_factory=list)
    sharing: list[SharingDecision] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)


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
        memory: answers of earlier runs, added to; None keeps none.

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
        memory: Memory | None = None,
        dtype: str = "float32",
    ) -> None:
        self.sharing = sharing
        self.model, self.feed, self.control, self.limits = model, feed, control, limits
        self.stages = [compile_stage(call, pieces, tokenizer) for call in calls]
        for stage in self.stages:
            check_question(
                stage, pieces, context_tokens=limits.context_tokens, token_budget=limits.token_budget
            )
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
        self.failures = Failures(self.stages, control.on_error, control.max_error_ratio)
        self.intake = Intake(
            self.stages,
            self.scheduler,
            tokenizer,
            pieces,
            context_tokens=limits.context_tokens,
            truncates=control.on_long == "truncate",
            failures=self.failures,
        )
        self.recall = Recall(
            self.stages,
            pieces,
            memory,
            context_tokens=limits.context_tokens,
            truncates=control.on_long == "truncate",
        )
        self.means: Means = {} if means is None else means
        self._delivery = Delivery(self.stages, feed, self.means)
        self._in_flight = PassesInFlight(model, self.stages, limits.passes_in_flight)
        self._known: deque[FollowUp] = deque()
        self._least_budget = 1 + max((_num_branch_tokens(stage) for stage in self.stages), default=0)
        self._audit = self._new_audit(control.audit, dtype) if control.audit else None
        self._num_taken = self._num_taken_tokens = 0
        self._first_take = FIRST_TAKE
        self._started = time.perf_counter()

    def run(self) -> None:
        """Answers until the feed is done.

        Raises:
            PlanError: the arena has no room to calibrate a question.
            PlanError: memory is short for the smallest passes too.
            RowError: a row that cannot be answered, unless errors become NULL.
            TooManyErrors: more failed than the run may.
            QueryCancelled: `control.cancelled()` said so.
        """
        try:
            self._measure_content_free()
            while not self.feed.done:
                self._stop_if_cancelled()
                took_any = self._refill()
                planned = self.scheduler.next_pass()
                if isinstance(planned, Failure):
                    self._fail(planned.request, planned.reason)
                elif planned is not None or self._in_flight:
                    collected = self._advance(planned)
                    if collected is not None:
                        self._take(collected)
                elif self._delivery.holds_answers and not self.failures:
                    for follow_up in self._delivery.deliver_held():
                        self._follow(follow_up)
                elif not took_any and not self.feed.done:
                    assert self.failures, "the feed waits for answers although no question is left"
                self._hand_over_failures()
                num_expected = 0 if self.feed.done else self.feed.num_documents or 1
                self.failures.check_ratio(self.recall.counts.asked, num_expected)
            if self._audit is not None:
                self._in_flight.wait()
            self._in_flight.drop()
            self.scheduler.finish()
            self._finish_audit()
        finally:
            self._in_flight.drop()
            self.scheduler.abandon()
            self.recall.close()
        self.scheduler.ledger.check()

    def _stop_if_cancelled(self) -> None:
        if self.control.cancelled():
            raise QueryCancelled("the query was cancelled")

    # -- questions in
    # --------------------------------------------------------------------------------------------

    def _refill(self) -> bool:
        """Takes fresh questions until they fill a pass; returns whether there were any.

        Without sharing few more are taken, since a row limit may end the run at any answer; with sharing as
        many as one sharing plan covers. Where the feed has none until others are answered, and all of those
        are known already, what follows from them may be more.
        """
        shares = self.sharing is not None and not self.feed.row_limited
        wanted = SHARING_WINDOW_TOKENS if shares else self.scheduler.token_budget
        if self.scheduler.num_fresh_tokens >= self.scheduler.token_budget:
            return False
        num_batches = 0
        taken: list[Request] = []
        missing = wanted - self.scheduler.num_fresh_tokens
        while missing > 0 and (batches := self.feed.take(self._num_to_take(missing))):
            self._stop_if_cancelled()
            num_batches += len(batches)
            for asks in batches:
                requests = self._requests(asks)
                missing -= self._note_taken(requests)
                if shares:
                    taken += requests
                else:
                    self._submit(requests)
        self._submit(self._in_sharing_order(taken))
        self._follow(FollowUp())
        return num_batches > 0

    def _requests(self, asks: Asks) -> list[Request]:
        """Requests of questions that the model must answer; known answers are handed over at once.

        What follows from them waits until the requests are submitted, as it may release their documents.
        """
        rest, known = self.recall.sort(asks)
        if known is not None:
            self._known.append(self._delivery.deliver(asks.call, known.keys, known.logits))
        return self.intake.requests(rest) if len(rest) else []

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
            self._first_take *= 2
            return self._first_take // 2
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
            if document.table is None and not document.requests and not self.intake.is_overlong(document)
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

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.submit(request)

    # -- answers out
    # ---------------------------------------------------------------------------------------------

    def _advance(self, planned: Pass | None) -> Collected | None:
        """Starts a pass, if there is one, and waits for the oldest in flight.

        Returns:
            The oldest; None where another is started first, or where memory was short and what waits begins
            anew in smaller passes.
        """
        try:
            if planned is not None:
                self._in_flight.start(planned)
            return self._in_flight.collect() if planned is None or self._in_flight.is_full else None
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            num_rows = self._in_flight.most_rows
            budget = smaller_budget(error, num_rows=num_rows, least_tokens=self._least_budget)
        self.stats.warnings.append(
            f"passes of up to {num_rows:,} tokens did not fit into memory; "
            f"the run went on with {budget:,} a pass"
        )
        self._in_flight.drop()
        self.scheduler.start_over(budget)
        return None

    def _take(self, collected: Collected) -> None:
        """Books a pass that ran, and hands over its answers."""
        answered, answers = collected.planned.answered, collected.answers
        self.stats.forward_seconds += collected.seconds
        self.scheduler.complete()
        for stage, mass in collected.masses:
            self._warn_of_mass(stage, mass)
        if self._audit is not None:
            self._audit.check(answered, answers)
        self._hand_over(answered, answers)
        self._report_progress()

    def _warn_of_mass(self, stage: Stage, mass: float) -> None:
        """Says so where a question's answers are not what the model would say."""
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
            logits = np.stack([answers[place] for place in places])
            is_finite = np.isfinite(logits).all(axis=1)
            if not is_finite.all():
                for place in np.flatnonzero(~is_finite).tolist():
                    self.failures.note(
                        answered[places[place]], NOT_FINITE, "the model's logits are not finite"
                    )
                places = [places[place] for place in np.flatnonzero(is_finite).tolist()]
                logits = logits[is_finite]
            if places:
                keys = np.array([answered[place].key for place in places], dtype=np.int64)
                twins = self.recall.answered(index, keys, logits)
                for call, known in [(index, Known(keys, logits)), *twins]:
                    self._follow(self._delivery.deliver(call, known.keys, known.logits))

    def _measure_content_free(self) -> None:
        """Measures questions on content-free documents, each once; the means are kept for later runs."""
        for stage in self.stages:
            if stage.call.options.calibrate != "content" or stage_key(stage) in self.means:
                continue
            started, texts = time.perf_counter(), of_texts(CONTENT_FREE)
            partners = self.intake.encoder.encode_partners(texts) if stage.is_join else []
            mean, num_tokens = content_mean(
                stage,
                [prefix.ids for prefix in self.intake.encoder.encode(texts)],
                [partner.ids for partner in partners] or [stage.frame[:0]] * len(texts),
                pool=self.scheduler.pool,
                token_budget=self.scheduler.token_budget,
                forward=functools.partial(run_alone, self.model, stages=[stage]),
            )
            self.stats.forward_seconds += time.perf_counter() - started
            self.means[stage_key(stage)] = mean
            self.stats.num_calibration_tokens += num_tokens

    def _new_audit(self, share: float, dtype: str) -> Audit:
        forward = functools.partial(run_alone, self.model)
        return Audit(
            share,
            self.stages,
            scheduler=self.scheduler,
            dtype=dtype,
            forward=forward,
            wait=self._in_flight.wait,
        )

    def _finish_audit(self) -> None:
        if self._audit is None:
            return
        self._audit.finish()
        self.stats.audit = asdict(self._audit.report)
        if self._audit.warning is not None:
            self.stats.warnings.append(self._audit.warning)

    def _hand_over_failures(self) -> None:
        """Answers failed requests with NULL."""
        for request in self.failures.take():
            twins = self.recall.failed(request.stage, request.key)
            for call, key in [(request.stage, request.key), *twins]:
                self._follow(self._delivery.deliver_null(call, key))

    def _follow(self, follow_up: FollowUp) -> None:
        """Submits and releases what follows from answers, and from known answers to questions among it."""
        self._known.append(follow_up)
        while self._known:
            next_up = self._known.popleft()
            for asks in next_up.asks:
                self._submit(self._requests(asks))
            self.scheduler.release(next_up.released.tolist())

    def _fail(self, request: Request, reason: str) -> None:
        """Takes out a request that can never run."""
        self.scheduler.fail(request)
        self.failures.note(
            request, NO_ROOM, reason, hint="give KV more memory: EngineConfig(kv_memory=…); or " + GO_ON
        )

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


def _num_branch_tokens(stage: Stage) -> int:
    """Tokens of a question that run in one pass with it, however small passes are."""
    return stage.num_own_tokens - len(stage.tail)


def _percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"
