"""Which argument values a call may be asked about: a query for each site.

The candidate query of a site gives one row for each evaluation that the statement demands: the rows of its
block at the stage of its clause, less those for which a sibling that is decided earlier makes the call
unnecessary. Other calls stand in it as lookups; an answer that is not there yet reads as NULL, which under
SQL's three-valued logic can only keep a row undecided. Once the calls that a candidate query reads are
settled, it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quail.plan import syntax
from quail.plan.scope import tables_of_place, with_visible_tables
from quail.plan.statement import (
    FILTER_CLAUSES,
    Block,
    BoundStatement,
    Clause,
    ExpressionPlace,
    FromPlace,
    Place,
    Site,
    Stage,
    holds_call,
)
from quail.plan.syntax import Node
from quail.planner.existence import may_end_early
from quail.planner.filter_order import operand_order
from quail.planner.from_tables import replaced, table_at, up_to, with_row_numbers
from quail.planner.pushdown import kept_side


@dataclass(frozen=True)
class Condition:
    """A test of an expression, such as `IS NOT TRUE`."""

    node: Node
    test: str

    @property
    def expression(self) -> Node:
        """The condition as an expression."""
        return syntax.expression(f"x {self.test}", x={**self.node, "alias": ""})


@dataclass(frozen=True)
class CandidateQuery:
    """The argument values of one or more sites, a row for each evaluation.

    Attributes:
        node: the query; columns `arguments` are the SQL texts, `row` the row number.
        arguments: name of the column of each argument, those of each site in turn; equal arguments share one.
        row: name of the row number column, None where rows have no numbers of their own.
        group: names of columns that together tell the rows of another relation apart, for each of which one
            TRUE answer is all that is wanted; none without such.
    """

    node: Node
    arguments: tuple[str, ...]
    row: str | None
    group: tuple[str, ...] = ()

    @property
    def sites_read(self) -> frozenset[int]:
        """Sites of the calls whose answers the query reads."""
        return frozenset(below["quail_site"] for below in syntax.walk(self.node) if "quail_site" in below)


@dataclass(frozen=True)
class CandidatePlanner:
    """Builds candidate queries of one statement.

    Attributes:
        bound: the statement.
        blocks: its blocks, planned.
        order: `auto` or `as_written`.
        binds: whether DuckDB can bind a query as it stands, without the queries around it.
        has_row_numbers: whether the tables are tables by now, whose rows have numbers.
    """

    bound: BoundStatement
    blocks: tuple[Block, ...]
    order: str
    binds: Callable[[Node], bool]
    has_row_numbers: bool = True

    def site(self, site: Site) -> CandidateQuery:
        """The candidate query of one site."""
        if self.bound.call_of(site).options.calibrate == "batch":
            return self._over_all_rows(site)
        return self._query(site.place, site.places[:-1], site.arguments)

    def _over_all_rows(self, site: Site) -> CandidateQuery:
        """The argument values in all rows that the block's conditions without calls leave.

        Over these a call is calibrated, whatever other calls answer and whichever rows need it.
        """
        place = replace(site.place, steps=())
        if place.stage is Stage.LIMITED:
            place = replace(place, stage=Stage.RESULT)
        block = self.blocks[place.block]
        conjuncts = [conjunct for conjunct in block.conjuncts if not holds_call(conjunct)]
        if place.clause is Clause.WHERE:
            conjuncts.append(place.root)  # those in front of it are the rows' conditions
        free = {
            name: None if holds_call(block.node[name]) else block.node[name] for name in ("having", "qualify")
        }
        blocks = list(self.blocks)
        blocks[place.block] = replace(block, conjuncts=tuple(conjuncts), node={**block.node, **free})
        planner = replace(self, blocks=tuple(blocks))
        return planner._query(place, site.places[:-1], site.arguments)

    def first_match(self, site: Site) -> CandidateQuery | None:
        """The candidate query of a site of which each row of another relation needs one TRUE answer at most.

        That is the condition of a SEMI or ANTI join, or of an EXISTS; None where a site is neither, or where
        the rows of the other relation cannot be told apart.
        """
        if not may_end_early(site, self.blocks):
            return None
        group = f"quail_{self.bound.nonce}_group"
        names = self._names(len(site.arguments))
        columns = self._columns(names, site.arguments)
        if site.place.clause is Clause.ON:
            return self._first_match_of_join(site, names, columns, group)
        node, _ = self._block_query(site.place, columns, is_numbered=False)
        enclosing = site.places[-2]
        assert isinstance(enclosing, ExpressionPlace)
        node = self._correlated(node, enclosing, names, group)
        closed = with_visible_tables(node, site.places[:-2], self.blocks)
        return CandidateQuery(closed, names, None, (group,)) if self.binds(closed) else None

    def _first_match_of_join(
        self, site: Site, names: tuple[str, ...], columns: list[Node], group: str
    ) -> CandidateQuery | None:
        """The same of a join: by the numbers that rows have of their own, else by numbers given to them."""
        block, path = self.blocks[site.place.block], site.place.join or ()
        left = table_at(block.from_table, path)["left"]
        ways: list[tuple[Node, tuple[Node, ...]]] = []
        if left["type"] == "BASE_TABLE" and self.has_row_numbers:
            ways.append((left, (syntax.column(left["alias"] or left["table_name"], "rowid"),)))
        ways.append(with_row_numbers(left, f"{group}_number"))
        for table, numbers in ways:
            blocks = list(self.blocks)
            from_table = replaced(block.from_table, (*path, "left"), table)
            blocks[block.index] = replace(block, from_table=from_table)
            groups = tuple(f"{group}_{place}" for place in range(len(numbers)))
            numbered = [syntax.aliased(*each) for each in zip(numbers, groups, strict=True)]
            planner = replace(self, blocks=tuple(blocks))
            node, _ = planner._block_query(site.place, [*columns, *numbered], is_numbered=False)
            closed = with_visible_tables(node, site.places[:-1], self.blocks)
            if self.binds(closed):
                return CandidateQuery(closed, names, None, groups)
        return None

    def chain(self, block: Block, sites: Sequence[Site]) -> CandidateQuery | None:
        """One query for sites that are conjuncts of one WHERE: the rows that their calls have to decide.

        None where the block reads rows of the queries around it.
        """
        arguments = [argument for site in sites for argument in site.arguments]
        place = sites[0].place
        texts = [syntax.to_sql({**argument, "alias": ""}) for argument in arguments]
        firsts = list(dict.fromkeys(texts))
        distinct = self._names(len(firsts))
        names = tuple(distinct[firsts.index(text)] for text in texts)
        columns = self._columns(distinct, [arguments[texts.index(text)] for text in firsts])
        node, row = self._block_query(place, columns, is_numbered=True)
        outer = sites[0].places[:-1]
        closed = with_visible_tables(node, outer, self.blocks)
        if _may_correlate(outer) and not self.binds(closed):
            return None
        return CandidateQuery(closed, names, row)

    def _names(self, count: int) -> tuple[str, ...]:
        return tuple(f"quail_{self.bound.nonce}_a{i}" for i in range(count))

    @staticmethod
    def _columns(names: Sequence[str], arguments: Sequence[Node]) -> list[Node]:
        return [
            syntax.aliased(syntax.expression("CAST(x AS VARCHAR)", x={**argument, "alias": ""}), name)
            for name, argument in zip(names, arguments, strict=True)
        ]

    def uncast(self, site: Site) -> list[Node]:
        """For each argument a query that gives it in its own type, for checks; it may read more rows."""
        place = site.place
        block = self.blocks[place.block]
        queries = []
        for argument in site.arguments:
            column = syntax.aliased(argument, self._names(1)[0])
            if place.stage is Stage.ROWS:
                from_table = None if place.clause is Clause.VALUES else block.from_table
                node = {**syntax.select([column], from_table), "cte_map": block.node["cte_map"]}
            else:
                node = self._result_query(block, place, [column], [])
            queries.append(node)
        return queries

    def spread(self, site: Site) -> list[list[Node]]:
        """For each argument queries that give it as a text, in more rows than needed.

        The first is over its own block, the others over those around it, where it may read their rows alone.
        """
        (name,) = self._names(1)
        columns = [self._columns([name], [argument]) for argument in site.arguments]
        queries = [[syntax.select(column, self.blocks[site.place.block].from_table)] for column in columns]
        for depth, place in enumerate(site.places[:-1]):
            if isinstance(place, ExpressionPlace):
                from_table = self.blocks[place.block].from_table
                for found, column in zip(queries, columns, strict=True):
                    node = syntax.select(column, from_table)
                    found.insert(1, with_visible_tables(node, site.places[:depth], self.blocks))
        return queries

    def _query(
        self, place: ExpressionPlace, outer: tuple[Place, ...], arguments: Sequence[Node]
    ) -> CandidateQuery:
        names = self._names(len(arguments))
        node, row = self._block_query(place, self._columns(names, arguments), is_numbered=True)
        closed = with_visible_tables(node, outer, self.blocks)
        if not _may_correlate(outer) or self.binds(closed):
            return CandidateQuery(closed, names, row)
        node, _ = self._block_query(place, self._columns(names, arguments), is_numbered=False)
        while outer:
            enclosing, outer = outer[-1], outer[:-1]
            if isinstance(enclosing, ExpressionPlace):
                node = self._correlated(node, enclosing, names)
            elif isinstance(enclosing, FromPlace):
                node = self._lateral(node, enclosing, names)
            else:
                node = syntax.with_tables(node, tables_of_place(enclosing, self.blocks))
                continue
            closed = with_visible_tables(node, outer, self.blocks)
            if not _may_correlate(outer) or self.binds(closed):
                return CandidateQuery(closed, names, None)
        return CandidateQuery(node, names, None)

    # One block

    def _block_query(
        self, place: ExpressionPlace, columns: list[Node], *, is_numbered: bool
    ) -> tuple[Node, str | None]:
        """The query of a block up to the stage of a place, with other columns; and its row number column."""
        block = self.blocks[place.block]
        conditions = [condition.expression for condition in self.conditions(place)]
        if place.clause is Clause.VALUES:
            return syntax.select(columns, None, syntax.conjunction(conditions)), None
        if place.stage is not Stage.ROWS:
            return self._result_query(block, place, columns, conditions), None
        conjuncts = list(block.conjuncts)
        from_table = block.from_table
        if place.clause is Clause.WHERE:
            position = next(i for i, conjunct in enumerate(conjuncts) if conjunct is place.root)
            conjuncts = conjuncts[:position]
        elif place.clause is Clause.ON:
            assert place.join is not None
            join = table_at(block.from_table, place.join)
            conjuncts = self._pushed_down(place, block, kept_side(block.from_table, place.join))
            from_table = {**join, "join_type": "INNER", "ref_type": "CROSS", "condition": None}
        row = None
        if is_numbered and self.has_row_numbers and block.has_row_numbers and place.clause is not Clause.ON:
            row = f"quail_{self.bound.nonce}_row"
            columns = [*columns, syntax.aliased(syntax.column("rowid"), row)]
        where = syntax.conjunction([*conjuncts, *conditions])
        node = syntax.select(columns, from_table, where)
        return {**node, "cte_map": block.node["cte_map"], "sample": block.node["sample"]}, row

    def _pushed_down(self, place: ExpressionPlace, block: Block, side: Node | None) -> list[Node]:
        """Conjuncts of WHERE without calls that read only the side of a join whose rows it keeps."""
        if side is None:
            return []
        found = []
        for conjunct in block.conjuncts:
            node = syntax.select([syntax.expression("1")], side, conjunct)
            node = with_visible_tables(
                {**node, "cte_map": block.node["cte_map"]}, self.blocks[place.block].places, self.blocks
            )
            if not holds_call(conjunct) and self.binds(node):
                found.append(conjunct)
        return found

    def _result_query(
        self, block: Block, place: ExpressionPlace, columns: list[Node], conditions: list[Node]
    ) -> Node:
        """The block with its own select list, the columns added, and only the clauses before the place."""
        is_limited = place.stage is Stage.LIMITED
        condition = syntax.conjunction(conditions)
        added = list(columns)
        flag = f"quail_{self.bound.nonce}_due"
        if condition is not None:
            added.append(syntax.aliased(condition, flag))
        items = [
            syntax.aliased(syntax.expression("NULL"), item["alias"])
            if self._is_left_out(block, index, is_limited=is_limited)
            else item
            for index, item in enumerate(block.node["select_list"])
        ]
        drops_qualify = place.clause is Clause.QUALIFY or place.in_window
        node = {
            **block.node,
            "from_table": block.from_table,
            "where_clause": syntax.conjunction(block.conjuncts),
            "select_list": [*items, *added],
            "having": None if place.clause is Clause.HAVING else block.node["having"],
            "qualify": None if drops_qualify else block.node["qualify"],
            "modifiers": block.node["modifiers"] if is_limited else [],
        }
        outer = syntax.query("SELECT 1 FROM x", x=node)
        names = [column["alias"] for column in columns]
        return {
            **outer,
            "select_list": [syntax.aliased(syntax.column(name), name) for name in names],
            "where_clause": syntax.column(flag) if condition is not None else None,
        }

    @staticmethod
    def _is_left_out(block: Block, index: int, *, is_limited: bool) -> bool:
        """Whether a select item holds calls that no clause before the place reads."""
        if index in block.grouped_items or not holds_call(block.node["select_list"][index]):
            return False
        return index in block.limited_items if is_limited else True

    # What the siblings decide

    def conditions(self, place: ExpressionPlace) -> list[Condition]:
        """What must hold in a row of its stage for the expression to be needed."""
        conditions: list[Condition] = []
        is_filter = place.clause in FILTER_CLAUSES
        for step in place.steps:
            node, operand = step.node, step.operand
            if step.kind in ("AND", "OR"):
                is_and = step.kind == "AND"
                conditions += self._decided_before(node, operand, is_and=is_and, is_filter=is_filter)
            elif step.kind == "CASE":
                tests = [check["when_expr"] for check in node["case_checks"]]
                branch = operand // 2
                conditions += [Condition(test, "IS NOT TRUE") for test in tests[:branch]]
                if operand % 2:
                    conditions.append(Condition(tests[branch], "IS TRUE"))
                is_filter = is_filter or (operand % 2 == 0 and branch < len(tests))
            elif step.kind == "IF":
                if operand:
                    test = node["arguments"][0]["expression"]
                    conditions.append(Condition(test, "IS TRUE" if operand == 1 else "IS NOT TRUE"))
                is_filter = is_filter or operand == 0
            elif step.kind == "COALESCE":
                conditions += [Condition(child, "IS NULL") for child in node["children"][:operand]]
                is_filter = False
            elif step.kind == "aggregate":
                conditions += [Condition(node["filter"], "IS TRUE")] if node["filter"] is not None else []
                is_filter = False
            else:
                is_filter = step.kind == "FILTER"
        return conditions

    def _decided_before(self, node: Node, operand: int, *, is_and: bool, is_filter: bool) -> list[Condition]:
        children = node["children"]
        undecided = ("IS TRUE" if is_filter else "IS NOT FALSE") if is_and else "IS NOT TRUE"
        order = operand_order(children, self.bound.calls, self.order, is_and=is_and)
        return [Condition(children[position], undecided) for position in order[: order.index(operand)]]

    # Blocks around

    def _correlated(
        self, node: Node, place: ExpressionPlace, names: Sequence[str], group: str | None = None
    ) -> Node:
        """The values of a query for each row of the block around it, gathered and spread out again.

        With `group` there is a column of that name that numbers those rows.
        """
        rows = f"quail_{self.bound.nonce}_rows"
        value = f"quail_{self.bound.nonce}_value"
        fields = ", ".join(f'"{name}": "{name}"' for name in names)
        distinct = "DISTINCT " if group is None else ""
        gathered = syntax.query(f"SELECT list({distinct}{{{fields}}}) FROM x", x=node)
        outer, _ = self._block_query(
            place, [syntax.aliased(syntax.scalar_subquery(gathered), rows)], is_numbered=False
        )
        columns = ", ".join(f'"{value}"."{name}" AS "{name}"' for name in names)
        numbers = ""
        if group is not None:
            outer = syntax.query(f'SELECT "{rows}", row_number() OVER () AS "{group}" FROM x', x=outer)
            numbers = f', "{group}"'
            columns += numbers
        spread = syntax.query(f'SELECT unnest("{rows}") AS "{value}"{numbers} FROM x', x=outer)
        return syntax.query(f"SELECT {columns} FROM x", x=spread)

    def _lateral(self, node: Node, place: FromPlace, names: Sequence[str]) -> Node:
        """The values of a subquery of FROM that reads the tables to its left."""
        block = self.blocks[place.block]
        alias = f"quail_{self.bound.nonce}_lateral"
        from_table = up_to(block.from_table, place.path, syntax.subquery_table(node, alias))
        columns = [syntax.aliased(syntax.column(alias, name), name) for name in names]
        return {**syntax.select(columns, from_table), "cte_map": block.node["cte_map"]}


def _may_correlate(places: Sequence[Place]) -> bool:
    return any(isinstance(place, (ExpressionPlace, FromPlace)) for place in places)
