"""Runs of one session come one after another, whichever thread asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quail.errors import QuailError

_LOOK_SECONDS = 0.05
"""A thread that waits for its turn looks so often whether it is still wanted."""


class Turns:
    """A lock that can be given up while waiting, and that tells a thread that it has it already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def taken(self, what: str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Waits for the turn and has it.

        Args:
            what: what is to be done, for the message.
            check: called while waiting; what it raises ends the wait.

        Raises:
            QuailError: this thread has the turn: a callback of a run wants to start another.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise QuailError(
                f"{what}: a run of this session is under way in this thread",
                hint="a progress function cannot wait for another run; use a second Session",
            )
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            check()
        self._owner = me
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()
