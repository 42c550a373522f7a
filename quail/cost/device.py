"""Rates of a device: measured once on a CPU and kept, from a table on a GPU."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quail.cost.roofline import Rates

if TYPE_CHECKING:
    import torch

ASSUMED = Rates(matmul_flops=1.5e11, attention_flops=5e10, memory_bytes=5e9)
"""Rates of a small CPU, where nothing was measured yet."""

GPU_RATES = {
    "A100": Rates(312e12, 150e12, 2.0e12),
    "H100": Rates(989e12, 400e12, 3.35e12),
    "H200": Rates(989e12, 400e12, 4.8e12),
    "L4": Rates(121e12, 50e12, 0.3e12),
    "L40S": Rates(362e12, 150e12, 0.86e12),
    "RTX 4090": Rates(165e12, 80e12, 1.0e12),
}
"""Peak bfloat16 products and memory bandwidth from the makers' data sheets; attention an estimate."""


def rates_of(
    device: torch.device, dtype: torch.dtype, cache_dir: Path, *, measure: bool = True, again: bool = False
) -> Rates:
    """Rates of a device.

    Args:
        device: where the model runs.
        dtype: what it runs in.
        cache_dir: where measured rates are kept.
        measure: measure a CPU that was not measured yet (about two seconds); otherwise `ASSUMED`.
        again: measure even if it was.
    """
    import torch

    if device.type == "cuda":
        return _gpu_rates(torch.cuda.get_device_name(device)) or GPU_RATES["A100"]
    kept = None if again else _read(_kept_at(cache_dir, dtype))
    if kept is not None:
        return kept
    if not measure:
        return ASSUMED
    rates = measure_cpu(dtype)
    _write(_kept_at(cache_dir, dtype), rates)
    return rates


def known_rates(device: torch.device, dtype: torch.dtype, cache_dir: Path) -> Rates | None:
    """Rates of a device that are known: from the table in bfloat16, or measured before. Measures nothing."""
    import torch

    if device.type == "cuda":
        return _gpu_rates(torch.cuda.get_device_name(device)) if dtype == torch.bfloat16 else None
    return _read(_kept_at(cache_dir, dtype)) if device.type == "cpu" else None


def _gpu_rates(name: str) -> Rates | None:
    """Rates of a GPU; of several names that fit, the longest says most (L40S, not L4)."""
    found = max((key for key in GPU_RATES if key in name), key=len, default=None)
    return None if found is None else GPU_RATES[found]


def _kept_at(cache_dir: Path, dtype: torch.dtype) -> Path:
    """Where the rates of this CPU are kept, for the threads that torch takes now."""
    import torch

    threads = torch.get_num_threads()
    return cache_dir / "rates" / f"{_processor()}-{threads}-{str(dtype).removeprefix('torch.')}.json"


def kept_rates(cache_dir: Path, dtype: str, threads: int | None = None) -> Rates | None:
    """Rates of this CPU that were measured before; torch is not needed.

    Args:
        cache_dir: where measured rates are kept.
        dtype: `float32` or `bfloat16`.
        threads: of the engine; None takes the measurement with the most threads.
    """
    count = "*" if threads is None else str(threads)
    paths = (cache_dir / "rates").glob(f"{_processor()}-{count}-{dtype}.json")
    paths_by_threads = sorted(paths, key=lambda path: int(path.stem.split("-")[-2]))
    return _read(paths_by_threads[-1]) if paths_by_threads else None


def measure_cpu(dtype: torch.dtype) -> Rates:
    """Measures a CPU: products of a pass's sizes, attention to itself and to a history, and copies larger
    than its caches.
    """
    import torch

    from quail.kernels.attention import flash

    with torch.inference_mode():
        hidden, wide, rows = 768, 3072, 1024
        left, weight = torch.ones(rows, hidden, dtype=dtype), torch.ones(wide, hidden, dtype=dtype)
        out = torch.empty(rows, wide, dtype=dtype)
        matmul = _seconds(lambda: torch.mm(left, weight.t(), out=out))
        length, heads, head_dim, num_far = 1024, 8, 64, 2048
        query = torch.ones(1, heads, length, head_dim, dtype=dtype)
        far = torch.ones(1, heads, num_far, head_dim, dtype=dtype)
        pairs = length * (length + 1) / 2 + length * num_far
        attention = _seconds(lambda: flash(query, query, query, True, head_dim**-0.5))
        attention += _seconds(lambda: flash(query, far, far, False, head_dim**-0.5))
        source = torch.ones(2**24, dtype=torch.float32)
        target = torch.empty_like(source)
        copy = _seconds(lambda: target.copy_(source))
    return Rates(
        matmul_flops=2.0 * rows * hidden * wide / matmul,
        attention_flops=4.0 * heads * pairs * head_dim / attention,
        memory_bytes=2.0 * source.numel() * 4 / copy,
    )


def _seconds(work: Callable[[], object], repeats: int = 9) -> float:
    """The shortest of a few runs, after one that warms up: what else runs here only ever adds time."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _processor() -> str:
    """A file name for this processor."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return "".join(c if c.isalnum() else "-" for c in name.strip())


def _read(path: Path) -> Rates | None:
    try:
        found = json.loads(path.read_text())
        rates = Rates(**{name: float(value) for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return rates if min(vars(rates).values()) > 0 else None


def _write(path: Path, rates: Rates) -> None:
    """Keeps rates; a folder that cannot be written is no reason to stop."""
    partial = path.with_suffix(f".{time.time_ns()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(vars(rates)))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
