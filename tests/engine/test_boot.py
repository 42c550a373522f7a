"""What the way from a fresh process to the first answer loads, and leaves alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny import make_tiny

FIRST_ANSWER = """
import gc, sys
import quail
settings = dict(model=sys.argv[1], cache_dir=sys.argv[2], layout="completion", kv_memory="16MiB")
with quail.Session(quail.EngineConfig(**settings)) as session:
    session.register("t", {"id": [1], "text": ["A fine film."]})
    session.register("files", sys.argv[3])
    for table in ("t", "files"):
        for call in ("AI.IF(PROMPT('Is it good? {0}', text))", "AI.CLASSIFY(text, ['good', 'bad']) = 'good'"):
            session.sql(f"SELECT id FROM {table} WHERE {call}").run(progress=False).arrow()
assert gc.isenabled()
print(*sorted({"pandas", "polars", "transformers", "datasets", "sympy", "gguf", "jinja2"} & set(sys.modules)))
"""


@pytest.fixture
def loaded(tmp_path: Path) -> list[str]:
    """The heavy modules of a process that answered its first questions."""
    (tmp_path / "t.csv").write_text("id,text\n1,A dull film.\n")
    model = make_tiny(tmp_path / "model", "llama")
    command = [
        sys.executable,
        "-c",
        FIRST_ANSWER,
        str(model),
        str(tmp_path / "cache"),
        str(tmp_path / "t.csv"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not here to be imported")
def test_the_first_answer_imports_no_library_that_it_does_not_need(loaded: list[str]) -> None:
    assert loaded == []
