"""Classification on tiny models: label probabilities are the restricted products of teacher-forced ones."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from quail.errors import PlanError
from quail.execution.asks import RunControl
from quail.execution.readout import value_type, values_of
from quail.execution.stages import compile_stage
from quail.plan.logical import AICall, Category, Operator, Prompt
from tests.engine.engines import TinyEngine
from tests.engine.feeds import ChainFeed, PairFeed, question
from tests.engine.test_engine import texts_of
from tests.models.tiny import make_tiny


def classify(index, labels, text="\n\nThe mood is", operator=Operator.CLASSIFY, parts=None) -> AICall:
    categories = tuple(Category(label) for label in labels)
    return AICall(index, operator, Prompt(parts or (0, text)), categories, text="AI.CLASSIFY(…)")


@pytest.fixture(scope="module", params=["llama-completion", "qwen2-chat"])
def case(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    family, layout = request.param.split("-")
    folder = make_tiny(tmp_path_factory.mktemp("model"), family, seed=8, context=1024)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"), layout=layout), oracle


def label_tokens(engine, call, label) -> list[int]:
    stage = compile_stage(call, engine.pieces, engine.tokenizer)
    spaced = not len(engine.pieces.closer) and not engine.tokenizer.decode(stage.tail.tolist())[-1].isspace()
    ids, _ = engine.tokenizer.encode_plain([f" {label}" if spaced else label])
    return ids.tolist()


def expected_log_probabilities(engine, oracle, call, prompt) -> np.ndarray:
    """By transformers: every node of the trie of labels, teacher-forced, restricted to its children."""
    labels = [tuple(label_tokens(engine, call, c.label)) for c in call.categories]
    closer = engine.pieces.closer.tolist()
    end = closer[0] if closer else int(engine.tokenizer.encode_plain(["\n"])[0][0])
    cache: dict[tuple, np.ndarray] = {}
    for label in labels:
        ids = torch.tensor([[*prompt.tolist(), *label]])
        with torch.inference_mode():
            logits = oracle(ids).logits[0, len(prompt) - 1 :].float().numpy()
        for depth in range(len(label) + 1):
            cache[label[:depth]] = logits[depth]
    found = []
    for label in labels:
        total = 0.0
        for depth in range(len(label) + 1):
            path = label[:depth]
            choices = {other[depth] for other in labels if len(other) > depth and other[:depth] == path}
            if path in labels and choices:
                choices.add(end)
            if len(choices) < 2:
                continue
            token = label[depth] if depth < len(label) else end
            scores = cache[path][sorted(choices)].astype(np.float64)
            peak = scores.max()
            total += float(cache[path][token]) - peak - np.log(np.exp(scores - peak).sum())
        found.append(total)
    return np.array(found)


SETS = [
    ["positive", "negative"],
    ["New", "New York", "York", "New York City"],
    ["a", "the ship left the harbour before dawn", "the ship left", "rain"],
    [f"label number {n} of many" for n in range(30)],
]


@pytest.mark.parametrize("labels", SETS, ids=lambda labels: labels[1])
@pytest.mark.parametrize("budget", [64, 1024])
def test_probabilities_equal_teacher_forcing(case, labels, budget):
    engine, oracle = case
    call = classify(0, labels)
    stage = compile_stage(call, engine.pieces, engine.tokenizer)
    if stage.num_own_tokens - len(stage.tail) >= budget:
        pytest.skip("the labels of this set need a larger pass")
    texts = [*texts_of(6), ""]
    run = engine.run((call,), ChainFeed(texts, 1), budget=budget)
    for row, text in enumerate(texts):
        expected = expected_log_probabilities(engine, oracle, call, engine.prompt(call, text))
        np.testing.assert_allclose(run.logits[row, 0], expected, atol=1e-4 * 12)
        assert np.exp(expected).sum() == pytest.approx(1.0, abs=1e-6)


def test_255_labels_cost_little_more_than_the_lower_bound(case):
    engine, _ = case
    labels = [f"{first} {second}" for first in "abcdefghijklmnopq" for second in "abcdefghijklmno"]
    call = classify(0, labels)
    assert len(labels) == 255
    texts = texts_of(20)
    run = engine.run((call,), ChainFeed(texts, 1), budget=1024)
    stage = run.stages[0]
    tokens = [label_tokens(engine, call, label) for label in labels]
    inner = {tuple(ids[:depth]) for ids in tokens for depth in range(1, len(ids))}
    lower = sum(len(engine.prompt(call, text)) for text in texts) + len(texts) * len(inner)
    assert run.scheduler.ledger.computed <= 1.5 * lower
    assert stage.num_own_tokens - len(stage.tail) <= len(inner)


def test_labels_follow_other_questions_on_the_same_kv(case):
    engine, oracle = case
    calls = (question(0, "\n\nIs it raining?"), classify(1, SETS[1]), question(2, "\n\nIs it late?"))
    texts = texts_of(10)
    run = engine.run(calls, ChainFeed(texts, 3), budget=128)
    documents = sum(len(engine.prefix(text)) for text in texts)
    own = sum(stage.num_own_tokens for stage in run.stages)
    assert run.scheduler.ledger.computed == documents + len(texts) * own
    for row, text in enumerate(texts):
        expected = expected_log_probabilities(engine, oracle, calls[1], engine.prompt(calls[1], text))
        np.testing.assert_allclose(run.logits[row, 1], expected, atol=1e-3)


def test_labels_over_pairs(case):
    engine, oracle = case
    call = classify(0, SETS[1], parts=("How does ", 0, " relate to ", 1, "?"))
    feed = PairFeed(texts_of(3), texts_of(3, 10, seed=1), (call,))
    run = engine.run((call,), feed, budget=256)
    for key, (_, a, p) in enumerate(feed.pairs):
        prompt = engine.prompt(call, feed.sides[0][a], feed.sides[1][p])
        expected = expected_log_probabilities(engine, oracle, call, prompt)
        np.testing.assert_allclose(run.logits[key, 0], expected, atol=1e-3)


def test_values_have_their_types_and_ties_go_to_the_earlier():
    logs = np.log(np.array([[0.25, 0.5, 0.25], [0.4, 0.2, 0.4]], dtype=np.float32))
    call = classify(0, ["x", "y", "z"])
    assert values_of(call, logs).to_pylist() == ["y", "x"]
    shares = values_of(classify(0, ["x", "y", "z"], operator=Operator.PROBABILITIES), logs)
    assert shares.type == value_type(classify(0, ["x", "y"], operator=Operator.PROBABILITIES))
    assert [sum(value for _, value in row) for row in shares.to_pylist()] == pytest.approx([1.0, 1.0])
    assert shares.to_pylist()[0][1] == ("y", pytest.approx(0.5))
    null = values_of(call, None)
    assert null.type == pa.string()
    assert null.to_pylist() == [None]


def test_a_failed_row_is_null(case):
    engine, _ = case
    call = classify(0, ["x", "y"])
    feed = ChainFeed(["a", "1" * 2000], 1)
    engine.run((call,), feed, control=RunControl(on_error="null"))
    assert feed.answers[0][1] is None
    assert feed.answers[0][0] in ("x", "y")


def test_labels_that_do_not_fit_a_pass_are_refused_with_the_numbers(case):
    engine, _ = case
    call = classify(0, [f"{first} {second}" for first in "abcdefghijklmnopqrst" for second in "abc"])
    with pytest.raises(PlanError, match=r"its 60 labels take \d+ tokens in one pass, the token budget is 16"):
        engine.run((call,), ChainFeed(["a"], 1), budget=16)
