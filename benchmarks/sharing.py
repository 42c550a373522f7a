"""Prefix sharing on transcripts: the time it saves against the time the cost model says it saves."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.lines import Line, spread
from quail.config import EngineConfig
from quail.cost.device import rates_of
from quail.execution.asks import RunControl
from quail.execution.forecast import Forecaster, GroupForecast
from quail.execution.runner import Engine
from tests.engine.feeds import ChainFeed, question

CALLS = Path(__file__).parent.parent / "examples" / "data" / "calls.parquet"
QUESTION = question(0, "\n\nDoes the caller name a favourite dish?")
MOST = 1.2
"""Measured ratio over predicted ratio, at most."""


def forecast(config: EngineConfig, texts: list[str], mode: str) -> GroupForecast:
    """What the planner says of the run."""
    forecaster = Forecaster.of(replace(config, prefix_sharing=mode))
    assert forecaster is not None
    documents = forecaster.documents(pa.array(texts), len(texts), [QUESTION])
    return forecaster.group(documents, [forecaster.question(QUESTION, len(texts), is_exact=True)])


def run_seconds(engine: Engine, texts: list[str], planned: GroupForecast) -> tuple[float, float]:
    """Seconds of one run and those of them on processors; its ledger must be the planned one."""
    started, started_cpu = time.perf_counter(), time.process_time()
    report = engine.run((QUESTION,), ChainFeed(texts, 1), RunControl())
    seconds = time.perf_counter() - started, time.process_time() - started_cpu
    assert report["tokens"]["computed"] == planned.tokens.computed
    assert report["tokens"]["reused_prefix"] == planned.tokens.reused_prefix
    return seconds


def measure(*, num_calls: int, num_rounds: int) -> list[Line]:
    """Runs with and without sharing in turn, round by round.

    On a machine that does other things too, seconds on processors tell more than those of the clock.
    """
    config = EngineConfig(prefix_sharing="on", retention="off")
    texts = pq.read_table(CALLS)["text"].to_pylist()[:num_calls]
    engine = Engine.boot(config)
    dtype = getattr(torch, engine.describe()["dtype"])
    model: Any = engine.model
    rates = rates_of(torch.device("cpu"), dtype, config.cache_path, model.decoder.kernels, again=True)
    shared, alone = (forecast(config, texts, mode) for mode in ("on", "off"))
    rule = engine.sharing
    found = []
    for _ in range(num_rounds):
        engine.sharing = rule
        with_sharing = run_seconds(engine, texts, shared)
        engine.sharing = None
        found.append((with_sharing, run_seconds(engine, texts, alone)))
    ratio, cpu_ratio = (statistics.median(on[i] / off[i] for on, off in found) for i in (0, 1))
    predicted = shared.seconds / alone.seconds
    tokens = shared.tokens.computed / alone.tokens.computed
    figures = f"{num_calls} calls: predicted {predicted:.3f}, tokens {tokens:.3f}"
    planned = f"planned {shared.seconds:.3g} and {alone.seconds:.3g} s by {rates}"
    clocks = [
        f"{spread([on[i] for on, _ in found])} s and {spread([off[i] for _, off in found])} s" for i in (0, 1)
    ]
    return [
        line("sharing: time ratio / predicted", ratio / predicted, f"{figures}; {clocks[0]}; {planned}"),
        line("sharing: processor time ratio / predicted", cpu_ratio / predicted, f"{figures}; {clocks[1]}"),
    ]


def line(name: str, value: float, detail: str) -> Line:
    """A ratio of ratios beside its bar."""
    return Line(name, value, f"<= {MOST}", value <= MOST, detail)
