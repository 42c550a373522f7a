"""Calls compiled to token ids: what follows a document, and where the answer is read."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quail.errors import PlanError
from quail.execution.label_tree import Branch, LabelTree
from quail.plan.logical import AICall
from quail.plan.prompts import (
    CATEGORY_CUE,
    PromptLayout,
    frame_and_cue,
    list_of_labels,
    question_and_cue,
    with_instructions,
)

if TYPE_CHECKING:
    from quail.models.tokenizer import Tokenizer

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WordReadout:
    """Two answers, read from the logits at the question's last row: the greatest of each answer's spellings.

    Attributes:
        vocab_ids: (n,) vocabulary rows to compute.
        groups: (n,) answer of each row, 0 or 1, ascending.
    """

    vocab_ids: Int64s
    groups: Int64s

    @property
    def wanted(self) -> tuple[Int64s, ...]:
        """The vocabulary rows wanted at each row that is read."""
        return (self.vocab_ids,)

    @property
    def meaning(self) -> bytes:
        """Which answer each vocabulary row counts for."""
        return self.groups.tobytes()

    def answers(self, logits: Sequence[Float32s]) -> Float32s:
        """One (r, n) array of logits to (r, 2): the greatest of each answer; NaN stays NaN."""
        starts = np.searchsorted(self.groups, np.arange(int(self.groups[-1]) + 1))
        found: Float32s = np.maximum.reduceat(logits[0], starts, axis=1)
        return found


@dataclass(frozen=True, eq=False)
class LabelReadout:
    """Log-probabilities of labels, read at the question's last row and behind the tree's branches."""

    tree: LabelTree

    @property
    def wanted(self) -> tuple[Int64s, ...]:
        """The vocabulary rows wanted at each row that is read."""
        return self.tree.children

    @property
    def meaning(self) -> bytes:
        """Which of the rows read make up each label: labels in another order are other answers."""
        return repr(self.tree.paths).encode()

    def answers(self, logits: Sequence[Float32s]) -> Float32s:
        """(r, children) logits of each node to (r, labels) log-probabilities."""
        return self.tree.log_probabilities(logits)


Readout = WordReadout | LabelReadout


@dataclass(frozen=True, eq=False)
class Stage:
    """A step that documents pass through.

    Attributes:
        call: the call it serves.
        frame: ids between an anchor and its partners (question and partner label); empty without partners.
        tail: ids that end every prompt: question and cue, or the cue alone behind a partner; and the closer.
        readout: where and how the answer is read.
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
    def branches(self) -> tuple[Branch, ...]:
        """What runs behind the tail."""
        return self.readout.tree.branches if isinstance(self.readout, LabelReadout) else ()

    @property
    def num_own_tokens(self) -> int:
        """Tokens of a question: tail and branches."""
        return len(self.tail) + sum(len(branch.ids) for branch in self.branches)

    @property
    def num_fixed_tokens(self) -> int:
        """Tokens of every prompt beside its documents."""
        return len(self.frame) + self.num_own_tokens


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
    """The stage of a question about one document, or about an anchor and a partner.

    Raises:
        PlanError: answers or labels that this model's tokens cannot tell apart.
    """
    codes = label_codes(call, tokenizer) if call.options.label_scoring == "codes" else ()
    if call.prompt.num_arguments == 2:
        frame, cue = frame_and_cue(call.prompt, call.anchor)
        question = ""
    else:
        frame, (question, cue) = "", question_and_cue(call.prompt)
    if call.categories and not (frame or question.strip()):
        question, cue = f"{list_of_labels(call.categories, codes)}{CATEGORY_CUE}", ""
    elif codes or any(category.description for category in call.categories):
        question = list_of_labels(call.categories, codes) + question
    ending = cue or question
    question = with_instructions(question, cue, call.options)
    tail = [*_encode(tokenizer, question), *_encode(tokenizer, cue), *pieces.closer.tolist()]
    if call.categories:
        is_spaced = not len(pieces.closer) and ending[-1:].strip() != ""
        labels = codes or [category.label for category in call.categories]
        readout: Readout = label_readout(labels, pieces, tokenizer, is_spaced=is_spaced)
    else:
        readout = word_readout(call, tokenizer)
    ids = np.array(_encode(tokenizer, frame), dtype=np.int32)
    return Stage(call, ids, np.array(tail, dtype=np.int32), readout)


def label_readout(
    labels: Sequence[str], pieces: Pieces, tokenizer: Tokenizer, *, is_spaced: bool
) -> LabelReadout:
    """Scores labels as what follows the question.

    Args:
        labels: the labels, or their codes.
        pieces: of the layout; behind a closer a label ends with the turn, else with the line.
        tokenizer: of the model.
        is_spaced: whether a space stands between question and label.

    Raises:
        PlanError: a label without tokens, or two of the same.
    """
    ids = [tuple(_encode(tokenizer, f" {label}" if is_spaced else label)) for label in labels]
    seen: dict[tuple[int, ...], str] = {}
    for label, tokens in zip(labels, ids, strict=True):
        other = seen.get(tokens)
        if not tokens or other is not None:
            raise PlanError(
                f"the category {label!r} "
                + ("has no tokens" if not tokens else f"has the same tokens as {other!r}")
                + " for this model",
                hint="choose other labels",
            )
        seen[tokens] = label
    end = int(pieces.closer[0]) if len(pieces.closer) else _encode(tokenizer, "\n")[0]
    return LabelReadout(LabelTree.build(ids, end))


def label_codes(call: AICall, tokenizer: Tokenizer) -> list[str]:
    """Codes of one token each, with and without a leading space, as many as the call has labels.

    Raises:
        PlanError: the vocabulary has too few.
    """
    letters = string.ascii_uppercase
    found = []
    for code in [*letters, *(a + b for a in letters for b in letters)]:
        if len(_encode(tokenizer, code)) == len(_encode(tokenizer, f" {code}")) == 1:
            found.append(code)
        if len(found) == len(call.categories):
            return found
    raise PlanError(
        f"this model has {len(found)} codes of one token, the call {len(call.categories)} labels",
        hint="label_scoring := 'tree' has no such limit",
    )


def word_readout(call: AICall, tokenizer: Tokenizer) -> WordReadout:
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
    return WordReadout(
        np.array([*groups[0], *groups[1]], dtype=np.int64),
        np.array([0] * len(groups[0]) + [1] * len(groups[1]), dtype=np.int64),
    )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids, _ = tokenizer.encode_plain([text])
    return [int(token) for token in ids]
