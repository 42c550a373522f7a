"""`python -m benchmarks peers`: measures Quail beside its peers and writes table, plot and pages."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import lines, plots
from benchmarks.peers import tables
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.environments import CannotInstall, processor_flags
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.peers.rounds import measure, sizes
from benchmarks.peers.tokens import Compiler
from benchmarks.peers.weights import model_files
from benchmarks.peers.workloads import WORKLOADS, Sizes, Workload
from quail.config import EngineConfig
from quail.kernels.choice import KernelChoice
from quail.models.device import dtype_name

RESULTS = Path(__file__).parents[1] / "results"
BOOT_TIMEOUT_SECONDS = 1800.0
TOLD_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
DOCUMENTS, ROUNDS, MOST_TOKENS = 32, 3, 2500
QUICK_DOCUMENTS, QUICK_ROUNDS, QUICK_MOST_TOKENS = 12, 1, 800


@dataclass(frozen=True)
class Settings:
    """What a measurement is made with.

    Attributes:
        documents: see `workloads.Sizes`.
        rounds: interleaved.
        most_tokens: that a slow engine computes of a workload and round, about.
        dtype: of weights and KV.
        threads: of each engine.
        kv_gib: for the KV of each engine.
        is_quick: too small to rely on.
    """

    documents: int
    rounds: int
    most_tokens: int
    dtype: str
    threads: int
    kv_gib: int
    is_quick: bool


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    made.add_argument("--documents", type=int, help=f"documents of 300 tokens ({DOCUMENTS})")
    made.add_argument("--rounds", type=int, help=f"interleaved rounds; medians are reported ({ROUNDS})")
    made.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME")
    made.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME"
    )
    made.add_argument(
        "--most-tokens",
        type=int,
        help=f"that llama.cpp and transformers compute of a workload and round, about; they are asked "
        f"about the first documents only and scaled ({MOST_TOKENS})",
    )
    made.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of all engines but the one in int8 (what suits the machine)",
    )
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each (all cores)")
    made.add_argument("--kv-gib", type=int, default=4, help="memory for the KV of each engine, in GiB (4)")
    made.add_argument("--quick", action="store_true", help="about five minutes; too little to rely on")
    made.add_argument("--build-jobs", type=int, help="compilers at a time where a peer is built")
    made.add_argument("--prepare", action="store_true", help="make environments and weights, boot each, stop")
    made.add_argument("--no-store", action="store_true", help="print only")
    made.add_argument(
        "--pages",
        nargs="?",
        const="",
        metavar="JSON",
        help="write the tables of a results file (the newest) into README and docs; measure nothing",
    )
    return made


def _kernels() -> KernelChoice:
    config = EngineConfig()
    return KernelChoice.of(config.kernels, "cpu", config.cache_path)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that arguments name; `--quick` has other defaults."""
    quick = arguments.quick
    return Settings(
        documents=arguments.documents or (QUICK_DOCUMENTS if quick else DOCUMENTS),
        rounds=arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        most_tokens=arguments.most_tokens or (QUICK_MOST_TOKENS if quick else MOST_TOKENS),
        dtype=arguments.dtype or dtype_name("auto", "cpu", _kernels()),
        threads=arguments.threads,
        kv_gib=arguments.kv_gib,
        is_quick=quick,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, or writes pages; the exit status tells whether anything was measured."""
    made = parser()
    arguments = made.parse_args(argv)
    if arguments.pages is not None:
        return write_pages(made, arguments.pages)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # no engine is left behind
    settings, config = settings_of(arguments), EngineConfig()
    compiler = Compiler(config)
    workloads = [WORKLOADS[name](compiler, Sizes(settings.documents)) for name in arguments.workloads]
    engines: dict[str, dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        processes = {}
        for name in arguments.engines:
            process, engines[name] = boot(name, settings, config, compiler, arguments.build_jobs)
            if process is not None:
                processes[name] = process
                stack.callback(process.close)
        if not arguments.prepare:
            warm_up(processes, compiler)
            alive = dict(processes)
            runs, failed = measure(
                alive,
                workloads,
                num_rounds=settings.rounds,
                most_tokens=settings.most_tokens,
                say=say,
            )
            for name, words in failed.items():
                engines[name]["failed"] = words
        for name, process in processes.items():
            peak = process.peak_resident_bytes()
            engines[name]["peak_bytes"] = peak or engines[name]["peak_bytes"]
    if arguments.prepare:
        for name, about in engines.items():
            print(f"{ENGINES[name].title}: {about.get('missing') or about['engine']}")
        return 0
    results = results_of(settings, workloads, engines, runs)
    print(tables.report(results))
    if not arguments.no_store:
        store(results)
    return 0 if runs else 1


def say(words: str) -> None:
    """Tells what is being done."""
    print(f"[{time.strftime('%H:%M:%S')}] {words}", flush=True)


def boot(
    name: str, settings: Settings, config: EngineConfig, compiler: Compiler, build_jobs: int | None
) -> tuple[PeerProcess | None, dict[str, Any]]:
    """Starts an engine and leaves it paused; None where it cannot be had, which is said in one line."""
    spec = ENGINES[name]
    try:
        folder, gguf = model_files(config, settings.dtype)
        started = time.perf_counter()
        process = spec.start(config.cache_path, say=say, build_jobs=build_jobs)
    except (CannotInstall, ValueError) as error:
        say(f"going on without {spec.title}: {error}")
        return None, {"missing": str(error)}
    message = {
        "do": "boot",
        "folder": str(folder),
        "gguf": str(gguf),
        "dtype": spec.dtype or settings.dtype,
        "threads": settings.threads,
        "kv_gib": settings.kv_gib,
        "prompt": compiler.document("A fine film.", []).ids,
        "answers": [1, 2],
    }
    try:
        about = process.ask(message, timeout_seconds=BOOT_TIMEOUT_SECONDS)
    except PeerFailed as error:
        process.close()
        say(f"going on without {spec.title}: {error}")
        return None, {"missing": str(error)}
    about["boot_seconds"] = time.perf_counter() - started
    before = process.cpu_seconds()
    time.sleep(1.0)
    about["idle_cores"] = process.cpu_seconds() - before
    about["peak_bytes"] = process.peak_resident_bytes()
    process.pause()
    say(f"{spec.title} is up after {about['boot_seconds']:.1f} s")
    return process, about


def warm_up(processes: dict[str, PeerProcess], compiler: Compiler) -> None:
    """A few documents of several sizes, so that nothing is compiled or touched first in a measured run."""
    workloads = [WORKLOADS[name](compiler, Sizes(8)) for name in ("chain", "classify")]
    measure(processes, workloads, num_rounds=1, most_tokens=500, say=lambda words: None)


def results_of(
    settings: Settings,
    workloads: Sequence[Workload],
    engines: dict[str, dict[str, Any]],
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """All that is stored."""
    parts = {
        part.name: {"title": part.title, "sql": part.sql, **sizes(workload.documents, part)}
        for workload in workloads
        for part in workload.parts
    }
    flags = processor_flags()
    sets = ", ".join(flag for flag in TOLD_FLAGS if flag in flags)
    return {
        "date": str(date.today()),
        "machine": lines.machine() | {"instruction_sets": sets},
        "settings": vars(settings),
        "engines": engines,
        "parts": parts,
        "runs": runs,
    }


def store(results: dict[str, Any]) -> None:
    """Writes results, tables and plot."""
    kind = "peers-quick" if results["settings"]["is_quick"] else "peers"
    path = RESULTS / f"{kind}-{results['date']}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(tables.report(results))
    path.with_suffix(".svg").write_text(plot(results))
    print(f"stored in {path} and beside it")


def plot(results: dict[str, Any]) -> str:
    """How many times Quail's seconds each peer takes."""
    bars: dict[str, dict[str, float]] = {}
    for row in tables.result_rows(results):
        if not ENGINES[row.engine].runs_statements and row.times is not None:
            title = results["parts"][row.part]["title"]
            bars.setdefault(title, {})[tables.title_of(row.engine)] = row.times[0]
    if not bars:
        return plots.svg(200, 40, [plots.text(10, 20, "no peer was measured")])
    words = f"Seconds of each engine over Quail's, {results['date']}"
    return plots.ratio_bars(words, bars, below="peer is faster", above="Quail is faster")


def write_pages(made: argparse.ArgumentParser, name: str) -> int:
    """Writes the tables of a results file into the pages."""
    path = Path(name) if name else newest()
    if path is None or not path.is_file():
        made.error(f"no results {name or 'in ' + str(RESULTS)}; measure first, or name a file")
    results = json.loads(path.read_text())
    for page in tables.write_pages(results):
        print(f"{page} shows {path.name}")
    return 0


def newest() -> Path | None:
    """The newest results that are not quick ones."""
    found = sorted(path for path in RESULTS.glob("peers-*.json") if "quick" not in path.name)
    return found[-1] if found else None
