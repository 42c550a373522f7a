"""Where a user begins: a session holds tables and the engine; a query has been understood, not run."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import duckdb
import pyarrow as pa

from quail.config import EngineConfig, check_choice
from quail.errors import ConfigError, QuailError, QueryCancelled
from quail.execution.asks import Answerer, RunControl
from quail.frontend.sql import bind_sql
from quail.interrupts import KeyboardInterrupts
from quail.processes import OfOneProcess
from quail.progress import Display, display
from quail.result import TOKEN_COUNTS, QueryResult, Report
from quail.runs.handle import RunHandle
from quail.runs.state import RunState
from quail.runs.turns import Turns
from quail.sources.catalog import Catalog, SourceInfo

if TYPE_CHECKING:
    from quail.answers.store import AnswerStore
    from quail.execution.kept_anchors import KeptAnchors
    from quail.execution.relational import RelationalRun
    from quail.frontend.builder import Docs
    from quail.plan.statement import BoundStatement
    from quail.planner.anchors import TokenCounter

Parameters = Sequence[Any] | Mapping[str, Any]
ORDERS = ("auto", "as_written")
ON_LONG = ("error", "truncate")
ON_ERROR = ("raise", "null", "details")

ProgressOption = bool | Callable[[Mapping[str, Any]], object] | None


class RunOptions(TypedDict, total=False):
    """Options of `Query.run`, which explains them."""

    order: str
    on_long: str
    on_error: str
    max_error_ratio: float | None
    audit: float
    exists_wave: int
    timeout: float | None
    progress: ProgressOption


class Session(OfOneProcess):
    """Tables, and the engine that answers questions about them.

    The model is loaded by the first query that asks it and stays loaded until `close`. Threads may share a
    session; their runs come one after another. A process that was forked from this one opens its own.

    Args:
        config: settings of the engine; None takes the defaults and the `QUAIL_*` environment variables.
        database: DuckDB file that keeps what `CREATE TABLE` makes; None keeps it in memory.
        allow: files and folders that statements may read and write besides the registered tables.
        engine: answers questions in the model's place (anything with `run(calls, feed, control)`); it is left
            open.

    Raises:
        ConfigError: a setting that cannot be used.
        SourceError: the database cannot be opened.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        database: str | os.PathLike[str] | None = None,
        allow: Iterable[str | os.PathLike[str]] = (),
        engine: Answerer | None = None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}, not an EngineConfig",
                hint="Session(quail.EngineConfig(model=…))",
            )
        self.config = EngineConfig() if config is None else config
        self._engine = engine
        self._owns_engine = engine is None
        self._turns = Turns()
        self._closed = False
        self._running: set[RunState] = set()
        self._store: AnswerStore | None = None
        self._answers_path = self.config.answers_path(database)
        self._catalog = Catalog(database, allow)
        super().__init__()

    @property
    def tables(self) -> Mapping[str, SourceInfo]:
        """The registered tables by name."""
        return self._open().tables

    def register(self, name: str, source: object) -> None:
        """Makes a source a table; see `quail.sources.catalog.Catalog.register` for what a source may be.

        Raises:
            SourceError: a name or source that cannot be used.
        """
        with KeyboardInterrupts():
            self._open().register(name, source)

    def sql(self, text: str, params: Parameters | None = None) -> Query:
        """Binds a statement; nothing runs yet.

        Args:
            text: one SQL statement, DuckDB's dialect with AI calls.
            params: values for its `?` (a sequence) or `$name` (a mapping).

        Raises:
            BindError: the statement cannot be understood; says where.
        """
        catalog = self._open()
        if not isinstance(text, str):
            raise QuailError(f"a statement is text, not {type(text).__name__}")
        started = time.perf_counter()
        with KeyboardInterrupts():
            bound = bind_sql(text, params, catalog)
        for warning in bound.warnings:
            warnings.warn(warning, UserWarning, stacklevel=2)
        return Query(self, bound, time.perf_counter() - started)

    def docs(self, source: str | Query, params: Parameters | None = None) -> Docs:
        """Begins a query that Python builds step by step; see `quail.frontend.builder.Docs`.

        Args:
            source: name of a table, a query as text, or a `Query`.
            params: values for the parameters of a query that is text.

        Raises:
            SourceError: no such table.
            BindError: a query that cannot be understood; says where.
        """
        from quail.frontend.builder import Docs

        return Docs.of(self, source, params)

    def close(self) -> None:
        """Frees the model and closes the database, once runs in the background have ended.

        A session can be closed more than once.
        """
        if not self._is_of_this_process:
            return
        with self._turns.taken("close"):
            if self._closed:
                return
            self._closed = True
            if self._owns_engine and self._engine is not None:
                self._engine.close()  # type: ignore[attr-defined]
            self._engine = None
            if self._store is not None:
                self._store.close()
            self._catalog.close()

    def __enter__(self) -> Session:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for state in list(self._running):
                state.cancel()
        self.close()

    def _open(self) -> Catalog:
        self._check_process("session", "open a quail.Session() in each process")
        if self._closed:
            raise QuailError("the session is closed", hint="open a new one with quail.Session()")
        return self._catalog

    def _answerer(self, shown: Display) -> Answerer:
        """The engine, loaded now if it was not yet."""
        if self._engine is None:
            from quail.execution.runner import Engine

            self._engine = Engine.boot(self.config, progress=shown.say, store=self._answer_store())
        return self._engine

    def _answer_store(self) -> AnswerStore | None:
        """The answers that runs of this session find and leave; None where none are kept."""
        if self._store is None and self.config.answers != "off":
            from quail.answers.store import AnswerStore

            self._store = AnswerStore(self._answers_path)
        return self._store

    def _drop_unsound_engine(self) -> None:
        """After a failed run: an engine that lost count of its memory is loaded anew by the next query."""
        if self._owns_engine and self._engine is not None and not self._engine.is_sound:  # type: ignore[attr-defined]
            self._engine.close()  # type: ignore[attr-defined]
            self._engine = None


