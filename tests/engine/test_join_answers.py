"""Joins on tiny models: every pair answers as its prompt asked alone, whatever is reused."""

from __future__ import annotations

import numpy as np
import pytest

from quail.errors import RowError
from quail.execution.asks import RunControl
from quail.kv.pages import pages_for
from tests.engine.engines import TinyEngine, assert_equal_answers
from tests.engine.feeds import PairFeed, pair_question
from tests.engine.test_engine import texts_of
from tests.models.tiny import make_tiny

TEMPLATE = ("Does ", 0, " speak of the same thing as ", 1, "?")


@pytest.fixture(scope="module", params=["llama-completion", "qwen3-chat"])
def engine(request, tmp_path_factory):
    family, layout = request.param.split("-")
    folder = make_tiny(tmp_path_factory.mktemp("model"), family, seed=5, context=512)
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"), layout=layout)


def expected_of(engine, feed: PairFeed) -> dict:
    found = {}
    for key, (c, a, p) in enumerate(feed.pairs):
        call = feed.calls[c]
        anchor, partner = feed.sides[call.anchor][a], feed.sides[1 - call.anchor][p]
        found[key, c] = engine.oracle_answer(call, anchor, partner)
    return found


@pytest.mark.parametrize("anchor", [0, 1])
@pytest.mark.parametrize("budget", [16, 128, 2048])
@pytest.mark.parametrize("ample", [False, True])
def test_pairs_answer_as_if_asked_alone(engine, anchor, budget, ample):
    left, right = texts_of(6, 30, seed=1), [*texts_of(5, 12, seed=2), "", texts_of(1, 80, seed=3)[0]]
    calls = (pair_question(0, TEMPLATE, anchor=anchor),)
    feed = PairFeed(left, right, calls)
    longest = max(len(engine.prompt(calls[0], a, b)) for a in left for b in right)
    pages = 600 if ample else pages_for(longest) + 2
    run = engine.run(calls, feed, budget=budget, pages=pages, retain=ample)
    assert_equal_answers(run, expected_of(engine, feed))


def test_computed_is_anchors_and_frames_once_and_partners_each(engine):
    left, right = texts_of(5, 30, seed=4), texts_of(7, 12, seed=5)
    calls = (pair_question(0, TEMPLATE),)
    run = engine.run(calls, PairFeed(left, right, calls), budget=256, pages=600)
    frame = run.stages[0].frame
    anchors = sum(len(engine.prefix(text)) + len(frame) for text in left)
    behind = [len(engine.tokenizer.encode_plain([t])[0]) + len(run.stages[0].tail) for t in right]
    assert run.scheduler.ledger.computed == anchors + 5 * sum(behind)
    assert run.scheduler.ledger.recomputed == 0


@pytest.mark.parametrize("pool_pages", [0, 6, 600])
def test_two_joins_on_the_same_anchors(engine, pool_pages):
    left, right = texts_of(8, 30, seed=6), texts_of(4, 12, seed=7)
    calls = (pair_question(0, TEMPLATE), pair_question(1, ("Is ", 1, " a summary of ", 0, "?")))
    feed = PairFeed(left, right, calls)
    run = engine.run(calls, feed, budget=128, pages=600, retain=True, pool_pages=pool_pages)
    assert_equal_answers(run, expected_of(engine, feed))
    anchor_tokens = sum(len(engine.prefix(text)) for text in left)
    if pool_pages == 600:
        assert run.scheduler.ledger.reused_retained > 0
        assert run.scheduler.ledger.recomputed == 0
    else:
        assert 0 < run.scheduler.ledger.recomputed <= anchor_tokens


def test_a_pair_too_long_only_jointly(engine):
    room = engine.context_tokens
    call = pair_question(0, TEMPLATE)
    fixed = len(engine.prompt(call, "", ""))
    half = (room - fixed) // 2
    left, right = ["a", "1" * half], ["b", "2" * (room - fixed - half), "2" * (room - fixed - half + 1)]
    feed = PairFeed(left, right, (call,))
    run = engine.run((call,), feed, pages=200, control=RunControl(on_error="null"))
    assert [pair for pair, value in feed.values.items() if value is None] == [(0, 1, 2)]
    assert str(room) in run.failures.log.first()[0]["message"]
    with pytest.raises(RowError, match=rf"prompt of {room + 1} tokens .* context of {room}"):
        engine.run((call,), PairFeed(left, right, (call,)), pages=200)
    feed = PairFeed(left, right, (call,))
    run = engine.run((call,), feed, pages=200, control=RunControl(on_long="truncate"))
    assert run.intake.num_truncated == 1
    expected = expected_of(engine, PairFeed(left, right[:2], (call,)))
    names = {(a, p): key for key, (_, a, p) in enumerate(feed.pairs)}
    for (key, _), oracle in expected.items():
        _, a, p = PairFeed(left, right[:2], (call,)).pairs[key]
        np.testing.assert_allclose(run.logits[names[a, p], 0], oracle, atol=1e-3)
    cut = engine.oracle_answer(call, left[1][:-1], right[2])
    np.testing.assert_allclose(run.logits[names[1, 2], 0], cut, atol=1e-3)


def test_a_partner_that_leaves_its_anchor_no_room_is_cut_too(engine):
    call = pair_question(0, TEMPLATE)
    room = engine.context_tokens - len(engine.prompt(call, "", ""))
    left, right = ["a", "1" * room], ["2" * (2 * room)]
    feed = PairFeed(left, right, (call,))
    run = engine.run((call,), feed, pages=200, control=RunControl(on_long="truncate"))
    assert run.intake.num_truncated == 3
    partner = right[0][: room // 2]
    for key, anchor in enumerate(("a", left[1][: room - room // 2])):
        oracle = engine.oracle_answer(call, anchor, partner)
        np.testing.assert_allclose(run.logits[key, 0], oracle, atol=1e-3)
