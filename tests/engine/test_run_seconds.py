"""Seconds of a run are of one thing each, also while a device works on: by a clock that stands still by itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quail.execution.asks import RunControl
from quail.execution.reads import Pending
from tests.engine.engines import TinyEngine
from tests.engine.feeds import ChainFeed
from tests.engine.test_engine import CALLS, texts_of
from tests.models.tiny import make_tiny

START, HOST, TOKENIZE = 1.0, 7.0, 3.0
"""Seconds that starting a pass takes on the host, answers of a batch in the feed, and
texts in the tokenizer."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    folder = make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=3, context=512)
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"))


class Clock:
    """Time, and when the device will be done with what was started."""

    def __init__(self, pass_seconds: float) -> None:
        self.now = self.device_done = 0.0
        self.pass_seconds = pass_seconds
        self.num_started = 0

    def tick(self, seconds: float) -> None:
        self.now += seconds


class Timed:
    """A model on a device that takes its time, one pass behind another, while the host does something else."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self.model, self.clock = model, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def start(self, chunk: Any, reads: Any) -> Pending:
        clock = self.clock
        found = self.model.start(chunk, reads)
        clock.tick(START)
        clock.num_started += 1
        clock.device_done = done = max(clock.now, clock.device_done) + clock.pass_seconds

        class Waited:
            def answers(self) -> Any:
                clock.now = max(clock.now, done)
                return found.answers()

        return Waited()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("audit", [0.0, 0.3])
@pytest.mark.parametrize("pass_seconds", [0.5, 5.0, 100.0])
def test_seconds_add_up(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, depth: int, audit: float, pass_seconds: float
) -> None:
    clock = Clock(pass_seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    num_answered = num_tokenized = 0

    class Feed(ChainFeed):
        def answered(self, call: int, keys: Any, values: Any) -> Any:
            nonlocal num_answered
            num_answered += 1
            clock.tick(HOST)
            return super().answered(call, keys, values)

    run = tiny.new_run(
        CALLS,
        Feed(texts_of(30), 3),
        budget=64,
        depth=depth,
        control=RunControl(audit=audit),
        wrapped=lambda model: Timed(model, clock),
    )
    encode = run.intake.encoder.encode

    def slowly(*arguments: Any) -> Any:
        nonlocal num_tokenized
        num_tokenized += 1
        clock.tick(TOKENIZE)
        return encode(*arguments)

    monkeypatch.setattr(run.intake.encoder, "encode", slowly)
    run.run()
    audited = clock.num_started - run.scheduler.num_passes
    audit_seconds = run.stats.audit.get("seconds", 0.0)
    assert bool(audited) == bool(audit)
    assert audit_seconds == pytest.approx(audited * (START + pass_seconds)), (
        "audits wait for their own passes"
    )
    assert run.intake.tokenize_seconds == num_tokenized * TOKENIZE > 0
    own = run.stats.forward_seconds + audit_seconds + run.intake.tokenize_seconds
    assert own + num_answered * HOST == pytest.approx(clock.now), "each second of the run is of one thing"
    alone = (clock.num_started - audited) * (START + pass_seconds)
    if depth == 1:
        assert run.stats.forward_seconds == pytest.approx(alone)
    else:
        assert run.stats.forward_seconds < alone, "the device works while the host does something else"
