"""Joins: long anchors against whole prompts in `transformers`, short ones against the cost model.

Ratios are of seconds on processors; on a machine that does other things too they tell more than those of the
clock, which stand beside them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.clauses import CLAUSES
from benchmarks.filters import transformers_model
from benchmarks.lines import Line, spread
from quail.config import EngineConfig
from quail.cost.device import rates_of
from quail.cost.work import Work, rows
from quail.execution.asks import RunControl
from quail.execution.forecast import Forecaster
from quail.execution.runner import Engine
from quail.execution.stages import compile_stage
from quail.plan.logical import AICall
from quail.planner.anchors import PairTokens, pair_work
from tests.engine.feeds import PairFeed, pair_question

DATA = Path(__file__).parent.parent / "examples" / "data"
NUM_LICENCES = 20
BATCH = 16
"""Prompts that `transformers` computes at a time."""
SAMPLED_BATCHES = 2
FASTER = 8.0
MOST = 1.2
"""Measured share of the time without reuse over the predicted one, at most."""
CLAUSE_QUESTION = pair_question(0, ("Does the licence ", 0, " hold the clause ", 1, "?"))
WEAKNESS_QUESTION = pair_question(0, ("Does ", 0, " show the weakness ", 1, "?"))


class LonePairFeed(PairFeed):
    """Pairs that share nothing: each has an anchor of its own, whatever its text."""

    def take(self, limit: int) -> tuple[Any, ...]:
        """As of `PairFeed`, every document under a handle of its own."""
        return tuple(
            replace(
                asks, documents=asks.keys.astype(np.int64), may_follow=np.zeros(len(asks), dtype=np.bool_)
            )
            for asks in super().take(limit)
        )

    def answered(self, call: int, keys: Any, values: Any) -> Any:
        """As of `PairFeed`."""
        return replace(super().answered(call, keys, values), released=np.asarray(keys, dtype=np.int64))


@dataclass(frozen=True)
class Run:
    """Seconds of one run on processors and by the clock, and its answers in the order of the pairs."""

    seconds: float
    clock: float
    answers: list[Any]
    computed: int


def run(engine: Engine, feed: PairFeed) -> Run:
    """Answers all pairs of a feed."""
    started, clock = time.process_time(), time.perf_counter()
    report = engine.run(tuple(feed.calls), feed, RunControl())
    return Run(
        time.process_time() - started,
        time.perf_counter() - clock,
        [feed.values[pair] for pair in feed.pairs],
        report["tokens"]["computed"],
    )


def prompt(engine: Engine, call: AICall, anchor: str, partner: str) -> list[int]:
    """Ids of one pair's whole prompt."""
    stage = compile_stage(call, engine.pieces, engine.tokenizer)
    first, second = (engine.tokenizer.encode_plain([text])[0].tolist() for text in (anchor, partner))
    return [*engine.pieces.prefix.tolist(), *first, *stage.frame.tolist(), *second, *stage.tail.tolist()]


def transformers_answers(
    model: Any, engine: Engine, call: AICall, prompts: list[list[int]]
) -> list[tuple[float, float]]:
    """(TRUE, FALSE) logits of prompts, a batch at a time, padded on the left."""
    readout: Any = compile_stage(call, engine.pieces, engine.tokenizer).readout
    found: list[tuple[float, float]] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), BATCH):
            some = prompts[start : start + BATCH]
            longest = max(map(len, some))
            ids = torch.tensor([[0] * (longest - len(each)) + each for each in some])
            mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in some])
            logits = model(ids, attention_mask=mask, logits_to_keep=1).logits[:, 0].float().numpy()
            for row in readout.answers([logits[:, readout.vocab_ids]]):
                found.append((float(row[0]), float(row[1])))
    return found


def licence_texts(count: int) -> list[str]:
    """The first licences of 1,000 to 4,000 characters."""
    texts = pq.read_table(DATA / "licences.parquet")["text"].to_pylist()
    return [text for text in texts if 1000 <= len(text) <= 4000][:count]


