"""`make bench`: what this machine reaches, as ratios measured side by side in one run.

python -m benchmarks [documents] [filters] [joins] [pairs] [quality] [sharing] [tree]
python -m benchmarks peers …     beside other engines (`--help` says how)
python -m benchmarks curves …    Quail's cost as sizes grow
python -m benchmarks profile …   where the time of a run goes, operator by operator
python -m benchmarks gpu …       what a CUDA device reaches
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

from benchmarks import lines
from benchmarks.lines import Line

RESULTS = Path(__file__).parent / "results"


def run_filters(arguments: argparse.Namespace) -> list[Line]:
    """Filters over texts of 300 tokens."""
    from benchmarks import filters

    return filters.measure(num_documents=arguments.documents, num_rounds=arguments.rounds)


def run_documents(arguments: argparse.Namespace) -> list[Line]:
    """Memory and host work of a million documents."""
    from benchmarks import documents

    return documents.measure(num_documents=arguments.table_rows)


def run_sharing(arguments: argparse.Namespace) -> list[Line]:
    """Prefix sharing over transcripts."""
    from benchmarks import sharing

    return sharing.measure(num_calls=arguments.calls, num_rounds=arguments.rounds)


def run_tree(arguments: argparse.Namespace) -> list[Line]:
    """The prefix tree of a million documents."""
    from benchmarks import prefix_tree

    return prefix_tree.measure()


def run_quality(arguments: argparse.Namespace) -> list[Line]:
    """How often the default model is right."""
    from benchmarks import quality

    return quality.measure()


def run_joins(arguments: argparse.Namespace) -> list[Line]:
    """Joins of licences with clauses and of vulnerabilities with weaknesses."""
    from benchmarks import joins

    return joins.measure(num_rounds=arguments.rounds, share=arguments.share)


def run_pairs(arguments: argparse.Namespace) -> list[Line]:
    """Host work of a million pairs."""
    from benchmarks import pairs

    return pairs.measure(num_rows=arguments.pair_rows)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], list[Line]]] = {
    "documents": run_documents,
    "filters": run_filters,
    "joins": run_joins,
    "pairs": run_pairs,
    "quality": run_quality,
    "sharing": run_sharing,
    "tree": run_tree,
}


def main() -> int:
    """Runs the named benchmarks, prints their lines beside their bars and stores them."""
    if sys.argv[1:2] == ["peers"]:
        from benchmarks.peers import cli

        return cli.main(sys.argv[2:])
    if sys.argv[1:2] == ["profile"]:
        from benchmarks import profile

        return profile.main(sys.argv[2:])
    if sys.argv[1:2] == ["curves"]:
        from benchmarks import curves

        return curves.main(sys.argv[2:])
    if sys.argv[1:2] == ["gpu"]:
        from benchmarks import gpu

        return gpu.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios measured side by side.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (default filters)")
    parser.add_argument("--documents", type=int, default=100, help="filters: texts of 300 tokens (100)")
    parser.add_argument("--calls", type=int, default=20, help="sharing: transcripts (20)")
    parser.add_argument("--share", type=float, default=1.0, help="joins: share of each side's rows (1)")
    parser.add_argument("--pair-rows", type=int, default=1000, help="pairs: rows of each side (1000)")
    parser.add_argument("--table-rows", type=int, default=1_000_000, help="documents: rows (1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; medians are reported (3)")
    parser.add_argument("--no-store", action="store_true", help="print only")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    are_met = True
    for name in arguments.names or ["filters"]:
        found = BENCHMARKS[name](arguments)
        show(found)
        if not arguments.no_store:
            store(name, found)
        are_met = are_met and all(line.is_met for line in found)
    return 0 if are_met else 1


def show(found: list[Line]) -> None:
    """Prints lines."""
    width = max(len(line.name) for line in found)
    for line in found:
        verdict = "meets" if line.is_met else "MISSES"
        print(f"{line.name:<{width}}  {line.value:8.3f}  {verdict} {line.bar}   ({line.detail})", flush=True)


def store(name: str, found: list[Line]) -> None:
    """Writes lines beside the machine they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{date.today()}.json"
    figures = {line.name: {"value": line.value, "bar": line.bar, "detail": line.detail} for line in found}
    path.write_text(json.dumps({"machine": lines.machine(), "lines": figures}, indent=2) + "\n")
    print(f"stored in {path}")


if __name__ == "__main__":
    sys.exit(main())
