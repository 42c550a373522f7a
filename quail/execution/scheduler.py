"""Which documents run in which pass, and what happens to their KV.

Documents pass through stages. A request is one suffix (a question) behind a document's prefix; its answer is
read at the last row. Each pass is filled with requests of documents that already hold KV, then with fresh
documents, up to the token budget and the free pages:

    submit -> [fresh] -> admit (pages) -> pass ... pass -> answered -> [idle] -> submit again, or release

Several passes may be in flight: planned, not yet completed. They run in the order in which they were planned,
so a later one reads what an earlier one writes, and pages that were given up may be planned anew at once. But
KV that is still to be written is nobody's to keep: it goes to the pool only once its passes are completed.

Nothing here knows tensors, SQL or what an answer means.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np

from quail.cost.work import Work, stacked_rows
from quail.execution.ledger import TokenLedger
from quail.execution.packing import Packing, Pass
from quail.execution.requests import NO_FRAME, Document, Failure, Int32s, Request
from quail.kv.pages import PageArena, PageTable, pages_for
from quail.kv.prefix_sharing import Lending
from quail.kv.retention import SCHEDULED, UNSCHEDULED, RetentionPool

MOST_SKIPPED = 256
"""Fresh documents looked at beyond those that must wait, a pass."""


class _Admission(enum.Enum):
    """What came of admitting a document."""

    ADMITTED = enum.auto()
    WAITS = enum.auto()
    """For room in a pass, or for its parent; those behind it may go first."""
    LACKS_PAGES = enum.auto()
    """Those behind it wait too."""


class Scheduler:
    """Packs passes.

    Args:
        pages: the arena's accounting.
        token_budget: most rows a pass.
        longest_suffix_tokens: of all questions of the run; a suffix longer than the budget is run in pieces,
            its KV behind the document's in the same table, and room for it is reserved when the document is
            admitted. (A partner that is longer sends its anchor back to be admitted with more room.)
        longest_frame_tokens: of all stages of the run; reserved likewise.
        pool: retained KV; None retains nothing.
        keeps_after_release: whether KV that was written goes to the pool when nothing of this run reads it.
        writes_for_pool: whether the KV of documents with a single question is written too, for the pool.

    Attributes:
        ledgers: of each stage, by its index.
        works: what the passes of each stage that ran computed, by its index.
        repeated: the part of all of it that had been computed before and was lost.
    """

    def __init__(
        self,
        pages: PageArena,
        *,
        token_budget: int,
        longest_suffix_tokens: int,
        longest_frame_tokens: int = 0,
        pool: RetentionPool | None = None,
        keeps_after_release: bool = False,
        writes_for_pool: bool = False,
    ) -> None:
        assert token_budget > 0
        self.pages = pages
        self.longest_frame_tokens = longest_frame_tokens
        self.pool = pool if pool is not None else RetentionPool(pages, 0)
        self.keeps_after_release = keeps_after_release
        self.writes_for_pool = writes_for_pool
        self._idle: list[Document] = []
        self.token_budget = token_budget
        self._longest_suffix_tokens = longest_suffix_tokens
        self.ledgers: defaultdict[int, TokenLedger] = defaultdict(TokenLedger)
        self.works: defaultdict[int, Work] = defaultdict(Work)
        self.repeated = Work()
        self.num_passes = 0
        self.num_finished = 0
        self.num_fresh_tokens = 0
        self._num_completed = 0
        self._packed_pass = 1
        self._in_flight: deque[Pass] = deque()
        self._documents: dict[int, Document] = {}
        self._ready: deque[Document] = deque()
        self._fresh: deque[Document] = deque()
        self._lending = Lending(pages)

    @property
    def spanning_tokens(self) -> int:
        """Tokens of the longest question of the run that must be written because it does not fit one pass."""
        return self._spanning(self._longest_suffix_tokens)

    @property
    def ledger(self) -> TokenLedger:
        """The ledger of all stages."""
        return TokenLedger.total(self.ledgers.values())

    # -- what comes in
    # -------------------------------------------------------------------------------------------

    def document(self, handle: int) -> Document | None:
        """The document of a handle, while it is known here."""
        return self._documents.get(handle)

    def add(self, document: Document) -> None:
        """Makes a document known; it waits for its first request."""
        assert document.handle not in self._documents, f"document {document.handle} is known already"
        self._documents[document.handle] = document

    def submit(self, request: Request) -> None:
        """Queues a request: at once ready if its document holds KV, else with the fresh ones."""
        document = request.document
        assert document.handle in self._documents, f"document {document.handle} is not known"
        assert 0 <= request.prefix_tokens <= len(document.ids) + len(request.frame)
        assert len(request.suffix)
        if not document.requests:
            if document.table is None:
                self._fresh.append(document)
                self.num_fresh_tokens += len(document.ids)
            else:
                self._ready.append(document)
        document.requests.append(request)

    def release(self, handles: Iterable[int]) -> None:
        """Forgets documents that nothing will read again. A document with waiting requests, or in a pass,
        stays until they ran.
        """
        for handle in handles:
            document = self._documents.get(handle)
            if document is not None:
                document.keep = False
                if not document.requests and not self._is_in_flight(document):
                    self._retire(document)

    # -- passes
    # --------------------------------------------------------------------------------------------------

    def next_pass(self) -> Pass | Failure | None:
        """Packs the next pass.

        Returns:
            A pass, in flight from now on; a failure when the request at the head can never run; None when
            nothing waits, or what waits needs a pass in flight to be completed first.
        """
        self._park_idle()
        self._packed_pass = self._num_completed + len(self._in_flight) + 1
        packing = Packing(self.token_budget)
        self._pack_ready(packing)
        short = self._pack_fresh(packing)
        if packing.num_rows:
            self.num_passes += 1
            self._in_flight.append(packing.finish())
            return self._in_flight[-1]
        if self._in_flight:
            return None
        if short is not None:
            return self._unblock(short)
        assert not self._ready and not self._fresh, "documents wait for nothing"
        return None

    def complete(self) -> None:
        """Books the oldest pass in flight, which ran; documents that nothing needs any more are forgotten."""
        done = self._in_flight.popleft()
        self._num_completed += 1
        for request in done.answered:
            prefix, suffix = request.prefix_tokens, request.num_own_tokens
            ledger = self.ledgers[request.stage]
            ledger.naive += prefix + suffix
            ledger.computed += request.prefix_computed + suffix
            ledger.reused_retained += request.reused_retained
            ledger.reused_prefix += request.reused_borrowed
            reused = prefix - request.prefix_computed
            ledger.reused_rewind += reused - request.reused_borrowed - request.reused_retained
            ledger.recomputed += request.recomputed
        for stage, work in done.works.items():
            self.works[stage] += work
        self.repeated += done.repeated
        for document, num_tokens in done.reached.items():
            document.surely_computed = max(document.surely_computed, num_tokens)
        for document in {request.document for request in done.answered}:
            if document.requests or self._is_in_flight(document):
                continue
            if document.keep:
                self._idle.append(document)
            else:
                self._retire(document)

    def finish(self) -> None:
        """The run ended well: what it still held is retained or let go. Passes in flight are wasted."""
        self._drop_passes()
        self._drop_requests()
        for document in list(self._documents.values()):
            if self._is_in_flight(document):
                self._drop_kv(document)
            self._retire(document)

    def fail(self, request: Request) -> None:
        """Takes out a request that will not be answered; what was run for it is wasted."""
        document = request.document
        self.ledgers[request.stage].wasted += request.prefix_computed + request.suffix_done
        if request in document.requests:
            document.requests.remove(request)
        if document.table is not None and document.table.num_tokens > document.computed:
            document.table.rewind(document.computed)
        if not document.requests:
            if document in self._fresh:
                self._fresh.remove(document)
                self.num_fresh_tokens -= len(document.ids)
            if document in self._ready:
                self._ready.remove(document)
            self._forget(document)

    def start_over(self, token_budget: int) -> None:
        """The passes in flight did not run: what waits begins anew, with at most `token_budget` rows a pass.

        They were to write KV that others may have borrowed already, so all KV of documents in work is
        dropped. What was run for waiting requests is wasted.
        """
        self.token_budget = token_budget
        lost = [request for planned in self._in_flight for request in planned.answered]
        self.num_passes -= len(self._in_flight)
        self._in_flight.clear()
        for request in reversed(lost):
            self.ledgers[request.stage].wasted += request.num_own_tokens - request.suffix_done
            request.document.requests.appendleft(request)
        lost_documents = [request.document for request in lost]
        waiting = list(dict.fromkeys([*lost_documents, *self._ready, *self._fresh]))
        for document in waiting:
            for request in document.requests:
                self.ledgers[request.stage].wasted += request.prefix_computed + request.suffix_done
                request.prefix_computed = request.recomputed = request.suffix_done = 0
            self._leave_parent(document)
            self._drop_kv(document)
            document.borrowed_tokens = document.retained_tokens = document.last_pass = 0
            document.ever_computed = document.surely_computed
        self._ready.clear()
        self._fresh = deque(waiting)
        self.num_fresh_tokens = sum(len(document.ids) for document in waiting)

    def abandon(self) -> None:
        """Drops everything: after an error, an interruption, or an early end. Only the pool keeps pages.

        The rows of passes in flight are wasted.
        """
        self._drop_passes()
        self._drop_requests()
        for document in list(self._documents.values()):
            self._forget(document)

    # -- packing
    # -------------------------------------------------------------------------------------------------

    def _pack_ready(self, packing: Packing) -> None:
        """Packs documents that hold KV; those for which no room is left keep their turn."""
        waiting: list[Document] = []
        while self._ready and packing.room:
            document = self._ready.popleft()
            self._place_requests(packing, document)
            if document.requests and document.table is not None:
                waiting.append(document)
            elif document.requests:
                self._fresh.append(document)
                self.num_fresh_tokens += len(document.ids)
        self._ready.extendleft(reversed(waiting))

    def _pack_fresh(self, packing: Packing) -> Document | None:
        """Admits documents in order; returns the one that lacks pages, which holds back those behind it."""
        waiting: list[Document] = []
        short: Document | None = None
        while self._fresh and packing.room and short is None and len(waiting) < MOST_SKIPPED:
            document = self._fresh.popleft()
            self.num_fresh_tokens -= len(document.ids)
            admission = self._admit(document, packing.room)
            if admission is _Admission.ADMITTED:
                self._place_requests(packing, document)
            if document.requests and document.table is not None:
                self._ready.append(document)
            elif document.requests:
                waiting.append(document)
            if admission is _Admission.LACKS_PAGES:
                short = document
        self._fresh.extendleft(reversed(waiting))
        self.num_fresh_tokens += sum(len(document.ids) for document in waiting)
        return short

    def _place_requests(self, packing: Packing, document: Document) -> None:
        """Puts as many of a document's requests into the pass as fit.

        A suffix that spans passes is written behind the prefix, where another request of the same pass might
        read: it is the first and the last of its document in a pass. Another frame is written over the one
        before: its first request is the first of its document in a pass.
        """
        is_first = True
        while document.requests:
            request = document.requests[0]
            spans = request.num_own_tokens > self.token_budget
            if is_first and document.table is not None and self._outgrows(document.table, request):
                if not self._is_in_flight(document):
                    self._park(document, SCHEDULED)
                return
            reframes = len(request.frame) > 0 and request.frame is not document.frame
            if ((spans or reframes) and not is_first) or not self._place(packing, document, request):
                return
            packing.read(document.requests.popleft())
            self._book_reuse(document, request)
            if spans:
                return
            is_first = False

    def _book_reuse(self, document: Document, request: Request) -> None:
        """Notes where the prefix of a request in a pass came from; a suffix that was written is dropped."""
        reused = request.prefix_tokens - request.prefix_computed
        request.reused_borrowed = min(document.borrowed_tokens, reused)
        held = self._held_tokens(document, request)
        request.reused_retained = min(held, reused - request.reused_borrowed)
        document.retained_tokens = document.borrowed_tokens = 0
        document.operator = request.operator
        if document.table is not None and request.suffix_done:
            document.table.rewind(request.prefix_tokens)

    def _held_tokens(self, document: Document, request: Request) -> int:
        """Tokens of a document that another operator or query left to a request.

        What an operator kept while it waited for answers is its own, in the pool or not: which documents
        wait, and how long, depends on the passes.
        """
        if document.operator is None or request.operator is None or not self.keeps_after_release:
            return document.retained_tokens
        return 0 if document.operator == request.operator else len(document.ids)

    def _is_in_flight(self, document: Document) -> bool:
        """Whether a pass that is planned and not completed has rows of a document."""
        return document.last_pass > self._num_completed

    def _spanning(self, num_suffix_tokens: int) -> int:
        """Tokens of a suffix that must be written because it does not fit one pass."""
        return num_suffix_tokens if num_suffix_tokens > self.token_budget else 0

    def _outgrows(self, table: PageTable, request: Request) -> bool:
        spanning = self._spanning(request.num_own_tokens)
        return spanning > 0 and table.capacity_tokens < request.prefix_tokens + spanning

    def _admit(self, document: Document, room: int) -> _Admission:
        """Opens a table if the document needs one. Without need, no KV is written."""
        if self._waits_for_parent(document):
            return _Admission.WAITS
        if room < self._rows_to_first_answer(document) <= self.token_budget:
            return _Admission.WAITS
        capacity_tokens = self._capacity_tokens(document)
        if not capacity_tokens:
            return _Admission.ADMITTED
        if not self._resume(document, capacity_tokens) and not self._open(document, capacity_tokens):
            return _Admission.LACKS_PAGES
        table = document.table
        assert table is not None
        document.ever_computed = max(document.ever_computed, document.computed)
        if document.num_children:
            self._lending.lend(document.handle, table, document.lent_tokens, document.num_children)
            document.num_children = 0
        self._leave_parent(document)
        return _Admission.ADMITTED

    def _resume(self, document: Document, capacity_tokens: int) -> bool:
        """Takes the document's KV from the pool, if it is there and can grow as needed."""
        table = self.pool.take(document.ids)
        if table is None:
            return False
        document.table = table  # whatever happens from here on, the document answers for its pages
        missing = pages_for(capacity_tokens, self.pages.page_tokens) - len(table.pages)
        if not self.pool.make_room(missing) or not self.pages.extend(table, capacity_tokens):
            self._drop_kv(document)
            return False
        document.computed = document.retained_tokens = document.surely_computed = len(document.ids)
        return True

    def _open(self, document: Document, capacity_tokens: int) -> bool:
        """Opens a table behind the pages that the document borrows."""
        borrowed = self._lending.pages_for_child(document.parent, document.shared_tokens)
        missing = pages_for(capacity_tokens, self.pages.page_tokens) - len(borrowed)
        if not self.pool.make_room(missing):
            return False
        document.table = self.pages.open(document.name or document.handle, capacity_tokens, borrowed)
        if document.table is None:
            return False
        document.computed = document.borrowed_tokens = document.shared_tokens
        return True

    def _rows_to_first_answer(self, document: Document) -> int:
        request = document.requests[0]
        there = len(document.ids) if document.ids in self.pool else document.shared_tokens
        return max(0, request.prefix_tokens - there) + request.num_own_tokens

    def _is_kept(self, document: Document) -> bool:
        """Whether all of a document's KV is written."""
        return document.keep or self.writes_for_pool or len(document.requests) > 1

    def _waits_for_parent(self, document: Document) -> bool:
        """Whether the pages to borrow are still to come. A parent that will not have them is given up."""
        if document.parent is None or self._lending.covers(document.parent, document.shared_tokens):
            return False
        parent = self._documents.get(document.parent)
        if parent is not None and parent.requests:
            return True
        self._leave_parent(document)
        return False

    def _leave_parent(self, document: Document) -> None:
        """The document has borrowed, or computes its prefix itself."""
        if document.parent is not None and not self._lending.child_left(document.parent):
            parent = self._documents.get(document.parent)
            if parent is not None:
                parent.num_children -= 1
        document.parent, document.shared_tokens = None, 0

    def _capacity_tokens(self, document: Document) -> int:
        """Tokens whose KV the document's table must hold; 0 if it needs none.

        All of them if a later request reads it or it spans passes, else what it lends.
        """
        spans_passes = self._rows_to_first_answer(document) > self.token_budget
        if self._is_kept(document) or spans_passes or document.ids in self.pool:
            spanning = self._spanning(max(waiting.num_own_tokens for waiting in document.requests))
            return len(document.ids) + self.longest_frame_tokens + max(spanning, self.spanning_tokens)
        return max(document.lent_tokens if document.num_children else 0, document.shared_tokens)

    def _place(self, packing: Packing, document: Document, request: Request) -> bool:
        """Puts a request into the pass; True if its answer will be read in it."""
        num_rows_before = packing.num_rows
        is_read = self._place_rows(packing, document, request)
        if packing.num_rows > num_rows_before:
            document.last_pass = self._packed_pass
            packing.reached[document] = document.ever_computed
        return is_read

    def _place_rows(self, packing: Packing, document: Document, request: Request) -> bool:
        table = document.table
        if len(request.frame) and request.frame is not document.frame:
            self._set_frame(document, request.frame)
        start = min(document.computed, request.prefix_tokens)
        missing = request.prefix_tokens - start
        suffix = request.suffix[request.suffix_done :]
        num_own = request.num_own_tokens - request.suffix_done
        if not missing and num_own <= packing.room:
            packing.add(request.stage, suffix, start + request.suffix_done, table, writes=0)
            return True
        if missing + num_own <= packing.room:
            writes = self._run_prefix(packing, document, request, missing)
            ids = np.concatenate([document.prefix(start, start + missing), suffix])
            packing.add(request.stage, ids, start + request.suffix_done, table, writes=writes)
            return True
        if missing + num_own <= self.token_budget or table is None or not packing.room:
            return False
        num_rows = min(packing.room, missing)
        if num_rows:
            writes = self._run_prefix(packing, document, request, num_rows)
            ids = document.prefix(start, start + num_rows)
            packing.add(request.stage, ids, start, table, writes=writes)
        if missing == num_rows and num_own > self.token_budget and packing.room:
            num_rows = min(packing.room, len(suffix) - 1)
            if not request.suffix_done:
                self._make_last(document, request.prefix_tokens)
            position = request.prefix_tokens + request.suffix_done
            packing.add(request.stage, suffix[:num_rows], position, table, writes=num_rows)
            request.suffix_done += num_rows
        return False

    def _run_prefix(self, packing: Packing, document: Document, request: Request, num_rows: int) -> int:
        """Books prefix rows that go into the pass; returns how many of them are written to pages."""
        start, stop = document.computed, document.computed + num_rows
        request.prefix_computed += num_rows
        again = max(0, min(stop, document.ever_computed) - start)
        if again:
            request.recomputed += again
            packing.repeated += stacked_rows(again, behind=start)
        document.ever_computed = max(document.ever_computed, min(stop, len(document.ids)))
        if document.table is None or not num_rows:
            return 0
        written = max(start, min(stop, document.table.capacity_tokens))
        document.computed = written
        self._lending.computed(document.handle, written)
        return written - start

    def _set_frame(self, document: Document, frame: Int32s) -> None:
        """Puts another frame behind the document; the KV of the one before is dropped."""
        if document.computed > len(document.ids):
            self._make_last(document, len(document.ids))
        document.frame = frame

    def _make_last(self, document: Document, num_tokens: int) -> None:
        """Drops KV behind `num_tokens`, so that a spanning suffix stands right behind them."""
        assert document.table is not None
        document.table.rewind(num_tokens)
        document.computed = num_tokens

    # -- pages
    # ---------------------------------------------------------------------------------------------------

    def _unblock(self, short: Document) -> Pass | Failure | None:
        """Nothing ran although a document waits for pages.

        Retained KV is given up already. Gives up pages that wait for children (they compute their prefix
        again), else the document that waits.
        """
        needed = pages_for(self._capacity_tokens(short), self.pages.page_tokens)
        if needed <= self.pages.num_pages:
            while (lender := self._lending.largest_beside(short.parent)) is not None:
                self._call_back(lender)
                if self._enough(short):
                    return self.next_pass()
        return Failure(
            short.requests[0],
            f"its {len(short.ids)} tokens need {needed} KV pages of {self.pages.page_tokens} tokens, "
            f"the arena has {self.pages.num_pages} ({self.pages.num_free_pages} free)",
        )

    def _enough(self, document: Document) -> bool:
        needed = self._capacity_tokens(document) - document.shared_tokens
        return pages_for(needed, self.pages.page_tokens) <= self.pages.num_free_pages

    def _call_back(self, lender: int) -> None:
        """Children that have not borrowed yet will compute their prefix themselves."""
        for document in self._fresh:
            if document.parent == lender:
                if self._lending.covers(lender, document.shared_tokens):
                    document.ever_computed = max(document.ever_computed, document.shared_tokens)
                self._leave_parent(document)

    def _park_idle(self) -> None:
        """Hands the KV of documents that no request waits for to the pool: a later operator will read it."""
        for document in self._idle:
            if not document.requests and document.handle in self._documents:
                self._park(document, SCHEDULED)
        self._idle.clear()

    def _park(self, document: Document, probability: float) -> None:
        """Moves a document's KV to the pool if all of it is there, else drops it."""
        table = document.table
        if table is not None and table.num_tokens >= len(document.ids):
            table.rewind(len(document.ids))
            self.pool.put(document.ids, table, probability)
            document.table = None
        self._drop_kv(document)

    def _retire(self, document: Document) -> None:
        """Forgets a document that nothing of this run reads again; its KV may serve a later query."""
        if self.keeps_after_release:
            self._park(document, UNSCHEDULED)
            self.pool.expect(document.ids, UNSCHEDULED)
        else:
            self.pool.discard(document.ids)
        self._forget(document)

    def _drop_passes(self) -> None:
        """Takes back the passes in flight; their rows are wasted."""
        for request in (request for planned in self._in_flight for request in planned.answered):
            self.ledgers[request.stage].wasted += request.prefix_computed + request.num_own_tokens
        self._in_flight.clear()

    def _drop_requests(self) -> None:
        """Takes all waiting requests out; what was run for them is wasted."""
        for document in self._documents.values():
            for request in document.requests:
                self.ledgers[request.stage].wasted += request.prefix_computed + request.suffix_done
            document.requests.clear()
        self._ready.clear()
        self._fresh.clear()
        self.num_fresh_tokens = 0

    def _drop_kv(self, document: Document) -> None:
        if document.table is not None:
            self.pages.close(document.table)
        document.table, document.computed, document.frame = None, 0, NO_FRAME

    def _forget(self, document: Document) -> None:
        self._leave_parent(document)
        self._drop_kv(document)
        del self._documents[document.handle]
        self.num_finished += 1
