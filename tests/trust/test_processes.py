"""Sessions and forks: a child cannot use its parent's session and is told so; its own works."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quail
import quail.processes
from tests.models.tiny import make_tiny
from tests.shell.stub import StubEngine

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]

COUNT = "SELECT count(*) FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))"
ROWS = [{"id": each, "text": f"document {each}"} for each in range(50)]


def in_child(work: Callable[[], Any]) -> Any:
    """What a function returns, or the error it raises, in a forked child."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(work())
        except Exception as error:
            sender.send((type(error).__name__, str(error)))

    child = context.Process(target=run)
    child.start()
    assert receiver.poll(60), "the child hangs"
    found = receiver.recv()
    child.join(60)
    assert child.exitcode == 0
    return found


@pytest.fixture
def session() -> Any:
    with quail.Session(engine=StubEngine(lambda call, arguments: True)) as opened:
        opened.register("docs", ROWS)
        assert opened.sql(COUNT).run().fetchall() == [(50,)]
        yield opened


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class TestFork:
    def test_a_session_is_of_its_process(self, session: quail.Session) -> None:
        query = session.sql(COUNT)
        for use in (
            query.run,
            query.explain,
            lambda: session.sql("SELECT 1"),
            lambda: session.tables,
            lambda: session.register("more", ROWS),
            lambda: query.run(background=True),
        ):
            kind, message = in_child(use)
            assert kind == "QuailError"
            assert f"opened by process {os.getpid()} and cannot be used in its fork" in message
            assert "open a quail.Session() in each process" in message
        assert query.run().fetchall() == [(50,)]

    def test_closing_it_in_the_child_leaves_the_parent_alone(self, session: quail.Session) -> None:
        in_child(session.close)
        assert session.sql(COUNT).run().fetchall() == [(50,)]

    def test_a_fork_during_a_run(self) -> None:
        found: list[Any] = []

        def fork(progress: Any) -> None:
            if not found:
                found.append(in_child(own.sql("SELECT 1").run))

        with quail.Session(engine=StubEngine(lambda call, arguments: True)) as own:
            own.register("docs", ROWS)
            assert own.sql(COUNT).run(progress=fork).fetchall() == [(50,)]
        assert found[0][0] == "QuailError"

    def test_a_session_of_the_child_works(self, session: quail.Session) -> None:
        def work() -> Any:
            with quail.Session(engine=StubEngine(lambda call, arguments: True)) as own:
                own.register("docs", ROWS[:7])
                return own.sql(COUNT).run().fetchall()

        assert in_child(work) == [(7,)]

    def test_a_run_of_the_parent_cannot_be_waited_for(self, session: quail.Session) -> None:
        handle = session.sql(COUNT).run(background=True)
        handle.result(10)
        kind, message = in_child(handle.result)
        assert (kind, "begun by another process" in message) == ("QuailError", True)

    def test_the_helpers_open_a_session_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import quail.frames

        shared = quail.Session(engine=StubEngine(lambda call, arguments: True))
        monkeypatch.setattr(quail.frames, "_shared", [shared])
        assert in_child(lambda: quail.frames._shared_session() is shared) is False
        assert quail.frames._shared_session() is shared
        shared.close()

    def test_threads_of_the_model_are_refused_where_they_would_hang(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_tiny(tmp_path / "tiny", "llama", hidden=256)

        def ask(threads: int) -> Any:
            config = quail.EngineConfig(model=str(folder), threads=threads, kv_memory="4MiB")
            with quail.Session(config) as own:
                own.register("docs", [{"text": "a long text " * 50}] * 3)
                return own.sql(COUNT).run().report.rows

        monkeypatch.setattr(quail.processes, "_threaded", set())
        assert ask(2) == 1
        kind, message = in_child(lambda: ask(2))
        assert (kind, "they do not follow a fork" in message) == ("ConfigError", True)
        assert in_child(lambda: ask(1)) == 1
        assert ask(2) == 1


def test_a_child_may_drop_its_copy_of_a_session() -> None:
    """Destructors of the database would wait for threads that did not follow the fork."""
    program = textwrap.dedent(
        """
        import gc, os, warnings
        warnings.simplefilter("ignore")
        import quail
        session = quail.Session()
        session.register("t", [{"a": i} for i in range(1000)])
        assert session.sql("SELECT count(*) FROM t").run().fetchall() == [(1000,)]
        child = os.fork()
        if not child:
            del session
            gc.collect()
            os._exit(7)
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print(session.sql("SELECT count(*) FROM t").run().fetchall())
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[(1000,)]\n", "")
