"""Passes that do not fit into memory: the run goes on with smaller ones."""

from __future__ import annotations

from quail.errors import PlanError

LEAST_TOKENS = 64
"""Passes are not made smaller than this: what they still need is weights and pages, not working space."""

_PHRASES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of a forward pass says that memory was short, as torch says it on each device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


def smaller_budget(error: Exception, *, num_rows: int, least_tokens: int) -> int:
    """The token budget for the rest of a run after a pass did not fit into memory.

    Half of the largest pass then in flight: memory is short for all of them together.

    Args:
        error: what the pass failed with.
        num_rows: tokens of the largest pass in flight, the one that failed among them.
        least_tokens: fewest that the questions of the run need in one pass.

    Raises:
        PlanError: the pass cannot be made smaller.
    """
    least = max(LEAST_TOKENS, least_tokens)
    if num_rows <= least:
        said = str(error).strip().splitlines()
        raise PlanError(
            f"passes of up to {num_rows:,} tokens do not fit into memory, and passes of fewer than {least:,} "
            f"are not tried: {said[0] if said else type(error).__name__}",
            hint="free memory, or leave more of it beside the KV: EngineConfig(kv_memory=…)",
        ) from error
    return max(least, num_rows // 2)
