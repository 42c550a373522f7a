"""`python -m benchmarks curves`: what Quail's cost does as one size grows and the others stay."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import quail
from benchmarks import lines, plots
from benchmarks.clauses import CLAUSES
from benchmarks.pages import write_section
from benchmarks.peers.tables import table
from benchmarks.peers.tokens import Compiler
from benchmarks.peers.workloads import chapters, numbered
from quail.config import EngineConfig

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
SECTION = "curves"
QUESTIONS = (
    "Is this about the sea?",
    "Does anybody speak in this text?",
    "Is this part of a story about a voyage?",
    "Is the weather told of?",
    "Does anybody die here?",
    "Is an animal named?",
)
Tables = dict[str, dict[str, list[Any]]]


@dataclass(frozen=True)
class Case:
    """One statement.

    Attributes:
        size: where it stands on its curve.
        sql: the statement.
        tables: by column.
        kv_memory: of its session; None is the default.
    """

    size: int
    sql: str
    tables: Tables
    kv_memory: str | None = None


@dataclass(frozen=True)
class Point:
    """One measured case.

    Attributes:
        curve: name of the curve.
        size: where it stands on it.
        seconds: median, least and greatest of the rounds.
        naive: tokens of all prompts.
        computed: tokens that were computed.
        speed_of_light: least time of the work as a share of the time taken, median; None if unknown.
    """

    curve: str
    size: int
    seconds: tuple[float, float, float]
    naive: int
    computed: int
    speed_of_light: float | None


def asked(question: int) -> str:
    """One filter."""
    return rf"AI.IF(PROMPT(E'{{0}}\n\n{QUESTIONS[question]}', d.text), threshold := 0)"


def filters(num_questions: int) -> str:
    """A chain of filters that every document passes."""
    conditions = " AND ".join(asked(question) for question in range(num_questions))
    return f"SELECT d.id FROM docs d WHERE {conditions}"


def documents(compiler: Compiler, lengths: Sequence[int]) -> Tables:
    """Documents of these lengths."""
    return {"docs": numbered(chapters(compiler, lengths))}


def by_documents(compiler: Compiler) -> Iterator[Case]:
    """20 documents of 100 tokens, 10 and 100 times as many, one filter."""
    for count in (20, 200, 2000):
        yield Case(count, filters(1), documents(compiler, [100] * count))


def by_length(compiler: Compiler) -> Iterator[Case]:
    """4 documents of 30 to 4,000 tokens, one filter."""
    for length in (30, 100, 300, 1000, 4000):
        yield Case(length, filters(1), documents(compiler, [length] * 4))


def by_predicates(compiler: Compiler) -> Iterator[Case]:
    """20 documents of 200 tokens, 1 to 6 filters that all pass."""
    tables = documents(compiler, [200] * 20)
    for count in range(1, len(QUESTIONS) + 1):
        yield Case(count, filters(count), tables)


def by_partners(compiler: Compiler) -> Iterator[Case]:
    """10 documents of 200 tokens, each with 1 to 20 short partners."""
    sql = (
        "SELECT d.id, c.id FROM docs d, clauses c "
        "WHERE AI.IF(PROMPT('Does {0} agree with {1}?', d.text, c.text), anchor := 'd')"
    )
    tables = documents(compiler, [200] * 10)
    for count in (1, 2, 5, 10, 20):
        yield Case(count, sql, tables | {"clauses": numbered(CLAUSES[:count])})


def by_arena(compiler: Compiler) -> Iterator[Case]:
    """20 documents of 400 tokens, three filters, in arenas of so many MiB."""
    tables = documents(compiler, [400] * 20)
    for size in (32, 64, 128, 512, 2048):
        yield Case(size, filters(3), tables, f"{size}MiB")


CURVES: dict[str, tuple[str, Callable[[Compiler], Iterator[Case]]]] = {
    "documents": ("documents of 100 tokens, one filter", by_documents),
    "length": ("tokens of each of 4 documents, one filter", by_length),
    "predicates": ("filters over 20 documents of 200 tokens", by_predicates),
    "partners": ("partners of each of 10 documents of 200 tokens", by_partners),
    "arena": ("MiB for KV, 20 documents of 400 tokens, three filters", by_arena),
}


def measure(names: Sequence[str], num_rounds: int) -> list[Point]:
    """All points of some curves; the cases of a curve run in turn, round by round."""
    config = EngineConfig(retention="off")
    compiler = Compiler(config)
    found = []
    for name in names:
        cases = list(CURVES[name][1](compiler))
        sessions: dict[str | None, quail.Session] = {}
        try:
            for case in cases:
                if case.kv_memory not in sessions:
                    sessions[case.kv_memory] = opened(case.kv_memory)
            runs = [[run(sessions[case.kv_memory], case) for case in cases] for _ in range(num_rounds)]
        finally:
            for session in sessions.values():
                session.close()
        for case, of_case in zip(cases, zip(*runs, strict=True), strict=True):
            seconds = [each for each, _ in of_case]
            tokens = of_case[0][1].tokens
            middle = (statistics.median(seconds), min(seconds), max(seconds))
            lights = [report.speed_of_light for _, report in of_case if report.speed_of_light is not None]
            light = statistics.median(lights) if lights else None
            found.append(Point(name, case.size, middle, tokens["naive"], tokens["computed"], light))
            print(
                f"{name:<11} {case.size:>6,}  {middle[0]:8.3f} s  {tokens['computed']:>8,} tokens", flush=True
            )
    return found


def opened(kv_memory: str | None) -> quail.Session:
    """A session whose engine is warm and keeps nothing between statements."""
    config = EngineConfig(retention="off", answers="off", **({"kv_memory": kv_memory} if kv_memory else {}))
    session = quail.Session(config)
    session.register("docs", {"id": [0], "text": ["A fine film."]})
    session.sql(filters(1)).run(progress=False)
    return session


def run(session: quail.Session, case: Case) -> tuple[float, quail.Report]:
    """Seconds of a statement, and its report."""
    for name, columns in case.tables.items():
        session.register(name, columns)
    started = time.perf_counter()
    result = session.sql(case.sql).run(progress=False, order="as_written")
    return time.perf_counter() - started, result.report


def tables_of(points: Sequence[Point]) -> str:
    """A Markdown table a curve."""
    parts = []
    for name in dict.fromkeys(point.curve for point in points):
        body = [
            [
                f"{point.size:,}",
                "{:.2f} ({:.2f}–{:.2f})".format(*point.seconds),
                f"{point.computed:,} of {point.naive:,}",
                f"{point.computed / point.seconds[0]:,.0f}",
                "" if point.speed_of_light is None else f"{point.speed_of_light:.0%}",
            ]
            for point in points
            if point.curve == name
        ]
        heads = ["seconds", "computed of prompt tokens", "computed tokens/s", "of speed of light"]
        parts.append(table([CURVES[name][0], *heads], body))
    return "\n\n".join(parts)


def circumstances(about: dict[str, str], day: str, num_rounds: int) -> str:
    """When and where it was measured."""
    return (
        f"Measured {day} on {about['processor']}, {about['memory']}; medians of {num_rounds} rounds (spread)."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, stores a table and a plot, and writes the table into the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks curves", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CURVE", help=f"{', '.join(CURVES)} (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported (3)")
    parser.add_argument("--no-store", action="store_true", help="print only")
    parser.add_argument("--pages", action="store_true", help="write the tables into docs/benchmarks.md too")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in CURVES]
    if unknown:
        parser.error(f"no curve {unknown[0]!r}; there are {', '.join(CURVES)}")
    points = measure(arguments.names or list(CURVES), arguments.rounds)
    about, day = lines.machine(), str(date.today())
    written = f"{circumstances(about, day, arguments.rounds)}\n\n{tables_of(points)}\n"
    if not arguments.no_store:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"curves-{day}.json"
        found = {"machine": about, "date": day, "points": [asdict(point) for point in points]}
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(written)
        for name in dict.fromkeys(point.curve for point in points):
            path.with_name(f"curves-{name}-{day}.svg").write_text(plot(name, points))
        print(f"stored in {path} and beside it")
    if arguments.pages:
        write_section(PAGE, SECTION, written)
    return 0


def plot(name: str, points: Sequence[Point]) -> str:
    """Seconds of a curve."""
    own = [(float(point.size), point.seconds[0]) for point in points if point.curve == name]
    return plots.log_lines(f"Quail: {CURVES[name][0]}", CURVES[name][0], "seconds", {"seconds": own})
