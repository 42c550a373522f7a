"""From a statement's text to a bound statement.

DuckDB's own parser reads the statement, so everything that DuckDB understands is understood the same way
here. Only the spans of AI calls (and names that would change with them) are replaced in the text; the rest
reaches DuckDB verbatim.
"""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import duckdb

from quail.errors import BindError
from quail.frontend.bind import Binder
from quail.frontend.statements import query_span
from quail.plan import syntax
from quail.plan.lookups import readable
from quail.plan.scope import with_visible_tables
from quail.plan.statement import BoundStatement, Edit, Site, TablePlace
from quail.plan.syntax import Node
from quail.planner.candidates import CandidatePlanner


class HasCursor(Protocol):
    """What binding needs of a catalog."""

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A fresh cursor of the session's DuckDB."""


_NOT_TEXT = frozenset({"BLOB", "LIST", "ARRAY", "STRUCT", "MAP", "UNION", "BIT"})

Parameters = Sequence[Any] | Mapping[str, Any] | None


def bind_sql(text: str, parameters: Parameters, catalog: HasCursor) -> BoundStatement:
    """Binds a statement: finds its AI calls and checks everything that can be checked before a run.

    Args:
        text: one SQL statement.
        parameters: values of `?` (a sequence) or `$name` (a mapping).
        catalog: the tables it may read.

    Raises:
        BindError: the statement cannot be understood, or names something that does not exist; located.
        UnsupportedError: it is understood but not supported.
    """
    nonce = _nonce(text)
    span = query_span(text)
    if span is None:
        _check_syntax(text)
        return BoundStatement(text, parameters=_plain_parameters(parameters), nonce=nonce)
    encoded = syntax.encode(text)
    query = _parse(text, encoded[span[0] : span[1]].decode(), span[0])
    cursor = catalog.cursor()
    try:
        values, edits = _bind_parameters(query, parameters, nonce, span[0], text)
        set_variables(cursor, values)
        binder = Binder(text, query, span[0], cursor, nonce)
        pinned = binder.pin()
        try:
            binder.bind()
        except RecursionError:
            raise BindError("the statement is nested too deeply", hint="split it with WITH") from None
        lookups = syntax.to_sql_each([site.node for site in binder.sites])
        calls = [Edit(site.span, text) for site, text in zip(binder.sites, lookups, strict=True)]
        assert None not in binder.blocks
        bound = BoundStatement(
            text,
            tuple(binder.calls),
            tuple(binder.sites),
            tuple(block for block in binder.blocks if block is not None),
            query,
            span,
            tuple(edits + binder.edits + calls),
            (*binder.sources, *pinned),
            values,
            nonce,
            tuple(binder.warnings),
        )
        names = _check(bound, cursor)
        _check_arguments(bound, cursor)
        return replace(bound, column_names=names) if pinned else bound
    finally:
        cursor.close()


def set_variables(cursor: duckdb.DuckDBPyConnection, values: Mapping[str, Any]) -> None:
    """Makes the parameters of a statement readable by `getvariable`."""
    for name, value in values.items():
        try:
            cursor.execute(f"SET VARIABLE {name} = ?", [value])
        except duckdb.Error as error:
            shown = reprlib.repr(value)
            raise BindError(f"{shown} cannot be a parameter: {str(error).splitlines()[0]}") from None


def _parse(text: str, part: str, offset: int) -> Node:
    try:
        return syntax.parse_query(part)
    except BindError as error:
        if offset == 0 or error.line is None or error.column is None:
            raise
        lines = part.split("\n")[: error.line - 1]
        start = syntax.character_offset(syntax.encode(text), offset)
        start += sum(len(line) + 1 for line in lines) + error.column - 1
        message = error.message.split("\n", 1)[0]
        raise type(error)(message, hint=error.hint, text=text, start=start) from None


def _nonce(text: str) -> str:
    nonce = secrets.token_hex(4)
    while nonce in text:
        nonce = secrets.token_hex(4)
    return nonce


def _plain_parameters(parameters: Parameters) -> dict[str, Any]:
    if parameters is None:
        return {}
    if isinstance(parameters, Mapping):
        return {str(name): value for name, value in parameters.items()}
    if not isinstance(parameters, Iterable) or isinstance(parameters, str | bytes):
        raise BindError(
            f"parameters are a sequence or a mapping, not {type(parameters).__name__}",
            hint="sql('… ?', [value]) or sql('… $name', {'name': value})",
        )
    return {str(i + 1): value for i, value in enumerate(parameters)}


