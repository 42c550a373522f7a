"""Calls compiled to token ids: what follows a document, and where the answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quail.errors import PlanError
from quail.plan.logical import AICall
from quail.plan.prompts import PromptLayout, frame_and_cue, question_and_cue

if TYPE_CHECKING:
    from quail.models.tokenizer import Tokenizer

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Readout:
    """Where an answer is read: the logits of some vocabulary rows, the greatest of each group.

    Attributes:
        vocab_ids: (n,) vocabulary rows to compute.
        groups: (n,) group of each row, 0 … num_groups - 1, ascending.
    """

    vocab_ids: Int64s
    groups: Int64s

    @property
    def num_groups(self) -> int:
        return int(self.groups[-1]) + 1

    def answers(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(r, n) logits to (r, num_groups): the greatest of each group; NaN stays NaN."""
        starts = np.searchsorted(self.groups, np.arange(self.num_groups))
        found: npt.NDArray[np.float32] = np.maximum.reduceat(logits, starts, axis=1)
        return found


@dataclass(frozen=True, eq=False)
class Stage:
    """A step that documents pass through.

    Attributes:
        call: the call it serves.
        frame: ids between an anchor and its partners (question and partner label); empty without partners.
        tail: ids that end every prompt: question and cue, or the cue alone behind a partner; and the closer.
        readout: where the answer is read, at the last row of the tail.
    """

    call: AICall
    frame: Int32s
    tail: Int32s
    readout: Readout

    def __post_init__(self) -> None:
        assert len(self.tail), "a suffix without tokens leaves no row to read"

    @property
    def is_join(self) -> bool:
        """Whether each request has a partner."""
        return self.call.prompt.num_arguments == 2

    @property
    def num_fixed_tokens(self) -> int:
        """Tokens of every prompt beside its documents."""
        return len(self.frame) + len(self.tail)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The fixed ids of a layout, for one tokenizer.

    Attributes:
        prefix: ids before every document: BOS if the tokenizer puts one first, opener, label.
        closer: ids behind every cue.
    """

    prefix: Int32s
    closer: Int32s

    @classmethod
    def of(cls, layout: PromptLayout, tokenizer: Tokenizer) -> Pieces:
        """Tokenizes a layout. A BOS token that the opener already begins with is not doubled."""
        opener = tokenizer.encode_control(layout.opener) if layout.opener else []
        bos = list(tokenizer.bos_ids)
        if bos and opener[: len(bos)] == bos:
            bos = []
        label = _encode(tokenizer, layout.label)
        closer = tokenizer.encode_control(layout.closer) if layout.closer else []
        return cls(np.array([*bos, *opener, *label], dtype=np.int32), np.array(closer, dtype=np.int32))


def compile_stage(call: AICall, pieces: Pieces, tokenizer: Tokenizer) -> Stage:
    """The stage of a question with two answers about one document, or about an anchor and a partner."""
    if call.prompt.num_arguments == 2:
        frame, cue = frame_and_cue(call.prompt)
        question = ""
    else:
        frame, (question, cue) = "", question_and_cue(call.prompt)
    tail = [*_encode(tokenizer, question), *_encode(tokenizer, cue), *pieces.closer.tolist()]
    ids = np.array(_encode(tokenizer, frame), dtype=np.int32)
    return Stage(call, ids, np.array(tail, dtype=np.int32), word_readout(call, tokenizer))


def word_readout(call: AICall, tokenizer: Tokenizer) -> Readout:
    """Reads the two answer words of a call: the first token of each, written with and without a leading
    space.

    A first token that both words share says nothing and is left out.

    Raises:
        PlanError: nothing is left that tells the words apart.
    """
    first = [
        {_encode(tokenizer, spelling)[0] for spelling in (word, f" {word}")} for word in call.options.answers
    ]
    shared = first[0] & first[1]
    groups = [sorted(ids - shared) for ids in first]
    if not all(groups):
        raise PlanError(
            f"the answers {call.options.answers[0]!r} and {call.options.answers[1]!r} begin with the "
            f"same token for this model, so its next-token logits cannot tell them apart",
            hint="choose answer words that begin differently, e.g. answers := ['positive', 'negative']",
        )
    return Readout(
        np.array([*groups[0], *groups[1]], dtype=np.int64),
        np.array([0] * len(groups[0]) + [1] * len(groups[1]), dtype=np.int64),
    )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids, _ = tokenizer.encode_plain([text])
    return [int(token) for token in ids]
