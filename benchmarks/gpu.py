"""`python -m benchmarks gpu`: what a CUDA device reaches, on the default model and on shapes of larger ones.

The larger models have random weights, made on the device: nothing is fetched, and their answers mean nothing.
Without a CUDA device it says so and ends well.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quail
from benchmarks import lines
from quail.config import EngineConfig
from quail.execution.reads import Model, Pending
from quail.execution.runner import Engine
from quail.models.config import DecoderConfig, config_from_hf
from quail.models.loader import LoadedModel, load_model
from quail.models.outline import read_outline
from quail.models.weights import tensor_shapes

RESULTS = Path(__file__).parent / "results"

QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "32B": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen3 (its configurations on the Hugging Face hub)."""

DEFAULT = "default"
INITIALIZER_RANGE = 0.02
TEXT = "the ship left harbour before dawn and nobody on pier waved captain rain film music old town"
WORDS = TEXT.split(" ")

FILTER = "AI.SCORE(PROMPT('{0} Is this about the sea?', body))"
SECOND = "AI.SCORE(PROMPT('{0} Does anybody speak in this text?', body))"
PAIR = "AI.SCORE(PROMPT('Does {0} speak of the same thing as {1}?', l.body, r.body))"
STATEMENTS = {
    "filter": f"SELECT count(*) FROM documents WHERE {FILTER} >= 0",
    "chain": f"SELECT count(*) FROM documents WHERE {FILTER} >= 0 AND {SECOND} >= 0",
    "join": f"SELECT count(*) FROM l, r WHERE {PAIR} >= 0",
    "shared prefixes": f"SELECT count(*) FROM families WHERE {FILTER} >= 0",
}
"""Every document passes every question, so that random weights ask as many as others."""

WANTED = {("4B", "filter"): 0.45, ("4B", "join"): 0.35}
"""Shares of the speed of light that are wanted."""

MOST_GAP = 0.05
"""Share of a run's time that the device may wait for the host, as is wanted."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        documents: of the filter and of the chain.
        tokens: about so many a document.
        anchors, partners: of the join.
        families, members: documents that begin alike, and how many of each.
        equal: documents of the comparison with the CPU.
    """

    documents: int = 5_000
    tokens: int = 300
    anchors: int = 200
    partners: int = 200
    families: int = 50
    members: int = 40
    equal: int = 300


@dataclass(frozen=True)
class Figure:
    """One statement on one model.

    Attributes:
        model: its name or shape.
        workload: name of the statement.
        seconds: of the run, by the clock.
        computed_tokens, prompt_tokens: rows computed, and tokens of all prompts in full.
        passes: forward passes.
        token_budget: most rows a pass.
        speed_of_light: achieved share; None where the device's rates are not known.
        gap_seconds: time between passes during which the device had none, in all.
        memory_bytes: most that torch took of the device.
    """

    model: str
    workload: str
    seconds: float
    computed_tokens: int
    prompt_tokens: int
    passes: int
    token_budget: int
    speed_of_light: float | None
    gap_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Equality:
    """The default model's margins (log-odds) on the device beside those of the CPU in float32.

    Attributes:
        dtype: on the device.
        rows: questions compared.
        greatest_gap: largest difference of a margin.
        flips: answers that came out otherwise.
        clear_flips: those of them whose margin on the CPU exceeds what the dtype may move it by.
    """

    dtype: str
    rows: int
    greatest_gap: float
    flips: int
    clear_flips: int


class Timed:
    """A model whose passes leave a mark before and behind them, in the order of the device's work."""

    def __init__(self, model: Model, device_type: str) -> None:
        self._model, self._is_cuda = model, device_type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def start(self, chunk: Any, reads: Any) -> Pending:
        """Starts a pass."""
        before = self._mark()
        pending = self._model.start(chunk, reads)
        self._marks.append((before, self._mark()))
        return pending

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take_gaps(self) -> list[float]:
        """Seconds between each pass and the next since the last call; the device has ended all of them."""
        if self._is_cuda:
            torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [
            one[1].elapsed_time(two[0]) / 1e3 if self._is_cuda else two[0] - one[1]
            for one, two in zip(marks, marks[1:], strict=False)
        ]


