"""The kernels that tests run with: those of this machine, or plain ones."""

from __future__ import annotations

import pytest
import torch

from quail.config import EngineConfig
from quail.kernels import reference
from quail.kernels.choice import KernelChoice
from quail.kernels.interface import Kernels
from quail.kernels.reference import TorchKernels

CPU = torch.device("cpu")


def kernels_here(dtype: torch.dtype = torch.float32) -> Kernels:
    """What an engine would run with here; `QUAIL_KERNELS` may say otherwise."""
    config = EngineConfig()
    choice = KernelChoice.of(config.kernels, "cpu", config.cache_path).compiled(config.kernels)
    return choice.kernels(dtype, CPU, torch.get_num_threads())


def native_kernels(dtype: torch.dtype, threads: int = 2) -> Kernels:
    """The compiled kernels; skips the test where there are none, unless `QUAIL_KERNELS` is `native`."""
    config = EngineConfig()
    mode = "native" if config.kernels == "native" else "auto"
    choice = KernelChoice.of(mode, "cpu", config.cache_path).compiled(mode)
    if choice.build is None:
        pytest.skip(f"no native kernels here: {choice.reason}")
    return choice.kernels(dtype, CPU, threads)


def plain_kernels() -> TorchKernels:
    """The oracle."""
    return TorchKernels(reference.attend)