def _bind_parameters(
    query: Node, parameters: Parameters, nonce: str, offset: int, text: str
) -> tuple[dict[str, Any], list[Edit]]:
    """Turns parameters into variables, so that each query of a run can read those it needs."""
    given = _plain_parameters(parameters)
    values: dict[str, Any] = {}
    edits = []
    used = set()
    for node in syntax.walk(query):
        if node.get("class") != "PARAMETER":
            continue
        name = str(node["identifier"])
        span = syntax.own_span(node)
        assert span is not None
        start = syntax.character_offset(text.encode(), span[0] + offset)
        if name not in given:
            raise BindError(
                f"parameter {name} has no value: {len(given)} given",
                hint="pass it to sql(query, parameters)",
                text=text,
                start=start,
            )
        used.add(name)
        variable = f"quail_{nonce}_p_{name}"
        values[variable] = given[name]
        lookup = syntax.function("getvariable", [syntax.string(variable)])
        node.clear()
        node.update(lookup, query_location=span[0], query_location_length=span[1] - span[0])
        edits.append(Edit((span[0] + offset, span[1] + offset), f"getvariable('{variable}')"))
    unused = sorted(set(given) - used)
    if unused:
        raise BindError(f"parameter {unused[0]} does not stand in the statement", hint="remove its value")
    return values, edits


def _check_syntax(text: str) -> None:
    try:
        with duckdb.connect() as connection:
            statements = connection.extract_statements(text)
    except duckdb.Error as error:
        raise BindError(str(error).split("\n", 1)[0], text=text, start=0) from None
    if len(statements) != 1:
        raise BindError(f"one statement is needed, got {len(statements)}", hint="run them one by one")


def _check(bound: BoundStatement, cursor: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
    """Has DuckDB bind the statement with stand-ins for the lookups, so that errors come before a run.

    Gives the names of its columns.
    """
    start, stop = bound.query_span
    try:
        return tuple(cursor.sql(bound.edited_text(start, stop)).columns)
    except duckdb.Error as error:
        message = readable(error, bound.nonce)
        raise BindError(message, text=bound.text, start=_place_of_name(message, bound.text)) from error


def _place_of_name(message: str, text: str) -> int | None:
    """Where the first name in an error message stands in the statement."""
    for name in re.findall(r'"([^"]+)"|with name (\S+) does', message):
        found = re.search(rf"(?<!\w){re.escape(name[0] or name[1])}(?!\w)", text, re.IGNORECASE)
        if found is not None:
            return found.start()
    return None


def _check_arguments(bound: BoundStatement, cursor: duckdb.DuckDBPyConnection) -> None:
    """Refuses documents that are not text; one that reads the queries around it is checked by its run."""
    planner = CandidatePlanner(bound, bound.blocks, "as_written", lambda _: True)
    checks = [
        (site, query)
        for site in bound.sites
        if not all(_is_surely_text(argument) for argument in site.arguments)
        for query in planner.uncast(site)
    ]
    together = [check for check in checks if _is_outermost(check[0], bound)]
    apart = [check for check in checks if not _is_outermost(check[0], bound)]
    assert bound.query is not None
    tables = bound.query["cte_map"]["map"]
    if not _check_types(bound, together, tables, cursor):
        apart = checks
    for site, query in apart:
        node = with_visible_tables(query, site.places[:-1], bound.blocks)
        _check_types(bound, [(site, node)], [], cursor)


def _is_outermost(site: Site, bound: BoundStatement) -> bool:
    """Whether a site stands in the outermost query or directly in one of its CTEs."""
    return all(isinstance(place, TablePlace) and place.node is bound.query for place in site.places[:-1])


def _check_types(
    bound: BoundStatement,
    checks: Sequence[tuple[Site, Node]],
    tables: Sequence[Node],
    cursor: duckdb.DuckDBPyConnection,
) -> bool:
    """Checks many documents by one query; False where DuckDB cannot bind it."""
    if not checks:
        return True
    node = syntax.select([syntax.scalar_subquery(query) for _, query in checks])
    try:
        types = cursor.sql(syntax.to_sql(syntax.with_tables(node, tables))).types
    except duckdb.Error:
        return False
    for (site, _), type_ in zip(checks, types, strict=True):
        if type_.id.upper() in _NOT_TEXT:
            raise BindError(
                f"a document of {bound.call_of(site).operator.value} is a {type_}, not text",
                hint="make one text of it, for example with array_to_string or to_json",
                text=bound.text,
                start=syntax.character_offset(bound.text.encode(), site.span[0]),
            )
    return True


def _is_surely_text(node: Node) -> bool:
    """Whether an expression can only be text: a concatenation with a string, or a cast to text."""
    if node["class"] == "CAST":
        return bool(node["type_expr"].get("type_name", "").upper() == "VARCHAR")
    if node["class"] == "FUNCTION" and node["function_name"] == "||":
        return any(_is_surely_text(argument["expression"]) for argument in node["arguments"])
    return bool(node["class"] == "CONSTANT" and node["literal"]["kind"] == "STRING")
