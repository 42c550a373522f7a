"""Prefix sharing on transcripts: the time it saves against the time the cost model says it saves."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

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


def run_seconds(engine: Engine, texts: list[str], planned: GroupForecast) -> float:
    """Seconds of one run, whose ledger must be the planned one."""
    started = time.perf_counter()
    report = engine.run((QUESTION,), ChainFeed(texts, 1), RunControl())
    seconds = time.perf_counter() - started
    assert report["tokens"]["computed"] == planned.tokens.computed
    assert report["tokens"]["reused_prefix"] == planned.tokens.reused_prefix
    return seconds


def measure(*, num_calls: int, num_rounds: int) -> list[Line]:
    """Runs with and without sharing in turn, round by round."""
    config = EngineConfig(prefix_sharing="on", retention="off")
    texts = pq.read_table(CALLS)["text"].to_pylist()[:num_calls]
    engine = Engine.boot(config)
    dtype = getattr(torch, engine.describe()["dtype"])
    rates = rates_of(torch.device("cpu"), dtype, config.cache_path, again=True)
    shared, alone = (forecast(config, texts, mode) for mode in ("on", "off"))
    rule = engine.sharing
    found = []
    for _ in range(num_rounds):
        engine.sharing = rule
        with_sharing = run_seconds(engine, texts, shared)
        engine.sharing = None
        found.append((with_sharing, run_seconds(engine, texts, alone)))
    ratio = statistics.median(on / off for on, off in found)
    predicted = shared.seconds / alone.seconds
    tokens = shared.tokens.computed / alone.tokens.computed
    seconds = f"{spread([on for on, _ in found])} s with, {spread([off for _, off in found])} s without"
    model = f"planned {shared.seconds:.3g} and {alone.seconds:.3g} s"
    return [
        Line(
            "sharing: time ratio / predicted ratio",
            ratio / predicted,
            f"<= {MOST}",
            ratio / predicted <= MOST,
            f"{num_calls} calls: measured {ratio:.3f}, predicted {predicted:.3f}, tokens {tokens:.3f}",
        ),
        Line("sharing: time ratio", ratio, "< 1", ratio < 1, f"{seconds}; {model}; {rates}"),
    ]
