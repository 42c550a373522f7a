"""Rows that cannot be answered: the first stops the run, or all of them are noted and answered NULL."""

from __future__ import annotations

from collections.abc import Sequence

from quail.errors import RowError, TooManyErrors
from quail.execution.error_log import ErrorLog
from quail.execution.requests import Request
from quail.execution.stages import Stage

LEAST_JUDGED = 1_000
"""A run that goes on is judged as if it had so many questions at least."""

GO_ON = "run(on_error='null') answers such rows with NULL and goes on"


class Failures:
    """What could not be answered.

    Args:
        stages: of the run.
        on_error: `'raise'` stops at the first; `'null'` notes it; `'details'` notes it and lists all.
        max_ratio: share of failed questions that stops the run; None has no limit.

    Attributes:
        log: what was noted.
    """

    def __init__(self, stages: Sequence[Stage], on_error: str, max_ratio: float | None = None) -> None:
        self.log = ErrorLog(lists_all=on_error == "details")
        self._stages, self._max_ratio = stages, max_ratio
        self._raises = on_error == "raise"
        self._waiting: list[Request] = []

    def __bool__(self) -> bool:
        """Whether some wait for their NULL."""
        return bool(self._waiting)

    def note(self, request: Request, kind: str, reason: str, hint: str | None = None) -> None:
        """Notes a request that will not be answered.

        Args:
            request: which.
            kind: one of those of the error log.
            reason: what is wrong, with the numbers.
            hint: the way out.

        Raises:
            RowError: where the first failure stops the run.
        """
        document = request.document
        if self._raises:
            raise RowError(f"{document.name}: {reason}", hint=hint or GO_ON)
        call = self._stages[request.stage].call.text
        self.log.add(document.source, document.row, call, kind, reason)
        self._waiting.append(request)

    def take(self) -> list[Request]:
        """Those that wait for their NULL; none waits afterwards."""
        found, self._waiting = self._waiting, []
        return found

    def check_ratio(self, num_asked: int, num_expected: int) -> None:
        """Stops the run where too great a share of its questions failed.

        Args:
            num_asked: questions taken up so far, the failed ones included.
            num_expected: questions that there will be as far as is known; 0 once there are no more.

        Raises:
            TooManyErrors: names the counts, their kinds and the first row.
        """
        log = self.log
        if self._max_ratio is None or not log.num_errors:
            return
        num_judged = max(num_asked, num_expected, LEAST_JUDGED if num_expected else 0)
        if log.num_errors > self._max_ratio * num_judged:
            first = log.first()[0]
            raise TooManyErrors(
                f"{log.num_errors:,} of {num_judged:,} questions failed ({log.summary()}), which exceeds "
                f"max_error_ratio = {self._max_ratio:g}; the first: {first['table']} row {first['row']}: "
                f"{first['message']}"
            )
