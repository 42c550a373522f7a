"""What the scheduler moves about: documents, and the requests behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quail.execution.label_tree import Branch
from quail.kv.pages import PageTable
from quail.kv.prefix_sharing import PrefixTree

Int32s = npt.NDArray[np.int32]


NO_FRAME = np.zeros(0, dtype=np.int32)


@dataclass(eq=False)
class Request:
    """One suffix to run behind the first `prefix_tokens` tokens of a document and its frame.

    Attributes:
        document: whose prefix it reads.
        stage: index of the stage it belongs to.
        key: the caller's name for it.
        suffix: its ids; at least one.
        prefix_tokens: prefix tokens it reads; fewer than the document has where the context is too short for
            both.
        frame: ids that stand between document and suffix, the same for all partners of a join; part of the
            prefix.
        branches: what runs behind the suffix, to be read too; all in one pass.
        suffix_done: suffix tokens already run, where the suffix spans passes.
        prefix_computed: prefix rows that were run on its behalf.
        recomputed: those of them that had been run before and were lost.
        reused_retained: prefix tokens that its document had from the retention pool, once it is in a pass.
        reused_borrowed: likewise those that another document lent.
        num_own_tokens: rows beside the prefix: suffix and branches.
        operator: that asks, None where it is not known.
    """

    document: Document
    stage: int
    key: int
    suffix: Int32s
    prefix_tokens: int
    frame: Int32s = field(default_factory=lambda: NO_FRAME)
    branches: tuple[Branch, ...] = ()
    suffix_done: int = 0
    prefix_computed: int = 0
    recomputed: int = 0
    reused_retained: int = 0
    reused_borrowed: int = 0
    operator: int | None = None
    num_own_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        num_branch_tokens = sum(len(branch.ids) for branch in self.branches) if self.branches else 0
        self.num_own_tokens = len(self.suffix) + num_branch_tokens


@dataclass(eq=False)
class Document:
    """A document in the scheduler.

    Attributes:
        handle: the caller's name for it.
        ids: everything that stands before any question or frame.
        keep: whether its KV is worth writing: a later request may read it.
        name: how to call it in messages.
        source: name of the table in which it stands.
        row: the first row of that table in which it stands.
        num_cut: tokens of its text that `ids` leave out, as no prompt can hold them.
        is_exact: whether they are so many; otherwise at least so many.
        fault: why its text cannot be asked about; empty where it can.
        parent: handle of the document whose first pages it borrows.
        shared_tokens: tokens it borrows, whole pages.
        lent_tokens: most tokens that a child borrows from it, whole pages.
        num_children: documents that borrow from it.
        table: its pages; None while it holds none.
        computed: prefix tokens whose KV is in the table (those of the pass being packed included).
        ever_computed: the most that was ever computed, passes in flight included, to count what is computed
            again.
        surely_computed: likewise without passes in flight.
        frame: the frame whose KV stands, or will stand, behind the document's own in the table.
        borrowed_tokens: borrowed tokens that no answered request has used yet.
        retained_tokens: tokens taken from the retention pool that no answered request has used yet.
        operator: that asked the last request of the run in a pass, None before the first.
        requests: waiting requests, in order.
        last_pass: number of the latest pass with rows of it; 0 before any.
    """

    handle: int
    ids: Int32s
    keep: bool = False
    name: str = ""
    source: str = ""
    row: int = -1
    num_cut: int = 0
    is_exact: bool = True
    fault: str = ""
    parent: int | None = None
    shared_tokens: int = 0
    lent_tokens: int = 0
    num_children: int = 0
    table: PageTable | None = None
    computed: int = 0
    ever_computed: int = 0
    surely_computed: int = 0
    frame: Int32s = field(default_factory=lambda: NO_FRAME)
    borrowed_tokens: int = 0
    retained_tokens: int = 0
    operator: int | None = None
    requests: deque[Request] = field(default_factory=deque)
    last_pass: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of its text and what stands before it, those that were cut included."""
        return len(self.ids) + self.num_cut

    def prefix(self, start: int, stop: int) -> Int32s:
        """Ids [start, stop) of the document and its frame."""
        num_own = len(self.ids)
        if stop <= num_own:
            return self.ids[start:stop]
        behind = self.frame[max(0, start - num_own) : stop - num_own]
        return behind if start >= num_own else np.concatenate([self.ids[start:], behind])


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
