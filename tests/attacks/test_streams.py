"""The command with standard streams that are full, closed or gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "sql": "sql 'SELECT 1 AS a'",
    "many rows": "sql 'SELECT * FROM range(100000)' --format csv",
    "explain": "explain 'SELECT 1 AS a'",
}


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        f"{sys.executable} -m quail {command}", shell=True, capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_one_line(command: str) -> None:
    done = shell(f"{command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "quail: standard output: No space left on device\n")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_output_is_no_error(command: str) -> None:
    done = shell(f"{command} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_input_is_empty() -> None:
    done = shell("sql - <&-")
    assert (done.returncode, done.stderr) == (1, "quail: the statement is empty\n")


def test_a_reader_that_goes_early() -> None:
    done = shell(f"{COMMANDS['many rows']} | head -n 1")
    assert (done.stdout, done.stderr) == ("range\n", "")
