"""Pins what would be another each time it is read: samples, and functions such as `random()`.

A run reads a statement's tables more than once: for the candidates of each call, and for the result. So a
sampled table, and a subquery or CTE without calls whose rows may differ from read to read (a volatile
function, a LIMIT, an aggregate that depends on the order of rows), is copied once per run, and a volatile
function beside calls is computed once for each row. The tree is changed in place; the result is then read
from the tree and not from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quail.errors import UnsupportedError
from quail.plan import syntax
from quail.plan.functions import is_unordered_aggregate, volatile_names
from quail.plan.statement import Source
from quail.plan.syntax import Node

_HARMLESS = frozenset(
    {
        "current_connection_id",
        "current_query",
        "current_query_id",
        "current_transaction_id",
        "currval",
        "error",
        "stats",
        "vector_type",
        "write_log",
    }
)
_Refuse = Callable[[str, Node, str | None], UnsupportedError]


@dataclass
class Pinner:
    """Pins one statement.

    Attributes:
        nonce: makes the names of copies unlike the user's.
        is_call: whether a node is an AI call.
        binds: whether DuckDB can bind a query as it stands, without the queries around it.
        refuse: makes the error of a statement that cannot be pinned.
        sources: what a run has to copy, in this order.
    """

    nonce: str
    is_call: Callable[[Node], bool]
    binds: Callable[[Node], bool]
    refuse: _Refuse
    sources: list[Source] = field(default_factory=list)

    def pin(self, query: Node) -> None:
        """Pins a statement that holds calls, in place."""
        if _holds_unstable(query):
            self._query(query, [])

    def _query(self, node: Node, tables: list[Node]) -> None:
        tables = list(tables)
        for entry in node["cte_map"]["map"]:
            inner = entry["value"]["query_node"]
            if not self._is_free(inner):
                self._query(inner, tables)
            elif _holds_unstable(inner) and self._can_copy(inner, tables):
                copied = self._copy(syntax.with_tables(inner, self._free(tables)))
                entry["value"]["query_node"] = {**syntax.parse_query("SELECT * FROM x"), "from_table": copied}
            tables.append(entry)
        if node["type"] == "SELECT_NODE":
            self._block(node, tables)
        elif node["type"] == "SET_OPERATION_NODE":
            for child in node["children"]:
                self._query(child, tables)

    def _block(self, node: Node, tables: list[Node]) -> None:
        leaves = list(_leaves(node, "from_table"))
        for holder, key in leaves:
            self._leaf(holder, key, tables)
        if node["sample"] is not None:
            self._sample(node, leaves, tables)
        for query in _queries_below(node):
            if not self._is_free(query):
                self._query(query, tables)
        changing = [found for root in self._deciding(node) for found in _changing_below(root)]
        if changing:
            self._rows(node, leaves, tables, changing)

    def _leaf(self, holder: Node, key: str, tables: list[Node]) -> None:
        """Copies a sampled table, or a subquery of FROM whose rows may differ from read to read."""
        table = holder[key]
        is_subquery = table["type"] == "SUBQUERY"
        if not self._is_free(table):
            if table["sample"] is not None:
                hint = "sample the table that it reads"
                raise self.refuse("a sample of a subquery with AI calls", table, hint)
            if is_subquery:
                self._query(table["subquery"]["node"], tables)
        elif table["sample"] is not None:
            holder[key] = self._copied_leaf(table, tables, table["sample"])
        elif is_subquery and _holds_unstable(table) and self._can_copy(table["subquery"]["node"], tables):
            holder[key] = self._copied_leaf(table, tables, None)

    def _can_copy(self, query: Node, tables: list[Node]) -> bool:
        """Whether a query without calls can be read on its own.

        It cannot where it reads calls through a CTE, or the tables of queries around it.
        """
        if query["type"] != "RECURSIVE_CTE_NODE" and self.binds(
            syntax.with_tables(query, self._free(tables))
        ):
            return True
        changing = next((node for node in syntax.walk(query) if _is_changing(node)), None)
        if changing is not None:
            hint = "compute it in a CTE that reads neither AI calls nor the queries around it"
            raise self.refuse("a volatile function or sample in this place", changing, hint)
        return False

    def _sample(self, node: Node, leaves: Sequence[tuple[Node, str]], tables: list[Node]) -> None:
        if len(leaves) != 1 or not self._is_free(leaves[0][0][leaves[0][1]]):
            hint = "sample one table, or a subquery without AI calls"
            raise self.refuse("USING SAMPLE over more than one table", node, hint)
        holder, key = leaves[0]
        holder[key] = self._copied_leaf(holder[key], tables, node["sample"])
        node["sample"] = None

    def _rows(
        self,
        node: Node,
        leaves: Sequence[tuple[Node, str]],
        tables: list[Node],
        changing: Sequence[tuple[Node, Node]],
    ) -> None:
        """Computes volatile functions once for each row of the only table of a block."""
        first = changing[0][0]
        hint = "compute it in a subquery or CTE of its own"
        if any(root is node["having"] for _, root in changing):
            raise self.refuse("a volatile function in HAVING beside AI calls", first, hint)
        if len(leaves) != 1 or not self._is_free(leaves[0][0][leaves[0][1]]):
            raise self.refuse("a volatile function beside AI calls over more than one table", first, hint)
        holder, key = leaves[0]
        table = holder[key] = self._copied_leaf(holder[key], tables, None)
        alias = table["alias"]
        values = [syntax.aliased(dict(found), f"v{i}") for i, (found, _) in enumerate(changing)]
        row = syntax.aliased(syntax.column(alias, "rowid"), "r")
        kept = self._source(syntax.select([row, *values], table))
        for number, (found, _) in enumerate(changing):
            own, its = syntax.column(alias, "rowid"), syntax.column(kept.name, "r")
            is_same_row = syntax.expression("x = y", x=its, y=own)
            value = syntax.column(kept.name, f"v{number}")
            lookup = syntax.scalar_subquery(syntax.select([value], _table(kept.name), is_same_row))
            old_alias = found["alias"]
            location = {key: value for key, value in found.items() if key.startswith("query_location")}
            found.clear()
            found.update(lookup, alias=old_alias, **location)

    def _deciding(self, node: Node) -> Iterator[Node]:
        """The expressions of a block that decide which questions are asked."""
        deciding = [node[clause] for clause in ("where_clause", "having", "qualify")]
        deciding += node["group_expressions"]
        if any(modifier["type"].startswith("LIMIT") for modifier in node["modifiers"]):
            deciding += [order["expression"] for m in node["modifiers"] for order in m.get("orders", ())]
        deciding = [root for root in deciding if root is not None]
        yield from deciding
        yield from _conditions(node["from_table"])
        for position, item in enumerate(node["select_list"]):
            if not self._is_free(item) or any(_names_item(root, item, position) for root in deciding):
                yield item

    # Copies

    def _copied_leaf(self, table: Node, tables: list[Node], sample: Any) -> Node:
        function_name = table.get("function", {}).get("function_name", "")
        alias = table["alias"] or table.get("table_name") or function_name
        bare = {**table, "sample": None}
        star = syntax.parse_query("SELECT * FROM x")
        query = {**star, "from_table": bare, "sample": sample}
        copied = self._copy(syntax.with_tables(query, self._free(tables)))
        return {**copied, "alias": alias}

    def _copy(self, query: Node) -> Node:
        return _table(self._source(query).name)

    def _source(self, query: Node) -> Source:
        name = f"quail_{self.nonce}_pinned_{len(self.sources)}"
        source = Source(name, syntax.to_sql(query), is_renamed=True, is_pinned=True)
        self.sources.append(source)
        return source

    def _is_free(self, tree: Any) -> bool:
        return not any(map(self.is_call, syntax.walk(tree)))

    def _free(self, tables: Sequence[Node]) -> list[Node]:
        return [entry for entry in tables if self._is_free(entry)]


def _table(name: str) -> Node:
    template: Node = syntax.parse_query("SELECT * FROM x")["from_table"]
    return {**template, "table_name": name, "qualified_name": {"path": [name]}, "alias": ""}


def _names_item(root: Node, item: Node, position: int) -> bool:
    """Whether an expression reads a select item by its alias, its position or ORDER BY ALL."""
    if root["class"] == "CONSTANT":
        return bool(root["literal"].get("text") == str(position + 1))
    alias = item["alias"].lower()
    return root["class"] == "STAR" or any(
        [name.lower() for name in below["column_names"]] == [alias]
        for below in syntax.walk(root)
        if below.get("class") == "COLUMN_REF"
    )


def _leaves(holder: Node, key: str) -> Iterator[tuple[Node, str]]:
    """The tables of FROM, as the node and key that hold them."""
    table = holder[key]
    if table["type"] == "JOIN":
        yield from _leaves(table, "left")
        yield from _leaves(table, "right")
    elif table["type"] != "EMPTY":
        yield holder, key


def _conditions(table: Node) -> Iterator[Node]:
    if table["type"] == "JOIN":
        if table["condition"] is not None:
            yield table["condition"]
        yield from _conditions(table["left"])
        yield from _conditions(table["right"])


def _queries_below(node: Node) -> Iterator[Node]:
    """Queries of the expressions of a block, outermost ones only."""
    roots = [node["select_list"], node["where_clause"], node["having"], node["qualify"], node["modifiers"]]
    pending: list[Any] = [root for root in roots if root is not None]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if value.get("type") in syntax.QUERY_NODES:
                yield value
            else:
                pending += value.values()
        elif isinstance(value, list):
            pending += value


def _changing_below(root: Node) -> Iterator[tuple[Node, Node]]:
    """Volatile function calls of an expression, without those in its queries."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node.get("type") in syntax.QUERY_NODES:
            continue
        if _is_changing(node):
            yield node, root
        else:
            pending += syntax.children(node)


def _is_changing(node: Node) -> bool:
    if node.get("class") == "FUNCTION":
        name = node["function_name"].lower()
        return not node["schema"] and name in volatile_names() and name not in _HARMLESS
    return node.get("sample") is not None and ("type" in node)


def _is_unstable(node: Node) -> bool:
    """Whether a query's rows may depend on the order in which DuckDB happens to read."""
    if node.get("type") in ("LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER") or node.get("class") == "WINDOW":
        return True
    return is_unordered_aggregate(node)


def _holds_unstable(tree: Any) -> bool:
    return any(_is_changing(node) or _is_unstable(node) for node in syntax.walk(tree))
