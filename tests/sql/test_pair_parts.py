"""Pairs in parts, as a model answers them: late, in any order, with passes in between."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from quail.execution import reading
from quail.execution.anchor_gate import AnchorGate
from quail.execution.answers import CallAnswers, Texts
from quail.execution.asks import Asks
from quail.execution.pairs import FirstMatch
from quail.execution.relational import RelationalRun
from tests.sql.stub import Key, StubCatalog, keys_of, rows
from tests.sql.test_joins import start, tables

NUM_LEFT, NUM_RIGHT = 13, 12
PAIR = "AI.IF(PROMPT('{0} and {1}', l.body, r.word))"
SEARCHES = {
    "exists": "SELECT l.id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE l.k = r.k AND {})",
    "overlapping": "SELECT l.id FROM l WHERE EXISTS (SELECT 1 FROM r WHERE (l.k + r.id) % 3 > 0 AND {})",
    "not exists": "SELECT l.id FROM l WHERE NOT EXISTS (SELECT 1 FROM r WHERE {})",
    "semi": "SELECT l.id FROM (SELECT * FROM l) AS l SEMI JOIN r ON l.k = r.k AND {}",
    "anti": "SELECT l.id FROM (SELECT * FROM l) AS l ANTI JOIN r ON {}",
}
OTHERS = {
    "inner": "SELECT l.id, r.id AS rid FROM l JOIN r ON {}",
    "filtered": "SELECT l.id, r.id AS rid FROM l, r WHERE {} AND AI.IF('ok? ' || r.word)",
    "left": "SELECT l.id, r.id AS rid FROM l LEFT JOIN r ON l.k = r.k AND {}",
    "selected": "SELECT l.id, r.id AS rid, {} AS a FROM l, r",
}


class Late:
    """Answers some of the questions that are out, in any order, and takes others meanwhile.

    Args:
        answer: the truth of argument texts.
        batch: the most questions answered at once.
        asked: told of questions as they come, and of the answers there are by then.
    """

    def __init__(
        self,
        answer: Callable[[Key], bool | None],
        batch: int,
        rng: np.random.Generator,
        asked: Callable[[list[Key], dict[Key, bool | None]], None] = lambda keys, known: None,
    ) -> None:
        self._answer, self._batch, self._rng, self._note = answer, batch, rng, asked
        self.known: dict[Key, bool | None] = {}
        self.asked: list[Key] = []
        self.most_key = 0

    def run(self, running: RelationalRun) -> None:
        out: list[Asks] = []
        while not running.feed.done:
            if not out or self._rng.random() < 0.3:
                fresh = running.feed.take(int(self._rng.integers(1, 3 * self._batch + 1)))
                assert out or fresh, "the feed is not done but has no question"
                out += self._noted(fresh)
            asks = out.pop(int(self._rng.integers(len(out))))
            order = self._rng.permutation(len(asks))
            if len(asks) > self._batch:
                out.append(asks.taken(order[self._batch :]))
                asks = asks.taken(order[: self._batch])
            values = [self._answer(key) for key in keys_of(asks)]
            self.known.update(zip(keys_of(asks), values, strict=True))
            follow = running.feed.answered(asks.call, asks.keys, pa.array(values, pa.bool_()))
            out += self._noted(follow.asks)

    def _noted(self, batches: tuple[Asks, ...]) -> list[Asks]:
        for asks in batches:
            self._note(keys_of(asks), self.known)
            self.asked += keys_of(asks)
            self.most_key = max(self.most_key, int(asks.keys.max()))
        return list(batches)


def truth_of(key: Key) -> bool | None:
    if len(key) == 1:
        return "right 3 " not in key[0]
    left, right = (int(text.split()[1]) for text in sorted(key))
    code = (left * 5 + right * 3) % 7
    return None if code == 0 else code in (1, 4) and left % 4 != 3


def some_tables() -> StubCatalog:
    """Rows that share a text, and so their questions; texts that are NULL."""
    some = tables(left=NUM_LEFT, right=NUM_RIGHT, groups=2)
    some.connection.execute("INSERT INTO l SELECT id + 100, 1 - k, body FROM l WHERE id < 9")
    some.connection.execute("INSERT INTO l VALUES (200, 1, NULL); INSERT INTO r VALUES (200, 1, NULL)")
    return some


def expected_of(sql: str, some: StubCatalog) -> list[tuple[object, ...]]:
    left, right = (f"split_part({column}, ' ', 2)::INT" for column in ("l.body", "r.word"))
    code = f"({left} * 5 + {right} * 3) % 7"
    plain = sql.replace("AI.IF('ok? ' || r.word)", "r.word NOT LIKE 'right 3 %'")
    return some.connection.sql(
        plain.format(
            f"CASE WHEN {code} = 0 THEN NULL WHEN {code} > 0 AND {left} % 4 = 3 THEN false ELSE {code} IN (1, 4) END"
        )
    ).fetchall()


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("block", [3, 30])
@pytest.mark.parametrize(
    ("kind", "wave"), [*itertools.product(SEARCHES, (2, 16)), *((kind, 2) for kind in OTHERS)]
)
def test_rows_do_not_depend_on_when_answers_come(
    kind: str, block: int, wave: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_ROWS", block)
    sql = (SEARCHES | OTHERS)[kind]
    some = some_tables()
    conditions = ("l.k = r.k", "(l.k + r.id) % 3 > 0")
    condition = next((condition for condition in conditions if condition in sql), "true")
    of_body: dict[str, list[tuple[int, list[Key]]]] = {}
    pairs = some.connection.sql(
        f"SELECT l.id, body, list(word) FROM l, r WHERE {condition}"
        " AND body IS NOT NULL AND word IS NOT NULL GROUP BY ALL"
    ).fetchall()
    for id_, body, words in pairs:
        of_body.setdefault(body, []).append((id_, [(body, word) for word in words]))

    def is_needed(keys: list[Key], known: dict[Key, bool | None]) -> None:
        for key in keys if kind in SEARCHES else ():
            reading_it = [own for _, own in of_body[key[0]] if key in own]
            assert any(not any(known.get(pair) for pair in own) for own in reading_it), (
                "a pair is asked although all its rows have their match"
            )

    for seed in range(2):
        running = start(sql.format(PAIR), some, exists_wave=wave)
        late = Late(truth_of, batch, np.random.default_rng(seed), is_needed)
        late.run(running)
        assert sorted(map(repr, rows(running.result()))) == sorted(map(repr, expected_of(sql, some)))
        running.close()
        assert len(set(late.asked)) == len(late.asked)
        if kind != "filtered":
            assert late.most_key < block + NUM_LEFT + NUM_RIGHT, "more than a part is held"


def test_questions_that_are_out_are_not_forgotten() -> None:
    texts = Texts(null_hash=0)
    hashes = np.arange(1, 4, dtype=np.uint64)
    texts.add(hashes, hashes, pa.chunked_array([["a", "b", "c"]]))
    answers = CallAnswers(2, pa.bool_(), texts)
    keys = answers.register(np.array([[0, 1], [0, 2]]), np.arange(2))
    answers.asked[keys] = True
    answers.store(keys[:1], pa.array([True]))
    assert answers.has_outstanding
    with pytest.raises(AssertionError, match="before its answer is there"):
        answers.forget(1)
    answers.store(keys[1:], pa.array([None], pa.bool_()))
    answers.forget(1)
    assert len(answers) == 0
    assert answers.lookup([hashes[[0, 0]], hashes[[1, 2]]]).to_pylist() == [True, None]


def test_a_row_that_a_known_answer_closes_asks_nothing_more() -> None:
    """What another search found out ends this one in the middle of a wave."""
    texts = Texts(null_hash=0)
    hashes = np.arange(1, 6, dtype=np.uint64)
    texts.add(hashes, hashes, pa.chunked_array([["left", "p", "q", "r", "s"]]))
    answers = CallAnswers(2, pa.bool_(), texts)
    keys = answers.register(np.array([[0, 1], [0, 2], [0, 3], [0, 4]]), np.arange(4))
    answers.asked[keys[2:3]] = True
    answers.store(keys[2:3], pa.array([True]))
    group = FirstMatch(0, answers, keys, np.zeros(4, np.int64), wave=2, anchor=0, releases=False)
    (due,) = group.take(10)
    answers.asked[due.keys] = True
    assert due.keys.tolist() == keys[:2].tolist()
    answers.store(due.keys, pa.array([False, False]))
    found, _ = group.answered(0, due.keys)
    assert not found
    assert group.is_settled


@pytest.mark.alone
def test_a_gate_of_many_anchors_takes_time_for_its_rows_alone() -> None:
    num_anchors = 100_000
    rng = np.random.default_rng(5)
    anchors = rng.permutation(np.repeat(np.arange(num_anchors), 2))
    gate = AnchorGate(np.arange(2 * num_anchors), anchors)
    first = np.sort(np.unique(anchors, return_index=True)[1])
    second = np.setdiff1d(np.arange(2 * num_anchors), first)
    started = time.process_time()
    gate.arrived(first)
    assert not len(gate.sift(first)), "each anchor waits for its other pair"
    assert not len(gate.opened())
    gate.arrived(second[::2])
    open_now = gate.sift(second[::2])
    assert open_now.tolist() == second[::2].tolist()
    opened = gate.opened()
    gate.arrived(second[1::2])
    assert gate.sift(second[1::2]).tolist() == second[1::2].tolist()
    later = gate.opened()
    assert time.process_time() - started < 3
    is_first = np.isin(anchors[first], anchors[second[::2]])
    assert opened.tolist() == first[is_first].tolist()
    assert later.tolist() == first[~is_first].tolist()
