"""Drives a scheduler with the hash model through any number of questions, checking everything after every
step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from quail.execution.requests import Document, Failure, Request, in_tree_order
from quail.execution.scheduler import Scheduler
from quail.kv.pages import PageArena, pages_for
from quail.kv.prefix_sharing import PrefixTree
from tests.engine.hash_model import HashModel, state_of


def ids_of(rng: np.random.Generator, num_tokens: int, vocab: int = 50) -> np.ndarray:
    return rng.integers(0, vocab, num_tokens).astype(np.int32)


def smallest_arena(
    documents: Sequence[np.ndarray], suffixes: Sequence[np.ndarray], budget: int, page_tokens=16
) -> int:
    """Pages of the longest document, with room for a suffix that spans passes."""
    longest = max(len(s) for s in suffixes)
    spanning = longest if longest > budget else 0
    return max(pages_for(len(d) + spanning, page_tokens) for d in documents)


class Driver:
    """Every document gets every question in turn while `passes(document, question)` says so.

    With a `depth` above 1 as many passes are planned before the first of them runs: what a pass planned ahead
    reads wrongly, or what is given up too early, changes an answer.
    """

    def __init__(
        self,
        documents,
        suffixes,
        *,
        num_pages,
        budget,
        passes: Callable[[int, int], bool] = lambda d, q: True,
        shares: bool = False,
        page_tokens: int = 16,
        depth: int = 1,
    ):
        self.depth = depth
        self.in_flight: deque = deque()
        self.tree = PrefixTree.build(documents, page_tokens) if shares else None
        self.documents, self.suffixes, self.passes = documents, suffixes, passes
        self.arena = PageArena(num_pages, page_tokens)
        self.model = HashModel(num_pages, page_tokens)
        self.scheduler = Scheduler(
            self.arena, token_budget=budget, longest_suffix_tokens=max(len(s) for s in suffixes)
        )
        self.answers: dict[tuple[int, int], int] = {}
        self.failures: list[Failure] = []
        self.passes_run = []

    def submit(self, document: int, question: int) -> None:
        known = self.scheduler.document(document)
        if known is None:
            known = Document(document, self.documents[document], name=f"row {document}")
            self.scheduler.add(known)
        known.keep = question + 1 < len(self.suffixes)
        self.scheduler.submit(
            Request(known, question, document, self.suffixes[question], len(self.documents[document]))
        )

    def step(self, interrupt: Callable[[], None] = lambda: None) -> bool:
        planned = self.scheduler.next_pass()
        self.arena.check_integrity()
        if planned is None and not self.in_flight:
            return False
        if isinstance(planned, Failure):
            self.failures.append(planned)
            self.scheduler.fail(planned.request)
            self.arena.check_integrity()
            return True
        if planned is not None:
            assert len(planned.chunk) <= self.scheduler.token_budget
            self.passes_run.append(planned)
            self.in_flight.append(planned)
            interrupt()
            if len(self.in_flight) < self.depth:
                return True
        states = self.model.forward(self.in_flight[0].chunk)
        self.scheduler.complete()
        done = self.in_flight.popleft()
        self.arena.check_integrity()
        for request, state in zip(done.answered, states.tolist(), strict=True):
            pair = (request.document.handle, request.stage)
            assert pair not in self.answers, f"{pair} was answered twice"
            self.answers[pair] = state
            again = request.stage + 1 < len(self.suffixes) and self.passes(*pair)
            if again:
                self.submit(request.document.handle, request.stage + 1)
            else:
                self.scheduler.release([request.document.handle])
            self.arena.check_integrity()
        return True

    def lose_passes(self) -> int:
        """The passes in flight will not run; the rows of the last one. Their rows count as run, and wasted."""
        num_rows = len(self.in_flight[-1].chunk)
        self.model.rows_run += sum(len(lost.chunk) for lost in self.in_flight)
        self.in_flight.clear()
        return num_rows

    def submit_all(self) -> None:
        order = range(len(self.documents))
        if self.tree is not None:
            known = [Document(d, ids, name=f"row {d}") for d, ids in enumerate(self.documents)]
            for document in in_tree_order(known, self.tree):
                self.scheduler.add(document)
            order = self.tree.order
        for document in order:
            self.submit(document, 0)

    def run(self) -> None:
        self.submit_all()
        while self.step():
            pass
        self.check_end()

    def check_end(self) -> None:
        assert self.arena.num_free_pages == self.arena.num_pages, "pages are missing after the run"
        ledger = self.scheduler.ledger
        ledger.check()
        assert ledger.computed + ledger.wasted == self.model.rows_run
        for (document, question), state in self.answers.items():
            prompt = np.concatenate([self.documents[document], self.suffixes[question]])
            assert state == state_of(prompt), f"document {document}, question {question}: wrong KV was read"
