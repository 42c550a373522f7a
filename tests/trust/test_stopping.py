"""Runs that are stopped: by their time, by another thread, by a function of the user; and who waits for whom."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

import quail
from quail.plan.logical import AICall
from tests.shell.stub import StubEngine

pytestmark = pytest.mark.alone

COUNT = "SELECT count(*) FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))"
ENDLESS = "SELECT count(*) FROM range(100000) a, range(1000000) b WHERE hash(a.range, b.range) = 1"
ROWS = [{"id": each, "text": f"document {each}"} for each in range(500)]


class Gate:
    """Answers that wait: the stub says TRUE once `go` is set."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def __call__(self, call: AICall, arguments: tuple[str, ...]) -> bool:
        self.asked.set()
        assert self.go.wait(30)
        return True


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def session(gate: Gate) -> Iterator[quail.Session]:
    with quail.Session(engine=StubEngine(gate)) as opened:
        opened.register("docs", ROWS)
        yield opened
        gate.go.set()


def slow(call: AICall, arguments: tuple[str, ...]) -> bool:
    time.sleep(0.002)
    return True


# -- time


def test_a_timeout_says_what_was_done_and_what_remains() -> None:
    with quail.Session(engine=StubEngine(slow)) as session:
        session.register("docs", ROWS)
        query = session.sql(COUNT)
        with pytest.raises(
            quail.QueryTimeout, match=r"did not end within 0\.4 s; .* documents done in 1 passes"
        ) as seen:
            query.run(timeout=0.4)
        assert 0 < seen.value.progress["documents"] < 500
        assert "run(timeout=…)" in str(seen.value)
        assert query.run(timeout=60).fetchall() == [(500,)]


def test_a_timeout_is_a_cancelled_query() -> None:
    assert issubclass(quail.QueryTimeout, quail.QueryCancelled)


def test_work_of_duckdb_ends_in_time() -> None:
    with quail.Session() as session:
        started = time.perf_counter()
        with pytest.raises(quail.QueryTimeout, match="no document was answered yet"):
            session.sql(ENDLESS).run(timeout=0.3)
        assert time.perf_counter() - started < 20
        assert session.sql("SELECT 1").run().fetchall() == [(1,)]


def test_sources_that_are_read_for_the_run_end_in_time() -> None:
    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as session:
        session.sql(f"CREATE VIEW docs AS SELECT 'a' AS text FROM ({ENDLESS})").run()
        with pytest.raises(quail.QueryTimeout):
            session.sql(COUNT).run(timeout=0.3)
        assert session.sql("SELECT 1").run().fetchall() == [(1,)]


def test_the_wait_for_another_run_counts(session: quail.Session, gate: Gate) -> None:
    first = session.sql(COUNT).run(background=True)
    assert gate.asked.wait(10)
    with pytest.raises(quail.QueryTimeout, match="no document was answered yet"):
        session.sql("SELECT 1").run(timeout=0.2)
    gate.go.set()
    assert first.result(10).fetchall() == [(500,)]


@pytest.mark.parametrize("timeout", [0, -1, "soon", True, float("nan"), float("inf")])
def test_timeouts_that_are_none(session: quail.Session, timeout: Any) -> None:
    with pytest.raises(quail.ConfigError, match="timeout = .* must be a number of seconds above 0"):
        session.sql(COUNT).run(timeout=timeout)


def test_a_timeout_holds_for_all_parts_of_a_builder_query() -> None:
    def dawdle(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.5)
        return batch

    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as session:
        session.register("docs", ROWS)
        docs = session.docs("docs").apply(dawdle)
        with pytest.raises(quail.QueryTimeout, match=r"within 0\.4 s; a function of apply took"):
            docs.run(timeout=0.4)
        assert len(docs.run(timeout=60)) == 500


# -- cancel


def test_a_run_that_waits_for_its_turn_is_cancelled_at_once(session: quail.Session, gate: Gate) -> None:
    first = session.sql(COUNT).run(background=True)
    assert gate.asked.wait(10)
    second = session.sql("SELECT 1").run(background=True)
    second.cancel()
    with pytest.raises(quail.QueryCancelled):
        second.result(10)
    assert not first.done
    gate.go.set()
    assert first.result(10).fetchall() == [(500,)]


def test_cancel_stops_every_run_of_the_query_and_no_other(session: quail.Session, gate: Gate) -> None:
    query, other = session.sql(COUNT), session.sql("SELECT 1")
    runs = [query.run(background=True) for _ in range(3)]
    bystander = other.run(background=True)
    assert gate.asked.wait(10)
    query.cancel()
    gate.go.set()
    for run in runs:
        with pytest.raises(quail.QueryCancelled):
            run.result(10)
    assert bystander.result(10).fetchall() == [(1,)]
    assert query.run().fetchall() == [(500,)]


