"""Which calls are asked together: the leading filters of a WHERE as a chain, every other call by itself."""

from __future__ import annotations

from collections.abc import Sequence

from quail.errors import UnsupportedError
from quail.plan import syntax
from quail.plan.functions import aggregate_names
from quail.plan.logical import Operator
from quail.plan.statement import BoundStatement, Clause, Site, holds_call
from quail.plan.syntax import Node
from quail.planner.candidates import CandidatePlanner, CandidateQuery
from quail.planner.existence import is_existence
from quail.planner.filter_order import operand_order

MOST_SITES = 250
"""Places of calls that one statement may have: each is planned by a query over the conditions before it."""

Question = tuple[int, tuple[str, ...]]
"""A call and the texts of its arguments."""


class AskGroup:
    """A group before it is started: its sites in order, and the query of their candidates.

    `columns` names the argument columns of each site; `signatures` has for each of its arguments a text that
    is equal for arguments that may be the same documents.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        query: CandidateQuery,
        *,
        is_chain: bool,
        row_limit: int | None = None,
        columns: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self.query = query
        self.is_chain = is_chain
        self.row_limit = row_limit
        self.columns = tuple(_columns(sites, query) if columns is None else columns)
        self.signatures = tuple(tuple(map(signature_of, site.arguments)) for site in sites)
        self.sites_read = query.sites_read - {site.index for site in sites}

    @property
    def is_paired(self) -> bool:
        """Whether a site is over two relations."""
        return any(len(site.arguments) == 2 for site in self.sites)

    def reordered(self, order: Sequence[int]) -> AskGroup:
        """The group with its sites in another order."""
        return AskGroup(
            [self.sites[place] for place in order],
            self.query,
            is_chain=self.is_chain,
            row_limit=self.row_limit,
            columns=[self.columns[place] for place in order],
        )

    def is_negated(self, site: Site) -> bool:
        """Whether the conjunct is the negation of the call."""
        return site.place.root is not site.node


def row_limits(bound: BoundStatement, planner: CandidatePlanner) -> dict[int, int]:
    """Blocks in which some passing rows suffice, under a row limit or EXISTS, and their number."""
    groups = plan_groups(bound, planner)
    return {g.sites[0].place.block: g.row_limit for g in groups if g.row_limit is not None}


def plan_groups(bound: BoundStatement, planner: CandidatePlanner) -> list[AskGroup]:
    """A chain for the leading filters of each WHERE, a wave for every other site."""
    groups: list[AskGroup] = []
    chained: set[int] = set()
    for block in planner.blocks:
        sites = _chain_sites(bound, block.index, planner)
        if not sites:
            continue
        query = planner.chain(block, sites)
        if query is None:
            continue
        num_asking = sum(map(holds_call, block.conjuncts))
        row_limit = None
        if len(sites) == num_asking:
            row_limit = 1 if is_existence(block) else _row_limit(bound, block.index)
        groups.append(AskGroup(sites, query, is_chain=True, row_limit=row_limit))
        chained.update(site.index for site in sites)
    deciding = _deciding_sites(bound, planner.order)
    for site in bound.sites:
        if site.index not in chained and site.index not in deciding:
            first = None if _is_calibrated_by_batch(bound, site) else planner.first_match(site)
            groups.append(AskGroup([site], first or planner.site(site), is_chain=False))
    for group in groups:
        read = frozenset(deciding.get(index, index) for index in group.sites_read)
        group.sites_read = read - {site.index for site in group.sites}
    return groups


def operators_of(groups: Sequence[AskGroup]) -> dict[int, int]:
    """For each site how many groups must be settled one after another before it is asked.

    Groups of the same number go on at the same time, over the same KV.
    """
    found: dict[int, int] = {}
    left = list(groups)
    while left:
        ready = [group for group in left if group.sites_read <= found.keys()]
        assert ready, "calls of the statement depend on each other in a circle"
        numbers = [max((found[site] + 1 for site in group.sites_read), default=0) for group in ready]
        for group, number in zip(ready, numbers, strict=True):
            found.update((site.index, number) for site in group.sites)
        left = [group for group in left if group not in ready]
    return found


def _deciding_sites(bound: BoundStatement, order: str) -> dict[int, int]:
    """Sites whose question an operand in front of them, in the same AND or OR, asks; and the site of that.

    To know that the later one is needed the answer of the earlier is needed, which is its own.

    Raises:
        UnsupportedError: more sites are left than can be planned in reasonable time.
    """
    operands = _Operands(bound, order)
    deciding: dict[int, int] = {}
    for site in bound.sites:
        earlier = operands.deciding(site)
        if earlier is not None:
            deciding[site.index] = earlier
    left = [site for site in bound.sites if site.index not in deciding]
    if len(left) > MOST_SITES:
        start = len(bound.text.encode()[: left[MOST_SITES].span[0]].decode())
        raise UnsupportedError(
            f"the statement asks questions in {len(left)} places, {MOST_SITES} are supported",
            hint="ask AI.CLASSIFY once in place of many AI.IF, or split the statement",
            text=bound.text,
            start=start,
        )
    return deciding


class _Operands:
    """The operands of each AND and OR in the order in which they are decided, and what each of them asks."""

    def __init__(self, bound: BoundStatement, order: str) -> None:
        self._bound, self._order = bound, order
        self._asked = {id(site.node): (_question(site), site.index) for site in bound.sites}
        self._ranks: dict[int, tuple[dict[int, int], dict[Question, tuple[int, int]]]] = {}

    def deciding(self, site: Site) -> int | None:
        """The first site in front of a site that asks the same question as an operand of its own."""
        question, _ = self._asked[id(site.node)]
        for step in site.place.steps:
            if step.kind in ("AND", "OR"):
                ranks, first = self._ranks_of(step.node, is_and=step.kind == "AND")
                rank, index = first.get(question, (ranks[step.operand], site.index))
                if rank < ranks[step.operand]:
                    return index
        return None

    def _ranks_of(
        self, node: Node, *, is_and: bool
    ) -> tuple[dict[int, int], dict[Question, tuple[int, int]]]:
        """The rank of each operand; for each question the lowest at which it stands alone, and its site."""
        known = self._ranks.get(id(node))
        if known is None:
            children = node["children"]
            order = operand_order(children, self._bound.calls, self._order, is_and=is_and)
            first: dict[Question, tuple[int, int]] = {}
            for rank, operand in enumerate(order):
                if id(children[operand]) in self._asked:
                    question, index = self._asked[id(children[operand])]
                    first.setdefault(question, (rank, index))
            known = self._ranks[id(node)] = {operand: rank for rank, operand in enumerate(order)}, first
        return known


def _question(site: Site) -> Question:
    return (site.call, tuple(map(signature_of, site.arguments)))


def _chain_sites(bound: BoundStatement, block: int, planner: CandidatePlanner) -> list[Site]:
    """Sites whose calls alone, or negated, are the first conjuncts that ask anything."""
    own = [site for site in bound.sites if site.place.block == block and site.place.clause is Clause.WHERE]
    chain: list[Site] = []
    for conjunct in planner.blocks[block].conjuncts:
        if not holds_call(conjunct):
            continue
        site = next((site for site in own if site.is_conjunct and site.place.root is conjunct), None)
        if (
            site is None
            or bound.call_of(site).operator is not Operator.IF
            or holds_call(list(site.arguments))
            or _is_calibrated_by_batch(bound, site)
        ):
            break
        chain.append(site)
    return chain


def _is_calibrated_by_batch(bound: BoundStatement, site: Site) -> bool:
    """Whether no answer of the site's call comes before all its questions are asked."""
    return bound.call_of(site).options.calibrate == "batch"


