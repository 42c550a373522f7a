"""What is predicted of a statement is what its run counts: with its answers for every kind of statement, with
hints alone where all documents of a table are equally long."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import quail
from quail.config import EngineConfig
from quail.execution import rehearsal
from quail.execution.asks import Asks, Feed, FollowUp, RunControl
from quail.execution.forecast import Forecaster
from quail.execution.rehearsal import rehearse
from quail.execution.runner import Engine
from quail.execution.stages import compile_stage
from quail.plan.logical import AICall
from tests.engine.engines import TinyEngine
from tests.models.tiny import make_tiny

Texts = tuple[str, ...]
Truth = Callable[[AICall, Texts], bool]

WORDS = ["rain", "ship", "pier", "town", "roof", "music", "sea", "laughed", "story", "dull", "dawn", "film"]
KINDS = ("naive", "computed", "reused_rewind", "reused_prefix", "reused_retained", "recomputed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("model"), "llama", seed=3, context=512, layers=1, hidden=16, heads=2
    )


class Noted:
    """Remembers the texts of questions."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], Texts] = {}

    def note(self, batches: tuple[Asks, ...]) -> None:
        for asks in batches:
            texts = zip(*(argument.to_pylist() for argument in asks.arguments), strict=True)
            for key, each in zip(asks.keys.tolist(), texts, strict=True):
                self.texts[asks.call, key] = each


class ToldFeed(Noted):
    """A feed whose questions are answered by a truth, whatever the model says; answers are remembered."""

    def __init__(self, feed: Feed, calls: tuple[AICall, ...], truth: Truth | None, answers: dict) -> None:
        super().__init__()
        self.feed, self.calls, self.truth, self.answers = feed, calls, truth, answers

    done = property(lambda self: self.feed.done)
    num_documents = property(lambda self: self.feed.num_documents)
    row_limited = property(lambda self: self.feed.row_limited)

    def take(self, limit: int) -> tuple[Asks, ...]:
        asks = self.feed.take(limit)
        self.note(asks)
        return asks

    def answered(self, call: int, keys: np.ndarray, values: pa.Array) -> FollowUp:
        texts = [self.texts[call, key] for key in keys.tolist()]
        if self.truth is not None:
            values = pa.array([self.truth(self.calls[call], each) for each in texts])
        self.answers |= {(call, each): value for each, value in zip(texts, values.to_pylist(), strict=True)}
        found = self.feed.answered(call, keys, values)
        self.note(found.asks)
        return found


class KnownAnswers(Noted):
    """Gives the answers of a run that was made before."""

    def __init__(self, answers: dict) -> None:
        super().__init__()
        self.answers = answers

    def asked(self, asks: Asks) -> None:
        self.note((asks,))

    def values(self, call: AICall, keys: np.ndarray) -> pa.Array:
        texts = [self.texts[call.index, key] for key in keys.tolist()]
        return pa.array([self.answers[call.index, each] for each in texts])


