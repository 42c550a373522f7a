"""One AI call: from its node in the tree to the question it asks and the texts it asks about."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quail.errors import BindError, UnsupportedError
from quail.frontend.options import LABELLED, READERS, option_value
from quail.plan import syntax
from quail.plan.logical import CallOptions, Category, Operator, Prompt
from quail.plan.syntax import Node

_DOTTED = {
    "if": Operator.IF,
    "score": Operator.SCORE,
    "classify": Operator.CLASSIFY,
    "probabilities": Operator.PROBABILITIES,
}
_PLAIN = {f"ai_{name}": operator for name, operator in _DOTTED.items()} | {"ai_filter": Operator.IF}
_OPTIONS = (*READERS, "anchor")
_PLACEHOLDER = re.compile(r"\{(\d+)\}")
_MAX_CATEGORIES = 255

MIXED = object()
"""The relation of an expression that reads several relations."""


@dataclass(frozen=True)
class Template:
    """A prompt as written: texts and, for each placeholder, the index of its expression."""

    segments: tuple[str | int, ...]
    expressions: tuple[Node, ...]


@dataclass(frozen=True)
class Question:
    """A call without its place: what is asked, and about which SQL text expressions."""

    operator: Operator
    prompt: Prompt
    categories: tuple[Category, ...]
    options: CallOptions
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class CallReader:
    """Reads calls of one statement.

    Attributes:
        fail: makes the located error for a node: `fail(message, node, hint)`.
        refuse: the same for what is understood but not served.
        warn: takes a warning and the node that it is about.
        constant: value of an expression that reads no row.
        is_constant: whether an expression reads no row.
        table_rows: rows of the table that a name means, None where it means none.
        relation: the relation that an expression reads; None for none, MIXED for several. Relations compare
            as they follow each other in the statement.
        relation_name: its alias or name.
        known_functions: names of DuckDB's scalar functions, which may be called on a column named `ai`.
    """

    fail: Callable[[str, Node, str | None], BindError]
    refuse: Callable[[str, Node, str | None], UnsupportedError]
    warn: Callable[[str, Node], None]
    constant: Callable[[Node], Any]
    is_constant: Callable[[Node], bool]
    table_rows: Callable[[Node], list[tuple[Any, ...]] | None]
    relation: Callable[[Node], object | None]
    relation_name: Callable[[object], str]
    known_functions: frozenset[str]

    def operator_of(self, node: Node) -> Operator | None:
        """The operator that a function node calls, None where it is not an AI call.

        Raises:
            BindError: a function of AI that does not exist.
        """
        if node.get("class") != "FUNCTION":
            return None
        schema, name = node["schema"].lower(), node["function_name"].lower()
        if node["catalog"] or schema not in ("", "ai"):
            return None
        operator = (_DOTTED if schema else _PLAIN).get(name)
        if operator is None and (schema or name.startswith("ai_")) and name not in self.known_functions:
            written = f"AI.{name.upper()}" if schema else name.upper()
            known = [o.value for o in Operator]
            close = difflib.get_close_matches(f"AI.{name.removeprefix('ai_').upper()}", known, 1, 0.4)
            hint = f"did you mean {close[0]}?" if close else f"Quail has {', '.join(known)}"
            raise self.fail(f"there is no AI function {written}", node, hint)
        return operator

    def read(self, node: Node, operator: Operator) -> Question:
        """What the call asks.

        Raises:
            BindError: a prompt, category or option that cannot be used.
        """
        if node["distinct"] or node["filter"] or node["order_bys"]["orders"]:
            raise self.fail(f"{operator.value} takes no DISTINCT, FILTER or ORDER BY", node, None)
        positional = [a["expression"] for a in node["arguments"] if not a["name"]]
        named: dict[str, Node] = {}
        for argument in node["arguments"]:
            name = argument["name"].lower()
            if name in named:
                raise self.fail(f"option {name} stands twice", argument["expression"], None)
            if name:
                named[name] = argument["expression"]
        num_needed = 2 if operator in LABELLED else 1
        if not num_needed <= len(positional) <= num_needed + 1:
            what = "an input and categories" if operator in LABELLED else "a prompt"
            raise self.fail(f"{operator.value} takes {what}, got {len(positional)} arguments", node, None)
        if len(positional) > num_needed:
            named = {**self._struct_fields(positional[-1], operator), **named}
        prompt, arguments, sides = self._prompt(positional[0], operator)
        categories = self._categories(positional[1]) if operator in LABELLED else ()
        anchor = named.pop("anchor", None)
        options = self._options(named, operator)
        if anchor is not None:
            options = replace(options, anchor=self._anchor(anchor, sides))
        return Question(operator, prompt, categories, options, arguments)

    # The prompt

    def _prompt(self, node: Node, operator: Operator) -> tuple[Prompt, tuple[Node, ...], tuple[object, ...]]:
        """The prompt, its arguments, and the relation of each where there are two."""
        template = self._template(node)
        for segment in template.segments:
            if isinstance(segment, str) and "\\n" in segment:
                self.warn(
                    "the prompt holds a backslash and an n, not a line break: write E'…\\n…' or chr(10)", node
                )
                break
        if not any(isinstance(segment, int) for segment in template.segments):
            raise self.fail(
                f"the prompt of {operator.value} holds no document",
                node,
                "put one in: PROMPT('… {0}', r.body), ('… ', r.body) or '… ' || r.body",
            )
        relations = [self.relation(expression) for expression in template.expressions]
        distinct = list(dict.fromkeys(relation for relation in relations if relation is not None))
        if len(distinct) < 2 or MIXED in distinct:
            return *self._single(template, node), ()
        if len(distinct) > 2:
            raise self.refuse(
                f"a prompt over {len(distinct)} relations", node, "a prompt reads one or two relations"
            )
        sides = [0 if relation is None else distinct.index(relation) for relation in relations]
        return *self._pair(template, sides, node), tuple(distinct)

    def _template(self, node: Node) -> Template:
        if node["class"] == "FUNCTION" and not node["schema"]:
            if node["function_name"] == "prompt":
                return self._placeholders(node)
            if node["function_name"] == "row":
                return self._pieces([a["expression"] for a in node["arguments"]])
            if node["function_name"] == "||":
                return self._pieces(_operands(node))
        return self._pieces([node])

    def _placeholders(self, node: Node) -> Template:
        arguments = [a["expression"] for a in node["arguments"]]
        if not arguments or not self.is_constant(arguments[0]):
            raise self.fail("the first argument of PROMPT is its text", node, "PROMPT('… {0}', r.body)")
        text = self.constant(arguments[0])
        if not isinstance(text, str):
            raise self.fail(f"the text of PROMPT is {text!r}", arguments[0], "it must be a string")
        expressions = arguments[1:]
        pieces = _PLACEHOLDER.split(text)
        segments = [int(p) if i % 2 else p for i, p in enumerate(pieces) if i % 2 or p]
        used = {segment for segment in segments if isinstance(segment, int)}
        for index in sorted(used):
            if index >= len(expressions):
                raise self.fail(
                    f"placeholder {{{index}}} has no argument: PROMPT got {len(expressions)} after its text",
                    node,
                    "placeholders count from {0}",
                )
        for index, expression in enumerate(expressions):
            if index not in used:
                raise self.fail(
                    f"argument {{{index}}} of PROMPT does not stand in its text", expression, None
                )
        return Template(tuple(segments), tuple(expressions))

    def _pieces(self, nodes: Sequence[Node]) -> Template:
        segments: list[str | int] = []
        expressions: list[Node] = []
        for node in nodes:
            if self.is_constant(node):
                value = self.constant(node)
                if value is None:
                    raise self.fail("a piece of the prompt is NULL", node, None)
                text = value if isinstance(value, str) else str(value)
                if segments and isinstance(segments[-1], str):
                    segments[-1] += text
                elif text:
                    segments.append(text)
            else:
                segments.append(len(expressions))
                expressions.append(node)
        return Template(tuple(segments), tuple(expressions))

    def _single(self, template: Template, node: Node) -> tuple[Prompt, tuple[Node, ...]]:
        places = [i for i, segment in enumerate(template.segments) if isinstance(segment, int)]
        indices = [segment for segment in template.segments if isinstance(segment, int)]
        repeated = next((index for index in indices if indices.count(index) > 1), None)
        if repeated is not None:
            raise self.fail(
                f"placeholder {{{repeated}}} stands twice in a prompt over one relation",
                node,
                "the document is everything from the first to the last placeholder; write each once",
            )
        first, last = places[0], places[-1]
        before = "".join(str(segment) for segment in template.segments[:first])
        after = "".join(str(segment) for segment in template.segments[last + 1 :])
        document = self._concatenated(template, template.segments[first : last + 1])
        return Prompt((before, 0, after)), (document,)

    def _pair(self, template: Template, sides: Sequence[int], node: Node) -> tuple[Prompt, tuple[Node, ...]]:
        """Placeholders of one side that stand together are one text; a repeated side repeats it."""
        parts: list[str | int] = []
        documents: dict[int, tuple[str | int, ...]] = {}
        segments = template.segments
        position = 0
        while position < len(segments):
            segment = segments[position]
            if isinstance(segment, str):
                parts.append(segment)
                position += 1
                continue
            side, stop = sides[segment], position + 1
            for later in range(position + 1, len(segments)):
                following = segments[later]
                if isinstance(following, int):
                    if sides[following] != side or following == segment:
                        break
                    stop = later + 1
            run = segments[position:stop]
            if documents.setdefault(side, run) != run:
                raise self.refuse(
                    "a prompt over two relations with two different texts of one of them",
                    node,
                    "put the columns of one relation next to each other, or concatenate them",
                )
            parts.append(side)
            position = stop
        return Prompt(tuple(parts)), tuple(
            self._concatenated(template, documents[side]) for side in sorted(documents)
        )

    @staticmethod
    def _concatenated(template: Template, segments: Sequence[str | int]) -> Node:
        if len(segments) == 1 and isinstance(segments[0], int):
            return template.expressions[segments[0]]
        document: Node | None = None
        for segment in segments:
            piece = syntax.string(segment) if isinstance(segment, str) else template.expressions[segment]
            piece = piece if isinstance(segment, str) else syntax.expression("CAST(x AS VARCHAR)", x=piece)
            document = piece if document is None else syntax.expression("x || y", x=document, y=piece)
        assert document is not None
        return document

    # Categories

    def _categories(self, node: Node) -> tuple[Category, ...]:
        value: Any = None
        if node["class"] == "COLUMN_REF":
            value = self.table_rows(node)
        if value is None:
            if not self.is_constant(node):
                hint = "['positive', 'negative'], or the name of a table with one or two columns"
                raise self.fail("categories are a list of constants", node, hint)
            value = self.constant(node)
        if not isinstance(value, list):
            raise self.fail(f"categories are a list, got {value!r}", node, "['positive', 'negative']")
        categories = tuple(self._category(entry, node) for entry in value)
        if not 2 <= len(categories) <= _MAX_CATEGORIES:
            raise self.fail(
                f"2 to {_MAX_CATEGORIES} categories are needed, got {len(categories)}", node, None
            )
        seen: dict[str, str] = {}
        for category in categories:
            other = seen.get(category.label.casefold())
            if other is not None:
                raise self.fail(f"categories {other!r} and {category.label!r} are the same", node, None)
            seen[category.label.casefold()] = category.label
        return categories

    def _category(self, entry: object, node: Node) -> Category:
        if isinstance(entry, dict):
            values = list(entry.values())
            fields = {str(key).lower() for key in entry}
            if fields == {"label", "description"}:
                values = [entry[key] for key in sorted(entry, key=lambda key: str(key).lower() != "label")]
        elif isinstance(entry, tuple):
            values = list(entry)
        else:
            values = [entry]
        if (
            not 1 <= len(values) <= 2
            or not all(isinstance(v, str) for v in values[:1])
            or not values[0].strip()
        ):
            raise self.fail(f"{entry!r} is not a category", node, "a label, or (label, description)")
        description = values[1] if len(values) == 2 else None
        return Category(str(values[0]), None if description is None else str(description))

    # Options

    def _struct_fields(self, node: Node, operator: Operator) -> dict[str, Node]:
        if node["class"] == "FUNCTION" and node["function_name"] == "struct_pack":
            return {a["name"].lower(): a["expression"] for a in node["arguments"]}
        raise self.fail(
            f"the last argument of {operator.value} is its options",
            node,
            "{'selectivity': 0.2} or selectivity := 0.2",
        )

    def _anchor(self, node: Node, sides: Sequence[Any]) -> int:
        """The argument that the option `anchor` means: by the name of its relation, or by the side."""
        if not sides:
            raise self.fail("anchor needs a prompt over two relations", node, None)
        names = [self.relation_name(side) for side in sides]
        value = self.constant(node) if self.is_constant(node) else None
        word = value.casefold() if isinstance(value, str) else ""
        named = [place for place, name in enumerate(names) if name.casefold() == word]
        if len(named) == 1:
            return named[0]
        if word in ("left", "right"):
            left = 0 if sides[0] < sides[1] else 1
            return left if word == "left" else 1 - left
        raise self.fail(
            f"anchor is the relation whose text is computed once, got {value!r}",
            node,
            f"'left', 'right', {names[0]!r} or {names[1]!r}",
        )

    def _options(self, named: dict[str, Node], operator: Operator) -> CallOptions:
        values: dict[str, Any] = {}
        for name, expression in named.items():
            if name not in READERS:
                close = difflib.get_close_matches(name, _OPTIONS, 1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_OPTIONS)}"
                raise self.fail(f"{operator.value} has no option {name}", expression, hint)
            if not self.is_constant(expression):
                raise self.fail(f"option {name} must be a constant", expression, None)

            def refuse(message: str, hint: str | None, node: Node = expression) -> Exception:
                return self.fail(message, node, hint)

            values[name] = option_value(name, self.constant(expression), operator, refuse)
        return CallOptions(**values)


def _operands(node: Node) -> list[Node]:
    """The operands of a tree of `||`, left to right."""
    operands = []
    for argument in node["arguments"]:
        expression = argument["expression"]
        if (
            expression["class"] == "FUNCTION"
            and expression["function_name"] == "||"
            and not expression["schema"]
        ):
            operands += _operands(expression)
        else:
            operands.append(expression)
    return operands
