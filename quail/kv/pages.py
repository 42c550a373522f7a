"""Which document holds which pages of KV: pure accounting, no tensors.

A page holds the KV of `page_tokens` consecutive tokens. A `PageTable` is one holder's list of pages, in token
order. Whole pages may stand in several tables (a shared beginning); a partly filled page belongs to one table
alone. A page is free again when its last holder lets go.

    [ borrowed pages | own pages, whole | own last page, partly filled | reserved ]
    0                ^ borrowed_tokens                   num_tokens ^             ^ capacity
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 16


def pages_for(num_tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Number of pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


@dataclass(eq=False)
class PageTable:
    """One holder's pages, in token order.

    Attributes:
        key: who holds them, for messages.
        pages: page ids; the first `num_borrowed_pages` belong to somebody else too and are never written
            here.
        num_tokens: tokens whose KV is in the pages.
        num_borrowed_pages: leading pages taken over whole from another table.
        page_tokens: tokens a page.
        closed: whether its pages are given back.
    """

    key: Hashable
    pages: list[int]
    num_tokens: int = 0
    num_borrowed_pages: int = 0
    page_tokens: int = PAGE_TOKENS
    closed: bool = field(default=False, repr=False)

    @property
    def capacity_tokens(self) -> int:
        return len(self.pages) * self.page_tokens

    def append(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Takes the next `num_tokens` places; returns their slots (page · page_tokens + offset)."""
        assert not self.closed, f"append to the closed table of {self.key!r}"
        start, stop = self.num_tokens, self.num_tokens + num_tokens
        assert stop <= self.capacity_tokens, f"{self.key!r}: {stop} tokens in room for {self.capacity_tokens}"
        assert start >= self.num_borrowed_pages * self.page_tokens, (
            f"{self.key!r} would write into borrowed pages"
        )
        positions = np.arange(start, stop, dtype=np.int64)
        pages = np.asarray(self.pages, dtype=np.int64)
        self.num_tokens = stop
        return pages[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens

    def rewind(self, num_tokens: int) -> None:
        """Drops the KV behind the first `num_tokens` tokens; their places can be written again.

        Raises:
            ValueError: `num_tokens` lies past the end, or inside the borrowed pages.
        """
        if not self.num_borrowed_pages * self.page_tokens <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot rewind {self.key!r} with {self.num_tokens} tokens to {num_tokens}")
        self.num_tokens = num_tokens


class PageArena:
    """Hands out pages and takes them back.

    Every call is all or nothing: short of pages it returns None and changes nothing.

    Args:
        num_pages: pages there are.
        page_tokens: tokens a page.
    """

    def __init__(self, num_pages: int, page_tokens: int = PAGE_TOKENS) -> None:
        if num_pages < 0:
            raise ValueError(f"an arena of {num_pages} pages")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = list(range(num_pages - 1, -1, -1))
        self._tables = [0] * num_pages
        self._holds = [0] * num_pages
        self._num_live = 0
        self._open: set[PageTable] = set()
        self._retained: set[PageTable] = set()
        self.peak_used_pages = 0

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def num_live_pages(self) -> int:
        """Distinct pages in at least one open table."""
        return self._num_live

    @property
    def num_retained_pages(self) -> int:
        """Distinct pages that no open table lists: `hold` or a retained table keeps them."""
        return self.num_pages - len(self._free) - self._num_live

    def num_pages_held_alone(self, table: PageTable) -> int:
        """Pages of a table that nobody else holds."""
        return sum(1 for page in table.pages if self._tables[page] + self._holds[page] == 1)

    def open(self, key: Hashable, capacity_tokens: int, borrowed: Sequence[int] = ()) -> PageTable | None:
        """Opens a table with room for `capacity_tokens` tokens.

        Args:
            key: who holds it, for messages.
            capacity_tokens: tokens to make room for, the borrowed ones included.
            borrowed: pages of another holder that stand first, each whole.

        Returns:
            The table, its `num_tokens` at the end of the borrowed pages; None when too few pages are free.
        """
        num_new = max(0, pages_for(capacity_tokens, self.page_tokens) - len(borrowed))
        if num_new > len(self._free):
            return None
        for page in borrowed:
            assert self._tables[page] or self._holds[page], f"borrowed page {page} has no holder"
        pages = [*borrowed, *(self._free.pop() for _ in range(num_new))]
        for page in pages:
            self._list(page)
        table = PageTable(key, pages, len(borrowed) * self.page_tokens, len(borrowed), self.page_tokens)
        self._open.add(table)
        self.peak_used_pages = max(self.peak_used_pages, self.num_pages - len(self._free))
        return table

    def extend(self, table: PageTable, capacity_tokens: int) -> bool:
        """Makes room in a table for `capacity_tokens` tokens in all; False if pages are short."""
        self._check_open(table)
        num_new = pages_for(capacity_tokens, self.page_tokens) - len(table.pages)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            page = self._free.pop()
            self._list(page)
            table.pages.append(page)
        self.peak_used_pages = max(self.peak_used_pages, self.num_pages - len(self._free))
        return True

    def retain(self, table: PageTable) -> None:
        """Sets a table aside: its pages stay, it can be neither written nor closed until `resume`."""
        self._check_open(table)
        self._open.remove(table)
        self._retained.add(table)
        for page in table.pages:
            self._unlist(page)
            self._holds[page] += 1

    def resume(self, table: PageTable) -> None:
        """Undoes `retain`.

        Raises:
            ValueError: the table is not retained.
        """
        if table not in self._retained:
            raise ValueError(f"the table of {table.key!r} is not retained")
        self._retained.remove(table)
        self._open.add(table)
        for page in table.pages:
            self._holds[page] -= 1
            self._list(page)

    def trim(self, table: PageTable) -> None:
        """Gives back the reserved pages behind the last one in use."""
        self._check_open(table)
        used = max(pages_for(table.num_tokens, self.page_tokens), table.num_borrowed_pages)
        self._let_go(table.pages[used:])
        del table.pages[used:]

    def close(self, table: PageTable) -> None:
        """Lets go of all pages of a table.

        Raises:
            ValueError: the table is closed already.
        """
        self._check_open(table)
        self._open.remove(table)
        table.closed = True
        self._let_go(table.pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Keeps pages alive beside their tables (for a waiting child, for a later operator)."""
        for page in pages:
            assert self._tables[page] or self._holds[page], f"page {page} has no holder to keep it from"
            self._holds[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Undoes one `hold` of each page.

        Raises:
            ValueError: a page is not held.
        """
        for page in pages:
            if self._holds[page] == 0:
                raise ValueError(f"page {page} is not held")
            self._holds[page] -= 1
            self._free_if_unused(page)

    def check_integrity(self) -> None:
        """Asserts that free + live + retained = total, that counts match the tables, that no free page has a
        holder.
        """
        counts = [0] * self.num_pages
        writers: dict[int, PageTable] = {}
        for table in [*self._open, *self._retained]:
            assert len(set(table.pages)) == len(table.pages), f"{table.key!r} lists a page twice"
            for place, page in enumerate(table.pages):
                if table in self._open:
                    counts[page] += 1
                else:
                    assert self._holds[page] > 0, f"the retained page {page} has no hold"
                if place >= table.num_borrowed_pages:
                    assert page not in writers, (
                        f"page {page} is owned by {writers[page].key!r} and {table.key!r}"
                    )
                    writers[page] = table
        assert counts == self._tables, "page counts differ from the tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all(count >= 0 for count in self._holds)
        for page in range(self.num_pages):
            in_use = bool(self._tables[page] or self._holds[page])
            assert in_use != (page in free), f"page {page}: in use {in_use}, free {page in free}"
        num_live = sum(1 for count in self._tables if count)
        num_retained = sum(
            1 for tables, holds in zip(self._tables, self._holds, strict=True) if holds and not tables
        )
        assert num_live == self.num_live_pages, f"{num_live} pages are live, {self.num_live_pages} counted"
        total = self.num_free_pages + num_live + num_retained
        assert total == self.num_pages, f"{total} pages accounted for, {self.num_pages} exist"

    def _check_open(self, table: PageTable) -> None:
        if table not in self._open:
            raise ValueError(f"the table of {table.key!r} is closed already")

    def _let_go(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._unlist(page)
            self._free_if_unused(page)

    def _list(self, page: int) -> None:
        """One more open table lists a page."""
        self._num_live += not self._tables[page]
        self._tables[page] += 1

    def _unlist(self, page: int) -> None:
        self._tables[page] -= 1
        self._num_live -= not self._tables[page]

    def _free_if_unused(self, page: int) -> None:
        if not self._tables[page] and not self._holds[page]:
            self._free.append(page)
