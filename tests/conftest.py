"""What all tests share: GPU tests are skipped without a GPU, and a fetch of the default model is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quail.config import EngineConfig
from quail.models.registry import list_models

DEFAULT_MODEL = "smollm2-135m"
CARD_FILES = ("/dev/nvidia0", "/dev/dxg")
NO_CARD = "no CUDA device"
ALONE = {"alone", "gpu"}  # two processes would share out the memory of one card


def _model_path() -> Path | None:
    return next(each.path for each in list_models(EngineConfig().cache_path) if each.name == DEFAULT_MODEL)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_HAD_MODEL] = _model_path() is not None
    # Tests with a cache of their own do not compile the native kernels anew.
    os.environ.setdefault("QUAIL_KERNELS_DIR", str(EngineConfig().cache_path / "kernels"))
    # Triton asks at its first import. Where there is a card, its kernels are compiled for it.
    if not any(Path(each).exists() for each in CARD_FILES):
        os.environ.setdefault("TRITON_INTERPRET", "1")


_HAD_MODEL = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone",
        choices=["no", "only"],
        help="leave out tests marked `alone` or `gpu`, or all others; otherwise all run",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.alone:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[bool(ALONE & {mark.name for mark in item.iter_markers()})].append(item)
        wanted = config.option.alone == "only"
        items[:] = parts[wanted]
        config.hook.pytest_deselected(items=parts[not wanted])
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason=NO_CARD))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    without_card = [each for each in terminalreporter.getreports("skipped") if NO_CARD in str(each.longrepr)]
    if without_card and config.option.markexpr == "gpu":
        terminalreporter.write_line(f"skipped: {NO_CARD} ({len(without_card)} tests)")
    path = _model_path()
    if path is not None and not config.stash[_HAD_MODEL]:
        terminalreporter.write_line(f"a test had to fetch the model {DEFAULT_MODEL}; it lies at {path} now")
