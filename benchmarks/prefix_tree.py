"""The prefix tree over one million documents of 300 tokens, a third of which share a beginning."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import numpy as np

from benchmarks.lines import Line
from quail.kv.prefix_sharing import PrefixTree

NUM_DOCUMENTS = 1_000_000
DOCUMENT_TOKENS = 300
FAMILY = 10
"""Documents of one common beginning."""

MOST_SECONDS = 60.0
MOST_GIB = 4.0


def documents(num_documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat ids and offsets of documents in random order.

    A third comes in families whose members begin alike for 20 to 299 tokens.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 49_152, (num_documents, DOCUMENT_TOKENS), dtype=np.int32)
    rows = rng.permutation(num_documents)[: num_documents // 3]
    for start in range(0, len(rows) - FAMILY, FAMILY):
        members = rows[start : start + FAMILY]
        common = int(rng.integers(20, DOCUMENT_TOKENS))
        ids[members, :common] = ids[members[0], :common]
    offsets = np.arange(num_documents + 1, dtype=np.int64) * DOCUMENT_TOKENS
    return ids.reshape(-1), offsets


def build(num_documents: int) -> tuple[float, float, int]:
    """Seconds, GiB beside the tokens at the peak, and tokens shared; for a process of its own."""
    ids, offsets = documents(num_documents)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * page_bytes
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    tree = PrefixTree.build_flat(ids, offsets)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak > peak_before, "the tokens took more memory than the tree"
    return seconds, (peak - before) / 2**30, tree.num_shared_tokens


def measure(*, num_documents: int = NUM_DOCUMENTS) -> list[Line]:
    """Both lines, from a fresh process, so that nothing else counts as memory of the tree."""
    command = [sys.executable, "-m", "benchmarks.prefix_tree", str(num_documents)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, gib, shared = (float(word) for word in done.stdout.split())
    what = f"{num_documents:,} documents of {DOCUMENT_TOKENS} tokens, {shared:,.0f} tokens shared"
    return [
        Line("prefix tree, seconds", seconds, f"< {MOST_SECONDS:g}", seconds < MOST_SECONDS, what),
        Line(
            "prefix tree, GiB beside the tokens",
            gib,
            f"< {MOST_GIB:g}",
            gib < MOST_GIB,
            "peak of the process",
        ),
    ]


if __name__ == "__main__":
    print(*build(int(sys.argv[1])))
