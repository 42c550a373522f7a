"""Labels scored by the default model are what transformers says when it is forced along each label."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.filters import transformers_model
from quail.config import EngineConfig
from quail.execution.stages import compile_stage, label_codes
from quail.plan.logical import AICall
from tests.engine.engines import TinyEngine
from tests.engine.feeds import ChainFeed
from tests.engine.test_labels import classify, expected_log_probabilities, label_tokens

pytestmark = pytest.mark.timeout(1200)

TEXTS = ["A moving film with a dull ending.", "The soup was cold, the waiter was not."]
CUE = "\n\nThis review is about a"
PREFIXES = [
    "movie",
    "movie about the sea",
    "movie about the sea and the people who live beside it all year",
    "book",
]
MANY = [f"{kind} from {place}" for kind in "abcdefghijklmnopq" for place in "abcdefghijklmno"]
PER_TOKEN = 1e-4


@pytest.fixture(scope="module")
def engine():
    return TinyEngine("smollm2-135m", EngineConfig().cache_path)


@pytest.fixture(scope="module")
def oracle():
    return transformers_model(torch.float32)


def longest(engine: TinyEngine, call: AICall) -> int:
    return max(len(label_tokens(engine, call, category.label)) for category in call.categories)


@pytest.mark.parametrize(
    ("labels", "texts"),
    [
        pytest.param(["movie", "product", "restaurant"], TEXTS, id="three"),
        pytest.param(PREFIXES, TEXTS, id="prefixes"),
        pytest.param(MANY, TEXTS[:1], id="255", marks=pytest.mark.slow),
    ],
)
def test_tree_of_labels(engine, oracle, labels, texts):
    call = classify(0, labels, text=CUE)
    run = engine.run((call,), ChainFeed(texts, 1), budget=2048)
    order = np.random.default_rng(3).permutation(len(labels))
    permuted = classify(0, [labels[place] for place in order], text=CUE)
    again = engine.run((permuted,), ChainFeed(texts, 1), budget=2048)
    tolerance = PER_TOKEN * longest(engine, call)
    for row, text in enumerate(texts):
        expected = expected_log_probabilities(engine, oracle, call, engine.prompt(call, text))
        np.testing.assert_allclose(run.logits[row, 0], expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(again.logits[row, 0], expected[order], rtol=0, atol=tolerance)
        assert np.exp(run.logits[row, 0].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_the_labels_here_have_one_to_twelve_tokens(engine):
    lengths = {len(label_tokens(engine, classify(0, PREFIXES, text=CUE), label)) for label in PREFIXES}
    assert min(lengths) == 1
    assert max(lengths) >= 12


@pytest.mark.parametrize("num_labels", [2, pytest.param(255, marks=pytest.mark.slow)])
def test_codes(engine, oracle, num_labels):
    """One code token a label: the softmax over the codes' tokens at the question's end."""
    call = classify(0, MANY[:num_labels], text=CUE)
    call = replace(call, options=replace(call.options, label_scoring="codes"))
    run = engine.run((call,), ChainFeed(TEXTS[:1], 1), budget=4096)
    stage = compile_stage(call, engine.pieces, engine.tokenizer)
    assert not stage.branches
    codes = classify(0, label_codes(call, engine.tokenizer), text=CUE)
    tokens = [label_tokens(engine, codes, category.label) for category in codes.categories]
    assert {len(each) for each in tokens} == {1}
    prompt = torch.tensor([engine.prompt(call, TEXTS[0]).tolist()])
    with torch.inference_mode():
        logits = oracle(prompt, logits_to_keep=1).logits[0, -1].double().numpy()
    scores = logits[[token for (token,) in tokens]]
    expected = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
    np.testing.assert_allclose(run.logits[0, 0], expected, rtol=0, atol=PER_TOKEN)
