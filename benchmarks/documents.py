"""Host work and memory of a table of documents: everything but the model."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lines import Line
from quail.execution.asks import RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from quail.sources.catalog import Catalog

MOST_GIB_A_MILLION = 4.0
MOST_MICROSECONDS = 15.0
DOCUMENT_BYTES = 1200
"""About 300 tokens."""

_ROWS_WRITTEN_AT_ONCE = 20_000
SQL = (
    "SELECT count(*) FROM documents "
    "WHERE AI.IF(PROMPT('{0} Is it good?', body)) AND AI.IF(PROMPT('{0} Is it long?', body))"
)


class Answerer:
    """Answers a question TRUE for nine documents of ten."""

    def run(self, calls: Any, feed: Any, control: RunControl) -> int:
        """Until the feed is done; gives the number of questions."""
        num_questions = 0
        waiting: list[Any] = []
        while not feed.done:
            waiting += [] if waiting else feed.take(2**12)
            if not waiting:
                break
            asks = waiting.pop()
            num_questions += len(asks)
            assert len(asks.arguments[0]) == len(asks)
            waiting += feed.answered(asks.call, asks.keys, pa.array(asks.keys % 10 > 0)).asks
        return num_questions


def write_documents(path: Path, num_documents: int) -> None:
    """Writes a Parquet file of distinct texts of `DOCUMENT_BYTES` bytes."""
    random = np.random.default_rng(7)
    words = np.array(["".join(chr(97 + c) for c in random.integers(0, 26, 7)) for _ in range(5000)])
    num_words = DOCUMENT_BYTES // 8
    schema = pa.schema([("id", pa.int64()), ("body", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_documents, _ROWS_WRITTEN_AT_ONCE):
            ids = range(start, min(start + _ROWS_WRITTEN_AT_ONCE, num_documents))
            drawn = words[random.integers(0, len(words), (len(ids), num_words - 2))]
            texts = [f"{i:015d} {' '.join(row)}" for i, row in zip(ids, drawn.tolist(), strict=True)]
            writer.write_table(pa.table({"id": list(ids), "body": texts}, schema))


def run_once(path: Path | str) -> dict[str, float]:
    """Runs the statement over a file in this process.

    Returns:
        Processor and clock `seconds`, `questions`, and `peak` and `before`: bytes this process took at most,
        and before the run.
    """
    catalog = Catalog()
    catalog.register("documents", str(path))
    before = _peak_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    running = RelationalRun(bind_sql(SQL, None, catalog), catalog, RunControl())
    num_questions = Answerer().run(running.calls, running.feed, RunControl())
    rows = running.result().to_pylist()
    clock, processor = time.perf_counter() - started, time.process_time() - cpu_started
    running.close()
    catalog.close()
    assert len(rows) == 1
    return {
        "questions": num_questions,
        "clock": clock,
        "processor": processor,
        "before": before,
        "peak": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """The most memory that this process held so far (Linux: VmHWM; elsewhere what getrusage says)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextlib.contextmanager
def documents_file(num_documents: int) -> Iterator[Path]:
    """A Parquet file of documents that vanishes at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.parquet"
        write_documents(path, num_documents)
        yield path


def run_apart(path: Path) -> dict[str, float]:
    """`run_once` in a process of its own, whose peak is that of the run alone."""
    code = "import json, sys; from benchmarks.documents import *; print(json.dumps(run_once(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(found.stderr)
    measured: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return measured


def measure(*, num_documents: int) -> list[Line]:
    """Two filters over documents of about 300 tokens: memory at the peak and host time a question."""
    with documents_file(num_documents) as path:
        found = run_apart(path)
    peak = found["peak"] / 2**30
    most_gib = MOST_GIB_A_MILLION * max(1.0, num_documents / 1e6)
    cost = found["processor"] / found["questions"] * 1e6
    detail = f"{num_documents:,} documents of {DOCUMENT_BYTES} bytes, {int(found['questions']):,} questions"
    return [
        Line("documents, peak memory, GiB", peak, f"<= {most_gib:g}", peak <= most_gib, detail),
        Line(
            "documents, host microseconds a question",
            cost,
            f"<= {MOST_MICROSECONDS:g}",
            cost <= MOST_MICROSECONDS,
            f"processor time; {found['clock']:.1f} s by the clock",
        ),
    ]
