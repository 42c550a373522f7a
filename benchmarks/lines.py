"""One measured figure beside its bar, and the machine it was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import quail


@dataclass(frozen=True)
class Line:
    """One measured figure beside its bar."""

    name: str
    value: float
    bar: str
    is_met: bool
    detail: str


def spread(values: list[float]) -> str:
    """Least and greatest of a few values."""
    return f"{min(values):.3g} to {max(values):.3g}"


def processor() -> str:
    """The processor's name and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = "unknown processor"
    return f"{os.cpu_count()} x {name}, {torch.backends.cpu.get_cpu_capability()}"


def machine() -> dict[str, str]:
    """What decides about speed."""
    return {
        "processor": processor(),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "quail": quail.__version__,
    }