class Query:
    """A statement that was understood and has not run. Made by `Session.sql`; may run more than once."""

    def __init__(self, session: Session, bound: BoundStatement, bind_seconds: float) -> None:
        self._session = session
        self._bound = bound
        self._bind_seconds = bind_seconds
        self._running: set[RunState] = set()

    @property
    def text(self) -> str:
        """The statement."""
        return self._bound.text

    def explain(self, format: str = "text", *, order: str = "auto", analyze: bool = False) -> str:
        """The plan: what is asked, what that computes, how long it takes.

        Tokens are counted with the model's tokenizer where the model is here; the model is not loaded.

        Args:
            format: `text` or `json`.
            order: as for `run`.
            analyze: run the statement too, and show what was done beside what was planned. Otherwise the
                model is not asked and nothing is written.
        """
        from quail.explain import explain

        check_choice("format", format, ("text", "json"))
        check_choice("order", order, ORDERS)
        session = self._session
        with KeyboardInterrupts():
            return explain(
                self._bound,
                session._open(),
                format=format,
                order=order,
                config=session.config if session._owns_engine else None,
                room=getattr(session._engine, "room", None) if session._owns_engine else None,
                analyze=(lambda: self.run(order=order).report) if analyze else None,
            )

    @overload
    def run(self, *, background: Literal[False] = ..., **options: Unpack[RunOptions]) -> QueryResult: ...

    @overload
    def run(self, *, background: Literal[True], **options: Unpack[RunOptions]) -> RunHandle[QueryResult]: ...

    def run(
        self,
        *,
        order: str = "auto",
        on_long: str = "error",
        on_error: str = "raise",
        max_error_ratio: float | None = None,
        audit: float = 0.0,
        exists_wave: int = 16,
        timeout: float | None = None,
        progress: ProgressOption = None,
        background: bool = False,
    ) -> QueryResult | RunHandle[QueryResult]:
        """Runs the statement.

        Args:
            order: `auto` asks the cheapest question first, `as_written` follows the text.
            on_long: a document longer than the model's context is an `error`, or `truncate` cuts it.
            on_error: what to do with a row that cannot be answered: `raise`; `null`: its answer is NULL and
                the report counts it and lists the first ones; `details`: as `null`, and `result.errors`
                lists all of them.
            max_error_ratio: the run stops with `TooManyErrors` when a greater share (0 to 1) of its questions
                failed: at the end of those that it asked, before of as many as there are documents, or of
                1,000 if that is more. Goes with `on_error='null'` or `'details'`. None: no matter how many.
            audit: share (0 to 1) of the questions that are computed again alone, without any reuse of KV, and
                compared; `report.audit` has what came of it, and a difference that rounding cannot explain is
                a warning. Which ones depends on the prompts alone.
            exists_wave: pairs of one row that are asked at a time where the first match ends the search
                (EXISTS, SEMI and ANTI joins).
            timeout: seconds after which the run stops with `QueryTimeout`, the wait for other runs of the
                session included; None: as long as it takes.
            progress: True shows a bar, False none, None one on terminals and in notebooks. A function is
                called with a mapping after each pass (`documents`, `num_documents`, `tokens`, `passes`,
                `seconds`); what it raises ends the run.
            background: True runs in a thread of its own and returns a `RunHandle` at once.

        Raises:
            UnsupportedError: the engine cannot serve the statement yet.
            RowError: a row cannot be answered.
            TooManyErrors: more rows failed than `max_error_ratio` allows.
            QueryCancelled: `cancel` was called.
            QueryTimeout: `timeout` was over.
        """
        check_choice("order", order, ORDERS)
        check_choice("on_long", on_long, ON_LONG)
        check_choice("on_error", on_error, ON_ERROR)
        _check_share("audit", audit)
        if max_error_ratio is not None:
            _check_share("max_error_ratio", max_error_ratio)
            _check_goes_on(max_error_ratio, on_error)
        if not isinstance(exists_wave, int) or exists_wave < 1:
            raise ConfigError(f"exists_wave = {exists_wave!r} must be a whole number of at least 1")
        if timeout is not None and not _is_number(timeout, above=0):
            raise ConfigError(f"timeout = {timeout!r} must be a number of seconds above 0, or None")
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise ConfigError(f"progress = {progress!r} must be True, False, None or a function of a mapping")
        self._session._open()
        listener = progress if callable(progress) else None
        state = RunState(timeout, listener)
        control = RunControl(
            cancelled=state.is_stopped,
            on_interruptible=state.set_interrupt,
            on_long=on_long,
            on_error=on_error,
            max_error_ratio=max_error_ratio,
            audit=float(audit),
            order=order,
            exists_wave=exists_wave,
        )
        shows = progress if isinstance(progress, bool | None) else False
        work = functools.partial(self._run_in_turn, control, state, shows)
        return RunHandle(work, state) if background else work()

    def collect(self) -> pa.Table:
        """Runs the statement; the rows as an Arrow table."""
        return self.run().arrow()

    def cancel(self) -> None:
        """Stops the runs of this query, from another thread; each raises `QueryCancelled` after its pass."""
        for state in list(self._running):
            state.cancel()

    def __repr__(self) -> str:
        return f"Query({self.text!r})"

    def _run_in_turn(self, control: RunControl, state: RunState, shows: bool | None) -> QueryResult:
        """Waits until no other run of the session is under way, and runs."""
        session = self._session
        with (
            _listed(state, self._running, session._running),
            state.deadline(),
            KeyboardInterrupts(state.cancel) as interrupts,
            session._turns.taken("run", state.check),
            display(shows) as shown,
        ):
            control.on_progress = _both(shown.update, state.update)
            try:
                return self._run(control, state, shown, interrupts)
            except (QueryCancelled, duckdb.InterruptException):
                raise state.error() from None
            except duckdb.Error as error:
                raise QuailError(session._open().message_of(error)) from error

    def _run(
        self, control: RunControl, state: RunState, shown: Display, interrupts: KeyboardInterrupts
    ) -> QueryResult:
        from quail.execution.relational import RelationalRun

        session = self._session
        catalog = session._open()
        started = time.perf_counter()
        kept = self._kept_anchors()
        run = RelationalRun(
            self._bound,
            catalog,
            control,
            self._token_counter(),
            (lambda call: None) if kept is None else kept.of,
        )
        try:
            seconds = {"boot": 0.0, "plan": self._bind_seconds + time.perf_counter() - started}
            part: dict[str, Any] = {}
            answerer: Answerer | None = None
            if self._bound.calls and not run.feed.done:
                boot_started = time.perf_counter()
                with interrupts.at_once():
                    answerer = session._answerer(shown)
                seconds["boot"] = time.perf_counter() - boot_started
                try:
                    if kept is not None:
                        kept.keep(run.calls)
                    part = answerer.run(run.calls, run.feed, control)
                except BaseException:
                    session._drop_unsound_engine()
                    raise
            state.check()
            table = run.result()
            seconds |= part.get("seconds", {})
            seconds["total"] = self._bind_seconds + time.perf_counter() - started
            report = _report(table, run, part, answerer, seconds, self._bound.warnings)
            return QueryResult(table, report, part.get("error_table"))
        finally:
            run.close()

    def _kept_anchors(self) -> KeptAnchors | None:
        """The anchors of joins whose answers are stored; None where there are no joins, or no answers."""
        if not self._is_paired or not self._session._owns_engine:
            return None
        store = self._session._answer_store()
        if store is None:
            return None
        from quail.execution.kept_anchors import KeptAnchors

        return KeptAnchors(store, self._session.config)

    @property
    def _is_paired(self) -> bool:
        return any(call.prompt.num_arguments == 2 for call in self._bound.calls)

    def _token_counter(self) -> TokenCounter | None:
        """Counts tokens as the engine will, for a statement with joins whose model is here."""
        if not self._is_paired or not self._session._owns_engine:
            return None
        from quail.execution.forecast import Forecaster

        return Forecaster.of(self._session.config)


