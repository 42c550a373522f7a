"""What `quail doctor` and `quail models` print."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from quail import __version__
from quail.config import EngineConfig
from quail.cost.budgets import available_bytes, container_limit_bytes
from quail.models import registry

_LIBRARIES = ("torch", "triton", "duckdb", "pyarrow", "numpy", "tokenizers", "gguf", "transformers")


def print_doctor(config: EngineConfig, *, with_rates: bool) -> None:
    """Versions, device, memory and, if asked, rates."""
    print(f"quail {__version__} on Python {platform.python_version()}, {platform.platform()}")
    print("libraries: " + ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES))
    print(f"cache: {config.cache_path}")
    limit = container_limit_bytes()
    print(
        f"memory: {_gib(available_bytes())} available"
        + ("" if limit is None else f", container limit {_gib(limit)}")
    )
    print(
        f"processors: {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    )
    for known in registry.list_models(config.cache_path):
        print(f"model: {known.name}, {'fetched' if known.path else 'not fetched yet'}")
    from quail.models.device import probe_device

    for name, fact in probe_device(config, with_rates=with_rates).items():
        print(f"{name}: {fact}")


def measure_rates(config: EngineConfig) -> None:
    """Measures the rates of the cost model anew, keeps them for later sessions and prints them."""
    from quail.models.device import measured_rates

    rates, about = measured_rates(config)
    figures = {
        "matrix products": f"{rates.matmul_flops / 1e9:,.0f} GFLOP/s",
        "attention": f"{rates.attention_flops / 1e9:,.0f} GFLOP/s",
        "memory": f"{rates.memory_bytes / 1e9:,.1f} GB/s",
    }
    shown = ", ".join(f"{name} {figure}" for name, figure in figures.items())
    print(f"{about}: {shown}")


def print_models(config: EngineConfig) -> None:
    """One line a known model."""
    for known in registry.list_models(config.cache_path):
        state = "fetched" if known.path else "not fetched"
        print(f"{known.name:<16} {known.num_bytes / 1e6:>7,.0f} MB  {state:<12} {known.description}")


def fetch_model(config: EngineConfig) -> None:
    """Fetches a known model; prints where it lies."""
    print(registry.fetch(config.model, config.cache_path, print))


def print_model(config: EngineConfig) -> None:
    """What is known of one model, a fact a line."""
    info = registry.info(config.model, config.cache_path)
    size = "unknown" if info.num_parameters is None else f"{info.num_parameters:,}"
    facts = {
        "model": info.name,
        "description": info.description,
        "licence": info.licence,
        "parameters": size,
        "layout": info.layout,
        "size": f"{info.num_bytes:,} bytes",
        "path": info.path or "not fetched",
        **info.details,
    }
    for name, fact in facts.items():
        print(f"{name + ':':<16} {fact}")


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
