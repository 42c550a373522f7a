"""What a run gives back: the table and the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quail.errors import QuailError
from quail.execution.ask_order import in_words
from quail.execution.error_log import ERROR_SCHEMA, MOST_LISTED
from quail.rendering import box, html_table, iterate

if TYPE_CHECKING:
    import pandas
    import polars

TOKEN_COUNTS = (
    "naive",
    "computed",
    "reused_rewind",
    "reused_prefix",
    "reused_retained",
    "recomputed",
    "wasted",
)


@dataclass(frozen=True)
class Report(Mapping[str, Any]):
    """What a run did. Reads as a mapping too: `report["tokens"]["computed"]`; `print(report)` is a summary.

    Attributes:
        seconds: wall time in seconds: `boot` (loading the model, in the run that did it), `plan` (binding and
            materializing), `tokenize`, `forward` (inside the model), `run` (from the first question to the
            last answer), `total`.
        tokens: the ledger. `naive` = `computed` + `reused_rewind` + `reused_prefix` + `reused_retained`;
            `recomputed` is the part of `computed` that had been computed before and was lost; `wasted` was
            thrown away.
        stages: one mapping a call: `text`, `evaluated`, `passed`, `selectivity` (observed), `null`,
            `deduplicated`; `tokens`, its part of the ledger; `seconds`, its part of `forward` by its work.
        order: one mapping for each WHERE with several AI conditions that were asked row by row: `planned` and
            `calls` (indices of the stages: as planned, and as they were asked at the end), `pilot_rows` (rows
            drawn across the table to observe selectivities first), `revisions` (how often the order changed).
        passes: forward passes through the model.
        speed_of_light: least time of the run's work (each token that was needed computed once, no time lost
            on anything else) as a share of `seconds["run"]`, from 0 to 1; None where this device's rates are
            not known: `quail doctor --measure` measures them.
        memory: sizes in bytes and counts of pages, among them `peak_resident_bytes` of the process.
        model: its name, or None where no model was asked.
        device: where it ran.
        dtype: of its products; with int8 weights and KV are bfloat16.
        rows: rows of the result.
        documents: distinct documents that the model read.
        answers: where answers came from: `asked` (the model), `stored` (an earlier run, or this one,
            had stored it), `shared` (given by the evaluation of another call that reads the same).
        truncated: documents that were cut because `on_long='truncate'` was set.
        nulls: NULL answers: of NULL arguments, and of questions that failed in a run that went on.
        num_errors: questions that failed in a run that went on.
        errors: the first 1,000 of them: `table`, `row` (the first in which the text stands), `call`, `kind`,
            `message`.
        audit: what `run(audit=…)` found: `audited`, `greatest_gap`, `tolerance`, `beyond_tolerance`, `flips`,
            `audit_tokens`, `seconds`; empty without an audit.
        warnings: what a reader of the result should know.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_COUNTS, 0))
    stages: tuple[Mapping[str, Any], ...] = ()
    order: tuple[Mapping[str, Any], ...] = ()
    passes: int = 0
    speed_of_light: float | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    rows: int = 0
    documents: int = 0
    answers: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    nulls: int = 0
    num_errors: int = 0
    errors: tuple[Mapping[str, Any], ...] = ()
    audit: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def total(cls, reports: Sequence[Report]) -> Report:
        """One report of several runs that made one result, of which the last gave the rows."""
        last = reports[-1]
        asked = [report for report in reports if report.model is not None] or [last]
        return replace(
            last,
            seconds=_sums([report.seconds for report in reports]),
            tokens={name: int(each) for name, each in _sums([report.tokens for report in reports]).items()},
            stages=tuple(stage for report in reports for stage in report.stages),
            order=tuple(_orders(reports)),
            passes=sum(report.passes for report in reports),
            speed_of_light=_mean_speed(asked),
            memory=asked[-1].memory,
            model=asked[-1].model,
            device=asked[-1].device,
            dtype=asked[-1].dtype,
            documents=sum(report.documents for report in reports),
            answers={name: int(n) for name, n in _sums([report.answers for report in reports]).items()},
            truncated=sum(report.truncated for report in reports),
            nulls=sum(report.nulls for report in reports),
            num_errors=sum(report.num_errors for report in reports),
            errors=tuple(error for report in reports for error in report.errors)[:MOST_LISTED],
            audit=_total_audit([report.audit for report in reports if report.audit]),
            warnings=tuple(dict.fromkeys(warning for report in reports for warning in report.warnings)),
        )

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(f"{key!r} is not in the report; it has {', '.join(self)}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __contains__(self, key: object) -> bool:
        return any(each.name == key for each in fields(self))

    def __str__(self) -> str:
        return "\n".join(
            [
                self._headline(),
                *self._stage_lines(),
                *(f"  order: {in_words(order)}" for order in self.order),
                *self._token_lines(),
                *self._trouble_lines(),
            ]
        )

    def _headline(self) -> str:
        spent = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items() if name != "total")
        engine = "no model asked" if self.model is None else f"{self.model} on {self.device}, {self.dtype}"
        total = self.seconds.get("total", 0.0)
        return f"{self.rows:,} rows | {engine} | {total:.2f} s" + (f" ({spent})" if spent else "")

    def _stage_lines(self) -> list[str]:
        if not self.stages:
            return []
        lines = [f"  {'evaluated':>9}  {'passed':>9}  {'share':>6}  {'NULL':>6}  call"]
        for stage in self.stages:
            share = stage.get("observed_selectivity")
            text = " ".join(str(stage.get("call", "")).split())
            passed = stage.get("passed")
            lines.append(
                f"  {stage.get('evaluated', 0):>9,}  {'-' if passed is None else format(passed, ','):>9}  "
                f"{'-' if share is None else format(share, '.3f'):>6}  {stage.get('null', 0):>6,}  "
                f"{text if len(text) <= 70 else text[:69] + '…'}"
            )
        return lines

    def _token_lines(self) -> list[str]:
        counts = self.tokens
        if not counts.get("naive") and not counts.get("computed"):
            return []
        run = self.seconds.get("run", 0.0)
        rate = f" | {counts['computed'] / run:,.0f} tokens/s" if run else ""
        if self.speed_of_light is not None:
            rate += f", {self.speed_of_light:.0%} of the speed of light"
        peak = self.memory.get("peak_resident_bytes")
        memory = f" | peak memory {peak / 2**30:.2f} GiB" if peak else ""
        return [
            f"  tokens: {counts['naive']:,} naive = {counts['computed']:,} computed"
            f" + {counts['reused_rewind']:,} rewind + {counts['reused_prefix']:,} prefix"
            f" + {counts['reused_retained']:,} retained"
            f" ({counts['recomputed']:,} recomputed, {counts['wasted']:,} wasted)",
            f"  {self.passes:,} passes{rate}{memory}",
        ]

    def _trouble_lines(self) -> list[str]:
        lines = [f"  warning: {warning}" for warning in self.warnings]
        stored, shared = self.answers.get("stored", 0), self.answers.get("shared", 0)
        if stored or shared:
            lines.append(
                f"  answers not asked for again: {stored:,} stored, {shared:,} shared by another call"
            )
        if self.truncated:
            lines.append(f"  {self.truncated:,} documents were truncated to fit the model's context")
        if self.errors:
            first = self.errors[0]
            lines.append(
                f"  {self.num_errors:,} questions failed, the first {first['table']} row {first['row']}: "
                f"{first['message']}"
            )
        if self.audit:
            found = self.audit
            lines.append(
                f"  audit: {found['audited']:,} answers asked again without reuse, greatest gap "
                f"{found['greatest_gap']:.2g} ({found['tolerance']:.2g} allowed), {found['flips']:,} flips, "
                f"{found['audit_tokens']:,} tokens"
            )
        return lines


