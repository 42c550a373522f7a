"""A filter with the default model takes its weights, the KV it touches, what imports take, and little more."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.peers.tokens import Compiler
from benchmarks.peers.workloads import chapters
from quail.config import EngineConfig
from quail.errors import ModelError
from tests.memory.processes import measured, needs_proc

pytestmark = pytest.mark.alone

IMPORTS_BYTES = 340_000_000
"""What Python with torch, DuckDB and Arrow takes before a model is loaded."""
REST_BYTES = 300_000_000
"""Working space of passes, the tokenizer, tables, fragments."""
NUM_TOKENS = 300

FILTER = r"""
import quail
config = quail.EngineConfig(dtype="bfloat16", answers="off")
with quail.Session(config) as session:
    session.register("docs", sys.argv[1])
    query = session.sql(r"SELECT id FROM docs WHERE AI.IF(PROMPT(E'{0}\n\nIs this about the sea?', text))")
    report = query.run(progress=False).report
print(json.dumps({"peak": peak(), "memory": report.memory, "tokens": dict(report.tokens), "passes": report.passes}))
"""


@needs_proc
@pytest.mark.parametrize("num_documents", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_the_peak_of_a_filter(num_documents: int, tmp_path: Path) -> None:
    try:
        texts = chapters(Compiler(EngineConfig()), [NUM_TOKENS] * num_documents)
    except ModelError as error:
        pytest.skip(error.message)
    pq.write_table(pa.table({"id": range(num_documents), "text": texts}), tmp_path / "docs.parquet")
    found = measured(FILTER, str(tmp_path / "docs.parquet"))
    memory = found["memory"]
    assert found["tokens"]["computed"] >= num_documents * NUM_TOKENS and found["passes"] >= 4, found
    touched = memory["peak_kv_pages"] * memory["page_bytes"]
    assert memory["weight_bytes"] > 250_000_000, "the model is the one that was meant"
    assert found["peak"] < memory["weight_bytes"] + touched + IMPORTS_BYTES + REST_BYTES, found
