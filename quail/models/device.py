"""Devices and number formats: what a configuration asks for, and what this machine has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quail.config import EngineConfig
from quail.cost.budgets import available_bytes, size_words
from quail.cost.device import gpu_rates, rates_of
from quail.cost.grants import DeviceMemory, Grant, device_grant, host_grant
from quail.cost.roofline import Rates
from quail.errors import ConfigError
from quail.kernels.build import has_tiles
from quail.kernels.choice import KernelChoice

if TYPE_CHECKING:
    import torch


def device_of(name: str) -> torch.device:
    """The device of a configuration.

    Raises:
        ConfigError: torch finds no such device here.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (name == "cuda" and not torch.cuda.is_available()) or (
        name == "mps" and not torch.backends.mps.is_available()
    ):
        raise ConfigError(
            f"device = {name!r}, but torch {torch.__version__} finds no such device here",
            hint="device = 'auto' takes what there is",
        )
    return torch.device(name)


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of a CUDA device; what torch holds for this process without use counts as free."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(free_bytes + unused_bytes, total_bytes)


def grant_of(device: torch.device) -> Grant:
    """What a session may take of a device's memory now; `mps` shares the host's."""
    return device_grant(device_memory(device)) if device.type == "cuda" else host_grant()


def _memory_words(device: torch.device) -> str:
    grant = grant_of(device)
    return f"{grant.limit_bytes / 2**30:.1f} GiB of " + (
        size_words(device_memory(device).free_bytes)
        if device.type == "cuda"
        else f"{available_bytes() / 2**30:.1f}"
    )


def dtype_of(name: str, device: torch.device, kernels: KernelChoice) -> torch.dtype:
    """The dtype of a configuration on a device, as of its products; `state_dtype` is that of the rest.

    Raises:
        ConfigError: int8 where it cannot run.
    """
    import torch

    found: torch.dtype = getattr(torch, dtype_name(name, device.type, kernels))
    return found


def dtype_name(name: str, device_type: str, kernels: KernelChoice) -> str:
    """`auto` is bfloat16 where that is faster, else float32.

    It is faster on GPUs that have it (compute capability 8.0), on CPUs with matrix tiles (AMX), and where the
    native kernels multiply bfloat16 rows. By torch alone, without tiles, bfloat16 products took twice as long
    as float32 ones (measured). `int8` is never chosen: it is less exact.

    Raises:
        ConfigError: int8 on a device that is no CPU, or for native kernels of a processor that lacks it.
    """
    if name == "int8":
        fault = "" if device_type == "cpu" else f"this is device {device_type!r}"
        if kernels.build is not None and not kernels.build.level.has_products:
            fault = f"the kernels here are {kernels.name}"
        if fault:
            raise ConfigError(
                f"dtype = 'int8' is for CPUs with AVX-512 VNNI; {fault}",
                hint="dtype = 'auto' takes what is fast; on any CPU kernels = 'reference' runs int8 slowly",
            )
    if name == "auto" and device_type == "cuda":
        return "bfloat16" if _has_bfloat16() else "float32"
    if name == "auto":
        return "bfloat16" if device_type != "cpu" or has_tiles() or kernels.multiplies else "float32"
    return name


def _has_bfloat16() -> bool:
    """Whether the CUDA device multiplies bfloat16 itself; torch imitates it slowly on older ones."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def probe_device(config: EngineConfig, *, with_rates: bool = False) -> dict[str, str]:
    """What `quail doctor` tells about the device, without loading a model.

    Args:
        config: device, dtype and threads.
        with_rates: measure matrix products too (a second or two).
    """
    import torch

    device = device_of(config.device)
    choice = KernelChoice.of(config.kernels, device.type, config.cache_path, config.attention).compiled(
        config.kernels
    )
    dtype = dtype_of(config.dtype, device, choice)
    facts = {
        "device": device.type,
        "kernels": choice.description,
        "dtype": dtype_word(dtype) + (" (chosen)" if config.dtype == "auto" else ""),
        "threads": str(config.threads or torch.get_num_threads()),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "memory for a session": _memory_words(device),
    }
    if with_rates:
        for each in (torch.float32, torch.bfloat16):
            rate = _rate_of_products(each, device)
            facts[f"matrix products in {dtype_word(each)}"] = f"{rate / 1e9:.0f} GFLOP/s"
    return facts


def measured_rates(config: EngineConfig) -> tuple[Rates, str]:
    """Rates of the cost model, and of what they are: a CPU's are measured anew and kept, a GPU's come from
    the user's file or a table, or are those of another card.
    """
    import torch

    device = device_of(config.device)
    choice = KernelChoice.of(config.kernels, device.type, config.cache_path, config.attention).compiled(
        config.kernels
    )
    dtype = dtype_of(config.dtype, device, choice)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    kernels = choice.kernels(dtype, device, torch.get_num_threads())
    if device.type == "cpu":
        rates, source = rates_of(device, dtype, config.cache_path, kernels, again=True), "measured and kept"
    else:
        found = gpu_rates(device, dtype_word(dtype), config.cache_path)
        rates, source = found.rates, found.source
    return rates, f"rates of {device.type} in {dtype_word(dtype)} with {kernels.name} kernels, {source}"


def _rate_of_products(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of a product as large as a pass's, the median of a few."""
    import torch

    rows, inner, columns = 1024, 1024, 2048
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(columns, inner, dtype=dtype, device=device)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        float((left @ right.t())[0, 0])  # reading a value waits for the device
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / sorted(seconds)[2]


def dtype_word(dtype: torch.dtype) -> str:
    """A dtype as settings and reports name it."""
    return str(dtype).removeprefix("torch.")
