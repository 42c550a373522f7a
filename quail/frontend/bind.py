"""Binding: walks the tree of a statement and notes every AI call with the way to it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import duckdb

from quail.errors import BindError, UnsupportedError
from quail.frontend.calls import CallReader, Question
from quail.frontend.copies import Copies, first_line, quote_name
from quail.frontend.drafts import (
    Context,
    Draft,
    conjuncts_of,
    deeper,
    draft_block,
    is_constant,
    last_byte,
    place_of,
    signature,
)
from quail.frontend.pinning import Pinner
from quail.frontend.ranges import after_parentheses, balanced, limit_start
from quail.frontend.relations import Relations
from quail.plan import syntax
from quail.plan.functions import aggregate_names, scalar_names
from quail.plan.logical import AICall, Operator
from quail.plan.lookups import lookup_name, readable, stand_in
from quail.plan.scope import is_visible_table
from quail.plan.statement import (
    Block,
    Clause,
    Edit,
    FromPlace,
    OperandPlace,
    Place,
    Site,
    Source,
    Stage,
    TablePlace,
)
from quail.plan.syntax import Node, Span

_MAX_LABELS = 1000


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
        self.warnings: list[str] = []
        self._text = text
        self._encoded = text.encode()
        self._offset = offset
        self._query = query
        self._cursor = cursor
        self._nonce = nonce
        self._relations = Relations(self.blocks, cursor, nonce)
        self._copies = Copies(self._encoded, offset, cursor, nonce, self._fail)
        self._forbidden: str | None = None
        self._reader = CallReader(
            self._fail,
            self._refuse,
            self._warn,
            self._constant,
            is_constant,
            self._table_rows,
            lambda _: None,
            self._relations.name_of,
            scalar_names(),
        )

    def bind(self) -> None:
        """Walks the whole statement."""
        self._bind_query(self._query, (), frozenset())
        self.sites = [replace(site, index=i) for i, site in enumerate(sorted(self.sites, key=_text_order))]
        for site in self.sites:
            site.node["quail_site"] = site.index
        self.edits += self._copies.edits

    @property
    def sources(self) -> list[Source]:
        """Views and files that a run copies."""
        return list(self._copies.sources.values())

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
            raise self._fail(first_line(error), node, None) from error
        assert row is not None
        return row[0]

    def _table_rows(self, node: Node) -> list[tuple[Any, ...]] | None:
        """The rows of the table that a name means, unless it is a column in sight."""
        names = node["column_names"]
        if self._relations.resolve([name.lower() for name in names]) is not None:
            return None
        try:
            table = ".".join(map(quote_name, names))
            cursor = self._cursor.execute(f"SELECT * FROM {table} LIMIT {_MAX_LABELS}")
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
        draft = draft_block(len(self.blocks), node, places)
        self.blocks.append(None)
        self._relations.drafts.append(draft)
        names = [self._item_name(item) if self._has_call(item) else None for item in node["select_list"]]
        pooled: list[Node] = []
        from_table = self._bind_from(draft, node["from_table"], (), tables, pooled, is_root=True)
        self._resolve_aliases(draft)
        conjuncts = [*pooled, *conjuncts_of(node["where_clause"])]
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
        self._relations.drafts.pop()

    def _bind_modifier(self, draft: Draft, modifier: Node, tables: frozenset[str]) -> None:
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

    def _resolve_aliases(self, draft: Draft) -> None:
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
                columns = (self._relations.columns_of(draft, index) for index in range(len(draft.items)))
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

    def _break_ties(self, draft: Draft) -> None:
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
        if not arguments or (order is None and self._relations.keeps_order(draft, node["from_table"])):
            return
        keys = [
            syntax.function("hash", [syntax.expression("CAST(x AS VARCHAR)", x=argument)])
            for argument in arguments.values()
        ]
        template = syntax.parse_query("SELECT 1 ORDER BY 1")["modifiers"][0]
        added = [{**template["orders"][0], "expression": key} for key in keys]
        position = limit_start(self._encoded, self._offset + last_byte(node))
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
        start, stop = balanced(self._encoded, span[0] + self._offset, span[1] + self._offset)
        source = self._encoded[start:stop].decode()
        quoted = source.replace('"', '""')
        return Edit((after_parentheses(self._encoded, start, stop),) * 2, f' AS "{quoted}"')

    # FROM

    def _bind_from(
        self,
        draft: Draft,
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
            self._copies.add_table(table, tables)
        elif kind == "TABLE_FUNCTION":
            with self._forbid("an argument of a table function"):
                self._bind_refused(table["function"])
            self._copies.add_reader(table)
        elif kind != "EMPTY":
            with self._forbid(f"a {kind.lower()} table"):
                self._bind_refused(table)
        return table

    def _bind_join(
        self,
        draft: Draft,
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
            pooled += conjuncts_of(condition)
            return {**bare, "condition": None, "ref_type": "CROSS"}
        else:
            self._bind_filter(Context(draft, Clause.ON, condition, join=path), condition, tables)
        return bare

    def _has_call(self, node: Node) -> bool:
        return any(map(self._is_call, syntax.walk(node)))

    def _single_table(self, draft: Draft) -> tuple[str, bool]:
        if len(draft.items) != 1:
            return "", False
        name, table = draft.items[0]
        if table["type"] != "BASE_TABLE":
            return name, False
        written = table["table_name"]
        is_cte = is_visible_table(written, draft.places, self._relations.blocks_so_far()) or any(
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
        if context.block.group_signatures and signature(node) in context.block.group_signatures:
            context = replace(context, is_grouped=True)
        operator = self._reader.operator_of(node)
        if operator is not None:
            self._bind_call(context, node, operator, tables)
            return
        kind = node.get("class")
        if kind == "CONJUNCTION":
            name = "AND" if node["type"] == "CONJUNCTION_AND" else "OR"
            for index, child in enumerate(node["children"]):
                self._bind_expression(deeper(context, node, name, index), child, tables)
        elif kind == "CASE":
            self._bind_case(context, node, tables)
        elif node.get("type") == "OPERATOR_COALESCE":
            for index, child in enumerate(node["children"]):
                self._bind_expression(deeper(context, node, "COALESCE", index), child, tables)
        elif kind == "FUNCTION":
            self._bind_function(context, node, tables)
        elif kind == "WINDOW":
            inside = replace(deeper(context, node, "window", 0), in_window=True)
            self._bind_children(inside, node, tables)
        elif kind == "SUBQUERY":
            if node["child"] is not None:
                self._bind_expression(deeper(context, node, "IN", 0), node["child"], tables)
            places = (*context.block.places, place_of(context))
            self._bind_query(node["subquery"]["node"], places, tables)
        elif kind == "LAMBDA":
            with self._forbid("a lambda"):
                self._bind_children(context, node, tables)
        elif node.get("type") in syntax.QUERY_NODES:
            raise AssertionError("a query outside a subquery")
        else:
            self._bind_children(deeper(context, node, "expression", 0), node, tables)

    def _bind_children(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        for child in syntax.children(node):
            self._bind_expression(context, child, tables)

    def _bind_case(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        for index, check in enumerate(node["case_checks"]):
            when = deeper(context, node, "CASE", 2 * index)
            then = deeper(context, node, "CASE", 2 * index + 1)
            self._bind_expression(when, check["when_expr"], tables)
            self._bind_expression(then, check["then_expr"], tables)
        if node["else_expr"] is not None:
            last = deeper(context, node, "CASE", 2 * len(node["case_checks"]))
            self._bind_expression(last, node["else_expr"], tables)

    def _bind_function(self, context: Context, node: Node, tables: frozenset[str]) -> None:
        name = node["function_name"].lower()
        if name == "if" and not node["schema"] and len(node["arguments"]) == 3:
            for index, argument in enumerate(node["arguments"]):
                inside = deeper(context, node, "IF", index)
                self._bind_expression(inside, argument["expression"], tables)
            return
        if not node["schema"] and name in aggregate_names():
            context = replace(context, in_aggregate=True)
            inside = deeper(context, node, "aggregate", 0)
            for argument in node["arguments"]:
                self._bind_expression(inside, argument["expression"], tables)
            for order in node["order_bys"]["orders"]:
                self._bind_expression(inside, order["expression"], tables)
            if node["filter"] is not None:
                self._bind_expression(deeper(context, node, "FILTER", 0), node["filter"], tables)
            return
        self._bind_children(deeper(context, node, "expression", 0), node, tables)

    def _bind_call(self, context: Context, node: Node, operator: Operator, tables: frozenset[str]) -> None:
        if self._forbidden is not None:
            raise self._refuse(f"{operator.value} in {self._forbidden}", node, None)
        reader = replace(self._reader, relation=lambda below: self._relations.relation(below, context))
        question = reader.read(node, operator)
        span = syntax.own_span(node)
        assert span is not None
        place = place_of(context)
        for argument in question.arguments:
            self._bind_expression(deeper(context, node, "argument", 0), argument, tables)
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
