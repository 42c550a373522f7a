"""What a step costs, counted before anything runs: tokens, attention pairs, KV written and read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Work of some rows; values add up and multiply.

    Attributes:
        tokens: rows computed.
        pairs: (row, key) pairs of attention, per layer and head.
        kv_written: tokens whose KV is written to pages.
        kv_read: tokens whose KV is read from pages, once a segment.
    """

    tokens: float = 0.0
    pairs: float = 0.0
    kv_written: float = 0.0
    kv_read: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.kv_written + other.kv_written,
            self.kv_read + other.kv_read,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(
            self.tokens * factor, self.pairs * factor, self.kv_written * factor, self.kv_read * factor
        )

    __rmul__ = __mul__


def rows(num_tokens: float, *, behind: float = 0.0, written: float = 0.0) -> Work:
    """Work of `num_tokens` rows that see `behind` earlier tokens from pages, then themselves causally.

    >>> rows(4, behind=10)
    Work(tokens=4, pairs=50.0, kv_written=0.0, kv_read=10)
    """
    pairs = num_tokens * behind + num_tokens * (num_tokens + 1) / 2
    return Work(num_tokens, pairs, written, behind)


def stacked_rows(num_tokens: float, *, behind: float) -> Work:
    """Work of `num_tokens` rows like `rows`, but partners read their anchor's KV together: not counted here.

    >>> stacked_rows(4, behind=10)
    Work(tokens=4, pairs=50.0, kv_written=0.0, kv_read=0.0)
    """
    return Work(num_tokens, rows(num_tokens, behind=behind).pairs)
