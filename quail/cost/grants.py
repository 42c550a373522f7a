"""What a session may take of a device's memory, and how large its passes are made in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quail.cost.budgets import (
    DEFAULT_KV_SHARE,
    DEFAULT_TOKEN_BUDGET,
    MemoryPlan,
    ModelShape,
    default_limit_bytes,
    plan_memory,
    size_words,
)
from quail.errors import PlanError

DEVICE_SHARE = 0.9
"""Share of a GPU's free memory that a session takes; libraries and the allocator's gaps have the rest."""

WORKING_SHARE = 0.25
"""Share of what weights leave of a GPU that the working space of a pass may take."""

PASSES_IN_PAGES = 4
"""Passes whose tokens a GPU's pages hold at least: two in flight, and as much again to be retained."""

MOST_DEVICE_BUDGET, LEAST_DEVICE_BUDGET = 2**14, 2**8
"""Rows a pass on a GPU, at most and at least. Products are as fast as they become well below the first, and a
cancelled query waits for the passes in flight."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU, in bytes."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Grant:
    """Memory that a session may take.

    Attributes:
        limit_bytes: of weights, working space and pages together.
        kv_share: of what weights and working space leave, what pages take where nothing is said.
        sizes_passes: whether the budget of a pass follows from memory where nothing is said.
        source: what the limit is, in words.
    """

    limit_bytes: int
    kv_share: float
    sizes_passes: bool
    source: str = ""

    def token_budget(self, shape: ModelShape, kv_bytes: int | None = None) -> int:
        """Most rows a pass where nothing is said.

        On a GPU the largest power of two, from `MOST_DEVICE_BUDGET` down to `LEAST_DEVICE_BUDGET`, whose
        working space takes at most `WORKING_SHARE` of what weights leave, and of whose passes the pages hold
        `PASSES_IN_PAGES`: so the cap on retained KV, which leaves room for two, is not 0.

        Args:
            shape: the model.
            kv_bytes: what the user grants to KV.
        """
        if not self.sizes_passes:
            return DEFAULT_TOKEN_BUDGET
        budget = MOST_DEVICE_BUDGET
        while budget > LEAST_DEVICE_BUDGET and not self._holds(shape, budget, kv_bytes):
            budget //= 2
        return budget

    def _holds(self, shape: ModelShape, budget: int, kv_bytes: int | None) -> bool:
        left = self.limit_bytes - shape.weight_bytes
        working = shape.working_bytes(budget)
        pages_bytes = math.floor((left - working) * self.kv_share) if kv_bytes is None else kv_bytes
        kv_tokens = pages_bytes // shape.page_bytes * shape.page_tokens
        return working <= WORKING_SHARE * left and kv_tokens >= PASSES_IN_PAGES * budget

    def plan(self, shape: ModelShape, *, token_budget: int, kv_bytes: int | None = None) -> MemoryPlan:
        """Divides the memory.

        Raises:
            PlanError: too little, with the numbers.
        """
        return plan_memory(
            shape,
            token_budget=token_budget,
            limit_bytes=self.limit_bytes,
            kv_bytes=kv_bytes,
            kv_share=self.kv_share,
            limit_source=self.source,
        )

    def check_weights(self, num_bytes: int) -> None:
        """Refuses weights that do not fit, before they are brought to the device.

        Raises:
            PlanError: names both sizes.
        """
        if num_bytes > self.limit_bytes:
            raise PlanError(
                f"the weights take {size_words(num_bytes)}, and the limit is {size_words(self.limit_bytes)}"
                + (f" ({self.source})" if self.source else ""),
                hint="take a smaller model, or free memory of the device; device = 'cpu' runs in the host's",
            )


def host_grant() -> Grant:
    """What a session may take of the host's memory, now."""
    return Grant(default_limit_bytes(), DEFAULT_KV_SHARE, sizes_passes=False)


def device_grant(memory: DeviceMemory) -> Grant:
    """What a session may take of a GPU's free memory: pages take all that weights and working space leave."""
    return Grant(
        math.floor(memory.free_bytes * DEVICE_SHARE),
        kv_share=1.0,
        sizes_passes=True,
        source=f"{DEVICE_SHARE:.0%} of the {size_words(memory.free_bytes)} that are free of the GPU's "
        f"{size_words(memory.total_bytes)}",
    )
