"""How a question and a document become one prompt.

    [opener][label][document][question][cue][closer]
    '------- prefix --------''------- suffix -------'

    [opener][label][anchor][frame: question and partner label][partner][cue][closer]
    '------------ prefix, once an anchor -------------------''------ suffix ------'

Each piece is tokenized on its own and the ids are concatenated, so a document's ids, and with them its KV,
never depend on the question. Opener and closer come from the model's chat template (`chat`) or are empty
(`completion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quail.plan.logical import CallOptions, Category, Prompt

DOCUMENT_LABEL = "DOCUMENT:\n"
EXAMPLE_LABEL = "EXAMPLE:\n"
PARTNER_LABEL = "SECOND DOCUMENT"
ANSWER_CUE = "\nANSWER:"
CATEGORY_CUE = "\n\nCategory:"

_SENTENCE_ENDS = ".?!。？！"
_CLOSING = "\"'”’»)]}」』）】"


@dataclass(frozen=True)
class PromptLayout:
    """What stands around documents and questions.

    Attributes:
        name: `chat` or `completion`.
        opener: text before the label; its control tokens are control tokens.
        label: text before each document.
        closer: text behind the cue; its control tokens are control tokens.
    """

    name: str
    opener: str = ""
    label: str = DOCUMENT_LABEL
    closer: str = ""


def ends_sentence(text: str) -> bool:
    """Whether a text, stripped, ends a sentence, so that the answer needs a cue of its own.

    >>> [ends_sentence(text) for text in ("Is it good?", 'He said "no."', "Sentiment:", "")]
    [True, True, False, True]
    """
    bare = text.strip().rstrip(_CLOSING)
    return not text.strip() or bool(bare) and bare[-1] in _SENTENCE_ENDS


def question_and_cue(prompt: Prompt) -> tuple[str, str]:
    """The texts behind the document of a prompt over one relation.

    Text before the document moves behind it, as a paragraph of its own; text behind the document stands as
    written.

    >>> question_and_cue(Prompt(("Is this about food?\\n\\n", 0)))
    ('\\n\\nIs this about food?', '\\nANSWER:')
    >>> question_and_cue(Prompt((0, "\\n\\nSentiment:")))
    ('\\n\\nSentiment:', '')
    """
    assert prompt.num_arguments == 1, "a prompt over two relations has a frame, not a question"
    place = prompt.parts.index(0)
    before = "".join(str(part) for part in prompt.parts[:place]).strip()
    after = "".join(str(part) for part in prompt.parts[place + 1 :])
    question = (f"\n\n{before}" if before else "") + after
    return question, ANSWER_CUE if ends_sentence(question) else ""


def frame_and_cue(prompt: Prompt, anchor: int = 0) -> tuple[str, str]:
    """The texts between anchor and partner, and behind the partner, of a prompt over two relations.

    The template stands as written, each placeholder replaced by the label of its text.

    >>> frame_and_cue(Prompt(("Does ", 0, " contradict ", 1, "?")))
    ('\\n\\nDoes DOCUMENT contradict SECOND DOCUMENT?\\n\\nSECOND DOCUMENT:\\n', '\\nANSWER:')
    """
    assert prompt.num_arguments == 2, "a prompt over one relation has no partner"
    names = {anchor: DOCUMENT_LABEL.rstrip(":\n"), 1 - anchor: PARTNER_LABEL}
    question = "".join(part if isinstance(part, str) else names[part] for part in prompt.parts).strip()
    return f"\n\n{question}\n\n{PARTNER_LABEL}:\n", ANSWER_CUE


def with_instructions(question: str, cue: str, options: CallOptions) -> str:
    """Puts the task description and the examples of a call in front of its question.

    They follow the document, so that its KV does not depend on them. An example is shown as a document of its
    own with the question and its answer.

    >>> options = CallOptions(task_description="Judge the mood.", examples=(("Fine!", "good"),))
    >>> with_instructions("\\n\\nMood:", "", options)
    '\\n\\nJudge the mood.\\n\\nEXAMPLE:\\nFine!\\n\\nMood: good\\n\\nMood:'
    """
    task = f"\n\n{options.task_description.strip()}" if options.task_description else ""
    shown = "".join(
        f"\n\n{EXAMPLE_LABEL}{document}{question}{cue} {answer}" for document, answer in options.examples
    )
    return task + shown + question


def list_of_labels(categories: Sequence[Category], codes: Sequence[str] = ()) -> str:
    """The labels as a list in front of a question: with their descriptions, behind their codes if there are
    any.

    >>> list_of_labels([Category("a", "first"), Category("b")], ["X", "Y"])
    '\\n\\nX: a (first)\\nY: b'
    """
    lines = []
    for index, category in enumerate(categories):
        code = f"{codes[index]}: " if codes else ""
        about = f" ({category.description})" if category.description else ""
        lines.append(f"{code}{category.label}{about}")
    return "\n\n" + "\n".join(lines)
