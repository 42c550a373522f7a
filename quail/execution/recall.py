"""Answers that need no model: known from an earlier run, or on their way for another call of this one.

CLASSIFY and PROBABILITIES of the same prompt and labels, or AI.IF and AI.SCORE of the same question, read the
same rows of the model: such calls are twins, and one evaluation serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quail.answers.digests import digest_of, text_digest
from quail.answers.store import AnswerStore, Question
from quail.arrays import of_numbers, to_numbers
from quail.execution.asks import Asks
from quail.execution.calibration import stage_key
from quail.execution.stages import Float32s, Int64s, Pieces, Stage

MOST_DIGESTS = 2**16
"""Digests of texts kept at hand."""

_SLACK_TOKENS = 16
"""Tokens that a tokenizer may add to a text of its own accord."""


@dataclass(frozen=True)
class ModelIdentity:
    """What answers depend on besides question and texts.

    Attributes:
        name: of the model, for people.
        revision: digest of its files.
        dtype: of products; with int8 KV is bfloat16.
        layout: name of the prompt layout.
    """

    name: str = ""
    revision: str = ""
    dtype: str = ""
    layout: str = ""


@dataclass(frozen=True)
class Memory:
    """Where a run finds answers, and leaves its own.

    Attributes:
        store: the answers.
        identity: of the model that gives them.
    """

    store: AnswerStore
    identity: ModelIdentity


@dataclass
class RecallCounts:
    """Where answers came from.

    Attributes:
        asked: evaluated by the model.
        stored: found in the store, where an earlier run or an earlier question of this one left it.
        shared: given by the evaluation of another call.
    """

    asked: int = 0
    stored: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Known:
    """Answers found.

    Attributes:
        keys: (n,) of the questions.
        logits: (n, answers).
    """

    keys: Int64s
    logits: Float32s


def question_of(stage: Stage, pieces: Pieces, identity: ModelIdentity) -> Question:
    """The question of a stage, as answers are stored under it."""
    about = (identity.revision.encode(), identity.dtype.encode(), pieces.prefix.tobytes())
    digest = digest_of([*about, *stage_key(stage)])
    text = " ".join(stage.call.text.split())
    return Question(digest, identity.name, identity.revision, identity.dtype, identity.layout, text)


class Recall:
    """Sorts questions into those to ask and those whose answers are known or on their way.

    Args:
        stages: of the run.
        pieces: the fixed ids of the prompt layout.
        memory: answers of earlier runs; None knows this run's twins only.
        context_tokens: longest prompt of the model.
        truncates: whether a document that is too long is cut. Such an answer is of a text that is not the
            document's, and is stored as such.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        pieces: Pieces,
        memory: Memory | None,
        *,
        context_tokens: int,
        truncates: bool,
    ) -> None:
        self.counts = RecallCounts()
        identity = memory.identity if memory is not None else ModelIdentity()
        self._questions = [question_of(stage, pieces, identity) for stage in stages]
        digests = [question.digest for question in self._questions]
        has_twins = len(set(digests)) < len(digests)
        self._owns_store = memory is None
        self._store = memory.store if memory is not None else AnswerStore() if has_twins else None
        self._anchors = [stage.call.anchor for stage in stages]
        self._cut_bytes = [
            context_tokens - stage.num_fixed_tokens - len(pieces.prefix) - _SLACK_TOKENS
            if truncates
            else None
            for stage in stages
        ]
        self._digests: dict[int, bytes] = {}
        self._contents: dict[tuple[int, int], bytes] = {}
        self._waiting: dict[tuple[bytes, bytes], list[tuple[int, int]]] = {}

    def sort(self, asks: Asks) -> tuple[Asks, Known | None]:
        """The questions that the model must answer, and the answers that are known.

        Those that another call's evaluation will answer are in neither; `answered` gives them.
        """
        if self._store is None:
            self.counts.asked += len(asks)
            return asks, None
        question = self._questions[asks.call].digest
        contents = self._contents_of(asks)
        found = self._store.find(question, contents)
        ask, keys, logits = [], [], []
        for place, (key, content) in enumerate(zip(asks.keys.tolist(), contents, strict=True)):
            known = found.get(content)
            if known is not None:
                keys.append(key)
                logits.append(known)
                continue
            on_its_way = self._waiting.get((question, content))
            if on_its_way is not None:
                on_its_way.append((asks.call, key))
                continue
            self._waiting[question, content] = []
            self._contents[asks.call, key] = content
            ask.append(place)
        self.counts.asked += len(ask)
        self.counts.stored += len(keys)
        rest = asks if len(ask) == len(asks) else asks.taken(np.array(ask, dtype=np.int64))
        return rest, Known(np.array(keys, dtype=np.int64), np.stack(logits)) if keys else None

    def answered(self, call: int, keys: Int64s, logits: Float32s) -> list[tuple[int, Known]]:
        """Stores answers of the model; returns them again for the twins that waited, by call."""
        if self._store is None:
            return []
        question = self._questions[call]
        contents = [self._contents.pop((call, key)) for key in keys.tolist()]
        self._store.add([(question, contents, logits)])
        twins: dict[int, tuple[list[int], list[int]]] = {}
        for place, content in enumerate(contents):
            for other, key in self._waiting.pop((question.digest, content)):
                waiting, places = twins.setdefault(other, ([], []))
                waiting.append(key)
                places.append(place)
        self.counts.shared += sum(len(waiting) for waiting, _ in twins.values())
        return [
            (other, Known(np.array(waiting, dtype=np.int64), logits[places]))
            for other, (waiting, places) in twins.items()
        ]

    def failed(self, call: int, key: int) -> list[tuple[int, int]]:
        """(call, key) of the questions that waited for one which will not be answered."""
        content = self._contents.pop((call, key), None)
        if content is None:
            return []
        return self._waiting.pop((self._questions[call].digest, content))

    def close(self) -> None:
        """Forgets what only this run knew."""
        if self._owns_store and self._store is not None:
            self._store.close()

    def _contents_of(self, asks: Asks) -> list[bytes]:
        """A digest of the texts of each question: of the document, or of anchor and partner."""
        if asks.partners is None:
            texts = asks.arguments[0]
            digests = self._digests_of(asks.documents, texts)
            return _marked(digests, _num_bytes(texts), self._cut_bytes[asks.call])
        anchor = self._anchors[asks.call]
        sides = (asks.arguments[anchor], asks.arguments[1 - anchor])
        anchors = self._digests_of(asks.documents, sides[0])
        partners = self._digests_of(asks.partners, sides[1])
        digests = [digest_of(pair) for pair in zip(anchors, partners, strict=True)]
        num_bytes = _num_bytes(sides[0]) + _num_bytes(sides[1])
        return _marked(digests, num_bytes, self._cut_bytes[asks.call])

    def _digests_of(self, handles: Int64s, texts: pa.Array) -> list[bytes]:
        """Digests of texts, each handle's once."""
        first: dict[int, int] = {}
        for place, handle in enumerate(handles.tolist()):
            if handle not in self._digests:
                first.setdefault(handle, place)
        places = of_numbers(np.fromiter(first.values(), np.int64, len(first)))
        for handle, text in zip(first, texts.take(places).to_pylist(), strict=True):
            self._digests[handle] = text_digest(text)
        found = [self._digests[handle] for handle in handles.tolist()]
        if len(self._digests) > MOST_DIGESTS:
            self._digests.clear()
        return found


def _marked(digests: list[bytes], num_bytes: Int64s, cut_bytes: int | None) -> list[bytes]:
    """Digests, those of texts that may be cut made others: a text has no more tokens than bytes."""
    if cut_bytes is None or not (num_bytes >= cut_bytes).any():
        return digests
    may_be_cut = (num_bytes >= cut_bytes).tolist()
    return [
        digest_of([digest, b"cut"]) if cut else digest
        for digest, cut in zip(digests, may_be_cut, strict=True)
    ]


def _num_bytes(texts: pa.Array) -> Int64s:
    return to_numbers(pc.binary_length(texts)).astype(np.int64)
