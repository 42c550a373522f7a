"""`python -m benchmarks profile`: where the time of a run goes, operator by operator, on a CPU.

Kernels, model and head are wrapped in clocks; what remains of a run is work of the host. Three statements: a
first question, a question about documents whose KV is held, a join.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import quail
from benchmarks import lines
from benchmarks.clauses import CLAUSES
from benchmarks.pages import write_section
from benchmarks.peers.tables import table
from benchmarks.peers.tokens import Compiler
from benchmarks.peers.workloads import chapters, numbered
from quail.config import EngineConfig
from quail.execution.reads import AnsweringAtOnce
from quail.execution.runner import Engine
from quail.kernels.interface import Kernels, Matrix

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
SECTION = "profile"
PRODUCTS = ("qkv", "out", "gate_up", "down")
OPERATORS = ("embedding", *PRODUCTS, "attention", "norm", "rotate", "final_norm", "other", "head", "host")
MEANINGS = {
    "embedding": "embedding, positions, slots",
    "qkv": "product qkv",
    "out": "product out, residual",
    "gate_up": "product gate and up, activation",
    "down": "product down, residual",
    "attention": "attention",
    "norm": "norms",
    "rotate": "rotary positions, KV into pages",
    "final_norm": "rows to read, final norm",
    "other": "between the kernels",
    "head": "head",
    "host": "host: tokens, packing, decisions",
}
FIRST = r"SELECT d.id FROM docs d WHERE AI.IF(PROMPT(E'{0}\n\nIs this about the sea?', d.text))"
SECOND = r"SELECT d.id FROM docs d WHERE AI.IF(PROMPT(E'{0}\n\nDoes anybody speak in this text?', d.text))"
JOIN = (
    "SELECT d.id, c.id FROM docs d, clauses c "
    "WHERE AI.IF(PROMPT('Does {0} agree with {1}?', d.text, c.text), anchor := 'd')"
)


@dataclass
class Clocks:
    """Seconds and calls of each operator, and the arithmetic of products.

    Attributes:
        seconds: by operator.
        calls: by operator.
        operations: multiplications and additions by product.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OPERATORS, 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATORS, 0))
    operations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRODUCTS, 0))

    @contextmanager
    def timed(self, operator: str) -> Iterator[None]:
        """Adds what happens inside to an operator."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[operator] += time.perf_counter() - started
            self.calls[operator] += 1


class TimedKernels:
    """Kernels with a clock on each operator; products are told apart by their weights.

    Args:
        kernels: that do the work.
        names: of the weights of products.
        clocks: that are advanced.
    """

    def __init__(self, kernels: Kernels, names: dict[Matrix, str], clocks: Clocks) -> None:
        self.inner, self._names, self._clocks = kernels, names, clocks
        self.began, self.ended = 0.0, 0.0
        self._called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        wrapped = getattr(self.inner, name)
        if name in ("product", "add_product", "gated_product"):
            return lambda x, matrix, *rest, **named: self._product(wrapped, x, matrix, *rest, **named)
        operator = {"attend": "attention", "norm": "norm", "rotate": "rotate"}.get(name)
        return wrapped if operator is None else self._clocked(operator, wrapped)

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Where the kernels wait until the end, its time is shared out as their own clocks have it."""
        self._called = []
        with self.inner.fused():
            yield
            started = time.perf_counter()
        self.ended = time.perf_counter()
        seconds: list[float] = getattr(self.inner, "fused_seconds", [])
        if seconds:
            for operator, share in zip(self._called, seconds, strict=True):
                self._clocks.seconds[operator] += (self.ended - started) * share / sum(seconds)

    def _product(
        self, product: Callable[..., None], x: Any, matrix: Matrix, *rest: Any, **named: Any
    ) -> None:
        name = self._names[matrix]
        pair = 2 if name == "gate_up" else 1
        self._clocks.operations[name] += 2 * x.shape[0] * x.shape[1] * matrix.columns * pair
        self._clocked(name, product)(x, matrix, *rest, **named)

    def _clocked(self, operator: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if not self.began:
                self.began = time.perf_counter()
            self._called.append(operator)
            with self._clocks.timed(operator):
                found = work(*arguments, **named)
            self.ended = time.perf_counter()
            return found

        return run


class TimedModel(AnsweringAtOnce):
    """A paged decoder with clocks on its passes and its head.

    Args:
        model: a `PagedDecoder` on a CPU, whose kernels are wrapped.
        clocks: that are advanced.
    """

    def __init__(self, model: Any, clocks: Clocks) -> None:
        self._model, self._clocks = model, clocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, chunk: Any) -> Any:
        """A pass: what lies before its first kernel, behind its last, and between them."""
        kernels, clocks = self._model.decoder.kernels, self._clocks
        inside = sum(clocks.seconds.values())
        kernels.began, started = 0.0, time.perf_counter()
        states = self._model.forward(chunk)
        stopped = time.perf_counter()
        inside = sum(clocks.seconds.values()) - inside
        parts = {
            "embedding": kernels.began - started,
            "final_norm": stopped - kernels.ended,
            "other": kernels.ended - kernels.began - inside,
        }
        for operator, seconds in parts.items():
            clocks.seconds[operator] += seconds
            clocks.calls[operator] += 1
        return states

    def logits(self, *arguments: Any) -> Any:
        """Logits of answers."""
        with self._clocks.timed("head"):
            return self._model.logits(*arguments).numpy()

    def answer_mass(self, *arguments: Any) -> Any:
        """Shares of the whole vocabulary."""
        with self._clocks.timed("head"):
            return self._model.answer_mass(*arguments).numpy()


