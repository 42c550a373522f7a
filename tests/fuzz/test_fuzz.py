"""Damaged model files, statements and documents: each is read or refused in words, soon, within its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
FEW = {"sql": 100, "files": 80, "tokenizer": 300}
MANY = {
    "gguf": 13_000,
    "safetensors": 22_000,
    "index": 12_000,
    "config": 30_000,
    "tokenizer": 3_000,
    "sql": 800,
    "documents": 22_000,
    "files": 400,
}


def fuzz(name: str, first: int, count: int, seconds: float = 290) -> None:
    """Runs cases in a process of their own, which a crash may take down."""
    command = [sys.executable, "-m", "tests.fuzz", name, str(first), str(count)]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds
    )
    last = found.stderr.rsplit("\r", 1)[-1][:200]
    assert found.returncode == 0, f"{found.stdout}\n{last}\nexit status {found.returncode}"
    assert f"{name}: {count} cases" in found.stdout


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_damaged_inputs(name: str) -> None:
    fuzz(name, 0, FEW.get(name, 500))


@pytest.mark.slow
@pytest.mark.timeout(950)
@pytest.mark.parametrize("name", TARGETS)
def test_many_damaged_inputs(name: str) -> None:
    fuzz(name, 0, MANY[name], seconds=900)


def test_the_many_are_more_than_a_hundred_thousand() -> None:
    assert sum(MANY.values()) > 100_000
    assert MANY.keys() == TARGETS.keys()
