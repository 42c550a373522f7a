"""The order in which filters of a chain are asked: planned, observed on a pilot, revised while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quail.planner.observed_order import OrderWork

CLEARLY = 1.1
"""After the pilot an order is revised where it takes so many times what the best one takes."""

MEMORY = 1024
"""Answers of a filter that count for its selectivity; older ones fade: a table may change on its way."""

DOUBT = 8
"""So many answers of a filter count as much as the mean of all filters of the chain."""

FIRST_LOOK = 32
"""Answers after which the order is looked at for the first time; then after each sixteenth more of them."""

FIRST_WINDOW = 512
"""Fresh questions that may be outstanding beside twice as many as were answered.

What is handed out is asked, whatever is learnt meanwhile. Windows that grow with what is known waste little,
and documents that share beginnings find each other within a window.
"""


class AskOrder:
    """The order of some filters; all chains over parts of one table share it.

    Args:
        num_filters: how many.
        hints: (filters,) share of rows that pass as the user says; None where it is to be observed.
        work: what an order takes; None keeps the planned one.

    Attributes:
        sequence: the filters in the order in which they are asked.
        num_pilot_rows: rows drawn to observe selectivities.
        num_revisions: how often the order became another one.
    """

    def __init__(
        self, num_filters: int, hints: Sequence[float | None] = (), work: OrderWork | None = None
    ) -> None:
        self.sequence = tuple(range(num_filters))
        self.num_pilot_rows = self.num_revisions = 0
        self._hints = tuple(hints) or (None,) * num_filters
        self._work = work if num_filters > 1 and None in self._hints else None
        self._num_answers = [0.0] * num_filters
        self._num_passed = [0.0] * num_filters
        self._num_seen, self._next_look = 0, FIRST_LOOK
        self._num_taken = 0

    @property
    def is_observed(self) -> bool:
        """Whether answers may change the order."""
        return self._work is not None

    @property
    def observed(self) -> list[int]:
        """Filters whose selectivity is not given."""
        return [place for place, hint in enumerate(self._hints) if hint is None]

    @property
    def wants_pilot(self) -> bool:
        """Whether nothing is known of the table yet."""
        return self.is_observed and not self._num_seen and not self.num_pilot_rows

    def window(self, limit: int) -> int:
        """Fresh questions that may be handed out now, at most `limit`."""
        if not self.is_observed:
            return limit
        return max(0, min(limit, FIRST_WINDOW + 2 * self._num_seen - self._num_taken))

    def took(self, num_questions: int) -> None:
        """Notes fresh questions that were handed out."""
        self._num_taken += num_questions

    def note(self, place: int, num_answers: int, num_passed: int) -> None:
        """Notes answers of a filter."""
        self._num_seen += num_answers
        fading = min(1.0, MEMORY / max(1.0, self._num_answers[place] + num_answers))
        self._num_answers[place] = (self._num_answers[place] + num_answers) * fading
        self._num_passed[place] = (self._num_passed[place] + num_passed) * fading

    def selectivities(self) -> list[float]:
        """Hints, and shares observed; of a filter of which little is known, nearly that of all others."""
        seen = zip(self._hints, self._num_answers, self._num_passed, strict=True)
        known = [(answers, passed) for hint, answers, passed in seen if hint is None]
        share = (sum(passed for _, passed in known) + 1) / (sum(answers for answers, _ in known) + 2)
        return [
            (passed + DOUBT * share) / (answers + DOUBT) if hint is None else hint
            for hint, answers, passed in zip(self._hints, self._num_answers, self._num_passed, strict=True)
        ]

    def revise(self, *, after_pilot: bool = False) -> bool:
        """Takes the best order, if enough was observed and it is clearly better; whether it did."""
        if self._work is None or (self._num_seen < self._next_look and not after_pilot):
            return False
        self._next_look = self._num_seen + max(FIRST_LOOK, self._num_seen // 16)
        shares = self.selectivities()
        best = self._work.cheapest(shares)
        takes = self._work.expected(self.sequence, shares)
        if takes <= self._work.expected(best, shares) * (1.0 if after_pilot else CLEARLY):
            return False
        self.sequence = best
        self.num_revisions += 1
        return True

    def report(self, calls: Sequence[int]) -> dict[str, Any]:
        """What a report says of it.

        Args:
            calls: (filters,) index of the call of each filter.
        """
        return {
            "planned": list(calls),
            "calls": [calls[place] for place in self.sequence],
            "pilot_rows": self.num_pilot_rows,
            "revisions": self.num_revisions,
        }


def in_words(order: Mapping[str, Any]) -> str:
    """An order of a report in one line."""
    calls, planned = (", ".join(map(str, order[name])) for name in ("calls", "planned"))
    if not order["pilot_rows"] and not order["revisions"]:
        return f"calls {calls}, as planned"
    pilot = f"a pilot of {order['pilot_rows']} rows, " if order["pilot_rows"] else ""
    times = "once" if order["revisions"] == 1 else f"{order['revisions']} times"
    return f"calls {calls} (planned {planned}): {pilot}" + (
        f"revised {times}" if order["revisions"] else "not revised"
    )
