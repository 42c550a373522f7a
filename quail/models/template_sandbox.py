"""Jinja for templates that come with a model: no access to Python, and a bound on steps and memory.

Jinja's own sandbox keeps a template away from Python's insides, but not from looping for hours or from
doubling a text forty times. Here a template spends from a budget: for each round of a loop, each call, and
each character or element that it makes; growth is paid for before it happens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BUDGET = 1 << 18
"""Steps and characters; templates in use spend a few thousand on one message."""

LONGEST_TEMPLATE = 1 << 18
_LARGEST_ARGUMENT = 64
"""Widths, and characters of the texts that a filter puts in."""

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "indent"),
    *("int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title"),
    *("trim", "unique", "upper"),
)
_TEXT_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower"),
        *("isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "swapcase", "title", "upper"),
    )
)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one rendering.

    Raises:
        jinja2.sandbox.SecurityError: in a template that spends more than `BUDGET`, or does what is not
            allowed.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self.weighed, **options)
        self._left = BUDGET
        self.filters = {name: self.bounded(name, self.filters[name]) for name in _FILTERS}
        del self.globals["lipsum"]

    def spend(self, amount: int) -> str:
        """Takes from the budget."""
        self._left -= amount
        if self._left < 0:
            raise SecurityError(f"it takes more than {BUDGET} steps and characters")
        return ""

    def weighed(self, value: Any) -> Any:
        """The value, once each of its characters and elements is paid for, however deep."""
        self.spend(1)
        if isinstance(value, str | bytes):
            self.spend(len(value))
        elif isinstance(value, int):
            self.spend(value.bit_length() // 8)
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                self.weighed(key)
                self.weighed(entry)
        elif isinstance(value, list | tuple | set | frozenset):
            for entry in value:
                self.weighed(entry)
        return value

    def joined(self, *parts: Any) -> str:
        """What `~` makes."""
        return "".join(str(self.weighed(part)) for part in parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("it uses powers")
        if operator == "%" and isinstance(left, str) and re.search(r"\d{3}|\*", left):
            raise SecurityError("it pads texts")
        self.weighed((left, right))
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int) and hasattr(one, "__len__"):
                    self.spend(len(one) * max(0, other))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls from a template come here; the names of the first parameters are Jinja's."""
        __self.weighed((args, kwargs))
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            if __obj.__name__ == "replace" and len(args) > 1:
                __self.spend(text.count(str(args[0])) * len(str(args[1])))
            elif __obj.__name__ == "join" and args:
                args = (__self.weighed([*args[0]]),)
                __self.spend(len(text) * len(args[0]))
            else:
                __self.spend(len(text))
        return __self.weighed(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No `format` of texts, whose widths are not paid for; `is_safe_attribute` then refuses it."""

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = cast(nodes.Template, _Meter().visit(source))
        return super()._generate(metered, *args, **kwargs)

    def bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for its arguments and its result."""

        @functools.wraps(function)
        def paying(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in (*args, *kwargs.values()) if not isinstance(each, _OF_JINJA)]
            self.weighed(given)
            if name not in ("d", "default") and any(_extent(each) > _LARGEST_ARGUMENT for each in given[1:]):
                raise SecurityError(f"an argument of its filter {name} is larger than {_LARGEST_ARGUMENT}")
            return self.weighed(function(*args, **kwargs))

        return paying


_OF_JINJA = (Context, jinja2.Environment, nodes.EvalContext)
"""What some filters are given besides the template's own values."""


def _extent(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


class _Meter(NodeTransformer):
    """Puts payment into loops, macros, concatenations and literals that hold other values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._paid(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._paid(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._paid(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("joined", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weighed(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weighed(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weighed(node) if node.ctx == "load" else node

    def _paid(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        size = 1 + sum(len(piece.data) for piece in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("spend", [nodes.Const(size)])))
        return node

    def _weighed(self, node: nodes.Expr) -> nodes.Node:
        is_constant = all(
            isinstance(below, nodes.Literal | nodes.Pair) for below in node.find_all(nodes.Node)
        )
        self.generic_visit(node)
        return node if is_constant else _environment_call("weighed", [node])


def _environment_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
