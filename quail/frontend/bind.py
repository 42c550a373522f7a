"""Binding: walks the tree of a statement and notes every AI call with the way to it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb

from quail.errors import BindError, UnsupportedError
from quail.frontend.calls import CallReader, Question
from quail.frontend.pinning import Pinner
from quail.plan import syntax
from quail.plan.functions import aggregate_names, scalar_names, volatile_names
from quail.plan.logical import AICall, Operator
from quail.plan.lookups import lookup_name, readable, stand_in
from quail.plan.scope import is_visible_table, tables_of_place, with_visible_tables
from quail.plan.statement import (
    Block,
    Clause,
    Edit,
    ExpressionPlace,
    FromPlace,
    OperandPlace,
    Place,
    Site,
    Source,
    Stage,
    Step,
    TablePlace,
)
from quail.plan.syntax import Node, Span

_MAX_LABELS = 1000
_MIXED = object()
_READERS = ("read_", "parquet_scan", "glob", "iceberg_scan", "delta_scan")
_UNREADABLE_TYPES = ("BLOB", "LIST", "ARRAY", "STRUCT", "MAP", "UNION", "BIT")


@dataclass(frozen=True)
class Context:
    """Where the walk through an expression stands."""

    block: _Draft
    clause: Clause
    root: Node
    item: int | None = None
    steps: tuple[Step, ...] = ()
    in_aggregate: bool = False
    in_window: bool = False
    is_grouped: bool = False
    join: tuple[str, ...] | None = None
    is_conjunct: bool = False


@dataclass(eq=False)
class _Draft:
    """A block while it is bound."""

    index: int
    node: Node
    places: tuple[Place, ...]
    is_aggregated: bool
    group_signatures: frozenset[str]
    grouped_items: frozenset[int]
    limited_items: frozenset[int]
    items: list[tuple[str, Node]] = field(default_factory=list)
    columns: dict[int, frozenset[str]] = field(default_factory=dict)


class Binder:
    """Binds one statement; `blocks`, `sites`, `calls`, `edits` and `sources` hold what it found.

    Args:
        text: the statement.
        query: tree of its SELECT; nodes of AI calls become lookups in place.
        offset: byte offset of the SELECT in the statement.
        cursor: a cursor of the session's DuckDB; gets macros that stand for the lookups.
        nonce: makes the names of lookups and copies unlike the user's.
    """

    def __init__(
        self, text: str, query: Node, offset: int, cursor: duckdb.DuckDBPyConnection, nonce: str
    ) -> None:
        self.blocks: list[Block | None] = []
        self.sites: list[Site] = []
        self.calls: list[AICall] = []
        self.edits: list[Edit] = []
        self.sources: dict[str, Source] = {}
        self.warnings: list[str] = []
        self._text = text
        self._encoded = text.encode()
        self._offset = offset
        self._query = query
        self._cursor = cursor
        self._nonce = nonce
        self._drafts: list[_Draft] = []
        self._context: Context | None = None
        self._forbidden: str | None = None
        self._reader = CallReader(
            self._fail,
            self._refuse,
            self._warn,
            self._constant,
            _is_constant,
            self._table_rows,
            self._relation,
            scalar_names(),
        )

    def bind(self) -> None:
        """Walks the whole statement."""
        self._bind_query(self._query, (), frozenset())
        self.sites = [replace(site, index=i) for i, site in enumerate(sorted(self.sites, key=_text_order))]
        for site in self.sites:
            site.node["quail_site"] = site.index

    def pin(self) -> list[Source]:
        """Pins what would be another each time it is read, before `bind`; gives what a run has to copy."""
        if not self._has_call(self._query):
            return []
        pinner = Pinner(self._nonce, self._is_call, self._binds, self._refuse)
        pinner.pin(self._query)
        for source in pinner.sources:
            try:
                self._cursor.execute(f"CREATE TEMP TABLE {source.name} AS FROM ({source.sql}) LIMIT 0")
            except duckdb.Error as error:
                raise BindError(readable(error, self._nonce)) from error
        return pinner.sources

    def _is_call(self, node: Node) -> bool:
        return self._reader.operator_of(node) is not None

    def _binds(self, node: Node) -> bool:
        try:
            self._cursor.sql(syntax.to_sql(node))
        except duckdb.Error:
            return False
        return True

    # Errors

    def _start(self, node: Node) -> int | None:
        span = syntax.own_span(node) or syntax.extent(node)
        return None if span is None else syntax.character_offset(self._encoded, span[0] + self._offset)

    def _fail(self, message: str, node: Node, hint: str | None) -> BindError:
        return BindError(message, hint=hint, text=self._text, start=self._start(node))

    def _refuse(self, message: str, node: Node, hint: str | None) -> UnsupportedError:
        return UnsupportedError(
            f"{message} is not supported yet", hint=hint, text=self._text, start=self._start(node)
        )

    def _warn(self, message: str, node: Node) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def _constant(self, node: Node) -> Any:
        if node["class"] == "CONSTANT" and node["literal"]["kind"] == "STRING":
            return node["literal"]["text"]
        try:
            row = self._cursor.execute(f"SELECT {syntax.to_sql({**node, 'alias': ''})}").fetchone()
        except duckdb.Error as error:
            raise self._fail(_first_line(error), node, None) from error
        assert row is not None
        return row[0]

    def _table_rows(self, node: Node) -> list[tuple[Any, ...]] | None:
        """The rows of the table that a name means, unless it is a column in sight."""
        names = node["column_names"]
        if self._resolve([name.lower() for name in names]) is not None:
            return None
        try:
            cursor = self._cursor.execute(f"SELECT * FROM {'.'.join(map(_quote, names))} LIMIT {_MAX_LABELS}")
        except duckdb.Error:
            return None
        return list(cursor.fetchall())

    # Queries and blocks

    def _bind_query(self, node: Node, places: tuple[Place, ...], tables: frozenset[str]) -> None:
        for position, entry in enumerate(node["cte_map"]["map"]):
            inner = entry["value"]["query_node"]
            own = {entry["key"].lower()} if inner["type"] == "RECURSIVE_CTE_NODE" else set()
            self._bind_query(inner, (*places, TablePlace(node, position)), tables | own)
            tables = tables | {entry["key"].lower()}
        if node["type"] == "SELECT_NODE":
            self._bind_block(node, places, tables)
        elif node["type"] == "SET_OPERATION_NODE":
            for child in node["children"]:
                self._bind_query(child, (*places, OperandPlace(node)), tables)
            with self._forbid("ORDER BY or LIMIT of a set operation"):
                self._bind_refused(node["modifiers"])
        elif node["type"] == "RECURSIVE_CTE_NODE":
            with self._forbid("a recursive term"):
                for side in ("left", "right"):
                    self._bind_query(node[side], (*places, OperandPlace(node)), tables)
        else:
            with self._forbid(f"a {node['type']}"):
                self._bind_refused(node)

    def _bind_block(self, node: Node, places: tuple[Place, ...], tables: frozenset[str]) -> None:
        draft = _draft(len(self.blocks), node, places)
        self.blocks.append(None)
        self._drafts.append(draft)
        names = [self._item_name(item) if self._has_call(item) else None for item in node["select_list"]]
        pooled: list[Node] = []
        from_table = self._bind_from(draft, node["from_table"], (), tables, pooled, is_root=True)
        self._resolve_aliases(draft)
        conjuncts = [*pooled, *_conjuncts(node["where_clause"])]
        for conjunct in conjuncts:
            self._bind_filter(Context(draft, Clause.WHERE, conjunct), conjunct, tables)
        for group in node["group_expressions"]:
            self._bind_expression(Context(draft, Clause.GROUP_BY, group), group, tables)
        for clause, root in ((Clause.HAVING, node["having"]), (Clause.QUALIFY, node["qualify"])):
            if root is not None:
                self._bind_filter(Context(draft, clause, root), root, tables)
        for index, item in enumerate(node["select_list"]):
            self._bind_expression(Context(draft, Clause.SELECT, item, item=index), item, tables)
            name = names[index]
            if name is not None:
                self.edits.append(name)
        for modifier in node["modifiers"]:
            self._bind_modifier(draft, modifier, tables)
        table, has_row_numbers = self._single_table(draft)
        self._break_ties(draft)
        self.blocks[draft.index] = Block(
            draft.index,
            node,
            from_table,
            tuple(conjuncts),
            table,
            has_row_numbers,
            places,
            draft.grouped_items,
            draft.limited_items,
        )
        self._drafts.pop()

    def _bind_modifier(self, draft: _Draft, modifier: Node, tables: frozenset[str]) -> None:
        if modifier["type"] == "ORDER_MODIFIER":
            for order in modifier["orders"]:
                expression = order["expression"]
                self._bind_expression(Context(draft, Clause.ORDER_BY, expression), expression, tables)
        elif modifier["type"] == "DISTINCT_MODIFIER":
            for expression in modifier["distinct_on_targets"]:
                self._bind_expression(Context(draft, Clause.DISTINCT_ON, expression), expression, tables)
        else:
            with self._forbid("LIMIT or OFFSET"):
                self._bind_refused(modifier)

    def _resolve_aliases(self, draft: _Draft) -> None:
        """Puts select items in the places of their aliases, so that each expression stands on its own.

        A name that is a column of FROM means the column. ORDER BY an alias means the output column and stays.
        """
        node = draft.node
        items: dict[str, Node] = {}
        is_column: dict[str, bool] = {}

        def fill(below: Node) -> Node | None:
            if below.get("type") in syntax.QUERY_NODES:
                return below
            if below.get("class") != "COLUMN_REF" or len(below["column_names"]) != 1:
                return None
            name = below["column_names"][0].lower()
            if name not in items:
                return None
            if name not in is_column:
                columns = (self._columns_of(draft, index) for index in range(len(draft.items)))
                is_column[name] = any(name in found for found in columns)
            if is_column[name]:
                return None
            return {**copy.deepcopy(items[name]), "alias": ""}

        for index, item in enumerate(node["select_list"]):
            node["select_list"][index] = item = syntax.transform(item, fill)
            if item["alias"] and item["class"] != "STAR":
                items.setdefault(item["alias"].lower(), item)
        for clause in ("where_clause", "having", "qualify"):
            if node[clause] is not None:
                node[clause] = syntax.transform(node[clause], fill)
        node["group_expressions"] = [
            group if group["class"] == "COLUMN_REF" else syntax.transform(group, fill)
            for group in node["group_expressions"]
        ]
        for modifier in node["modifiers"]:
            for order in modifier.get("orders", ()):
                if order["expression"]["class"] != "COLUMN_REF":
                    order["expression"] = syntax.transform(order["expression"], fill)

    def _break_ties(self, draft: _Draft) -> None:
        """Makes LIMIT choose the same documents each time, where calls are asked only for the rows it leaves.

        Rows that tie in ORDER BY, and rows of a join, come in any order: their documents then decide.
        """
        node = draft.node
        arguments = {
            syntax.to_sql({**argument, "alias": ""}): argument
            for site in self.sites
            if site.place.block == draft.index and site.place.stage is Stage.LIMITED
            for argument in site.arguments
        }
        order = next((m for m in node["modifiers"] if m["type"] == "ORDER_MODIFIER"), None)
        if not arguments or (order is None and self._keeps_order(draft, node["from_table"])):
            return
        keys = [
            syntax.function("hash", [syntax.expression("CAST(x AS VARCHAR)", x=argument)])
            for argument in arguments.values()
        ]
        template = syntax.parse_query("SELECT 1 ORDER BY 1")["modifiers"][0]
        added = [{**template["orders"][0], "expression": key} for key in keys]
        position = _limit_start(self._encoded, self._offset + _last_byte(node))
        if position is None:
            return
        text = ", ".join(syntax.to_sql_each(keys))
        if order is None:
            node["modifiers"].insert(0, {**template, "orders": added})
            self.edits.append(Edit((position, position), f"ORDER BY {text} "))
        else:
            order["orders"] += added
            self.edits.append(Edit((position, position), f", {text} "))

    def _item_name(self, item: Node) -> Edit | None:
        """The edit that gives an unnamed select item the name that its text has."""
        span = syntax.extent(item)
        if item["alias"] or span is None or item["class"] == "STAR":
            return None
        start, stop = _balanced(self._encoded, span[0] + self._offset, span[1] + self._offset)
        source = self._encoded[start:stop].decode()
        quoted = source.replace('"', '""')
        return Edit((_after_parentheses(self._encoded, start, stop),) * 2, f' AS "{quoted}"')

    # FROM

    def _bind_from(
        self,
        draft: _Draft,
        table: Node,
        path: tuple[str, ...],
        tables: frozenset[str],
        pooled: list[Node],
        *,
        is_root: bool,
    ) -> Node:
        """Binds a table of FROM; returns it with the conditions in `pooled` taken out."""
        kind = table["type"]
        if kind == "JOIN":
            return self._bind_join(draft, table, path, tables, pooled, is_root=is_root)
        draft.items.append((table["alias"] or table.get("table_name", ""), table))
        if kind == "SUBQUERY":
            place = FromPlace(draft.index, path)
            self._bind_query(table["subquery"]["node"], (*draft.places, place), tables)
        elif kind == "EXPRESSION_LIST":
            for row in table["values"]:
                for value in row:
                    self._bind_expression(Context(draft, Clause.VALUES, value), value, tables)
        elif kind == "BASE_TABLE":
            self._bind_source(table, tables)
        elif kind == "TABLE_FUNCTION":
            with self._forbid("an argument of a table function"):
                self._bind_refused(table["function"])
            self._bind_reader(table)
        elif kind != "EMPTY":
            with self._forbid(f"a {kind.lower()} table"):
                self._bind_refused(table)
        return table

    def _bind_join(
        self,
        draft: _Draft,
        table: Node,
        path: tuple[str, ...],
        tables: frozenset[str],
        pooled: list[Node],
        *,
        is_root: bool,
    ) -> Node:
        is_inner = is_root and table["join_type"] == "INNER" and table["ref_type"] in ("REGULAR", "CROSS")
        left = self._bind_from(draft, table["left"], (*path, "left"), tables, pooled, is_root=is_inner)
        right = self._bind_from(draft, table["right"], (*path, "right"), tables, pooled, is_root=is_inner)
        condition = table["condition"]
        bare = {**table, "left": left, "right": right}
        if condition is None:
            return bare
        if table["ref_type"] == "ASOF":
            with self._forbid("an ASOF join condition"):
                self._bind_refused(condition)
        elif is_inner and self._has_call(condition):
            pooled += _conjuncts(condition)
            return {**bare, "condition": None, "ref_type": "CROSS"}
        else:
            self._bind_filter(Context(draft, Clause.ON, condition, join=path), condition, tables)
        return bare

    def _has_call(self, node: Node) -> bool:
        return any(map(self._is_call, syntax.walk(node)))

    def _bind_source(self, table: Node, tables: frozenset[str]) -> None:
        """Has views and files copied; tables are read in the run's transaction."""
        name, qualifier = table["table_name"], [table["catalog_name"], table["schema_name"]]
        if table.get("at_clause") or (not any(qualifier) and name.lower() in tables):
            return
        written = ".".join(_quote(part) for part in (*qualifier, name) if part)
        is_view, is_table = _kind_of(self._cursor, name)
        if is_table and not is_view:
            return
        if is_view and not any(qualifier):
            self.sources.setdefault(name.lower(), Source(name, f"SELECT * FROM {written}"))
            return
        self._copy_under_new_name(table, f"SELECT * FROM {written}")

    def _bind_reader(self, table: Node) -> None:
        name = table["function"]["function_name"].lower()
        if name.startswith(_READERS) and all(
            _is_constant(argument["expression"]) or argument["expression"]["class"] == "COMPARISON"
            for argument in table["function"]["arguments"]
        ):
            bare = {**table, "alias": "", "column_name_alias": [], "sample": None}
            star = syntax.parse_query("SELECT * FROM x")
            self._copy_under_new_name(table, syntax.to_sql({**star, "from_table": bare}))

    def _copy_under_new_name(self, table: Node, sql: str) -> None:
        """Makes the table of FROM a reference to a copy, in the tree and in the text."""
        span = syntax.extent(table)
        assert span is not None
        key = f"{sql}"
        source = self.sources.get(key)
        if source is None:
            source = Source(f"quail_{self._nonce}_source_{len(self.sources)}", sql, is_renamed=True)
            self.sources[key] = source
            try:
                self._cursor.execute(f"CREATE TEMP VIEW {source.name} AS {sql}")
            except duckdb.Error as error:
                raise self._fail(_first_line(error), table, None) from error
        old_name = table["alias"] or table.get("table_name") or table["function"]["function_name"]
        start = span[0] + self._offset
        is_function = table["type"] == "TABLE_FUNCTION"
        stop = (_closing_parenthesis if is_function else _name_stop)(self._encoded, start)
        alias = "" if table["alias"] else f" AS {_quote(old_name)}"
        self.edits.append(Edit((start, stop), f"{source.name}{alias}"))
        template = syntax.parse_query("SELECT * FROM x")["from_table"]
        columns, sample = table["column_name_alias"], table["sample"]
        table.clear()
        table.update(
            template,
            alias=old_name,
            table_name=source.name,
            qualified_name={"path": [source.name]},
            column_name_alias=columns,
            sample=sample,
        )

    def _single_table(self, draft: _Draft) -> tuple[str, bool]:
        if len(draft.items) != 1:
            return "", False
        name, table = draft.items[0]
        if table["type"] != "BASE_TABLE":
            return name, False
        written = table["table_name"]
        is_cte = is_visible_table(written, draft.places, self.blocks_so_far()) or any(
            entry["key"].lower() == written.lower() for entry in draft.node["cte_map"]["map"]
        )
        is_base = table["schema_name"] or table["catalog_name"] or not is_cte
        return (name if written.startswith(f"quail_{self._nonce}") else written), bool(is_base)

    # Expressions

    def _bind_filter(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        below = node
        if node["type"] == "OPERATOR_NOT":
            below = node["children"][0]
        is_conjunct = self._reader.operator_of(below) is not None
        self._bind_expression(replace(context, is_conjunct=is_conjunct), node, tables)

    def _bind_expression(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        if context.block.group_signatures and _signature(node) in context.block.group_signatures:
            context = replace(context, is_grouped=True)
        operator = self._reader.operator_of(node)
        if operator is not None:
            self._bind_call(context, node, operator, tables)
            return
        kind = node.get("class")
        if kind == "CONJUNCTION":
            name = "AND" if node["type"] == "CONJUNCTION_AND" else "OR"
            for index, child in enumerate(node["children"]):
                self._bind_expression(_deeper(context, node, name, index), child, tables)
        elif kind == "CASE":
            self._bind_case(context, node, tables)
        elif node.get("type") == "OPERATOR_COALESCE":
            for index, child in enumerate(node["children"]):
                self._bind_expression(_deeper(context, node, "COALESCE", index), child, tables)
        elif kind == "FUNCTION":
            self._bind_function(context, node, tables)
        elif kind == "WINDOW":
            inside = replace(_deeper(context, node, "window", 0), in_window=True)
            self._bind_children(inside, node, tables)
        elif kind == "SUBQUERY":
            if node["child"] is not None:
                self._bind_expression(_deeper(context, node, "IN", 0), node["child"], tables)
            places = (*context.block.places, _place(context))
            self._bind_query(node["subquery"]["node"], places, tables)
        elif kind == "LAMBDA":
            with self._forbid("a lambda"):
                self._bind_children(context, node, tables)
        elif node.get("type") in syntax.QUERY_NODES:
            raise AssertionError("a query outside a subquery")
        else:
            self._bind_children(_deeper(context, node, "expression", 0), node, tables)

    def _bind_children(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        for child in syntax.children(node):
            self._bind_expression(context, child, tables)

    def _bind_case(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        for index, check in enumerate(node["case_checks"]):
            when = _deeper(context, node, "CASE", 2 * index)
            then = _deeper(context, node, "CASE", 2 * index + 1)
            self._bind_expression(when, check["when_expr"], tables)
            self._bind_expression(then, check["then_expr"], tables)
        if node["else_expr"] is not None:
            last = _deeper(context, node, "CASE", 2 * len(node["case_checks"]))
            self._bind_expression(last, node["else_expr"], tables)

    def _bind_function(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        name = node["function_name"].lower()
        if name == "if" and not node["schema"] and len(node["arguments"]) == 3:
            for index, argument in enumerate(node["arguments"]):
                inside = _deeper(context, node, "IF", index)
                self._bind_expression(inside, argument["expression"], tables)
            return
        if not node["schema"] and name in aggregate_names():
            context = replace(context, in_aggregate=True)
            inside = _deeper(context, node, "aggregate", 0)
            for argument in node["arguments"]:
                self._bind_expression(inside, argument["expression"], tables)
            for order in node["order_bys"]["orders"]:
                self._bind_expression(inside, order["expression"], tables)
            if node["filter"] is not None:
                self._bind_expression(_deeper(context, node, "FILTER", 0), node["filter"], tables)
            return
        self._bind_children(_deeper(context, node, "expression", 0), node, tables)

    def _bind_call(self, context: Context, node: Node, operator: Operator, tables: frozenset[str]) -> None:
        if self._forbidden is not None:
            raise self._refuse(f"{operator.value} in {self._forbidden}", node, None)
        outer = self._context
        self._context = context
        question = self._reader.read(node, operator)
        self._context = outer
        span = syntax.own_span(node)
        assert span is not None
        place = _place(context)
        for argument in question.arguments:
            self._bind_expression(_deeper(context, node, "argument", 0), argument, tables)
        call = self._call(question, span)
        hashes = [
            syntax.function("hash", [syntax.expression("CAST(x AS VARCHAR)", x=argument)])
            for argument in question.arguments
        ]
        lookup = syntax.function(lookup_name(self._nonce, call), hashes)
        alias = node["alias"]
        node.clear()
        node.update(lookup, alias=alias, quail_call=call)
        start, stop = span[0] + self._offset, span[1] + self._offset
        self.sites.append(
            Site(
                start,
                call,
                node,
                question.arguments,
                (*context.block.places, place),
                (start, stop),
                context.is_conjunct and not any(step.kind != "expression" for step in context.steps),
            )
        )

    def _call(self, question: Question, span: Span) -> int:
        start, stop = span[0] + self._offset, span[1] + self._offset
        text = self._encoded[start:stop].decode()
        for known in self.calls:
            same = (known.operator, known.prompt, known.categories, known.options)
            if same == (question.operator, question.prompt, question.categories, question.options):
                return known.index
        index = len(self.calls)
        self.calls.append(
            AICall(index, question.operator, question.prompt, question.categories, question.options, text)
        )
        self._cursor.execute(stand_in(self._nonce, self.calls[index]))
        return index

    # Refusals

    def _forbid(self, what: str) -> _Forbidden:
        return _Forbidden(self, what)

    def _bind_refused(self, tree: Any) -> None:
        """Refuses the first call in a tree where none may stand."""
        for node in syntax.walk(tree):
            operator = self._reader.operator_of(node)
            if operator is not None:
                raise self._refuse(f"{operator.value} in {self._forbidden}", node, None)

    # Relations of an argument

    def _relation(self, node: Node) -> object | None:
        """The relation that an expression reads: None for a constant or an unknown name."""
        context = self._context
        assert context is not None
        if len(self._drafts) == 1 and len(context.block.items) == 1:
            return None
        if any(below.get("class") == "WINDOW" for below in syntax.walk(node)):
            return _MIXED
        if _stage(context) is not Stage.ROWS and context.block.is_aggregated:
            return _MIXED
        found: set[tuple[int, int]] = set()
        for below in syntax.walk(node):
            if below.get("class") == "COLUMN_REF":
                relation = self._resolve([name.lower() for name in below["column_names"]])
                if relation is not None:
                    found.add(relation)
        if len(found) > 1:
            return _MIXED
        return next(iter(found), None)

    def _resolve(self, names: Sequence[str]) -> tuple[int, int] | None:
        qualifiers = set(names[:-1])
        for draft in reversed(self._drafts):
            for index, (name, _) in enumerate(draft.items):
                if qualifiers and name.lower() in qualifiers:
                    return draft.index, index
            if not qualifiers:
                for index in range(len(draft.items)):
                    if names[0] in self._columns_of(draft, index):
                        return draft.index, index
        return None

    def _columns_of(self, draft: _Draft, index: int) -> frozenset[str]:
        if index not in draft.columns:
            written = self._written_columns(draft, draft.items[index][1])
            if written is not None:
                draft.columns[index] = written
                return written
            query = syntax.parse_query("SELECT * FROM x")
            query = {**query, "from_table": draft.items[index][1]}
            query = syntax.with_tables(query, draft.node["cte_map"]["map"])
            query = with_visible_tables(query, draft.places, self.blocks_so_far())
            try:
                names = self._cursor.sql(syntax.to_sql(query)).columns
            except duckdb.Error:
                names = []
            draft.columns[index] = frozenset(name.lower() for name in names)
        return draft.columns[index]

    def _written_columns(self, draft: _Draft, table: Node) -> frozenset[str] | None:
        """Column names of a CTE or subquery that its select list spells out."""
        if table["column_name_alias"]:
            return None
        if table["type"] == "SUBQUERY":
            return _select_names(table["subquery"]["node"])
        entry = self._entry_of(draft, table)
        if entry is None or entry["value"]["aliases"]:
            return None
        return _select_names(entry["value"]["query_node"])

    def _entry_of(self, draft: _Draft, table: Node) -> Node | None:
        """The CTE that a table of FROM means, None where it is none."""
        if table["type"] != "BASE_TABLE" or table["schema_name"] or table["catalog_name"]:
            return None
        name = table["table_name"].lower()
        blocks = self.blocks_so_far()
        entries = list(draft.node["cte_map"]["map"])
        for place in reversed(draft.places):
            entries = tables_of_place(place, blocks) + entries
        return next((entry for entry in reversed(entries) if entry["key"].lower() == name), None)

    def _keeps_order(self, draft: _Draft, table: Node) -> bool:
        """Whether rows of FROM come in the same order each time: one table, as it lies or filtered."""
        if table["type"] in ("JOIN", "TABLE_FUNCTION"):
            return False
        if table["type"] == "SUBQUERY":
            query = table["subquery"]["node"]
        else:
            entry = self._entry_of(draft, table)
            if entry is None:
                return not str(table.get("table_name", "")).startswith(f"quail_{self._nonce}_pinned")
            query = entry["value"]["query_node"]
        if query["type"] != "SELECT_NODE" or query["modifiers"] or query["group_expressions"]:
            return False
        if any(map(_is_aggregate, syntax.walk(query["select_list"]))):
            return False
        return self._keeps_order(draft, query["from_table"])

    def blocks_so_far(self) -> list[Block | None]:
        """The blocks, with those in progress as far as their tree goes."""
        blocks = list(self.blocks)
        for draft in self._drafts:
            blocks[draft.index] = Block(draft.index, draft.node, draft.node["from_table"], ())
        return blocks


class _Forbidden:
    """While it is entered, calls are refused as standing in `what`."""

    def __init__(self, binder: Binder, what: str) -> None:
        self._binder = binder
        self._what = what
        self._outer: str | None = None

    def __enter__(self) -> None:
        self._outer = self._binder._forbidden
        self._binder._forbidden = self._outer or self._what

    def __exit__(self, *_: object) -> None:
        self._binder._forbidden = self._outer


def _text_order(site: Site) -> tuple[int, int]:
    return site.span[0], -site.span[1]


def _deeper(context: Context, node: Node, kind: str, operand: int) -> Context:
    return replace(context, steps=(*context.steps, Step(node, kind, operand)))


def _place(context: Context) -> ExpressionPlace:
    return ExpressionPlace(
        context.block.index,
        context.clause,
        _stage(context),
        context.root,
        context.steps,
        context.in_window,
        context.join,
    )


def _stage(context: Context) -> Stage:
    draft, clause = context.block, context.clause
    if context.in_aggregate or clause in (Clause.WHERE, Clause.ON, Clause.GROUP_BY, Clause.VALUES):
        return Stage.ROWS
    if context.is_grouped or (clause is Clause.SELECT and context.item in draft.grouped_items):
        return Stage.ROWS
    if clause is Clause.SELECT and context.item in draft.limited_items and not context.in_window:
        return Stage.LIMITED
    if draft.is_aggregated or (draft.node["qualify"] is not None and not context.in_window):
        return Stage.RESULT
    if any(below.get("class") == "WINDOW" for below in syntax.walk(context.root)):
        return Stage.RESULT
    return Stage.ROWS


def _draft(index: int, node: Node, places: tuple[Place, ...]) -> _Draft:
    items = node["select_list"]
    groups = node["group_expressions"]
    is_forced = node["aggregate_handling"] == "FORCE_AGGREGATES"
    roots = [*items, node["having"], *node["modifiers"], node["qualify"]]
    has_aggregate = any(_is_aggregate(below) for root in roots for below in _walk_block(root))
    grouped = set()
    aliases = {item["alias"].lower(): i for i, item in enumerate(items) if item["alias"]}
    for group in groups:
        grouped.add(_referenced_item(group, aliases))
    if is_forced:
        grouped |= {i for i, item in enumerate(items) if not any(map(_is_aggregate, _walk_block(item)))}
    return _Draft(
        index,
        node,
        places,
        is_aggregated=bool(groups) or is_forced or has_aggregate,
        group_signatures=frozenset(_signature(group) for group in groups),
        grouped_items=frozenset(i for i in grouped if i is not None),
        limited_items=frozenset(_limited_items(node, aliases)),
    )


def _select_names(node: Node) -> frozenset[str] | None:
    """Lower-case names of a query's columns, None where they are not all spelt out."""
    if node["type"] != "SELECT_NODE":
        return None
    names = set()
    for item in node["select_list"]:
        if item["alias"]:
            names.add(item["alias"].lower())
        elif item["class"] == "COLUMN_REF":
            names.add(item["column_names"][-1].lower())
        else:
            return None
    return frozenset(names)


def _last_byte(node: Node) -> int:
    """The last byte of a block in front of its LIMIT that is known to belong to it."""
    parts = [node["select_list"], node["from_table"], node["where_clause"], node["group_expressions"]]
    parts += [node["having"], node["qualify"]]
    parts += [modifier for modifier in node["modifiers"] if modifier["type"] == "ORDER_MODIFIER"]
    spans = [
        span for part in parts if part for below in syntax.walk(part) if (span := syntax.own_span(below))
    ]
    return max((stop for _, stop in spans), default=0)


def _limited_items(node: Node, aliases: dict[str, int]) -> set[int]:
    """Select items that only rows left after LIMIT need."""
    kinds = {modifier["type"] for modifier in node["modifiers"]}
    if "DISTINCT_MODIFIER" in kinds or not kinds & {"LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER"}:
        return set()
    limited = {
        index
        for index, item in enumerate(node["select_list"])
        if not any(below.get("class") == "SUBQUERY" for below in syntax.walk(item))
    }
    orders = [
        o["expression"] for m in node["modifiers"] if m["type"] == "ORDER_MODIFIER" for o in m["orders"]
    ]
    for order in orders:
        if order["class"] == "STAR":
            return set()
        limited.discard(_referenced_item(order, aliases) or 0 if order["class"] == "CONSTANT" else -1)
    for root in (*orders, node["qualify"]):
        for below in _walk_block(root):
            if below.get("class") == "COLUMN_REF" and len(below["column_names"]) == 1:
                limited.discard(aliases.get(below["column_names"][0].lower(), -1))
    return limited


def _referenced_item(node: Node, aliases: dict[str, int]) -> int | None:
    """The select item that a position or an alias in GROUP BY or ORDER BY names."""
    if node["class"] == "CONSTANT" and node["literal"]["kind"] == "INTEGER":
        return int(node["literal"]["text"]) - 1
    if node["class"] == "COLUMN_REF" and len(node["column_names"]) == 1:
        return aliases.get(node["column_names"][0].lower())
    return None


def _walk_block(node: Any) -> Iterator[Node]:
    """Every node of an expression, without the queries in it."""
    if isinstance(node, dict):
        if node.get("type") in syntax.QUERY_NODES:
            return
        yield node
        for child in syntax.children(node):
            yield from _walk_block(child)


def _conjuncts(node: Node | None) -> list[Node]:
    if node is None:
        return []
    if node["type"] == "CONJUNCTION_AND":
        return [conjunct for child in node["children"] for conjunct in _conjuncts(child)]
    return [node]


def _signature(node: Node) -> str:
    """Text that is equal for equal expressions, wherever they stand."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: strip(v) for k, v in value.items() if k != "alias" and not k.startswith("query_location")
            }
        return [strip(entry) for entry in value] if isinstance(value, list) else value

    return json.dumps(strip(node)).lower()


def _is_aggregate(node: Node) -> bool:
    return (
        node.get("class") == "FUNCTION"
        and not node["schema"]
        and node["function_name"].lower() in aggregate_names()
    )


def _is_constant(node: Node) -> bool:
    """Whether an expression reads no row and is the same each time."""
    return not any(
        below.get("class") in ("COLUMN_REF", "SUBQUERY", "STAR", "WINDOW", "LAMBDA", "POSITIONAL_REFERENCE")
        or (below.get("class") == "FUNCTION" and _is_changing(below))
        for below in syntax.walk(node)
    )


def _is_changing(function: Node) -> bool:
    name = function["function_name"].lower()
    return (
        bool(function["schema"])
        or name.startswith("ai_")
        or name in volatile_names()
        or name in aggregate_names()
    )


def _kind_of(cursor: duckdb.DuckDBPyConnection, name: str) -> tuple[bool, bool]:
    """Whether views and whether tables of that name exist, in any schema."""
    row = cursor.execute(
        "SELECT (SELECT count(*) FROM duckdb_views() WHERE lower(view_name) = lower($1)),"
        " (SELECT count(*) FROM duckdb_tables() WHERE lower(table_name) = lower($1))",
        [name],
    ).fetchone()
    assert row is not None
    return row[0] > 0, row[1] > 0


def _quote(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _balanced(encoded: bytes, start: int, stop: int) -> tuple[int, int]:
    """The range with the parentheses in front of it that are closed in it."""
    depth = lowest = 0
    for offset, kind in duckdb.tokenize(encoded[start:stop].decode()):
        if kind == duckdb.token_type.operator:
            character = encoded[start:stop].decode()[offset : offset + 1]
            depth += (character == "(") - (character == ")")
            lowest = min(lowest, depth)
    for _ in range(-lowest):
        before = _skip_back(encoded, start)
        if encoded[before : before + 1] != b"(":
            break
        start = before
    return start, stop


def _after_parentheses(encoded: bytes, start: int, stop: int) -> int:
    """The end of `stop` moved behind the closing parentheses that pair with those in front of `start`."""
    while True:
        before = _skip_back(encoded, start)
        after = _skip_forward(encoded, stop)
        if before < 0 or encoded[before : before + 1] != b"(" or encoded[after : after + 1] != b")":
            return stop
        start, stop = before, after + 1


def _skip_back(encoded: bytes, position: int) -> int:
    position -= 1
    while position >= 0:
        if encoded[position : position + 1].isspace():
            position -= 1
        elif encoded[position - 1 : position + 1] == b"*/":
            position = encoded.rfind(b"/*", 0, position - 1) - 1
        else:
            break
    return position


def _skip_forward(encoded: bytes, position: int) -> int:
    while position < len(encoded):
        if encoded[position : position + 1].isspace():
            position += 1
        elif encoded[position : position + 2] == b"/*":
            position = encoded.find(b"*/", position) + 2
        elif encoded[position : position + 2] == b"--":
            position = encoded.find(b"\n", position) + 1 or len(encoded)
        else:
            break
    return position


def _limit_start(encoded: bytes, position: int) -> int | None:
    """Where the LIMIT or OFFSET begins that follows a byte of its block."""
    depth = 0
    text = encoded[position:].decode(errors="ignore")
    starts = [offset for offset, kind in duckdb.tokenize(text) if kind != duckdb.token_type.comment]
    for start in starts:
        rest = encoded[position + start :]
        if rest[:1] in (b"(", b")"):
            depth += 1 if rest[:1] == b"(" else -1
        elif depth <= 0 and re.match(rb"(limit|offset|fetch)\b", rest, re.IGNORECASE):
            return position + start
    return None


def _name_stop(encoded: bytes, start: int) -> int:
    """The byte behind a possibly qualified name."""
    text = encoded[start:].decode()
    starts = [offset for offset, _ in duckdb.tokenize(text)]
    position = 0
    while position + 2 < len(starts) and encoded[start + starts[position + 1] :].startswith(b"."):
        position += 2
    stop = start + starts[position + 1] if position + 1 < len(starts) else len(encoded)
    return len(encoded[:stop].rstrip())


def _closing_parenthesis(encoded: bytes, start: int) -> int:
    """The byte behind the parenthesis that closes the first one opened at or after `start`."""
    depth = 0
    for offset, kind in duckdb.tokenize(encoded[start:].decode()):
        if kind == duckdb.token_type.operator:
            character = encoded[start + offset : start + offset + 1]
            depth += (character == b"(") - (character == b")")
            if depth == 0 and character == b")":
                return start + offset + 1
    raise AssertionError("no closing parenthesis")
