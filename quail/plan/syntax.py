"""SQL text to DuckDB's own syntax tree and back.

A tree is what `json_serialize_sql` returns: nested dictionaries whose nodes say where they stand in the text.
Trees are shared between queries, so they are never changed once bound: a rewrite builds new dictionaries
around old ones.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import duckdb

from quail.errors import BindError, UnsupportedError

Node: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]

_NOWHERE = 2**63
_local = threading.local()

QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE"})


def _connection() -> duckdb.DuckDBPyConnection:
    """A private connection of this thread that parses and prints SQL and holds no data."""
    connection: duckdb.DuckDBPyConnection | None = getattr(_local, "connection", None)
    if connection is None:
        connection = duckdb.connect(config={"threads": 1, "enable_external_access": False})
        _local.connection = connection
    return connection


def encode(text: str) -> bytes:
    """The bytes of a statement, which are what positions in its tree count.

    Raises:
        BindError: the text holds a lone surrogate, which no SQL text may.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BindError(
            "the statement holds a lone surrogate, which is not text", text=text, start=error.start
        ) from None


def parse_query(text: str) -> Node:
    """The query node of one SELECT statement (with FROM-first, VALUES and set operations).

    Raises:
        BindError: the text is not SQL, is nested too deeply, or is more than one statement.
        UnsupportedError: DuckDB understands the statement but gives no tree for it (PIVOT).
    """
    if not text.strip():
        raise BindError("the statement is empty")
    row = _connection().execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()
    assert row is not None
    try:
        tree = json.loads(row[0])
    except RecursionError:
        raise BindError("the statement is nested too deeply", hint="split it with WITH") from None
    if tree["error"]:
        _raise_parse_error(tree, text)
    statements = tree["statements"]
    if len(statements) != 1:
        raise BindError(f"one statement is needed, got {len(statements)}", hint="run them one by one")
    node: Node = statements[0]["node"]
    return node


def _raise_parse_error(tree: Node, text: str) -> None:
    message = str(tree["error_message"])
    start = character_offset(encode(text), int(tree["position"])) if "position" in tree else None
    if tree["error_type"] == "not implemented":
        raise UnsupportedError(
            f"Quail cannot read this statement: {message}",
            hint="SELECT, CREATE TABLE AS, INSERT and COPY around a SELECT are supported; PIVOT is not",
            text=text,
            start=start,
        )
    raise BindError(message, text=text, start=start)


def character_offset(encoded: bytes, byte_offset: int) -> int:
    """The character offset of a byte offset."""
    return len(encoded[:byte_offset].decode("utf-8", errors="ignore"))


@functools.cache
def _expression_template(text: str) -> Node:
    node: Node = parse_query(f"SELECT {text}")["select_list"][0]
    return node


def expression(text: str, **parts: Node) -> Node:
    """An expression from its text, with the named columns in it replaced by whole expressions.

    >>> to_sql(expression("x IS TRUE", x=expression("a = 1")))
    '(CAST((a = 1) AS BOOLEAN) IS NOT DISTINCT FROM true)'
    """
    template = _expression_template(text)
    if not parts:
        return template

    def fill(node: Node) -> Node | None:
        names = node.get("column_names")
        return parts.get(names[0]) if names is not None and len(names) == 1 else None

    return transform(template, fill)


@functools.cache
def _query_template(text: str) -> Node:
    return parse_query(text)


def query(text: str, **parts: Node) -> Node:
    """A query from its text, with the named tables in it replaced by whole queries (as subqueries)."""

    def fill(node: Node) -> Node | None:
        if node.get("type") == "BASE_TABLE" and node.get("table_name") in parts:
            return subquery_table(parts[node["table_name"]], node["alias"] or node["table_name"])
        return None

    return transform(_query_template(text), fill)


def column(*names: str) -> Node:
    """A column reference."""
    return {**_expression_template("x"), "column_names": list(names), "alias": ""}


def string(value: str) -> Node:
    """A string constant."""
    return {**_expression_template("'x'"), "literal": {"kind": "STRING", "text": value}}


def function(name: str, arguments: Sequence[Node]) -> Node:
    """A function call."""
    return {
        **_expression_template("f(x)"),
        "function_name": name,
        "qualified_name": {"path": [name]},
        "arguments": [{"name": "", "expression": {**argument, "alias": ""}} for argument in arguments],
    }


