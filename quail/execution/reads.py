"""What a run wants to know of a pass: the model starts the pass, the answers follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quail.execution.chunk import Chunk
from quail.kv.pages import PageArena

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Read:
    """What is wanted at some of the rows that a pass reads.

    Attributes:
        rows: (n,) places in `Chunk.read_rows`.
        vocab_ids: (m,) vocabulary rows.
        is_mass: whether (n,) shares of the probability that these hold together are wanted; else their (n, m)
            logits. Both float32.
    """

    rows: Int64s
    vocab_ids: Int64s
    is_mass: bool = False


class Pending(Protocol):
    """A pass that was started."""

    def answers(self) -> list[Float32s]:
        """Waits for it; returns an array for each of its reads, in their order."""


class Model(Protocol):
    """What a run needs of a model: the decoder on its arena, or a fake.

    Passes run in the order in which they were started, so each reads what those before it wrote.
    """

    @property
    def pages(self) -> PageArena:
        """The accounting of its KV."""

    def start(self, chunk: Chunk, reads: Sequence[Read]) -> Pending:
        """Starts a pass; what it needs of `chunk` and `reads` is taken before this returns."""


@dataclass(frozen=True, eq=False)
class Answered:
    """A pass whose answers are there already."""

    found: list[Float32s]

    def answers(self) -> list[Float32s]:
        """The answers."""
        return self.found


class AnsweringAtOnce:
    """`Model.start` of a model that runs a pass when asked, by three methods of its own."""

    def forward(self, chunk: Chunk) -> Any:
        """Runs one pass; returns one state a read row."""
        raise NotImplementedError

    def logits(self, states: Any, rows: Int64s, vocab_ids: Int64s) -> Float32s:
        """(len(rows), len(vocab_ids)) float32 logits of some of the states."""
        raise NotImplementedError

    def answer_mass(self, states: Any, rows: Int64s, vocab_ids: Int64s) -> Float32s:
        """(len(rows),) share of the probability that some vocabulary rows hold together."""
        raise NotImplementedError

    def start(self, chunk: Chunk, reads: Sequence[Read]) -> Pending:
        """Runs the pass and reads its answers."""
        states = self.forward(chunk)
        return Answered(
            [
                (self.answer_mass if read.is_mass else self.logits)(states, read.rows, read.vocab_ids)
                for read in reads
            ]
        )
