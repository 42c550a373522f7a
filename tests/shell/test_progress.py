from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from quail import progress
from quail.progress import Display, display

STATE = {"documents": 40, "num_documents": 100, "tokens": 9000, "passes": 3, "seconds": 3.0}


def test_nothing_is_written_where_output_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as shown:
        shown.say("loading")
        shown.update(STATE)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with display() as shown:
        shown.update(STATE)
    assert terminal.getvalue() != ""
    terminal.truncate(0)
    with display(False) as shown:
        shown.update(STATE)
    assert terminal.getvalue().strip("\0") == ""


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (STATE, "40 of 100 documents, 3,000 tokens/s"),
        ({"documents": 7, "num_documents": None, "tokens": 10, "seconds": 0.0}, "7 documents"),
        ({}, "0 documents"),
    ],
)
def test_the_bar_counts_documents_and_tokens(state: dict[str, object], expected: str) -> None:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True, width=120)) as shown:
        shown.say("loading the model")
        shown.update(state)
        shown._bar.refresh()
    assert expected in out.getvalue()


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class IPython:
        def __init__(self, shell: object) -> None:
            self.get_ipython = lambda: shell

    assert not progress.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", IPython(None))
    assert not progress.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", IPython(type("Shell", (), {"kernel": object()})()))
    assert progress.in_notebook()
