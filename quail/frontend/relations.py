"""Which relation of FROM a name belongs to, in a block and in those around it."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from quail.frontend.calls import MIXED
from quail.frontend.drafts import Context, Draft, is_aggregate, select_names, stage_of
from quail.plan import syntax
from quail.plan.scope import tables_of_place, with_visible_tables
from quail.plan.statement import Block, Stage
from quail.plan.syntax import Node


class Relations:
    """Resolves names while a statement is bound.

    Args:
        blocks: the blocks bound so far, None for those in progress.
        cursor: a cursor of the session's DuckDB.
        nonce: as the binder's.

    Attributes:
        drafts: the blocks in progress, outermost first.
    """

    def __init__(self, blocks: list[Block | None], cursor: duckdb.DuckDBPyConnection, nonce: str) -> None:
        self.drafts: list[Draft] = []
        self._blocks = blocks
        self._cursor = cursor
        self._nonce = nonce

    def relation(self, node: Node, context: Context) -> object | None:
        """The relation that an expression reads: None for a constant or an unknown name."""
        if len(self.drafts) == 1 and len(context.block.items) == 1:
            return None
        if any(below.get("class") == "WINDOW" for below in syntax.walk(node)):
            return MIXED
        if stage_of(context) is not Stage.ROWS and context.block.is_aggregated:
            return MIXED
        found: set[tuple[int, int]] = set()
        for below in syntax.walk(node):
            if below.get("class") == "COLUMN_REF":
                relation = self.resolve([name.lower() for name in below["column_names"]])
                if relation is not None:
                    found.add(relation)
        if len(found) > 1:
            return MIXED
        return next(iter(found), None)

    def name_of(self, relation: object) -> str:
        """Alias or name of a relation of FROM."""
        if not isinstance(relation, tuple):
            return ""
        block, index = relation
        return next(draft.items[index][0] for draft in self.drafts if draft.index == block)

    def resolve(self, names: Sequence[str]) -> tuple[int, int] | None:
        """Block and position in FROM of the relation that a lower-case name belongs to."""
        qualifiers = set(names[:-1])
        for draft in reversed(self.drafts):
            for index, (name, _) in enumerate(draft.items):
                if qualifiers and name.lower() in qualifiers:
                    return draft.index, index
            if not qualifiers:
                for index in range(len(draft.items)):
                    if names[0] in self.columns_of(draft, index):
                        return draft.index, index
        return None

    def columns_of(self, draft: Draft, index: int) -> frozenset[str]:
        """Lower-case names of the columns of a relation of FROM; none where DuckDB cannot tell."""
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

    def _written_columns(self, draft: Draft, table: Node) -> frozenset[str] | None:
        """Column names of a CTE or subquery that its select list spells out."""
        if table["type"] == "EMPTY":
            return frozenset()
        if table.get("column_name_alias"):
            return None
        if table["type"] == "SUBQUERY":
            return select_names(table["subquery"]["node"])
        entry = self._entry_of(draft, table)
        if entry is None or entry["value"]["aliases"]:
            return None
        return select_names(entry["value"]["query_node"])

    def _entry_of(self, draft: Draft, table: Node) -> Node | None:
        """The CTE that a table of FROM means, None where it is none."""
        if table["type"] != "BASE_TABLE" or table["schema_name"] or table["catalog_name"]:
            return None
        name = table["table_name"].lower()
        blocks = self.blocks_so_far()
        entries = list(draft.node["cte_map"]["map"])
        for place in reversed(draft.places):
            entries = tables_of_place(place, blocks) + entries
        return next((entry for entry in reversed(entries) if entry["key"].lower() == name), None)

    def keeps_order(self, draft: Draft, table: Node) -> bool:
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
        if any(map(is_aggregate, syntax.walk(query["select_list"]))):
            return False
        return self.keeps_order(draft, query["from_table"])

    def blocks_so_far(self) -> list[Block | None]:
        """The blocks, with those in progress as far as their tree goes."""
        blocks = list(self._blocks)
        for draft in self.drafts:
            blocks[draft.index] = Block(draft.index, draft.node, draft.node["from_table"], ())
        return blocks
