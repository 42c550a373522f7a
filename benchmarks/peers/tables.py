"""Results as Markdown, for people and for the pages that show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import write_section
from benchmarks.peers.engines import ENGINES, QUAIL, ROOT
from benchmarks.peers.summary import Row, rows_of

SECTION = "peers"
Results = Mapping[str, Any]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns but the first stand right.

    >>> print(table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    rule = ["---", *["--:"] * (len(head) - 1)]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(rule) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])


def title_of(engine: str) -> str:
    """An engine's name for people."""
    return ENGINES[engine].title if engine in ENGINES else engine


def result_rows(results: Results) -> list[Row]:
    """The rows of stored results."""
    return rows_of(results["runs"], results["parts"])


def circumstances(results: Results) -> str:
    """When, where and how it was measured, as a sentence or two."""
    machine, settings = results["machine"], results["settings"]
    quick = " (quick: too few documents and rounds to rely on)" if settings["is_quick"] else ""
    return (
        f"Measured {results['date']} on {machine['processor']} ({machine['instruction_sets']}), "
        f"{machine['memory']}: {settings['documents']} documents, medians of {settings['rounds']} "
        f"interleaved rounds{quick}; {settings['dtype']}, {settings['threads']} threads, "
        f"{settings['kv_gib']} GiB of KV each."
    )


def short_table(results: Results) -> str:
    """How fast Quail is in each dtype, and how many times as long a peer takes; below 1 the peer is faster.

    A row a part, a column an engine.
    """
    rows = {(row.part, row.engine): row for row in result_rows(results)}
    others = [name for name in results["engines"] if name != QUAIL and measured(results, name)]
    kinds = [name for name in others if ENGINES[name].runs_statements]
    peers = [name for name in others if name not in kinds]
    body = []
    for part, whole in results["parts"].items():
        ours = [rows.get((part, name)) for name in (QUAIL, *kinds)]
        speeds = [f"{row.documents_per_second:.3g}" if row else "–" for row in ours]
        body.append([whole["title"], *speeds, *(times_cell(rows.get((part, peer))) for peer in peers)])
    boots = {name: engine.get("boot_seconds") for name, engine in results["engines"].items()}
    if boots.get(QUAIL):
        ratios = [boots[peer] / boots[QUAIL] if boots[peer] else None for peer in peers]
        cells = ["–" if ratio is None else marked(f"{ratio:.3g}", ratio) for ratio in ratios]
        own = [f"{boots[name]:.1f} s" if boots.get(name) else "–" for name in (QUAIL, *kinds)]
        body.append(["start to first answer", *own, *cells])
    speeds = [f"{title_of(name)}, documents/s" for name in (QUAIL, *kinds)]
    return table(["", *speeds, *(f"x {title_of(peer)}" for peer in peers)], body)


def measured(results: Results, engine: str) -> bool:
    """Whether an engine has any run."""
    return any(run["engine"] == engine for run in results["runs"])


def times_cell(row: Row | None) -> str:
    """A ratio with its spread; a lost one is written in bold."""
    if row is None or row.times is None:
        return "–"
    middle, least, most = row.times
    return marked(f"{middle:.2f} ({least:.2f}–{most:.2f})", middle)


def marked(cell: str, ratio: float) -> str:
    """A cell in bold where Quail is the slower one."""
    return f"**{cell}**" if ratio < 1 else cell


def long_table(results: Results) -> str:
    """Every engine on every part."""
    body = []
    for row in result_rows(results):
        middle, least, most = row.seconds
        share = "" if row.share > 0.999 else f", {row.share:.0%} asked"
        body.append(
            [
                results["parts"][row.part]["title"],
                title_of(row.engine) + share,
                f"{middle:.2f} ({least:.2f}–{most:.2f})",
                f"{row.documents_per_second:.3g}",
                f"{row.computed_tokens:,} of {row.prompt_tokens:,}",
                "" if row.engine == QUAIL else times_cell(row),
                "" if row.equal is None else f"{row.equal:.1%}",
                f"{row.cores:.2f}",
                "" if row.speed_of_light is None else f"{row.speed_of_light:.0%}",
            ]
        )
    head = ["workload", "engine", "seconds", "documents/s", "computed of prompt tokens"]
    return table([*head, "times Quail's seconds", "equal answers", "cores busy", "of speed of light"], body)


def engine_table(results: Results) -> str:
    """Versions, boot and memory of the engines, and those that are missing."""
    body = []
    for name, engine in results["engines"].items():
        if "missing" in engine:
            body.append([title_of(name), engine["missing"].replace("|", "/"), "–", "–", "–"])
            continue
        body.append(
            [
                title_of(name),
                engine["engine"] + (f"; stopped: {engine['failed']}" if engine.get("failed") else ""),
                f"{engine['boot_seconds']:.1f}",
                f"{engine['peak_bytes'] / 2**30:.2f}",
                f"{engine['idle_cores']:.2f}",
            ]
        )
    head = ["engine", "version", "start to first answer, s", "peak resident, GiB", "cores busy when idle"]
    return table(head, body)


def report(results: Results) -> str:
    """All tables, as the file beside the results."""
    parts = ["# Quail and its peers", circumstances(results), short_table(results)]
    return "\n\n".join([*parts, long_table(results), engine_table(results)]) + "\n"


def write_pages(results: Results, root: Path = ROOT) -> list[Path]:
    """Writes the tables into README.md and docs/benchmarks.md; gives the pages.

    Raises:
        ValueError: a page lacks the place for them.
    """
    readme, page = root / "README.md", root / "docs" / "benchmarks.md"
    write_section(readme, SECTION, "\n\n".join([circumstances(results), short_table(results)]))
    tables = [circumstances(results), short_table(results), long_table(results), engine_table(results)]
    plot = f"benchmarks/results/peers-{results['date']}.svg"
    if (root / plot).is_file():
        tables.insert(2, f"![Seconds of each engine over Quail's](../{plot})")
    write_section(page, SECTION, "\n\n".join(tables))
    return [readme, page]
