"""The text that a model's chat template puts around one user message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from quail.errors import ModelError

if TYPE_CHECKING:
    import jinja2

_SENTINEL = "QuailUserMessage7f3a9c"
_FIXED_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class ChatPieces:
    """What stands before and after the user's text in a chat prompt.

    Attributes:
        opener: everything before, without the BOS token that the tokenizer adds by itself.
        closer: everything after, with the beginning of the model's answer.
    """

    opener: str
    closer: str


def chat_pieces(template: str, *, bos_token: str | None, eos_token: str | None, where: str) -> ChatPieces:
    """Render a chat template with one user message and cut it at that message.

    The template runs in a sandbox and within a budget of steps. Dates are fixed, so that the same question
    always makes the same prompt, and models with a thinking mode are asked to answer at once.

    Raises:
        ModelError: the template fails, or does not show the user's text exactly once.
    """
    variables = {
        "messages": [{"role": "user", "content": _SENTINEL}],
        "add_generation_prompt": True,
        "enable_thinking": False,
        "tools": None,
        "documents": None,
        "bos_token": bos_token or "",
        "eos_token": eos_token or "",
    }
    from quail.models.template_sandbox import LONGEST_TEMPLATE

    if len(template) > LONGEST_TEMPLATE:
        raise ModelError(
            f"{where}: the chat template has {len(template)} characters; at most {LONGEST_TEMPLATE} are read"
        )
    try:
        text = _environment().from_string(template).render(variables)
    except Exception as error:  # the template is a program of its own
        raise ModelError(f"{where}: the chat template fails: {error}") from error
    pieces = text.split(_SENTINEL)
    if len(pieces) != 2:
        raise ModelError(
            f"{where}: the chat template shows the user's text {len(pieces) - 1} times, not once"
        )
    return ChatPieces(pieces[0], pieces[1])


def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.nodes

    from quail.models.template_sandbox import BoundedEnvironment

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks the model's own words for training; it shows what it holds."""

        tags = {"generation"}

        def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
            next(parser.stream)
            body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = environment.bounded("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda _format: _FIXED_DATE
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
