"""One-call helpers: questions about a column of a pandas or polars frame, or about a list.

The answers come back as what was given: a pandas Series with the same index and name, a polars Series of the
same name, a list; in the same order and of the same length. NULL stays NULL.
"""

from __future__ import annotations

import atexit
import secrets
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pyarrow as pa

from quail.config import did_you_mean
from quail.errors import ConfigError
from quail.frontend.asking import Categories, Prompt, labels_of
from quail.frontend.asking import prompt as prompt_of
from quail.frontend.builder import Docs
from quail.session import Session
from quail.sources.frames import to_frame

Columns = str | Sequence[str] | None

_lock = threading.Lock()
_shared: list[Session] = []


def ai_if(
    data: Any,
    prompt: str,
    *,
    column: Columns = None,
    session: Session | None = None,
    on_error: str = "raise",
    **options: Any,
) -> Any:
    """Whether the answer about each text is TRUE.

    Args:
        data: a pandas or polars Series or DataFrame, or a list of texts and None.
        prompt: the question, with `{0}` where the text stands (`{1}` and so on for further columns).
        column: which column, or columns, of a DataFrame.
        session: whose model answers; None takes one that the helpers share and keep.
        on_error: a text that cannot be answered stops the call (`raise`), or its answer is NULL (`null`) and
            a Python warning says how many there were.
        options: of AI.IF, such as `answers=['positive', 'negative']`.

    Returns:
        A pandas `boolean` or polars Boolean Series, or a list of bool and None.

    Raises:
        ConfigError: data of another kind, or a column that it does not have.
        BindError: a prompt or option that cannot be used.
        RowError: a text that cannot be answered.
    """
    texts = _texts(data, column)
    answers = _ask(texts, prompt, session, on_error, lambda docs, asked: docs.ai_answer(asked, **options))
    return texts.give(answers, "boolean")


def ai_score(
    data: Any,
    prompt: str,
    *,
    column: Columns = None,
    session: Session | None = None,
    on_error: str = "raise",
    **options: Any,
) -> Any:
    """The probability of TRUE for each text; arguments and errors as for `ai_if`.

    Returns:
        A pandas float64 (NULL is NaN) or polars Float64 Series, or a list of float and None.
    """
    texts = _texts(data, column)
    answers = _ask(
        texts, prompt, session, on_error, lambda docs, asked: docs.ai_score(asked, "answer", **options)
    )
    return texts.give(answers, "float64")


def ai_classify(
    data: Any,
    prompt: str,
    categories: Categories,
    *,
    column: Columns = None,
    session: Session | None = None,
    on_error: str = "raise",
    **options: Any,
) -> Any:
    """The likeliest category of each text; arguments and errors as for `ai_if`.

    Args:
        data: as for `ai_if`.
        prompt: what is classified, with `{0}` where the text stands.
        categories: 2 to 255 labels, (label, description) pairs, or a mapping of label to description.
        column: as for `ai_if`.
        session: as for `ai_if`.
        on_error: as for `ai_if`.
        options: of AI.CLASSIFY.

    Returns:
        A pandas `string` or polars String Series, or a list of str and None.
    """
    texts = _texts(data, column)
    answers = _ask(
        texts,
        prompt,
        session,
        on_error,
        lambda docs, asked: docs.ai_classify(asked, categories, "answer", **options),
    )
    return texts.give(answers, "string")


def ai_probabilities(
    data: Any,
    prompt: str,
    categories: Categories,
    *,
    column: Columns = None,
    session: Session | None = None,
    on_error: str = "raise",
    **options: Any,
) -> Any:
    """The probability of each category for each text; arguments and errors as for `ai_classify`.

    Returns:
        A pandas or polars DataFrame of a column a category (float64; NULL is NaN in pandas) with the rows and
        index of the data, or a list of dicts and None.
    """
    texts = _texts(data, column)
    answers = _ask(
        texts,
        prompt,
        session,
        on_error,
        lambda docs, asked: docs.ai_probabilities(asked, categories, "answer", **options),
    )
    return texts.give_maps([None if row is None else dict(row) for row in answers.to_pylist()], categories)


@dataclass(frozen=True)
class _Texts:
    """The texts of a call and what their answers are to look like.

    Attributes:
        columns: one or more columns of texts.
        library: `pandas`, `polars`, or empty for a list.
        name: of the Series of answers.
        index: of pandas data.
    """

    columns: tuple[pa.ChunkedArray, ...]
    library: str = ""
    name: Any = None
    index: Any = None

    def give(self, answers: pa.ChunkedArray, pandas_dtype: str) -> Any:
        """Answers as the caller's kind."""
        if self.library == "polars":
            return import_module("polars").Series(self.name, answers.combine_chunks())
        values = answers.to_pylist()
        if self.library == "pandas":
            return import_module("pandas").Series(
                values, index=self.index, name=self.name, dtype=pandas_dtype
            )
        return values

    def give_maps(self, rows: list[dict[str, float] | None], categories: Categories) -> Any:
        """Rows of probabilities as the caller's kind."""
        if not self.library:
            return rows
        labels = _labels(rows, categories)
        columns = {label: [None if row is None else row[label] for row in rows] for label in labels}
        library = import_module(self.library)
        if self.library == "polars":
            return library.DataFrame(columns, schema=dict.fromkeys(labels, library.Float64))
        return library.DataFrame(columns, index=self.index, columns=labels, dtype="float64")


