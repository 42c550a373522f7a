"""A session stays within weights, working space and `kv_memory`, as in a small container."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory.processes import MiB, measured, needs_proc
from tests.models.tiny import make_tiny

pytestmark = pytest.mark.alone

OVERHEAD = 48 * MiB
"""What the second session of a process may take beside its KV: a table, an arena's accounting, fragments."""

SESSIONS = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))  # heap and private memory, not mapped files
import quail
words = [f"word{i}" for i in range(500)]
rows = [{"id": i, "text": " ".join(words[(i * 7 + k) % 500] for k in range(150 + i % 50))} for i in range(12)]

def ask(kv_bytes):
    settings = dict(model=sys.argv[1], cache_dir=sys.argv[2], kv_memory=kv_bytes, retention="keep")
    with quail.Session(quail.EngineConfig(**settings)) as session:
        session.register("docs", rows)
        for question in ("Good?",):
            text = f"SELECT count(*) FROM docs WHERE AI.IF(PROMPT('{{0}} {question}', text))"
            result = session.sql(text).run()
    return result.report.memory

ask(16 << 20)  # imports, DuckDB, the tokenizer, a pass: what any session takes
first_peak, before = peak(), resident()
reset_peak()
memory = ask(int(sys.argv[3]))
print(json.dumps({"grown": peak() - before, "peak": max(first_peak, peak()), "memory": memory}))
"""


@needs_proc
def test_a_session_in_two_gibibytes(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", "llama", hidden=256, layers=6, heads=8, kv_heads=8)
    kv_bytes = 64 * MiB
    found = measured(SESSIONS, str(model), str(tmp_path / "cache"), str(kv_bytes))
    memory = found["memory"]
    planned = kv_bytes + memory["weight_bytes"] + memory["working_bytes"]
    assert found["grown"] < planned + OVERHEAD, found
    assert found["grown"] > kv_bytes // 2, "the run did not fill its KV, so that nothing is shown"
    assert found["peak"] < 2 << 30