class Bench:
    """Runs statements on the tiny engine and predicts them."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = config
        self.session = quail.Session(config)
        self.answers: dict = {}
        self.truth: Truth | None = None
        original = Engine.run

        def told(
            engine: Engine, calls: tuple[AICall, ...], feed: Feed, control: RunControl
        ) -> dict[str, Any]:
            return original(engine, calls, ToldFeed(feed, calls, self.truth, self.answers), control)

        monkeypatch.setattr(Engine, "run", told)

    def run(self, sql: str, order: str = "auto") -> dict[str, int]:
        self.answers.clear()
        report = self.session.sql(sql).run(order=order, progress=False).report
        return {kind: report.tokens[kind] for kind in KINDS}

    def rehearsed(self, sql: str, order: str = "auto") -> dict[str, int]:
        """Predicted from the answers of the run before."""
        forecaster = Forecaster.of(self.config)
        assert forecaster is not None
        bound = self.session.sql(sql)._bound
        found = rehearse(
            bound, self.session._catalog, forecaster, order=order, answers=KnownAnswers(self.answers)
        )
        assert found is not None
        return {kind: getattr(found.tokens, kind) for kind in KINDS[:-1]}

    def explained(self, sql: str, order: str = "auto") -> dict[str, Any]:
        return json.loads(self.session.sql(sql).explain("json", order=order))


@pytest.fixture
def bench(folder, tmp_path, monkeypatch):
    made = []

    def make(**settings: Any) -> Bench:
        given = {
            "model": str(folder),
            "dtype": "float32",
            "layout": "completion",
            "cache_dir": tmp_path,
            "kernels": "reference",
        }
        made.append(Bench(EngineConfig(**{**given, "kv_memory": "16MiB", **settings}), monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.session.close()


def texts_of(rng: np.random.Generator, count: int) -> list[str | None]:
    """Texts of many lengths: some begin alike, some stand twice, some are NULL or empty."""
    start = " ".join(rng.choice(WORDS, 30))
    found: list[str | None] = []
    for _ in range(count):
        text = " ".join(rng.choice(WORDS, int(rng.integers(1, 60))))
        found.append(rng.choice([text, text, f"{start} {text}", found[0] if found else text, "", None]))
    return found


def random_statement(random_: random.Random, num_tables: int) -> str:
    """Filters and joins of up to three tables, in a WHERE, and sometimes in EXISTS, OR and SELECT."""

    def filter_(number: int, table: int) -> str:
        hint = random_.choice(["", ", selectivity := 0.2", ", selectivity := 0.9"])
        return f"AI.IF(PROMPT('Is it about matter {number}? {{0}}', t{table}.body){hint})"

    def join(number: int, left: int, right: int) -> str:
        return f"AI.IF(PROMPT('Do {{0}} and {{1}} agree in {number}?', t{left}.body, t{right}.body))"

    conjuncts = [filter_(i, random_.randrange(num_tables)) for i in range(random_.randint(0, 3))]
    conjuncts = [f"NOT {each}" if random_.random() < 0.2 else each for each in conjuncts]
    if len(conjuncts) > 1 and random_.random() < 0.3:
        conjuncts[:2] = [f"({conjuncts[0]} OR {conjuncts[1]})"]
    tables = list(range(num_tables))
    for number in range(min(2, num_tables - 1)):
        other = number if random_.random() < 0.5 else 0
        kind = random_.choice(["plain", "plain", "plain", "key", "exists", "or"])
        is_free = not any(f"t{number + 1}.body" in conjunct for conjunct in conjuncts)
        if kind == "exists" and number + 1 == num_tables - 1 and is_free:
            tables.remove(number + 1)
            inner = join(number, other, number + 1)
            name = random_.choice(["EXISTS", "NOT EXISTS"])
            conjuncts.append(f"{name} (SELECT 1 FROM t{number + 1} WHERE {inner})")
            continue
        pair = join(number, other, number + 1)
        on_key = f"t{other}.k = t{number + 1}.k"
        conjuncts.append({"key": f"{on_key} AND {pair}", "or": f"({on_key} OR {pair})"}.get(kind, pair))
    random_.shuffle(conjuncts)
    select = "t0.id, " + filter_(9, 0) if random_.random() < 0.3 else "t0.id"
    where = f" WHERE {' AND '.join(conjuncts)}" if conjuncts else ""
    kept = [each for each in tables if each == 0 or f"t{each}." in where] or [0]
    return f"SELECT {select} FROM {', '.join(f't{each}' for each in kept)}{where}"


def few_of(num_seeds: int) -> list:
    """All seeds, those from the eighth on as slow tests."""
    return [pytest.param(seed, marks=pytest.mark.slow) if seed >= 8 else seed for seed in range(num_seeds)]


@pytest.mark.parametrize("seed", few_of(40))
def test_with_the_answers_of_the_run_the_ledger_is_that_of_the_run(bench, seed):
    random_, rng = random.Random(seed), np.random.default_rng(seed)
    settings = {
        "token_budget": random_.choice([64, 300, 2048]),
        "kv_memory": random_.choice(["128KiB", "1MiB", "16MiB"]),
        "prefix_sharing": random_.choice(["auto", "on", "off"]),
        "retention": random_.choice(["auto", "off", "keep"]),
    }
    found = bench(**settings)
    num_tables = random_.randint(1, 3)
    for table in range(num_tables):
        count = random_.randint(2, 9)
        rows = {"id": list(range(count)), "k": [i % 3 for i in range(count)], "body": texts_of(rng, count)}
        found.session.register(f"t{table}", rows)
    sql = random_statement(random_, num_tables)
    found.truth = lambda call, texts: hash_of(call.text, *texts) % 100 < 45
    order = random_.choice(["auto", "auto", "as_written"])
    done = found.run(sql, order)
    assert found.rehearsed(sql, order) == {kind: done[kind] for kind in KINDS[:-1]}, sql


def hash_of(*texts: str) -> int:
    """The same in every process."""
    return int.from_bytes("|".join(texts).encode()) % 1_000_003


@pytest.mark.parametrize("retention", ["auto", "off", "keep"])
def test_the_models_own_answers_serve_as_well(bench, retention):
    found = bench(retention=retention)
    rng = np.random.default_rng(5)
    for table in ("t0", "t1"):
        found.session.register(table, {"id": list(range(9)), "body": texts_of(rng, 9)})
    pair = "AI.IF(PROMPT('Do {0} and {1} agree?', t0.body, t1.body))"
    sql = (
        f"SELECT t0.id, AI.CLASSIFY(t0.body, ['sea', 'town']) FROM t0 LEFT JOIN t1 ON {pair} "
        "WHERE AI.SCORE(PROMPT('Is it about rain? {0}', t0.body)) > 0.5"
    )
    done = found.run(sql)
    assert found.rehearsed(sql) == {kind: done[kind] for kind in KINDS[:-1]}


def digits(rng: np.random.Generator, number: int, length: int) -> str:
    """A text of a token a character, unlike that of any other number."""
    return "".join(map(str, rng.integers(0, 10, length - 3))) + f"{number:03}"


@pytest.mark.parametrize("seed", few_of(20))
def test_hints_that_hold_predict_the_ledger_of_equally_long_documents(bench, seed):
    """Each filter passes one half of the documents that any other one passes; a join that something follows
    matches all pairs."""
    random_, rng = random.Random(seed), np.random.default_rng(seed)
    found = bench(prefix_sharing="off", token_budget=random_.choice([200, 2048]))
    num_tables = random_.randint(1, 3)
    numbers: dict[str, int] = {}
    for table in range(num_tables):
        length = random_.choice([8, 40, 90])
        bodies = [digits(rng, table * 100 + i, length) for i in range(8)]
        numbers |= {body: i for i, body in enumerate(bodies)}
        found.session.register(f"t{table}", {"id": list(range(8)), "body": bodies})
    num_filters = [random_.randint(0, 3 if table == 0 else 1) for table in range(num_tables)]
    conjuncts = [
        f"AI.IF(PROMPT('Is bit {bit} of table {table} set? {{0}}', t{table}.body), selectivity := 0.5)"
        for table, count in enumerate(num_filters)
        for bit in range(count)
    ]
    num_joins = min(num_tables - 1, 2)
    share = 0.5 if num_joins == 1 and not conjuncts else 1.0
    for number in range(num_joins):
        left = random_.choice([0, number])
        conjuncts.append(
            f"AI.IF(PROMPT('Pair {number} of {{0}} and {{1}}?', t{left}.body, t{number + 1}.body), "
            f"selectivity := {share})"
        )
    if not conjuncts:
        conjuncts.append("AI.IF(PROMPT('Is bit 0 of table 0 set? {0}', t0.body), selectivity := 0.5)")
    random_.shuffle(conjuncts)
    sql = f"SELECT t0.id FROM {', '.join(f't{i}' for i in range(num_tables))} WHERE {' AND '.join(conjuncts)}"

    def truth(call: AICall, texts: Texts) -> bool:
        if len(texts) == 2:
            return share == 1.0 or sum(numbers[text] for text in texts) % 2 == 0
        bit = int(call.text.split("bit ")[1][0])
        return bool(numbers[texts[0]] >> bit & 1)

    found.truth = truth
    predicted = found.explained(sql)["predicted"]["tokens"]
    done = found.run(sql)
    assert {kind: predicted[kind] for kind in KINDS[:-1]} == {kind: done[kind] for kind in KINDS[:-1]}, sql


@pytest.mark.parametrize("seed", few_of(60))
def test_exact_selectivities_predict_the_ledger_of_several_joins(bench, seed):
    """Two or three joins that form a tree, and filters of every table, in every order.

    Selectivities are exact in that each filter passes its share of the documents that any others pass, and
    matches are spread: whatever passes in front, each document left has its share of the documents left of the
    other side. Bits of the documents' numbers are such answers, lower ones for filters, the highest for joins.
    """
    random_, rng = random.Random(seed), np.random.default_rng(seed)
    found = bench(
        prefix_sharing="off",
        token_budget=random_.choice([130, 200, 600, 2048]),
        retention=random_.choice(["auto", "auto", "keep"]),
    )
    num_joins = random_.choice([2, 2, 3])
    num_bits = random_.choice([2, 3] if num_joins == 3 else [3, 4])
    numbers: dict[str, int] = {}
    for table in range(num_joins + 1):
        length = random_.choice([8, 40, 90])
        bodies = [digits(rng, table * 100 + i, length) for i in range(2**num_bits)]
        numbers |= {body: i for i, body in enumerate(bodies)}
        found.session.register(f"t{table}", {"id": list(range(2**num_bits)), "body": bodies})
    conjuncts = []
    for table in range(num_joins + 1):
        for bit in random_.sample(range(num_bits - 1), random_.randint(0, num_bits - 1)):
            asks = f"AI.IF(PROMPT('Is bit {bit} of table {table} set? {{0}}', t{table}.body), selectivity := 0.5)"
            conjuncts.append(random_.choice([asks, asks, f"NOT {asks}"]))
    for number in range(num_joins):
        sides = [f"t{random_.choice([0, number])}.body", f"t{number + 1}.body"]
        random_.shuffle(sides)
        share = random_.choice([0.5, 1.0])
        conjuncts.append(
            f"AI.IF(PROMPT('Pair {number} at {share} of {{0}} and {{1}}?', {', '.join(sides)}), "
            f"selectivity := {share})"
        )
    random_.shuffle(conjuncts)
    select = random_.choice(["t0.id", "t0.id, AI.IF(PROMPT('Is bit 0 set? {0}', t1.body))"])
    tables = ", ".join(f"t{i}" for i in range(num_joins + 1))
    sql = f"SELECT {select} FROM {tables} WHERE {' AND '.join(conjuncts)}"

    def truth(call: AICall, texts: Texts) -> bool:
        left, right = (numbers[text] for text in (texts[0], texts[-1]))
        if len(texts) == 2:
            return " at 1.0 " in call.text or (left ^ right) >> (num_bits - 1) == 0
        return bool(left >> int(call.text.split("bit ")[1][0]) & 1)

    found.truth = truth
    predicted = found.explained(sql)["predicted"]["tokens"]
    done = found.run(sql)
    assert {kind: predicted[kind] for kind in KINDS[:-1]} == {kind: done[kind] for kind in KINDS[:-1]}, sql
    assert done["recomputed"] == 0, sql


PAIR = "AI.IF(PROMPT('Does {0} agree with {1}?', l.body, r.body))"


@pytest.mark.parametrize("budget", [64, 2048])
def test_a_join_computes_each_anchor_with_its_frame_once_and_each_partner_suffix(
    bench, folder, tmp_path, budget
):
    found = bench(prefix_sharing="off", token_budget=budget)
    rng = np.random.default_rng(1)
    left = [" ".join(rng.choice(WORDS, 40)) for _ in range(6)]
    right = [" ".join(rng.choice(WORDS, 5)) for _ in range(5)]
    found.session.register("l", {"body": left})
    found.session.register("r", {"body": right})
    sql = f"SELECT count(*) FROM l, r WHERE {PAIR}"
    plan = found.explained(sql)
    oracle = TinyEngine(folder, tmp_path)
    (call,) = found.session.sql(sql)._bound.calls
    stage = compile_stage(call, oracle.pieces, oracle.tokenizer)
    anchors = sum(len(oracle.prefix(text)) + len(stage.frame) for text in left)
    partners = sum(len(oracle.tokenizer.encode_plain([text])[0]) + len(stage.tail) for text in right)
    predicted = plan["predicted"]["tokens"]
    assert plan["blocks"][0]["asks"][0]["join"]["anchor"] == "l.body"
    assert predicted["is_exact"]
    assert predicted["computed"] == anchors + 6 * partners
    assert predicted["naive"] == 5 * anchors + 6 * partners
    assert predicted["reused_rewind"] == 4 * anchors
    assert found.run(sql) == {kind: predicted.get(kind, 0) for kind in KINDS}


def test_a_second_join_computes_no_anchor_document(bench):
    """Its anchors were kept since the first one."""
    found = bench(prefix_sharing="off", token_budget=64)
    rng = np.random.default_rng(1)
    found.session.register("l", {"body": [" ".join(rng.choice(WORDS, 40)) for _ in range(6)]})
    for name in ("r", "s"):
        found.session.register(name, {"body": [" ".join(rng.choice(WORDS, 5)) for _ in range(4)]})
    other = PAIR.replace("r.body", "s.body")
    sql = f"SELECT (SELECT count(*) FROM r WHERE {PAIR}), (SELECT count(*) FROM s WHERE {other}) FROM l"
    predicted = found.explained(sql)["predicted"]["tokens"]
    done = found.run(sql)
    assert predicted["is_exact"]
    assert {kind: predicted[kind] for kind in KINDS[:-1]} == {kind: done[kind] for kind in KINDS[:-1]}


def test_early_stops_are_estimated(bench):
    found = bench()
    rng = np.random.default_rng(2)
    found.session.register("l", {"body": [" ".join(rng.choice(WORDS, 40)) for _ in range(6)]})
    found.session.register("r", {"body": [f"{i} " + " ".join(rng.choice(WORDS, 5)) for i in range(100)]})
    hinted = PAIR.replace("r.body)", "r.body), selectivity := 0.1")
    for sql in (
        f"SELECT 1 FROM l WHERE EXISTS (SELECT 1 FROM r WHERE {hinted})",
        f"SELECT 1 FROM l WHERE NOT EXISTS (SELECT 1 FROM r WHERE {hinted})",
        f"SELECT 1 FROM l SEMI JOIN r ON {hinted}",
        f"SELECT 1 FROM l ANTI JOIN r ON {hinted}",
    ):
        plan = found.explained(sql)
        (asks,) = [ask for block in plan["blocks"] for ask in block["asks"]]
        assert not plan["predicted"]["tokens"]["is_exact"]
        assert not asks["is_exact"]
        assert 6 * 10 <= asks["questions"] == asks["forecast"]["questions"] < 600


def test_a_statement_too_large_to_go_through_is_estimated(bench, monkeypatch):
    found = bench(prefix_sharing="off")
    rng = np.random.default_rng(2)
    found.session.register("l", {"body": [" ".join(rng.choice(WORDS, 40)) for _ in range(20)]})
    found.session.register("r", {"body": [f"{i} " + " ".join(rng.choice(WORDS, 5)) for i in range(20)]})
    filter_ = "AI.IF(PROMPT('Is it about rain? {0}', l.body))"
    for where in (PAIR, f"{PAIR} AND {filter_}"):
        sql = f"SELECT count(*) FROM l, r WHERE {where}"
        rehearsed = found.explained(sql)["predicted"]
        with monkeypatch.context() as patch:
            patch.setattr(rehearsal, "MOST_QUESTIONS", 100)
            estimated = found.explained(sql)["predicted"]
        for kind in ("naive", "computed", "reused_rewind"):
            assert estimated["tokens"][kind] == pytest.approx(rehearsed["tokens"][kind], rel=0.02)
        assert estimated["seconds"] == pytest.approx(rehearsed["seconds"], rel=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "MOST_QUESTIONS", 100)
        plan = found.explained(f"SELECT 1 FROM l WHERE EXISTS (SELECT 1 FROM r WHERE {PAIR})")
        assert plan["predicted"] is None
        assert plan["unknown"] == ["call 0"]
