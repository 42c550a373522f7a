"""Memory and host work of a table of documents grow with the texts, not with copies of them."""

from __future__ import annotations

from benchmarks.documents import DOCUMENT_BYTES, MOST_MICROSECONDS, documents_file, run_apart
from tests.memory.processes import MiB, needs_proc

NUM_DOCUMENTS = 50_000


@needs_proc
def test_fifty_thousand_documents() -> None:
    with documents_file(NUM_DOCUMENTS) as path:
        found = run_apart(path)
    texts = NUM_DOCUMENTS * DOCUMENT_BYTES
    assert found["questions"] > 1.8 * NUM_DOCUMENTS
    assert found["peak"] - found["before"] < 3 * texts + 192 * MiB, found
    assert found["processor"] / found["questions"] * 1e6 < 3 * MOST_MICROSECONDS, found
