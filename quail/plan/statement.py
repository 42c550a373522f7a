"""The bound statement: its AI calls, where each stands, and the query blocks around them.

A *block* is one SELECT with its FROM, WHERE and the rest. A *site* is one place in the text where a call
stands. The way from the outermost query down to a site is a tuple of *places*, one for each query that
encloses it:

    SELECT … FROM a WHERE EXISTS (SELECT 1 FROM b WHERE AI.IF(…))
    places: (ExpressionPlace(the WHERE of the first), ExpressionPlace(the WHERE of the second))
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quail.plan import syntax
from quail.plan.logical import AICall
from quail.plan.syntax import Node, Span


class Clause(enum.Enum):
    """The clause of a block in which an expression stands."""

    WHERE = "WHERE"
    ON = "ON"
    GROUP_BY = "GROUP BY"
    HAVING = "HAVING"
    QUALIFY = "QUALIFY"
    SELECT = "SELECT"
    DISTINCT_ON = "DISTINCT ON"
    ORDER_BY = "ORDER BY"
    VALUES = "VALUES"


class Stage(enum.Enum):
    """Over which rows of a block an expression is computed."""

    ROWS = "the rows of FROM and WHERE"
    RESULT = "the rows after GROUP BY, HAVING and QUALIFY"
    LIMITED = "the rows after ORDER BY and LIMIT"


FILTER_CLAUSES = frozenset({Clause.WHERE, Clause.ON, Clause.HAVING, Clause.QUALIFY})


@dataclass(frozen=True, eq=False)
class Block:
    """One SELECT.

    Attributes:
        index: position in the statement.
        node: its tree.
        from_table: its FROM, where inner joins whose condition holds a call have become cross joins.
        conjuncts: the conjuncts of WHERE and of those join conditions, in the order in which they are
            decided.
        table: name of the relation of FROM if that is a single named one, else empty.
        has_row_numbers: whether `rowid` numbers the rows of that relation.
        places: the way to it from the outermost query; empty for that itself.
        grouped_items: positions of select items by which the block is grouped.
        limited_items: positions of select items that only rows left after LIMIT need.
    """

    index: int
    node: Node
    from_table: Node
    conjuncts: tuple[Node, ...]
    table: str = ""
    has_row_numbers: bool = False
    places: tuple[Place, ...] = ()
    grouped_items: frozenset[int] = frozenset()
    limited_items: frozenset[int] = frozenset()

    @property
    def limit(self) -> Node | None:
        """The LIMIT modifier of the block."""
        return self.modifier("LIMIT_MODIFIER") or self.modifier("LIMIT_PERCENT_MODIFIER")

    def modifier(self, kind: str) -> Node | None:
        """The DISTINCT, ORDER or LIMIT modifier."""
        return next((m for m in self.node["modifiers"] if m["type"] == kind), None)


@dataclass(frozen=True)
class Step:
    """A short-circuiting node on the way down an expression, and which operand the way goes through."""

    node: Node
    kind: str
    operand: int


@dataclass(frozen=True, eq=False)
class ExpressionPlace:
    """An expression of a block: a call, or a subquery that holds calls.

    Attributes:
        block: index of the block.
        clause: the clause.
        stage: the rows over which the expression is computed.
        root: the whole expression of the clause (the conjunct, the select item, the join condition).
        steps: the nodes above it that decide whether it is needed, outermost first.
        in_window: whether it stands inside a window function.
        join: path in the block's FROM to the join whose condition holds it.
    """

    block: int
    clause: Clause
    stage: Stage
    root: Node
    steps: tuple[Step, ...] = ()
    in_window: bool = False
    join: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class FromPlace:
    """A subquery in FROM; `path` leads to it in the block's FROM."""

    block: int
    path: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TablePlace:
    """A CTE; `position` is its place among the CTEs of `node`."""

    node: Node
    position: int


@dataclass(frozen=True, eq=False)
class OperandPlace:
    """An operand of a set operation."""

    node: Node


Place: TypeAlias = ExpressionPlace | FromPlace | TablePlace | OperandPlace


