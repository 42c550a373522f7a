"""The default model answers real reviews as transformers does, in float32 and within bfloat16's rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.filters import transformers_model
from quail.config import EngineConfig
from quail.execution.stages import compile_stage
from quail.models.decoder import Decoder
from tests.engine.engines import TinyEngine
from tests.engine.feeds import ChainFeed, question
from tests.engine.kernel_sets import kernels_here

pytestmark = pytest.mark.timeout(1200)

REVIEWS = Path(__file__).parent.parent.parent / "examples" / "data" / "reviews.parquet"
CALLS = (
    question(0, "\n\nSentiment:", answers=("positive", "negative")),
    question(1, "\n\nIs this about a film?"),
)


@pytest.fixture(scope="module")
def texts():
    rows = pq.read_table(REVIEWS)["text"].to_pylist()
    return [rows[i] for i in np.random.default_rng(1).permutation(len(rows))[:100]]


@pytest.fixture(scope="module")
def engine():
    return TinyEngine("smollm2-135m", EngineConfig().cache_path)


@pytest.mark.parametrize("num", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_float32_answers_equal_transformers(engine, texts, num):
    texts = texts[:num]
    oracle = transformers_model(torch.float32)
    run = engine.run(CALLS, ChainFeed(texts, 2), budget=512)
    largest, gaps = 0.0, []
    for row, text in enumerate(texts):
        for index, call in enumerate(CALLS):
            stage = compile_stage(call, engine.pieces, engine.tokenizer)
            ids = torch.from_numpy(engine.prompt(call, text).astype(np.int64)).unsqueeze(0)
            with torch.inference_mode():
                logits = oracle(ids, logits_to_keep=1).logits[0, -1].float().numpy()
            largest = max(largest, float(np.abs(logits).max()))
            expected = stage.readout.answers([logits[None, stage.readout.vocab_ids]])[0]
            found = run.logits[row, index]
            gaps.append(float(np.abs(found - expected).max()))
            assert (found[0] > found[1]) == (expected[0] > expected[1]) or abs(
                expected[0] - expected[1]
            ) < 1e-4
    assert max(gaps) <= 1e-4 * largest


@pytest.mark.slow
def test_bfloat16_flips_only_near_ties(engine, texts):
    rounded = {name: t.bfloat16() for name, t in engine.loaded.weights.items()}
    exact = Decoder(engine.loaded.config, {name: t.float() for name, t in rounded.items()})
    half = Decoder(engine.loaded.config, dict(rounded), kernels_here(torch.bfloat16))
    float32, engine.decoder = engine.decoder, exact
    try:
        oracle = engine.run(CALLS, ChainFeed(texts, 2), budget=2048).logits
        engine.decoder = half
        for budget, order in ((64, None), (4096, np.random.default_rng(2).permutation(len(texts)))):
            found = engine.run(CALLS, ChainFeed(texts, 2, order=order), budget=budget, pages=300).logits
            margins = {pair: float(a[0] - a[1]) for pair, a in oracle.items()}
            flips = [pair for pair, a in found.items() if (a[0] > a[1]) != (margins[pair] > 0)]
            assert all(abs(margins[pair]) < 0.25 for pair in flips), [margins[pair] for pair in flips]
            assert len(flips) <= 0.01 * len(found), f"{len(flips)} of {len(found)} answers flip"
    finally:
        engine.decoder = float32


def test_the_label_has_six_tokens_and_the_documents_stand_alone(engine):
    assert len(engine.pieces.prefix) == 6
    assert not len(engine.pieces.closer)
    prompt = engine.prompt(CALLS[0], "A fine film.")
    assert engine.tokenizer.decode(prompt.tolist()) == "DOCUMENT:\nA fine film.\n\nSentiment:"
