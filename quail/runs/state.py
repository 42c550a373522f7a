"""One run as seen from outside: how far it is, and whether it is to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quail.errors import QueryCancelled, QueryTimeout

Listener = Callable[[Mapping[str, Any]], object]


class RunState:
    """Progress of a run, and the wish to stop it. Any thread may ask and be told.

    Args:
        timeout: seconds from now after which the run is stopped; None never stops it.
        listener: told of the progress after each pass. What it raises ends the run.
    """

    def __init__(self, timeout: float | None = None, listener: Listener | None = None) -> None:
        self._started = time.monotonic()
        self._timeout = timeout
        self._listener = listener
        self._stopped = threading.Event()
        self._is_late = False
        self._progress: dict[str, Any] = {}
        self._interrupt: Callable[[], None] = lambda: None

    @property
    def progress(self) -> dict[str, Any]:
        """The last that the run told: `documents` finished, `num_documents` (an upper bound, or None),
        `tokens` computed, `passes`, `seconds`. Zeros before the first pass.
        """
        none = {"documents": 0, "num_documents": None, "tokens": 0, "passes": 0}
        return none | {"seconds": time.monotonic() - self._started} | self._progress

    def update(self, progress: Mapping[str, Any]) -> None:
        """Takes in the progress after a pass."""
        self._progress = dict(progress)
        if self._listener is not None:
            self._listener(dict(progress))

    def cancel(self) -> None:
        """Asks the run to stop."""
        self._stopped.set()
        self._interrupt()

    def set_interrupt(self, interrupt: Callable[[], None]) -> None:
        """How to stop what does not look at `is_stopped`, such as DuckDB at work."""
        self._interrupt = interrupt
        if self.is_stopped():
            interrupt()

    def is_stopped(self) -> bool:
        """Whether the run is to stop."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Raises the error of a run that is to stop.

        Raises:
            QueryCancelled: it was cancelled.
            QueryTimeout: its time is over.
        """
        if self.is_stopped():
            raise self.error()

    def error(self) -> QueryCancelled:
        """What a stopped run ends with."""
        if not self._is_late:
            return QueryCancelled(f"the query was cancelled; {self._done()}", progress=self.progress)
        return QueryTimeout(
            f"the query did not end within {self._timeout:g} s; {self._done()}",
            hint="give it more time: run(timeout=…)",
            progress=self.progress,
        )

    @contextmanager
    def deadline(self) -> Iterator[None]:
        """While entered, the run is stopped when its time is over."""
        if self._timeout is None:
            yield
            return
        left = self._timeout - (time.monotonic() - self._started)
        timer = threading.Timer(max(0.0, left), self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._is_late = not self.is_stopped()
        self.cancel()

    def _done(self) -> str:
        seen = self.progress
        if not seen["passes"]:
            return "no document was answered yet"
        total, done = seen["num_documents"], seen["documents"]
        of = "" if total is None else f" of at most {total:,}"
        remain = "" if total is None else f", {max(0, total - done):,} remain"
        return f"{done:,}{of} documents done in {seen['passes']:,} passes ({seen['tokens']:,} tokens){remain}"
