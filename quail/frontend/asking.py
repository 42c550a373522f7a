"""What the builder asks: columns, prompts, categories and options, and the call that they become."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quail.errors import BindError, ConfigError
from quail.frontend import literals
from quail.frontend.composition import Block, Column

Categories = Sequence[str | tuple[str, str | None] | Mapping[str, str]] | Mapping[str, str | None] | str

_PLACEHOLDER = re.compile(r"\{(\d+)\}")


def col(name: str, table: str | None = None) -> Column:
    """A column for a prompt or a step.

    Args:
        name: its name, with its table's alias and a dot before it where several tables have one: `"r.body"`.
        table: the alias; then `name` is taken as it is, which names that hold dots may need.

    Raises:
        ConfigError: no name.
    """
    for each in (name,) if table is None else (name, table):
        literals.name(each)
    return Column(name, table)


@dataclass(frozen=True)
class Prompt:
    """A template and the columns that stand in its placeholders; made by `prompt`."""

    template: str
    columns: tuple[Column, ...]


def prompt(template: str, *columns: Column | str) -> Prompt:
    r"""A question about documents.

    Args:
        template: text with `{0}` to `{n-1}` where the columns stand.
        columns: the columns, as `col("r.body")` or by name.

    Raises:
        BindError: placeholders and columns do not match.

    >>> prompt("Is this praise? {0}", col("r.body")).template
    'Is this praise? {0}'
    """
    if not isinstance(template, str):
        raise BindError(f"a prompt's template is text, not {type(template).__name__}")
    literals.string(template)
    used = {int(number) for number in _PLACEHOLDER.findall(template)}
    if not used:
        raise BindError(
            f"the prompt {template!r} holds no document", hint="prompt('Is this praise? {0}', col('r.body'))"
        )
    if used != set(range(len(columns))):
        raise BindError(
            f"the prompt {template!r} has the placeholders {listed(used)} and {len(columns)} columns",
            hint="placeholders count from {0}, each with one column",
        )
    return Prompt(template, tuple(column_of(each) for each in columns))


def column_of(column: Column | str) -> Column:
    if isinstance(column, Column):
        return column
    if not isinstance(column, str):
        raise ConfigError(f"{column!r} is not a column", hint="col('r.body'), or a name")
    return col(column)


def prompt_of(asked: Prompt) -> Prompt:
    if not isinstance(asked, Prompt):
        raise ConfigError(
            f"a prompt is needed, got {asked!r}",
            hint="quail.prompt('Is this praise? {0}', quail.col('body'))",
        )
    return asked


def call_text(
    block: Block, function: str, asked: Prompt, options: Mapping[str, Any], middle: Sequence[str] = ()
) -> str:
    """A call, with its columns written with their tables where that is known."""
    columns = [block.column(each) for each in prompt_of(asked).columns]
    arguments = [f"PROMPT({', '.join([literals.string(asked.template), *columns])})", *middle]
    for name, option in options.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"{function} has no option {name!r}")
        arguments.append(f"{name} := {literals.value(option)}")
    return f"{function}({', '.join(arguments)})"


def categories_text(categories: Any) -> str:
    """Categories as SQL: a list of words or of pairs, or a table."""
    if isinstance(categories, str):
        return literals.name(categories)
    pairs = _pairs(categories)
    if all(description is None for _, description in pairs):
        return literals.value([label for label, _ in pairs])
    return "[" + ", ".join(f"({literals.string(a)}, {literals.value(b)})" for a, b in pairs) + "]"


def labels_of(categories: Categories) -> tuple[str, ...] | None:
    """The labels of categories; None where a table holds them."""
    return None if isinstance(categories, str) else tuple(label for label, _ in _pairs(categories))


def _pairs(categories: Any) -> list[tuple[str, str | None]]:
    if isinstance(categories, Mapping):
        found = list(categories.items())
    elif isinstance(categories, Iterable):
        found = [_pair(each) for each in categories]
    else:
        raise ConfigError(
            f"categories are a list of labels, got {categories!r}", hint="['positive', 'negative']"
        )
    for label, description in found:
        if not isinstance(label, str) or not isinstance(description, str | None):
            raise ConfigError(
                f"{(label, description)!r} is not a category", hint="a label, or (label, description)"
            )
    return found


def _pair(category: Any) -> tuple[Any, Any]:
    if isinstance(category, Mapping) and set(category) <= {"label", "description"}:
        return category.get("label"), category.get("description")
    if isinstance(category, tuple | list) and len(category) == 2:
        return category[0], category[1]
    return category, None


def listed(things: Iterable[Any]) -> str:
    return ", ".join(f"{{{each}}}" if isinstance(each, int) else repr(each) for each in sorted(things))