def _labels(rows: Sequence[dict[str, float] | None], categories: Categories) -> list[str]:
    answered = next((row for row in rows if row is not None), None)
    return list(answered if answered is not None else labels_of(categories) or ())


def _texts(data: Any, column: Columns) -> _Texts:
    kinds = {cls.__name__: cls.__module__.partition(".")[0] for cls in type(data).__mro__}
    library = kinds.get("Series") or kinds.get("DataFrame") or ""
    if library not in ("pandas", "polars"):
        return _of_list(data, column)
    index = data.index if library == "pandas" else None
    if "Series" in kinds:
        if column is not None:
            raise ConfigError("column is for a DataFrame; a Series is one column", hint="leave column out")
        name = data.name
        return _Texts((_taken(data),), library, name, index)
    names = [column] if isinstance(column, str) else list(column or ())
    known = [str(each) for each in data.columns]
    if not names:
        raise ConfigError(
            f"a DataFrame needs the column that is asked about; it has {', '.join(map(repr, known))}",
            hint="column='text'",
        )
    for name in names:
        if list(data.columns).count(name) != 1:
            raise ConfigError(
                f"the DataFrame has {'no' if name not in data.columns else 'several'} columns {name!r}",
                hint=did_you_mean(str(name), known) or f"it has {', '.join(map(repr, known))}",
            )
    return _Texts(tuple(_taken(data[name]) for name in names), library, names[0], index)


def _of_list(data: Any, column: Columns) -> _Texts:
    if not isinstance(data, list | tuple):
        kind = f"{type(data).__module__.partition('.')[0]} {type(data).__name__}"
        raise ConfigError(
            f"texts are a pandas or polars Series or DataFrame, or a list, not a {kind}",
            hint="use session.sql or session.docs for other tables",
        )
    if column is not None:
        raise ConfigError("column is for a DataFrame; a list is one column", hint="leave column out")
    for i, text in enumerate(data):
        if not isinstance(text, str | None):
            raise ConfigError(f"item {i} of the list is a {type(text).__name__}, not text or None")
    return _Texts((_taken({"text": list(data)}, is_table=True),))


def _taken(column: Any, *, is_table: bool = False) -> pa.ChunkedArray:
    """A column as Arrow; lone surrogates are replaced and warned of."""
    frame = to_frame("texts", column if is_table else _framed(column))
    if frame.num_replaced_surrogates:
        warnings.warn(
            f"{frame.num_replaced_surrogates:,} lone surrogates, which are no text, were replaced by U+FFFD",
            UserWarning,
            stacklevel=5,
        )
    table = frame.data
    assert isinstance(table, pa.Table)
    return table.column(0)


def _framed(series: Any) -> Any:
    if hasattr(series, "rename") and hasattr(series, "to_frame"):
        return series.rename("text").to_frame()
    return series


def _ask(
    texts: _Texts,
    prompt: str,
    session: Session | None,
    on_error: str,
    add: Callable[[Docs, Prompt], Docs],
) -> pa.ChunkedArray:
    """The answers, in the order of the texts."""
    asked = prompt_of(prompt, *(f"text{i}" for i in range(len(texts.columns))))
    session = session or _shared_session()
    length = len(texts.columns[0])
    names = ["row", *(f"text{i}" for i in range(len(texts.columns)))]
    table = pa.Table.from_arrays([pa.array(range(length), pa.int64()), *texts.columns], names=names)
    name = f"quail_texts_{secrets.token_hex(6)}"
    session.register(name, table)
    try:
        asking = add(session.docs(name).alias("t"), asked).order_by("row").select("answer")
        result = asking.run(on_error=on_error)
    finally:
        session._open().unregister(name)
    answers, report = result.arrow(), result.report
    if report.errors:
        first = report.errors[0]
        warnings.warn(
            f"{report.num_errors:,} texts could not be answered; the first, number {first['row']}: "
            f"{first['message']}",
            UserWarning,
            stacklevel=3,
        )
    assert answers.num_rows == length
    return answers.column(0)


def _shared_session() -> Session:
    """The helpers' own session, made at first use and closed at exit; its model stays loaded."""
    with _lock:
        if _shared and not _shared[0]._is_of_this_process:
            _shared.clear()
        if not _shared:
            _shared.append(Session())
            atexit.register(_close_shared)
        return _shared[0]


def _close_shared() -> None:
    with _lock:
        while _shared:
            _shared.pop().close()
