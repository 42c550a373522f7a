"""The native kernels as processors with fewer instructions run them: the same tests, another build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quail.kernels.build import LEVELS, Level, Unavailable, level_of

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/engine/test_kernels.py",
    "tests/engine/test_default_model.py::test_float32_answers_equal_transformers",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", LEVELS[1:], ids=lambda level: level.name)
def test_kernels_of_lesser_processors(level: Level) -> None:
    try:
        here = level_of()
    except Unavailable as missing:
        pytest.skip(str(missing))
    if LEVELS.index(here) >= LEVELS.index(level):
        pytest.skip(f"the tests run with {here.name} here")
    environment = os.environ | {"QUAIL_KERNELS": "native", "QUAIL_KERNELS_LEVEL": level.name}
    told = subprocess.run(
        [sys.executable, "-m", "quail", "doctor", "--no-rates"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = re.sub(r"\s+", " ", told.stdout)
    assert f"native {level.name}" in words
    assert ("(products by torch" in words) != level.has_products
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d\d passed", done.stdout)
