"""What a user sees while a query runs: a bar on terminals and in notebooks, nothing where output is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def display(show: bool | None = None) -> Display:
    """A display for one run.

    Args:
        show: True shows a bar in any case, False none, None one on terminals and in notebooks.
    """
    if show is False or (show is None and not (in_notebook() or _is_terminal())):
        return Display(None)
    from rich.console import Console

    return Display(Console(stderr=not in_notebook()))


def in_notebook() -> bool:
    """Whether this is a kernel of Jupyter or the like."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class Display:
    """A bar with documents, tokens a second and time left; silent without a console.

    `update` takes the engine's mapping after each pass: `documents` (finished so far), `num_documents`
    (expected, or None), `tokens` (computed so far), `passes`.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._bar: Any = None
        self._task: Any = None
        self._started = 0.0

    def __enter__(self) -> Display:
        if self._console is not None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=5,
            )
            self._bar.start()
            self._task = self._bar.add_task("planning", total=None, detail="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, what: str) -> None:
        """Names the step before the first pass, such as the fetch of a model."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def update(self, state: Mapping[str, Any]) -> None:
        """Takes in the state after a pass; never raises."""
        if self._bar is None:
            return
        self._started = self._started or time.monotonic()
        done, total = int(state.get("documents", 0)), state.get("num_documents")
        tokens = int(state.get("tokens", 0))
        seconds = float(state.get("seconds") or time.monotonic() - self._started)
        rate = f", {tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        of = f" of {total:,}" if total else ""
        self._bar.update(
            self._task,
            description="answering",
            completed=done,
            total=total,
            detail=f"{done:,}{of} documents{rate}",
        )
