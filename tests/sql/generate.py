"""Random statements with AI calls, as templates of `reference.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

TABLES = (
    "CREATE TABLE r AS SELECT i AS id, CASE WHEN i % 7 <> 3 THEN 'body ' || (i % 5) END AS body,"
    " i % 3 AS k, 'T' || (i % 2) AS title FROM range(14) t(i)",
    "CREATE TABLE u AS SELECT i AS id, CASE WHEN i % 5 <> 2 THEN 'word ' || (i % 4) END AS body,"
    " CASE WHEN i % 4 > 0 THEN i % 3 END AS k, 'U' AS title FROM range(9) t(i)",
    "CREATE TABLE w AS SELECT i AS id, 'note ' || (i % 3) AS body, i % 2 AS k, NULL::VARCHAR AS title"
    " FROM range(5) t(i)",
    "CREATE VIEW v AS SELECT id, body, k, title FROM r WHERE id > 2",
)
NAMES = ("r", "u", "w", "v")
JOINS = ("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "SEMI JOIN", "ANTI JOIN")


@dataclass
class Scope:
    """The relations that an expression may read; `outer` are those of the queries around."""

    aliases: list[str]
    outer: list[str] = field(default_factory=list)


class Generator:
    """One random statement per call of `statement`; the same seed gives the same statements."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_aliases = 0

    def statement(self) -> str:
        """A statement; its rows are compared as a bag unless it ends in a total ORDER BY."""
        self._num_aliases = 0
        kind = self._random.random()
        if kind < 0.12:
            name = self._alias("c")
            body = self._select(1, is_plain=True)
            inner = f"SELECT id, body, k, title FROM {self._random.choice(NAMES)} WHERE {{}}"
            scope = Scope([""])
            inner = inner.format(self._boolean(scope, 1))
            select = self._block([f"{name} AS {self._alias('x')}"], 2)
            return f"WITH {name} AS ({inner}), unread AS ({body}) {select}"
        if kind < 0.34:
            return self._special()
        if kind < 0.44:
            operation = self._random.choice(("UNION ALL", "UNION", "EXCEPT", "INTERSECT"))
            return f"{self._select(1, is_plain=True)} {operation} {self._select(1, is_plain=True)}"
        return self._select(2)

    def _special(self) -> str:
        """Forms that the grammar below does not reach."""
        table, other = self._random.choice(NAMES), self._random.choice(NAMES)
        t, z = self._alias(), self._alias()
        scope = Scope([t])
        where = self._boolean(scope, 1)
        value, number = self._value(scope, 1), self._number(scope)
        inner = self._boolean(Scope([z]), 1, has_subquery=False)
        return self._random.choice(
            (
                f"SELECT {t}.id, l.x FROM {table} AS {t}, LATERAL (SELECT @IF[p]({t}.body) AS x, {t}.k AS y) l"
                f" WHERE l.y > 0 AND {where}",
                f"SELECT {t}.id, l.n FROM {table} AS {t} LEFT JOIN LATERAL (SELECT count(*) AS n FROM {other} AS {z}"
                f" WHERE {z}.k = {t}.k AND {inner}) l ON TRUE WHERE {where}",
                f"SELECT {value} AS a, {t}.k, count(*) AS n FROM {table} AS {t} WHERE {where} GROUP BY ALL",
                f"SELECT {t}.id, {number} AS s, s + 1 AS d FROM {table} AS {t} WHERE s > 0.2 OR {where}",
                f"SELECT {t}.id FROM {table} AS {t} WHERE @IF[q](@CLASSIFY[p]({t}.body) || {t}.k) AND {where}",
                f"SELECT {t}.id, @IF[p](lag({t}.body) OVER (ORDER BY {t}.id)) AS x FROM {table} AS {t} WHERE {where}"
                f" QUALIFY row_number() OVER (PARTITION BY {t}.k ORDER BY {t}.id) < 5",
                f"SELECT {t}.k, @IF[p](string_agg({t}.body, '-' ORDER BY {t}.id)) AS x, max({number}) AS m"
                f" FROM {table} AS {t} WHERE {where} GROUP BY {t}.k HAVING x OR count(*) > 1",
                f"SELECT * REPLACE (@CLASSIFY[q](body) AS body) FROM {table} AS {t} WHERE {where}",
                f"SELECT k, {t}.id, {z}.id AS zid FROM {table} AS {t} JOIN {other} AS {z} USING (k)"
                f" WHERE @IF[j]({t}.body, {z}.body) AND {where}",
                f"SELECT g, n FROM (SELECT @CLASSIFY[p]({t}.body) AS g, count(*) AS n FROM {table} AS {t} GROUP BY g) q"
                f" WHERE n > 1 OR @IF[h](g)",
                f"WITH a AS (SELECT {t}.id, {t}.k, {t}.body FROM {table} AS {t} WHERE {where}),"
                f" b AS (SELECT {z}.k, count(*) AS n FROM a AS {z} WHERE @IF[q]({z}.body) GROUP BY {z}.k)"
                f" SELECT a.id, n FROM a LEFT JOIN b ON a.k = b.k AND @IF[j](a.body, b.n)",
                f"SELECT {t}.k, sum({number}) FILTER (WHERE {where}) AS x FROM {table} AS {t} GROUP BY ROLLUP ({t}.k)",
                f"SELECT {t}.id, (SELECT count(*) FROM {other} AS {z} WHERE @IF[j]({t}.body, {z}.body)) AS n"
                f" FROM {table} AS {t} WHERE {where} ORDER BY {t}.id LIMIT 4",
                f"SELECT x.id FROM (SELECT {t}.id, {number} AS s FROM {table} AS {t} ORDER BY s NULLS LAST, {t}.id LIMIT 6)"
                f" x WHERE x.s > 0.2",
                f"SELECT DISTINCT ON ({t}.k) {t}.k, {t}.id FROM {table} AS {t} WHERE {where}"
                f" ORDER BY {t}.k, {number} NULLS LAST, {t}.id",
                f"(SELECT {t}.k FROM {table} AS {t} WHERE {where}) UNION"
                f" (SELECT {z}.k FROM {other} AS {z} WHERE {inner}) ORDER BY 1",
                f"SELECT {t}.id FROM {table} AS {t} WHERE ({t}.k, @CLASSIFY[p]({t}.body)) IN"
                f" (SELECT {z}.k, @CLASSIFY[p]({z}.body) FROM {other} AS {z} WHERE {inner})",
                "SELECT v.b FROM (VALUES ('a', @IF[p]('a')), ('b', @SCORE[p]('b') > 0.3)) v(a, b) WHERE @IF[q](v.a)",
                f"SELECT {t}.id, count(*) OVER (PARTITION BY @CLASSIFY[p]({t}.body)) AS n FROM {table} AS {t}"
                f" QUALIFY n > 1 AND {where}",
            )
        )

    def _alias(self, letter: str = "t") -> str:
        self._num_aliases += 1
        return f"{letter}{self._num_aliases}"

    # Queries

    def _select(self, depth: int, *, is_plain: bool = False) -> str:
        num_tables = self._random.choice((1, 1, 1, 2, 2, 3)) if not is_plain else 1
        tables = [self._table(depth) for _ in range(num_tables)]
        return self._plain(tables[0]) if is_plain else self._block(tables, depth)

    def _plain(self, table: str) -> str:
        scope = Scope([table.rsplit(" ", 1)[1]])
        alias = scope.aliases[0]
        item = self._random.choice((f"{alias}.k", self._value(scope, 1)))
        return f"SELECT {item} AS a FROM {table} WHERE {self._boolean(scope, 1)}"

    def _table(self, depth: int) -> str:
        alias = self._alias()
        if depth > 0 and self._random.random() < 0.15:
            inner = self._alias()
            scope = Scope([inner])
            table = self._random.choice(NAMES)
            where = self._boolean(scope, 1)
            body = self._random.choice((f"{inner}.body", f"{inner}.body || {inner}.k"))
            return (
                f"(SELECT {inner}.id, {body} AS body, {inner}.k, {inner}.title"
                f" FROM {table} AS {inner} WHERE {where}) AS {alias}"
            )
        return f"{self._random.choice(NAMES)} AS {alias}"

    def _block(self, tables: list[str], depth: int) -> str:
        aliases = [tables[0].rsplit(" ", 1)[1]]
        source = tables[0]
        for table in tables[1:]:
            alias = table.rsplit(" ", 1)[1]
            join = self._random.choice((*JOINS, ",", "CROSS JOIN"))
            scope = Scope([*aliases, alias])
            left = self._random.choice(aliases)
            if join in (",", "CROSS JOIN"):
                source = f"{source} CROSS JOIN {table}"
            else:
                condition = f"{left}.k = {alias}.k"
                if self._random.random() < 0.7:
                    condition += f" AND {self._boolean(scope, 1, has_subquery=False)}"
                source = f"({source} {join} {table} ON {condition})"
            if join not in ("SEMI JOIN", "ANTI JOIN"):
                aliases.append(alias)
        scope = Scope(aliases)
        where = f" WHERE {self._boolean(scope, depth)}" if self._random.random() < 0.75 else ""
        kind = self._random.random()
        if kind < 0.25:
            return self._grouped(source, where, scope)
        ids = ", ".join(f"{alias}.id" for alias in aliases)
        if kind < 0.35:
            window = self._random.choice(
                (
                    f"row_number() OVER (PARTITION BY {self._value(scope, 0)} ORDER BY {ids})",
                    f"sum({self._number(scope)}) OVER (PARTITION BY {aliases[0]}.k ORDER BY {ids})",
                )
            )
            qualify = f" QUALIFY row_number() OVER (PARTITION BY {aliases[0]}.k ORDER BY {ids}) < 4"
            if self._random.random() < 0.5:
                qualify += f" AND {self._boolean(scope, 1, has_subquery=False)}"
            qualify = qualify if self._random.random() < 0.6 else ""
            return f"SELECT {ids}, {window} AS w FROM {source}{where}{qualify}"
        items = [f"{self._value(scope, 1)} AS x{i}" for i in range(self._random.randint(0, 2))]
        if kind < 0.45:
            return f"SELECT DISTINCT {', '.join([f'{aliases[0]}.k', *items])} FROM {source}{where}"
        statement = f"SELECT {', '.join([ids, *items])} FROM {source}{where}"
        if self._random.random() < 0.35:
            key = f"{self._value(scope, 0)} NULLS LAST, " if self._random.random() < 0.4 else ""
            order = ", ".join(f"{alias}.id" for alias in aliases)
            statement += f" ORDER BY {key}{order} LIMIT {self._random.randint(0, 6)}"
            if self._random.random() < 0.3:
                statement += f" OFFSET {self._random.randint(0, 3)}"
        elif len(tables) == 1 and self._random.random() < 0.2:
            statement += f" LIMIT {self._random.randint(0, 6)}"
        return statement

    def _grouped(self, source: str, where: str, scope: Scope) -> str:
        alias = scope.aliases[0]
        key = self._random.choice((f"{alias}.k", self._value(scope, 0)))
        aggregates = [
            "count(*)",
            f"count(*) FILTER (WHERE {self._boolean(scope, 1, has_subquery=False)})",
            f"max({self._number(scope)})",
            f"min({self._value(scope, 0)})",
            f"bool_or({self._boolean(scope, 0)})",
        ]
        items = ", ".join(f"{item} AS y{i}" for i, item in enumerate(self._random.sample(aggregates, 2)))
        having = ""
        if self._random.random() < 0.5:
            document = f"string_agg({alias}.body, '-' ORDER BY {alias}.id)"
            having = self._random.choice(
                (
                    " HAVING count(*) > 1",
                    f" HAVING @IF[h]({document}) OR count(*) > 2",
                    f" HAVING count(*) > 1 AND @IF[h](max({alias}.body))",
                )
            )
        group = self._random.choice((key, "1", "g"))
        return f"SELECT {key} AS g, {items} FROM {source}{where} GROUP BY {group}{having}"

    # Expressions

    def _text(self, scope: Scope) -> str:
        alias = self._pick(scope)
        dot = f"{alias}." if alias else ""
        return self._random.choice(
            (
                f"{dot}body",
                f"{dot}body",
                f"{dot}title",
                f"{dot}title || {dot}body",
                f"upper({dot}body)",
                f"{dot}k",
            )
        )

    def _pick(self, scope: Scope) -> str:
        return self._random.choice(scope.aliases)

    def _number(self, scope: Scope) -> str:
        return f"@SCORE[{self._question()}]({self._text(scope)})"

    def _question(self) -> str:
        return self._random.choice(("p", "q"))

    def _value(self, scope: Scope, depth: int) -> str:
        kind = self._random.random()
        if kind < 0.3:
            return f"@CLASSIFY[{self._question()}]({self._text(scope)})"
        if kind < 0.5 or depth == 0:
            return self._random.choice((self._number(scope), f"@IF[{self._question()}]({self._text(scope)})"))
        if kind < 0.7:
            return f"CASE WHEN {self._boolean(scope, 0)} THEN {self._number(scope)} ELSE {self._number(scope)} END"
        if kind < 0.8:
            return f"coalesce({self._number(scope)}, {self._number(scope)})"
        if kind < 0.9:
            inner = self._alias()
            return (
                f"(SELECT max(@SCORE[p]({inner}.body)) FROM {self._random.choice(NAMES)} AS {inner}"
                f" WHERE {inner}.k = {self._pick(scope) or 'NULL'}{'.k' if self._pick(scope) else ''})"
            )
        return f"if({self._boolean(scope, 0)}, {self._number(scope)}, {self._number(scope)} + 1)"

    def _boolean(self, scope: Scope, depth: int, *, has_subquery: bool = True) -> str:
        kind = self._random.random()
        if depth == 0 or kind < 0.3:
            return self._leaf(scope)
        below = {"has_subquery": has_subquery}
        if kind < 0.55:
            operands = [self._boolean(scope, depth - 1, **below) for _ in range(self._random.randint(2, 3))]
            return "(" + self._random.choice((" AND ", " OR ")).join(operands) + ")"
        if kind < 0.65:
            return f"NOT ({self._boolean(scope, depth - 1, **below)})"
        if kind < 0.75:
            test = self._random.choice(("TRUE", "FALSE", "NULL", "NOT TRUE", "NOT NULL"))
            return f"({self._boolean(scope, depth - 1, **below)}) IS {test}"
        if kind < 0.82 or not has_subquery or scope.aliases == [""]:
            return (
                f"CASE WHEN {self._boolean(scope, depth - 1, **below)} THEN {self._boolean(scope, 0)}"
                f" ELSE {self._boolean(scope, 0)} END"
            )
        return self._subquery(scope)

    def _subquery(self, scope: Scope) -> str:
        inner, outer = self._alias(), self._pick(scope)
        table = f"{self._random.choice(NAMES)} AS {inner}"
        pair = f"@IF[j]({outer}.body, {inner}.body)"
        single = self._leaf(Scope([inner]))
        condition = self._random.choice(
            (
                f"{inner}.k = {outer}.k AND {single}",
                pair,
                f"{inner}.id < {outer}.id AND ({pair} OR {single})",
                single,
            )
        )
        form = self._random.random()
        if form < 0.35:
            return f"EXISTS (SELECT 1 FROM {table} WHERE {condition})"
        if form < 0.6:
            return f"NOT EXISTS (SELECT 1 FROM {table} WHERE {condition})"
        negation = "NOT " if form > 0.85 else ""
        return f"{outer}.k {negation}IN (SELECT {inner}.k FROM {table} WHERE {condition})"

    def _leaf(self, scope: Scope) -> str:
        kind = self._random.random()
        alias = self._pick(scope)
        dot = f"{alias}." if alias else ""
        if kind < 0.2:
            return self._random.choice(
                (f"{dot}k > 0", f"{dot}id < 7", f"{dot}body IS NOT NULL", f"{dot}k = 1")
            )
        if kind < 0.65:
            if len(scope.aliases) > 1 and self._random.random() < 0.4:
                first, second = self._random.sample(scope.aliases, 2)
                return f"@IF[j]({first}.body, {second}.body)"
            return f"@IF[{self._question()}]({self._text(scope)})"
        if kind < 0.8:
            return f"{self._number(scope)} > 0.4"
        if kind < 0.9:
            return f"@CLASSIFY[{self._question()}]({self._text(scope)}) IN ('red', 'blue')"
        return f"@IF[{self._question()}]({self._text(scope)}) IS NULL"
