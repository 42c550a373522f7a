"""What the engine would do about a statement.

A statement of no more than some ten thousand questions is rehearsed: it runs without its model. Of a larger
one the documents are counted, a sample of them where there are many, and joins are estimated from the numbers
of their pairs and the mean lengths of their texts.
"""

from __future__ import annotations

from dataclasses import replace

import duckdb

from quail.config import EngineConfig
from quail.errors import QuailError
from quail.execution.forecast import Forecaster
from quail.execution.population import Population
from quail.execution.rehearsal import rehearse
from quail.execution.relational import HasCursor
from quail.execution.runner import Room
from quail.explain.blocks import Explainer
from quail.explain.report import EngineReport
from quail.planner.ask_groups import row_limits
from quail.planner.estimate import TokenForecast
from quail.planner.existence import may_end_early


def predict(
    explainer: Explainer, catalog: HasCursor, config: EngineConfig, room: Room | None = None
) -> EngineReport:
    """What the engine would do, once the blocks are known."""
    bound = explainer.bound
    try:
        forecaster = Forecaster.of(config, room)
        if forecaster is None:
            where = f"the model {config.model} is not here yet"
            return EngineReport({}, problem=f"{where}; quail models fetch {config.model} brings it")
        population = Population(bound, explainer.planner, explainer.cursor, forecaster)
        groups = tuple(population.groups(explainer.asked))
        rehearsal = rehearse(bound, catalog, forecaster, order=explainer.planner.order)
    except (QuailError, duckdb.Error) as error:
        return EngineReport({}, problem=str(error).partition("\n")[0])
    facts = {
        "model": forecaster.model,
        "layout": forecaster.layout,
        "device": forecaster.device,
        "dtype": forecaster.dtype,
        "rates": "measured" if forecaster.are_rates_known else "assumed",
    }
    report = EngineReport(facts, groups, rehearsal=rehearsal, uncertain_calls=_uncertain_calls(explainer))
    if rehearsal is None:
        return _estimated(report, explainer, forecaster)
    is_exact = (
        all(each.is_exact for each in explainer.asked)
        and not report.uncertain_calls
        and not rehearsal.num_failed
        and forecaster.is_room_known
    )
    tokens = replace(rehearsal.tokens, is_exact=is_exact)
    return replace(report, tokens=tokens, seconds=rehearsal.seconds)


def _uncertain_calls(explainer: Explainer) -> frozenset[int]:
    """Calls that an answer may end: the first match of a row, or the last row of a limit."""
    limited = row_limits(explainer.bound, explainer.planner)
    return frozenset(
        site.call
        for site in explainer.bound.sites
        if site.place.block in limited or may_end_early(site, explainer.planner.blocks)
    )


def _estimated(report: EngineReport, explainer: Explainer, forecaster: Forecaster) -> EngineReport:
    """The sum of the groups, if all of them are known; else which are not."""
    joins = explainer.joins
    groups = [group for group in report.groups if not joins.counted_calls.issuperset(group.calls)]
    known = {call for group in groups if group.forecast is not None for call in group.calls}
    known |= joins.counted_calls
    unknown = [call.index for call in explainer.bound.calls if call.index not in known]
    if unknown:
        return replace(report, unknown=tuple(f"call {call}" for call in unknown))
    alone = [group.forecast.tokens for group in groups if group.forecast is not None]
    tokens = sum([*alone, *joins.tokens.values()], TokenForecast())
    return replace(report, tokens=tokens, seconds=forecaster.seconds(tokens.work))