@contextmanager
def _listed(state: RunState, *lists: set[RunState]) -> Iterator[None]:
    """While entered, a run can be found by those who may cancel it."""
    for each in lists:
        each.add(state)
    try:
        yield
    finally:
        for each in lists:
            each.discard(state)


def _both(
    first: Callable[[Mapping[str, Any]], object], second: Callable[[Mapping[str, Any]], object]
) -> Callable[[Mapping[str, Any]], None]:
    def update(progress: Mapping[str, Any]) -> None:
        first(progress)
        second(progress)

    return update


def _is_number(value: object, *, above: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and above < value < float("inf")  # type: ignore[operator]


def _check_share(name: str, share: object) -> None:
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not (is_number and 0 <= share <= 1):  # type: ignore[operator]
        raise ConfigError(f"{name} = {share!r} must be a number from 0 to 1")


def _check_goes_on(ratio: float, on_error: str) -> None:
    if on_error == "raise":
        raise ConfigError(
            f"max_error_ratio = {ratio!r} has no meaning where the first error stops the run",
            hint="run(on_error='null', max_error_ratio=…)",
        )


def _report(
    table: pa.Table,
    run: RelationalRun,
    part: Mapping[str, Any],
    answerer: Answerer | None,
    seconds: Mapping[str, float],
    notes: Sequence[str],
) -> Report:
    about: dict[str, Any] = getattr(answerer, "describe", dict)()
    stages = run.stages()
    calls: Sequence[Mapping[str, Any]] = part.get("calls") or [{} for _ in stages]
    return Report(
        seconds=dict(seconds),
        tokens=dict.fromkeys(TOKEN_COUNTS, 0) | dict(part.get("tokens", {})),
        stages=tuple({**stage, **extra} for stage, extra in zip(stages, calls, strict=True)),
        order=tuple(run.orders()),
        passes=int(part.get("passes", 0)),
        speed_of_light=part.get("speed_of_light"),
        memory=dict(part.get("memory", {})),
        model=about.get("model"),
        device=about.get("device"),
        dtype=about.get("dtype"),
        rows=table.num_rows,
        documents=int(part.get("documents", 0)),
        answers=dict(part.get("answers", {})),
        truncated=int(part.get("truncated", 0)),
        nulls=sum(int(stage.get("null", 0)) for stage in stages) + int(part.get("num_errors", 0)),
        num_errors=int(part.get("num_errors", 0)),
        errors=tuple(part.get("errors", ())),
        audit=dict(part.get("audit", {})),
        warnings=(*notes, *part.get("warnings", ())),
    )
