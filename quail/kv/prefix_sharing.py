"""Which documents begin alike, and which borrows whose pages.

Documents are sorted by their token ids, so that each stands behind the one with which it shares the most.
Only whole pages are shared, and the last token of every document is always computed, since its row gives the
answer.

    A  |####|####|####|##        owns all its pages
    B  |aaaa|aaaa|####|####|#    borrows two pages of A
    C  |aaaa|aaaa|#              its neighbour B borrowed those two itself, so C borrows from B's parent A
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quail.kv.pages import PAGE_TOKENS, PageArena, PageTable, pages_for

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrefixTree:
    """The sharing plan of some documents; lists are by document index.

    Attributes:
        order: document indices in the order of admission; parents precede their children.
        parent: the document whose pages each borrows, None for none.
        shared: tokens that each borrows, a multiple of the page size, less than its length.
    """

    order: list[int]
    parent: list[int | None]
    shared: list[int]

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int] | Int32s], page_tokens: int = PAGE_TOKENS) -> PrefixTree:
        """Plans sharing among token sequences.

        >>> PrefixTree.build([[1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3, 4, 7, 8]], page_tokens=2)
        PrefixTree(order=[0, 2, 1], parent=[None, 0, 0], shared=[0, 2, 4])
        """
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
        parts = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        flat = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        return cls.build_flat(flat, offsets, page_tokens)

    @classmethod
    def build_flat(cls, ids: Int32s, offsets: Int64s, page_tokens: int = PAGE_TOKENS) -> PrefixTree:
        """As `build`, from flat ids (none negative) and n + 1 offsets; takes one copy of the ids beside
        them.
        """
        order = _sorted(ids, offsets)
        shared_before = _shared_with_predecessor(ids, offsets, order, page_tokens)
        parent: list[int | None] = [None] * len(order)
        shared = [0] * len(order)
        for place in np.nonzero(shared_before)[0].tolist():
            index, tokens = order[place], int(shared_before[place])
            owner = order[place - 1]
            while shared[owner] >= tokens:
                above = parent[owner]
                assert above is not None
                owner = above
            parent[index], shared[index] = owner, tokens
        return cls(order, parent, shared)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that need not be computed."""
        return sum(self.shared)


@dataclass
class _Loan:
    """Pages that one document keeps for its children.

    Attributes:
        pages: held for the children, in token order.
        covered_tokens: leading tokens whose KV is written, those of the pass being packed included.
        num_waiting: children that have not borrowed yet.
    """

    pages: list[int] = field(default_factory=list)
    covered_tokens: int = 0
    num_waiting: int = 0


class Lending:
    """Pages kept alive for children that have not borrowed yet, by the handle of their parent.

    A loan outlives its document: the parent may be answered and gone before the last child is admitted.

    Args:
        pages: the arena's accounting.
    """

    def __init__(self, pages: PageArena) -> None:
        self._pages = pages
        self._loans: dict[int, _Loan] = {}

    def lend(self, parent: int, table: PageTable, num_tokens: int, num_children: int) -> None:
        """Keeps the pages of the first `num_tokens` tokens of a table until all children have left."""
        pages = table.pages[: pages_for(num_tokens, self._pages.page_tokens)]
        self._pages.hold(pages)
        self._loans[parent] = _Loan(pages, table.num_tokens, num_children)

    def computed(self, parent: int, num_tokens: int) -> None:
        """The parent's KV now covers `num_tokens` tokens."""
        if parent in self._loans:
            self._loans[parent].covered_tokens = num_tokens

    def covers(self, parent: int, num_tokens: int) -> bool:
        """Whether a child may read `num_tokens` tokens of a parent in the pass being packed."""
        loan = self._loans.get(parent)
        return loan is not None and loan.covered_tokens >= num_tokens

    def pages_for_child(self, parent: int | None, num_tokens: int) -> list[int]:
        """The pages of the first `num_tokens` tokens of a parent, whole."""
        if parent is None or not num_tokens:
            return []
        return self._loans[parent].pages[: num_tokens // self._pages.page_tokens]

    def child_left(self, parent: int) -> bool:
        """A child has borrowed, or will not; the last one lets the pages go. False if there is no loan."""
        loan = self._loans.get(parent)
        if loan is None:
            return False
        loan.num_waiting -= 1
        if not loan.num_waiting:
            del self._loans[parent]
            self._pages.release(loan.pages)
        return True

    def largest_beside(self, parent: int | None) -> int | None:
        """The parent with most pages on loan, `parent` itself last; None when nothing is on loan."""
        return max(self._loans, key=lambda p: (p != parent, len(self._loans[p].pages)), default=None)


def _sorted(ids: Int32s, offsets: Int64s) -> list[int]:
    """Document indices in lexicographic order of their ids; equal documents keep their order."""
    if len(offsets) == 1:
        return []
    big_endian = ids.astype(">i4")
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets * 4)), pa.py_buffer(big_endian)]
    texts = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    found: list[int] = pc.sort_indices(texts).to_pylist()
    return found


def _shared_with_predecessor(ids: Int32s, offsets: Int64s, order: list[int], page_tokens: int) -> Int64s:
    """Tokens in whole pages that each document in `order` shares with the one before it, its last token left
    out.
    """
    places = np.asarray(order, dtype=np.int64)
    starts, lengths = offsets[:-1][places], np.diff(offsets)[places]
    most = np.zeros(len(order), dtype=np.int64)
    if len(order):
        most[1:] = np.minimum(lengths[:-1], lengths[1:] - 1) // page_tokens
    shared = np.zeros(len(order), dtype=np.int64)
    alike = np.nonzero(most > 0)[0]
    within = np.arange(page_tokens)
    page = 0
    while len(alike):
        column = page * page_tokens + within
        same = (ids[starts[alike, None] + column] == ids[starts[alike - 1, None] + column]).all(axis=1)
        alike = alike[same]
        page += 1
        shared[alike] = page * page_tokens
        alike = alike[most[alike] > page]
    return shared
