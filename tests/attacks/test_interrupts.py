"""Ctrl-C anywhere in a run is a KeyboardInterrupt, and the session answers the next query as before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quail
import quail.kv.pages
from quail.execution.run import Run
from quail.interrupts import KeyboardInterrupts
from quail.kv.retention import RetentionPool
from tests.models.tiny import make_tiny

pytestmark = pytest.mark.alone

STATEMENT = """
    SELECT id FROM docs
    WHERE AI.IF(PROMPT('Good? {0}', text)) AND AI.IF(PROMPT('Bad? {0}', text))
    ORDER BY id
"""
ROWS = [{"id": number, "text": f"row {number} " + "word " * (number % 7)} for number in range(60)]


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def session(folder: Path) -> Any:
    config = quail.EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        kv_memory="4MiB",
        token_budget=64,
        threads=1,
        answers="off",  # the second run of a statement asks again
    )
    with quail.Session(config) as opened:
        opened.register("docs", ROWS)
        yield opened


def before(call: Callable[..., Any], number: int, act: Callable[[], None]) -> Callable[..., Any]:
    """The function, with an act before its call of that number."""
    count = 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act()
        return call(*arguments, **named)

    return wrapped


@pytest.mark.parametrize("number", [1, 3, 20])
@pytest.mark.parametrize("place", [(Run, "_refill"), (Run, "_hand_over"), (RetentionPool, "put")])
def test_ctrl_c_in_a_run(
    session: quail.Session, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], number: int
) -> None:
    expected = session.sql(STATEMENT).run().fetchall()
    owner, name = place
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, before(getattr(owner, name), number, press))
        with pytest.raises(KeyboardInterrupt):
            session.sql(STATEMENT).run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert session.sql(STATEMENT).run().fetchall() == expected


def test_a_second_ctrl_c_does_not_wait_and_the_engine_is_replaced(
    session: quail.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = session.sql(STATEMENT).run().fetchall()

    def press_twice() -> None:
        press()
        press()

    with monkeypatch.context() as patched:
        # Between trim and the entry of the table, where the pool and the arena disagree.
        retain = before(quail.kv.pages.PageArena.retain, 1, press_twice)
        patched.setattr(quail.kv.pages.PageArena, "retain", retain)
        with pytest.raises(KeyboardInterrupt):
            session.sql(STATEMENT).run()
    assert session.sql(STATEMENT).run().fetchall() == expected


def test_an_error_of_another_kind_leaves_a_session_that_answers(
    session: quail.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = session.sql(STATEMENT).run().fetchall()

    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        retain = before(quail.kv.pages.PageArena.retain, 2, fail)
        patched.setattr(quail.kv.pages.PageArena, "retain", retain)
        with pytest.raises((MemoryError, ValueError, AssertionError)):
            session.sql(STATEMENT).run()
    assert session.sql(STATEMENT).run().fetchall() == expected


def test_an_interruption_that_a_library_turned_into_an_error() -> None:
    def library() -> None:
        try:
            press()
        except KeyboardInterrupt:
            raise RuntimeError("Query interrupted") from None

    with pytest.raises(KeyboardInterrupt), KeyboardInterrupts():
        library()


def test_ctrl_c_during_a_download_does_not_wait() -> None:
    stopped: list[bool] = []
    with (
        pytest.raises(KeyboardInterrupt),
        KeyboardInterrupts(lambda: stopped.append(True)) as interrupts,
        interrupts.at_once(),
    ):
        press()
    assert not stopped


def test_a_handler_of_the_program_stays() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with KeyboardInterrupts():
            press()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_are_left_alone() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with KeyboardInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
