"""Calibration subtracts the right mean; thresholds, examples and codes change what they should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quail.execution.asks import RunControl
from quail.execution.calibration import CONTENT_FREE, stage_key
from quail.execution.run import Limits, Run
from quail.execution.stages import compile_stage, label_codes
from quail.models import decoder
from quail.models.decoder import PagedDecoder
from quail.plan.logical import CallOptions, Category, Operator
from tests.engine.engines import TinyEngine
from tests.engine.feeds import ChainFeed, PairFeed, pair_question, question
from tests.engine.test_engine import texts_of
from tests.engine.test_labels import classify
from tests.models.tiny import make_tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=8, context=1024)
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"))


def with_options(call, **options):
    return replace(call, options=replace(call.options, **options))


def margins(values) -> np.ndarray:
    """Log-odds of AI.SCORE values."""
    found = np.array([values[row] for row in range(len(values))])
    return np.log(found / (1 - found))


@pytest.mark.parametrize("budget", [16, 512])
def test_batch_calibration_subtracts_the_mean_of_the_runs_documents(engine, budget):
    texts = texts_of(25)
    plain = ChainFeed(texts, 1)
    engine.run((question(0, "\n\nIs it late?"),), plain, budget=budget)
    batch = ChainFeed(texts, 1)
    engine.run((with_options(question(0, "\n\nIs it late?"), calibrate="batch"),), batch, budget=budget)
    raw = margins(plain.answers[0])
    np.testing.assert_allclose(margins(batch.answers[0]), raw - raw.mean(), atol=1e-3)


@pytest.mark.parametrize("budget", [16, 512])
def test_content_calibration_subtracts_the_mean_of_content_free_documents(engine, budget):
    texts = texts_of(9)
    call = question(0, "\n\nIs it late?")
    plain, content = ChainFeed(texts, 1), ChainFeed(texts, 1)
    engine.run((call,), plain, budget=budget)
    calibrated = with_options(call, calibrate="content")
    run = engine.run((calibrated,), content, budget=budget)
    free = [engine.oracle_answer(call, text) for text in CONTENT_FREE]
    mean = np.mean([answer[0] - answer[1] for answer in free])
    np.testing.assert_allclose(margins(content.answers[0]), margins(plain.answers[0]) - mean, atol=1e-3)
    assert run.stats.num_calibration_tokens == sum(len(engine.prompt(call, t)) for t in CONTENT_FREE)
    assert run.scheduler.ledger.naive == sum(len(engine.prompt(call, text)) for text in texts)


def test_content_free_answers_are_measured_once_and_kept(engine):
    call = with_options(question(0, "\n\nIs it late?"), calibrate="content")
    means: dict = {}
    tokens = []
    for _ in range(2):
        model = PagedDecoder(engine.decoder, engine.arena(50))
        limits = Limits(256, engine.context_tokens)
        feed = ChainFeed(texts_of(3), 1)
        run = Run(model, engine.tokenizer, engine.pieces, limits, (call,), feed, RunControl(), means=means)
        run.run()
        tokens.append(run.stats.num_calibration_tokens)
    assert tokens[0] > 0
    assert tokens[1] == 0
    assert list(means) == [stage_key(run.stages[0])]


def test_labels_are_calibrated_in_log_space_and_renormalized(engine):
    labels = ["happy", "sad", "very sad"]
    texts = texts_of(12)
    raw = engine.run((classify(0, labels),), ChainFeed(texts, 1)).logits
    logits = np.stack([raw[row, 0] for row in range(12)])
    feed = ChainFeed(texts, 1)
    call = with_options(classify(0, labels, operator=Operator.PROBABILITIES), calibrate="batch")
    engine.run((call,), feed)
    shifted = np.exp(logits - logits.mean(axis=0))
    expected = shifted / shifted.sum(axis=1, keepdims=True)
    answers: Any = feed.answers[0]
    found = np.array([[share for _, share in answers[row]] for row in range(12)])
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("mode", ["content", "batch"])
@pytest.mark.parametrize("budget", [16, 512])
def test_pairs_are_calibrated_too(engine, mode, budget):
    template = ("Is ", 0, " like ", 1, "?")
    call = with_options(pair_question(0, template), calibrate=mode)
    feed = PairFeed(texts_of(3), texts_of(2, 9), (call,))
    engine.run((call,), feed, budget=budget)
    assert len(feed.values) == 6


def test_a_held_answer_reaches_the_next_question(engine):
    calls = (with_options(question(0, "\n\nIs it late?"), calibrate="batch"), question(1, "\n\nIs it dark?"))
    feed = ChainFeed(texts_of(8), 2, passes=lambda row, call, value: value > 0.5)
    engine.run(calls, feed, budget=64)
    assert len(feed.answers[0]) == 8
    assert 0 < len(feed.answers[1]) < 8


def test_a_threshold_moves_the_boundary(engine):
    texts = texts_of(30)
    scores = ChainFeed(texts, 1)
    engine.run((question(0, "\n\nIs it late?"),), scores)
    for threshold in (0.0, 0.2, 0.5, 0.9, 1.0):
        call = with_options(question(0, "\n\nIs it late?", operator=Operator.IF), threshold=threshold)
        feed = ChainFeed(texts, 1)
        engine.run((call,), feed)
        expected = [scores.answers[0][row] > threshold for row in range(30)]
        assert [feed.answers[0][row] for row in range(30)] == expected


def test_task_and_examples_stand_between_document_and_question(engine):
    options = CallOptions(task_description="Judge.", examples=(("Fine!", "yes"), ("Bad.", "no")))
    call = replace(question(0, "\n\nIs it good?"), options=options)
    ids = engine.prompt(call, "A text.")
    assert engine.tokenizer.decode(ids.tolist()) == (
        "DOCUMENT:\nA text.\n\nJudge.\n\nEXAMPLE:\nFine!\n\nIs it good?\nANSWER: yes"
        "\n\nEXAMPLE:\nBad.\n\nIs it good?\nANSWER: no\n\nIs it good?\nANSWER:"
    )


def test_codes_list_the_labels_and_read_one_row(engine):
    call = with_options(classify(0, ["New York", "New"], text="\n\nThe city is"), label_scoring="codes")
    stage = compile_stage(call, engine.pieces, engine.tokenizer)
    assert not stage.branches
    first, second = label_codes(call, engine.tokenizer)
    expected = f"\n\n{first}: New York\n{second}: New\n\nThe city is"
    assert engine.tokenizer.decode(stage.tail.tolist()) == expected
    feed = ChainFeed(texts_of(3), 1)
    engine.run((call,), feed)
    assert set(feed.answers[0].values()) <= {"New York", "New"}


@pytest.mark.parametrize("calibrate", [None, "content"])
def test_answers_that_hold_little_probability_give_a_warning(engine, calibrate, monkeypatch):
    monkeypatch.setattr(decoder, "MASS_VOCAB_ROWS", 100)
    call = with_options(question(0, "\n\nIs it late?"), calibrate=calibrate)
    run = engine.run((call,), ChainFeed(texts_of(4), 1))
    (warning,) = run.stats.warnings
    assert "less than half" in warning
    assert call.text in warning
    stage = run.stages[0]
    oracle = engine.decoder.head(engine.decoder.head_weight[:3].float())
    expected = torch.softmax(oracle, dim=-1)[:, stage.readout.vocab_ids].sum(dim=1)
    model = PagedDecoder(engine.decoder, engine.arena(1))
    found = model.answer_mass(engine.decoder.head_weight[:3].float(), np.arange(3), stage.readout.vocab_ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_bare_classification_lists_its_labels(engine):
    stage = compile_stage(classify(0, ["x", "y"], text=""), engine.pieces, engine.tokenizer)
    assert engine.tokenizer.decode(stage.tail.tolist()) == "\n\nx\ny\n\nCategory:"


def test_descriptions_are_shown(engine):
    call = replace(classify(0, ["a", "b"]), categories=(Category("a", "the first"), Category("b")))
    stage = compile_stage(call, engine.pieces, engine.tokenizer)
    assert engine.tokenizer.decode(stage.tail.tolist()) == "\n\na (the first)\nb\n\nThe mood is"
