"""Rule `choose_anchors`: which text of a pair stands first and is computed once.

The side with less total work is the anchor. Where the texts are known their tokens are counted, so the work
is exact; without a tokenizer they are estimated from their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quail.arrays import to_numbers
from quail.cost.work import Work
from quail.plan.logical import AICall
from quail.plan.prompts import DOCUMENT_LABEL, frame_and_cue, question_and_cue

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.integer]

_BYTES_PER_TOKEN = 4


class TokenCounter(Protocol):
    """Counts tokens of documents and questions, and knows what work costs."""

    @property
    def label_tokens(self) -> int:
        """Tokens in front of each document."""

    def text_tokens(self, texts: pa.Array) -> Int64s:
        """Tokens of each text (no NULLs), without a label."""

    def fixed_tokens(self, call: AICall) -> tuple[int, int]:
        """Tokens between an anchor and its partner (none over one document), and behind the last document."""

    def cost(self, work: Work) -> float:
        """Cost of some work, linear in it."""


class LengthCounter:
    """Estimates tokens from bytes, where no tokenizer is at hand; work costs its tokens."""

    label_tokens = len(DOCUMENT_LABEL) // _BYTES_PER_TOKEN

    def text_tokens(self, texts: pa.Array) -> Int64s:
        """A token for every four bytes begun."""
        sizes = to_numbers(pc.binary_length(texts))
        return np.asarray(-(-sizes.astype(np.int64) // _BYTES_PER_TOKEN))

    def fixed_tokens(self, call: AICall) -> tuple[int, int]:
        """The same for what stands around documents."""
        if call.prompt.num_arguments == 2:
            frame, cue = frame_and_cue(call.prompt, call.anchor)
        else:
            frame, cue = "", "".join(question_and_cue(call.prompt))
        return len(frame.encode()) // _BYTES_PER_TOKEN, max(1, len(cue.encode()) // _BYTES_PER_TOKEN)

    def cost(self, work: Work) -> float:
        """Tokens."""
        return work.tokens


@dataclass(frozen=True)
class PairTokens:
    """Tokens of a prompt over two relations beside its texts.

    Attributes:
        label: in front of the anchor.
        frame: between anchor and partner.
        tail: behind the partner.
    """

    label: int
    frame: int
    tail: int


def pair_work(
    anchors: Numbers, partners: Numbers, anchor_tokens: Numbers, partner_tokens: Numbers, fixed: PairTokens
) -> Work:
    """Work of some distinct pairs, an anchor and its frame once, then its partners.

    Args:
        anchors: (n,) index of each pair's anchor.
        partners: (n,) index of its partner.
        anchor_tokens: tokens of each anchor's text; those without a pair are not computed.
        partner_tokens: tokens of each partner's text.
        fixed: tokens of the rest.
    """
    behind = anchor_tokens.astype(np.float64) + fixed.label + fixed.frame
    num_partners = np.bincount(anchors, minlength=len(behind))
    computed = behind[num_partners > 0]
    suffix = partner_tokens.astype(np.float64) + fixed.tail
    num_anchors = np.bincount(partners, minlength=len(suffix)).astype(np.float64)
    crossed = suffix * np.bincount(partners, weights=behind[anchors], minlength=len(suffix))
    return Work(
        tokens=float(computed.sum() + (num_anchors * suffix).sum()),
        pairs=float(_causal(computed).sum() + crossed.sum() + (num_anchors * _causal(suffix)).sum()),
        kv_written=float(computed.sum()),
        kv_read=float(computed.sum()),
    )


def _causal(tokens: Float64s) -> Float64s:
    return tokens * (tokens + 1) / 2
