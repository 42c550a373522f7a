"""The kernels that tests run with: those of this machine, or plain ones."""

from __future__ import annotations

import pytest
import torch

from quail.config import EngineConfig
from quail.kernels import reference
from quail.kernels.build import Build
from quail.kernels.c_interface import Format
from quail.kernels.choice import KernelChoice
from quail.kernels.compiled import PackedKernels
from quail.kernels.cuda import Card, CudaKernels
from quail.kernels.interface import Kernels
from quail.kernels.reference import TorchKernels
from tests.engine.varlen_twin import varlen_twin

CPU = torch.device("cpu")


def kernels_here(dtype: torch.dtype = torch.float32) -> Kernels:
    """What an engine would run with here; `QUAIL_KERNELS` may say otherwise."""
    config = EngineConfig()
    choice = KernelChoice.of(config.kernels, "cpu", config.cache_path).compiled(config.kernels)
    return choice.kernels(dtype, CPU, torch.get_num_threads())


def native_choice() -> tuple[KernelChoice, Build]:
    """The compiled kernels' choice; skips the test where there are none, unless `QUAIL_KERNELS` is `native`."""
    config = EngineConfig()
    mode = "native" if config.kernels == "native" else "auto"
    choice = KernelChoice.of(mode, "cpu", config.cache_path).compiled(mode)
    if choice.build is None:
        pytest.skip(f"no native kernels here: {choice.reason}")
    return choice, choice.build


def native_kernels(dtype: torch.dtype, threads: int = 2) -> Kernels:
    """The compiled kernels for a dtype; skips the test where there are none."""
    choice, _ = native_choice()
    skip_without(dtype, choice)
    return choice.kernels(dtype, CPU, threads)


def has_pairs(build: Build) -> bool:
    """Whether a build is compiled for AVX-512 BF16: what a level may have besides can be switched off."""
    return "avx512_bf16" in build.level.extras and "-mno-avx512bf16" not in build.more_options()


def packed_kernels(format: Format, threads: int = 2) -> PackedKernels:
    """The compiled kernels with products in a format, whatever is fastest; skips the test where there are none."""
    _, build = native_choice()
    level = build.level
    if not level.has_products:
        pytest.skip(f"no products with the kernels of {level.name}")
    if format == Format.BFLOAT16 and not has_pairs(build):
        pytest.skip("no pairs of bfloat16 here")
    return PackedKernels(build.path, threads, format=format)


def skip_without(dtype: torch.dtype, choice: KernelChoice) -> None:
    """Skips the test where the kernels of a choice have no products in a dtype."""
    if dtype == torch.int8 and choice.build is not None and not choice.build.level.has_products:
        pytest.skip(f"no int8 with the kernels of {choice.build.level.name}")


def plain_kernels() -> TorchKernels:
    """The oracle."""
    return TorchKernels(reference.attend)


CUDA_DEVICES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", id="on a card", marks=pytest.mark.gpu),
]
"""Where the kernels for CUDA are tried: through Triton's interpreter, and compiled."""


class WillingCard(Card):
    """A card that takes every attention path in every dtype: on a CPU a twin stands in for `varlen_attn`."""

    def missing_for(self, path: str, dtype: torch.dtype, head_dim: int | None = None) -> str:
        return ""


def cuda_device(name: str) -> torch.device:
    """The device of a test of the kernels for CUDA; skips it where Triton cannot run."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if name == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for a card here; TRITON_INTERPRET=1 interprets it on the CPU")
    return torch.device(name)


def cuda_kernels(
    dtype: torch.dtype, device: torch.device, attention: str = "auto", *, has_triton: bool = True
) -> CudaKernels:
    """The kernels for CUDA on a card, or all but `varlen_attn` on a CPU."""
    if device.type == "cuda":
        return CudaKernels(Card.here(has_triton=has_triton), dtype, device, attention=attention)
    card = WillingCard((9, 0), (2, 13), has_triton)
    return CudaKernels(card, dtype, device, attention=attention, varlen=varlen_twin)