def conjunction(expressions: Sequence[Node]) -> Node | None:
    """The AND of some expressions; None of none."""
    if len(expressions) <= 1:
        return expressions[0] if expressions else None
    return {**_expression_template("x AND y"), "children": list(expressions)}


def aliased(node: Node, alias: str) -> Node:
    """The expression under another name."""
    return {**node, "alias": alias}


def subquery_table(node: Node, alias: str) -> Node:
    """A query as a table of FROM."""
    template = _query_template("SELECT 1 FROM (SELECT 1) AS x")["from_table"]
    return {**template, "alias": alias, "subquery": {"node": node, "named_param_map": []}}


def scalar_subquery(node: Node) -> Node:
    """A query as an expression of one value."""
    return {**_expression_template("(SELECT 1)"), "subquery": {"node": node, "named_param_map": []}}


def select(columns: Sequence[Node], from_table: Node | None = None, where: Node | None = None) -> Node:
    """A plain SELECT."""
    template = _query_template("SELECT 1")
    return {
        **template,
        "select_list": list(columns),
        "from_table": from_table if from_table is not None else template["from_table"],
        "where_clause": where,
    }


def with_tables(node: Node, entries: Sequence[Node]) -> Node:
    """The query with CTEs in front that it may read."""
    if not entries:
        return node
    if node["type"] == "SELECT_NODE" and not node["cte_map"]["map"]:
        return {**node, "cte_map": {"map": list(entries)}}
    outer = query("SELECT * FROM x", x=node)
    return {**outer, "cte_map": {"map": list(entries)}}


def transform(node: Node, replace: Callable[[Node], Node | None]) -> Node:
    """The tree with some nodes replaced; a replacement is not looked into, and untouched parts are shared."""
    replaced = replace(node)
    if replaced is not None:
        alias = node.get("alias")
        return {**replaced, "alias": alias} if alias and "class" in replaced else replaced
    changes = {}
    for key, value in node.items():
        new = _transform_value(value, replace)
        if new is not value:
            changes[key] = new
    return {**node, **changes} if changes else node


def _transform_value(value: Any, replace: Callable[[Node], Node | None]) -> Any:
    if isinstance(value, dict):
        return transform(value, replace)
    if isinstance(value, list):
        new = [_transform_value(entry, replace) for entry in value]
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return value


def walk(value: Any) -> Iterator[Node]:
    """Every dictionary of a tree, parents first."""
    if isinstance(value, dict):
        yield value
        for entry in value.values():
            if isinstance(entry, (dict, list)):
                yield from walk(entry)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, (dict, list)):
                yield from walk(entry)


def children(node: Node) -> Iterator[Node]:
    """The dictionaries directly below a node, through lists and plain holders."""
    for value in node.values():
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield from _dictionaries(value)


def _dictionaries(values: Sequence[Any]) -> Iterator[Node]:
    for value in values:
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield from _dictionaries(value)


def own_span(node: Mapping[str, Any]) -> Span | None:
    """The byte range that a node itself claims, None where it was made up by the parser."""
    start = node.get("query_location")
    if start is None or start >= _NOWHERE:
        return None
    return start, start + int(node.get("query_location_length", 0))


def extent(node: Node) -> Span | None:
    """The byte range from the first to the last character of a node and everything below it."""
    spans = [span for below in walk(node) if (span := own_span(below)) is not None]
    return (min(start for start, _ in spans), max(stop for _, stop in spans)) if spans else None


def to_sql_each(expressions: Sequence[Node]) -> list[str]:
    """The texts of many expressions at once."""
    if not expressions:
        return []
    mark = f"quail_{secrets.token_hex(8)}"
    text = to_sql(select([aliased(expression, mark) for expression in expressions]))
    pieces = text.removeprefix("SELECT ").split(f" AS {mark}")
    assert len(pieces) == len(expressions) + 1, "an expression holds the mark"
    return [piece.removeprefix(", ") for piece in pieces[:-1]]


def to_sql(node: Node) -> str:
    """The text of a query or an expression, as DuckDB writes it."""
    is_query = node.get("type") in QUERY_NODES
    tree = node if is_query else select([node])
    text = json.dumps({"error": False, "statements": [{"node": tree, "named_param_map": []}]})
    row = _connection().execute("SELECT json_deserialize_sql(?::JSON)", [text]).fetchone()
    assert row is not None
    sql = str(row[0])
    return sql if is_query else sql.removeprefix("SELECT ")
