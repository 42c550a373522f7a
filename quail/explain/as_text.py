"""A plan as a tree that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quail.execution.ask_order import in_words
from quail.execution.population import NamedForecast
from quail.explain.report import LEDGER, BlockReport, EngineReport, PlanReport, SiteReport
from quail.plan.statement import Stage
from quail.planner.estimate import TokenForecast

_WIDTH = 72


def as_text(plan: PlanReport) -> str:
    """The plan, then the documents, then the totals; what was done stands beside what was planned."""
    lines = [f"call {call.index}: {_cut(call.text)}" for call in plan.bound.calls]
    if not plan.bound.calls:
        lines.append("no AI calls: DuckDB runs the statement as it stands")
    tree = _Tree(plan)
    for root in (report for report in plan.blocks if report.parent is None):
        lines += tree.block(root)
    lines += _engine_lines(plan.engine) if plan.engine is not None else []
    if plan.done is not None:
        lines += _done_lines(plan.engine, plan.done)
        lines += [f"order: {in_words(order)}" for order in plan.done.get("order", ())]
    lines += [f"warning: {warning}" for warning in plan.bound.warnings]
    return "\n".join(lines)


class _Tree:
    """The blocks of a plan as lines; what was done stands at the first place of each call."""

    def __init__(self, plan: PlanReport) -> None:
        self._blocks = plan.blocks
        stages = plan.done["stages"] if plan.done is not None else ()
        self._done: dict[int, Mapping[str, Any]] = dict(enumerate(stages))

    def block(self, report: BlockReport) -> list[str]:
        source = f" from {report.tables}" if report.tables else ""
        lines = [f"{report.label}{source}"]
        entries: list[list[str]] = []
        if report.free_conjuncts:
            entries.append([f"decide {_cut(' AND '.join(report.free_conjuncts))}"])
        entries += [self._site(site) for site in report.sites]
        entries += [self.block(other) for other in self._blocks if other.parent == report.index]
        for position, entry in enumerate(entries):
            is_last = position == len(entries) - 1
            lines.append(f"{'└─ ' if is_last else '├─ '}{entry[0]}")
            lines += [f"{'   ' if is_last else '│  '}{line}" for line in entry[1:]]
        return lines

    def _site(self, site: SiteReport) -> list[str]:
        lines = [f"ask call {site.call} in {site.clause}: {_questions(site)}"]
        if site.join is not None:
            lines.append(f"   {site.join.as_text()}")
        if site.is_barrier:
            lines.append("   calibrated by batch: no answer before the last question, over all rows")
        elif site.stage != Stage.ROWS.value:
            lines.append(f"   over {site.stage}")
        if site.conditions:
            lines.append(f"   if {_cut(' AND '.join(site.conditions))}")
        if site.forecast is not None:
            forecast = site.forecast
            passed = "" if forecast.num_passed is None else f"{forecast.num_passed:,} pass, "
            lines.append(f"   {passed}{_ledger(_counts(forecast.tokens))}, {forecast.seconds:.3g} s")
        done = self._done.pop(site.call, None)
        if done is not None:
            lines.append(f"   done: {_done(done)}")
        return lines


def _questions(site: SiteReport) -> str:
    if site.questions is None:
        return f"after call {', '.join(map(str, site.after))}" if site.after else "questions unknown"
    certainty = "(at most)" if site.ends_early and site.is_exact else _certainty(site.is_exact)
    noun = "question" if site.questions == 1 else "questions"
    after = f" after call {', '.join(map(str, site.after))}" if site.after and not site.is_exact else ""
    return f"{site.questions:,} {noun} {certainty}{after}"


def _done(stage: Mapping[str, Any]) -> str:
    found = f"{stage.get('evaluated', 0):,} questions"
    if stage.get("passed") is not None:
        found += f", {stage['passed']:,} passed"
    if "tokens" in stage:
        found += f", {_ledger(stage['tokens'])}, {stage['seconds']:.3g} s"
    return found


def _counts(tokens: TokenForecast) -> dict[str, int]:
    return {name: getattr(tokens, name) for name in LEDGER}


def _ledger(counts: Mapping[str, int]) -> str:
    """A ledger in a few words: kinds of reuse without tokens are left out."""
    reused = [
        f" + {counts[name]:,} {name.removeprefix('reused_')}" for name in LEDGER[2:] if counts.get(name, 0)
    ]
    return f"{counts['naive']:,} tokens = {counts['computed']:,} computed{''.join(reused)}"


def _engine_lines(engine: EngineReport) -> list[str]:
    if engine.problem:
        return [f"tokens unknown: {engine.problem}"]
    lines = []
    for group in engine.groups:
        lines += _group_lines(group)
    if engine.rehearsal is not None and engine.rehearsal.num_failed:
        lines.append(
            f"{engine.rehearsal.num_failed:,} questions do not fit the model's context or its memory"
        )
    tokens, facts = engine.tokens, engine.facts
    if tokens is None:
        return [*lines, f"tokens unknown: nothing is known of {', '.join(engine.unknown)} before the run"]
    reused = " + ".join(f"{getattr(tokens, name):,} {name.removeprefix('reused_')}" for name in LEDGER[2:])
    lines.append(
        f"tokens {_certainty(tokens.is_exact)}: {tokens.naive:,} naive = {tokens.computed:,} computed"
        f" + {reused}"
    )
    lines.append(
        f"time (estimated): {engine.seconds:.3g} s of {facts['model']} on {facts['device']}, "
        f"{facts['dtype']}, {facts['layout']} layout, by {facts['rates']} rates"
    )
    return lines


def _group_lines(group: NamedForecast) -> list[str]:
    calls = ", ".join(map(str, group.calls))
    head = f"documents of call {calls}: {_cut(group.documents)}"
    if group.forecast is None:
        return [head, "   unknown before the run"]
    counted, decision = group.forecast.documents, group.forecast.decision
    lines = [
        head,
        f"   {counted.num_documents:,} distinct, {counted.num_tokens:,} tokens "
        f"{_certainty(counted.is_exact)}, label included",
        f"   {decision.shared_tokens:,} tokens stand in common beginnings, "
        f"{group.forecast.tokens.reused_prefix:,} are saved",
        f"   prefix sharing {decision.reason}",
    ]
    if counted.num_too_long:
        lines.append(f"   {counted.num_too_long:,} documents are too long for the model's context")
    return lines


def _done_lines(engine: EngineReport | None, done: Mapping[str, Any]) -> list[str]:
    """The totals that were planned beside those that were done."""
    planned: dict[str, str] = {}
    if engine is not None and engine.tokens is not None:
        planned = {name: f"{count:,}" for name, count in _counts(engine.tokens).items()}
        planned["seconds"] = f"{engine.seconds:.3g}"
    figures = {name: f"{done['tokens'].get(name, 0):,}" for name in (*LEDGER, "recomputed")}
    figures["seconds"] = f"{done['seconds'].get('run', 0.0):.3g}"
    if done.get("speed_of_light") is not None:
        figures["speed of light"] = f"{done['speed_of_light']:.0%}"
    lines = [f"{'':<16}{'planned':>14}{'done':>14}"]
    return lines + [f"{name:<16}{planned.get(name, '-'):>14}{each:>14}" for name, each in figures.items()]


def _certainty(is_exact: bool) -> str:
    return "(exact)" if is_exact else "(estimated)"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
