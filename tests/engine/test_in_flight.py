"""Two passes in flight give the answers of one at a time, end as soon, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import quail
from quail.config import EngineConfig
from quail.errors import QueryCancelled
from quail.execution.asks import FollowUp, RunControl
from quail.execution.run import Limits
from quail.kv.pages import pages_for
from quail.models.pending import CopiedBehind, copied
from tests.engine.deferred import Deferred, Ordered
from tests.engine.engines import TinyEngine, assert_equal_answers
from tests.engine.feeds import ChainFeed, PairFeed, pair_question, question
from tests.engine.test_engine import CALLS, texts_of
from tests.models.tiny import make_tiny

WRAPPED = pytest.mark.parametrize("wrapped", [lambda model: model, Deferred], ids=["at once", "late"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    folder = make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=3, context=512)
    return TinyEngine(folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def case(tiny: TinyEngine) -> Any:
    texts = [*texts_of(40), "", " ", "a", texts_of(1, 200, seed=9)[0]]
    expected = {(d, q): tiny.oracle_answer(CALLS[q], text) for d, text in enumerate(texts) for q in range(3)}
    return texts, expected


@WRAPPED
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("arena", ["smallest", "ample"])
def test_answers_do_not_depend_on_passes_in_flight(
    tiny: TinyEngine, case: Any, wrapped: Any, depth: int, budget: int, arena: str
) -> None:
    texts, expected = case
    longest = max(len(tiny.prefix(text)) for text in texts)
    suffix = max(len(tiny.prompt(call, "a")) - len(tiny.prefix("a")) for call in CALLS)
    pages = pages_for(longest + (suffix if suffix > budget else 0)) if arena == "smallest" else 2000
    run = tiny.run(CALLS, ChainFeed(texts, 3), budget=budget, pages=pages, depth=depth, wrapped=wrapped)
    assert_equal_answers(run, expected)
    alone = tiny.run(CALLS, ChainFeed(texts, 3), budget=budget, pages=pages)
    assert run.scheduler.ledger.as_dict() == alone.scheduler.ledger.as_dict()
    if wrapped is Deferred and arena == "ample" and budget < 512:
        assert isinstance(run.model, Deferred)
        assert run.model.most_in_flight == depth


@WRAPPED
def test_joins_and_kept_kv_with_passes_in_flight(tiny: TinyEngine, wrapped: Any) -> None:
    calls = tuple(
        pair_question(q, (f"Question {q}: is ", 0, " like ", 1, "?"), anchor=anchor)
        for q, anchor in enumerate((0, 1, 0))
    )
    anchors, partners = texts_of(7, 40, seed=1), texts_of(6, 30, seed=2)
    for budget, pages in ((32, 40), (64, 24), (512, 200)):
        values = []
        for depth, wrap in ((1, lambda model: model), (2, wrapped)):
            feed = PairFeed(anchors, partners, calls)
            run = tiny.run(
                calls, feed, budget=budget, pages=pages, retain=True, pool_pages=16, depth=depth, wrapped=wrap
            )
            run.scheduler.ledger.check()
            values.append(feed.values)
        assert values[0].keys() == values[1].keys()
        for pair, value in values[0].items():
            assert values[1][pair] == pytest.approx(value, abs=1e-5), pair


@WRAPPED
def test_a_row_limit_ends_with_at_most_two_passes_more(tiny: TinyEngine, wrapped: Any) -> None:
    texts = texts_of(500)
    used = {}
    for depth, wrap in ((1, lambda model: model), (2, wrapped)):
        feed = ChainFeed(texts, 2, stop_after=5)
        run = tiny.run(CALLS[:2], feed, budget=128, depth=depth, wrapped=wrap, retain=True)
        assert len(feed.answers[1]) >= 5
        ledger = run.scheduler.ledger
        used[depth] = ledger.computed + ledger.wasted
    assert used[2] <= used[1] + 2 * 128
    assert used[2] > used[1], "the pass in flight at the end is counted"


@pytest.mark.parametrize("late", [Deferred, Ordered], ids=["never", "late"])
def test_kv_of_passes_that_are_dropped_is_kept_nowhere(tiny: TinyEngine, late: type[Deferred]) -> None:
    """A row limit ends a run while a pass is in flight; the next run on the same pool asks about its rows. The
    pass never runs, or as the next run's first is waited for.
    """
    texts, num_lost = texts_of(60), 0
    expected = {(d, q): tiny.oracle_answer(CALLS[q], text) for d, text in enumerate(texts) for q in (0, 1)}
    for stop_after in range(1, 12):
        arena = tiny.arena(300)
        models = []

        def on_one_arena(model: Any, arena: Any = arena, models: Any = models) -> Any:
            model.arena = arena
            if not models:
                models.append(late(model))
            return models[0]

        limited = ChainFeed(texts, 2, stop_after=stop_after)
        run = tiny.new_run(
            CALLS[:2], limited, budget=96, pages=300, depth=2, wrapped=on_one_arena, retain=True
        )
        run.run()
        pool = run.scheduler.pool
        num_lost += run.scheduler.num_passes - models[0].num_run
        again = tiny.new_run(
            CALLS[:2],
            ChainFeed(texts, 2),
            budget=96,
            pages=300,
            wrapped=on_one_arena,
            retain=True,
            pool=pool,
        )
        again.run()
        num_planned = run.scheduler.num_passes + again.scheduler.num_passes
        if late is Ordered:
            assert models[0].num_run == num_planned
        assert again.scheduler.ledger.reused_retained > 0
        assert_equal_answers(again, expected)
        pool.clear()
        assert arena.pages.num_free_pages == 300
    assert num_lost >= 8, "runs ended while a pass was in flight"


def test_cancelling_runs_no_further_pass(tiny: TinyEngine) -> None:
    for stop_at in range(12):
        models: list[Deferred] = []
        seen: list[int] = []

        def wrapped(model: Any, models: list[Deferred] = models) -> Deferred:
            models.append(Deferred(model))
            return models[0]

        def cancelled(stop_at: int = stop_at, models: Any = models, seen: Any = seen) -> bool:
            seen.append(models[0].num_run)
            return len(seen) > stop_at

        with pytest.raises(QueryCancelled):
            tiny.run(
                CALLS,
                ChainFeed(texts_of(30), 3),
                budget=64,
                control=RunControl(cancelled=cancelled),
                depth=2,
                wrapped=wrapped,
            )
        assert models[0].num_run == seen[-1]


@pytest.mark.parametrize("how", ["start", "answers"])
def test_an_exception_gives_everything_back(tiny: TinyEngine, how: str) -> None:
    for stop_at in range(8):
        wrapped = failing_at(stop_at, how, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            tiny.run(CALLS, ChainFeed(texts_of(30), 3), budget=64, depth=2, wrapped=wrapped)


@pytest.mark.parametrize("how", ["start", "answers"])
@pytest.mark.parametrize("retain", [False, True])
def test_a_pass_that_does_not_fit_loses_those_in_flight_and_no_answer(
    tiny: TinyEngine, case: Any, how: str, retain: bool
) -> None:
    texts, expected = case
    for stop_at in range(0, 14, 3):
        wrapped = failing_at(stop_at, how, MemoryError)
        run = tiny.run(
            CALLS, ChainFeed(texts, 3), budget=256, pages=60, depth=2, wrapped=wrapped, retain=retain
        )
        assert_equal_answers(run, expected)
        assert 64 <= run.scheduler.token_budget <= 128
        (warning,) = [each for each in run.stats.warnings if "did not fit" in each]
        assert "did not fit into memory; the run went on with" in warning
        assert run.scheduler.ledger.wasted > 0


@pytest.mark.parametrize("how", ["start", "answers"])
def test_a_small_pass_that_does_not_fit_beside_a_large_one(tiny: TinyEngine, how: str) -> None:
    """The large one, in flight before it, has the memory: half of that, and no error that it cannot be made
    smaller.
    """
    texts = [texts_of(1, 200, seed=9)[0], "a"]
    sizes: list[int] = []

    class Short(Deferred):
        def start(self, chunk: Any, reads: Any) -> Any:
            sizes.append(len(chunk))
            if len(sizes) != 2:
                return super().start(chunk, reads)
            if how == "start":
                raise MemoryError
            return Fails()

    class Fails:
        def answers(self) -> Any:
            raise MemoryError

    budget = len(tiny.prompt(CALLS[0], texts[0]))
    run = tiny.run(CALLS[:1], ChainFeed(texts, 1), budget=budget, depth=2, wrapped=Short)
    assert_equal_answers(
        run, {(row, 0): tiny.oracle_answer(CALLS[0], text) for row, text in enumerate(texts)}
    )
    assert sizes[1] < 64 < budget // 2 == run.scheduler.token_budget
    (warning,) = [each for each in run.stats.warnings if "did not fit" in each]
    assert f"passes of up to {budget:,} tokens did not fit into memory" in warning


def failing_at(number: int, how: str, error: type[BaseException]) -> Any:
    """A deferring model of which one start, or one pass as it runs, fails."""

    class Failing(Deferred):
        def start(self, chunk: Any, reads: Any) -> Any:
            self.num_started = getattr(self, "num_started", -1) + 1
            if how == "start" and self.num_started == number:
                raise error
            return super().start(chunk, reads)

    class FailingModel:
        def __init__(self, model: Any) -> None:
            self.model, self.count = model, -1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def start(self, chunk: Any, reads: Any) -> Any:
            self.count += 1
            if how == "answers" and self.count == number:
                raise error
            return self.model.start(chunk, reads)

    return lambda model: Failing(FailingModel(model))


# -- whole statements

STATEMENTS = {
    "filter": "SELECT id FROM l WHERE AI.IF(PROMPT('Is this about the sea? {0}', body)) ORDER BY id",
    "chain": "SELECT id FROM l WHERE AI.IF(PROMPT('Sea? {0}', body)) AND AI.SCORE(PROMPT('{0} Dull?', body)) > 0.1",
    "classes": "SELECT id, AI.CLASSIFY(PROMPT('{0} This is', body), ['good', 'bad', 'badly made']) FROM l",
    "limit": "SELECT count(*) FROM (SELECT id FROM l WHERE AI.IF(PROMPT('Sea? {0}', body)) LIMIT 3)",
    "join": "SELECT l.id, r.id FROM l, r WHERE AI.IF(PROMPT('Does {0} fit {1}?', l.body, r.body)) ORDER BY ALL",
    "exists": "SELECT id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE AI.IF(PROMPT('Is {0} as {1}?', l.body, r.body)))",
    "batch": "SELECT id, AI.SCORE(PROMPT('{0} Good?', body), calibrate := 'batch') FROM l ORDER BY id",
    "content": "SELECT id, AI.IF(PROMPT('{0} Good?', body), calibrate := 'content') FROM l ORDER BY id",
}


def opened(folder: Any, cache: Any, depth: int, **settings: Any) -> quail.Session:
    given = {"dtype": "float32", "kv_memory": "2MiB", "token_budget": 128, "answers": "off"} | settings
    session = quail.Session(
        EngineConfig(model=str(folder), device="cpu", threads=1, cache_dir=cache, **given)
    )
    texts = texts_of(40, 30, seed=5)
    session.register("l", {"id": list(range(60)), "body": texts + [f"{t} again" for t in texts[:20]]})
    session.register("r", {"id": list(range(24)), "body": texts_of(24, 12, seed=6)})
    session.sql("SELECT AI.IF(PROMPT('{0}?', 'x'))").run(progress=False)
    engine: Any = session._engine
    limits = engine.limits
    engine.limits = Limits(limits.token_budget, limits.context_tokens, depth)
    engine.model = Deferred(engine.model)
    return session


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("chain", "classes", "content") else name
        for name in STATEMENTS
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="auto"),
        pytest.param({"prefix_sharing": "on", "retention": "keep"}, id="keep", marks=pytest.mark.slow),
    ],
)
def test_statements(tmp_path_factory: pytest.TempPathFactory, statement: str, settings: Any) -> None:
    folder = make_tiny(tmp_path_factory.mktemp("model"), "llama", seed=4, context=512)
    found = []
    for depth in (1, 2):
        with opened(folder, tmp_path_factory.mktemp("cache"), depth, **settings) as session:
            first = session.sql(STATEMENTS[statement]).run(progress=False, audit=0.2)
            second = session.sql(STATEMENTS[statement]).run(progress=False)
            assert rows_of(first) == rows_of(second)
            assert first.report.audit["beyond_tolerance"] == 0
            engine: Any = session._engine
            assert engine.is_sound
            assert engine.model.most_in_flight == depth
            found.append((rows_of(first), first.report.tokens))
    (rows, tokens), (rows_ahead, tokens_ahead) = found
    assert rows == rows_ahead
    if statement not in ("limit", "exists"):
        assert tokens["naive"] == tokens_ahead["naive"]


def rows_of(result: Any) -> list[Any]:
    """Rows with figures rounded to what float32 keeps of them."""
    return sorted(
        tuple(round(value, 4) if isinstance(value, float) else value for value in row)
        for row in result.fetchall()
    )


def test_a_search_for_the_first_match_asks_no_wave_too_many(tmp_path: Any) -> None:
    """Partners of a row are asked a wave at a time, however many passes are in flight."""
    folder = make_tiny(tmp_path / "model", "llama", seed=4, context=512)
    evaluated = []
    for depth in (1, 2):
        with opened(folder, tmp_path / f"cache{depth}", depth) as session:
            report = session.sql(STATEMENTS["exists"]).run(progress=False).report
            evaluated.append(sum(stage["evaluated"] for stage in report.stages))
    assert evaluated[1] <= evaluated[0]
    assert np.isclose(evaluated[0], evaluated[1], rtol=0.2)


def test_questions_about_one_document_in_neighbouring_passes(tiny: TinyEngine) -> None:
    """Known follow-ups, submitted while the document is in flight, wait for nothing and read right KV."""
    text = texts_of(1, 60, seed=8)[0]
    calls = tuple(question(q, f"\n\nQuestion number {q}: is it so?") for q in range(6))

    class AllAtOnce(ChainFeed):
        """All questions of a document at once."""

        def take(self, limit: int) -> Any:
            if self.taken:
                return ()
            self.taken = 1
            return tuple(self._asks([0], call) for call in range(6))

        def answered(self, call: int, keys: Any, values: Any) -> Any:
            self.outstanding -= len(keys)
            return FollowUp()

    for budget in (32, 64, 128, 512):
        feed = AllAtOnce([text], 6)
        run = tiny.run(calls, feed, budget=budget, depth=2, wrapped=Deferred)
        assert_equal_answers(run, {(0, q): tiny.oracle_answer(call, text) for q, call in enumerate(calls)})
        assert run.scheduler.ledger.recomputed == 0


# -- answers on their way from a device


class FakeEvent:
    def __init__(self, fill: Any) -> None:
        self.fill, self.num_waits = fill, 0

    def synchronize(self) -> None:
        self.num_waits += 1
        self.fill()


def test_answers_are_read_once_the_copy_is_done() -> None:
    found = [torch.arange(6.0).reshape(2, 3), torch.zeros(0, 4), torch.tensor([7.0, 8.0])]
    source = copied(found, pinned=False)
    host = torch.full_like(source, float("nan"))
    event = FakeEvent(lambda: host.copy_(source))
    pending = CopiedBehind(host, [tuple(each.shape) for each in found], event)
    assert event.num_waits == 0
    answers = pending.answers()
    host.zero_()  # the memory is used again
    for answer, each in zip(answers, found, strict=True):
        np.testing.assert_array_equal(answer, each.numpy())


def test_a_pass_without_answers_is_waited_for() -> None:
    event = FakeEvent(lambda: None)
    assert CopiedBehind(copied([], pinned=False), [], event).answers() == []
    assert event.num_waits == 1


def test_a_device_that_lacks_memory_gets_the_buffers_of_passes_back(
    tiny: TinyEngine, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the CPU's: smaller passes, the same answers; and the buffers of the large ones are not kept."""
    texts, expected = case
    rotate, sizes = tiny.decoder.kernels.rotate, []

    def short_of_memory(heads: torch.Tensor, *rest: Any) -> None:
        sizes.append(len(heads))
        if len(heads) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total")
        rotate(heads, *rest)

    monkeypatch.setattr(tiny.decoder.kernels, "rotate", short_of_memory)
    monkeypatch.setattr(tiny.decoder, "_workspace", None)
    run = tiny.run(CALLS, ChainFeed(texts, 3), budget=256, pages=300, depth=2)
    assert_equal_answers(run, expected)
    assert run.scheduler.token_budget < 128
    assert max(sizes) > 100
    assert tiny.decoder._workspace.num_rows <= 100
    assert tiny.decoder.kernels._gate_up is None or len(tiny.decoder.kernels._gate_up) <= 100
    assert any("did not fit into memory" in warning for warning in run.stats.warnings)
