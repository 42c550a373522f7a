"""The options of a call: from constants to `CallOptions`, each refused with what it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quail.config import did_you_mean
from quail.plan.logical import Operator

LABELLED = frozenset({Operator.CLASSIFY, Operator.PROBABILITIES})
CALIBRATIONS = ("content", "batch")
LABEL_SCORINGS = ("auto", "tree", "codes")

Refuse = Callable[[str, str | None], Exception]
"""Makes the located error for an option: (what is wrong, hint)."""


def option_value(name: str, value: Any, operator: Operator, refuse: Refuse) -> Any:
    """The value of one option.

    Args:
        name: the option, one of `READERS`.
        value: its constant, as Python has it.
        operator: of the call.
        refuse: makes the error to raise.

    Raises:
        BindError: by `refuse`, a value that cannot be used.
    """
    return READERS[name](name, value, operator, refuse)


def _share(name: str, value: Any, operator: Operator, refuse: Refuse) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise refuse(f"{name} is a number from 0 to 1, got {value!r}", None) from None
    if not 0 <= number <= 1:
        raise refuse(f"{name} is a number from 0 to 1, got {value}", None)
    if name == "threshold" and operator is not Operator.IF:
        raise refuse(f"{operator.value} has no threshold", "compare its result: AI.SCORE(…) > 0.7")
    return number


def _answers(name: str, value: Any, operator: Operator, refuse: Refuse) -> tuple[str, str]:
    if operator in LABELLED:
        raise refuse(f"{operator.value} has categories, not answers", None)
    words = value if isinstance(value, (list, tuple)) else []
    texts = [word.strip() for word in words if isinstance(word, str)]
    if len(words) != 2 or len(texts) != 2 or not all(texts) or texts[0].lower() == texts[1].lower():
        raise refuse(f"answers are two different words, got {value!r}", "['yes', 'no']; the first means TRUE")
    return texts[0], texts[1]


def _calibrate(name: str, value: Any, operator: Operator, refuse: Refuse) -> str | None:
    return None if value is None else _word(name, value, CALIBRATIONS, refuse)


def _label_scoring(name: str, value: Any, operator: Operator, refuse: Refuse) -> str:
    if operator not in LABELLED:
        raise refuse(f"{operator.value} has no labels to score", None)
    return _word(name, value, LABEL_SCORINGS, refuse)


def _word(name: str, value: Any, allowed: tuple[str, ...], refuse: Refuse) -> str:
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise refuse(f"{name} is one of {words}, got {value!r}", did_you_mean(str(value), allowed))
    return str(value)


def _text(name: str, value: Any, operator: Operator, refuse: Refuse) -> str:
    if not isinstance(value, str) or not value.strip():
        raise refuse(f"{name} is a text, got {value!r}", None)
    return value


def _examples(name: str, value: Any, operator: Operator, refuse: Refuse) -> tuple[tuple[str, str], ...]:
    entries = value if isinstance(value, (list, tuple)) else []
    pairs = [tuple(entry.values()) if isinstance(entry, dict) else entry for entry in entries]
    if not pairs or not all(map(_is_pair_of_texts, pairs)):
        raise refuse(
            f"{name} are (document, answer) pairs, got {value!r}", "[('A fine film.', 'positive'), …]"
        )
    return tuple((document, answer) for document, answer in pairs)


def _is_pair_of_texts(entry: Any) -> bool:
    is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2
    return is_pair and all(isinstance(part, str) and part for part in entry)


READERS: dict[str, Callable[[str, Any, Operator, Refuse], Any]] = {
    "selectivity": _share,
    "answers": _answers,
    "threshold": _share,
    "calibrate": _calibrate,
    "task_description": _text,
    "examples": _examples,
    "label_scoring": _label_scoring,
}
"""Every option with its reader."""
