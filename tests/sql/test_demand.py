"""What is asked: exactly what a row-by-row evaluation with three-valued short-circuits demands.

The evaluator here knows nothing of queries: it walks expression trees row by row. Operands without calls are decided
first; AND stops at FALSE (in a condition that only keeps TRUE rows at anything but TRUE), OR at TRUE, CASE takes one
branch, coalesce stops at a value.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import pytest

from quail.plan.logical import AICall, Operator
from tests.sql.stub import Key, Stub, StubCatalog, rows, run

Row = dict[str, Any]
Demand = set[tuple[str, str]]


def stored(question: str, text: str) -> Any:
    """The answer to a question about a text."""
    number = zlib.crc32(f"{question}|{text}".encode())
    if question.startswith("s"):
        return None if number % 5 == 0 else (number % 10) / 10
    return (True, True, False, False, None)[number % 5]


def answer(call: AICall, key: Key) -> Any:
    assert (call.operator is Operator.SCORE) == str(call.prompt.parts[0]).startswith("s")
    return stored(str(call.prompt.parts[0]).strip(), key[0])


@dataclass(frozen=True)
class Expression:
    """A node: `kind` with its operands; leaves keep what they need in `name`."""

    kind: str
    operands: tuple[Expression, ...] = ()
    name: str = ""
    column: str = ""

    @property
    def sql(self) -> str:
        parts = [operand.sql for operand in self.operands]
        match self.kind:
            case "free":
                return self.name
            case "call":
                function = "AI.SCORE" if self.name.startswith("s") else "AI.IF"
                return f"{function}('{self.name} ' || {self.column})"
            case "and" | "or":
                return "(" + f" {self.kind.upper()} ".join(parts) + ")"
            case "not":
                return f"(NOT {parts[0]})"
            case "is":
                return f"({parts[0]} IS {self.name})"
            case "case":
                return f"CASE WHEN {parts[0]} THEN {parts[1]} ELSE {parts[2]} END"
            case "if":
                return f"if({parts[0]}, {parts[1]}, {parts[2]})"
            case "coalesce":
                return f"coalesce({', '.join(parts)})"
            case _:
                return f"({parts[0]} > 0.4)"

    @property
    def is_free(self) -> bool:
        return self.kind == "free" or (self.kind != "call" and all(o.is_free for o in self.operands))


def evaluate(node: Expression, row: Row, demand: Demand, *, is_filter: bool) -> Any:
    """The value of an expression in a row; what it needed is added to the demand."""
    match node.kind:
        case "free":
            return {"k > 0": row["k"] > 0, "k = 2": row["k"] == 2, "a IS NULL": row["a"] is None}[node.name]
        case "call":
            text = row[node.column]
            if text is None:
                return None
            demand.add((node.name, text))
            return stored(node.name, text)
        case "and" | "or":
            return evaluate_logic(node, row, demand, is_filter=is_filter)
        case "not":
            value = evaluate(node.operands[0], row, demand, is_filter=False)
            return None if value is None else not value
        case "is":
            value = evaluate(node.operands[0], row, demand, is_filter=False)
            wanted = {"TRUE": True, "FALSE": False, "NULL": None}[node.name.removeprefix("NOT ")]
            return (value is wanted) != node.name.startswith("NOT")
        case "case" | "if":
            test = evaluate(node.operands[0], row, demand, is_filter=True)
            branch = node.operands[1 if test is True else 2]
            return evaluate(branch, row, demand, is_filter=is_filter)
        case "coalesce":
            for operand in node.operands:
                value = evaluate(operand, row, demand, is_filter=False)
                if value is not None:
                    return value
            return None
        case _:
            value = evaluate(node.operands[0], row, demand, is_filter=False)
            return None if value is None else value > 0.4


def evaluate_logic(node: Expression, row: Row, demand: Demand, *, is_filter: bool) -> Any:
    result: Any = node.kind == "and"
    for operand in sorted(node.operands, key=lambda operand: not operand.is_free):
        value = evaluate(operand, row, demand, is_filter=is_filter)
        if node.kind == "and":
            if value is False or (is_filter and value is None):
                return value
            result = None if value is None else result
        else:
            if value is True:
                return True
            result = None if value is None else result
    return result


class Trees:
    """Random expressions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def boolean(self, depth: int) -> Expression:
        kind = self._random.choice(
            ("call", "call", "compare", "free", "and", "or", "and", "or", "not", "is", "case")
        )
        if depth == 0 and kind not in ("call", "free"):
            kind = "call"
        match kind:
            case "call":
                return Expression("call", (), self._random.choice(("p", "q", "r")), self._random.choice("ab"))
            case "free":
                return Expression("free", (), self._random.choice(("k > 0", "k = 2", "a IS NULL")))
            case "and" | "or":
                count = self._random.randint(2, 4)
                operands = tuple(self.boolean(depth - 1) for _ in range(count))
                # Nested operands of one kind are one list to the parser, here too.
                flat = tuple(x for o in operands for x in (o.operands if o.kind == kind else (o,)))
                return Expression(kind, flat)
            case "not":
                return Expression("not", (self.boolean(depth - 1),))
            case "is":
                name = self._random.choice(("TRUE", "FALSE", "NULL", "NOT TRUE", "NOT NULL"))
                return Expression("is", (self.boolean(depth - 1),), name)
            case "case":
                return Expression("case", tuple(self.boolean(depth - 1) for _ in range(3)))
            case _:
                return Expression("compare", (self.number(depth - 1),))

    def number(self, depth: int) -> Expression:
        kind = self._random.choice(("call", "call", "if", "coalesce")) if depth > 0 else "call"
        if kind == "call":
            return Expression("call", (), self._random.choice(("s", "st")), self._random.choice("ab"))
        if kind == "if":
            return Expression("if", (self.boolean(depth - 1), self.number(depth - 1), self.number(depth - 1)))
        return Expression("coalesce", (self.number(depth - 1), self.number(depth - 1)))


