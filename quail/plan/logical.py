"""The logical plan: what a statement asks of the model, before anyone decides how.

Nodes are frozen and refuse to be wrong in their constructors.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Operator(enum.Enum):
    """The AI operators; the value is the SQL spelling."""

    IF = "AI.IF"
    SCORE = "AI.SCORE"
    CLASSIFY = "AI.CLASSIFY"
    PROBABILITIES = "AI.PROBABILITIES"


@dataclass(frozen=True)
class Prompt:
    """The text of a question with its arguments.

    Attributes:
        parts: texts, and argument indices where a document stands. Over one relation everything between the
            first and the last placeholder is the document, so exactly one index (0) remains.
    """

    parts: tuple[str | int, ...]

    def __post_init__(self) -> None:
        assert any(isinstance(part, int) for part in self.parts), "a prompt has at least one argument"

    @property
    def num_arguments(self) -> int:
        return len({part for part in self.parts if isinstance(part, int)})


@dataclass(frozen=True)
class Category:
    """A label of AI.CLASSIFY with its optional description."""

    label: str
    description: str | None = None


@dataclass(frozen=True)
class CallOptions:
    """Options of one call.

    Attributes:
        selectivity: the user's estimate of the share of TRUE answers, in [0, 1].
        answers: the two answer words, the one that means TRUE first.
        threshold: probability above which AI.IF is TRUE; None compares the logits.
        anchor: over two relations the argument that the user wants as anchor; None lets the planner choose.
        calibrate: what is subtracted from the answers' log-odds (or labels' log-probabilities): `content`,
            their mean over content-free documents; `batch`, their mean over the run's own documents; None,
            nothing.
        task_description: a text between document and question.
        examples: (document, answer) pairs shown between document and question.
        label_scoring: `tree` scores the labels' own tokens; `codes` lists the labels and scores one code
            token each; `auto` is `tree`.
    """

    selectivity: float | None = None
    answers: tuple[str, str] = ("TRUE", "FALSE")
    threshold: float | None = None
    anchor: int | None = None
    calibrate: str | None = None
    task_description: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    label_scoring: str = "auto"


@dataclass(frozen=True)
class AICall:
    """One distinct question of a statement: a deterministic, nullable function of its argument values.

    Attributes:
        index: position in the plan.
        operator: which AI operator.
        prompt: the question.
        categories: the labels of CLASSIFY and PROBABILITIES, else empty.
        options: the options.
        text: the call as the user wrote it, for messages and explain.
        anchor: over two relations the argument that stands first in the prompt and whose KV is kept; part of
            the prompt, since swapped sides answer differently.
    """

    index: int
    operator: Operator
    prompt: Prompt
    categories: tuple[Category, ...] = ()
    options: CallOptions = CallOptions()
    text: str = ""
    anchor: int = 0