@contextmanager
def clocked(engine: Engine) -> Iterator[Clocks]:
    """Clocks on an engine's operators while entered.

    Raises:
        ValueError: the engine is not on a CPU; elsewhere kernels return before they are done.
    """
    model: Any = engine.model
    decoder = model.decoder
    if decoder.device.type != "cpu":
        raise ValueError(f"the profile is of a CPU, and the device is {decoder.device.type}")
    clocks, kernels = Clocks(), decoder.kernels
    names = {getattr(layer, name): name for layer in decoder.layers for name in PRODUCTS}
    decoder.kernels = TimedKernels(kernels, names, clocks)
    engine.model = TimedModel(model, clocks)  # type: ignore[assignment]
    try:
        yield clocks
    finally:
        engine.model, decoder.kernels = model, kernels


@dataclass(frozen=True)
class Profile:
    """One statement.

    Attributes:
        name: of the statement.
        seconds: of the run.
        computed: tokens that were computed.
        passes: of the model.
        operators: seconds by operator; they add up to the run's.
        calls: of each operator.
        operations: by product, multiplications and additions.
    """

    name: str
    seconds: float
    computed: int
    passes: int
    operators: dict[str, float]
    calls: dict[str, int]
    operations: dict[str, int]


def profiled(engine: Engine, session: quail.Session, name: str, sql: str) -> Profile:
    """Runs a statement with clocks."""
    with clocked(engine) as clocks:
        report = session.sql(sql).run(progress=False, order="as_written").report
    seconds = report.seconds["run"]
    clocks.seconds["host"] = seconds - sum(clocks.seconds.values())
    clocks.calls["host"] = report.passes
    computed = int(report.tokens["computed"])
    return Profile(
        name, seconds, computed, report.passes, clocks.seconds, clocks.calls, dict(clocks.operations)
    )


def measure(num_documents: int, num_tokens: int, num_partners: int, num_rounds: int) -> list[Profile]:
    """The three statements; of each the round whose seconds are the median."""
    config = EngineConfig(retention="keep", answers="off")
    compiler = Compiler(config)
    texts = numbered(chapters(compiler, [num_tokens] * num_documents))
    rounds: dict[str, list[Profile]] = {}
    for _ in range(num_rounds):
        engine = Engine.boot(config)
        with quail.Session(config, engine=engine) as session:
            session.register("warm", {"id": [0], "text": ["A fine film."]})
            session.sql(FIRST.replace("docs", "warm")).run(progress=False)
            session.register("docs", texts)
            session.register("clauses", numbered(CLAUSES[:num_partners]))
            for name, sql in (("first question", FIRST), ("further question", SECOND), ("join", JOIN)):
                rounds.setdefault(name, []).append(profiled(engine, session, name, sql))
        engine.close()
    return [sorted(each, key=lambda profile: profile.seconds)[len(each) // 2] for each in rounds.values()]


def tables_of(profiles: Sequence[Profile]) -> str:
    """Markdown: shares of each operator, and the rates of the products."""
    rows = [
        [
            MEANINGS[operator],
            *(f"{profile.operators[operator] / profile.seconds:.1%}" for profile in profiles),
        ]
        for operator in OPERATORS
    ]
    rows += [
        ["seconds", *(f"{profile.seconds:.2f}" for profile in profiles)],
        ["computed tokens", *(f"{profile.computed:,}" for profile in profiles)],
        ["passes", *(f"{profile.passes:,}" for profile in profiles)],
    ]
    rates = [
        [
            MEANINGS[name],
            *(f"{profile.operations[name] / profile.operators[name] / 1e9:,.0f}" for profile in profiles),
        ]
        for name in PRODUCTS
    ]
    names = [profile.name for profile in profiles]
    return "\n\n".join(
        [table(["share of the run", *names], rows), table(["billion operations a second", *names], rates)]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, stores, and writes the tables into the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description=__doc__)
    parser.add_argument("--documents", type=int, default=16, help="documents (16)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each (300)")
    parser.add_argument("--partners", type=int, default=20, help="partners of each in the join (20)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median one is reported (3)")
    parser.add_argument("--no-store", action="store_true", help="print only")
    parser.add_argument("--pages", action="store_true", help="write the tables into docs/performance.md too")
    arguments = parser.parse_args(argv)
    profiles = measure(arguments.documents, arguments.tokens, arguments.partners, arguments.rounds)
    about, day = lines.machine(), str(date.today())
    written = (
        f"Measured {day} on {about['processor']}; {arguments.documents} documents of {arguments.tokens} "
        f"tokens, {arguments.partners} partners each in the join; median of {arguments.rounds} rounds.\n\n"
        f"{tables_of(profiles)}\n"
    )
    print(written)
    if not arguments.no_store:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"profile-{day}.json"
        found = {"machine": about, "date": day, "profiles": [asdict(profile) for profile in profiles]}
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"stored in {path}")
    if arguments.pages:
        write_section(PAGE, SECTION, written)
    return 0
