"""Which documents run in which pass, and what happens to their KV.

Documents pass through stages. A request is one suffix (a question) behind a document's prefix; its answer is
read at the last row. Each pass is filled with requests of documents that already hold KV, then with fresh
documents, up to the token budget and the free pages:

    submit -> [fresh] -> admit (pages) -> pass ... pass -> answered -> [idle] -> submit again, or release

Nothing here knows tensors, SQL or what an answer means.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quail.execution.chunk import BlockTable, Chunk, Segments
from quail.execution.ledger import TokenLedger
from quail.kv.pages import PageArena, PageTable, pages_for
from quail.kv.prefix_sharing import Lending, PrefixTree

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


MOST_SKIPPED = 256
"""Fresh documents looked at beyond those that must wait, a pass."""


@dataclass(eq=False)
class Request:
    """One suffix to run behind the first `prefix_tokens` tokens of a document.

    Attributes:
        document: whose prefix it reads.
        stage: index of the stage it belongs to.
        key: the caller's name for it.
        suffix: its ids; at least one.
        prefix_tokens: prefix tokens it reads; fewer than the document has where the context is too short for
            both.
        suffix_done: suffix tokens already run, where the suffix spans passes.
        prefix_computed: prefix rows that were run on its behalf.
        recomputed: those of them that had been run before and were lost.
    """

    document: Document
    stage: int
    key: int
    suffix: Int32s
    prefix_tokens: int
    suffix_done: int = 0
    prefix_computed: int = 0
    recomputed: int = 0


@dataclass(eq=False)
class Document:
    """A document in the scheduler.

    Attributes:
        handle: the caller's name for it.
        ids: prefix ids: everything that stands before any question.
        keep: whether its KV is worth writing: a later request may read it.
        name: how to call it in messages.
        parent: handle of the document whose first pages it borrows.
        shared_tokens: tokens it borrows, whole pages.
        lent_tokens: most tokens that a child borrows from it, whole pages.
        num_children: documents that borrow from it.
        table: its pages; None while it holds none.
        computed: prefix tokens whose KV is in the table (those of the pass being packed included).
        ever_computed: the most that was ever computed, to count what is computed again.
        borrowed_tokens: borrowed tokens that no answered request has used yet.
        requests: waiting requests, in order.
    """

    handle: int
    ids: Int32s
    keep: bool = False
    name: str = ""
    parent: int | None = None
    shared_tokens: int = 0
    lent_tokens: int = 0
    num_children: int = 0
    table: PageTable | None = None
    computed: int = 0
    ever_computed: int = 0
    borrowed_tokens: int = 0
    requests: deque[Request] = field(default_factory=deque)


def in_tree_order(documents: Sequence[Document], tree: PrefixTree) -> list[Document]:
    """Notes in fresh documents what they borrow and lend; returns them in the order of admission."""
    for document, parent, shared in zip(documents, tree.parent, tree.shared, strict=True):
        if parent is not None:
            owner = documents[parent]
            document.parent, document.shared_tokens = owner.handle, shared
            owner.lent_tokens = max(owner.lent_tokens, shared)
            owner.num_children += 1
    return [documents[index] for index in tree.order]


@dataclass(frozen=True)
class Failure:
    """A request that can never run, and why."""

    request: Request
    reason: str


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass as planned: its arrays, and the request read at each of `chunk.read_rows`."""

    chunk: Chunk
    answered: tuple[Request, ...]


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
        longest_suffix_tokens: of all stages of the run; a suffix longer than the budget is run in pieces, its
            KV behind the document's in the same table, and room for it is reserved when the document is
            admitted.
    """

    def __init__(self, pages: PageArena, *, token_budget: int, longest_suffix_tokens: int) -> None:
        assert token_budget > 0
        self.pages = pages
        self.token_budget = token_budget
        self.spanning_tokens = longest_suffix_tokens if longest_suffix_tokens > token_budget else 0
        self.ledger = TokenLedger()
        self.num_passes = 0
        self.num_finished = 0
        self.num_fresh_tokens = 0
        self._documents: dict[int, Document] = {}
        self._ready: deque[Document] = deque()
        self._fresh: deque[Document] = deque()
        self._lending = Lending(pages)

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
        assert 0 <= request.prefix_tokens <= len(document.ids)
        assert len(request.suffix)
        if not document.requests:
            if document.table is None:
                self._fresh.append(document)
                self.num_fresh_tokens += len(document.ids)
            else:
                self._ready.append(document)
        document.requests.append(request)

    def release(self, handles: Iterable[int]) -> None:
        """Forgets documents that nothing will read again. A document with waiting requests stays until they
        ran.
        """
        for handle in handles:
            document = self._documents.get(handle)
            if document is not None:
                document.keep = False
                if not document.requests:
                    self._forget(document)

    # -- passes
    # --------------------------------------------------------------------------------------------------

    def next_pass(self) -> Pass | Failure | None:
        """Packs the next pass.

        Returns:
            A pass; a failure when the request at the head can never run; None when nothing waits.
        """
        packing = _Packing(self.token_budget)
        self._pack_ready(packing)
        short = self._pack_fresh(packing)
        if packing.num_rows:
            self.num_passes += 1
            return packing.finish()
        if short is not None:
            return self._unblock(short)
        assert not self._ready and not self._fresh, "documents wait for nothing"
        return None

    def complete(self, done: Pass) -> None:
        """Books a pass that ran; documents that nothing needs any more are forgotten."""
        for request in done.answered:
            document = request.document
            if document.table is not None and request.suffix_done:
                document.table.rewind(request.prefix_tokens)
            prefix, suffix = request.prefix_tokens, len(request.suffix)
            self.ledger.naive += prefix + suffix
            self.ledger.computed += request.prefix_computed + suffix
            reused = prefix - request.prefix_computed
            borrowed, document.borrowed_tokens = min(document.borrowed_tokens, reused), 0
            self.ledger.reused_prefix += borrowed
            self.ledger.reused_rewind += reused - borrowed
            self.ledger.recomputed += request.recomputed
        for document in {request.document for request in done.answered}:
            if not document.requests and not document.keep:
                self._forget(document)

    def fail(self, request: Request) -> None:
        """Takes out a request that will not be answered; what was run for it is wasted."""
        document = request.document
        self.ledger.wasted += request.prefix_computed + request.suffix_done
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

    def abandon(self, lost: Pass | None = None) -> None:
        """Drops everything: after an error, an interruption, or an early end. All pages are free afterwards.

        Args:
            lost: a pass that was packed and did not complete; its rows are wasted.
        """
        waiting = [request for document in self._documents.values() for request in document.requests]
        for request in waiting:
            self.ledger.wasted += request.prefix_computed + request.suffix_done
        for request in lost.answered if lost is not None else ():
            self.ledger.wasted += request.prefix_computed + len(request.suffix)
        self._ready.clear()
        self._fresh.clear()
        self.num_fresh_tokens = 0
        for document in list(self._documents.values()):
            document.requests.clear()
            self._forget(document)

    # -- packing
    # -------------------------------------------------------------------------------------------------

    def _pack_ready(self, packing: _Packing) -> None:
        """Packs documents that hold KV; those for which no room is left keep their turn."""
        waiting: list[Document] = []
        while self._ready and packing.room:
            document = self._ready.popleft()
            self._place_requests(packing, document)
            if document.requests:
                waiting.append(document)
        self._ready.extendleft(reversed(waiting))

    def _pack_fresh(self, packing: _Packing) -> Document | None:
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

    def _place_requests(self, packing: _Packing, document: Document) -> None:
        """Puts as many of a document's requests into the pass as fit.

        A suffix that spans passes is written behind the prefix, where another request of the same pass might
        read: it is the first and the last of its document in a pass.
        """
        is_first = True
        while document.requests:
            request = document.requests[0]
            spans = len(request.suffix) > self.token_budget
            if (spans and not is_first) or not self._place(packing, document, request):
                return
            packing.read(document.requests.popleft())
            if spans:
                return
            is_first = False

    def _admit(self, document: Document, room: int) -> _Admission:
        """Opens a table if the document needs one. Without need, no KV is written."""
        if self._waits_for_parent(document):
            return _Admission.WAITS
        if room < self._rows_to_first_answer(document) <= self.token_budget:
            return _Admission.WAITS
        capacity_tokens = self._capacity_tokens(document)
        if not capacity_tokens:
            return _Admission.ADMITTED
        borrowed = self._lending.pages_for_child(document.parent, document.shared_tokens)
        table = self.pages.open(document.name or document.handle, capacity_tokens, borrowed)
        if table is None:
            return _Admission.LACKS_PAGES
        document.table = table
        document.computed = document.borrowed_tokens = document.shared_tokens
        document.ever_computed = max(document.ever_computed, document.shared_tokens)
        if document.num_children:
            self._lending.lend(document.handle, table, document.lent_tokens, document.num_children)
            document.num_children = 0
        self._leave_parent(document)
        return _Admission.ADMITTED

    @staticmethod
    def _rows_to_first_answer(document: Document) -> int:
        request = document.requests[0]
        return max(0, request.prefix_tokens - document.shared_tokens) + len(request.suffix)

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
        if document.keep or len(document.requests) > 1 or spans_passes:
            return len(document.ids) + self.spanning_tokens
        return max(document.lent_tokens if document.num_children else 0, document.shared_tokens)

    def _place(self, packing: _Packing, document: Document, request: Request) -> bool:
        """Puts a request into the pass; True if its answer will be read in it."""
        table = document.table
        start = min(document.computed, request.prefix_tokens)
        missing = request.prefix_tokens - start
        suffix = request.suffix[request.suffix_done :]
        if missing + len(suffix) <= packing.room:
            writes = self._run_prefix(document, request, missing)
            ids = np.concatenate([document.ids[start : start + missing], suffix])
            packing.add(ids, start + request.suffix_done, table, writes=writes)
            return True
        if missing + len(suffix) <= self.token_budget or table is None or not packing.room:
            return False
        num_rows = min(packing.room, missing)
        if num_rows:
            writes = self._run_prefix(document, request, num_rows)
            packing.add(document.ids[start : start + num_rows], start, table, writes=writes)
        if missing == num_rows and len(suffix) > self.token_budget and packing.room:
            num_rows = min(packing.room, len(suffix) - 1)
            if not request.suffix_done:
                self._make_last(document, request.prefix_tokens)
            packing.add(
                suffix[:num_rows], request.prefix_tokens + request.suffix_done, table, writes=num_rows
            )
            request.suffix_done += num_rows
        return False

    def _run_prefix(self, document: Document, request: Request, num_rows: int) -> int:
        """Books prefix rows that go into the pass; returns how many of them are written to pages."""
        start, stop = document.computed, document.computed + num_rows
        request.prefix_computed += num_rows
        request.recomputed += max(0, min(stop, document.ever_computed) - start)
        document.ever_computed = max(document.ever_computed, stop)
        if document.table is None or not num_rows:
            return 0
        written = max(start, min(stop, document.table.capacity_tokens))
        document.computed = written
        self._lending.computed(document.handle, written)
        return written - start

    def _make_last(self, document: Document, num_tokens: int) -> None:
        """Drops KV behind `num_tokens`, so that a spanning suffix stands right behind them."""
        assert document.table is not None
        document.table.rewind(num_tokens)
        document.computed = num_tokens

    # -- pages
    # ---------------------------------------------------------------------------------------------------

    def _unblock(self, short: Document) -> Pass | Failure | None:
        """Nothing ran although a document waits for pages.

        Gives up KV of idle documents, then pages that wait for children (they compute their prefix again),
        else the document that waits.
        """
        needed = pages_for(self._capacity_tokens(short), self.pages.page_tokens)
        if needed <= self.pages.num_pages:
            for document in self._documents.values():
                if document.table is not None and not document.requests:
                    self._drop_kv(document)
                    if self._enough(short):
                        return self.next_pass()
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

    def _drop_kv(self, document: Document) -> None:
        if document.table is not None:
            self.pages.close(document.table)
        document.table, document.computed = None, 0

    def _forget(self, document: Document) -> None:
        self._leave_parent(document)
        self._drop_kv(document)
        del self._documents[document.handle]
        self.num_finished += 1


class _Packing:
    """A pass while it is being filled."""

    def __init__(self, token_budget: int) -> None:
        self.room = token_budget
        self.num_rows = 0
        self._ids: list[Int32s] = []
        self._starts: list[int] = []
        self._positions: list[Int64s] = []
        self._tables: list[PageTable] = []
        self._table_rows: list[int] = []
        self._paged: list[int] = []
        self._write_rows: list[Int64s] = []
        self._write_slots: list[Int64s] = []
        self._read_rows: list[int] = []
        self._requests: list[Request] = []

    def add(self, ids: Int32s, position: int, table: PageTable | None, *, writes: int) -> None:
        """Adds a segment.

        Args:
            ids: its tokens.
            position: position of its first token in the prompt = tokens it reads from pages.
            table: where those are, and where the first `writes` of its own go.
            writes: leading rows whose KV is kept.
        """
        start = self.num_rows
        self._ids.append(ids)
        self._starts.append(start)
        self._positions.append(np.arange(position, position + len(ids), dtype=np.int64))
        if table is not None and writes:
            self._write_rows.append(np.arange(start, start + writes, dtype=np.int64))
            self._write_slots.append(table.append(writes))
        self._paged.append(position)
        self._table_rows.append(len(self._tables) if position else -1)
        if position:
            assert table is not None, "history without pages"
            self._tables.append(table)
        self.num_rows += len(ids)
        self.room -= len(ids)

    def read(self, request: Request) -> None:
        """The answer of `request` is read at the last row so far."""
        self._read_rows.append(self.num_rows - 1)
        self._requests.append(request)

    def finish(self) -> Pass:
        starts = np.array(self._starts, dtype=np.int64)
        stops = np.append(starts[1:], self.num_rows)
        segments = Segments(
            starts, stops, np.array(self._table_rows, dtype=np.int64), np.array(self._paged, dtype=np.int64)
        )
        chunk = Chunk(
            ids=np.concatenate(self._ids),
            positions=np.concatenate(self._positions),
            segments=segments,
            block_table=BlockTable.of([table.pages for table in self._tables]),
            write_rows=_join(self._write_rows),
            write_slots=_join(self._write_slots),
            read_rows=np.array(self._read_rows, dtype=np.int64),
        )
        return Pass(chunk, tuple(self._requests))


def _join(arrays: list[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
