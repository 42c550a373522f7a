"""The command `quail`. It starts light: what is heavy is imported by the commands that need it."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from quail import __version__
from quail.errors import ConfigError, QuailError

if TYPE_CHECKING:
    from quail.answers.store import AnswerStore
    from quail.config import EngineConfig
    from quail.session import Session

P = ParamSpec("P")
R = TypeVar("R")

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
FORMATS = ("table", "csv", "json", "jsonl", "parquet", "markdown")

app = typer.Typer(
    help="Language-model operators over tables: SQL with AI.IF, answered on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="Models that Quail knows by name.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models_app, name="models")
answers_app = typer.Typer(
    help="Stored answers: what runs need not ask again.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(answers_app, name="answers")

Statement = Annotated[str, typer.Argument(help="SQL, or - to read it from standard input.")]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table", "-t", help="name=path or path of Parquet, CSV or JSON lines; a glob too; repeatable."
    ),
]
Model = Annotated[str | None, typer.Option(help="Alias, Hugging Face id, folder or GGUF file.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16, float32 or int8.")]
KvMemory = Annotated[str | None, typer.Option(help="Memory for key/value pages, such as 2GiB.")]
TokenBudget = Annotated[int | None, typer.Option(help="Most tokens one pass computes.")]
Layout = Annotated[str | None, typer.Option(help="auto, chat or completion.")]
Answers = Annotated[str | None, typer.Option(help="File that keeps answers for later runs; memory or off.")]
AnswerFile = Annotated[
    Path | None, typer.Argument(help="The file; without it that of QUAIL_ANSWERS.", show_default=False)
]
OutputFormat = Annotated[str | None, typer.Option("--format", "-f", help=", ".join(FORMATS) + ".")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write; its suffix names the format.")
]
Database = Annotated[Path | None, typer.Option(help="DuckDB file that keeps created tables.")]
Allow = Annotated[list[Path] | None, typer.Option(help="File or folder that statements may read and write.")]


def main() -> None:
    """Entry point of the command."""
    _open_streams()
    arguments = sys.argv[1:]
    stop = arguments.index("--") if "--" in arguments else len(arguments)
    _Errors.debug = "--debug" in arguments[:stop] or bool(os.environ.get("QUAIL_DEBUG"))
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        app(
            args=[each for each in arguments[:stop] if each != "--debug"] + arguments[stop:],
            prog_name="quail",
        )


def _open_streams() -> None:
    """Gives the program the standard streams that it was started without."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"quail: warning: {message}", file=sys.stderr)


