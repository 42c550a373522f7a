"""The engines that are measured, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import ready
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.tokens import Document

ROOT = Path(__file__).parents[2]
ADAPTERS = Path(__file__).parent / "adapters"
QUAIL = "quail"
SYSTEM_LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))


@dataclass(frozen=True)
class EngineSpec:
    """An engine.

    Attributes:
        name: short name; `adapters/run_NAME.py` speaks for it.
        title: for people.
        adapter: the name whose adapter it shares, or empty.
        dtype: of its products, where it is not the one that all have.
        has_environment: whether it runs in an environment of its own, else in Quail's.
        is_sampled: whether it is slow and answers the first documents of a workload only.
        reuses_kv: whether a document is computed once for all its questions; tells what a sample costs.
        preloads: libraries that make it faster where they are found, in its environment or on the system.
    """

    name: str
    title: str
    adapter: str = ""
    dtype: str = ""
    has_environment: bool = False
    is_sampled: bool = False
    reuses_kv: bool = True
    preloads: tuple[str, ...] = ()

    def start(self, cache: Path, *, say: Callable[[str], None], build_jobs: int | None) -> PeerProcess:
        """Starts its process, after its environment was made ready.

        Raises:
            CannotInstall: its environment cannot be made.
        """
        python = Path(sys.executable)
        if self.has_environment:
            python = ready(self.name, cache, say=say, build_jobs=build_jobs)
        command = [str(python), str(self.script)]
        environment = {} if self.has_environment else {"PYTHONPATH": str(ROOT)}
        found = [path for name in self.preloads if (path := library(name, python.parents[1] / "lib"))]
        if found:
            environment["LD_PRELOAD"] = ":".join(found)
        binaries = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return PeerProcess(
            self.title,
            command,
            cache / "peers" / "logs" / f"{self.name}.log",
            environment | {"PATH": binaries},
        )

    @property
    def script(self) -> Path:
        """What speaks for it."""
        return ADAPTERS / f"run_{self.adapter or self.name}.py"

    @property
    def runs_statements(self) -> bool:
        """Whether it is asked in SQL: Quail, whatever its dtype."""
        return QUAIL in (self.name, self.adapter)

    def sample(self, documents: Sequence[Document], most_tokens: int) -> list[Document]:
        """The documents that it is asked about: all, or the first whose tokens reach a number.

        Args:
            documents: of a workload.
            most_tokens: that a sampled engine computes, about. The number of documents is even, since every
                other one has further questions, unless that would be twice as much.
        """
        if not self.is_sampled:
            return list(documents)
        chosen: list[Document] = []
        tokens = 0
        for document in documents:
            if tokens >= (2 * most_tokens if len(chosen) % 2 else most_tokens):
                break
            chosen.append(document)
            tokens += self.tokens_of(document)
        return chosen

    def tokens_of(self, document: Document) -> int:
        """About how many tokens a document costs."""
        if not self.reuses_kv:
            return document.prompt_tokens(range(len(document.steps)))
        questions = sum(len(step.frame) + sum(map(len, step.tails)) for step in document.steps)
        return len(document.ids) + questions


def library(name: str, folder: Path) -> str | None:
    """A shared library of a folder or of the system; None where there is none."""
    for place in (folder, *SYSTEM_LIBRARIES):
        if (place / name).is_file():
            return str(place / name)
    return None


ENGINES = {
    spec.name: spec
    for spec in (
        EngineSpec(QUAIL, "Quail"),
        EngineSpec("quail_int8", "Quail, int8", adapter=QUAIL, dtype="int8"),
        EngineSpec(
            "vllm",
            "vLLM",
            has_environment=True,
            preloads=("libiomp5.so", "libtcmalloc_minimal.so.4"),
        ),
        EngineSpec("llama_cpp", "llama.cpp", has_environment=True, is_sampled=True),
        EngineSpec("transformers", "transformers", is_sampled=True, reuses_kv=False),
    )
}