ROWS: list[Row] = [
    {"id": i, "k": i % 4, "a": None if i % 6 == 1 else f"a{i % 7}", "b": None if i % 5 == 4 else f"b{i % 9}"}
    for i in range(40)
]


@pytest.fixture(scope="module")
def tables() -> StubCatalog:
    values = ", ".join(
        "({id}, {k}, {a}, {b})".format(**{k: "NULL" if v is None else repr(v) for k, v in row.items()})
        for row in ROWS
    )
    return StubCatalog(f"CREATE TABLE r AS SELECT * FROM (VALUES {values}) t(id, k, a, b)")


def asked(stub: Stub, calls: dict[int, str]) -> Demand:
    found = {(calls[call], key[0]) for call, key in stub.asked}
    assert len(found) == len(stub.asked)
    return found


@pytest.mark.parametrize("seed", range(120))
def test_asked_is_demanded(seed: int, tables: StubCatalog) -> None:
    trees = Trees(seed)
    where, item, score = trees.boolean(3), trees.boolean(2), trees.number(2)
    limit = (None, None, 5)[seed % 3]
    conjuncts = where.operands if where.kind == "and" else (where,)
    demand: Demand = set()
    candidates: Demand = set()
    expected = []
    for row in ROWS:
        free = [evaluate(c, row, demand, is_filter=True) for c in conjuncts if c.is_free]
        if all(value is True for value in free):
            candidates |= {
                (q, row[c]) for q in ("p", "q", "r", "s", "st") for c in "ab" if row[c] is not None
            }
        if evaluate(where, row, demand, is_filter=True) is not True:
            continue
        if limit is not None and len(expected) == limit:
            continue
        expected.append(
            (
                row["id"],
                evaluate(item, row, demand, is_filter=False),
                evaluate(score, row, demand, is_filter=False),
            )
        )
    tail = "" if limit is None else f" ORDER BY id LIMIT {limit}"
    sql = f"SELECT id, {item.sql} AS x, {score.sql} AS y FROM r WHERE {where.sql}{tail}"
    for order in ("as_written", "auto"):
        names: dict[int, str] = {}

        def note(call: AICall, key: Key, names: dict[int, str] = names) -> Any:
            names[call.index] = str(call.prompt.parts[0]).strip()
            return answer(call, key)

        stub = Stub(note, batch=1 + seed % 9)
        assert rows(run(sql, tables, stub, order=order)) == expected, sql
        if order == "as_written":
            assert asked(stub, names) == demand, sql
        else:
            assert asked(stub, names) <= candidates, sql


JOINED = {
    # Every pair with equal k, decided on both sides of an outer join.
    "SELECT 1 FROM r LEFT JOIN u ON r.k = u.k AND AI.IF(PROMPT('p {0} {1}', r.a, u.b))": 6,
    # Pairs whose free part of ON holds.
    "SELECT 1 FROM r FULL JOIN u ON AI.IF(PROMPT('p {0} {1}', r.a, u.b)) AND r.k = u.k AND u.b <> 'x'": 4,
    # WHERE on the kept side of a LEFT JOIN comes before the pairs.
    "SELECT 1 FROM r LEFT JOIN u ON r.k = u.k AND AI.IF(PROMPT('p {0} {1}', r.a, u.b)) WHERE r.a = 'a'": 3,
    # WHERE on the other side does not: it decides which rows are filled with NULL.
    "SELECT 1 FROM r LEFT JOIN u ON r.k = u.k AND AI.IF(PROMPT('p {0} {1}', r.a, u.b)) WHERE u.b IS NULL": 6,
    # An inner join is a filter of the pairs.
    "SELECT 1 FROM r JOIN u ON r.k = u.k AND AI.IF(PROMPT('p {0} {1}', r.a, u.b)) WHERE r.a = 'a' AND u.b = 'x'": 1,
    # EXISTS sees the rows of its own WHERE and of the query around it.
    "SELECT 1 FROM r WHERE a = 'a' AND EXISTS"
    " (SELECT 1 FROM u WHERE u.k = r.k AND AI.IF(PROMPT('p {0} {1}', r.a, u.b)))": 3,
    # One relation in ON is asked once a text, not once a pair.
    "SELECT 1 FROM r LEFT JOIN u ON r.k = u.k AND AI.IF('q' || r.a)": 2,
}


@pytest.mark.parametrize("sql", JOINED)
def test_pairs_that_are_asked(sql: str) -> None:
    tables = StubCatalog(
        "CREATE TABLE r AS SELECT * FROM (VALUES ('a', 1), ('c', 1), ('d', 2), (NULL, 1)) t(a, k)",
        "CREATE TABLE u AS SELECT * FROM (VALUES ('x', 1), ('y', 1), ('z', 1), (NULL, 1), ('w', 3)) t(b, k)",
    )
    stub = Stub(lambda call, key: len(key[0]) % 2 == 1)
    run(sql, tables, stub)
    assert len(stub.asked) == JOINED[sql]
