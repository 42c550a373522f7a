"""Python code in a process of its own, and the most memory that it held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MiB = 1 << 20

_PREAMBLE = """
import json, os, sys
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
"""

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is read from /proc")


def measured(code: str, *arguments: str) -> dict[str, Any]:
    """Runs code that prints a JSON object last; `peak()`, `resident()` and `reset_peak()` are there."""
    command = [sys.executable, "-c", _PREAMBLE + code, *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result