class _Errors:
    """How errors end the program; `debug` shows tracebacks."""

    debug = False

    @classmethod
    def reported(cls, command: Callable[P, R]) -> Callable[P, R]:
        """A command whose errors become one line and an exit code."""

        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                result = command(*args, **kwargs)
                sys.stdout.flush()
                return result
            except QuailError as error:
                raise cls._end(one_line(error), FAILED) from None
            except KeyboardInterrupt:
                raise cls._end("interrupted", INTERRUPTED) from None
            except BrokenPipeError:
                cls._discard_output()  # the reader has gone
                raise typer.Exit(OK) from None
            except OSError as error:
                cls._discard_output()
                what = error.filename if error.filename is not None else "standard output"
                raise cls._end(f"{what}: {error.strerror or error}", FAILED) from None
            except (typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except Exception as error:
                message = f"internal error, {type(error).__name__}: {error}; --debug shows where"
                raise cls._end(message, FAILED) from None

        return run

    @staticmethod
    def _discard_output() -> None:
        """Keeps Python from failing once more when it flushes on its way out."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    @classmethod
    def _end(cls, message: str, code: int) -> typer.Exit:
        if cls.debug:
            traceback.print_exc()
        print(f"quail: {message}", file=sys.stderr)
        return typer.Exit(code)


def one_line(error: QuailError) -> str:
    """An error's message and hint on one line.

    >>> one_line(QuailError("no table 'a'", hint="register it"))
    "no table 'a' (hint: register it)"
    """
    parts = [line.strip() for line in error.message.splitlines() if line.strip(" ^")]
    return " ".join(parts) + (f" (hint: {error.hint})" if error.hint else "")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quail {__version__}")
        raise typer.Exit(OK)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Takes the options that stand before a command."""


@app.command()
@_Errors.reported
def sql(
    statement: Statement,
    table: Tables = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    kv_memory: KvMemory = None,
    token_budget: TokenBudget = None,
    layout: Layout = None,
    database: Database = None,
    allow: Allow = None,
    answers: Answers = None,
    format: OutputFormat = None,
    output: Output = None,
    max_rows: Annotated[int, typer.Option(help="Rows that the format table shows.", min=1)] = 40,
    order: Annotated[str, typer.Option(help="auto or as_written.")] = "auto",
    on_long: Annotated[str, typer.Option(help="error or truncate.")] = "error",
    on_error: Annotated[
        str, typer.Option(help="raise, null or details: as null, each failed row a line of standard error.")
    ] = "raise",
    max_error_ratio: Annotated[
        float | None, typer.Option(help="Share of failed questions, 0 to 1, that stops the run.")
    ] = None,
    audit: Annotated[float, typer.Option(help="Share of questions asked again without reuse, 0 to 1.")] = 0.0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which the run stops.")] = None,
    progress: Annotated[bool | None, typer.Option(help="Show a bar; by default on terminals.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print the run's report to standard error.")
    ] = False,
) -> None:
    """Run a statement and print its rows."""
    chosen = _choose_format(format, output)
    config = _config(
        model=model,
        device=device,
        dtype=dtype,
        kv_memory=kv_memory,
        token_budget=token_budget,
        layout=layout,
        answers=answers,
    )
    with _session(config, table, database, allow) as session:
        result = session.sql(_read(statement)).run(
            order=order,
            on_long=on_long,
            on_error=on_error,
            max_error_ratio=max_error_ratio,
            audit=audit,
            timeout=timeout,
            progress=progress,
        )
        from quail.output import write_table

        write_table(result.arrow(), chosen, output, max_rows=max_rows)
        if on_error == "details":
            for each in result.errors.to_pylist():
                print("quail: {table} row {row}: {message} ({kind}, {call})".format(**each), file=sys.stderr)
        if report:
            print(result.report, file=sys.stderr)


@app.command()
@_Errors.reported
def explain(
    statement: Statement,
    table: Tables = None,
    database: Database = None,
    allow: Allow = None,
    model: Model = None,
    format: Annotated[str, typer.Option("--format", "-f", help="text or json.")] = "text",
) -> None:
    """Show what a statement would do; the model is not asked."""
    with _session(_config(model=model), table, database, allow) as session:
        print(session.sql(_read(statement)).explain(format=format))


@app.command()
@_Errors.reported
def demo(
    rows: Annotated[int, typer.Option(help="Reviews that are read.", min=10, max=3000)] = 300,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer questions about real reviews and licences, with plan, rows and ledger."""
    from quail.demo import run_demo

    run_demo(_config(model=model, device=device, dtype=dtype), num_reviews=rows)


@app.command()
@_Errors.reported
def layouts(
    data: Annotated[str, typer.Option(help="Parquet, CSV or JSON lines with labelled rows.")],
    label: Annotated[str, typer.Option(help="Column of the right answers: boolean, or text.")],
    text: Annotated[str | None, typer.Option(help="Column of the documents; found if there is one.")] = None,
    cue: Annotated[
        list[str] | None,
        typer.Option(help="What follows the document, such as Sentiment:; or a template; repeatable."),
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option(help="positive,negative (true first), or word=label,word=label; repeatable."),
    ] = None,
    layout: Annotated[list[str] | None, typer.Option(help="completion or chat; both by default.")] = None,
    rows: Annotated[int, typer.Option(help="Most rows that are asked about.", min=2)] = 200,
    seed: Annotated[int, typer.Option(help="Of the choice of rows.", min=0)] = 1,
    format: Annotated[str, typer.Option("--format", "-f", help="table or json.")] = "table",
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measure on labelled rows which layout, cue and answer words a model answers best."""
    from quail.config import check_choice
    from quail.layouts import LAYOUTS, Rows, measure_layouts, print_layouts

    check_choice("format", format, ("table", "json"))
    for each in layout or ():
        check_choice("layout", each, LAYOUTS)
    found = measure_layouts(
        _config(model=model, device=device, dtype=dtype),
        Rows(data, label, text, rows, seed),
        layouts=layout or LAYOUTS,
        cues=cue or (),
        answers=answers or (),
    )
    print_layouts(found, format)


@app.command()
@_Errors.reported
def doctor(
    rates: Annotated[bool, typer.Option(help="Measure the device's rates, in a few seconds.")] = True,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what explain reckons with anew, and keep it.")
    ] = False,
) -> None:
    """Show versions, device, memory and rates: what a report of a problem should hold."""
    from quail.doctor import measure_rates, print_doctor

    print_doctor(_config(), with_rates=rates)
    if measure:
        measure_rates(_config())


def _config(**given: Any) -> EngineConfig:
    from quail.config import EngineConfig

    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def _session(
    config: EngineConfig, tables: list[str] | None, database: Path | None, allow: list[Path] | None
) -> Session:
    from quail.session import Session

    session = Session(config, database=database, allow=allow or ())
    try:
        for each in tables or ():
            session.register(*_name_and_path(each))
    except BaseException:
        session.close()
        raise
    return session


def _name_and_path(text: str) -> tuple[str, str]:
    """The two sides of `name=path`; a bare path takes its file's name.

    >>> _name_and_path("r=data/reviews.parquet"), _name_and_path("data/reviews.parquet")
    (('r', 'data/reviews.parquet'), ('reviews', 'data/reviews.parquet'))
    """
    match = re.fullmatch(r"([^=/\\]+)=(.+)", text, flags=re.DOTALL)
    return (match[1].strip(), match[2]) if match else (Path(text).name.partition(".")[0], text)


def _read(statement: str) -> str:
    return sys.stdin.read() if statement == "-" else statement


def _choose_format(format: str | None, output: Path | None) -> str:
    if format is None and output is not None:
        suffix = output.suffix.lower().lstrip(".")
        format = {"md": "markdown", "ndjson": "jsonl", "pq": "parquet", "txt": "table"}.get(suffix, suffix)
    format = format or "table"
    if format not in FORMATS:
        from quail.config import check_choice

        try:
            check_choice("format", format, FORMATS)
        except ConfigError as error:
            raise typer.BadParameter(one_line(error)) from None
    if format == "parquet" and output is None and sys.stdout.isatty():
        raise typer.BadParameter("parquet is no text for a terminal; name a file with --output")
    return format


@models_app.command("list")
@_Errors.reported
def models_list() -> None:
    """Models known by an alias, and which of them are here."""
    from quail.doctor import print_models

    print_models(_config())


@models_app.command("fetch")
@_Errors.reported
def models_fetch(model: Annotated[str, typer.Argument(help="Alias.")] = "smollm2-135m") -> None:
    """Fetch a model and check its digest; print where it lies."""
    from quail.doctor import fetch_model

    fetch_model(_config(model=model))


@models_app.command("info")
@_Errors.reported
def models_info(model: Annotated[str, typer.Argument(help="Alias.")] = "smollm2-135m") -> None:
    """What is known of a model."""
    from quail.doctor import print_model

    print_model(_config(model=model))


@answers_app.command("ls")
@_Errors.reported
def answers_ls(file: AnswerFile = None, format: OutputFormat = None, output: Output = None) -> None:
    """The questions of a file and how many answers each has."""
    from quail.answers.commands import questions_table
    from quail.output import write_table

    chosen = _choose_format(format, output)
    with closing(_answer_store(file)) as store:
        write_table(questions_table(store), chosen, output)


@answers_app.command("info")
@_Errors.reported
def answers_info(file: AnswerFile = None) -> None:
    """Size and state of a file."""
    from quail.answers.commands import facts

    with closing(_answer_store(file)) as store:
        for name, value in facts(store).items():
            print(f"{name:<10} {value:,}" if isinstance(value, int) else f"{name:<10} {value}")


@answers_app.command("prune")
@_Errors.reported
def answers_prune(
    file: AnswerFile = None,
    question: Annotated[list[int] | None, typer.Option(help="Number of a question; repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model that was asked.")] = None,
    older_than: Annotated[float | None, typer.Option(help="Days since the question was first asked.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every question.")] = False,
) -> None:
    """Delete the questions that match everything given, with their answers."""
    from quail.answers.commands import to_prune

    with closing(_answer_store(file)) as store:
        found = to_prune(store, questions=question or [], model=model, days=older_than, everything=all)
        print(f"{store.prune(found):,} answers of {len(found):,} questions deleted")


@answers_app.command("export")
@_Errors.reported
def answers_export(file: AnswerFile = None, format: OutputFormat = None, output: Output = None) -> None:
    """Write every answer: its question, a digest of what it was asked about, the raw logits."""
    from quail.answers.commands import answers_table
    from quail.output import write_table

    chosen = _choose_format(format, output)
    with closing(_answer_store(file)) as store:
        write_table(answers_table(store), chosen, output)


def _answer_store(file: Path | None) -> AnswerStore:
    from quail.answers.commands import open_store

    path = file or _config().answers_path(None)
    if path is None or str(path) == "off":
        raise typer.BadParameter("name the file of answers, or set QUAIL_ANSWERS")
    return open_store(path)