def random_model(name: str, fields: Mapping[str, Any], device: torch.device) -> Callable[..., LoadedModel]:
    """What loads a model of a shape with random weights, and the default model's tokenizer."""
    config: DecoderConfig = config_from_hf({**QWEN3, **fields}, name)

    def load(spec: Any, *, dtype: torch.dtype, cache_dir: Path, progress: Any = None) -> LoadedModel:
        outline = read_outline(EngineConfig().model, cache_dir)
        assert outline is not None, "the default model's tokenizer is there: its figures come first"
        generator = torch.Generator(device).manual_seed(0)
        weights = {}
        for tensor, shape in tensor_shapes(config).items():
            made = torch.empty(shape, dtype=dtype, device=device)
            if tensor.endswith("norm.weight"):
                weights[tensor] = made.fill_(1)
            else:
                weights[tensor] = made.normal_(0, INITIALIZER_RANGE, generator=generator)
        return LoadedModel(name, f"random-{name}", config, weights, outline.tokenizer, outline)

    return load


def tables_of(sizes: Sizes) -> dict[str, dict[str, list[Any]]]:
    """Tables of distinct texts; a word is about a token."""
    random = np.random.default_rng(11)

    def texts(count: int, num_words: int) -> list[str]:
        drawn = random.choice(WORDS, (count, max(1, num_words - 4)))
        return [f"{number}: {' '.join(row)}" for number, row in enumerate(drawn.tolist())]

    def table(bodies: list[str]) -> dict[str, list[Any]]:
        return {"id": list(range(len(bodies))), "body": bodies}

    beginnings = texts(sizes.families, 2 * sizes.tokens)
    endings = texts(sizes.families * sizes.members, sizes.tokens // 3)
    return {
        "documents": table(texts(sizes.documents, sizes.tokens)),
        "l": table(texts(sizes.anchors, sizes.tokens)),
        "r": table(texts(sizes.partners, sizes.tokens // 10)),
        "families": table([f"{beginnings[n % sizes.families]} {ending}" for n, ending in enumerate(endings)]),
    }


def opened(engine: Engine, tables: Mapping[str, Mapping[str, list[Any]]]) -> quail.Session:
    """A session on an engine that outlives it."""
    session = quail.Session(engine=engine)
    for name, columns in tables.items():
        session.register(name, dict(columns))
    return session


def measure_model(name: str, engine: Engine, sizes: Sizes, rounds: int) -> list[Figure]:
    """Every statement on one model: the median round of each, after a small one that warms up."""
    about = engine.describe()
    is_cuda = about["device"] == "cuda"
    timed = Timed(engine.model, about["device"])
    engine.model = timed
    few = replace(sizes, documents=20, anchors=4, partners=5, families=2, members=5)
    with opened(engine, tables_of(few)) as session:
        for statement in STATEMENTS.values():
            session.sql(statement).run(progress=False)
    figures = []
    with opened(engine, tables_of(sizes)) as session:
        for workload, statement in STATEMENTS.items():
            found = []
            for _ in range(rounds):
                if engine.retention is not None:
                    engine.retention.pool.clear()
                timed.take_gaps()
                if is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                report = session.sql(statement).run(progress=False).report
                found.append(
                    Figure(
                        name,
                        workload,
                        report.seconds["run"],
                        report.tokens["computed"],
                        report.tokens["naive"],
                        report.passes,
                        about["token_budget"],
                        report.speed_of_light,
                        sum(max(0.0, gap) for gap in timed.take_gaps()),
                        torch.cuda.max_memory_allocated() if is_cuda else 0,
                    )
                )
            figures.append(sorted(found, key=lambda each: each.seconds)[len(found) // 2])
            show(figures[-1])
    return figures


def compare(config: EngineConfig, dtype: str, sizes: Sizes) -> Equality:
    """The default model's margins on the device and on the CPU in float32, for one question and for pairs."""
    margins = []
    few = replace(sizes, documents=sizes.equal, anchors=10, partners=math.ceil(sizes.equal / 20))
    for device, in_dtype in ((config.device, dtype), ("cpu", "float32")):
        engine = Engine.boot(replace(config, device=device, dtype=in_dtype))
        with opened(engine, tables_of(few)) as session:
            scores: list[float] = []
            for statement in (
                f"SELECT {FILTER} FROM documents ORDER BY id",
                f"SELECT {PAIR} FROM l, r ORDER BY l.id, r.id",
            ):
                scores += [row[0] for row in session.sql(statement).run(progress=False).fetchall()]
        engine.close()
        odds = np.clip(np.array(scores), 1e-12, 1 - 1e-12)
        margins.append(np.log(odds) - np.log1p(-odds))
    found, expected = margins
    is_other = (found > 0) != (expected > 0)
    allowed = 0.25 if dtype == "bfloat16" else 1e-3
    return Equality(
        dtype,
        len(found),
        float(np.abs(found - expected).max()),
        int(is_other.sum()),
        int((is_other & (np.abs(expected) > allowed)).sum()),
    )


def measure(
    config: EngineConfig, shapes: Mapping[str, Mapping[str, Any]], sizes: Sizes, rounds: int
) -> tuple[list[Figure], list[Equality]]:
    """All figures of a device.

    Args:
        config: of the default model: device, dtype, memory.
        shapes: of the random models, by name, as in `SHAPES`.
        sizes: how much is measured.
        rounds: medians are reported.
    """
    equal = [compare(config, dtype, sizes) for dtype in ("float32", "bfloat16")]
    for each in equal:
        print(
            f"{each.dtype}: {each.rows:,} margins within {each.greatest_gap:.3g} of the CPU's in float32; "
            f"{each.flips} answers differ, {each.clear_flips} of them clear ones",
            flush=True,
        )
    loaders: dict[str, Callable[..., LoadedModel]] = {DEFAULT: load_model}
    device = torch.device(config.device)
    loaders |= {name: random_model(name, fields, device) for name, fields in shapes.items()}
    figures: list[Figure] = []
    for name, load in loaders.items():
        try:
            engine = Engine.boot(config, load=load)
        except (quail.PlanError, torch.OutOfMemoryError) as error:
            print(f"{name}: left out, {error}", flush=True)
            continue
        figures += measure_model(name, engine, sizes, rounds)
        engine.close()
        if config.device == "cuda":
            torch.cuda.empty_cache()
    return figures, equal


def show(figure: Figure) -> None:
    """Prints a figure beside what is wanted of it."""
    light = "unknown" if figure.speed_of_light is None else f"{figure.speed_of_light:.1%}"
    gap = figure.gap_seconds / max(1, figure.passes - 1) * 1e3
    share = figure.gap_seconds / figure.seconds
    wanted = WANTED.get((figure.model, figure.workload))
    notes = [] if wanted is None else [f"wanted {wanted:.0%}"]
    notes += [] if share <= MOST_GAP else [f"gaps of more than {MOST_GAP:.0%}"]
    print(
        f"{figure.model:<8} {figure.workload:<16} {figure.computed_tokens / figure.seconds:12,.0f} tokens/s  "
        f"speed of light {light:>7}  gap a pass {gap:7.2f} ms "
        f"({share:.1%} of {figure.seconds:.2f} s, {figure.passes} passes)" + "".join(f"  {n}" for n in notes),
        flush=True,
    )


def store(
    folder: Path, device_name: str, sizes: Sizes, figures: Sequence[Figure], equal: Sequence[Equality]
) -> Path:
    """Writes what was measured into a file with the device's name."""
    folder.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    path = folder / f"gpu-{slug}-{date.today()}.json"
    found = {
        "device": device_name,
        "machine": lines.machine(),
        "date": str(date.today()),
        "sizes": asdict(sizes),
        "equality_with_cpu_float32": [asdict(each) for each in equal],
        "figures": [asdict(figure) for figure in figures],
        "mean_tokens_a_second": statistics.fmean(f.computed_tokens / f.seconds for f in figures),
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and stores, where there is a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"{', '.join(SHAPES)} (default all)")
    parser.add_argument("--documents", type=int, default=Sizes.documents, help="filter and chain (5000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported (3)")
    parser.add_argument("--no-store", action="store_true", help="print only")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.shapes if name not in SHAPES]
    if unknown:
        parser.error(f"no shape {unknown[0]!r}; there are {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        print(f"no CUDA device here (torch {torch.__version__}): nothing was measured")
        return 0
    sizes = Sizes(documents=arguments.documents)
    chosen = {name: SHAPES[name] for name in arguments.shapes or SHAPES}
    figures, equal = measure(EngineConfig(device="cuda"), chosen, sizes, arguments.rounds)
    if not arguments.no_store:
        print(f"stored in {store(RESULTS, torch.cuda.get_device_name(), sizes, figures, equal)}")
    return 0
