"""What all tests share: GPU tests are skipped without a GPU, and a fetch of the default model is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quail.config import EngineConfig
from quail.models.registry import list_models

DEFAULT_MODEL = "smollm2-135m"


def _model_path() -> Path | None:
    return next(each.path for each in list_models(EngineConfig().cache_path) if each.name == DEFAULT_MODEL)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_HAD_MODEL] = _model_path() is not None
    # Tests with a cache of their own do not compile the native kernels anew.
    os.environ.setdefault("QUAIL_KERNELS_DIR", str(EngineConfig().cache_path / "kernels"))


_HAD_MODEL = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = _model_path()
    if path is not None and not config.stash[_HAD_MODEL]:
        terminalreporter.write_line(f"a test had to fetch the model {DEFAULT_MODEL}; it lies at {path} now")
