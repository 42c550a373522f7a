"""Host work of a join: everything but the model, a pair."""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.lines import Line
from quail.config import EngineConfig
from quail.execution.asks import RunControl
from quail.execution.reads import AnsweringAtOnce
from quail.execution.relational import RelationalRun
from quail.execution.run import Limits
from quail.execution.runner import Engine
from quail.frontend.sql import bind_sql
from quail.kv.pages import PageArena
from quail.models.outline import read_outline
from quail.plan.prompts import PromptLayout
from quail.sources.catalog import Catalog

MOST_MICROSECONDS = 20.0
SQL = "SELECT count(*) FROM l, r WHERE AI.IF(PROMPT('Does {0} agree with {1}?', l.body, r.word))"


class NoModel(AnsweringAtOnce):
    """A model that computes nothing; every other answer is TRUE."""

    def __init__(self, num_pages: int) -> None:
        self.pages = PageArena(num_pages)

    def forward(self, chunk: Any) -> int:
        """The number of rows read."""
        return len(chunk.read_rows)

    def logits(self, states: int, rows: Any, vocab_ids: Any) -> Any:
        """Logits by the place of the row."""
        return np.outer(np.asarray(rows) % 2 * 2 - 1, np.arange(len(vocab_ids))).astype(np.float32)

    def answer_mass(self, states: int, rows: Any, vocab_ids: Any) -> Any:
        """All of the probability."""
        return np.ones(len(rows), dtype=np.float32)


class Answerer:
    """Answers every other question with TRUE."""

    def run(self, calls: Any, feed: Any, control: RunControl) -> dict[str, Any]:
        """Until the feed is done."""
        while not feed.done:
            for asks in feed.take(2**14):
                feed.answered(asks.call, asks.keys, pa.array(asks.keys % 2 == 0))
        return {}


def stub_engine() -> Engine:
    """An engine without a model, with the default model's tokenizer."""
    config = EngineConfig()
    outline = read_outline(config.model, config.cache_path)
    assert outline is not None, "quail models fetch smollm2-135m brings the tokenizer"
    layout = PromptLayout("completion")
    return Engine(NoModel(20_000), outline.tokenizer, layout, Limits(2048, 8192), {"memory": {}})


def microseconds(num_rows: int, answerer: Any) -> tuple[float, float]:
    """Processor microseconds a pair, of a join of two tables, and MiB that the process grew by."""
    catalog = Catalog()
    numbers = range(num_rows)
    catalog.register("l", pa.table({"body": [f"left text number {i}" for i in numbers]}))
    catalog.register("r", pa.table({"word": [f"right {i}" for i in numbers]}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    running = RelationalRun(bind_sql(SQL, None, catalog), catalog, RunControl())
    answerer.run(running.calls, running.feed, RunControl())
    running.result()
    seconds = time.process_time() - started
    running.close()
    catalog.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return seconds / num_rows**2 * 1e6, grown / 1024


def measure(*, num_rows: int) -> list[Line]:
    """Planning, asking and answering alone, then with scheduling and packing of passes.

    Args:
        num_rows: of each side.
    """
    found = []
    for name, answerer in (("relational side", Answerer()), ("whole host", stub_engine())):
        cost, grown = microseconds(num_rows, answerer)
        found.append(
            Line(
                f"pairs, {name}, microseconds each",
                cost,
                f"<= {MOST_MICROSECONDS:g}",
                cost <= MOST_MICROSECONDS,
                f"{num_rows:,} x {num_rows:,} pairs; the process grew by {grown:,.0f} MiB",
            )
        )
    return found
