"""The answers of a run: which texts there are, which questions about them, and what was said.

Texts are known by DuckDB's 64-bit `hash` of them, because DuckDB computes it for a column at once and the
lookups of the final statement can then compare numbers. A second, salted hash is compared whenever a text is
met, so that two texts that share a hash are found out and never share an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quail.arrays import filled, of_numbers, to_numbers
from quail.errors import QuailError
from quail.execution.asks import Bools, Int64s

UInt64s = npt.NDArray[np.uint64]
_Number = TypeVar("_Number", bound=np.generic)

_HALF = np.int64(31)
_MAX_TEXTS = 2**31
_TRUTH_BITS = np.uint64(2)
_FEW = 64
_BYTES_PER_TOKEN = 4


class NumberIndex:
    """Numbers 0, 1, 2, … for distinct 64-bit values, in the order in which they were added.

    The values lie in their order, and their first bits say where to look: a million hashes are found in a few
    steps each, where a binary search takes twenty, each a wait for memory.
    """

    def __init__(self) -> None:
        self._sorted: UInt64s = np.zeros(0, dtype=np.uint64)
        self._numbers: Int64s = np.zeros(0, dtype=np.int64)
        self._starts: Int64s | None = None
        self._shift = np.uint64(0)
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, values: UInt64s) -> Int64s:
        """The number of each value, -1 for those not added."""
        if not len(self._sorted):
            return np.full(len(values), -1, dtype=np.int64)
        starts = self._starts if self._starts is not None else self._made_starts()
        buckets = np.minimum(values >> self._shift, np.uint64(len(starts) - 2)).astype(np.int64)
        places, stops = starts[buckets], starts[buckets + 1]
        for _ in range(self._num_steps):
            middle = (places + stops) >> 1
            is_behind = self._sorted[np.minimum(middle, len(self) - 1)] < values
            is_behind &= middle < stops
            places = np.where(is_behind, middle + 1, places)
            stops = np.where(is_behind, stops, middle)
        places[places == len(self._sorted)] = 0
        found = self._sorted[places] == values
        numbers: Int64s = np.where(found, self._numbers[places], -1)
        return numbers

    def add(self, values: UInt64s) -> None:
        """Adds values that are distinct and not there yet."""
        numbers = np.arange(len(self), len(self) + len(values), dtype=np.int64)
        merged = np.concatenate([self._sorted, values])
        order = np.argsort(merged, kind="stable")
        self._sorted = merged[order]
        self._numbers = np.concatenate([self._numbers, numbers])[order]
        self._starts = None

    def _made_starts(self) -> Int64s:
        """Where the values of each bucket start, about as many buckets as values."""
        num_bits = len(self).bit_length()
        self._shift = np.uint64(max(0, int(self._sorted[-1]).bit_length() - num_bits))
        num_buckets = int(self._sorted[-1] >> self._shift) + 1
        firsts = np.arange(num_buckets, dtype=np.uint64) << self._shift
        starts = np.append(np.searchsorted(self._sorted, firsts), len(self))
        self._num_steps = int(np.diff(starts).max()).bit_length()
        self._starts = starts
        return starts


class Texts:
    """The distinct texts of a run; a handle is a number that means one text.

    Args:
        null_hash: DuckDB's hash of a NULL text.
    """

    def __init__(self, null_hash: int) -> None:
        self.null_hash = np.uint64(null_hash)
        self._index = NumberIndex()
        self._checks: UInt64s = np.zeros(0, dtype=np.uint64)
        self._chunks: list[pa.Array] = []
        self._starts: Int64s = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def find(self, hashes: UInt64s) -> Int64s:
        """Handles of texts by their hash, -1 for unknown ones."""
        return self._index.find(hashes)

    def add(self, hashes: UInt64s, checks: UInt64s, texts: pa.ChunkedArray) -> None:
        """Adds texts with their hash and their salted hash, those that are known or repeated only once.

        Raises:
            QuailError: two different texts share a hash.
        """
        known = self.find(hashes)
        old = known >= 0
        order = np.argsort(hashes, kind="stable")
        repeats = hashes[order[1:]] == hashes[order[:-1]]
        is_shared = (checks[order[1:]] != checks[order[:-1]]) & repeats
        if is_shared.any() or (self._checks[known[old]] != checks[old]).any():
            raise QuailError(
                "two different documents share a 64-bit hash",
                hint="change one of them by a space, or run them apart",
            )
        is_new = ~old
        is_new[order[1:][repeats]] = False
        if not is_new.any():
            return
        if not is_new.all():
            hashes, checks, texts = hashes[is_new], checks[is_new], texts.filter(of_numbers(is_new))
        self._index.add(hashes)
        assert len(self) < _MAX_TEXTS, "more texts than handles"
        self._checks = np.concatenate([self._checks, checks])
        texts = texts if texts.type == pa.string() else texts.cast(pa.string())
        chunks = [chunk for chunk in texts.chunks if len(chunk)]  # as they came: joined they would be copied
        self._chunks += chunks
        stops = self._starts[-1] + np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)
        self._starts = np.concatenate([self._starts, stops])

    def take(self, handles: Int64s) -> pa.Array:
        """The texts of some handles; without a copy where they lie one after the other in one chunk."""
        if not len(handles):
            return pa.nulls(0, pa.string())
        numbers = np.searchsorted(self._starts, handles, side="right") - 1
        if (numbers == numbers[0]).all():
            return self._of_chunk(int(numbers[0]), handles)
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        parts = [self._of_chunk(int(numbers[part[0]]), handles[part]) for part in np.split(order, cuts)]
        taken = pa.concat_arrays(parts)
        if (order[1:] > order[:-1]).all():
            return taken
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return taken.take(of_numbers(places))

    def _of_chunk(self, number: int, handles: Int64s) -> pa.Array:
        chunk, local = self._chunks[number], handles - self._starts[number]
        if (local[1:] - local[:-1] == 1).all():
            return chunk.slice(int(local[0]), len(local))
        return chunk.take(of_numbers(local))

    def mean_tokens(self, handles: npt.NDArray[np.integer]) -> float:
        """Tokens of one of some texts (-1: no text) on average, estimated from the bytes of a few."""
        present = handles[handles >= 0].astype(np.int64)
        some = self.take(present[:: 1 + len(present) // _FEW])
        sizes = to_numbers(pc.binary_length(some))
        return float(sizes.mean()) / _BYTES_PER_TOKEN if len(sizes) else 0.0


@dataclass(frozen=True)
class Tally:
    """How many answers a call got, and how many of them were TRUE."""

    num_values: int = 0
    num_true: int = 0


class CallAnswers:
    """The questions of one call and their answers.

    A key numbers a distinct question: one combination of argument texts. `handles` holds the texts' handles,
    `rows` the row in which it stood first, `asked` whether it was given out, `truth` a Boolean answer as 1, 0
    or -1 for NULL. `num_unknown_lookups` counts lookups of texts that never were candidates.
    """

    def __init__(self, num_arguments: int, type_: pa.DataType, texts: Texts) -> None:
        self.type = type_
        self._num_arguments = num_arguments
        self._texts = texts
        self._forgotten = Tally()
        self._kept: list[UInt64s] = []
        self._is_sorted = False
        self.num_unknown_lookups = 0
        self._clear()

    def _clear(self) -> None:
        self.handles: Int64s = np.zeros((0, self._num_arguments), dtype=np.int64)
        self.rows: Int64s = np.zeros(0, dtype=np.int64)
        self.asked: Bools = np.zeros(0, dtype=np.bool_)
        self.truth: npt.NDArray[np.int8] = np.zeros(0, dtype=np.int8)
        self._key_of_handle: Int64s = np.zeros(0, dtype=np.int64)
        self._pairs = NumberIndex()
        self._positions: Int64s = np.zeros(0, dtype=np.int64)
        self._batches: list[pa.Array] = []
        self._values: pa.Array = pa.nulls(0, self.type)
        self._num_values = 0

    def __len__(self) -> int:
        return len(self.rows)

    def register(self, handles: Int64s, rows: Int64s) -> Int64s:
        """Keys of questions, made for those that are new, in the order in which they stand first.

        Args:
            handles: (n, arguments) handles of the argument texts.
            rows: (n,) row numbers.
        """
        keys = self._find(handles)
        new = np.flatnonzero(keys < 0)
        if not len(new):
            return keys
        first, ranks = _number_in_order(_single(handles[new]))
        keys[new] = len(self) + ranks
        first = new[first]
        self._add(handles[first])
        count = len(first)
        self.handles = np.concatenate([self.handles, handles[first]])
        self.rows = np.concatenate([self.rows, rows[first]])
        self.asked = np.concatenate([self.asked, np.zeros(count, dtype=np.bool_)])
        self.truth = np.concatenate([self.truth, np.full(count, -1, dtype=np.int8)])
        self._positions = np.concatenate([self._positions, np.full(count, -1, dtype=np.int64)])
        return keys

    def store(self, keys: Int64s, values: pa.Array) -> None:
        """Takes answers, one for each key."""
        if values.type != self.type:
            values = values.cast(self.type)
        if pa.types.is_boolean(self.type):
            truth = filled(pc.cast(values, pa.int8()), -1)
            self.truth[keys] = to_numbers(truth)
        self._positions[keys] = np.arange(self._num_values, self._num_values + len(keys), dtype=np.int64)
        self._batches.append(values)
        self._num_values += len(keys)

    def forget(self, passing: int | None = None) -> None:
        """Drops all conditions on pairs but their truth, eight bytes each; keys start at 0 again.

        None of the questions may come again, and none may be outstanding: its answer would come under a key
        that means another question by then.

        Args:
            passing: the only truth that matters, where nothing but a filter reads it: any other counts as
                NULL does, and is dropped too. None keeps all.
        """
        assert self._num_arguments == 2, "only questions about pairs are forgotten"
        assert pa.types.is_boolean(self.type)
        assert not self.has_outstanding, "a question is forgotten before its answer is there"
        self._forgotten = self.tally()
        matters = self._positions >= 0 if passing is None else self.truth == passing
        self._kept.append(_with_truth(_single(self.handles[matters]), self.truth[matters]))
        self._clear()

    def tally(self) -> Tally:
        """How many answers there were, and how many of them TRUE."""
        values = self.all_values()
        num_true = int(np.count_nonzero(self.truth == 1))
        return Tally(self._forgotten.num_values + len(values), self._forgotten.num_true + num_true)

    def is_answered(self, keys: Int64s) -> Bools:
        """Whether each question has its answer."""
        return self._positions[keys] >= 0

    @property
    def has_outstanding(self) -> bool:
        """Whether a question was given out and has no answer yet."""
        return bool((self.asked & (self._positions < 0)).any())

    def lookup(self, hashes: Sequence[UInt64s]) -> pa.Array:
        """The answers for argument texts by their hashes; NULL where there is none."""
        handles = np.stack([self._texts.find(column) for column in hashes], axis=1)
        is_known: Bools = np.asarray((handles >= 0).all(axis=1))
        if self._kept:
            return self._lookup_kept(handles, is_known)
        if not is_known.all():
            is_null = np.stack([column == self._texts.null_hash for column in hashes], axis=1).any(axis=1)
            self.num_unknown_lookups += int(np.count_nonzero(~is_known & ~is_null))
        keys = np.full(len(handles), -1, dtype=np.int64)
        keys[is_known] = self._find(handles[is_known])
        if not len(self._positions):
            return pa.nulls(len(keys), self.type)
        positions = np.where(keys >= 0, self._positions[keys], -1)
        return self.all_values().take(of_numbers(positions, positions < 0))

    def _lookup_kept(self, handles: Int64s, is_known: Bools) -> pa.Array:
        """What is left of answers that were forgotten; NULL where nothing is."""
        assert not len(self), "answers are looked up once all of them are forgotten, or none"
        if len(self._kept) > 1 or not self._is_sorted:
            self._kept = [np.concatenate(self._kept)]
            self._kept[0].sort()
            self._is_sorted = True
        (kept,) = self._kept
        if not len(kept):
            return pa.nulls(len(handles), self.type)
        pairs = _with_truth(_single(handles), np.full(len(handles), -1, dtype=np.int8))
        found = kept[np.minimum(np.searchsorted(kept, pairs), len(kept) - 1)]
        is_kept = is_known & (found >> _TRUTH_BITS == pairs >> _TRUTH_BITS)
        truth = (found & np.uint64(2**_TRUTH_BITS - 1)).astype(np.int8) - 1
        return of_numbers(truth == 1, ~is_kept | (truth < 0))

    def all_values(self) -> pa.Array:
        """Every answer that was not forgotten."""
        if self._batches:
            self._values = pa.concat_arrays([self._values, *self._batches])
            self._batches = []
        return self._values

    def _find(self, handles: Int64s) -> Int64s:
        if self._num_arguments > 1:
            return self._pairs.find(_single(handles).astype(np.uint64))
        missing = len(self._texts) - len(self._key_of_handle)
        if missing:
            filler = np.full(missing, -1, dtype=np.int64)
            self._key_of_handle = np.concatenate([self._key_of_handle, filler])
        return self._key_of_handle[handles[:, 0]]

    def _add(self, handles: Int64s) -> None:
        if self._num_arguments > 1:
            self._pairs.add(_single(handles).astype(np.uint64))
        else:
            self._key_of_handle[handles[:, 0]] = np.arange(len(self), len(self) + len(handles))


def _single(handles: Int64s) -> Int64s:
    """One number for each combination of handles."""
    if handles.shape[1] == 1:
        return handles[:, 0]
    numbers: Int64s = (handles[:, 0] << _HALF) | handles[:, 1]
    return numbers


def _with_truth(pairs: Int64s, truth: npt.NDArray[np.int8]) -> UInt64s:
    """One number for each pair and its truth; in their order pairs come first."""
    codes: UInt64s = pairs.astype(np.uint64) << _TRUTH_BITS | (truth + 1).astype(np.uint64)
    return codes


def _number_in_order(values: npt.NDArray[np.integer]) -> tuple[Int64s, Int64s]:
    """Positions at which values stand first, and for each value the rank of its first position."""
    if (values[1:] > values[:-1]).all():
        everything = np.arange(len(values), dtype=np.int64)
        return everything, everything
    order = np.argsort(values, kind="stable")
    starts = np.ones(len(values), dtype=np.bool_)
    starts[1:] = values[order[1:]] != values[order[:-1]]
    first = order[starts]
    group = np.empty(len(values), dtype=np.int64)
    group[order] = np.cumsum(starts) - 1
    by_position = np.argsort(first, kind="stable")
    rank = np.empty(len(first), dtype=np.int64)
    rank[by_position] = np.arange(len(first))
    return first[by_position], rank[group]


def ranks_in_order(values: npt.NDArray[np.integer]) -> Int64s:
    """For each value the rank of its first position among all distinct ones.

    >>> ranks_in_order(np.array([7, 3, 7, 5]))
    array([0, 1, 0, 2])
    """
    return _number_in_order(values)[1] if len(values) else np.zeros(0, dtype=np.int64)


def distinct(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """The distinct values, sorted; numpy's `unique` hashes, which is slower here."""
    if len(values) < 2:
        return values
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def first_places(values: Int64s) -> Int64s:
    """Positions at which values stand first, ascending.

    >>> first_places(np.array([7, 3, 7, 5]))
    array([0, 1, 3])
    """
    return _number_in_order(values)[0] if len(values) else np.zeros(0, dtype=np.int64)


def distinct_in_order(values: Int64s) -> Int64s:
    """The distinct values in the order in which they stand first."""
    return values[first_places(values)]