def _mean_speed(reports: Sequence[Report]) -> float | None:
    """The speed of light of several runs together."""
    parts = [(report.speed_of_light, report.seconds.get("run", 0.0)) for report in reports]
    total = sum(seconds for _, seconds in parts)
    if not total or any(speed is None for speed, seconds in parts if seconds):
        return None
    return sum((speed or 0.0) * seconds for speed, seconds in parts) / total


def _sums(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


def _orders(reports: Sequence[Report]) -> Iterator[Mapping[str, Any]]:
    """The orders of several runs, their calls numbered on over the stages of all."""
    start = 0
    for report in reports:
        for order in report.order:
            yield {**order, **{name: [start + call for call in order[name]] for name in ("planned", "calls")}}
        start += len(report.stages)


def _total_audit(audits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One audit of several runs: sums, beside the greatest gap and what was allowed there."""
    if not audits:
        return {}
    worst = max(audits, key=lambda audit: float(audit["greatest_gap"]))
    integers = {name for name, value in worst.items() if isinstance(value, int)}
    total = {name: int(value) if name in integers else value for name, value in _sums(audits).items()}
    return total | {name: worst[name] for name in ("greatest_gap", "tolerance")}


class QueryResult:
    """The rows of a query, in the order the statement gives them.

    Attributes:
        report: what the run did.
        errors: questions that failed, an Arrow table of `table`, `row`, `call`, `kind`, `message`: all of
            them in a run with `on_error='details'`, the first 1,000 with `'null'`.
    """

    def __init__(self, table: pa.Table, report: Report, errors: pa.Table | None = None) -> None:
        self._table = table
        self.report = report
        self.errors = ERROR_SCHEMA.empty_table() if errors is None else errors

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._table.column_names)

    @property
    def schema(self) -> pa.Schema:
        """Names and Arrow types of the columns."""
        return self._table.schema

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table, not copied."""
        return self._table

    def df(self) -> pandas.DataFrame:
        """The rows as a pandas frame.

        Raises:
            QuailError: pandas is not installed.
        """
        _need("pandas")
        frame: pandas.DataFrame = self._table.to_pandas()
        return frame

    def pl(self) -> polars.DataFrame:
        """The rows as a polars frame.

        Raises:
            QuailError: polars is not installed.
        """
        frame: polars.DataFrame = _need("polars").from_arrow(self._table)
        return frame

    def batches(self, max_rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The rows as Arrow record batches of at most `max_rows` rows."""
        yield from self._table.to_batches(max_chunksize=max_rows)

    def fetchall(self) -> list[tuple[Any, ...]]:
        """The rows as tuples of Python values."""
        return list(self)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iterate(self._table)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def show(self, max_rows: int = 20) -> None:
        """Prints the first rows in a box, and how near the run came to the speed of light, if known."""
        text = box(self._table, max_rows=max_rows)
        speed = self.report.speed_of_light
        if speed is not None:
            text += f"\n{self.report.seconds.get('run', 0.0):.2f} s, {speed:.0%} of the speed of light"
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))

    def __repr__(self) -> str:
        return box(self._table)

    def _repr_html_(self) -> str:
        return html_table(self._table)


def _need(library: str) -> Any:
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError:
        raise QuailError(
            f"{library} is not installed", hint=f"pip install {library}, or use .arrow() or .fetchall()"
        ) from None
