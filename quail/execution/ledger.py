"""The ledger of tokens: what was asked for, what was computed, what was reused and from where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


@dataclass
class TokenLedger:
    """Tokens of a run.

    Attributes:
        naive: the whole prompt of each evaluated request, once.
        computed: rows run for evaluated requests.
        reused_rewind: prefix tokens already used in this query and still there.
        reused_prefix: prefix tokens borrowed from another document.
        reused_retained: prefix tokens held from an earlier operator or query.
        recomputed: the part of `computed` that had been computed before and was lost.
        wasted: rows run for requests that were never answered (aborted passes, failed rows); not in
            `computed`.
    """

    naive: int = 0
    computed: int = 0
    reused_rewind: int = 0
    reused_prefix: int = 0
    reused_retained: int = 0
    recomputed: int = 0
    wasted: int = 0

    @classmethod
    def total(cls, ledgers: Iterable[TokenLedger]) -> TokenLedger:
        """One ledger of several."""
        parts = list(ledgers)
        return cls(*(sum(getattr(part, each.name) for part in parts) for each in fields(cls)))

    def check(self) -> None:
        """Asserts that every token of every evaluated prompt was either computed or reused."""
        reused = self.reused_rewind + self.reused_prefix + self.reused_retained
        assert self.naive == self.computed + reused, f"tokens do not add up: {self}"
        assert 0 <= self.recomputed <= self.computed, f"more recomputed than computed: {self}"

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)
