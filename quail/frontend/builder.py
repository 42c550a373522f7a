"""The Python builder: a query a step at a time, with the reach of SQL.

A `Docs` is immutable; each step gives another. It composes SQL and hands it to the session, so that there is
one binder and one plan. Each step is checked when it is made, nothing runs before `run`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from quail.config import check_choice, did_you_mean
from quail.errors import BindError, ConfigError, QueryTimeout, SourceError
from quail.frontend import literals
from quail.frontend.applying import apply_function, name_of
from quail.frontend.asking import (
    Categories,
    Prompt,
    call_text,
    categories_text,
    column_of,
    labels_of,
    listed,
    prompt_of,
)
from quail.frontend.composition import Applied, Block, Column, Computed, Relation
from quail.frontend.sql import bind_sql
from quail.frontend.statements import query_span
from quail.result import QueryResult, Report

if TYPE_CHECKING:
    from quail.sources.catalog import Catalog

Params = literals.Parameters

AI_JOINS = ("inner", "left", "exists", "anti")
JOINS = ("inner", "left", "cross", "semi", "anti")
_QUERY = re.compile(r"\s*(select|with|from|values|\()", re.IGNORECASE)


class Runs(Protocol):
    """What the builder needs of a session."""

    def sql(self, text: str, params: Any = None) -> Any:
        """Binds a statement."""

    def _open(self) -> Catalog: ...


@dataclass(frozen=True, eq=False)
class Docs:
    """Rows to come: a table, and what was added to it. Made by `Session.docs`.

    Every step gives a new `Docs` and leaves this one as it is.
    """

    _session: Runs
    _block: Block

    @classmethod
    def of(cls, session: Runs, source: object, params: Params = None) -> Docs:
        """Begins with a table's name, or a query (text, or what `Session.sql` gives).

        Raises:
            SourceError: no such table.
            BindError: a query that cannot be understood.
        """
        bound = getattr(source, "_bound", None)
        if bound is not None:
            given = {name.split("_p_", 1)[-1]: each for name, each in bound.parameters.items()}
            return cls(session, _of_query(bound.text, given))._checked()
        if not isinstance(source, str) or not source.strip():
            raise ConfigError(
                f"docs takes the name of a table or a query, got {source!r}",
                hint="register data first: session.register('reviews', frame)",
            )
        block = _of_table(session, source)
        if block is None and _QUERY.match(source):
            return cls(session, _of_query(source, params))._checked()
        if block is None:
            known = list(session._open().tables)
            hint = did_you_mean(source, known) or f"registered: {', '.join(known) or 'none'}"
            raise SourceError(f"there is no table {source!r}", hint=hint)
        if params is not None:
            raise ConfigError("a table takes no params", hint="pass a query to docs, or params to where")
        return cls(session, block)

    def alias(self, name: str) -> Docs:
        """Names these rows, so that columns can be written `name.column`."""
        literals.name(name)
        return self._with(self._block.named(name))

    # Rows

    def where(self, sql: str, params: Params = None) -> Docs:
        """Keeps the rows for which an SQL condition is true.

        Args:
            sql: the condition; it may hold AI calls.
            params: values of its `?` (a sequence) or `$name` (a mapping); they become literals.
        """
        text = literals.expression(sql, params, what="where")
        return self._with(self._block_of_texts([text]).with_condition(text, is_qualified=False))

    def ai_if(self, prompt: Prompt, **options: Any) -> Docs:
        """Keeps the rows for which the answer is TRUE.

        Args:
            prompt: the question.
            options: of AI.IF, such as `answers=['positive', 'negative']` or `selectivity=0.1`.
        """
        block = self._block_for(prompt)
        return self._with(block.with_condition(call_text(block, "AI.IF", prompt, options), is_qualified=True))

    def label_in(self, labels: Iterable[str], name: str | None = None) -> Docs:
        """Keeps the rows whose label is one of a few.

        Args:
            labels: those to keep.
            name: the column of labels; None takes that of the last `ai_classify`.
        """
        wanted = [labels] if isinstance(labels, str) else list(labels)
        if not wanted:
            raise ConfigError("label_in takes at least one label")
        classified = [each for each in self._block.computed if each.text.startswith("AI.CLASSIFY(")]
        if name is None and not classified:
            raise ConfigError(
                "label_in follows ai_classify", hint="or name a column: label_in(['a'], name='b')"
            )
        column = Column(classified[-1].name) if name is None else column_of(name)
        block = self._block.opened()
        call = block.call_of(column)
        if call is not None and call.labels is not None:
            for label in wanted:
                if label not in call.labels:
                    hint = did_you_mean(str(label), call.labels) or f"categories: {listed(call.labels)}"
                    raise BindError(f"{label!r} is not a category of {call.name!r}", hint=hint)
        text = block.column(column) if call is None else call.text
        condition = f"{text} IN ({', '.join(map(literals.value, wanted))})"
        return self._with(block.with_condition(condition, is_qualified=True))

    def limit(self, rows: int, offset: int = 0) -> Docs:
        """Keeps the first rows, behind `offset` others."""
        for what, number in (("rows", rows), ("offset", offset)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"limit: {what} = {number!r} must be a whole number, at least 0")
        block = self._block.wrapped() if self._block.limit else self._block
        return self._with(replace(block, limit=f"LIMIT {rows}" + (f" OFFSET {offset}" if offset else "")))

    def order_by(self, *columns: Column | str, descending: bool | Sequence[bool] = False) -> Docs:
        """Sorts; earlier orders decide between equals.

        Args:
            columns: the columns, the most important first.
            descending: from the greatest down; one for all, or one for each column.
        """
        if not columns:
            raise ConfigError("order_by takes at least one column")
        down = [descending] * len(columns) if isinstance(descending, bool) else list(descending)
        if len(down) != len(columns):
            raise ConfigError(f"order_by got {len(columns)} columns and {len(down)} values of descending")
        block = self._block.wrapped() if self._block.limit else self._block
        orders = []
        for each, is_down in zip(map(column_of, columns), down, strict=True):
            name = literals.name(each.name) if block.has_output(each) else block.column(each)
            orders.append(f"{name} DESC" if is_down else name)
        return self._with(replace(block, orders=(*orders, *block.orders)))

    # Columns

    def ai_answer(self, prompt: Prompt, name: str = "answer", **options: Any) -> Docs:
        """Adds a column: whether the answer is TRUE. Arguments as for `ai_score`, options of AI.IF."""
        return self._computed("AI.IF", prompt, name, options)

    def ai_score(self, prompt: Prompt, name: str = "score", **options: Any) -> Docs:
        """Adds a column: the probability of TRUE, from 0 to 1.

        Args:
            prompt: the question.
            name: of the column.
            options: of AI.SCORE.
        """
        return self._computed("AI.SCORE", prompt, name, options)

    def ai_classify(
        self, prompt: Prompt, categories: Categories, name: str = "label", **options: Any
    ) -> Docs:
        """Adds a column: the likeliest category.

        Args:
            prompt: what is classified.
            categories: 2 to 255 labels; (label, description) pairs; a mapping of label to description; or the
                name of a table of them.
            name: of the column.
            options: of AI.CLASSIFY.
        """
        return self._computed("AI.CLASSIFY", prompt, name, options, categories)

    def ai_probabilities(
        self, prompt: Prompt, categories: Categories, name: str = "probabilities", **options: Any
    ) -> Docs:
        """Adds a column: a map from category to probability, summing to 1. Arguments as for `ai_classify`."""
        return self._computed("AI.PROBABILITIES", prompt, name, options, categories)

    def select(self, *columns: Column | str, **expressions: str) -> Docs:
        """Chooses the columns.

        Args:
            columns: columns by name; `"*"` is all of them.
            expressions: further columns, `name="SQL expression"`.
        """
        if not columns and not expressions:
            raise ConfigError("select takes at least one column")
        block = self._block_of_texts(expressions.values())
        items = [item for each in columns for item in self._items(block, each)]
        items += _named(expressions, "select")
        return self._with(block.selected(items))

    def group_by(self, *columns: Column | str) -> Grouped:
        """Makes groups of rows of equal values; without columns one group of all rows. Then comes `agg`."""
        return Grouped(self, tuple(map(column_of, columns)))

    def apply(self, function: Callable[[pa.RecordBatch], Any], batch_rows: int = 65_536) -> Docs:
        """Has a Python function change the rows. All before it runs first, all behind it reads its result.

        Each run calls the function again. Steps behind it are checked when they run.

        Args:
            function: takes a record batch, gives one (or an Arrow table, pandas or polars frame, or dict of
                lists), of the same columns for every batch. It is called with an empty batch where there are
                no rows.
            batch_rows: most rows of a batch.
        """
        if not callable(function):
            raise ConfigError(f"apply takes a function of a record batch, got {function!r}")
        if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
            raise ConfigError(f"batch_rows = {batch_rows!r} must be a whole number, at least 1")
        applied = Applied(self._block, function, batch_rows, f"applied_{_num_applied(self._block) + 1}")
        return replace(self, _block=Block((Relation(applied, self._block.alias),)))

    # Joins

    def join(
        self, other: Docs | str, on: str | None = None, how: str = "inner", params: Params = None
    ) -> Docs:
        """Joins on an SQL condition.

        Args:
            other: the other rows, or the name of a table.
            on: the condition; None only with `cross`.
            how: `inner`, `left`, `cross`, `semi` (rows with a partner) or `anti` (rows without one).
            params: values of the condition's parameters.
        """
        check_choice("how", how, JOINS)
        if (on is None) != (how == "cross"):
            raise ConfigError(f"a join with how = {how!r} takes {'no' if how == 'cross' else 'a'} condition")
        theirs = self._other(other)
        condition = "" if on is None else literals.expression(on, params, what="on")
        if how in ("semi", "anti"):
            return self._exists(theirs, [condition], is_anti=how == "anti")
        join = {"inner": "JOIN", "left": "LEFT JOIN", "cross": "CROSS JOIN"}[how]
        return self._with(self._block.joined(theirs, join, condition))

    def ai_join(
        self,
        other: Docs | str,
        prompt: Prompt,
        on: str | None = None,
        semantics: str = "inner",
        params: Params = None,
        **options: Any,
    ) -> Docs:
        """Joins rows for which the answer about the pair is TRUE.

        Args:
            other: the other rows, or the name of a table.
            prompt: the question, with columns of both sides.
            on: an SQL condition that pairs must meet before they are asked about.
            semantics: `inner`; `left` keeps rows without a partner; `exists` keeps the rows with a partner
                and adds no columns; `anti` keeps those without.
            params: values of the condition's parameters.
            options: of AI.IF.
        """
        check_choice("semantics", semantics, AI_JOINS)
        theirs = self._other(other)
        condition = "" if on is None else literals.expression(on, params, what="on")
        mine = self._block.joinable()
        pair = mine.joined(theirs, "LEFT JOIN", "true")
        call = call_text(pair, "AI.IF", prompt_of(prompt), options)
        self._check_pair(pair, prompt)
        if semantics in ("exists", "anti"):
            return self._exists(theirs, [condition, call], is_anti=semantics == "anti")
        if semantics == "left":
            both = " AND ".join(part for part in (condition, call) if part)
            return self._with(mine.joined(theirs, "LEFT JOIN", both))
        return self._with(mine.joined(theirs, "JOIN", condition).with_condition(call, is_qualified=True))

    # The end

    def sql(self) -> str:
        """The statement. Results of `apply` stand in it as `applied_1` and so on."""
        return self._block.sql({})

    def explain(self, format: str = "text", **options: Any) -> str:
        """The plan, as `Query.explain`; where `apply` stands in the way, the plan of what comes before it."""
        applied = self._block.applied()
        if not applied:
            return str(self._session.sql(self.sql()).explain(format, **options))
        if format != "text":
            raise ConfigError("a plan with apply is text only", hint="format='text', or explain the parts")
        parts = []
        for each in applied:
            parts.append(replace(self, _block=each.block).explain(format, **options).rstrip())
            parts.append(f"{each.shown}: {name_of(each.function)} of the rows above, in Python")
        parts.append(f"Planned once that has run:\n{self.sql()}")
        return "\n\n".join(parts)

    def run(self, **options: Any) -> QueryResult:
        """Runs; options and errors as for `Query.run`.

        Raises:
            QuailError: a function of `apply` failed.
        """
        if options.get("background") and self._block.applied():
            raise ConfigError(
                "background=True does not go with apply, whose functions run in the caller's thread",
                hint="call run() in a thread of your own",
            )
        names: dict[Applied, str] = {}
        reports: list[Report] = []
        errors: list[pa.Table] = []
        started = time.monotonic()
        catalog = self._session._open()
        try:
            for each in dict.fromkeys(self._block.applied()):
                before = replace(self, _block=each.block).run(**_with_time_left(options, started))
                reports.append(before.report)
                errors.append(before.errors)
                name = f"quail_applied_{secrets.token_hex(6)}"
                catalog.register(name, apply_function(each, before.arrow()))
                names[each] = name
            query = self._session.sql(self._block.sql(names))
            result: QueryResult = query.run(**_with_time_left(options, started))
        finally:
            for name in names.values():
                catalog.unregister(name)
        if reports:
            whole = Report.total([*reports, result.report])
            return QueryResult(result.arrow(), whole, pa.concat_tables([*errors, result.errors]))
        return result

    def collect(self) -> pa.Table:
        """Runs; the rows as an Arrow table."""
        return self.run().arrow()

    def __repr__(self) -> str:
        return f"Docs(\n{self.sql()}\n)"

    # How

    def _with(self, block: Block) -> Docs:
        return replace(self, _block=block)._checked()

    def _checked(self) -> Docs:
        """Has the whole statement bound, so that a mistake shows where it is made."""
        if not self._block.applied():
            bind_sql(self.sql(), None, self._session._open())
        return self

    def _block_for(self, asked: Prompt) -> Block:
        """The SELECT that can take a call; around this one if the prompt reads a computed column."""
        block = self._block.opened()
        return block.wrapped() if any(block.call_of(each) for each in prompt_of(asked).columns) else block

    def _block_of_texts(self, texts: Iterable[str]) -> Block:
        """The SELECT whose select list can hold the pieces of SQL."""
        block = self._block.opened()
        read = [text for text in texts if isinstance(text, str) and block.mentions_computed(text)]
        if not read:
            return block
        if len(block.relations) > 1:
            raise ConfigError(
                f"{read[0]!r} reads a computed column of a join",
                hint="choose the columns with select, then name the rows with alias",
            )
        return block.wrapped()

    def _computed(
        self, function: str, asked: Prompt, name: str, options: Mapping[str, Any], categories: Any = None
    ) -> Docs:
        block = self._block_for(asked)
        self._check_new(block, name)
        is_labelled = function in ("AI.CLASSIFY", "AI.PROBABILITIES")
        labels = labels_of(categories) if is_labelled else None
        words = [categories_text(categories)] if is_labelled else []
        text = call_text(block, function, asked, options, words)
        return self._with(replace(block, computed=(*block.computed, Computed(name, text, labels))))

    def _check_new(self, block: Block, name: str) -> None:
        quoted = literals.name(name)
        is_taken = block.call_of(Column(name)) is not None
        if not is_taken and not block.applied():
            bare = replace(block, conditions=(), computed=(), orders=())
            is_taken = any(
                self._binds(replace(bare, items=((f"{literals.name(relation.alias)}.{quoted}", ""),)))
                for relation in block.relations
            )
        if is_taken:
            raise ConfigError(f"there already is a column {name!r}", hint=f"name='{name}_2'")

    def _binds(self, block: Block) -> bool:
        try:
            bind_sql(block.sql({}), None, self._session._open())
        except BindError:
            return False
        return True

    def _items(self, block: Block, column: Column | str) -> list[tuple[str, str]]:
        if column == "*":
            return [("*", ""), *((each.text, each.name) for each in block.computed)]
        each = column_of(column)
        call = block.call_of(each)
        return [(block.column(each), "") if call is None else (call.text, call.name)]

    def _other(self, other: Docs | str) -> Block:
        theirs = Docs.of(self._session, other) if isinstance(other, str) else other
        if not isinstance(theirs, Docs):
            raise ConfigError(f"a join takes docs or the name of a table, got {type(other).__name__}")
        if theirs._session is not self._session:
            raise ConfigError("the sides of a join are of two sessions", hint="register both in one")
        return theirs._block

    def _check_pair(self, pair: Block, asked: Prompt) -> None:
        """Refuses a prompt that reads one side only, as far as its columns tell."""
        heads = {pair.column(each).rpartition(".")[0] for each in asked.columns}
        last = literals.name(pair.relations[-1].alias)
        if "" not in heads and (last not in heads or heads == {last}):
            raise ConfigError(
                "the prompt of a join reads one side only",
                hint="prompt('Is {1} about {0}?', col('l.body'), col('r.body'))",
            )

    def _exists(self, theirs: Block, conditions: Sequence[str], *, is_anti: bool) -> Docs:
        mine = self._block.opened()
        mine.joined(theirs, "LEFT JOIN", "true")  # refuses two relations of one name
        inner = theirs if theirs.is_open and not theirs.computed else theirs.wrapped()
        inner = replace(inner, orders=(), items=(("1", ""),))
        for condition in conditions:
            inner = inner.with_condition(condition, is_qualified=True) if condition else inner
        if inner.applied():
            raise ConfigError("apply cannot stand in the other side of a semi or anti join")
        word = "NOT EXISTS" if is_anti else "EXISTS"
        return self._with(mine.with_condition(f"{word} (\n{inner.sql({})}\n)", is_qualified=True))


@dataclass(frozen=True)
class Grouped:
    """Groups of rows, waiting for `agg`."""

    _docs: Docs
    _columns: tuple[Column, ...]

    def agg(self, **expressions: str) -> Docs:
        """One row a group: its columns, and `name="SQL aggregate"` each."""
        if not self._columns and not expressions:
            raise ConfigError("agg takes at least one aggregate", hint="agg(n='count(*)')")
        docs = self._docs
        block = docs._block_of_texts(expressions.values())
        block = replace(block, orders=())
        items = [item for each in self._columns for item in docs._items(block, each)]
        items += _named(expressions, "agg")
        return docs._with(replace(block, items=tuple(items), computed=(), num_groups=len(self._columns)))


def _of_table(session: Runs, name: str) -> Block | None:
    """A table by its name, which may be one of a schema."""
    parts = [name, *([name.rpartition(".")[2]] if "." in name else [])]
    texts = [literals.name(name), ".".join(map(literals.name, filter(None, name.split("."))))]
    for text, alias in zip(texts, parts, strict=False):
        try:
            bind_sql(f"SELECT * FROM {text}", None, session._open())
        except BindError:
            continue
        return Block((Relation(text, alias),))
    return None


def _of_query(text: str, params: Params) -> Block:
    span = query_span(text)
    if span is None or span[0] != 0:
        raise BindError("docs takes a query", hint="SELECT …, WITH …, FROM … or VALUES …", text=text, start=0)
    query = literals.query(text.encode()[: span[1]].decode(), params)
    return Block((Relation(f"(\n{query}\n)", "docs"),))


def _named(expressions: Mapping[str, str], what: str) -> list[tuple[str, str]]:
    return [(literals.expression(text, what=f"{what}({name}=…)"), name) for name, text in expressions.items()]


def _with_time_left(options: Mapping[str, Any], started: float) -> dict[str, Any]:
    """The options of a part of a run that began at `started`: its timeout is what is left of the whole.

    Raises:
        QueryTimeout: nothing is left.
    """
    timeout = options.get("timeout")
    if not isinstance(timeout, int | float) or timeout <= 0:
        return dict(options)
    left = timeout - (time.monotonic() - started)
    if left <= 0:
        raise QueryTimeout(
            f"the query did not end within {timeout:g} s; a function of apply took the rest of its time",
            hint="give it more time: run(timeout=…)",
        )
    return {**options, "timeout": left}


def _num_applied(block: Block) -> int:
    return max((1 + _num_applied(each.block) for each in block.applied()), default=0)
