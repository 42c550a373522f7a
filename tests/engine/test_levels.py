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
    "tests/engine/test_products.py",
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
    names = [each.name for each in LEVELS]
    if names.index(here.name) >= names.index(level.name):
        pytest.skip(f"the tests run with {here.name} here")
    environment = os.environ | {"QUAIL_KERNELS": "native", "QUAIL_KERNELS_LEVEL": level.name}
    told = subprocess.run(
        [sys.executable, "-m", "quail", "doctor", "--no-rates"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"native {level.name} (products by torch" in re.sub(r"\s+", " ", told.stdout)
    assert_tests_pass(environment)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_without_what_a_level_may_have_besides() -> None:
    try:
        extra_options = level_of().extra_options
    except Unavailable as missing:
        pytest.skip(str(missing))
    if not extra_options:
        pytest.skip("the tests run without it here")
    without = " ".join(option.replace("-m", "-mno-", 1) for option in extra_options)
    assert_tests_pass(os.environ | {"QUAIL_KERNELS": "native", "QUAIL_KERNELS_CXXFLAGS": without})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wanted", ["0", "1"])
def test_pairs_of_bfloat16_and_none(wanted: str) -> None:
    """Whichever this processor would not choose, too."""
    try:
        if "avx512_bf16" not in level_of().extras:
            pytest.skip("there are none here")
    except Unavailable as missing:
        pytest.skip(str(missing))
    flips = "tests/engine/test_default_model.py::test_bfloat16_flips_only_near_ties"
    assert_tests_pass(os.environ | {"QUAIL_KERNELS": "native", "QUAIL_KERNELS_PAIRS": wanted}, flips)


def assert_tests_pass(environment: dict[str, str], *more: str) -> None:
    """More tests than `TESTS` may be slow ones."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *more]
    command += ["-m", ""] if more else []
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d\d passed", done.stdout)
