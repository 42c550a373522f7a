"""How much memory there is, and how it is divided into weights, working space and KV pages."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from quail.errors import PlanError
from quail.kv.pages import PAGE_TOKENS

DEFAULT_TOKEN_BUDGET = 2048
"""Most rows a pass when nothing is said."""

AVAILABLE_SHARE = 0.6
"""Share of the available memory that a session takes at most when nothing is said."""

IMPORT_BASELINE_BYTES = 350 * 2**20
"""What Python with torch, DuckDB and Arrow takes before a model is loaded (measured: about 340 MB)."""

DEFAULT_KV_SHARE = 0.5
"""Share of what is left beside weights and working space that KV takes when nothing is said."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide about memory and time.

    Attributes:
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size: as in the architecture.
        context_tokens: longest prompt.
        element_bytes: bytes of one weight or KV element.
        weight_bytes: bytes of all weights.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_tokens: int
    element_bytes: int
    weight_bytes: int

    @property
    def page_tokens(self) -> int:
        """Tokens of one page."""
        return PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers for `PAGE_TOKENS` tokens."""
        return 2 * self.num_layers * PAGE_TOKENS * self.num_kv_heads * self.head_dim * self.element_bytes

    def gathered_tokens(self, token_budget: int) -> int:
        """Tokens whose KV attention may copy from pages at a time: a whole context, or that of two passes."""
        return max(self.context_tokens, 2 * token_budget)

    def working_bytes(self, token_budget: int) -> int:
        """Bytes that a pass of `token_budget` rows needs beside weights and pages.

        Counted in full: the buffers of a layer, the rotation table, attention's output and its copies, the KV
        rows picked for writing, `gathered_tokens`, and float32 states at every row.
        """
        kv_width = self.num_kv_heads * self.head_dim
        q_width = self.num_heads * self.head_dim
        row_elements = 2 * self.hidden_size + (q_width + 2 * kv_width) + (q_width + kv_width)
        row_elements += 2 * self.intermediate_size + self.head_dim
        row_elements += 4 * q_width + 2 * kv_width
        row_bytes = row_elements * self.element_bytes + 4 * (2 * self.hidden_size + 2 * q_width)
        return (
            token_budget * row_bytes + 2 * self.gathered_tokens(token_budget) * kv_width * self.element_bytes
        )


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is divided; all sizes in bytes.

    Attributes:
        limit_bytes: what weights, working space and pages may take together.
        weight_bytes: the model's weights.
        working_bytes: the working space of a pass.
        page_bytes: one page.
        num_pages: pages of the arena.
    """

    limit_bytes: int
    weight_bytes: int
    working_bytes: int
    page_bytes: int
    num_pages: int

    @property
    def arena_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def plan_memory(
    shape: ModelShape,
    *,
    token_budget: int,
    limit_bytes: int,
    kv_bytes: int | None = None,
    kv_share: float = DEFAULT_KV_SHARE,
    limit_source: str = "",
) -> MemoryPlan:
    """Divides a memory limit.

    pages = floor((limit - weights - working space) / page bytes). With `kv_bytes` the limit is just weights,
    working space and that much KV; without, KV takes `kv_share` of what is left.

    Args:
        shape: the model.
        token_budget: most rows a pass.
        limit_bytes: what the machine or its container grants.
        kv_bytes: what the user grants to KV.
        kv_share: of what weights and working space leave.
        limit_source: what the limit is, for the message.

    Raises:
        PlanError: too little is left for one page of KV, or more KV is asked for than fits.
    """
    working = shape.working_bytes(token_budget)
    left = limit_bytes - shape.weight_bytes - working
    limit = size_words(limit_bytes) + (f" ({limit_source})" if limit_source else "")
    sizes = (
        f"the limit of {limit} less {size_words(shape.weight_bytes)} of weights and {size_words(working)} "
        f"of working space for passes of {token_budget} tokens leaves {size_words(max(0, left))}"
    )
    if kv_bytes is not None:
        if kv_bytes > left:
            raise PlanError(
                f"kv_memory = {size_words(kv_bytes)} does not fit: {sizes}",
                hint="lower kv_memory or token_budget, or use a smaller model",
            )
        limit_bytes = shape.weight_bytes + working + kv_bytes
    else:
        limit_bytes = shape.weight_bytes + working + math.floor(max(0, left) * kv_share)
    num_pages = math.floor((limit_bytes - shape.weight_bytes - working) / shape.page_bytes)
    if num_pages < 1:
        raise PlanError(
            f"no room for KV: one page of {PAGE_TOKENS} tokens takes {size_words(shape.page_bytes)}, "
            + (f"kv_memory is {size_words(kv_bytes)}" if kv_bytes is not None else sizes),
            hint="raise kv_memory (64MiB is plenty for short documents), lower token_budget, or take a "
            "smaller model",
        )
    return MemoryPlan(limit_bytes, shape.weight_bytes, working, shape.page_bytes, num_pages)


def available_bytes() -> int:
    """Memory that this process may still take: the machine's available memory or what its container
    leaves.
    """
    found = [_machine_available_bytes()]
    limit = container_limit_bytes()
    if limit is not None:
        found.append(max(0, limit - _container_used_bytes()))
    return min(found)


def default_limit_bytes() -> int:
    """The memory limit when nothing is said: `AVAILABLE_SHARE` of what is available, less the import
    baseline.
    """
    return max(0, math.floor(available_bytes() * AVAILABLE_SHARE) - IMPORT_BASELINE_BYTES)


def container_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of the container (cgroup v2 or v1), None without one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        value = _read_number(root / name)
        if value is not None and value < 2**60:
            return value
    return None


def _container_used_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        value = _read_number(root / name)
        if value is not None:
            return value
    return 0


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _machine_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size_words(num_bytes: int) -> str:
    """A size for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