def _row_limit(bound: BoundStatement, index: int) -> int | None:
    """How many rows that pass WHERE suffice, None where all are needed."""
    block = bound.blocks[index]
    node = block.node
    if bound.query is not node or len(node["modifiers"]) != 1 or block.limit is None:
        return None
    roots = [*node["select_list"], node["having"], node["qualify"]]
    if node["group_expressions"] or node["aggregate_handling"] != "STANDARD_HANDLING" or node["having"]:
        return None
    if node["qualify"] is not None or any(_reads_all_rows(below) for below in syntax.walk(roots)):
        return None
    total = 0
    for part in ("limit", "offset"):
        value = block.limit[part]
        if value is None:
            continue
        count = _constant_count(bound, value)
        if block.limit["limit_type"] != "ROW_COUNT" or count is None:
            return None
        total += count
    return total


def _constant_count(bound: BoundStatement, node: Node) -> int | None:
    """The number that LIMIT or OFFSET writes as a constant or a parameter."""
    if node["class"] == "CONSTANT" and node["literal"]["kind"] == "INTEGER":
        return int(node["literal"]["text"])
    if node["class"] == "FUNCTION" and node["function_name"] == "getvariable":
        value = bound.parameters.get(node["arguments"][0]["expression"]["literal"]["text"])
        return value if isinstance(value, int) and value >= 0 else None
    return None


def _reads_all_rows(node: Node) -> bool:
    """Whether an expression may be an aggregate or a window, which read every row."""
    if node.get("class") == "FUNCTION":
        return not node["schema"] and node["function_name"].lower() in aggregate_names()
    return node.get("class") == "WINDOW"


def signature_of(argument: Node) -> str:
    """Text that is equal for arguments that may be the same documents."""
    return syntax.to_sql({**argument, "alias": ""})


def _columns(sites: Sequence[Site], query: CandidateQuery) -> list[tuple[str, ...]]:
    names = iter(query.arguments)
    return [tuple(next(names) for _ in site.arguments) for site in sites]
