"""What is said of a pair whose documents together are too long for the model's context."""

from __future__ import annotations

import re

import pytest

import quail
from quail.config import EngineConfig
from quail.execution.stages import compile_stage
from tests.engine.engines import TinyEngine
from tests.models.tiny import make_tiny

PAIR = "AI.IF(PROMPT('Does {0} agree with {1}?', l.body, r.body), anchor := 'l')"
CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "llama", layers=1, hidden=16, heads=2, context=CONTEXT)


@pytest.fixture
def session(folder, tmp_path):
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        layout="completion",
        cache_dir=tmp_path,
        kv_memory="4MiB",
        kernels="reference",
    )
    with quail.Session(config) as found:
        yield found


def lengths_of(session, folder, tmp_path, left: str, right: str) -> tuple[int, int, int]:
    """Tokens of the document with its label, of the second document, and of everything else."""
    tiny = TinyEngine(folder, tmp_path)
    (call,) = session.sql(f"SELECT {PAIR} FROM l, r")._bound.calls
    stage = compile_stage(call, tiny.pieces, tiny.tokenizer)
    return len(tiny.prefix(left)), len(tiny.tokenizer.encode_plain([right])[0]), stage.num_fixed_tokens


@pytest.mark.parametrize(("num_left", "num_right"), [(100, 130), (3, 300), (300, 3), (300, 300)])
def test_both_lengths_are_told(session, folder, tmp_path, num_left, num_right):
    left, right = "7" * num_left, "5" * num_right
    session.register("l", {"body": [left]})
    session.register("r", {"body": ["1", right]})
    document, second, question = lengths_of(session, folder, tmp_path, left, right)
    with pytest.raises(quail.RowError) as raised:
        session.sql(f"SELECT count(*) FROM l, r WHERE {PAIR}").run(progress=False)
    if num_left > CONTEXT:
        second = 1  # the first pair fails already
    assert (
        f"its prompt of {document + second + question} tokens ({document} of document, {second} of second "
        f"document, {question} of question) exceeds the model's context of {CONTEXT}"
    ) in str(raised.value)
    assert re.match(r"joined row \d: ", str(raised.value))


def test_pairs_that_fit_are_answered_beside_one_that_does_not(session):
    session.register("l", {"id": [0, 1], "body": ["7" * 100, "8" * 20]})
    session.register("r", {"id": [0, 1], "body": ["1", "5" * 140]})
    result = session.sql(f"SELECT l.id, r.id, {PAIR} AS s FROM l, r").run(progress=False, on_error="null")
    assert {(a, b) for a, b, s in result.fetchall() if s is None} == {(0, 1)}
    (error,) = result.report.errors
    assert "140 of second document" in error["message"]
