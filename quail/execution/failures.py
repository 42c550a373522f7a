"""Rows that cannot be answered: the first stops the run, or all of them are noted and answered NULL."""

from __future__ import annotations

from typing import Any

from quail.errors import RowError
from quail.execution.requests import Request


class Failures:
    """What could not be answered.

    Args:
        on_error: `'raise'` stops at the first; `'null'` notes it.

    Attributes:
        errors: row and reason of each, for the report.
    """

    def __init__(self, on_error: str) -> None:
        self._raises = on_error == "raise"
        self._waiting: list[Request] = []
        self.errors: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        """Whether some wait for their NULL."""
        return bool(self._waiting)

    def note(self, request: Request, reason: str, hint: str | None = None) -> None:
        """Notes a request that will not be answered.

        Raises:
            RowError: where the first failure stops the run.
        """
        name = request.document.name
        if self._raises:
            raise RowError(f"{name}: {reason}", hint=hint)
        self.errors.append({"row": name, "reason": reason})
        self._waiting.append(request)

    def take(self) -> list[Request]:
        """Those that wait for their NULL; none waits afterwards."""
        found, self._waiting = self._waiting, []
        return found
