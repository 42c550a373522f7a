"""Rates of a device: measured once on a CPU and kept, from a table on a GPU."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quail.cost.gpus import SourcedRates, own_rates, rates_of_card
from quail.cost.roofline import NORM_MOVES, Rates

if TYPE_CHECKING:
    import torch

    from quail.kernels.interface import Kernels

ASSUMED = Rates(matmul_flops=1.5e11, attention_flops=5e10, memory_bytes=5e9)
"""Rates of a small CPU, where nothing was measured yet."""


def gpu_rates(device: torch.device, dtype: str, cache_dir: Path) -> SourcedRates:
    """Rates of a device that is not a CPU: of a CUDA device by its name, `ASSUMED` of others.

    Raises:
        ConfigError: the user's file of rates is not what it should be.
    """
    if device.type != "cuda":
        return SourcedRates(ASSUMED, f"assumed: nothing is known of {device.type}", is_known=False)
    import torch

    return rates_of_card(torch.cuda.get_device_name(device), dtype, own_rates(cache_dir))


class DeviceRates:
    """Rates of the device of a session.

    Those of a GPU are read when this is made, so that a fault in the user's file stops no query at its end.
    Those of a CPU are read when they are asked for: they may be measured meanwhile.

    Args:
        device: where the model runs.
        dtype: what it runs in.
        cache_dir: where measured rates and the user's are kept.

    Raises:
        ConfigError: the user's file of rates is not what it should be.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, cache_dir: Path) -> None:
        self._device, self._dtype, self._cache_dir = device, dtype, cache_dir
        self._card = None if device.type == "cpu" else gpu_rates(device, _dtype_word(dtype), cache_dir)
        self._found: Rates | None = None

    def known(self, kernels: Kernels) -> Rates | None:
        """As `known_rates`."""
        if self._card is not None:
            return self._card.known
        return known_rates(self._device, self._dtype, self._cache_dir, kernels)

    def found(self, kernels: Kernels) -> Rates:
        """As `rates_of`; a CPU is measured at most once."""
        if self._card is not None:
            return self._card.rates
        if self._found is None:
            self._found = rates_of(self._device, self._dtype, self._cache_dir, kernels)
        return self._found


def rates_of(
    device: torch.device, dtype: torch.dtype, cache_dir: Path, kernels: Kernels, *, again: bool = False
) -> Rates:
    """Rates of a device; those of a CPU are measured once (about two seconds) and kept.

    Args:
        device: where the model runs.
        dtype: what it runs in.
        cache_dir: where measured rates are kept.
        kernels: what it runs with; the rates of each version are kept apart.
        again: measure even if it was.
    """
    if device.type != "cpu":
        return gpu_rates(device, _dtype_word(dtype), cache_dir).rates
    path = _kept_at(cache_dir, dtype, kernels.version)
    kept = None if again else _read(path)
    if kept is not None:
        return kept
    rates = measure_cpu(dtype, kernels)
    _write(path, rates)
    return rates


def known_rates(device: torch.device, dtype: torch.dtype, cache_dir: Path, kernels: Kernels) -> Rates | None:
    """Rates of a device that are known: from a table or the user, or measured before. Measures nothing."""
    if device.type != "cpu":
        return gpu_rates(device, _dtype_word(dtype), cache_dir).known
    return _read(_kept_at(cache_dir, dtype, kernels.version))


def _dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kept_at(cache_dir: Path, dtype: torch.dtype, kernels: str) -> Path:
    """Where the rates of this CPU are kept, for the threads that torch takes now."""
    import torch

    threads = str(torch.get_num_threads())
    return cache_dir / "rates" / _file_name(kernels, threads, _dtype_word(dtype))


