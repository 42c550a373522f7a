"""A run in a thread of its own, and the handle to it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from quail.errors import QuailError
from quail.runs.state import RunState

Result = TypeVar("Result")


class RunHandle(Generic[Result]):
    """A run that goes on in the background. Made by `Query.run(background=True)`.

    Runs of one session come one after another, those in the background too. A program that ends cancels its
    background runs.
    """

    def __init__(self, work: Callable[[], Result], state: RunState) -> None:
        self._work, self._state = work, state
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quail-run", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._ended.is_set()

    def progress(self) -> dict[str, Any]:
        """How far the run is: `documents` finished, `num_documents` (an upper bound, or None), `tokens`
        computed, `passes`, `seconds`.
        """
        return self._state.progress

    def cancel(self) -> None:
        """Asks the run to stop after its current pass; `result` then raises `QueryCancelled`."""
        self._state.cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the end of the run.

        Args:
            timeout: seconds to wait; None waits as long as it takes. The run goes on in any case.

        Returns:
            What `run()` would have returned.

        Raises:
            TimeoutError: the run has not ended yet.
            QuailError: as `run()` raises; or the run was begun by another process.
        """
        if os.getpid() != self._pid:
            raise QuailError(
                "the run was begun by another process, before a fork",
                hint="wait for it there, and send the rows",
            )
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the run has not ended within {timeout:g} s; it goes on: {self.progress()}")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            _running.discard(self)

    def _join(self) -> None:
        self._thread.join()


_running: weakref.WeakSet[RunHandle[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends background runs before the interpreter takes their modules away."""
    handles = [handle for handle in _running if handle._pid == os.getpid()]
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle._join()
