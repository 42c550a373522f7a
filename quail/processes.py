"""The process around a session: what a fork leaves behind, and Python's search for garbage.

Threads, DuckDB's among them, do not follow a fork, so a forked child that used its parent's database or model
would wait forever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator

from quail.errors import ConfigError, QuailError


class OfOneProcess:
    """Something that is of use only in the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        _alive.add(self)

    @property
    def _is_of_this_process(self) -> bool:
        return os.getpid() == self._pid

    def _check_process(self, what: str, way_out: str) -> None:
        """Refuses to work in a forked child.

        Raises:
            QuailError: this is another process.
        """
        if not self._is_of_this_process:
            raise QuailError(
                f"the {what} was opened by process {self._pid} and cannot be used in its fork {os.getpid()}",
                hint=way_out,
            )


_threaded: set[int] = set()
"""Processes, this one or those that it was forked from, that computed with several threads."""


def check_threads_after_fork(num_threads: int) -> None:
    """Refuses several threads where the process was forked from one that had used them.

    OpenMP's threads do not follow a fork, and the child would wait for them.

    Raises:
        ConfigError: names the threads and the ways out.
    """
    if num_threads > 1 and _threaded - {os.getpid()}:
        raise ConfigError(
            f"threads = {num_threads}, but this process was forked from one whose model had used several: "
            "they do not follow a fork",
            hint="start it with the method 'spawn', fork before the first query, or set threads = 1",
        )
    if num_threads > 1:
        _threaded.add(os.getpid())


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """While entered, Python does not look for garbage: for imports and the like, which make objects to keep.

    Importing torch and reading a tokenizer make half a million of them, and searching them again and again
    took 0.3 s of a boot. Afterwards they count as old ones, so that the next search does not begin with them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else somebody froze objects, who are to stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


_alive: weakref.WeakSet[OfOneProcess] = weakref.WeakSet()
_never_freed: list[dict[str, object]] = []


def _keep_alive() -> None:
    """In a forked child: the parent's objects are never freed: their destructors would wait for threads."""
    _never_freed.extend(dict(vars(each)) for each in list(_alive))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_alive)
