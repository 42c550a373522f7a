"""How a question and a document become one prompt.

    [opener][label][document][question][cue][closer]
    '------- prefix --------''------- suffix -------'

Each piece is tokenized on its own and the ids are concatenated, so a document's ids, and with them its KV,
never depend on the question. Opener and closer come from the model's chat template (`chat`) or are empty
(`completion`).
"""

from __future__ import annotations

from dataclasses import dataclass

from quail.plan.logical import Prompt

DOCUMENT_LABEL = "DOCUMENT:\n"
ANSWER_CUE = "\nANSWER:"

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

    >>> ends_sentence('Is it good?'), ends_sentence('He said "no."'), ends_sentence("Sentiment:"),
    ends_sentence("") (True, True, False, True)
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