def kept_rates(cache_dir: Path, dtype: str, kernels: str, threads: int | None = None) -> Rates | None:
    """Rates of this CPU that were measured before; torch is not needed.

    Args:
        cache_dir: where measured rates are kept.
        dtype: `float32`, `bfloat16` or `int8`.
        kernels: version of the kernels.
        threads: of the engine; None takes the measurement with the most threads.
    """
    count = "*" if threads is None else str(threads)
    paths = (cache_dir / "rates").glob(_file_name(kernels, count, dtype))
    fitting = [path for path in paths if path.name == _file_name(kernels, _threads_of(path), dtype)]
    return _read(max(fitting, key=lambda path: int(_threads_of(path)))) if fitting else None


def measure_cpu(dtype: torch.dtype, kernels: Kernels) -> Rates:
    """Measures a CPU with the kernels that run there.

    Products of a pass's sizes, attention to itself and to a history, a norm for what moves rows between
    products, and copies larger than its caches.
    """
    import torch

    from quail.kernels.interface import state_dtype

    dtype = state_dtype(dtype)
    with torch.inference_mode():
        hidden, wide, rows = 768, 3072, 1024
        left = torch.ones(rows, hidden, dtype=dtype)
        weight = kernels.matrix([torch.ones(wide, hidden, dtype=dtype)])
        out = torch.empty(rows, wide, dtype=dtype)
        matmul = _seconds(lambda: kernels.product(left, weight, None, out))
        length, heads, head_dim, num_far = 1024, 8, 64, 2048
        attention = _seconds(_attention(kernels, dtype, length, heads, head_dim, num_far))
        pairs = length * (length + 1) / 2 + length * num_far
        states, ones = torch.ones(rows, wide), torch.ones(wide)
        norm = _seconds(lambda: kernels.norm(states, ones, 1e-5, out))
        source = torch.ones(2**24, dtype=torch.float32)
        target = torch.empty_like(source)
        copy = _seconds(lambda: target.copy_(source))
    return Rates(
        matmul_flops=2.0 * rows * hidden * wide / matmul,
        attention_flops=4.0 * heads * pairs * head_dim / attention,
        memory_bytes=2.0 * source.numel() * 4 / copy,
        row_bytes=float(NORM_MOVES) * states.numel() * dtype.itemsize / norm,
    )


def _attention(
    kernels: Kernels, dtype: torch.dtype, length: int, heads: int, head_dim: int, num_far: int
) -> Callable[[], object]:
    """Attention of one segment to a history in pages and to itself, ready to be called."""
    import numpy as np
    import torch

    from quail.execution.chunk import BlockTable, Segments
    from quail.kv.pages import PAGE_TOKENS

    num_pages = num_far // PAGE_TOKENS
    q = torch.ones(length, heads, head_dim, dtype=dtype)
    pages = torch.ones(num_pages, PAGE_TOKENS, heads, head_dim, dtype=dtype)
    segments = Segments(np.array([0]), np.array([length]), np.array([0]), np.array([num_far]))
    table = BlockTable.of([list(range(num_pages))])
    return lambda: kernels.attend(q, q, q, pages, pages, segments, table, scale=head_dim**-0.5)


def _seconds(work: Callable[[], object], repeats: int = 9) -> float:
    """The shortest of a few runs, after one that warms up: what else runs here only ever adds time."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _file_name(kernels: str, threads: str, dtype: str) -> str:
    """Of the rates of this processor; `threads` may be a wildcard."""
    words = f"{_processor()}-{kernels}"
    return f"{''.join(c if c.isalnum() else '-' for c in words)}-{threads}-{dtype}.json"


def _threads_of(path: Path) -> str:
    return path.stem.split("-")[-2]


def _processor() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return name.strip()


def _read(path: Path) -> Rates | None:
    try:
        found = json.loads(path.read_text())
        rates = Rates(**{name: float(value) for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return rates if min(rate for rate in vars(rates).values() if rate is not None) > 0 else None


def _write(path: Path, rates: Rates) -> None:
    """Keeps rates; a folder that cannot be written is no reason to stop."""
    partial = path.with_suffix(f".{time.time_ns()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({name: rate for name, rate in vars(rates).items() if rate is not None}))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
