"""A plan as JSON, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from quail.execution.population import NamedForecast
from quail.execution.rehearsal import CallForecast
from quail.explain.report import LEDGER, BlockReport, EngineReport, PlanReport, SiteReport
from quail.planner.estimate import TokenForecast


def as_json(plan: PlanReport) -> str:
    """The plan; `predicted` is null where a part of it is unknown before the run."""
    bound = plan.bound
    found: dict[str, Any] = {
        "statement": bound.text,
        "calls": [
            {"index": call.index, "operator": call.operator.value, "text": call.text} for call in bound.calls
        ],
        "blocks": [_block(report) for report in plan.blocks],
        "warnings": list(bound.warnings),
    }
    if plan.engine is not None:
        found |= _engine(plan.engine)
    if plan.done is not None:
        found["done"] = _done(plan.done)
    return json.dumps(found, indent=2, ensure_ascii=False)


def _block(report: BlockReport) -> dict[str, Any]:
    return {
        "index": report.index,
        "parent": report.parent,
        "label": report.label,
        "from": report.tables,
        "decided_first": list(report.free_conjuncts),
        "asks": [_site(site) for site in report.sites],
    }


def _site(site: SiteReport) -> dict[str, Any]:
    found: dict[str, Any] = {
        "call": site.call,
        "clause": site.clause,
        "over": site.stage,
        "needed_if": list(site.conditions),
        "after_calls": list(site.after),
        "questions": site.questions,
        "is_exact": site.is_exact,
        "is_barrier": site.is_barrier,
    }
    if site.join is not None:
        found["join"] = site.join.as_dict()
    if site.forecast is not None:
        found["forecast"] = _forecast(site.forecast)
    return found


def _forecast(forecast: CallForecast) -> dict[str, Any]:
    return {
        "questions": forecast.num_asked,
        "passed": forecast.num_passed,
        "tokens": {name: getattr(forecast.tokens, name) for name in LEDGER},
        "seconds": forecast.seconds,
    }


def _engine(engine: EngineReport) -> dict[str, Any]:
    predicted = None
    if engine.tokens is not None:
        predicted = {"tokens": _tokens(engine.tokens), "seconds": engine.seconds}
    found: dict[str, Any] = {
        "engine": dict(engine.facts) or None,
        "groups": [_group(group) for group in engine.groups],
        "predicted": predicted,
    }
    if engine.unknown:
        found["unknown"] = list(engine.unknown)
    if engine.problem:
        found["problem"] = engine.problem
    return found


def _group(group: NamedForecast) -> dict[str, Any]:
    found: dict[str, Any] = {"documents": group.documents, "calls": list(group.calls)}
    if group.forecast is None:
        return found | {"num_documents": None}
    counted, decision = group.forecast.documents, group.forecast.decision
    return found | {
        "num_documents": counted.num_documents,
        "num_counted": len(counted.lengths),
        "tokens": counted.num_tokens,
        "is_exact": counted.is_exact,
        "num_too_long": counted.num_too_long,
        "sharing": asdict(decision),
        "saved_tokens": group.forecast.tokens.reused_prefix,
        "questions": [asdict(question) for question in group.forecast.questions],
        "predicted": _tokens(group.forecast.tokens),
        "seconds": group.forecast.seconds,
    }


def _tokens(tokens: TokenForecast) -> dict[str, Any]:
    return {name: getattr(tokens, name) for name in (*LEDGER, "is_exact")}


def _done(done: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokens": dict(done["tokens"]),
        "seconds": dict(done["seconds"]),
        "speed_of_light": done.get("speed_of_light"),
        "order": [dict(order) for order in done.get("order", ())],
        "calls": [dict(stage) for stage in done["stages"]],
    }
