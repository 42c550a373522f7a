"""`run(background=True)`: a handle that tells, cancels and waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import quail
from tests.shell.stub import StubEngine
from tests.trust.test_stopping import COUNT, ROWS, Gate

pytestmark = pytest.mark.alone


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def session(gate: Gate) -> Iterator[quail.Session]:
    with quail.Session(engine=StubEngine(gate)) as opened:
        opened.register("docs", ROWS)
        yield opened
        gate.go.set()


def test_a_handle_tells_how_far_its_run_is(session: quail.Session, gate: Gate) -> None:
    handle = session.sql(COUNT).run(background=True)
    assert isinstance(handle, quail.RunHandle)
    assert gate.asked.wait(10)
    assert not handle.done
    assert handle.progress()["documents"] == 0
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.05 s; it goes on"):
        handle.result(0.05)
    gate.go.set()
    assert handle.result(10).fetchall() == [(500,)]
    assert handle.done
    assert handle.progress()["documents"] == 500
    assert handle.result() is handle.result(), "a result can be fetched again"


def test_a_cancelled_handle(session: quail.Session, gate: Gate) -> None:
    handle = session.sql(COUNT).run(background=True)
    assert gate.asked.wait(10)
    handle.cancel()
    gate.go.set()
    for _ in range(2):
        with pytest.raises(quail.QueryCancelled):
            handle.result(10)
    assert session.sql(COUNT).run().fetchall() == [(500,)]


def test_an_error_of_the_run_comes_out_of_result() -> None:
    def fail(call: object, arguments: object) -> bool:
        raise ZeroDivisionError("in the engine")

    with quail.Session(engine=StubEngine(fail)) as session:
        session.register("docs", ROWS)
        handle = session.sql(COUNT).run(background=True)
        with pytest.raises(ZeroDivisionError, match="in the engine"):
            handle.result(10)
        assert handle.done


def test_wrong_options_are_refused_before_a_thread_starts(session: quail.Session) -> None:
    before = threading.active_count()
    with pytest.raises(quail.ConfigError, match="on_error"):
        session.sql(COUNT).run(background=True, on_error="ignore")
    assert threading.active_count() == before


def test_close_waits_for_runs_in_the_background(gate: Gate) -> None:
    session = quail.Session(engine=StubEngine(gate))
    session.register("docs", ROWS)
    handle = session.sql(COUNT).run(background=True)
    assert gate.asked.wait(10)
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    gate.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert handle.result(10).fetchall() == [(500,)]


def test_an_error_in_the_with_block_cancels_runs_in_the_background(gate: Gate) -> None:
    def fail() -> None:
        with quail.Session(engine=StubEngine(gate)) as session:
            session.register("docs", ROWS)
            handles.append(session.sql(COUNT).run(background=True))
            assert gate.asked.wait(10)
            threading.Timer(0.2, gate.go.set).start()
            raise LookupError

    handles: list[quail.RunHandle[quail.QueryResult]] = []
    with pytest.raises(LookupError):
        fail()
    with pytest.raises(quail.QueryCancelled):
        handles[0].result(10)


def test_a_builder_query_in_the_background(session: quail.Session, gate: Gate) -> None:
    docs = session.docs("docs")
    gate.go.set()
    assert len(docs.run(background=True).result(10)) == 500  # type: ignore[attr-defined]
    with pytest.raises(quail.ConfigError, match="background=True does not go with apply"):
        docs.apply(lambda batch: batch).run(background=True)


def test_a_program_that_ends_cancels_its_runs() -> None:
    program = """
import quail
session = quail.Session()
session.sql("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE hash(a.range, b.range) = 1").run(background=True)
print("end of the program")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of the program\n", "")
