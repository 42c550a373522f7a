"""A session whose engine fails at any step: its pages are back and the next query is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import quail
from quail.models.decoder import PagedDecoder
from tests.models.tiny import make_tiny
from tests.trust.faults import Fault, every, fail_in_pages, only, raising, refuse_pages

STATEMENTS = {
    "filters": """
        SELECT id FROM docs
        WHERE AI.IF(PROMPT('Good? {0}', text)) AND AI.IF(PROMPT('Bad? {0}', text)) ORDER BY id""",
    "labels": "SELECT id, AI.CLASSIFY(PROMPT('{0} This is about', text), ['the ship', 'the town']) AS c FROM docs",
    "pairs": """
        SELECT a.id, b.id FROM docs a JOIN notes b
        ON AI.IF(PROMPT('Does {0} go with {1}?', a.text, b.text)) ORDER BY a.id, b.id""",
}
ROWS = [
    {
        "id": n,
        "text": ("the same beginning of a text, " * 3 if n % 2 else "")
        + f"row {n} "
        + "word " * (n * 7 % 50),
    }
    for n in range(30)
]
NOTES = [{"id": n, "text": f"note {n} " + "rain " * n} for n in range(4)]
OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 1 TB"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(params=STATEMENTS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[quail.Session]:
    config = quail.EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        kv_memory="1MiB",
        token_budget=256,
        threads=1,
        prefix_sharing="on",
        retention="keep",
        answers="off",
    )
    with quail.Session(config) as opened:
        opened.register("docs", ROWS)
        opened.register("notes", NOTES)
        yield opened


def check_after(session: quail.Session, kind: str, expected: Any) -> None:
    engine: Any = session._engine
    if engine is not None:
        engine.model.pages.check_integrity()
        assert engine.model.pages.num_live_pages == 0
    assert session.sql(STATEMENTS[kind]).run().fetchall() == expected


@pytest.fixture
def expected(session: quail.Session, kind: str) -> Any:
    return session.sql(STATEMENTS[kind]).run().fetchall()


def forward_fails(patch: pytest.MonkeyPatch, fails: Callable[[int], bool], how: Callable[[], Any]) -> Fault:
    fault = Fault(PagedDecoder.forward, fails, how)
    patch.setattr(PagedDecoder, "forward", lambda model, chunk: fault(model, chunk))
    return fault


@pytest.mark.parametrize("number", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "error", [RuntimeError("a kernel failed"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_pass_that_fails(
    session: quail.Session,
    kind: str,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: BaseException,
) -> None:
    def fail() -> Any:
        raise error

    session._engine.retention.pool.clear()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        fault = forward_fails(patch, only(number), fail)
        with suppress(type(error)):
            assert session.sql(STATEMENTS[kind]).run().fetchall() == expected
        assert fault.num_failed == (fault.num_calls >= number)
    check_after(session, kind, expected)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    "how", [raising(MemoryError), raising(RuntimeError, OUT_OF_MEMORY)], ids=["host", "torch"]
)
def test_a_pass_that_does_not_fit_is_run_again(
    session: quail.Session,
    kind: str,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    how: Callable[[], Any],
) -> None:
    session._engine.retention.pool.clear()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        fault = forward_fails(patch, only(number), how)
        result = session.sql(STATEMENTS[kind]).run()
    assert result.fetchall() == expected
    assert fault.num_failed == 1
    assert any("did not fit into memory" in warning for warning in result.report.warnings)
    assert result.report.tokens["wasted"] > 0
    check_after(session, kind, expected)


def test_memory_that_never_suffices_ends_with_numbers(
    session: quail.Session, kind: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session._engine.retention.pool.clear()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        fault = forward_fails(patch, every(1), raising(RuntimeError, OUT_OF_MEMORY))
        with pytest.raises(
            quail.PlanError, match=r"passes of up to \d+ tokens do not fit .* can't allocate memory"
        ):
            session.sql(STATEMENTS[kind]).run()
    assert 2 <= fault.num_calls <= 4
    check_after(session, kind, expected)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13])
def test_an_allocation_that_raises(
    session: quail.Session, kind: str, expected: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    session._engine.retention.pool.clear()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        faults = fail_in_pages(patch, only(number), raising(MemoryError, "no page"))
        try:
            assert session.sql(STATEMENTS[kind]).run().fetchall() == expected
            assert not any(fault.num_failed for fault in faults)
        except MemoryError:
            assert any(fault.num_failed for fault in faults)
    check_after(session, kind, expected)


@pytest.mark.parametrize("step", [2, 3, 5])
def test_an_arena_that_refuses_now_and_then(
    session: quail.Session, kind: str, expected: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    session._engine.retention.pool.clear()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        refuse_pages(patch, every(step))
        report = session.sql(STATEMENTS[kind]).run(on_error="null").report
    assert all(error["kind"] == "no_room" for error in report.errors)
    check_after(session, kind, expected)


def test_cancelling_after_any_pass(session: quail.Session, kind: str, expected: Any) -> None:
    query, engine = session.sql(STATEMENTS[kind]), session._engine
    for stop_after in range(1, 40):
        engine.retention.pool.clear()  # type: ignore[union-attr]
        seen = iter(range(1, 1000))

        def stop(progress: Any, seen: Iterator[int] = seen, stop_after: int = stop_after) -> None:
            if next(seen) == stop_after:
                query.cancel()

        try:
            assert query.run(progress=stop).fetchall() == expected
            break
        except quail.QueryCancelled:
            pass
        check_after(session, kind, expected)
    else:
        pytest.fail("the run never came to its end")
    assert stop_after > 2


def test_answers_given_before_a_run_was_stopped_are_kept(folder: Path) -> None:
    config = quail.EngineConfig(model=str(folder), device="cpu", dtype="float32", token_budget=64, threads=1)
    with quail.Session(config) as session:
        session.register("docs", ROWS)
        query = session.sql("SELECT id, AI.SCORE(PROMPT('Good? {0}', text)) AS s FROM docs ORDER BY id")

        def stop(progress: Any) -> None:
            if progress["passes"] == 10:
                query.cancel()

        with pytest.raises(quail.QueryCancelled, match=r"documents done in 10 passes"):
            query.run(progress=stop)
        result = query.run()
        counts = result.report.answers
        assert counts["stored"] >= 5
        assert counts["stored"] + counts["asked"] == 30
    with quail.Session(config) as session:
        session.register("docs", ROWS)
        fresh = session.sql(query.text).run()
    for (_, score), (_, expected) in zip(result.fetchall(), fresh.fetchall(), strict=True):
        assert score == pytest.approx(expected, abs=1e-4)
