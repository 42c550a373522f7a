"""Ctrl-C in the middle of work that must not be left half done.

DuckDB turns an interruption into errors of its own, and an exception may stand between any two steps of the
accounting. So Ctrl-C only asks guarded work to stop, and is raised when the work has ended.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class KeyboardInterrupts:
    """While entered, Ctrl-C ends the work inside as a `KeyboardInterrupt`, whatever it fails with.

    Python calls signal handlers in its main thread only, and a program may have a handler of its own:
    elsewhere nothing is changed.

    Args:
        stop: asks the work to stop at its next good place; a second Ctrl-C does not wait for it. None: every
            Ctrl-C is raised at once.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self._stop = stop
        self._came = False
        self._before: Any = None

    def __enter__(self) -> KeyboardInterrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            is_ours = isinstance(getattr(handler, "__self__", None), KeyboardInterrupts)
            if handler is signal.default_int_handler or is_ours:
                self._before = handler
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._came and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For a part of the work that may be left anywhere, such as a download."""
        stop, self._stop = self._stop, None
        if self._came:
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._stop = stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came or self._stop is None:
            self._came = True
            raise KeyboardInterrupt
        self._came = True
        self._stop()
