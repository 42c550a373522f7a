"""One SELECT in the making: what the builder adds to it, and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from quail.errors import ConfigError
from quail.frontend import literals


@dataclass(frozen=True)
class Column:
    """A column, by the name that the user gave.

    Attributes:
        name: its name, with its table's alias and a dot before it or not.
        table: the alias; then `name` is taken as it is, dots and all.
    """

    name: str
    table: str | None = None


@dataclass(frozen=True, eq=False)
class Applied:
    """A relation that a Python function makes of another.

    Attributes:
        block: what stands before the function.
        function: from a record batch to a record batch or another table.
        batch_rows: most rows of a batch.
        shown: its name in a text that is only shown.
    """

    block: Block
    function: Callable[[Any], Any]
    batch_rows: int
    shown: str


@dataclass(frozen=True)
class Relation:
    """An item of FROM.

    Attributes:
        source: a table's quoted name or a query in parentheses; a SELECT; or a function's result.
        alias: its name in this SELECT.
        join: how it is joined to those before it; empty for the first.
        on: condition of the join.
    """

    source: str | Block | Applied
    alias: str
    join: str = ""
    on: str = ""


@dataclass(frozen=True)
class Computed:
    """A call whose answers are a column.

    Attributes:
        name: of the column.
        text: the call.
        labels: what it can answer, None where that is not a list of words.
    """

    name: str
    text: str
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Condition:
    """A conjunct of WHERE.

    Attributes:
        text: the conjunct.
        is_qualified: whether its columns are written with their tables.
    """

    text: str
    is_qualified: bool


Names: TypeAlias = Mapping[Applied, str]


@dataclass(frozen=True)
class Block:
    """A SELECT.

    Attributes:
        relations: FROM.
        conditions: WHERE.
        computed: calls that are columns beside those of the relations.
        items: the select list, (text, name) each; None for all columns and the computed ones.
        num_groups: by how many of the first items it is grouped; None for no GROUP BY.
        orders: ORDER BY.
        limit: LIMIT and OFFSET.
    """

    relations: tuple[Relation, ...]
    conditions: tuple[Condition, ...] = ()
    computed: tuple[Computed, ...] = ()
    items: tuple[tuple[str, str], ...] | None = None
    num_groups: int | None = None
    orders: tuple[str, ...] = ()
    limit: str = ""

    @property
    def alias(self) -> str:
        """The name of this SELECT as an item of another's FROM."""
        return self.relations[0].alias if len(self.relations) == 1 else "docs"

    @property
    def is_bare(self) -> bool:
        """Whether it is its single relation and nothing more."""
        return self == Block(self.relations) and len(self.relations) == 1

    @property
    def is_open(self) -> bool:
        """Whether conditions and columns can still be added to it without changing what it means."""
        return self.items is None and not self.limit

    def opened(self) -> Block:
        """This SELECT, or one around it, to which conditions and columns can be added."""
        return self if self.is_open else self.wrapped()

    def wrapped(self, alias: str | None = None) -> Block:
        """A SELECT around this one."""
        return Block((Relation(self, alias or self.alias),))

    def named(self, alias: str) -> Block:
        """The same rows under another name."""
        if self.is_bare:
            return replace(self, relations=(replace(self.relations[0], alias=alias),))
        return self.wrapped(alias)

    def with_condition(self, text: str, *, is_qualified: bool) -> Block:
        """With one more conjunct."""
        return replace(self, conditions=(*self.conditions, Condition(text, is_qualified)))

    def joined(self, other: Block, join: str, on: str) -> Block:
        """With another's relation in FROM.

        Conditions whose columns have no table are kept away from the other's columns.

        Raises:
            ConfigError: two relations of one name, or a join without a name.
        """
        mine = self.joinable()
        if len(other.relations) > 1 and other.is_open:
            raise ConfigError(
                "the other side of a join is itself a join without a name", hint="other.alias('pairs')"
            )
        keeps = join != "LEFT JOIN" and other.is_open and not (other.computed or other.orders)
        theirs = other.joinable() if keeps else (other if other.is_bare else other.wrapped())
        taken = {relation.alias.casefold() for relation in mine.relations}
        if theirs.alias.casefold() in taken:
            raise ConfigError(
                f"both sides of the join are called {theirs.alias!r}", hint="name one: .alias('other')"
            )
        added = replace(theirs.relations[0], join=join if on or join != "JOIN" else "CROSS JOIN", on=on)
        return replace(
            mine,
            relations=(*mine.relations, added),
            conditions=(*mine.conditions, *theirs.conditions),
        )

    def joinable(self) -> Block:
        """This SELECT without conditions that other columns could make ambiguous."""
        block = self.opened()
        if len(block.relations) > 1 or all(condition.is_qualified for condition in block.conditions):
            return block
        if block.computed or block.orders:
            return block.wrapped()
        inner = replace(block, conditions=tuple(c for c in block.conditions if not c.is_qualified))
        outer = tuple(c for c in block.conditions if c.is_qualified)
        return replace(inner.wrapped(), conditions=outer)

    def selected(self, items: Sequence[tuple[str, str]]) -> Block:
        """With a select list; an order by a computed column that is not in it is by its call."""
        orders = list(self.orders)
        for call in self.computed:
            if (call.text, call.name) in items:
                continue
            for i, order in enumerate(orders):
                name = literals.name(call.name)
                if order in (name, f"{name} DESC"):
                    orders[i] = call.text + order[len(name) :]
        return replace(self, items=tuple(items), computed=(), orders=tuple(orders))

    def column(self, column: Column) -> str:
        """A column as SQL.

        Raises:
            ConfigError: a table that is not here.
        """
        if column.table is not None:
            return f"{literals.name(self._alias(column.table))}.{literals.name(column.name)}"
        for relation in sorted(self.relations, key=lambda each: -len(each.alias)):
            head = f"{relation.alias}.".casefold()
            if column.name.casefold().startswith(head) and len(column.name) > len(head):
                return (
                    f"{literals.name(relation.alias)}.{literals.name(column.name[len(relation.alias) + 1 :])}"
                )
        if len(self.relations) == 1:
            return f"{literals.name(self.relations[0].alias)}.{literals.name(column.name)}"
        return literals.name(column.name)

    def call_of(self, column: Column) -> Computed | None:
        """The call whose answers a column holds, None for other columns."""
        if column.table is not None:
            return None
        return next((c for c in self.computed if c.name.casefold() == column.name.casefold()), None)

    def has_output(self, column: Column) -> bool:
        """Whether the select list gives a column that name."""
        names = [name for _, name in self.items or ()] + [each.name for each in self.computed]
        return column.table is None and column.name.casefold() in [each.casefold() for each in names]

    def mentions_computed(self, text: str) -> bool:
        """Whether a piece of SQL may read a computed column."""
        return bool(literals.words(text) & {each.name.lower() for each in self.computed})

    def applied(self) -> list[Applied]:
        """Results of functions that it reads itself, not through another function."""
        found: list[Applied] = []
        for relation in self.relations:
            if isinstance(relation.source, Applied):
                found.append(relation.source)
            elif isinstance(relation.source, Block):
                found += relation.source.applied()
        return found

    def sql(self, names: Names) -> str:
        """The text.

        Args:
            names: the tables that hold the results of functions.
        """
        lines = [f"SELECT {self._select_list()}", *self._from(names)]
        for i, condition in enumerate(self.conditions):
            lines.append(f"{'  AND' if i else 'WHERE'} {condition.text}")
        if self.num_groups:
            lines.append("GROUP BY " + ", ".join(str(i + 1) for i in range(self.num_groups)))
        if self.orders:
            lines.append("ORDER BY " + ", ".join(self.orders))
        return "\n".join([*lines, *([self.limit] if self.limit else [])])

    def _select_list(self) -> str:
        if self.items is None:
            calls = [f"{each.text} AS {literals.name(each.name)}" for each in self.computed]
            return ",\n       ".join(["*", *calls])
        return ",\n       ".join(
            text if not name else f"{text} AS {literals.name(name)}" for text, name in self.items
        )

    def _from(self, names: Names) -> list[str]:
        lines = []
        for relation in self.relations:
            source = relation.source
            if isinstance(source, Applied):
                text = literals.name(names.get(source, source.shown))
            elif isinstance(source, Block):
                text = f"(\n{source.sql(names)}\n)"  # not indented: a text literal may run over lines
            else:
                text = source
            alias = literals.name(relation.alias)
            item = text if text == alias else f"{text} AS {alias}"
            lines.append(f"{relation.join or 'FROM'} {item}" + (f" ON {relation.on}" if relation.on else ""))
        return lines

    def _alias(self, table: str) -> str:
        for relation in self.relations:
            if relation.alias.casefold() == table.casefold():
                return relation.alias
        known = ", ".join(repr(relation.alias) for relation in self.relations)
        raise ConfigError(f"there is no table {table!r} here", hint=f"here is {known}")