def test_a_cancel_before_the_run_means_nothing(session: quail.Session, gate: Gate) -> None:
    query = session.sql(COUNT)
    query.cancel()
    gate.go.set()
    assert query.run().fetchall() == [(500,)]


def test_ctrl_c_while_waiting_for_another_run(session: quail.Session, gate: Gate) -> None:
    first = session.sql(COUNT).run(background=True)
    assert gate.asked.wait(10)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.sql("SELECT 1").run()
    timer.join()
    assert not first.done
    gate.go.set()
    assert first.result(10).fetchall() == [(500,)]


# -- functions of the user


def test_a_progress_function_is_told_and_what_it_raises_ends_the_run() -> None:
    seen: list[Mapping[str, Any]] = []

    class Enough(Exception):
        pass

    def watch(progress: Mapping[str, Any]) -> None:
        seen.append(progress)
        if len(seen) == 2:
            raise Enough

    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as session:
        session.register("docs", ROWS)
        with pytest.raises(Enough):
            session.sql(COUNT).run(progress=watch)
        assert [each["documents"] for each in seen] == [64, 128]
        assert session.sql(COUNT).run(progress=seen.append).fetchall() == [(500,)]
        assert seen[-1]["documents"] >= 500


def test_a_progress_function_cannot_start_another_run_and_wait_for_it() -> None:
    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as session:
        session.register("docs", ROWS)
        for act in (lambda: session.sql("SELECT 1").run(), session.close):
            with pytest.raises(quail.QuailError, match="a run of this session is under way in this thread"):
                session.sql(COUNT).run(progress=lambda progress, act=act: act())  # type: ignore[misc]
        assert session.sql(COUNT).run().fetchall() == [(500,)]


def test_progress_that_is_no_function(session: quail.Session) -> None:
    with pytest.raises(quail.ConfigError, match="progress = 3 must be True"):
        session.sql(COUNT).run(progress=3)  # type: ignore[arg-type]


def test_a_function_of_apply_that_fails_leaves_a_session_that_answers() -> None:
    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise KeyError("no such thing")

    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as session:
        session.register("docs", ROWS)
        with pytest.raises(quail.QuailError, match="apply: fail failed: KeyError"):
            session.docs("docs").apply(fail).run()
        assert list(session.tables) == ["docs"]
        assert session.sql(COUNT).run().fetchall() == [(500,)]


def test_an_iteration_over_a_result_may_end_early() -> None:
    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as session:
        session.register("docs", ROWS)
        result = session.sql("SELECT id FROM docs WHERE AI.IF(PROMPT('Good? {0}', text)) ORDER BY id").run()
        batches = result.batches(max_rows=120)
        assert next(batches).num_rows == 120
        del batches
        rows = iter(result)
        assert next(rows) == (0,)
        del rows
        assert [batch.num_rows for batch in result.batches(max_rows=120)] == [120, 120, 120, 120, 20]
        assert session.sql(COUNT).run().fetchall() == [(500,)]


# -- many threads


def test_four_threads_that_run_cancel_and_register() -> None:
    """Each thread's own table has its own number of rows; a run that was not cancelled counts them."""

    def answer(call: AICall, arguments: tuple[str, ...]) -> bool:
        time.sleep(0.0002)
        return arguments[0].startswith("good")

    failures: list[str] = []
    counts = {"done": 0, "cancelled": 0}

    def work(number: int, session: quail.Session) -> None:
        for turn in range(8):
            name, size = f"t{number}", 20 + 10 * number + turn
            session.register(name, [{"text": f"good {number} {turn} {i}"} for i in range(size)])
            query = session.sql(f"SELECT count(*) FROM {name} WHERE AI.IF(PROMPT('Good? {{0}}', text))")
            handle = query.run(background=True, timeout=60)
            if (number + turn) % 3 == 0:
                query.cancel()
            try:
                found = handle.result(60).fetchall()
            except quail.QueryCancelled:
                counts["cancelled"] += 1
            else:
                counts["done"] += 1
                if found != [(size,)]:
                    failures.append(f"{name}, turn {turn}: {found} instead of {size}")

    engine = StubEngine(answer)
    with quail.Session(engine=engine) as session:
        threads = [threading.Thread(target=guarded(work, failures), args=(n, session)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures
        assert counts["done"] + counts["cancelled"] == 32
        assert counts["done"] >= 16
        assert session.sql("SELECT count(*) FROM t3").run().fetchall() == [(57,)]


def guarded(work: Callable[..., None], failures: list[str]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(repr(error))

    return run
