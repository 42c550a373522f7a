"""`make bench`: what the CPU path reaches on this machine, as ratios measured side by side in one run."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path

from benchmarks import filters

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Runs the measurements, prints them beside their bars and stores them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--documents", type=int, default=100, help="texts of 300 tokens (default 100)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; medians are reported")
    parser.add_argument("--no-store", action="store_true", help="print only")
    arguments = parser.parse_args()
    lines = filters.measure(num_documents=arguments.documents, num_rounds=arguments.rounds)
    width = max(len(line.name) for line in lines)
    for line in lines:
        verdict = "meets" if line.is_met else "MISSES"
        print(f"{line.name:<{width}}  {line.value:8.3f}  {verdict} {line.bar}   ({line.detail})")
    if not arguments.no_store:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"filters-{date.today()}.json"
        machine = {
            "processor": filters.processor(),
            "python": platform.python_version(),
            **filters.versions(),
        }
        found = {line.name: {"value": line.value, "bar": line.bar, "detail": line.detail} for line in lines}
        path.write_text(json.dumps({"machine": machine, "lines": found}, indent=2) + "\n")
        print(f"stored in {path}")
    return 0 if all(line.is_met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
