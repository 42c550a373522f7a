"""Memory and host work of a table of documents grow with the texts, not with copies of them."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.documents import DOCUMENT_BYTES, MOST_MICROSECONDS, Answerer, documents_file, run_apart
from quail.execution.asks import RunControl
from quail.execution.relational import RelationalRun
from quail.frontend.sql import bind_sql
from quail.sources.catalog import Catalog
from tests.memory.processes import MiB, needs_proc

pytestmark = pytest.mark.alone

NUM_DOCUMENTS = 50_000


@needs_proc
def test_fifty_thousand_documents() -> None:
    with documents_file(NUM_DOCUMENTS) as path:
        found = run_apart(path)
    texts = NUM_DOCUMENTS * DOCUMENT_BYTES
    assert found["questions"] > 1.8 * NUM_DOCUMENTS
    assert found["peak"] - found["before"] < 3 * texts + 192 * MiB, found
    assert found["processor"] / found["questions"] * 1e6 < 3 * MOST_MICROSECONDS, found


@pytest.mark.slow
def test_a_million_rows_pass_a_filter_in_seconds() -> None:
    """Processor time of everything but the model; 2 to 3 seconds on a busy two-core machine."""
    catalog = Catalog()
    texts = [f"row {i} of some text that is not long" for i in range(1_000_000)]
    catalog.register("d", pa.table({"id": np.arange(len(texts)), "body": texts}))
    bound = bind_sql("SELECT id FROM d WHERE AI.IF(PROMPT('{0} Is it good?', body))", None, catalog)
    started = time.process_time()
    running = RelationalRun(bound, catalog, RunControl())
    num_questions = Answerer().run(running.calls, running.feed, RunControl())
    found = running.result()
    seconds = time.process_time() - started
    running.close()
    catalog.close()
    assert (num_questions, found.num_rows) == (1_000_000, 900_000)
    assert seconds < 6, f"{seconds:.1f} s of processor time"
