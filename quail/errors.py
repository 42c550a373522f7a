"""Every error that Quail raises for its users.

QuailError
├── ConfigError              a setting that cannot be used
├── SourceError              a table that cannot be registered or read
├── BindError                a statement that cannot be understood (located)
│   └── UnsupportedError     understood, but not served yet; says what is
├── ModelError               a model that cannot be found, loaded or trusted
├── PlanError                a plan that cannot run here (memory, budget), with the numbers
├── RowError                 one row that cannot be answered, with its table, row and numbers
│   └── TooManyErrors        more rows failed than the run was allowed
├── StoreError               the answer store cannot be opened, read or written
└── QueryCancelled           the run was stopped before its end
    └── QueryTimeout         because its time was over

A message names the thing, the numbers and the way out. `hint` holds the way out where it is a sentence of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class QuailError(Exception):
    """Base of all errors that Quail raises for its users.

    Args:
        message: what is wrong, with the thing and the numbers.
        hint: the way out, one sentence; shown behind the message.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = message.encode(errors="backslashreplace").decode()  # it may quote text that is none
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint


class ConfigError(QuailError):
    """A setting of `EngineConfig`, an option or an environment variable cannot be used."""


class SourceError(QuailError):
    """A table cannot be registered or read."""


_SHOWN = 120
"""Characters shown before and behind a fault."""


class BindError(QuailError):
    """A statement cannot be understood; says where.

    Args:
        message: what is wrong.
        hint: the way out.
        text: the statement, to show the line at fault.
        start: character offset of the fault in `text`.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, text: str | None = None, start: int | None = None
    ) -> None:
        self.line: int | None = None
        self.column: int | None = None
        if text is not None and start is not None:
            self.line = text.count("\n", 0, start) + 1
            line_start = text.rfind("\n", 0, start) + 1
            self.column = start - line_start + 1
            line_stop = text.find("\n", start)
            line_stop = line_stop if line_stop >= 0 else len(text)
            first, last = max(line_start, start - _SHOWN), min(line_stop, start + _SHOWN)
            before, behind = "…" if first > line_start else "", "…" if last < line_stop else ""
            message = (
                f"{message}\n  at line {self.line}, column {self.column}:\n"
                f"    {before}{text[first:last]}{behind}\n    {' ' * (len(before) + start - first)}^"
            )
        super().__init__(message, hint=hint)


class UnsupportedError(BindError):
    """The statement is understood but not served yet; the message says what is."""


class ModelError(QuailError):
    """A model cannot be found, loaded or trusted."""


class PlanError(QuailError):
    """A plan cannot run here; the message holds what is needed and what there is."""


class RowError(QuailError):
    """One row cannot be answered; the message names its table, row and numbers."""


class TooManyErrors(RowError):
    """The share of questions that failed exceeds `run(max_error_ratio=…)`; the message has the counts."""


class StoreError(QuailError):
    """The answer store cannot be opened, read or written; what it holds stays."""


class QueryCancelled(QuailError):
    """The run was stopped before its end; nothing is left behind and the session can go on.

    Attributes:
        progress: how far it was: `documents`, `num_documents`, `tokens`, `passes`, `seconds`.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, progress: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.progress: Mapping[str, Any] = progress or {}


class QueryTimeout(QueryCancelled):
    """The run was stopped because its time was over; the message says what was done and what remains."""
