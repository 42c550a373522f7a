"""What a statement will ask and what that will take, told without asking.

`blocks` makes the tree of query blocks with what each asks, `prediction` what the engine would do about it,
`as_text` and `as_json` show both; `report` holds what stands between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quail.config import EngineConfig
from quail.errors import ConfigError
from quail.execution.relational import HasCursor
from quail.execution.runner import Room
from quail.explain.as_json import as_json
from quail.explain.as_text import as_text
from quail.explain.blocks import Explainer
from quail.explain.prediction import predict
from quail.explain.report import PlanReport
from quail.plan.statement import BoundStatement


def explain(
    bound: BoundStatement,
    catalog: HasCursor,
    *,
    format: str = "text",
    order: str = "auto",
    config: EngineConfig | None = None,
    room: Room | None = None,
    analyze: Callable[[], Mapping[str, Any]] | None = None,
) -> str:
    """The plan of a statement.

    Args:
        bound: the statement.
        catalog: the tables that it reads.
        format: `text` for a tree, `json`.
        order: `auto` or `as_written`, as in a run.
        config: of the engine that would run it; tokens and seconds are predicted for it. None predicts none.
        room: of that engine, if it was booted already.
        analyze: runs it and gives the report, to be shown beside what was planned.

    Raises:
        ConfigError: an unknown format.
    """
    if format not in ("text", "json"):
        raise ConfigError(f"explain has no format {format!r}", hint="use 'text' or 'json'")
    cursor = catalog.cursor()
    try:
        explainer = Explainer(bound, cursor, order, config)
        blocks = explainer.blocks()
        engine = predict(explainer, catalog, config, room) if config is not None and bound.calls else None
    finally:
        cursor.close()
    if engine is not None:
        blocks = engine.told(blocks)
    done = None if analyze is None else analyze()
    render = as_json if format == "json" else as_text
    return render(PlanReport(bound, tuple(blocks), engine, done))