@dataclass(frozen=True, eq=False)
class Site:
    """One place where a call stands.

    Attributes:
        index: position in the statement, in text order.
        call: index of the call in `BoundStatement.calls`.
        node: the call's node, which is a lookup by its arguments.
        arguments: the SQL text expressions whose values the call takes.
        places: the way to it from the outermost query; the last is the expression of its own block.
        span: byte range of the call in the statement.
        is_conjunct: whether the call alone, or its negation, is a conjunct of WHERE.
    """

    index: int
    call: int
    node: Node
    arguments: tuple[Node, ...]
    places: tuple[Place, ...]
    span: Span
    is_conjunct: bool

    @property
    def place(self) -> ExpressionPlace:
        """The place in its own block."""
        place = self.places[-1]
        assert isinstance(place, ExpressionPlace)
        return place


@dataclass(frozen=True)
class Source:
    """A relation that a run copies once, so that all its queries read one state.

    Attributes:
        name: name of the temporary copy; equal to the view's own name where it is a view.
        sql: the query that reads it.
        is_renamed: whether the statement reads it under that name only, not under its own.
        is_pinned: whether it would be another each time it is read.
    """

    name: str
    sql: str
    is_renamed: bool = False
    is_pinned: bool = False


@dataclass(frozen=True)
class Edit:
    """A byte range of the statement and what stands there in the final statement."""

    span: Span
    text: str


@dataclass(frozen=True, eq=False)
class BoundStatement:
    """A statement whose AI calls are understood.

    Attributes:
        text: the statement.
        calls: the distinct calls: equal questions share one, wherever they stand.
        sites: every place where a call stands, in text order.
        blocks: the query blocks.
        query: tree of the SELECT; None for a statement without one, which DuckDB runs as it stands.
        query_span: byte range of the SELECT in the text (a CREATE TABLE AS has more around it).
        edits: what the final statement has in other places: lookups, names of columns, copies of sources.
        sources: relations to copy once per run.
        parameters: values of the parameters by name (`"1"` for the first `?`).
        nonce: what makes this statement's names for lookups, columns and copies unlike any of the user's.
        warnings: what looks unintended.
        column_names: names of the result's columns where the result is read from the tree and not from the
            text, because parts of it were pinned; else None.
    """

    text: str
    calls: tuple[AICall, ...] = ()
    sites: tuple[Site, ...] = ()
    blocks: tuple[Block, ...] = ()
    query: Node | None = None
    query_span: Span = (0, 0)
    edits: tuple[Edit, ...] = ()
    sources: tuple[Source, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    nonce: str = ""
    warnings: tuple[str, ...] = ()
    column_names: tuple[str, ...] | None = None

    @property
    def final_sql(self) -> str:
        """The statement as DuckDB runs it once the questions are answered."""
        length = len(self.text.encode())
        if self.column_names is None or self.query is None:
            return self.edited_text(0, length)
        start, stop = self.query_span
        return f"{self.edited_text(0, start)} {syntax.to_sql(self.query)} {self.edited_text(stop, length)}"

    def call_of(self, site: Site) -> AICall:
        """The call that stands at a site."""
        return self.calls[site.call]

    def edited_text(self, start: int, stop: int) -> str:
        """A byte range of the statement for DuckDB: lookups in the calls' places, the rest verbatim."""
        encoded = self.text.encode()
        pieces, position = [], start
        for edit in sorted(self.edits, key=lambda edit: (edit.span[0], -edit.span[1])):
            if edit.span[0] < position or edit.span[1] > stop:
                continue
            pieces += [encoded[position : edit.span[0]].decode(), edit.text]
            position = edit.span[1]
        return "".join([*pieces, encoded[position:stop].decode()])


def holds_call(node: Any) -> bool:
    """Whether a tree holds an AI call."""
    return any("quail_call" in below for below in syntax.walk(node))


def calls_in(node: Any) -> Iterator[int]:
    """Indices of the calls of a tree."""
    return (below["quail_call"] for below in syntax.walk(node) if "quail_call" in below)