def against_transformers(engine: Engine, num_rounds: int, share: float) -> Line:
    """Licences with clauses; `transformers` computes batches drawn across the pairs, and is scaled up."""
    licences = licence_texts(max(2, round(NUM_LICENCES * share)))
    feeds = [PairFeed(licences, list(CLAUSES), (CLAUSE_QUESTION,)) for _ in range(num_rounds)]
    model = transformers_model(engine.model.decoder.dtype)  # type: ignore[attr-defined]
    num_pairs = len(licences) * len(CLAUSES)
    num_batches = -(-num_pairs // BATCH)
    starts = np.linspace(0, num_batches - 1, SAMPLED_BATCHES + 2, dtype=int)[1:-1] * BATCH
    sampled = [pair for start in starts for pair in range(start, min(start + BATCH, num_pairs))]
    prompts = [
        prompt(engine, CLAUSE_QUESTION, licences[a], CLAUSES[p])
        for _, a, p in (feeds[0].pairs[pair] for pair in sampled)
    ]
    ratios, clocks, scale = [], [], num_pairs / len(sampled)
    for feed in feeds:
        ours = run(engine, feed)
        started, clock = time.process_time(), time.perf_counter()
        theirs = transformers_answers(model, engine, CLAUSE_QUESTION, prompts)
        ratios.append((time.process_time() - started) * scale / ours.seconds)
        clocks.append((time.perf_counter() - clock) * scale / ours.clock)
    answers = [ours.answers[pair] for pair in sampled]
    flips = sum((yes > no) != (score > 0.5) for (yes, no), score in zip(theirs, answers, strict=True))
    ratio = statistics.median(ratios)
    return Line(
        "licences x clauses, times faster than transformers",
        ratio,
        f">= {FASTER:g}",
        ratio >= FASTER and not flips,
        f"{spread(ratios)}, by the clock {spread(clocks)}; {num_pairs} pairs, transformers measured on "
        f"{len(sampled)} of them in batches of {BATCH} and scaled, {flips} other answers",
    )


def short_texts(share: float) -> tuple[list[str], list[str]]:
    """Vulnerabilities and weaknesses."""
    sides = (("vulnerabilities", 100), ("weaknesses", 30))
    tables = (pq.read_table(DATA / f"{name}.parquet")["description"].to_pylist() for name, _ in sides)
    texts = [table[: max(2, round(count * share))] for table, (_, count) in zip(tables, sides, strict=True)]
    return texts[0], texts[1]


def predicted_works(
    forecaster: Forecaster, call: AICall, left: list[str], right: list[str]
) -> dict[str, Work]:
    """Work of all pairs with either side as the anchor, and of their whole prompts."""
    tokens = [forecaster.text_tokens(pa.array(side)) for side in (left, right)]
    lefts, rights = np.divmod(np.arange(len(left) * len(right)), len(right))
    frame, tail = forecaster.fixed_tokens(call)
    fixed = PairTokens(forecaster.label_tokens, frame, tail)
    whole = fixed.label + frame + tail + tokens[0][lefts] + tokens[1][rights]
    return {
        "left": pair_work(lefts, rights, tokens[0], tokens[1], fixed),
        "right": pair_work(rights, lefts, tokens[1], tokens[0], fixed),
        "off": sum((rows(float(length)) for length in whole), Work()),
    }


def against_cost_model(config: EngineConfig, engine: Engine, num_rounds: int, share: float) -> Line:
    """Short texts on both sides: time with reuse over time without, measured and predicted."""
    forecaster = Forecaster.of(config)
    assert forecaster is not None
    left, right = short_texts(share)
    works = predicted_works(forecaster, WEAKNESS_QUESTION, left, right)
    costs = {name: forecaster.seconds(work) for name, work in works.items()}
    anchor = "left" if costs["left"] <= costs["right"] else "right"
    call = replace(WEAKNESS_QUESTION, anchor=0 if anchor == "left" else 1)
    predicted = costs[anchor] / costs["off"]
    ratios, clocks = [], []
    for _ in range(num_rounds):
        on = run(engine, PairFeed(left, right, (call,)))
        off = run(engine, LonePairFeed(left, right, (call,)))
        assert on.computed == works[anchor].tokens, "the plan counts what the run computes"
        ratios.append(on.seconds / off.seconds)
        clocks.append(on.clock / off.clock)
    ratio = statistics.median(ratios) / predicted
    return Line(
        "vulnerabilities x weaknesses, measured over predicted share of time",
        ratio,
        f"<= {MOST:g}",
        ratio <= MOST,
        f"{len(left)} x {len(right)}, {anchor} side the anchor: {statistics.median(ratios):.3f} of the time "
        f"without reuse ({spread(ratios)}, by the clock {spread(clocks)}), {predicted:.3f} predicted, "
        f"{works[anchor].tokens:,.0f} of "
        f"{works['off'].tokens:,.0f} tokens",
    )


def measure(*, num_rounds: int, share: float) -> list[Line]:
    """All lines of joins.

    Args:
        num_rounds: rounds; medians are reported.
        share: of the rows of each side, for a machine that does other things too.
    """
    config = EngineConfig(retention="off", prefix_sharing="off")
    engine = Engine.boot(config)
    model: Any = engine.model
    rates_of(
        model.decoder.device,
        getattr(torch, engine.describe()["dtype"]),
        config.cache_path,
        model.decoder.kernels,
    )
    return [
        against_transformers(engine, num_rounds, share),
        against_cost_model(config, engine, num_rounds, share),
    ]
