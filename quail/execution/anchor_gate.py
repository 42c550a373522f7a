"""An anchor's pairs, asked together: what it costs does not depend on which answers come first."""

from __future__ import annotations

import numpy as np

from quail.execution.answers import distinct
from quail.execution.asks import Bools, Int64s

_NOTHING: Int64s = np.zeros(0, dtype=np.int64)


class AnchorGate:
    """Holds the pairs of an anchor back while other pairs of it wait for an earlier question of the chain.

    A pair is reached once a row that holds it has passed all questions in front. The frame of an anchor is
    computed for the first of its pairs that are asked; those that come much later would need it again.

    Args:
        keys: (rows,) key of the pair in each row, -1 where a text is NULL.
        handles: (keys of the call,) handle of the anchor of each pair.
    """

    def __init__(self, keys: Int64s, handles: Int64s) -> None:
        self._is_before: Bools = keys >= 0
        present, numbers = np.unique(keys[self._is_before], return_inverse=True)
        self._pair: Int64s = np.full(len(keys), -1, dtype=np.int64)
        self._pair[self._is_before] = numbers
        _, self._anchor = np.unique(handles[present], return_inverse=True)
        self._num_rows = np.bincount(numbers, minlength=len(present))
        self._is_reached: Bools = np.zeros(len(present), dtype=np.bool_)
        self._num_awaited = np.bincount(self._anchor)
        self._held: dict[int, list[Int64s]] = {}
        self._maybe_open: list[Int64s] = []

    def arrived(self, rows: Int64s) -> None:
        """Notes rows that have passed all questions in front."""
        pairs = self._leave(rows)
        new = distinct(pairs[~self._is_reached[pairs]])
        self._is_reached[new] = True
        self._no_longer_awaited(new)

    def decided(self, rows: Int64s) -> None:
        """Notes rows that ask nothing any more."""
        pairs = self._leave(rows)
        self._no_longer_awaited(distinct(pairs[(self._num_rows[pairs] == 0) & ~self._is_reached[pairs]]))

    def sift(self, rows: Int64s) -> Int64s:
        """Those of some rows whose pairs may be asked now; the others are held."""
        anchors = self._anchor[self._pair[rows]]
        is_held = self._num_awaited[anchors] > 0
        self._hold(rows[is_held], anchors[is_held])
        return rows[~is_held]

    def opened(self) -> Int64s:
        """Rows that were held and need not be any longer, in row order."""
        anchors = distinct(np.concatenate([_NOTHING, *self._maybe_open])).tolist()
        self._maybe_open.clear()
        rows = [held for anchor in anchors for held in self._held.pop(anchor, ())]
        return np.sort(np.concatenate([_NOTHING, *rows]))

    def start_over(self, is_before: Bools, has_reached: Bools) -> None:
        """Takes another order of questions; no row is held.

        Args:
            is_before: (rows,) undecided rows that have not passed all questions in front.
            has_reached: (rows,) rows that have.
        """
        self._is_before = is_before & (self._pair >= 0)
        self._num_rows = np.bincount(self._pair[self._is_before], minlength=len(self._is_reached))
        self._is_reached[:] = False
        self._is_reached[self._pair[has_reached & (self._pair >= 0)]] = True
        awaited = self._anchor[(self._num_rows > 0) & ~self._is_reached]
        self._num_awaited = np.bincount(awaited, minlength=len(self._num_awaited))
        self._held.clear()
        self._maybe_open.clear()

    def _hold(self, rows: Int64s, anchors: Int64s) -> None:
        """Notes rows under the anchor of each."""
        order = np.argsort(anchors, kind="stable")
        rows, anchors = rows[order], anchors[order]
        starts = np.flatnonzero(np.diff(anchors, prepend=-1))
        for anchor, start, stop in zip(
            anchors[starts].tolist(), starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=False
        ):
            self._held.setdefault(anchor, []).append(rows[start:stop])

    def _leave(self, rows: Int64s) -> Int64s:
        """The pairs of rows that were before the question until now."""
        rows = rows[self._is_before[rows]]
        self._is_before[rows] = False
        pairs = self._pair[rows]
        np.subtract.at(self._num_rows, pairs, 1)
        return pairs

    def _no_longer_awaited(self, pairs: Int64s) -> None:
        anchors = self._anchor[pairs]
        np.subtract.at(self._num_awaited, anchors, 1)
        if self._held:
            self._maybe_open.append(anchors[self._num_awaited[anchors] == 0])
